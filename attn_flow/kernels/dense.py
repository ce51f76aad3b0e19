"""Softmax and hardmax averages over all pairs of queries and keys, in memory linear in the number of tokens.

The arguments are described in `attn_flow.kernels`. Softmax averages come from torch's fused attention. What it cannot
do (hardmax, log-sums with gradients, forward-mode derivatives) is done in blocks of rows by ordinary operations, which
have derivatives of every order and mode.
"""

from __future__ import annotations

import math
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from attn_flow.base.checks import can_read, fused_with_log_sum, uses_forward_mode

MIN_WIDTH = 16  # the fused CPU kernel takes 1.5 times as long for narrower queries, keys and values
BLOCK_ENTRIES = 2**18  # logits in memory at a time in `average_by_rows`: 1 MB of float32
TIE_ROUNDINGS = 16  # scores that differ by fewer rounding errors than this are ties of the hardmax


def softmax_average(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    log_weights: Tensor | None = None,
    *,
    scale: float | Tensor = 1.0,
    causal: bool = False,
) -> Tensor:
    """The average of the values under softmax weights, (..., m, v).

    scale = inf is the hardmax: the weighted mean of the values whose keys score highest.

    Example:
        >>> x = torch.tensor([[1.0, 0.0], [0.0, 2.0], [0.0, 2.0]])
        >>> softmax_average(x, x, torch.tensor([[1.0], [2.0], [4.0]]), scale=math.inf)  # ties are averaged
        tensor([[1.],
                [3.],
                [3.]])
    """
    if is_infinite(scale) or uses_forward_mode():
        return average_by_rows(queries, keys, values, log_weights, scale, causal)[0]
    q, k, v, scale, shape = _to_fused_layout(queries, keys, values, log_weights, scale)
    average = F.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=scale)
    average = average[..., : shape[-1]].reshape(shape)
    return average if log_weights is None else torch.where(_sees_a_key(log_weights, causal)[..., None], average, 0.0)


def average_and_log_sum(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    log_weights: Tensor | None = None,
    *,
    scale: float | Tensor = 1.0,
    causal: bool = False,
) -> tuple[Tensor, Tensor]:
    """The average (..., m, v), and log sum_j exp(scale <q_i, k_j> + log w_j), (..., m); the highest score at scale inf.

    Example:
        >>> x = torch.zeros(3, 2)
        >>> average_and_log_sum(x, x, x)[1].exp()  # three keys of weight one
        tensor([3., 3., 3.])
    """
    has_kernel = fused_with_log_sum is not None and queries.device.type == "cpu" and not is_infinite(scale)
    has_one_dtype = queries.dtype == keys.dtype == values.dtype  # not under autocast
    if not has_kernel or not has_one_dtype or not is_plain(queries, keys, values, log_weights, scale):
        return average_by_rows(queries, keys, values, log_weights, scale, causal)
    q, k, v, scale, shape = _to_fused_layout(queries, keys, values, log_weights, scale)
    average, log_sum = fused_with_log_sum(q, k, v, 0.0, causal, scale=scale)
    average, log_sum = average[..., : shape[-1]].reshape(shape), log_sum.to(queries.dtype).reshape(shape[:-1])
    if log_weights is None:
        return average, log_sum
    is_visible = _sees_a_key(log_weights, causal)
    return torch.where(is_visible[..., None], average, 0.0), torch.where(is_visible, log_sum, -torch.inf)


def is_infinite(scale: float | Tensor) -> bool:
    """Whether scale is the number infinity; tensors are finite."""
    return not isinstance(scale, Tensor) and scale == math.inf  # math.isinf cannot be compiled


def is_plain(*inputs: Tensor | float | None) -> bool:
    """Whether the tensors among the inputs have values to read, and no derivatives of them are computed."""
    tensors = [z for z in inputs if isinstance(z, Tensor)]
    has_gradient = torch.is_grad_enabled() and any(z.requires_grad for z in tensors)
    return not has_gradient and not uses_forward_mode() and can_read(*tensors)


def _to_fused_layout(
    queries: Tensor, keys: Tensor, values: Tensor, log_weights: Tensor | None, scale: float | Tensor
) -> tuple[Tensor, Tensor, Tensor, float, tuple[int, ...]]:
    """Queries, keys and values (clouds, heads, n, width), the scale as a number, and the shape of the average.

    The fused CPU kernel needs four axes, one width and a dense last axis; otherwise torch forms the full matrix.
    """
    if log_weights is not None or isinstance(scale, Tensor) or scale < torch.finfo(queries.dtype).tiny:
        queries, scale = scale * queries, 1.0
    if log_weights is not None:
        # <(q, 1), (k, log w)> = <q, k> + log w. As a coordinate of the keys, unlike as an attention mask, the
        # log-weights can be combined with a causal mask and have a gradient in the fused kernel. A finite number
        # stands for -inf, so that a query that sees no key has no NaN.
        floor = torch.finfo(keys.dtype).min / 4
        finite = log_weights.to(keys.dtype).clamp_min(floor)
        shape = torch.broadcast_shapes(keys.shape[:-1], finite.shape)
        queries = F.pad(queries, (0, 1), value=1.0)
        keys = torch.cat([keys.expand(*shape, -1), finite.expand(shape)[..., None]], dim=-1)
    batch = queries.shape[:-2]
    if not batch == keys.shape[:-2] == values.shape[:-2]:
        batch = torch.broadcast_shapes(batch, keys.shape[:-2], values.shape[:-2])
    width = max(queries.shape[-1], values.shape[-1], MIN_WIDTH)

    def four_axes(z: Tensor) -> Tensor:
        z = F.pad(z, (0, width - z.shape[-1])) if z.shape[-1] < width else z  # zeros change no logit and no average
        z = z if z.stride(-1) == 1 else z.contiguous()
        return z.expand(1, *(batch or (1,)), -1, -1).flatten(0, -4)

    q = four_axes(queries)
    k = q if keys is queries else four_axes(keys)
    v = k if values is keys else four_axes(values)
    return q, k, v, scale, (*batch, queries.shape[-2], values.shape[-1])


