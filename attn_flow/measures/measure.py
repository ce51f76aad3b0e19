"""Distributions of tokens, each with its scaled log-partition and the gradient of it, the tilted mean.

    L_beta[mu](g) = (1/beta) log int e^{beta <g,y>} dmu(y)        (beta = 0: <g, mean>; beta = inf: the maximum)
    m_beta[mu](g) = grad_g L_beta = int y e^{beta <g,y>} dmu / int e^{beta <g,y>} dmu

Self-attention is V m_beta[mu](G x). Here mu is a cloud of tokens, the uniform distribution of a sphere, a Gaussian, an
ellipsoid, or a mixture of any of them; g is (..., m, d), beta a number or a tensor that broadcasts against (..., m).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

from attn_flow.base.checks import can_read


class Measure(Protocol):
    """A distribution of tokens: any object with these three methods can be attended to."""

    def log_partition(self, g: Tensor, beta: float | Tensor) -> Tensor:
        """L_beta(g), (..., m)."""
        ...

    def tilted_mean(self, g: Tensor, beta: float | Tensor) -> Tensor:
        """m_beta(g) = grad L_beta(g), (..., m, d)."""
        ...

    def to(self, *args: Any, **kwargs: Any) -> Measure:
        """The same measure with its tensors moved or cast, as `Tensor.to`."""
        ...


def by_temperature(
    beta: float | Tensor,
    g: Tensor,
    hot: Callable[[], Tensor],
    warm: Callable[[Tensor], Tensor],
    cold: Callable[[], Tensor],
) -> Tensor:
    """hot() where beta = 0, cold() where beta = inf, and warm(beta) in between.

    A beta below the smallest normal number counts as 0, because it cannot be divided by. A tensor beta that mixes these
    cases is read from its device.
    """
    tiny = torch.finfo(g.dtype).tiny
    if not isinstance(beta, Tensor):
        if beta < tiny:
            return hot()
        return cold() if math.isinf(beta) else warm(torch.as_tensor(beta, dtype=g.dtype, device=g.device))
    b = beta.to(g)
    is_zero, is_infinite = b < tiny, b.isinf()
    if not can_read(b) or not bool((is_zero | is_infinite).any()):
        return warm(b)
    value = warm(torch.where(is_zero | is_infinite, 1.0, b))
    is_vector = value.ndim > max(b.ndim, g.ndim - 1)  # a mean (..., m, d), or a number (..., m)
    for condition, formula in ((is_zero, hot), (is_infinite, cold)):
        if bool(condition.any()):
            value = torch.where(condition[..., None] if is_vector else condition, formula(), value)
    return value


def log_mean_exp(t: Tensor, w: Tensor) -> Tensor:
    """log sum_j w_j e^{t_j} over the last axis, for sum_j w_j = 1 and sum_j w_j t_j = 0.

    It is of second order in t, so small t go through expm1 and log1p, which keep their digits.
    """
    is_small = t.amax(-1) <= 1
    small = torch.where(is_small[..., None], t, 0.0)
    return torch.where(is_small, torch.log1p((w * torch.expm1(small)).sum(-1)), torch.logsumexp(t + w.log(), dim=-1))


def length(g: Tensor) -> Tensor:
    """|g| (...) of vectors (..., d), with gradient zero instead of NaN at g = 0; squares do not overflow."""
    size = largest_entry(g)
    return size[..., 0] * sqrt_or_zero((g / size).square().sum(-1))


def largest_entry(g: Tensor) -> Tensor:
    """max_i |g_i| (..., 1) of every vector, as a constant to divide by: 1 for g = 0."""
    size = g.detach().abs().amax(-1, keepdim=True)
    return torch.where(size > 0, size, 1.0)


def sqrt_or_zero(square: Tensor) -> Tensor:
    """sqrt, with value and gradient zero at and below zero."""
    is_positive = square > 0
    return torch.where(is_positive, torch.where(is_positive, square, 1.0).sqrt(), 0.0)


def direction(z: Tensor, size: Tensor) -> Tensor:
    """z / size for vectors z (..., d) and numbers size (...); zero where size is zero."""
    is_positive = size[..., None] > 0
    return torch.where(is_positive, z / torch.where(is_positive, size[..., None], 1.0), 0.0)
