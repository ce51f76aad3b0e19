"""Laws known by mean and covariance: Gaussians, saturating ones, laws of the logits, and ellipsoids."""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from attn_flow.averages import dense
from attn_flow.base import checks
from attn_flow.base.words import introduce
from attn_flow.measures.cloud import Cloud
from attn_flow.measures.measure import by_temperature
from attn_flow.measures.sphere import UniformSphere, sqrt_or_zero


@dataclass(frozen=True, eq=False, repr=False)
class Gaussian:
    """N(mean, cov), its pull saturated at `cap` standard deviations of the logits.

    With s = beta sqrt(g^T S g):  beta L = beta <g,m> + H(s),  H(s) = s^2/2 up to s = cap, and s cap - cap^2/2
    beyond (Huber's function). cap = inf is the plain Gaussian, m_beta(g) = m + beta S g. n tokens drawn from it
    are a random-energy model with cap = sqrt(2 log n): `Gaussian.bulk`. With a finite cap, beta = inf is the
    ellipsoid of radius cap.

    mean: m, (..., d). cov: S, (..., d, d), symmetric and nonnegative. cap: > 0, in standard deviations of the logits.

    >>> import torch
    >>> g = torch.tensor([[1.0, 0.0]])
    >>> mu = Gaussian(mean=torch.zeros(2), cov=torch.diag(torch.tensor([4.0, 1.0])))
    >>> mu.tilted_mean(g, beta=3.0)  # m + beta S g
    tensor([[12.,  0.]])
    >>> mu.bulk(mu.mean, mu.cov, n=100).tilted_mean(g, beta=3.0)  # two standard deviations times sqrt(2 log 100)
    tensor([[6.0697, 0.0000]])
    """

    mean: Tensor
    cov: Tensor
    cap: float = math.inf

    def __post_init__(self) -> None:
        _check_moments(self.mean, self.cov)
        checks.positive("cap", self.cap)

    def __repr__(self) -> str:
        return introduce(self, "mean", "cov", "cap")

    @classmethod
    def bulk(cls, mean: Tensor, cov: Tensor, n: float) -> Gaussian:
        """The Gaussian as n tokens show it: beyond s = sqrt(2 log n) a few of them win."""
        checks.number("n", n, "at least 2 tokens in the bulk")
        if not 2 <= n < math.inf:
            raise ValueError(f"n = {n}, expected at least 2 tokens in the bulk.")
        return cls(mean, cov, math.sqrt(2 * math.log(n)))

    @classmethod
    def fit(cls, cloud: Cloud, *, shrinkage: float | None = None, cap: float = math.inf) -> Gaussian:
        """Mean and covariance of a cloud; shrinkage in [0, 1] as in `shrunk`, cap as of the class."""
        mean, cov = _moments(cloud)
        return cls(mean, shrunk(cov, cloud, shrinkage), cap)

    def to(self, *args: Any, **kwargs: Any) -> Gaussian:
        """The same law with its tensors moved or cast, as `Tensor.to`."""
        return _moved(self, *args, **kwargs)

    def log_partition(self, g: Tensor, beta: float | Tensor) -> Tensor:
        """L_beta(g), (..., m), for queries g (..., m, d)."""
        along, Sg, deviation = _along_and_across(g, self.mean, self.cov)

        def warm(b: Tensor) -> Tensor:
            inside = b * (g * Sg).sum(-1) / 2
            if math.isinf(self.cap):
                return along + inside
            beyond = deviation * self.cap - self.cap**2 / (2 * b)
            return along + torch.where(b * deviation < self.cap, inside, beyond)

        found = by_temperature(beta, g, lambda: along, warm, lambda: along + self._farthest() * deviation)
        return _in_range(found)

    def tilted_mean(self, g: Tensor, beta: float | Tensor) -> Tensor:
        """m_beta(g) = grad L_beta(g), (..., m, d)."""
        _, Sg, deviation = _along_and_across(g, self.mean, self.cov)
        m = self.mean[..., None, :]

        def warm(b: Tensor) -> Tensor:
            saturated = b * deviation >= self.cap
            pull = torch.where(saturated, self.cap / torch.where(saturated, deviation, 1.0), b)
            return m + (b[..., None] if math.isinf(self.cap) else pull[..., None]) * Sg

        def cold() -> Tensor:
            return m + self._farthest() * _ratio(Sg, deviation)

        return _in_range(by_temperature(beta, g, lambda: m.expand(g.shape), warm, cold))

    def _farthest(self) -> float:
        if math.isinf(self.cap):
            raise ValueError("a Gaussian without cap has no support at beta = inf; use Gaussian.bulk(..., n) or a cap.")
        return self.cap


