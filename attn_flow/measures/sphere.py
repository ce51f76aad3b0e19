"""The uniform law on a sphere, in closed form by Bessel functions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from attn_flow.averages import bessel
from attn_flow.base import checks
from attn_flow.measures.measure import by_temperature


@dataclass(frozen=True)
class UniformSphere:
    """The uniform law on the sphere of radius r: m_beta(g) = r A_d(beta r |g|) g/|g|, A_d = I_{d/2}/I_{d/2-1}."""

    d: int
    radius: float = 1.0

    def __post_init__(self) -> None:
        if self.d < 1:
            raise ValueError(f"d = {self.d}, expected a dimension of at least 1.")
        checks.positive("radius", self.radius)

    def to(self, *args: Any, **kwargs: Any) -> UniformSphere:
        return self

    def log_partition(self, g: Tensor, beta: float | Tensor) -> Tensor:
        size = self.radius * length(g)
        return by_temperature(
            beta,
            g,
            hot=lambda: torch.zeros_like(size),
            warm=lambda b: bessel.log_i(self.d / 2 - 1, b * size) / b,
            cold=lambda: size,
        )

    def tilted_mean(self, g: Tensor, beta: float | Tensor) -> Tensor:
        size = length(g)[..., None]
        # At g = 0 the direction g/|g| is undefined and the mean is zero.
        direction = torch.where(size > 0, g / torch.where(size > 0, size, 1.0), 0.0)
        return by_temperature(
            beta,
            g,
            hot=lambda: torch.zeros_like(g),
            warm=lambda b: self.radius * bessel.ratio(self.d / 2 - 1, b[..., None] * self.radius * size) * direction,
            cold=lambda: self.radius * direction,
        )


def length(g: Tensor) -> Tensor:
    """|g| (..., m), with gradient zero instead of NaN at g = 0."""
    return sqrt_or_zero(g.square().sum(-1))


def sqrt_or_zero(square: Tensor) -> Tensor:
    positive = square > 0
    return torch.where(positive, torch.where(positive, square, 1.0).sqrt(), 0.0)