def _sees_a_key(log_weights: Tensor, causal: bool) -> Tensor:
    """Whether each query sees any key, (..., m) or (..., 1)."""
    is_visible = ~log_weights.isneginf()
    return is_visible.cumsum(-1) > 0 if causal else is_visible.any(-1, keepdim=True)


# --- by rows, from ordinary operations ----------------------------------------------------------------------------


def average_by_rows(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    log_weights: Tensor | None = None,
    scale: float | Tensor = 1.0,
    causal: bool = False,
) -> tuple[Tensor, Tensor]:
    """As `average_and_log_sum`, for one block of queries at a time. The backward pass recomputes each block."""
    m, n = queries.shape[-2], keys.shape[-2]
    weights = hardmax_weights if is_infinite(scale) else softmax_weights
    queries = queries if is_infinite(scale) else scale * queries
    log_weights = keys.new_zeros(n) if log_weights is None else log_weights.to(keys.dtype)
    batch = torch.broadcast_shapes(queries.shape[:-2], keys.shape[:-2], values.shape[:-2], log_weights.shape[:-1])
    block = min(m, max(1, BLOCK_ENTRIES // (n * math.prod(batch))))
    starts = range(0, m, block)

    def average(i: int, queries: Tensor, keys: Tensor, values: Tensor, log_weights: Tensor) -> tuple[Tensor, Tensor]:
        is_hidden = log_weights.isneginf()[..., None, :]  # (..., 1, n)
        if causal:
            rows = torch.arange(m, device=queries.device)[i : i + block, None]
            is_hidden = is_hidden | (torch.arange(n, device=queries.device) > rows)
        A, log_sum = weights(queries[..., i : i + block, :], keys, log_weights, is_hidden)
        return A @ values, log_sum

    inputs = (queries, keys, values, log_weights)
    if is_plain(*inputs):
        # Written in place: small results between the large blocks would fragment the heap until it has n^2 entries.
        result, log_sums = queries.new_empty(*batch, m, values.shape[-1]), queries.new_empty(*batch, m)
        for i in starts:
            result[..., i : i + block, :], log_sums[..., i : i + block] = average(i, *inputs)
        return result, log_sums
    has_backward = can_read(*inputs) and not uses_forward_mode()
    average_block = partial(checkpoint, average, use_reentrant=False) if has_backward and len(starts) > 1 else average
    averages, sums = zip(*(average_block(i, *inputs) for i in starts))
    return torch.cat(averages, dim=-2), torch.cat(sums, dim=-1)


def softmax_weights(q: Tensor, keys: Tensor, log_weights: Tensor, is_hidden: Tensor) -> tuple[Tensor, Tensor]:
    """softmax_j(<q_i, k_j> + log w_j), (..., m, n), and its log-sum-exp (..., m)."""
    return normalised_exp(torch.where(is_hidden, -torch.inf, q @ keys.mT + log_weights[..., None, :]))


def hardmax_weights(q: Tensor, keys: Tensor, log_weights: Tensor, is_hidden: Tensor) -> tuple[Tensor, Tensor]:
    """w_j over the keys with the highest score <q_i, k_j>, normalised, (..., m, n), and that score (..., m)."""
    scores = torch.where(is_hidden, -torch.inf, q @ keys.mT)
    top = scores.amax(-1)
    longest_key = torch.where(is_hidden, 0.0, keys.norm(dim=-1)[..., None, :]).amax(-1)  # that the query sees
    rounding = torch.finfo(q.dtype).eps * q.norm(dim=-1) * longest_key
    is_lower = scores < (top - TIE_ROUNDINGS * rounding)[..., None]
    return normalised_exp(torch.where(is_lower | is_hidden, -torch.inf, log_weights[..., None, :]))[0], top


def normalised_exp(logits: Tensor) -> tuple[Tensor, Tensor]:
    """The softmax over the last axis and its log-sum-exp; zero and -inf for a row of -inf."""
    top = logits.detach().amax(-1, keepdim=True)
    is_empty = top.isneginf()
    exponentials = (logits - torch.where(is_empty, 0.0, top)).exp()
    total = torch.where(is_empty, 1.0, exponentials.sum(-1, keepdim=True))
    return exponentials / total, (total.log() + top)[..., 0]
