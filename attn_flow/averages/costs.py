"""What each way to an average costs: a model whose constants were measured, for each of torch's instruction sets.

For m queries and n keys of width k with values of width v, in processor time,

    dense    m n (pair + entry (k + v))                                 every pair, in the kernel of its dtype
    near     look n + fixed + order n log2 n + bound m n / 64 + near share m n
                                                                        foreseen, sorted, bounded in patches; then pairs
    circle   circle + term K (m + n)                                    K terms of a Fourier series

so that a way is chosen by what it will take, and not by a size that suited one processor. Which way is fastest depends
on ratios of these constants alone. They are not measured in the running process: the same call on the same kind of
machine takes the same way, and gives the same bits. `attn-flow bench choice` times every way beside the chosen one,
counts wrong choices, and fits the constants anew; `with assumed(costs):` takes them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cached_property

import torch


@dataclass(frozen=True)
class Costs:
    """Seconds of one thread; *64: in float64. hard, masked: a pair of a hardmax, and of near keys under a mask.

    faint: how many times as long a pair takes where most weights underflow. look: to foresee what is near, for a key.
    kernel*: of the compiled kernel.
    """

    pair: float
    entry: float
    pair64: float
    entry64: float
    faint: float
    hard: float
    look: float
    fixed: float
    order: float
    bound: float
    near: float
    near64: float
    masked: float
    near_hard: float
    near_entry: float
    kernel_fixed: float
    kernel_order: float
    kernel_bound: float
    kernel_pair: float
    kernel_entry: float
    circle: float
    term: float

    @cached_property
    def fewest_pairs(self) -> float:
        """Below it all pairs, in whatever kind, take less than the start of any other way."""
        begun = min(self.fixed, self.kernel_fixed, self.circle)
        return begun / max(self.pair, self.faint * self.pair64, self.hard)

    def dense(
        self, m: int, n: int, width: int, double: bool, hard: bool = False, causal: bool = False, faint: bool = False
    ) -> float:
        """Every pair that is seen; width: of keys and values together."""
        pairs = m * n / 2 if causal else m * n
        if hard:
            return pairs * self.hard
        one = self.pair64 + self.entry64 * width if double else self.pair + self.entry * width
        return pairs * one * (self.faint if faint else 1.0)

    def near_pair(
        self, width: int, double: float, masked: bool = False, hard: bool = False, kernel: bool = False
    ) -> float:
        """One pair of a query and a key that is near; constants are of width 6 (d = 3), and more is gathered beyond.

        double: the share of pairs in float64.
        """
        if kernel:
            return self.kernel_pair + self.kernel_entry * max(0, width - 6)
        soft = self.masked if masked else self.near + double * (self.near64 - self.near)
        return (self.near_hard if hard else soft) + self.near_entry * max(0, width - 6)

    def patches(self, m: int, n: int, kernel: bool = False) -> float:
        """Putting queries and keys in order, and bounding what patches of keys are worth, before any pair is seen."""
        sorting = sum(z * max(1.0, math.log2(z)) for z in {m, n})  # queries that are the keys are sorted once
        if kernel:
            return self.kernel_fixed + self.kernel_order * sorting + self.kernel_bound * m * n / 64
        return self.fixed + self.order * sorting + self.bound * m * n / 64

    def series(self, m: int, n: int, terms: int) -> float:
        """A Fourier series of so many terms."""
        return self.circle + self.term * terms * (m + n)


# Of one AMD EPYC core of a machine in use, whose instruction sets were taken away one by one (`attn-flow bench choice`
# with ATEN_CPU_CAPABILITY=avx512, avx2 and default); a median case is missed by 7 to 11%.
SETS = ("AVX512", "AVX2", "DEFAULT")
SECONDS = {
    "pair": (1.6e-09, 1.7e-09, 5.4e-09),
    "entry": (0.0, 0.0, 1.4e-12),
    "pair64": (2.9e-09, 3.4e-09, 6.9e-09),
    "entry64": (4.6e-11, 5e-11, 6.2e-11),
    "faint": (1.0, 1.0, 1.9),
    "hard": (1.1e-08, 8.9e-09, 1.2e-08),
    "look": (3.1e-07, 3.5e-07, 3.9e-07),
    "fixed": (0.0017, 0.0022, 0.0022),
    "order": (3.2e-08, 3.7e-08, 3.5e-08),
    "bound": (5.1e-09, 3.9e-09, 2.8e-09),
    "near": (2.4e-09, 3e-09, 6.4e-09),
    "near64": (4.7e-09, 4.2e-09, 7.9e-09),
    "masked": (6.4e-09, 5.6e-09, 9.9e-09),
    "near_hard": (1.5e-08, 1e-08, 1.3e-08),
    "near_entry": (1.9e-10, 1.1e-10, 1.7e-10),
    "kernel_fixed": (0.0013, 0.0016, 0.00094),
    "kernel_order": (1.4e-08, 1.2e-08, 1.2e-08),
    "kernel_bound": (1.5e-09, 1.5e-09, 1.9e-09),
    "kernel_pair": (6.9e-10, 8.6e-10, 2.9e-09),
    "kernel_entry": (2.8e-11, 5.3e-11, 1.8e-10),
    "circle": (0.0013, 0.00077, 0.00078),
    "term": (5.5e-09, 5.2e-09, 6.8e-09),
}
MEASURED = {name: Costs(**{cost: row[i] for cost, row in SECONDS.items()}) for i, name in enumerate(SETS)}
_assumed: ContextVar[Costs | None] = ContextVar("assumed", default=None)


def here() -> Costs:
    """Those of the instruction set that torch uses in this process (of AVX2 where none were measured), or `assumed`."""
    given = _assumed.get()
    return MEASURED.get(torch.backends.cpu.get_cpu_capability(), MEASURED["AVX2"]) if given is None else given


@contextmanager
def assumed(costs: Costs) -> Iterator[None]:
    """Ways are chosen by these constants inside: of another machine, or such that one way is free."""
    token = _assumed.set(costs)
    try:
        yield
    finally:
        _assumed.reset(token)
