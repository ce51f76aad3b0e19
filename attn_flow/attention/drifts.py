"""How a drift is computed: queries, keys and values per head, averaged by the kernels, in little memory."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from attn_flow.attention.heads import Heads
from attn_flow.attention.projections import (
    ALL,
    head_beta,
    key_bias,
    key_width,
    keys,
    keys_stay,
    output,
    queries,
    scale,
    value_width,
    values,
    values_stay,
    with_constant,
)
from attn_flow.attention.truncated import truncated_drift
from attn_flow.averages import dense
from attn_flow.base import checks
from attn_flow.measures import Measure

# Entries of queries, keys, values and averages beyond which the drift is computed in parts, without and with gradient.
AT_ONCE, AT_ONCE_WITH_GRADIENT = 2**21, 2**22
ROWS = 1024  # tokens in a part


def against_cloud(a: Heads, x: Tensor, y: Tensor, log_weights: Tensor | None, first: int = 0) -> Tensor:
    """The drift of tokens x (..., n, d) against tokens y: all at once if that is small, else in parts that are.

    Masks take x to be the tokens first, first + 1, ... of y.
    """
    if y.stride(-1) != 1 and (keys_stay(a) or values_stay(a)):  # they are then read many times
        x, y = (y.contiguous(),) * 2 if x is y else (x, y.contiguous())
    bias = key_bias(a, y, log_weights)
    tensors = [z for z in (x, y, bias, *a._tensors().values()) if z is not None]
    gradient = torch.is_grad_enabled() and any(z.requires_grad for z in tensors)
    looks = checks.can_look(*tensors)
    few = truncated_drift(a, x, y, bias, first) if looks and not gradient else None
    if few is not None:
        return few.drift
    batch = a._batch(x.shape[:-2], y.shape[:-2])
    entries = 2 * (key_width(a) + value_width(a)) * a.heads * math.prod(batch) * x.shape[-2]
    if a.cold or a.kind == "unnormalised" or not a.self_attention:
        entries *= 2  # not the fused kernel: parts and their sum at the same time
    if entries <= (AT_ONCE_WITH_GRADIENT if gradient else AT_ONCE) or not looks:
        drift = _attend(a, x, y, keys(a, y), values(a, y), bias, first=first)
    elif gradient:
        drift = _head_by_head(a, x, y, bias, first)
    else:
        drift = _in_parts(a, x, y, bias, first)
    return with_constant(a, drift)


def against_measure(a: Heads, x: Tensor, mu: Measure) -> Tensor:
    """sum_h O_h V_h m_beta[mu](G_h x + K_h^T b_h) + c, and times e^{beta L_beta[mu]} if unnormalised, (..., n, d)."""
    plain, beta = replace(a, beta=1.0), a.beta
    drift = torch.zeros_like(x)
    for h in range(a.heads):
        head = slice(h, h + 1)
        g = queries(plain, x, head)
        if a.K is not None and not keys_stay(a):
            g = g @ a.K[..., head, :, :]
        g = g[..., 0, :, :]
        if isinstance(a.beta, Tensor):
            beta = head_beta(a, head, x)
        if not a.cold and dense.loses_digits(g, x, beta):
            return against_measure(a.to(torch.float64), x.double(), mu.to(torch.float64)).to(x.dtype)
        average = mu.tilted_mean(g, beta)
        if a.kind == "unnormalised":
            average = average * (beta * mu.log_partition(g, beta)).exp()[..., None]
        for weight in (a.V, a.O):
            average = average if weight is None else average @ weight[..., h, :, :].mT
        drift = drift + average
    return with_constant(a, drift)


def weights(a: Heads, x: Tensor, log_weights: Tensor | None) -> Tensor:
    """The attention matrix (..., heads, n, n)."""
    bias = key_bias(a, x, log_weights)
    q, k = queries(a, x), keys(a, x)
    if dense.loses_digits(q, k, scale(a)):
        return weights(a.to(torch.float64), x.double(), log_weights).to(x.dtype)
    if a.cold:
        return dense.winners(q, k, bias, a.causal, not a.self_attention)[0]
    logits = dense.logits(q * scale(a), k, bias, a.causal, not a.self_attention)
    if a.kind == "unnormalised":
        return (logits if bias is not None else logits - math.log(x.shape[-2])).exp()
    return dense.probabilities(logits)[0]


# --- in parts -------------------------------------------------------------------------------------------------------


def _head_by_head(a: Heads, x: Tensor, y: Tensor, bias: Tensor | None, first: int) -> Tensor:
    """The backward pass computes every head again instead of holding them all."""

    def one(x: Tensor, y: Tensor, head: slice) -> Tensor:
        return _attend(a, x, y, keys(a, y, head), values(a, y, head), bias, head, first)

    drift = checkpoint(one, x, y, slice(0, 1), use_reentrant=False)
    for h in range(1, a.heads):
        drift = drift + checkpoint(one, x, y, slice(h, h + 1), use_reentrant=False)
    return drift


def _in_parts(a: Heads, x: Tensor, y: Tensor, bias: Tensor | None, first: int) -> Tensor:
    """Head by head and in blocks of rows, into one result: little more memory than that."""
    key_batch = torch.Size(()) if bias is None else bias.shape[:-2]
    drift = x.new_zeros(*a._batch(x.shape[:-2], y.shape[:-2], key_batch), *x.shape[-2:])
    for h in range(a.heads):
        head = slice(h, h + 1)
        k, v = _in_blocks(keys, a, y, head), _in_blocks(values, a, y, head)
        for start in range(0, x.shape[-2], ROWS):
            rows = slice(start, start + ROWS)
            drift[..., rows, :] += _attend(a, x[..., rows, :], y, k, v, bias, head, first + start)
        del k, v  # before those of the next head
    return drift


def _in_blocks(project: Callable[[Heads, Tensor, slice], Tensor], a: Heads, y: Tensor, head: slice) -> Tensor:
    """project(a, y, head), in blocks of rows if y is strided: a product copies what it cannot read in place."""
    if y.stride(-1) == 1:
        return project(a, y, head)
    return torch.cat([project(a, rows, head) for rows in y.split(ROWS, dim=-2)], dim=-2)


def _attend(
    a: Heads,
    x: Tensor,
    y: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    heads: slice = ALL,
    first: int = 0,
) -> Tensor:
    """The sum over some heads of O_h sum_j A_ij v_j, for queries x that are the tokens first, first + 1, ... of y.

    k and v are the keys and values of y in these heads.
    """
    q = queries(a, x, heads)
    if dense.loses_digits(q, k, scale(a)):
        exact, y = a.to(torch.float64), y.double()
        k, v = keys(exact, y, heads), values(exact, y, heads)
        return _attend(exact, x.double(), y, k, v, bias, heads, first).to(x.dtype)
    options: dict[str, Any] = {
        "key_bias": bias[..., heads, :] if bias is not None and bias.shape[-2] > 1 else bias,
        "causal": a.causal,
        "exclude_self": not a.self_attention,
        "first": first,
    }
    if a.cold:
        average = dense.hardmax(q, k, v, **options)[0]
    elif a.kind != "unnormalised":
        average = dense.softmax(q, k, v, scale=scale(a), **options)
    else:
        average, log_sum = dense.softmax_and_log_sum(q, k, v, scale=scale(a), **options)
        if bias is None:  # the weights 1/n, which a softmax cancels
            log_sum = log_sum - math.log(y.shape[-2])
        average = average * log_sum.exp()[..., None]
    return output(a, average, heads)
