"""Measures that differ from query to query: a few tokens for each query, or the moments of the tokens it sees.

The i-th query g_i meets the i-th row only, so that there are as many queries as rows. These measures keep their mass
(they are not normalised): in a `Mixture` with equal weights each counts as its number of tokens.
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
class PerQueryCloud:
    """sum_w weights_iw delta_{x_iw} for the i-th query.

    Args:
        x: (..., n, w, d), w tokens for each of n queries.
        weights: (..., n, w), nonnegative; zero where there is no token.

    Example:
        >>> mu = PerQueryCloud(torch.tensor([[[1.0], [3.0]]]), torch.tensor([[1.0, 1.0]]))
        >>> mu.tilted_mean(torch.zeros(1, 1), 1.0)
        tensor([[2.]])
    """

    x: Tensor
    weights: Tensor

    def __post_init__(self) -> None:
        checks.require_shape("weights", self.weights, self.x.shape[-3:-1])
        _require_masses("weights", self.weights)

    def to(self, *args: Any, **kwargs: Any) -> PerQueryCloud:
        """The same measure with its tensors moved or cast, as `Tensor.to`."""
        x = self.x.to(*args, **kwargs)
        return PerQueryCloud(x, self.weights.to(x))

    def log_partition(self, g: Tensor, beta: float | Tensor) -> Tensor:
        """(1/beta) log sum_w weights e^{beta <g, x>}, (..., n); -inf for a query without tokens."""
        scores, log_w = self._scores(g)
        return by_temperature(
            beta,
            g,
            hot=lambda: (self.weights * scores).sum(-1) / self.weights.sum(-1),
            warm=lambda b: (b[..., None] * scores + log_w).logsumexp(-1) / b,
            cold=lambda: torch.where(self.weights > 0, scores, -torch.inf).amax(-1),
        )

    def tilted_mean(self, g: Tensor, beta: float | Tensor) -> Tensor:
        """The mean under weights e^{beta <g, x>}, (..., n, d); some finite point for a query without tokens."""
        scores, log_w = self._scores(g)
        has_tokens = (self.weights > 0).any(-1, keepdim=True)

        def mean(logits: Tensor) -> Tensor:
            p = torch.where(has_tokens, logits, 0.0).softmax(-1)
            return (p[..., None, :] @ self.x)[..., 0, :]

        def cold() -> Tensor:
            best = torch.where(self.weights > 0, scores, -torch.inf).amax(-1, keepdim=True)
            return mean(torch.where(scores >= best, log_w, -torch.inf))

        return by_temperature(beta, g, lambda: mean(log_w), lambda b: mean(b[..., None] * scores + log_w), cold)

    def _scores(self, g: Tensor) -> tuple[Tensor, Tensor]:
        """<g_i, x_iw> and log weights, both (..., n, w)."""
        _require_one_query_per_row(g, self.x.shape[-3])
        scores = (self.x @ g[..., None])[..., 0]
        return scores, self.weights.log().expand(scores.shape)


@dataclass(frozen=True, eq=False)
class PerQueryGaussian:
    """For each query the Gaussian with the mean and covariance of the tokens that it sees.

    Its mass is the number of tokens seen. Its pull saturates at `cap` standard deviations of the logits, as that of
    `Gaussian`. If every query sees every token it is `Gaussian.fit`, with mass m.

    Args:
        x: tokens (..., m, d).
        visible: (..., n, m), the weight of each token for each query, zero if it is hidden.
        cap: positive, in standard deviations of the logits.

    Example:
        >>> mu = PerQueryGaussian(torch.tensor([[1.0], [3.0]]), visible=torch.tensor([[1.0, 1.0], [1.0, 0.0]]))
        >>> mu.tilted_mean(torch.ones(2, 1), 1.0)  # mean plus variance
        tensor([[3.],
                [1.]])
    """

    x: Tensor
    visible: Tensor
    cap: float = math.inf

    def __post_init__(self) -> None:
        checks.require_tokens("x", self.x)
        checks.require_shape("visible", self.visible, self.x.shape[-2:-1])
        _require_masses("visible", self.visible)

    def to(self, *args: Any, **kwargs: Any) -> PerQueryGaussian:
        """The same measure with its tensors moved or cast, as `Tensor.to`."""
        x = self.x.to(*args, **kwargs)
        return PerQueryGaussian(x, self.visible.to(x), self.cap)

    def log_partition(self, g: Tensor, beta: float | Tensor) -> Tensor:
        """<g, m_i> + H(beta s_i)/beta + (1/beta) log mass, (..., n); -inf for a query that sees no token."""
        mass, _, along, _, deviation = self._moments(g)
        b = _finite_beta(beta, g)
        s = b * deviation
        H = s**2 / 2
        if self.cap < math.inf:
            H = torch.where(s < self.cap, H, s * self.cap - self.cap**2 / 2)
        return along + (H + mass.log()) / b

    def tilted_mean(self, g: Tensor, beta: float | Tensor) -> Tensor:
        """m_i + beta S_i g_i with its second part saturated, (..., n, d)."""
        _, mean, _, Sg, deviation = self._moments(g)
        b = _finite_beta(beta, g).expand(deviation.shape)
        if self.cap < math.inf:
            is_saturated = b * deviation >= self.cap
            b = torch.where(is_saturated, self.cap / torch.where(is_saturated, deviation, 1.0), b)
        return mean + b[..., None] * Sg

    def _moments(self, g: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Mass, mean, <g, mean>, S g and sqrt(g^T S g) of every query, without forming a covariance."""
        _require_one_query_per_row(g, self.visible.shape[-2])
        mass = self.visible.sum(-1)
        p = self.visible / torch.where(mass > 0, mass, 1.0)[..., None]
        scores = g @ self.x.mT
        along = (p * scores).sum(-1)
        centred = p * (scores - along[..., None])
        return mass, p @ self.x, along, centred @ self.x, (centred * scores).sum(-1).clamp_min(0).sqrt()


def _require_masses(name: str, weights: Tensor) -> None:
    w = weights.detach()
    checks.require(w.isfinite() & (w >= 0), f"{name} must be finite and nonnegative.")


def _require_one_query_per_row(g: Tensor, n: int) -> None:
    if g.shape[-2] != n:
        raise ValueError(f"g has shape {tuple(g.shape)}, expected {n} queries, one for each row of the measure.")


def _finite_beta(beta: float | Tensor, g: Tensor) -> Tensor:
    b = torch.as_tensor(beta, dtype=g.dtype, device=g.device)
    checks.require(b.detach().isfinite(), "beta = inf, expected a finite beta: moments do not know the support.")
    return b
