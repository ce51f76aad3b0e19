"""Distributions of tokens, each with its scaled log-partition and the gradient of it, the tilted mean.

    L_beta[mu](g) = (1/beta) log int e^{beta <g,y>} dmu(y)        (beta = 0: <g, mean>; beta = inf: the maximum)
    m_beta[mu](g) = grad_g L_beta = int y e^{beta <g,y>} dmu / int e^{beta <g,y>} dmu

Self-attention is V m_beta[mu](G x). Here mu is a cloud of tokens, the uniform distribution of a sphere, a Gaussian, an
ellipsoid, or a mixture of any of them; g is (..., m, d). beta is a number, which may be infinite, or a tensor of finite
numbers that broadcasts against (..., m).
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor


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


def require_queries(g: Tensor, d: int, dtype: torch.dtype | None = None) -> None:
    """Raise ValueError unless queries g (..., m, d) have the dimension and the dtype of a measure."""
    if g.shape[-1] != d:
        raise ValueError(f"queries have shape {tuple(g.shape)}, expected (..., m, {d}) for this measure.")
    if dtype not in (None, g.dtype):
        raise ValueError(f"queries have {g.dtype} and the measure {dtype}; use measure.to({g.dtype}).")


def as_tensor(beta: float | Tensor, g: Tensor) -> Tensor:
    """beta in the dtype and on the device of g."""
    return torch.as_tensor(beta, dtype=g.dtype, device=g.device)


def over_beta(log_mean: Tensor, beta: Tensor, spread: Tensor) -> Tensor:
    """(1/beta) log E e^{beta t} for a centred variable t with |t| <= spread, from log_mean = log E e^{beta t}.

    By Hoeffding's lemma it lies between 0 and beta spread^2 / 2. The bounds take away the rounding errors of log_mean,
    which a small beta would magnify, and give the limit 0 at beta = 0.
    """
    quotient = log_mean / torch.where(beta == 0, 1.0, beta)
    return torch.minimum(quotient.clamp_min(0.0), beta * spread * spread / 2)  # at beta = 0 no square may overflow


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
