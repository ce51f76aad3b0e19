"""How a drift is computed: queries, keys and values of every head, averaged in little memory."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from attn_flow.attention import truncated
from attn_flow.attention.projections import ALL, Projections
from attn_flow.averages import costs, dense, pointwise
from attn_flow.base import checks
from attn_flow.measures import Cloud, Measure

# Entries of queries, keys, values and averages beyond which the drift is computed in parts, without and with gradient.
AT_ONCE, AT_ONCE_WITH_GRADIENT = 2**21, 2**22
ROWS = 1024  # tokens in a part


def against_cloud(
    p: Projections, x: Tensor, y: Tensor, log_weights: Tensor | None, first: int = 0, at_once: bool = False
) -> Tensor:
    """The drift of tokens x (..., n, d) against tokens y: all at once if that is small, else in parts that are.

    Masks take x to be the tokens first, first + 1, ... of y. at_once: all heads, however much that is: faster.
    """
    if y.stride(-1) != 1 and (p.key is None or p.value is None):  # they are then read many times
        x, y = (y.contiguous(),) * 2 if x is y else (x, y.contiguous())
    bias = p.key_bias(y, log_weights)
    tensors = [x, y, *p.tensors] if bias is None else [x, y, bias, *p.tensors]
    gradient = torch.is_grad_enabled() and any(z.requires_grad for z in tensors)
    plain = checks.is_plain(*tensors) and not checks.forward_mode()
    # On an accelerator the choice of keys would be waited for.
    if plain and x.device.type == "cpu" and not gradient and x.shape[-2] * y.shape[-2] >= costs.here().fewest_pairs:
        few = truncated.over_near_keys(p, x, y, bias, first)
        if few is not None:
            return few.drift
    batch = dense.broadcast(x.shape[:-2], y.shape[:-2], p.batch)
    entries = 2 * (p.key_width + p.value_width) * p.heads * math.prod(batch) * x.shape[-2]
    if p.cold or not p.shared_out or not p.self_attention:
        entries *= 2  # not the fused kernel: parts and their sum at the same time
    if at_once or entries <= (AT_ONCE_WITH_GRADIENT if gradient else AT_ONCE) or not plain:
        drift = _attend(p, x, y, p.keys(y), p.values(y), bias, first=first)
    elif gradient:
        drift = _head_by_head(p, x, y, bias, first)
    else:
        drift = _in_parts(p, x, y, bias, first)
    return p.with_constant(drift)


def against(p: Projections, x: Tensor, mu: Measure) -> Tensor:
    """The drift of tokens x (..., n, d) that attend to a measure, a cloud or another."""
    if isinstance(mu, Cloud):
        return against_cloud(p, x, mu.x, mu.log_weights)
    return against_measure(p, x, mu)


def against_measure(p: Projections, x: Tensor, mu: Measure) -> Tensor:
    """sum_h O_h V_h m_beta[mu](G_h x + K_h^T b_h) + c, and times e^{beta L_beta[mu]} if unnormalised, (..., n, d)."""
    beta = math.inf if p.cold else p.scale
    drift = torch.zeros_like(x)
    for h in range(p.heads):
        head = slice(h, h + 1)
        g = p.queries(x, head)
        g = (g if p.key is None else g @ p.key[..., head, :, :])[..., 0, :, :]
        if not p.cold and p.loses_digits(g, x, beta):
            return against_measure(p.double, x.double(), mu.to(torch.float64)).to(x.dtype)
        average = mu.tilted_mean(g, beta)
        if p.kind == "unnormalised":
            average = average * (beta * mu.log_partition(g, beta)).exp()[..., None]
        if p.value is not None:
            average = average @ p.value[..., h, :, :].mT
        drift = drift + p.summed(average[..., None, :, :], head)
    return p.with_constant(drift)


def matrix(p: Projections, x: Tensor, log_weights: Tensor | None) -> Tensor:
    """The attention matrix (..., heads, n, n)."""
    bias = p.key_bias(x, log_weights)
    q, k = p.queries(x), p.keys(x)
    if p.loses_digits(q, k, p.scale):
        return matrix(p.double, x.double(), log_weights).to(x.dtype)
    if p.kind in pointwise.PHI:
        return pointwise.weights(p.kind, q * p.scale, k, bias, p.causal, not p.self_attention)
    if p.cold:
        return dense.winners(q, k, bias, p.causal, not p.self_attention)[0]
    logits = dense.logits(q * p.scale, k, bias, p.causal, not p.self_attention)
    if p.kind == "unnormalised":
        return (logits if bias is not None else logits - math.log(x.shape[-2])).exp()
    return dense.probabilities(logits)[0]


# --- in parts -------------------------------------------------------------------------------------------------------


def _head_by_head(p: Projections, x: Tensor, y: Tensor, bias: Tensor | None, first: int) -> Tensor:
    """The backward pass computes every head again instead of holding them all."""

    def one(x: Tensor, y: Tensor, head: slice) -> Tensor:
        return _attend(p, x, y, p.keys(y, head), p.values(y, head), bias, head, first)

    drift = checkpoint(one, x, y, slice(0, 1), use_reentrant=False)
    for h in range(1, p.heads):
        drift = drift + checkpoint(one, x, y, slice(h, h + 1), use_reentrant=False)
    return drift


def _in_parts(p: Projections, x: Tensor, y: Tensor, bias: Tensor | None, first: int) -> Tensor:
    """Head by head and in blocks of rows, into one result: little more memory than that."""
    key_batch = torch.Size(()) if bias is None else bias.shape[:-2]
    drift = x.new_zeros(*dense.broadcast(x.shape[:-2], y.shape[:-2], key_batch, p.batch), *x.shape[-2:])
    for h in range(p.heads):
        head = slice(h, h + 1)
        k, v = _by_rows(p.keys, y, head), _by_rows(p.values, y, head)
        for start in range(0, x.shape[-2], ROWS):
            rows = slice(start, start + ROWS)
            drift[..., rows, :] += _attend(p, x[..., rows, :], y, k, v, bias, head, first + start)
        del k, v  # before those of the next head
    return drift


def _by_rows(project: Callable[[Tensor, slice], Tensor], y: Tensor, head: slice) -> Tensor:
    """project(y, head), in blocks of rows if y is strided: a product copies what it cannot read in place."""
    if y.stride(-1) == 1:
        return project(y, head)
    return torch.cat([project(rows, head) for rows in y.split(ROWS, dim=-2)], dim=-2)


def _attend(
    p: Projections,
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
    q = p.queries(x, heads)
    if p.loses_digits(q, k, p.scale):
        exact, y = p.double, y.double()
        return _attend(exact, x.double(), y, exact.keys(y, heads), exact.values(y, heads), bias, heads, first).to(
            x.dtype
        )
    options: dict[str, Any] = {
        "key_bias": bias[..., heads, :] if bias is not None and bias.shape[-2] > 1 else bias,
        "causal": p.causal,
        "exclude_self": not p.self_attention,
        "first": first,
    }
    if p.kind in pointwise.PHI:
        average = pointwise.weighted_sum(p.kind, q, k, v, scale=p.scale, **options)
    elif p.cold:
        average = dense.hardmax(q, k, v, **options)[0]
    elif p.kind != "unnormalised":
        average = dense.softmax(q, k, v, scale=p.scale, **options)
    else:
        average, log_sum = dense.softmax_and_log_sum(q, k, v, scale=p.scale, **options)
        if bias is None:  # the weights 1/n, which a softmax cancels
            log_sum = log_sum - math.log(y.shape[-2])
        average = average * log_sum.exp()[..., None]
    return p.summed(average, heads)
