"""Sums that a corpus leaves in constant memory: moments of tokens per point, and a uniform sample of them.

Both are functions of the set of tokens alone, not of the order they come in, so that parts computed apart merge to
the statistics of the whole.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor


@dataclass
class Moments:
    """n, sum x and sum x x^T of every point, in float64: (), (points, d), (points, d, d).

    Products of tokens in float32 or less are float32's, of so few tokens at once (b) and about their mean, that an
    entry is off by at most (b + 2) 2^-24 sqrt(S_ii S_jj), S the scatter within these b tokens; in practice by a
    hundredth of that, less than the states' own rounding. Products of float64 are float64's.
    """

    n: int
    first: Tensor
    second: Tensor

    @classmethod
    def zero(cls, points: int, d: int) -> Moments:
        return cls(0, torch.zeros(points, d, dtype=torch.float64), torch.zeros(points, d, d, dtype=torch.float64))

    def add(self, point: int, x: Tensor, at_once: int = 1024) -> None:
        """Tokens x (n, d) of one point, so many at once; `n` is counted by the caller, for all points."""
        quarter, second = -(-x.shape[-1] // 4), self.second[point]
        for part in (x if x.dtype == torch.float64 else x.float()).split(at_once):
            b, total = len(part), part.sum(0, dtype=torch.float64)
            self.first[point] += total
            near = (total / b).to(part.dtype)
            u, c = part - near, near.double()
            # sum x x^T = sum u u^T + c s^T + (s - b c) c^T with u = x - c and s = sum x, for any c.
            second.addmm_(torch.stack([c, total - b * c], 1), torch.stack([total, c]))
            # Ten of the sixteen blocks: the matrix is symmetric, and this is nearly all that the statistics cost.
            for i in range(0, x.shape[-1], quarter):
                block = slice(i, i + quarter)
                second[block, i:] += u[:, block].mT @ u[:, i:]

    def __add__(self, other: Moments) -> Moments:
        return Moments(self.n + other.n, self.first + other.first, self.second + other.second)

    @property
    def mean(self) -> Tensor:
        return self.first / self.n

    @property
    def covariance(self) -> Tensor:
        """E x x^T - E x E x^T, (points, d, d)."""
        upper = torch.triu(self.second)
        full = upper + torch.triu(self.second, 1).mT
        return full / self.n - self.mean[:, :, None] * self.mean[:, None, :]


def keys(seed: int, text: Tensor, position: Tensor) -> Tensor:
    """A pseudo-random number per token from its place alone: splitmix64 of (seed, text, position), as int64."""
    z = _mix(torch.full_like(text, seed) * _GOLDEN)
    return _mix(_mix(z + text * _GOLDEN) + position * _GOLDEN)


_GOLDEN = 0x9E3779B97F4A7C15 - 2**64


def _mix(z: Tensor) -> Tensor:
    """The finaliser of splitmix64; int64 products wrap, and a mask makes the shift a logical one."""
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        z = (z ^ ((z >> shift) & (2 ** (64 - shift) - 1))) * (factor - 2**64)
    return z ^ ((z >> 31) & (2**33 - 1))


@dataclass
class Reservoir:
    """The m tokens of smallest key: a uniform sample without replacement, the same in whatever order they come."""

    m: int
    seed: int
    x: Tensor  # (points, size, d)
    key: Tensor
    text: Tensor
    position: Tensor
    token: list[str] = field(default_factory=list)
    waiting: list[tuple[Tensor, Tensor, Tensor, Tensor, list[str]]] = field(default_factory=list)

    @classmethod
    def empty(cls, m: int, seed: int, points: int, d: int) -> Reservoir:
        none = torch.zeros(0, dtype=torch.int64)
        return cls(m, seed, torch.zeros(points, 0, d), none, none, none)

    @property
    def size(self) -> int:
        """Tokens in the sample."""
        self.settle()
        return len(self.key)

    def chosen(self, text: Tensor, position: Tensor) -> tuple[Tensor, Tensor]:
        """Which of these tokens may be in the sample, and all their keys."""
        key = keys(self.seed, text, position)
        known = torch.cat([self.key, key])
        return key <= known.kthvalue(min(self.m, len(known))).values, key

    def add(self, x: Tensor, key: Tensor, text: Tensor, position: Tensor, token: list[str]) -> None:
        """Candidates x (points, size, d); they wait until a quarter of the sample has gathered."""
        self.waiting.append((x, key, text, position, token))
        if sum(len(part[1]) for part in self.waiting) > self.m / 4:
            self.settle()

    def settle(self) -> None:
        """Keep the m smallest keys, in their order."""
        if not self.waiting:
            return
        parts = [(self.x, self.key, self.text, self.position, self.token), *self.waiting]
        key = torch.cat([p[1] for p in parts])
        order = key.argsort()[: self.m]
        self.x = torch.cat([p[0].to(self.x.dtype) for p in parts], dim=1)[:, order]
        self.key, self.text = key[order], torch.cat([p[2] for p in parts])[order]
        self.position = torch.cat([p[3] for p in parts])[order]
        tokens = [t for p in parts for t in p[4]]
        self.token = [tokens[i] for i in order.tolist()]
        self.waiting = []

    def __add__(self, other: Reservoir) -> Reservoir:
        both = Reservoir(self.m, self.seed, self.x, self.key, self.text, self.position, list(self.token))
        both.waiting = [*self.waiting, (other.x, other.key, other.text, other.position, other.token), *other.waiting]
        both.settle()
        return both

    def tensors(self) -> dict[str, Tensor]:
        self.settle()
        return {"x": self.x, "key": self.key, "text": self.text, "position": self.position}

    def labels(self) -> dict[str, list[Any]]:
        self.settle()
        return {"text": self.text.tolist(), "position": self.position.tolist(), "token": list(self.token)}