@dataclass(frozen=True, eq=False, repr=False)
class LogitLaw:
    """Mean m, covariance S, and one law of the standardised logits for all queries: atoms t_1 ... t_r of equal mass.

    With s = beta sqrt(g^T S g):  beta L = beta <g,m> + log mean_r e^{s t_r}, and m_beta(g) is m plus the tilted mean
    of t along S g / sqrt(g^T S g). Normal quantiles t give back the Gaussian; the largest t saturates it without a cap.

    mean: m, (..., d). cov: S, (..., d, d), symmetric and nonnegative. t: (..., r), counted from its mean.

    >>> import torch
    >>> mu = LogitLaw(torch.zeros(2), torch.diag(torch.tensor([4.0, 1.0])), t=torch.tensor([-1.0, 1.0]))
    >>> mu.tilted_mean(torch.tensor([[1.0, 0.0]]), beta=0.5)  # half of the mass at +-2: 2 tanh(2 beta)
    tensor([[1.5232, 0.0000]])
    """

    mean: Tensor
    cov: Tensor
    t: Tensor

    def __post_init__(self) -> None:
        _check_moments(self.mean, self.cov)
        checks.floating("t", self.t, "(..., r)")
        if self.t.ndim == 0 or 0 in self.t.shape:
            raise ValueError(
                f"t has shape {tuple(self.t.shape)}, expected (..., r) with one standardised logit or more."
            )
        checks.finite("t", self.t)

    def __repr__(self) -> str:
        return introduce(self, "mean", "cov", "t")

    def to(self, *args: Any, **kwargs: Any) -> LogitLaw:
        """The same law with its tensors moved or cast, as `Tensor.to`."""
        found = _moved(self, *args, **kwargs)
        vars(found).update(t=self.t.to(*args, **kwargs))
        return found

    def log_partition(self, g: Tensor, beta: float | Tensor) -> Tensor:
        """L_beta(g), (..., m), for queries g (..., m, d)."""
        along, _, deviation = _along_and_across(g, self.mean, self.cov)
        t = self._centred
        equal = torch.full_like(t, 1 / t.shape[-1])[..., None, :]

        def warm(b: Tensor) -> Tensor:
            return along + dense.log_mean_of_exp((b * deviation)[..., None] * t[..., None, :], equal) / b

        cold = lambda: along + t.amax(-1, keepdim=True) * deviation
        return _in_range(by_temperature(beta, g, lambda: along, warm, cold))

    def tilted_mean(self, g: Tensor, beta: float | Tensor) -> Tensor:
        """m_beta(g) = grad L_beta(g), (..., m, d)."""
        _, Sg, deviation = _along_and_across(g, self.mean, self.cov)
        m, t = self.mean[..., None, :], self._centred[..., None, :]

        def warm(b: Tensor) -> Tensor:
            pull = (((b * deviation)[..., None] * t).softmax(-1) * t).sum(-1, keepdim=True)
            return m + pull * _ratio(Sg, deviation)

        def cold() -> Tensor:
            return m + t.amax(-1, keepdim=True) * _ratio(Sg, deviation)

        return _in_range(by_temperature(beta, g, lambda: m.expand(g.shape), warm, cold))

    @property
    def _centred(self) -> Tensor:
        return self.t - self.t.mean(-1, keepdim=True)


@dataclass(frozen=True, eq=False, repr=False)
class EllipsoidSupport:
    """A law whose support is {(y-m)^T S^{-1} (y-m) <= rho^2}, the image of a uniform law on a sphere.

    It is y = m + rho S^{1/2} u with u uniform on the unit sphere of R^k, k = rank S, so that
    m_beta(g) = m + rho A_k(beta rho |S^{1/2} g|) S g / |S^{1/2} g|, and m + rho S g / sqrt(g^T S g) at beta = inf.
    rho = sqrt(k) gives it the covariance S.

    mean: m, (..., d). cov: S, (..., d, d), symmetric and nonnegative. rho: > 0. rank: k, measured if not given.

    >>> import torch
    >>> mu = EllipsoidSupport(torch.zeros(2), torch.diag(torch.tensor([4.0, 1.0])), rho=1.0)
    >>> mu.tilted_mean(torch.tensor([[1.0, 1.0]]), beta=float("inf"))  # where <g, y> is largest: (4, 1)/sqrt(5)
    tensor([[1.7889, 0.4472]])
    """

    mean: Tensor
    cov: Tensor
    rho: float
    rank: int | None = None  # k; None: measured

    def __post_init__(self) -> None:
        _check_moments(self.mean, self.cov)
        checks.positive_finite("rho", self.rho)
        if self.rank is not None:
            checks.whole("rank", self.rank)
            if self.rank > self.cov.shape[-1]:
                raise ValueError(f"rank = {self.rank}, expected at most d = {self.cov.shape[-1]}.")
        else:
            checks.held("cov", self.cov)
            checks.precise("cov", self.cov)
            object.__setattr__(self, "rank", _rank(self.cov))

    def __repr__(self) -> str:
        return introduce(self, "mean", "cov", "rho", "rank")

    @classmethod
    def fit(cls, cloud: Cloud, *, shrinkage: float | None = None, rho: float | None = None) -> EllipsoidSupport:
        """The ellipsoid with a cloud's mean and covariance: rho = sqrt(rank) unless given."""
        mean, cov = _moments(cloud)
        cov = shrunk(cov, cloud, shrinkage)
        rank = _rank(cov)
        return cls(mean, cov, math.sqrt(rank) if rho is None else rho, rank)

    @property
    def _sphere(self) -> UniformSphere:
        assert self.rank is not None  # measured when it was not given
        return UniformSphere(self.rank, self.rho)

    def to(self, *args: Any, **kwargs: Any) -> EllipsoidSupport:
        """The same law with its tensors moved or cast, as `Tensor.to`."""
        return _moved(self, *args, **kwargs)

    def log_partition(self, g: Tensor, beta: float | Tensor) -> Tensor:
        """L_beta(g), (..., m), for queries g (..., m, d)."""
        along, _, deviation = _along_and_across(g, self.mean, self.cov)
        return _in_range(along + self._sphere.log_partition_along(deviation, g, beta))

    def tilted_mean(self, g: Tensor, beta: float | Tensor) -> Tensor:
        """m_beta(g) = grad L_beta(g), (..., m, d)."""
        _, Sg, deviation = _along_and_across(g, self.mean, self.cov)
        pull = self._sphere.pull(deviation[..., None], g, beta)
        return _in_range(self.mean[..., None, :] + pull * _ratio(Sg, deviation))


