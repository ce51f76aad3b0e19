"""Weighted tokens as a probability measure: what self-attention itself sees."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from attn_flow.base import checks
from attn_flow.kernels import dense
from attn_flow.measures.measure import as_tensor, length, over_beta, require_queries


@dataclass(frozen=True, eq=False, repr=False)
class Cloud:
    """The measure sum_j w_j delta_{x_j} / sum_j w_j of tokens x_j with weights w_j.

    Args:
        x: tokens (..., n, d); leading axes are a batch of clouds.
        weights: nonnegative weights (..., n) of any sum; None stands for equal weights.
        mask: (..., n), True for tokens and False for padding, which may hold any finite numbers; None: no padding.

    Example:
        >>> cloud = Cloud(torch.tensor([[1.0, 0.0], [0.0, 1.0]]), weights=torch.tensor([3.0, 1.0]))
        >>> cloud
        Cloud(x (2, 2) float32, weights)
        >>> cloud.mean
        tensor([0.7500, 0.2500])
        >>> cloud.tilted_mean(torch.tensor([[0.0, 1.0]]), beta=float("inf"))  # the token with the highest score
        tensor([[0., 1.]])
    """

    x: Tensor
    weights: Tensor | None = None
    mask: Tensor | None = None

    def __post_init__(self) -> None:
        batch = checks.require_cloud(self.x, self.weights, self.mask)
        if batch != self.x.shape[:-2]:  # the weights or the mask are a batch of clouds on the same tokens
            object.__setattr__(self, "x", self.x.expand(*batch, *self.x.shape[-2:]))

    @classmethod
    def unchecked(cls, x: Tensor, weights: Tensor | None = None, mask: Tensor | None = None) -> Cloud:
        """A cloud whose values are not checked, so that nothing is read from its device."""
        cloud = object.__new__(cls)
        vars(cloud).update(x=x, weights=weights, mask=mask)
        return cloud

    def __repr__(self) -> str:
        parts = [f"x {tuple(self.x.shape)} {str(self.x.dtype).removeprefix('torch.')}"]
        parts += [name for name in ("weights", "mask") if getattr(self, name) is not None]
        return f"Cloud({', '.join(parts)})"

    @property
    def probabilities(self) -> Tensor:
        """Weights (..., n) that sum to one and are zero on padding."""
        weights = torch.ones_like(self.x[..., 0]) if self.weights is None else self.weights
        weights = weights.to(torch.promote_types(weights.dtype, self.x.dtype))
        weights = weights.expand(torch.broadcast_shapes(weights.shape, self.x.shape[:-1]))
        if self.mask is not None:
            weights = torch.where(self.mask, weights, 0.0)
        weights = weights / weights.detach().amax(-1, keepdim=True)  # so that the sum cannot overflow
        return (weights / weights.sum(-1, keepdim=True)).to(self.x.dtype)

    @property
    def log_weights(self) -> Tensor | None:
        """Logarithms of the probabilities (..., n), -inf for zero; None if all tokens have equal weight."""
        if self.weights is None and self.mask is None:
            return None
        p = self.probabilities
        # The inner `where` keeps the gradient at zero weights finite.
        return torch.where(p > 0, torch.where(p > 0, p, 1.0).log(), -torch.inf)

    @property
    def mean(self) -> Tensor:
        """The weighted mean of the tokens, (..., d)."""
        return (self.probabilities[..., None, :] @ self.x)[..., 0, :]

    @property
    def max_norm(self) -> Tensor:
        """The length of the longest token that is not padding, shape ()."""
        return self.zero_padding(self.x).detach().norm(dim=-1).amax()

    def moments(self) -> tuple[Tensor, Tensor]:
        """The mean (..., d) and covariance (..., d, d) under the weights."""
        centred = self.zero_padding(self.x - self.mean[..., None, :])
        return self.mean, torch.einsum("...j,...jd,...je->...de", self.probabilities, centred, centred)

    def zero_padding(self, u: Tensor) -> Tensor:
        """One vector per token, u (..., n, d), with zeros on padding."""
        return u if self.mask is None else torch.where(self.mask[..., None], u, 0.0)

    def filled(self) -> Tensor:
        """The tokens (..., n, d), with padding replaced by the first token of its cloud.

        Padding may hold zeros, which have no direction on the sphere.
        """
        if self.mask is None:
            return self.x
        mask, x = torch.broadcast_tensors(self.mask[..., None], self.x)  # (..., n, d) both
        first = mask.byte().argmax(-2, keepdim=True)  # (..., 1, d), the index of the first token
        return torch.where(mask, x, x.gather(-2, first))

    def to(self, *args: Any, **kwargs: Any) -> Cloud:
        """The same cloud with its tensors moved or cast, as `Tensor.to`."""
        x = self.x.to(*args, **kwargs)
        weights = None if self.weights is None else self.probabilities.to(x)
        return Cloud(x, weights, None if self.mask is None else self.mask.to(x.device))

    def log_partition(self, g: Tensor, beta: float | Tensor) -> Tensor:
        """L_beta(g) = (1/beta) log sum_j w_j e^{beta <g, x_j>}, (..., m), for queries g (..., m, d)."""
        require_queries(g, self.x.shape[-1], self.x.dtype)
        along = (g * self.mean[..., None, :]).sum(-1)
        centred = self.zero_padding(self.x - self.mean[..., None, :])
        _, log_sum = dense.average_and_log_sum(g, centred, centred[..., :1], self.log_weights, scale=_scale(beta, g))
        if dense.is_infinite(beta):  # the log-sum is the highest score
            return along + log_sum
        log_mean = log_sum if self.log_weights is not None else log_sum - math.log(self.x.shape[-2])
        spread = length(g) * length(centred).amax(-1, keepdim=True)
        return along + over_beta(log_mean, as_tensor(beta, g), spread)

    def tilted_mean(self, g: Tensor, beta: float | Tensor) -> Tensor:
        """m_beta(g) = sum_j softmax_j(beta <g, x_j> + log w_j) x_j, (..., m, d); ties are averaged at beta = inf."""
        require_queries(g, self.x.shape[-1], self.x.dtype)
        x = self.zero_padding(self.x)
        return dense.softmax_average(g, x, x, self.log_weights, scale=_scale(beta, g))


def _scale(beta: float | Tensor, g: Tensor) -> float | Tensor:
    """beta as the scale of a kernel: a tensor has an axis for the coordinates of g."""
    return beta.to(g)[..., None] if isinstance(beta, Tensor) else beta


def as_cloud(tokens: Tensor | Cloud, name: str = "x", validate: bool = True) -> Cloud:
    """A cloud as it is, or a plain tensor (..., n, d) as a cloud of equal weights; `name` is its name in errors."""
    if isinstance(tokens, Cloud):
        return tokens
    checks.require_tokens(name, tokens)
    if validate:
        checks.require_finite(name, tokens)
    return Cloud.unchecked(tokens)
