"""The uniform law on a sphere, in closed form by Bessel functions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from attn_flow.averages import bessel, dense
from attn_flow.base import checks
from attn_flow.measures.measure import by_temperature


@dataclass(frozen=True)
class UniformSphere:
    """The uniform law on the sphere of radius r: m_beta(g) = r A_d(beta r |g|) g/|g|, A_d = I_{d/2}/I_{d/2-1}.

    d: dimension of the space the sphere lies in. radius: r, in the units of the tokens.

    >>> import torch
    >>> mu, g = UniformSphere(3), torch.tensor([[0.0, 0.0, 2.0]])
    >>> mu.tilted_mean(g, beta=1.0)  # A_3(z) = coth(z) - 1/z
    tensor([[0.0000, 0.0000, 0.5373]])
    >>> mu.log_partition(g, beta=float("inf"))  # the maximum of <g, y>
    tensor([2.])
    """

    d: int
    radius: float = 1.0

    def __post_init__(self) -> None:
        checks.whole("d", self.d)
        checks.positive_finite("radius", self.radius)

    def to(self, *args: Any, **kwargs: Any) -> UniformSphere:
        """Itself: it holds no tensors."""
        checks.moves(*args, **kwargs)
        return self

    def log_partition(self, g: Tensor, beta: float | Tensor) -> Tensor:
        """L_beta(g), (..., m), for queries g (..., m, d)."""
        checks.queries(g, self.d)
        found = self.log_partition_along(length(g), g, beta)
        checks.in_range("the log-partition of a uniform law", found)
        return found

    def tilted_mean(self, g: Tensor, beta: float | Tensor) -> Tensor:
        """m_beta(g), (..., m, d); zero at g = 0, where there is no direction."""
        checks.queries(g, self.d)
        size = length(g)[..., None]
        direction = torch.where(size > 0, g / torch.where(size > 0, size, 1.0), 0.0)
        found = self.pull(size, g, beta) * direction
        checks.in_range("the tilted mean of a uniform law", found)
        return found

    def log_partition_along(self, size: Tensor, g: Tensor, beta: float | Tensor) -> Tensor:
        """L_beta of a query of length size (..., m)."""
        return by_temperature(
            beta,
            g,
            hot=lambda: torch.zeros_like(size),
            warm=lambda b: bessel.log_i(self.d / 2 - 1, b * self.radius * size) / b,
            cold=lambda: self.radius * size,
        )

    def pull(self, size: Tensor, g: Tensor, beta: float | Tensor) -> Tensor:
        """r A_d(beta r size), the length of the tilted mean of a query of length size (..., m, 1)."""
        return by_temperature(
            beta,
            g,
            hot=lambda: torch.zeros_like(size),
            warm=lambda b: self.radius * bessel.ratio(self.d / 2 - 1, b[..., None] * self.radius * size),
            cold=lambda: self.radius * (size > 0).to(size.dtype),
        )


def length(g: Tensor) -> Tensor:
    """|g| (..., m), with gradient zero instead of NaN at g = 0; squares of extreme entries leave no range."""
    unit = dense.largest_entry(g)
    return unit[..., 0] * sqrt_or_zero((g / unit).square().sum(-1))


def sqrt_or_zero(square: Tensor) -> Tensor:
    """sqrt, with value and gradient zero at and below zero."""
    positive = square > 0
    return torch.where(positive, torch.where(positive, square, 1.0).sqrt(), 0.0)
