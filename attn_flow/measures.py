"""Laws of tokens, each with its scaled log-partition and the gradient of it, the tilted mean.

    L_beta[mu](g) = (1/beta) log int e^{beta <g,y>} dmu(y)        (beta = 0: <g, mean>; beta = inf: max over supp)
    m_beta[mu](g) = grad_g L_beta = int y e^{beta <g,y>} dmu / int e^{beta <g,y>} dmu

Self-attention is V m_beta[mu](G x). Here mu is a cloud, the uniform law of a sphere, a Gaussian, an ellipsoid,
or a mixture of any of them; g is (..., m, d), beta a number or a tensor that broadcasts against (..., m).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from attn_flow import bessel, checks, kernels


class Measure(Protocol):
    def log_partition(self, g: Tensor, beta: float | Tensor) -> Tensor:
        """L_beta(g), (..., m)."""
        ...

    def tilted_mean(self, g: Tensor, beta: float | Tensor) -> Tensor:
        """m_beta(g) = grad L_beta(g), (..., m, d)."""
        ...

    def to(self, *args: Any, **kwargs: Any) -> Measure:
        """The same law with its tensors moved or cast, as `Tensor.to`."""
        ...


def _by_temperature(
    beta: float | Tensor,
    g: Tensor,
    hot: Callable[[], Tensor],
    warm: Callable[[Tensor], Tensor],
    cold: Callable[[], Tensor],
) -> Tensor:
    """hot() where beta = 0, cold() where beta = inf, warm(beta) between: each formula only where it has a meaning."""
    checks.inverse_temperature(beta)
    if not isinstance(beta, Tensor):
        if beta == 0:
            return hot()
        return cold() if math.isinf(beta) else warm(torch.as_tensor(beta, dtype=g.dtype, device=g.device))
    b = beta.to(g)
    at_zero, at_inf = b == 0, torch.isinf(b)
    if not checks.can_look(b) or not bool((at_zero | at_inf).any()):
        return warm(b)
    value = warm(torch.where(at_zero | at_inf, 1.0, b))
    vector = value.ndim > max(b.ndim, g.ndim - 1)  # a mean (..., m, d), or a number (..., m)
    for there, formula in ((at_zero, hot), (at_inf, cold)):
        if bool(there.any()):
            value = torch.where(there[..., None] if vector else there, formula(), value)
    return value


@dataclass(frozen=True, eq=False)
class Cloud:
    """Weighted tokens sum_j w_j delta_{x_j} / sum_j w_j: x (..., n, d), weights (..., n), mask True for tokens."""

    x: Tensor
    weights: Tensor | None = None
    mask: Tensor | None = None

    def __post_init__(self) -> None:
        checks.tokens("x", self.x)
        if self.mask is not None:
            checks.token_mask(self.mask, self.x)
        if self.weights is not None:
            checks.token_weights(self.weights, self.x, self.mask)

    @property
    def probabilities(self) -> Tensor:
        """w_j, zero where masked, summing to one, (..., n)."""
        w = torch.ones_like(self.x[..., 0]) if self.weights is None else self.weights.to(self.x.dtype)
        w = w.expand(torch.broadcast_shapes(w.shape, self.x.shape[:-1]))
        if self.mask is not None:
            w = torch.where(self.mask, w, 0.0)
        return w / w.sum(-1, keepdim=True)

    @property
    def log_weights(self) -> Tensor | None:
        """log w_j (..., n), or None when all weights are equal (the softmax then cancels them)."""
        return None if self.weights is None and self.mask is None else self.probabilities.log()

    @property
    def mean(self) -> Tensor:
        return torch.einsum("...j,...jd->...d", self.probabilities, self.x)

    def moments(self) -> tuple[Tensor, Tensor]:
        """Mean (..., d) and covariance (..., d, d) under the weights."""
        centred = self.x - self.mean[..., None, :]
        return self.mean, torch.einsum("...j,...jd,...je->...de", self.probabilities, centred, centred)

    def to(self, *args: Any, **kwargs: Any) -> Cloud:
        x = self.x.to(*args, **kwargs)
        weights = None if self.weights is None else self.weights.to(x)
        return Cloud(x, weights, None if self.mask is None else self.mask.to(x.device))

    def log_partition(self, g: Tensor, beta: float | Tensor) -> Tensor:
        if kernels.loses_digits(g, self.x, beta):
            return self.to(torch.float64).log_partition(g.double(), beta).to(g.dtype)

        def hot() -> Tensor:
            return torch.einsum("...md,...d->...m", g, self.mean)

        def cold() -> Tensor:
            return kernels.hardmax(g, self.x, self.x[..., :1], key_bias=self.log_weights)[1]

        def warm(b: Tensor) -> Tensor:
            centred = self.x - self.mean[..., None, :]  # so that a small beta does not cancel the digits of <g, mean>
            return hot() + kernels.log_mean_exp(b[..., None] * g, centred, self.probabilities) / b

        return _by_temperature(beta, g, hot, warm, cold)

    def tilted_mean(self, g: Tensor, beta: float | Tensor) -> Tensor:
        if kernels.loses_digits(g, self.x, beta):
            return self.to(torch.float64).tilted_mean(g.double(), beta).to(g.dtype)

        def hot() -> Tensor:
            return self.mean[..., None, :].expand(g.shape)

        def cold() -> Tensor:
            return kernels.hardmax(g, self.x, self.x, key_bias=self.log_weights)[0]

        def warm(b: Tensor) -> Tensor:
            return kernels.softmax(b[..., None] * g, self.x, self.x, key_bias=self.log_weights)

        return _by_temperature(beta, g, hot, warm, cold)


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
        return _by_temperature(
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
        return _by_temperature(
            beta,
            g,
            hot=lambda: torch.zeros_like(g),
            warm=lambda b: self.radius * bessel.ratio(self.d / 2 - 1, b[..., None] * self.radius * size) * direction,
            cold=lambda: self.radius * direction,
        )


@dataclass(frozen=True, eq=False)
class Gaussian:
    """N(mean, cov), its pull saturated at `cap` standard deviations of the logits.

    With s = beta sqrt(g^T S g):  beta L = beta <g,m> + H(s),  H(s) = s^2/2 up to s = cap, and s cap - cap^2/2
    beyond (Huber's function). cap = inf is the plain Gaussian, m_beta(g) = m + beta S g. n tokens drawn from it
    are a random-energy model with cap = sqrt(2 log n): `Gaussian.bulk`. With a finite cap, beta = inf is the
    ellipsoid of radius cap.
    """

    mean: Tensor
    cov: Tensor
    cap: float = math.inf

    def __post_init__(self) -> None:
        _check_moments(self.mean, self.cov)
        checks.positive("cap", self.cap)

    @classmethod
    def bulk(cls, mean: Tensor, cov: Tensor, n: float) -> Gaussian:
        """The Gaussian as n tokens show it: beyond s = sqrt(2 log n) a few of them win."""
        if n < 2:
            raise ValueError(f"n = {n}, expected at least 2 tokens in the bulk.")
        return cls(mean, cov, math.sqrt(2 * math.log(n)))

    @classmethod
    def fit(cls, cloud: Cloud, *, shrinkage: float | None = None, cap: float = math.inf) -> Gaussian:
        """Mean and covariance of a cloud; see `shrunk` for shrinkage."""
        mean, cov = cloud.moments()
        return cls(mean, shrunk(cov, cloud, shrinkage), cap)

    def to(self, *args: Any, **kwargs: Any) -> Gaussian:
        return Gaussian(self.mean.to(*args, **kwargs), self.cov.to(*args, **kwargs), self.cap)

    def log_partition(self, g: Tensor, beta: float | Tensor) -> Tensor:
        along, Sg, deviation = _along_and_across(g, self.mean, self.cov)

        def warm(b: Tensor) -> Tensor:
            inside = b * (g * Sg).sum(-1) / 2
            if math.isinf(self.cap):
                return along + inside
            beyond = deviation * self.cap - self.cap**2 / (2 * b)
            return along + torch.where(b * deviation < self.cap, inside, beyond)

        return _by_temperature(beta, g, lambda: along, warm, lambda: along + self._farthest() * deviation)

    def tilted_mean(self, g: Tensor, beta: float | Tensor) -> Tensor:
        _, Sg, deviation = _along_and_across(g, self.mean, self.cov)
        m = self.mean[..., None, :]

        def warm(b: Tensor) -> Tensor:
            saturated = b * deviation >= self.cap
            pull = torch.where(saturated, self.cap / torch.where(saturated, deviation, 1.0), b)
            return m + (b[..., None] if math.isinf(self.cap) else pull[..., None]) * Sg

        def cold() -> Tensor:
            return m + self._farthest() * _ratio(Sg, deviation)

        return _by_temperature(beta, g, lambda: m.expand(g.shape), warm, cold)

    def _farthest(self) -> float:
        if math.isinf(self.cap):
            raise ValueError("a Gaussian without cap has no support at beta = inf; use Gaussian.bulk(..., n) or a cap.")
        return self.cap


@dataclass(frozen=True, eq=False)
class EllipsoidSupport:
    """A law whose support is {(y-m)^T S^{-1} (y-m) <= rho^2}, the image of a uniform law on a sphere.

    It is y = m + rho S^{1/2} u with u uniform on the unit sphere of R^k, k = rank S, so that
    m_beta(g) = m + rho A_k(beta rho |S^{1/2} g|) S g / |S^{1/2} g|, and m + rho S g / sqrt(g^T S g) at beta = inf.
    rho = sqrt(k) gives it the covariance S.
    """

    mean: Tensor
    cov: Tensor
    rho: float
    rank: int | None = None  # k; None: measured

    def __post_init__(self) -> None:
        _check_moments(self.mean, self.cov)
        checks.positive("rho", self.rho)
        if self.rank is None:
            object.__setattr__(self, "rank", _rank(self.cov))

    @classmethod
    def fit(cls, cloud: Cloud, *, shrinkage: float | None = None, rho: float | None = None) -> EllipsoidSupport:
        """The ellipsoid with a cloud's mean and covariance: rho = sqrt(rank) unless given."""
        mean, cov = cloud.moments()
        cov = shrunk(cov, cloud, shrinkage)
        rank = _rank(cov)
        return cls(mean, cov, math.sqrt(rank) if rho is None else rho, rank)

    @property
    def _sphere(self) -> UniformSphere:
        assert self.rank is not None  # measured when it was not given
        return UniformSphere(self.rank, self.rho)

    def to(self, *args: Any, **kwargs: Any) -> EllipsoidSupport:
        return EllipsoidSupport(self.mean.to(*args, **kwargs), self.cov.to(*args, **kwargs), self.rho, self.rank)

    def log_partition(self, g: Tensor, beta: float | Tensor) -> Tensor:
        along, _, deviation = _along_and_across(g, self.mean, self.cov)
        return along + self._sphere.log_partition(deviation[..., None], beta)

    def tilted_mean(self, g: Tensor, beta: float | Tensor) -> Tensor:
        _, Sg, deviation = _along_and_across(g, self.mean, self.cov)
        pull = self._sphere.tilted_mean(deviation[..., None], beta)
        return self.mean[..., None, :] + pull * _ratio(Sg, deviation)


@dataclass(frozen=True, eq=False)
class Mixture:
    """sum_c pi_c mu_c: tilted weights softmax_c(log pi_c + beta L_c(g)), mean their mean of the m_c(g).

    Weights need not sum to one (they are normalised); they are (components,) or (..., components).
    """

    components: Sequence[Measure]
    weights: Tensor

    def __post_init__(self) -> None:
        if len(self.components) == 0 or self.weights.shape[-1] != len(self.components):
            raise ValueError(
                f"weights have shape {tuple(self.weights.shape)} for {len(self.components)} components, "
                "expected one weight per component and at least one component."
            )
        checks.finite("weights", self.weights)
        if checks.can_look(self.weights) and bool((self.weights < 0).any() | (self.weights.sum(-1) <= 0).any()):
            raise ValueError("mixture weights must be nonnegative with some mass.")

    def to(self, *args: Any, **kwargs: Any) -> Mixture:
        return Mixture([mu.to(*args, **kwargs) for mu in self.components], self.weights.to(*args, **kwargs))

    def log_partition(self, g: Tensor, beta: float | Tensor) -> Tensor:
        L, log_pi = self._tilt(g, beta)
        log_partition = _by_temperature(
            beta,
            g.double(),
            hot=lambda: (log_pi.exp() * L).sum(-1),
            warm=lambda b: _log_mean_exp(L, log_pi, b),
            cold=lambda: torch.where(log_pi.isneginf(), -torch.inf, L).amax(-1),
        )
        return log_partition.to(g.dtype)

    def tilted_mean(self, g: Tensor, beta: float | Tensor) -> Tensor:
        means = torch.stack([mu.tilted_mean(g, beta) for mu in self.components], dim=-1)
        return (means * self.responsibilities(g, beta)[..., None, :]).sum(-1)

    def responsibilities(self, g: Tensor, beta: float | Tensor) -> Tensor:
        """The tilted weights of the components, (..., m, components); ties are shared at beta = inf."""
        L, log_pi = self._tilt(g, beta)

        def cold() -> Tensor:
            shown = torch.where(log_pi.isneginf(), -torch.inf, L)
            top = shown >= shown.amax(-1, keepdim=True)
            return torch.where(top, log_pi, -torch.inf).softmax(-1)

        warm = lambda b: (b[..., None] * L + log_pi).softmax(-1)
        return _by_temperature(beta, g.double(), log_pi.exp, warm, cold).to(g.dtype)

    def _tilt(self, g: Tensor, beta: float | Tensor) -> tuple[Tensor, Tensor]:
        """The components' L_c(g) and log pi_c, each (..., m, components).

        In float64 whatever g is: beta multiplies their differences, and at beta = 1e6 float32 has no digits left.
        """
        g = g.double()
        L = torch.stack([mu.to(torch.float64).log_partition(g, beta) for mu in self.components], dim=-1)
        pi = self.weights.to(g) / self.weights.to(g).sum(-1, keepdim=True)
        return L, pi.log()[..., None, :].expand(L.shape)


def _log_mean_exp(L: Tensor, log_pi: Tensor, b: Tensor) -> Tensor:
    """(1/b) log sum_c pi_c e^{b L_c}, centred so that a small b does not cancel the digits of the mean."""
    mean = (log_pi.exp() * L).sum(-1)
    return mean + kernels.log_mean_of_exp(b[..., None] * (L - mean[..., None]), log_pi.exp()) / b


def length(g: Tensor) -> Tensor:
    """|g| (..., m), with gradient zero instead of NaN at g = 0."""
    return _sqrt(g.square().sum(-1))


def _sqrt(square: Tensor) -> Tensor:
    positive = square > 0
    return torch.where(positive, torch.where(positive, square, 1.0).sqrt(), 0.0)


def _along_and_across(g: Tensor, mean: Tensor, cov: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """<g,m> (..., m), S g (..., m, d) and sqrt(g^T S g) (..., m)."""
    Sg = g @ cov.mT
    return (g * mean[..., None, :]).sum(-1), Sg, _sqrt((g * Sg).sum(-1))


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
        if not 0 <= shrinkage <= 1:
            raise ValueError(f"shrinkage = {shrinkage}, expected a number in [0, 1].")
        a = torch.full_like(scale, shrinkage)
    eye = torch.eye(d, dtype=cov.dtype, device=cov.device)
    return (1 - a)[..., None, None] * cov + (a * scale)[..., None, None] * eye


def _rank(cov: Tensor) -> int:
    """The largest rank in a batch of covariances; a single point counts as a segment of no length."""
    return max(1, int(torch.linalg.matrix_rank(cov, hermitian=True).max()))


def _check_moments(mean: Tensor, cov: Tensor) -> None:
    if cov.shape[-2:] != (*mean.shape[-1:], *mean.shape[-1:]):
        raise ValueError(
            f"cov has shape {tuple(cov.shape)}, expected (..., d, d) to match a mean of shape {tuple(mean.shape)}."
        )
    checks.finite("mean", mean)
    checks.finite("cov", cov)
