"""Laws that differ from query to query: a few tokens of its own, or the moments of the tokens it may see.

The i-th query g_i meets the i-th row only, so that there are as many queries as rows. These laws keep their mass (they
are not normalised): in a `Mixture` with equal weights they are what they count.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from attn_flow.base import checks
from attn_flow.measures.measure import by_temperature


@dataclass(frozen=True, eq=False)
class OwnTokens:
    """sum_w weights_iw delta_{x_iw} for the i-th query: x (..., n, w, d), weights (..., n, w), 0 where there is none.

    >>> mu = OwnTokens(torch.tensor([[[1.0], [3.0]]]), torch.tensor([[1.0, 1.0]]))
    >>> mu.tilted_mean(torch.zeros(1, 1), 1.0)
    tensor([[2.]])
    """

    x: Tensor
    weights: Tensor

    def __post_init__(self) -> None:
        checks.floating("x", self.x, "(..., n, w, d)")
        checks.tensor("weights", self.weights, "(..., n, w)")
        if (
            self.x.ndim < 3
            or 0 in (*self.x.shape, *self.weights.shape)
            or self.weights.shape[-2:] != self.x.shape[-3:-1]
        ):
            raise ValueError(
                f"weights have shape {tuple(self.weights.shape)}, expected (..., n, w) to match x of shape "
                f"{tuple(self.x.shape)}, expected (..., n, w, d)."
            )
        checks.finite("x", self.x)
        _counted("weights", self.weights, self.x)

    def to(self, *args: Any, **kwargs: Any) -> OwnTokens:
        checks.moves(*args, **kwargs)
        x = self.x.to(*args, **kwargs)
        return OwnTokens(x, self.weights.to(x))

    def log_partition(self, g: Tensor, beta: float | Tensor) -> Tensor:
        """(1/beta) log sum_w weights e^{beta <g, x>}, (..., n); -inf for a query with no token of its own."""
        scores, log_w = self._scores(g)
        return by_temperature(
            beta,
            g,
            hot=lambda: (self.weights * scores).sum(-1) / self.weights.sum(-1),
            warm=lambda b: (b[..., None] * scores + log_w).logsumexp(-1) / b,
            cold=lambda: torch.where(self.weights > 0, scores, -torch.inf).amax(-1),
        )

    def tilted_mean(self, g: Tensor, beta: float | Tensor) -> Tensor:
        """The mean under weights e^{beta <g, x>}, (..., n, d); some token where a query has none of its own."""
        scores, log_w = self._scores(g)
        shown = (self.weights > 0).any(-1, keepdim=True)

        def mean(logits: Tensor) -> Tensor:
            p = torch.where(shown, logits, 0.0).softmax(-1)
            return (p[..., None, :] @ self.x)[..., 0, :]

        def cold() -> Tensor:
            best = torch.where(self.weights > 0, scores, -torch.inf).amax(-1, keepdim=True)
            return mean(torch.where(scores >= best, log_w, -torch.inf))

        return by_temperature(beta, g, lambda: mean(log_w), lambda b: mean(b[..., None] * scores + log_w), cold)

    def _scores(self, g: Tensor) -> tuple[Tensor, Tensor]:
        _one_each(g, self.x.shape[-3], self.x)
        scores = (self.x @ g[..., None])[..., 0]
        return scores, self.weights.log().expand(scores.shape)


@dataclass(frozen=True, eq=False)
class SeenGaussian:
    """The Gaussian of the tokens a query sees: mean and covariance of x (..., m, d) under the rows of sees (n, m).

    Its mass is the number of tokens seen; its pull saturates at `cap` standard deviations of the logits, as that of
    `Gaussian`. With everything seen it is `Gaussian.fit` with the mass m.
    """

    x: Tensor
    sees: Tensor  # (..., n, m) weights, 0 where hidden
    cap: float = math.inf

    def __post_init__(self) -> None:
        checks.tokens("x", self.x)
        checks.tensor("sees", self.sees, "(..., n, m)")
        if self.sees.ndim < 2 or 0 in self.sees.shape or self.sees.shape[-1] != self.x.shape[-2]:
            raise ValueError(
                f"sees has shape {tuple(self.sees.shape)}, expected (..., n, m) to match x of shape "
                f"{tuple(self.x.shape)}, (..., m, d)."
            )
        _counted("sees", self.sees, self.x)
        checks.positive("cap", self.cap)

    def to(self, *args: Any, **kwargs: Any) -> SeenGaussian:
        checks.moves(*args, **kwargs)
        x = self.x.to(*args, **kwargs)
        return SeenGaussian(x, self.sees.to(x), self.cap)

    def log_partition(self, g: Tensor, beta: float | Tensor) -> Tensor:
        """<g, m_i> + H(beta s_i)/beta + (1/beta) log mass, (..., n); -inf for a query that sees nothing."""
        mass, _, along, _, deviation = self._moments(g)
        b = _finite_beta(beta, g)
        s = b * deviation
        H = (
            torch.where(s < self.cap, s.square() / 2, s * self.cap - self.cap**2 / 2)
            if self.cap < math.inf
            else s**2 / 2
        )
        found = along + (H + mass.log()) / b
        if checks.can_look(found) and bool(found.isnan().any()):
            checks.in_range("the log-partition of what a query sees", found)
        return found

    def tilted_mean(self, g: Tensor, beta: float | Tensor) -> Tensor:
        """m_i + beta S_i g_i, its second part saturated, (..., n, d)."""
        _, mean, _, Sg, deviation = self._moments(g)
        b = _finite_beta(beta, g)
        saturated = b * deviation >= self.cap
        pull = torch.where(saturated, self.cap / torch.where(saturated, deviation, 1.0), b)
        return mean + (pull if self.cap < math.inf else b.expand(deviation.shape))[..., None] * Sg

    def _moments(self, g: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Mass, mean, <g, mean>, S g and sqrt(g^T S g) of every query, without holding a covariance."""
        _one_each(g, self.sees.shape[-2], self.x)
        mass = self.sees.sum(-1)
        p = self.sees / torch.where(mass > 0, mass, 1.0)[..., None]
        scores = g @ self.x.mT
        along = (p * scores).sum(-1)
        centred = p * (scores - along[..., None])
        return mass, p @ self.x, along, centred @ self.x, (centred * scores).sum(-1).clamp_min(0).sqrt()


def _counted(name: str, weights: Tensor, x: Tensor) -> None:
    """Masses of the dtype of the tokens, 0 where a query sees none."""
    if weights.dtype != x.dtype:
        raise ValueError(f"{name} has dtype {weights.dtype} and x {x.dtype}; use {name}.to(x).")
    checks.finite(name, weights)

    def look() -> None:
        raise ValueError(f"{name} reaches {float(weights.min()):.3g}, expected nonnegative masses.")

    if checks.can_look(weights):
        checks.look_if((weights < 0).any(), look)


def _one_each(g: Tensor, n: int, x: Tensor) -> None:
    """As many queries as rows."""
    checks.queries(g, x.shape[-1], x)
    if g.shape[-2] != n:
        raise ValueError(f"g has shape {tuple(g.shape)}, expected {n} queries, one for each row of the law.")


def _finite_beta(beta: float | Tensor, g: Tensor) -> Tensor:
    """The moments know a finite beta only."""
    checks.inverse_temperature(beta)
    b = torch.as_tensor(beta, dtype=g.dtype, device=g.device)
    if checks.can_look(b) and not bool(torch.isfinite(b).all()):
        raise ValueError("beta = inf: the moments of what a query sees have no support; expected a finite beta.")
    return b
