"""Weighted tokens as a measure: the law that self-attention itself sees."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from attn_flow.averages import dense
from attn_flow.base import checks
from attn_flow.measures.measure import by_temperature


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
        if dense.loses_digits(g, self.x, beta):
            return self.to(torch.float64).log_partition(g.double(), beta).to(g.dtype)

        def hot() -> Tensor:
            return torch.einsum("...md,...d->...m", g, self.mean)

        def cold() -> Tensor:
            return dense.hardmax(g, self.x, self.x[..., :1], key_bias=self.log_weights)[1]

        def warm(b: Tensor) -> Tensor:
            centred = self.x - self.mean[..., None, :]  # so that a small beta does not cancel the digits of <g, mean>
            return hot() + dense.log_mean_exp(b[..., None] * g, centred, self.probabilities) / b

        return by_temperature(beta, g, hot, warm, cold)

    def tilted_mean(self, g: Tensor, beta: float | Tensor) -> Tensor:
        if dense.loses_digits(g, self.x, beta):
            return self.to(torch.float64).tilted_mean(g.double(), beta).to(g.dtype)

        def hot() -> Tensor:
            return self.mean[..., None, :].expand(g.shape)

        def cold() -> Tensor:
            return dense.hardmax(g, self.x, self.x, key_bias=self.log_weights)[0]

        def warm(b: Tensor) -> Tensor:
            return dense.softmax(b[..., None] * g, self.x, self.x, key_bias=self.log_weights)

        return by_temperature(beta, g, hot, warm, cold)
