"""Weighted tokens as a measure: the law that self-attention itself sees."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from attn_flow.averages import dense
from attn_flow.base import checks
from attn_flow.base.words import introduce
from attn_flow.measures.measure import by_temperature


@dataclass(frozen=True, eq=False, repr=False)
class Cloud:
    """Weighted tokens sum_j w_j delta_{x_j} / sum_j w_j.

    x: tokens (..., n, d); leading axes are a batch of clouds.
    weights: masses (..., n), nonnegative, of any total; equal ones if not given.
    mask: (..., n), True for tokens and False for padding, which has no mass and may hold any finite numbers.

    >>> import torch
    >>> cloud = Cloud(torch.tensor([[1.0, 0.0], [0.0, 1.0]]), weights=torch.tensor([3.0, 1.0]))
    >>> cloud
    Cloud(x=float32 (2, 2), weights=float32 (2,))
    >>> cloud.mean
    tensor([0.7500, 0.2500])
    >>> cloud.tilted_mean(torch.tensor([[0.0, 1.0]]), beta=float("inf"))  # the token that scores highest
    tensor([[0., 1.]])
    """

    x: Tensor
    weights: Tensor | None = None
    mask: Tensor | None = None

    def __post_init__(self) -> None:
        checks.tokens("x", self.x)
        if self.mask is not None:
            checks.token_mask(self.mask, self.x)
        if self.weights is not None:
            checks.token_weights(self.weights, self.x, self.mask)
        for more in (self.mask, self.weights):  # leading axes of their own are a batch of clouds on the same tokens
            if more is not None and more.shape != self.x.shape[:-1]:
                batch = torch.broadcast_shapes(more.shape, self.x.shape[:-1])
                object.__setattr__(self, "x", self.x.expand(*batch, self.x.shape[-1]))

    def __repr__(self) -> str:
        return introduce(self, "x", "weights", "mask")

    def _given(self) -> Tensor:
        """The weights, zero where masked, (..., n), in their precision or that of the tokens."""
        w = torch.ones_like(self.x[..., 0]) if self.weights is None else self.weights
        w = w.to(torch.promote_types(w.dtype, self.x.dtype))
        w = w.expand(torch.broadcast_shapes(w.shape, self.x.shape[:-1]))
        if self.mask is not None:
            w = torch.where(self.mask, w, 0.0)
        return w

    def _masses(self) -> Tensor:
        """w_j / max w, (..., n): the sum of the weights themselves may overflow."""
        w = self._given()
        return w if self.weights is None else w / w.detach().amax(-1, keepdim=True)

    @property
    def probabilities(self) -> Tensor:
        """w_j, zero where masked, summing to one, (..., n)."""
        w = self._masses()
        return (w / w.sum(-1, keepdim=True)).to(self.x.dtype)

    @property
    def log_weights(self) -> Tensor | None:
        """log w_j of the probabilities (..., n), or None when all are equal (the softmax then cancels them)."""
        if self.weights is None and self.mask is None:
            return None
        w, mass = self._given(), self._masses()
        # One that underflows beside the largest is still there: its logarithm is of the weight itself.
        under = (mass < torch.finfo(mass.dtype).tiny) & (w > 0)
        below = torch.where(under, w, 1.0).log() - w.detach().amax(-1, keepdim=True).log()
        log_mass = torch.where(under, below, torch.where(under, 1.0, mass).log())
        return (log_mass - mass.sum(-1, keepdim=True).log()).to(self.x.dtype)

    @property
    def shown(self) -> Tensor:
        """The tokens (..., n, d) with padding at the origin, whatever it holds."""
        return self.x if self.mask is None else torch.where(self.mask[..., None], self.x, 0.0)

    @property
    def mean(self) -> Tensor:
        """sum_j w_j x_j, (..., d)."""
        return torch.einsum("...j,...jd->...d", self.probabilities, self.x)

    def moments(self) -> tuple[Tensor, Tensor]:
        """Mean (..., d) and covariance (..., d, d) under the weights."""
        centred = self.x - self.mean[..., None, :]
        return self.mean, torch.einsum("...j,...jd,...je->...de", self.probabilities, centred, centred)

    def to(self, *args: Any, **kwargs: Any) -> Cloud:
        """The same cloud with its tensors moved or cast, as `Tensor.to`."""
        checks.moves(*args, **kwargs)
        x = self.x.to(*args, **kwargs)
        weights = self.weights
        if weights is not None:
            # Another precision may not hold the masses as they are.
            weights = (weights if weights.dtype == x.dtype else self._masses()).to(x)
        return Cloud(x, weights, None if self.mask is None else self.mask.to(x.device))

    def log_partition(self, g: Tensor, beta: float | Tensor) -> Tensor:
        """L_beta(g) = (1/beta) log sum_j w_j e^{beta <g, x_j>}, (..., m), for queries g (..., m, d)."""
        checks.queries(g, self.x.shape[-1], self.x)
        checks.inverse_temperature(beta)
        if dense.loses_digits(g, self.x, beta):
            found = self.to(torch.float64).log_partition(g.double(), beta).to(g.dtype)
            checks.in_range("the log-partition of a cloud", found)
            return found

        def hot() -> Tensor:
            return torch.einsum("...md,...d->...m", g, self.mean)

        def cold() -> Tensor:
            return dense.hardmax(g, self.x, self.x[..., :1], key_bias=self.log_weights)[1]

        def warm(b: Tensor) -> Tensor:
            centred = self.x - self.mean[..., None, :]  # so that a small beta does not cancel the digits of <g, mean>
            return hot() + dense.log_mean_exp(b[..., None] * g, centred, self.probabilities) / b

        found = by_temperature(beta, g, hot, warm, cold)
        checks.in_range("the log-partition of a cloud", found)
        return found

    def tilted_mean(self, g: Tensor, beta: float | Tensor) -> Tensor:
        """m_beta(g) = sum_j softmax_j(beta <g, x_j> + log w_j) x_j, (..., m, d); ties are averaged at beta = inf."""
        checks.queries(g, self.x.shape[-1], self.x)
        checks.inverse_temperature(beta)
        if dense.loses_digits(g, self.x, beta):
            return self.to(torch.float64).tilted_mean(g.double(), beta).to(g.dtype)

        def hot() -> Tensor:
            return self.mean[..., None, :].expand(g.shape)

        def cold() -> Tensor:
            return dense.hardmax(g, self.x, self.x, key_bias=self.log_weights)[0]

        def warm(b: Tensor) -> Tensor:
            return dense.softmax(b[..., None] * g, self.x, self.x, key_bias=self.log_weights)

        found = by_temperature(beta, g, hot, warm, cold)
        checks.in_range("the tilted mean of a cloud", found)
        return found
