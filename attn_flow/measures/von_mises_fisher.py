"""The von Mises-Fisher distribution on the unit sphere. Tilting one gives another one."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from attn_flow.base import checks
from attn_flow.kernels import bessel
from attn_flow.kernels.dense import is_infinite
from attn_flow.measures.measure import as_tensor, direction, length, over_beta, require_queries

MAX_SAMPLED_KAPPA = 1e9  # kappa that can be sampled: beyond, float64 has few digits of 1 - <mean, y>, and then none


@dataclass(frozen=True, eq=False, repr=False)
class VonMisesFisher:
    """The distribution of density e^{kappa <mean, y>} on the unit sphere of R^d; kappa = 0 is the uniform one.

    Tilting by e^{beta <g, y>} moves kappa mean to z = kappa mean + beta g: L_beta(g) = (log I(|z|) - log I(kappa))/beta
    and m_beta(g) = A_d(|z|) z/|z|, with A_d = I_{d/2}/I_{d/2-1} and I(z) = Gamma(d/2) (2/z)^{d/2-1} I_{d/2-1}(z).

    Args:
        mean: (..., d), unit vectors, the most likely direction; leading axes are a batch.
        kappa: the concentration, nonnegative.

    Example:
        >>> mu = VonMisesFisher(torch.tensor([0.0, 0.0, 1.0]), kappa=2.0)
        >>> mu.tilted_mean(torch.zeros(1, 3), beta=1.0)  # its mean, A_3(2) = coth(2) - 1/2
        tensor([[0.0000, 0.0000, 0.5373]])
        >>> mu.sample(5, generator=torch.Generator().manual_seed(0)).shape
        torch.Size([5, 3])
    """

    mean: Tensor
    kappa: float

    def __post_init__(self) -> None:
        checks.require_floating("mean", self.mean)
        checks.require_nonnegative(kappa=self.kappa)
        checks.require_unit("mean", self.mean)

    def __repr__(self) -> str:
        return f"VonMisesFisher(mean {tuple(self.mean.shape)}, kappa={self.kappa:.6g})"

    @property
    def d(self) -> int:
        """The dimension of the space in which the sphere lies."""
        return self.mean.shape[-1]

    def to(self, *args: Any, **kwargs: Any) -> VonMisesFisher:
        """The same measure with its tensors moved or cast, as `Tensor.to`."""
        return VonMisesFisher(self.mean.to(*args, **kwargs), self.kappa)

    def density(self, y: Tensor) -> Tensor:
        """The density at unit vectors y (..., d), relative to the uniform distribution."""
        checks.require_shape("y", y, (self.d,))
        checks.require_unit("y", y)
        along = (y * self.mean).sum(-1)
        return (self.kappa * along - bessel.log_i(self.d / 2 - 1, torch.full_like(along, self.kappa))).exp()

    def sample(self, n: int, *, generator: torch.Generator | None = None) -> Tensor:
        """n independent tokens, (..., n, d): Wood's rejection for <mean, y>, a uniform direction across."""
        checks.require_count(n=n)
        if self.kappa > MAX_SAMPLED_KAPPA:
            raise ValueError(
                f"kappa = {self.kappa:g}, expected at most {MAX_SAMPLED_KAPPA:g} to sample from; take the mean itself."
            )
        m, d = self.mean[..., None, :], self.d
        shape = (*self.mean.shape[:-1], n, d)
        drop = self._drop(math.prod(shape[:-1]), generator).to(m).reshape(*shape[:-1], 1)
        if d == 1:
            return m * (1 - drop)
        across = torch.randn(shape, generator=generator, dtype=m.dtype, device=m.device)
        for _ in range(2):  # once more, for those that were nearly along the mean
            across = across - (across * m).sum(-1, keepdim=True) * m
            across = across / across.norm(dim=-1, keepdim=True)
        return (1 - drop) * m + (drop * (2 - drop)).sqrt() * across

    def _drop(self, count: int, generator: torch.Generator | None) -> Tensor:
        """1 - <mean, y> of `count` samples, float64: small ones keep their digits. Wood (1994), by rejection."""
        d, kappa, device = self.d, self.kappa, "cpu" if generator is None else generator.device
        factory: Any = {"generator": generator, "dtype": torch.float64, "device": device}
        if d == 1:
            return 2.0 * (torch.rand(count, **factory) > 1 / (1 + math.exp(-2 * kappa)))
        b = (d - 1) / (2 * kappa + math.hypot(2 * kappa, d - 1))
        x0 = (1 - b) / (1 + b)
        top = kappa * x0 + (d - 1) * math.log(4 * b / (1 + b) ** 2)  # 1 - x0^2
        accepted = torch.zeros(0, dtype=torch.float64, device=device)
        while len(accepted) < count:
            normal = torch.randn(2 * count + 16, d, **factory)
            z = (1 + normal[:, 0] / normal.norm(dim=-1)) / 2  # distributed as Beta((d-1)/2, (d-1)/2)
            drop = 2 * b * z / (1 - (1 - b) * z)
            bound = kappa * (1 - drop) + (d - 1) * torch.log1p(-x0 * (1 - drop)) - top
            accepted = torch.cat([accepted, drop[bound >= torch.rand(len(z), **factory).log()]])
        return accepted[:count]

    def log_partition(self, g: Tensor, beta: float | Tensor) -> Tensor:
        """L_beta(g), (..., m), for queries g (..., m, d)."""
        require_queries(g, self.d)
        if is_infinite(beta):
            return length(g)
        nu, b, g64 = self.d / 2 - 1, as_tensor(beta, g).double(), g.double()  # two logarithms cancel
        kappa = torch.full_like(g64[..., 0], self.kappa)
        along = bessel.ratio(nu, kappa) * (g64 * self.mean[..., None, :]).sum(-1)  # <g, mean of the distribution>
        log_mean = bessel.log_i(nu, length(self._tilted(g64, b))) - bessel.log_i(nu, kappa) - b * along
        return (along + over_beta(log_mean, b, 2 * length(g64))).to(g.dtype)

    def tilted_mean(self, g: Tensor, beta: float | Tensor) -> Tensor:
        """m_beta(g) = A_d(|z|) z/|z|, z = kappa mean + beta g, (..., m, d); zero at z = 0."""
        require_queries(g, self.d)
        if is_infinite(beta):
            return direction(g, length(g))
        z = self._tilted(g, as_tensor(beta, g))
        size = length(z)
        return bessel.ratio(self.d / 2 - 1, size)[..., None] * direction(z, size)

    def _tilted(self, g: Tensor, beta: Tensor) -> Tensor:
        """kappa mean + beta g, (..., m, d)."""
        return self.kappa * self.mean[..., None, :].to(g) + beta[..., None] * g
