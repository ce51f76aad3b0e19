"""The uniform distribution on a sphere, in closed form by Bessel functions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from attn_flow.base import checks
from attn_flow.kernels import bessel
from attn_flow.kernels.dense import is_infinite
from attn_flow.measures.measure import as_tensor, direction, length, over_beta, require_queries


@dataclass(frozen=True)
class UniformSphere:
    """The uniform distribution on the sphere of radius r: m_beta(g) = r A_d(beta r |g|) g/|g|, A_d = I_{d/2}/I_{d/2-1}.

    Args:
        d: the dimension of the space in which the sphere lies.
        radius: r, in the units of the tokens.

    Example:
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
        checks.require_count(d=self.d)
        checks.require_positive(radius=self.radius)

    def to(self, *args: Any, **kwargs: Any) -> UniformSphere:
        """Itself: it holds no tensors."""
        return self

    def log_partition(self, g: Tensor, beta: float | Tensor) -> Tensor:
        """L_beta(g), (..., m), for queries g (..., m, d)."""
        require_queries(g, self.d)
        return self.radial_log_partition(length(g), beta)

    def tilted_mean(self, g: Tensor, beta: float | Tensor) -> Tensor:
        """m_beta(g), (..., m, d); zero at g = 0, where there is no direction."""
        require_queries(g, self.d)
        size = length(g)
        return self.radial_mean(size, beta)[..., None] * direction(g, size)

    def radial_log_partition(self, size: Tensor, beta: float | Tensor) -> Tensor:
        """L_beta of queries of length size (..., m)."""
        if is_infinite(beta):
            return self.radius * size
        b, spread = as_tensor(beta, size), self.radius * size
        return over_beta(bessel.log_i(self.d / 2 - 1, b * spread), b, spread)

    def radial_mean(self, size: Tensor, beta: float | Tensor) -> Tensor:
        """r A_d(beta r size), the length (..., m) of the tilted mean of queries of length size (..., m)."""
        if is_infinite(beta):
            return self.radius * (size > 0).to(size.dtype)
        return self.radius * bessel.ratio(self.d / 2 - 1, as_tensor(beta, size) * self.radius * size)
