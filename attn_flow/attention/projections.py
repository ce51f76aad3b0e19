"""Queries, keys and values of every head, and what the heads' averages add up to.

Low-rank factors are never multiplied out. What has full rank acts where it is cheapest: K on the queries, V after the
average, so that keys and values are the tokens themselves. beta is applied once, as the kernels' scale if it is a
number and to the queries if it is a tensor.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from attn_flow.attention.heads import Heads
from attn_flow.averages import dense, sinkhorn

ALL = slice(None)


def queries(a: Heads, x: Tensor, heads: slice = ALL) -> Tensor:
    """Q x + b in the space where keys live, times beta if that is a tensor, (..., heads, n, k or d)."""
    if a._Q_is_identity:
        q = x[..., None, :, :].expand(*x.shape[:-2], len(range(a.heads)[heads]), *x.shape[-2:])
    else:
        q = _per_head(x, a.Q[..., heads, :, :])
    if a.query_bias is not None:
        q = q + a.query_bias[..., heads, None, :]
    if a.K is not None and keys_stay(a):
        q = q @ a.K[..., heads, :, :]
    return q * head_beta(a, heads, x)[..., None, None] if isinstance(a.beta, Tensor) else q


def keys(a: Heads, y: Tensor, heads: slice = ALL) -> Tensor:
    """K y, or y itself where K acts on the queries, (..., heads or 1, n, k or d)."""
    if a.K is None or keys_stay(a):
        return y[..., None, :, :]
    return _per_head(y, a.K[..., heads, :, :])


def values(a: Heads, y: Tensor, heads: slice = ALL) -> Tensor:
    """V y, or y itself where V acts on the average, (..., heads or 1, n, v or d)."""
    if a.V is None or values_stay(a):
        return y[..., None, :, :]
    return _per_head(y, a.V[..., heads, :, :])


def key_bias(a: Heads, y: Tensor, log_weights: Tensor | None) -> Tensor | None:
    """Log weights of the keys (..., 1, n); with Sinkhorn's potential added, (..., heads, n)."""
    log_w = None if log_weights is None else log_weights[..., None, :]
    if a.kind != "sinkhorn":
        return log_w
    if log_w is None:
        log_w = torch.full_like(y[..., 0], -math.log(y.shape[-2]))[..., None, :]
    q, k = queries(a, y) * scale(a), keys(a, y)
    if dense.loses_digits(q, k):
        return key_bias(a.to(torch.float64), y.double(), log_w[..., 0, :].double())
    return sinkhorn.potential(q, k, log_w) + log_w


def scale(a: Heads) -> float:
    """beta, if it is a finite number; the queries of a tensor beta hold it, and hardmax needs none."""
    return 1.0 if isinstance(a.beta, Tensor) or a.cold else float(a.beta)


def head_beta(a: Heads, heads: slice, x: Tensor) -> Tensor:
    """beta as a tensor of shape (..., heads or 1)."""
    beta = torch.as_tensor(a.beta, dtype=x.dtype, device=x.device)
    return beta[None] if beta.ndim == 0 else beta[..., heads] if beta.shape[-1] > 1 else beta


def output(a: Heads, average: Tensor, heads: slice) -> Tensor:
    """sum_h O_h (average)_h, or O_h V_h where the tokens themselves were averaged: (..., n, d)."""
    if a.V is None and a.O is None:
        return average[..., 0, :, :] if average.shape[-3] == 1 else average.sum(-3)
    stacked = _weight_of_averages(a)[..., heads, :, :].mT.flatten(-3, -2)  # (..., heads * v, d)
    return average.transpose(-2, -3).flatten(-2) @ stacked


def output_norm(a: Heads, head: slice) -> Tensor:
    """How much longer `output` makes the average of one head."""
    if a.V is None and a.O is None:
        return a.Q.new_ones(())
    return torch.linalg.matrix_norm(_weight_of_averages(a)[..., head, :, :], ord=2)[..., 0]


def _weight_of_averages(a: Heads) -> Tensor:
    """O, or O V where the tokens themselves were averaged."""
    return a.O if a.O is not None and not values_stay(a) else a.values


def key_width(a: Heads) -> int:
    return a.dim if keys_stay(a) else a.Q.shape[-2]


def value_width(a: Heads) -> int:
    return a.dim if a.V is None or values_stay(a) else a.V.shape[-2]


def keys_stay(a: Heads) -> bool:
    return a.K is None or a.K.shape[-2] >= a.dim


def values_stay(a: Heads) -> bool:
    return a.V is None or a.O is None or a.V.shape[-2] >= a.dim


def _per_head(x: Tensor, weight: Tensor) -> Tensor:
    """Every head's weight on every token: x (..., n, d), weight (..., heads, k, d) -> (..., heads, n, k)."""
    heads, k, _ = weight.shape[-3:]
    return (x @ weight.flatten(-3, -2).mT).unflatten(-1, (heads, k)).transpose(-2, -3)


def with_constant(a: Heads, drift: Tensor) -> Tensor:
    return drift if a.value_bias is None else drift + a.value_bias[..., None, :]
