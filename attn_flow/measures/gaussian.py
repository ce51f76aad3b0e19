"""Measures known by mean and covariance: Gaussians, also with a saturating pull, and ellipsoids."""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from attn_flow.base import checks
from attn_flow.kernels.dense import is_infinite
from attn_flow.measures.cloud import Cloud
from attn_flow.measures.measure import as_tensor, direction, largest_entry, require_queries, sqrt_or_zero
from attn_flow.measures.sphere import UniformSphere


@dataclass(frozen=True, eq=False, repr=False)
class Gaussian:
    """The normal distribution N(m, S); its pull may saturate at `cap` standard deviations of the logits.

    With s = beta sqrt(g^T S g), beta L = beta <g,m> + H(s), where H(s) = s^2/2 up to s = cap and s cap - cap^2/2 beyond
    (Huber's function). cap = inf is the plain Gaussian, m_beta(g) = m + beta S g. With a finite cap, beta = inf is the
    ellipsoid of radius cap.

    Args:
        mean: m, (..., d).
        cov: S, (..., d, d), symmetric and positive semidefinite.
        cap: positive, in standard deviations of the logits.

    Example:
        >>> g = torch.tensor([[1.0, 0.0]])
        >>> mu = Gaussian(mean=torch.zeros(2), cov=torch.diag(torch.tensor([4.0, 1.0])))
        >>> mu.tilted_mean(g, beta=3.0)  # m + beta S g
        tensor([[12.,  0.]])
        >>> mu.of_tokens(mu.mean, mu.cov, n=100).tilted_mean(g, beta=3.0)  # saturated at 2 sqrt(2 log 100)
        tensor([[6.0697, 0.0000]])
    """

    mean: Tensor
    cov: Tensor
    cap: float = math.inf

    def __post_init__(self) -> None:
        _require_moments(self.mean, self.cov)
        if not self.cap > 0:
            raise ValueError(f"cap = {self.cap}, expected a positive number of standard deviations, or inf.")

    def __repr__(self) -> str:
        return f"Gaussian(mean {tuple(self.mean.shape)}, cov {tuple(self.cov.shape)}, cap={self.cap:.6g})"

    @classmethod
    def of_tokens(cls, mean: Tensor, cov: Tensor, n: float) -> Gaussian:
        """n tokens drawn from a Gaussian, as a random-energy model: beyond s = sqrt(2 log n) a few of them win."""
        if not 2 <= n < math.inf:
            raise ValueError(f"n = {n}, expected at least 2 tokens.")
        return cls(mean, cov, math.sqrt(2 * math.log(n)))

    @classmethod
    def fit(cls, cloud: Cloud, cap: float = math.inf) -> Gaussian:
        """The Gaussian with the mean and covariance of a cloud."""
        return cls(*cloud.moments(), cap)

    def to(self, *args: Any, **kwargs: Any) -> Gaussian:
        """The same measure with its tensors moved or cast, as `Tensor.to`."""
        return _moved(self, *args, **kwargs)

    def log_partition(self, g: Tensor, beta: float | Tensor) -> Tensor:
        """L_beta(g), (..., m), for queries g (..., m, d)."""
        along, Sg, deviation = _project_moments(g, self.mean, self.cov)
        if is_infinite(beta):
            return along + self._finite_cap() * deviation
        b = as_tensor(beta, g)
        quadratic = b * (g * Sg).sum(-1) / 2
        if math.isinf(self.cap):
            return along + quadratic
        is_saturated = b * deviation >= self.cap
        saturated = deviation * self.cap - self.cap**2 / (2 * torch.where(is_saturated, b, 1.0))
        return along + torch.where(is_saturated, saturated, quadratic)

    def tilted_mean(self, g: Tensor, beta: float | Tensor) -> Tensor:
        """m_beta(g) = grad L_beta(g), (..., m, d)."""
        _, Sg, deviation = _project_moments(g, self.mean, self.cov)
        m = self.mean[..., None, :]
        if is_infinite(beta):
            return m + self._finite_cap() * direction(Sg, deviation)
        pull = as_tensor(beta, g)
        if self.cap < math.inf:
            is_saturated = pull * deviation >= self.cap
            pull = torch.where(is_saturated, self.cap / torch.where(is_saturated, deviation, 1.0), pull)
        return m + pull[..., None] * Sg

    def _finite_cap(self) -> float:
        if math.isinf(self.cap):
            raise ValueError("a Gaussian has no bounded support at beta = inf; use Gaussian.of_tokens or a finite cap.")
        return self.cap


