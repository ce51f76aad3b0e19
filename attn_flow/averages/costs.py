"""What each way to an average costs: a model whose constants were measured, for each of torch's instruction sets.

For m queries and n keys of width k with values of width v, in processor time,

    dense    m n (pair + entry (k + v))                                 every pair, in the kernel of its dtype
    near     fixed + order n log2 n + bound m n / 64 + near share m n   sorted, bounded in patches; then pairs kept
    circle   circle + term K (m + n)                                    K terms of a Fourier series

so that a way is chosen by what it will take, and not by a size that suited one processor. Which way is fastest depends
on ratios of these constants alone. They are not measured in the running process: the same call on the same kind of
machine takes the same way, and gives the same bits. `attn-flow bench choice` times every way beside the chosen one,
counts wrong choices, and fits the constants anew.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Costs:
    """Seconds of one thread; *64: in float64. hard, masked: a pair of a hardmax, and of near keys under a mask."""

    pair: float
    entry: float
    pair64: float
    entry64: float
    hard: float
    fixed: float
    order: float
    bound: float
    near: float
    near64: float
    masked: float
    near_hard: float
    near_entry: float
    circle: float
    term: float

    def dense(self, m: int, n: int, width: int, double: bool, hard: bool = False, causal: bool = False) -> float:
        """Every pair that is seen; width: of keys and values together."""
        pairs = m * n / 2 if causal else m * n
        if hard:
            return pairs * self.hard
        return pairs * (self.pair64 + self.entry64 * width if double else self.pair + self.entry * width)

    def near_pair(self, width: int, double: bool, masked: bool, hard: bool) -> float:
        """One pair of a query and a key that is near; constants are of width 6 (d = 3), and more is gathered beyond."""
        pair = self.near_hard if hard else self.masked if masked else self.near64 if double else self.near
        return pair + self.near_entry * max(0, width - 6)

    def patches(self, m: int, n: int) -> float:
        """Putting queries and keys in order, and bounding what patches of keys are worth, before any pair is seen."""
        sorting = sum(z * max(1.0, math.log2(z)) for z in {m, n})  # queries that are the keys are sorted once
        return self.fixed + self.order * sorting + self.bound * m * n / 64

    def series(self, m: int, n: int, terms: int) -> float:
        """A Fourier series of so many terms."""
        return self.circle + self.term * terms * (m + n)


# Of one AMD EPYC core of a machine in use, whose instruction sets were taken away one by one; a median case is missed
# by 11 to 13%.
SETS = ("AVX512", "AVX2", "DEFAULT")
SECONDS = {
    "pair": (2.1e-09, 2.2e-09, 5.9e-09),
    "entry": (0.0, 0.0, 0.0),
    "pair64": (3.5e-09, 4.2e-09, 7.6e-09),
    "entry64": (5.4e-11, 3.7e-11, 6.8e-11),
    "hard": (1.5e-08, 1.7e-08, 1.9e-08),
    "fixed": (0.0034, 0.0037, 0.0034),
    "order": (9.7e-08, 3.6e-08, 8.8e-08),
    "bound": (2.8e-10, 3.8e-09, 2.8e-09),
    "near": (2.7e-09, 3.2e-09, 6e-09),
    "near64": (3.9e-09, 4.7e-09, 8.7e-09),
    "masked": (5.4e-09, 6e-09, 1.1e-08),
    "near_hard": (1e-08, 1.2e-08, 1.6e-08),
    "near_entry": (1.7e-10, 1.7e-10, 1.7e-10),
    "circle": (0.00044, 0.0011, 0.00041),
    "term": (4e-09, 3.5e-09, 5.2e-09),
}
MEASURED = {name: Costs(**{cost: row[i] for cost, row in SECONDS.items()}) for i, name in enumerate(SETS)}


def here() -> Costs:
    """Those of the instruction set that torch uses in this process; of AVX2 where none were measured."""
    return MEASURED.get(torch.backends.cpu.get_cpu_capability(), MEASURED["AVX2"])