def _moved(law: Any, *args: Any, **kwargs: Any) -> Any:
    """A law whose moments were checked once: in a wider dtype they keep the rounding of the one they came in."""
    checks.moves(*args, **kwargs)
    found = copy.copy(law)
    vars(found).update(mean=law.mean.to(*args, **kwargs), cov=law.cov.to(*args, **kwargs))
    return found


def _along_and_across(g: Tensor, mean: Tensor, cov: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """<g,m> (..., m), S g (..., m, d) and sqrt(g^T S g) (..., m)."""
    checks.queries(g, mean.shape[-1], mean)
    unit = dense.largest_entry(g)
    Sg = (g / unit) @ cov.mT
    return (g * mean[..., None, :]).sum(-1), unit * Sg, unit[..., 0] * sqrt_or_zero((g / unit * Sg).sum(-1))


def _in_range(found: Tensor) -> Tensor:
    checks.in_range("what is asked of the law", found)
    return found


def _ratio(Sg: Tensor, deviation: Tensor) -> Tensor:
    """S g / sqrt(g^T S g), zero where g has no spread to point along."""
    shown = deviation[..., None] > 0
    return torch.where(shown, Sg / torch.where(shown, deviation[..., None], 1.0), 0.0)


def shrunk(cov: Tensor, cloud: Cloud, shrinkage: float | None = None) -> Tensor:
    """(1 - a) S + a tr(S)/d I; a = `shrinkage`, by default 0 with n > d tokens and Ledoit-Wolf's value otherwise."""
    d, n = cov.shape[-1], cloud.probabilities.square().sum(-1).reciprocal()  # n: the effective number of tokens
    scale = torch.diagonal(cov, dim1=-2, dim2=-1).mean(-1)
    if shrinkage is None:
        centred = cloud.x - cloud.mean[..., None, :]
        fourth = (cloud.probabilities * centred.square().sum(-1).square()).sum(-1)
        square = cov.square().sum((-2, -1))
        eye = torch.eye(d, dtype=cov.dtype, device=cov.device)
        distance = (cov - scale[..., None, None] * eye).square().sum((-2, -1))
        noise = (fourth - square) / n
        a = torch.where(distance > 0, torch.minimum(noise, distance) / torch.where(distance > 0, distance, 1.0), 0.0)
        a = torch.where(n > d, torch.zeros_like(a), a)
    else:
        checks.number("shrinkage", shrinkage, "a number in [0, 1]")
        if not 0 <= shrinkage <= 1:
            raise ValueError(f"shrinkage = {shrinkage}, expected a number in [0, 1].")
        a = torch.full_like(scale, shrinkage)
    eye = torch.eye(d, dtype=cov.dtype, device=cov.device)
    return (1 - a)[..., None, None] * cov + (a * scale)[..., None, None] * eye


def _moments(cloud: Cloud) -> tuple[Tensor, Tensor]:
    if not isinstance(cloud, Cloud):
        raise ValueError(f"cloud is a {type(cloud).__name__}, expected a Cloud; use Cloud(x).")
    mean, cov = cloud.moments()
    checks.in_range("the covariance of the cloud", cov)
    return mean, cov


def _rank(cov: Tensor) -> int:
    """The largest rank in a batch of covariances; a single point counts as a segment of no length."""
    return max(1, int(torch.linalg.matrix_rank(cov, hermitian=True).max()))


def _check_moments(mean: Tensor, cov: Tensor) -> None:
    checks.floating("mean", mean, "(..., d)")
    checks.floating("cov", cov, "(..., d, d)")
    if 0 in mean.shape or cov.shape[-2:] != (*mean.shape[-1:], *mean.shape[-1:]):
        raise ValueError(
            f"cov has shape {tuple(cov.shape)}, expected (..., d, d) to match a mean of shape {tuple(mean.shape)}."
        )
    checks.finite("mean", mean)
    checks.covariance("cov", cov)
    checks.same_device("cov", cov, "mean", mean)
    if cov.dtype != mean.dtype:
        raise ValueError(f"cov has dtype {cov.dtype} and mean {mean.dtype}; use one dtype for both.")