@dataclass(frozen=True, eq=False, repr=False)
class EllipsoidSupport:
    """A measure on the ellipsoid {(y-m)^T S^{-1} (y-m) <= rho^2}, the image of a uniform distribution on a sphere.

    It is y = m + rho S^{1/2} u with u uniform on the unit sphere of R^k, k = rank S. So
    m_beta(g) = m + rho A_k(beta rho |S^{1/2} g|) S g / |S^{1/2} g|, and m + rho S g / sqrt(g^T S g) at beta = inf.
    rho = sqrt(k) gives it the covariance S.

    Args:
        mean: m, (..., d).
        cov: S, (..., d, d), symmetric and positive semidefinite.
        rho: positive.
        rank: k; None: computed.

    Example:
        >>> mu = EllipsoidSupport(torch.zeros(2), torch.diag(torch.tensor([4.0, 1.0])), rho=1.0)
        >>> mu.tilted_mean(torch.tensor([[1.0, 1.0]]), beta=float("inf"))  # where <g, y> is largest: (4, 1)/sqrt(5)
        tensor([[1.7889, 0.4472]])
    """

    mean: Tensor
    cov: Tensor
    rho: float
    rank: int | None = None

    def __post_init__(self) -> None:
        _require_moments(self.mean, self.cov)
        checks.require_positive(rho=self.rho)
        rank = _rank(self.cov) if self.rank is None else self.rank
        if not 1 <= rank <= self.cov.shape[-1]:
            raise ValueError(f"rank = {rank}, expected from 1 to d = {self.cov.shape[-1]}.")
        object.__setattr__(self, "rank", rank)

    def __repr__(self) -> str:
        return f"EllipsoidSupport(mean {tuple(self.mean.shape)}, cov {tuple(self.cov.shape)}, rho={self.rho:.6g})"

    @classmethod
    def fit(cls, cloud: Cloud, rho: float | None = None) -> EllipsoidSupport:
        """The ellipsoid with a cloud's mean and covariance; rho = sqrt(rank) by default."""
        mean, cov = cloud.moments()
        rank = _rank(cov)
        return cls(mean, cov, math.sqrt(rank) if rho is None else rho, rank)

    @property
    def _sphere(self) -> UniformSphere:
        assert self.rank is not None  # computed by the constructor
        return UniformSphere(self.rank, self.rho)

    def to(self, *args: Any, **kwargs: Any) -> EllipsoidSupport:
        """The same measure with its tensors moved or cast, as `Tensor.to`."""
        return _moved(self, *args, **kwargs)

    def log_partition(self, g: Tensor, beta: float | Tensor) -> Tensor:
        """L_beta(g), (..., m), for queries g (..., m, d)."""
        along, _, deviation = _project_moments(g, self.mean, self.cov)
        return along + self._sphere.radial_log_partition(deviation, beta)

    def tilted_mean(self, g: Tensor, beta: float | Tensor) -> Tensor:
        """m_beta(g) = grad L_beta(g), (..., m, d)."""
        _, Sg, deviation = _project_moments(g, self.mean, self.cov)
        pull = self._sphere.radial_mean(deviation, beta)
        return self.mean[..., None, :] + pull[..., None] * direction(Sg, deviation)


def _moved(measure: Any, *args: Any, **kwargs: Any) -> Any:
    """A copy with its moments moved or cast, without checking them again in another precision."""
    moved = copy.copy(measure)
    vars(moved).update(mean=measure.mean.to(*args, **kwargs), cov=measure.cov.to(*args, **kwargs))
    return moved


def _project_moments(g: Tensor, mean: Tensor, cov: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """<g,m> (..., m), S g (..., m, d) and sqrt(g^T S g) (..., m)."""
    require_queries(g, mean.shape[-1], mean.dtype)
    size = largest_entry(g)
    Sg = (g / size) @ cov.mT
    return (g * mean[..., None, :]).sum(-1), size * Sg, size[..., 0] * sqrt_or_zero((g / size * Sg).sum(-1))


def _rank(cov: Tensor) -> int:
    """The largest rank in a batch of covariances, at least 1."""
    cov = cov.to(torch.promote_types(cov.dtype, torch.float32))
    return max(1, int(torch.linalg.matrix_rank(cov, hermitian=True).max()))


def _require_moments(mean: Tensor, cov: Tensor) -> None:
    """Raise an error unless mean (..., d) and cov (..., d, d) are finite and cov is a covariance up to rounding."""
    for name, z in (("mean", mean), ("cov", cov)):
        checks.require_floating(name, z)
        checks.require_finite(name, z)
    if mean.ndim == 0:
        raise ValueError("mean has shape (), expected (..., d).")
    checks.require_shape("cov", cov, (mean.shape[-1], mean.shape[-1]))
    checks.require_same_device("cov", cov, "mean", mean)
    if cov.dtype != mean.dtype:
        raise ValueError(f"cov has dtype {cov.dtype} and mean {mean.dtype}; use one dtype for both.")
    if not checks.can_read(cov):
        return
    S = cov.detach().double()
    # A covariance computed in float32 may arrive in float64.
    eps = max(torch.finfo(dtype).eps for dtype in (torch.float32, cov.dtype))
    rounding = 100 * S.shape[-1] * eps * S.abs().amax((-2, -1), keepdim=True)
    checks.require((S - S.mT).abs() <= rounding, "cov is not symmetric, expected a covariance; use (cov + cov.mT) / 2.")
    least = torch.linalg.eigvalsh(S).amin(-1)
    checks.require(least >= -rounding[..., 0, 0], f"cov has the eigenvalue {float(least.min()):.3g} < 0.")
