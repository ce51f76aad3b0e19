"""Averages over the keys that matter: at low temperature a query sees the keys nearest to it, and the rest is skipped.

Queries and keys are put into patches of neighbours. For queries i of a patch with centre c and radius r, and any key
k* as reference, or a point that stands for several (`patches.select`), the logit of key j over that of k* is

    l_ij = scale <q_i, k_j - k*> + bias_j - bias*  <=  scale <c, k_j - k*> + bias_j - bias* + scale r |k_j - k*|,

so a patch of keys has a bound on its share of every softmax in the patch of queries. Patches are skipped while these
sum to less than the tolerance. What was kept then proves it row by row, against the log-sum-exp it found; a row that
fails (a mask hid its reference) is averaged over all keys. Where l_ij matters, the differences q_i - c and k_j - k*
are small: taken in float64 and multiplied in the dtype of the values, they keep float32 accurate at any beta.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from attn_flow.averages import compiled, dense
from attn_flow.averages.patches import Patches, Selection, range_of_logits, select

WIDTH = 16  # width of keys beyond which patches of neighbours are as wide as the cloud
BOUNDS = 2**21  # bounds held at once
ENTRIES, MASKED_ENTRIES = 2**16, 2**14  # keys gathered at once; a mask makes a matrix of each patch
UNSEEN = 0.1  # part of the tolerance for what the compiled kernel leaves out query by query


@dataclass(frozen=True, eq=False)
class Near:
    """Averages (m, v); a bound (m,) on the share of each query's weights left out; the share of pairs looked at."""

    average: Tensor
    left_out: Tensor
    pairs: float


def softmax(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    tolerance: float,
    key_bias: Tensor | None = None,
    causal: bool = False,
    exclude_self: bool = False,
    first: int = 0,
    scale: float = 1.0,
    most: float = 1.0,
) -> Near | None:
    """sum_j softmax_j(scale <q_i,k_j> + bias_j) v_j for q (m, k) and k (n, k) in float64, v (n, v), bias (n,).

    None where more than the share `most` of pairs matters, and where no key is visible. Masks as in `kernels`.
    """
    masks: dict[str, Any] = {"causal": causal, "exclude_self": exclude_self, "first": first}
    bias = k.new_zeros(len(k)) if key_bias is None else key_bias.double()
    if not bool(bias.isfinite().any()):
        return None
    kernel = compiled.serves(max(k.shape[-1], v.shape[-1]), v.dtype, v.device) and not exclude_self
    keys = Patches.of(k)
    queries = keys if q is k else Patches.of(q)
    if not kernel:  # torch gathers keys for every patch of queries: the fewer the better, while float32 will do
        wide = queries.paired()
        logits = range_of_logits(float(wide.radius.mean()), math.log(len(k) / tolerance), scale)
        queries = wide if logits <= dense.LOGIT_RANGE else queries
    B, V = keys.gather(bias, -math.inf), keys.gather(v)
    average, left_out = v.new_empty(queries.index.numel(), v.shape[-1]), q.new_empty(queries.index.numel())
    pairs = 0.0
    for part in queries.parts(max(1, BOUNDS // len(B))):
        chosen = select(part, keys, B, scale, (1 - UNSEEN) * tolerance)
        if len(chosen.listed) > most * len(part.index) * len(B):
            return None
        pairs += len(chosen.listed) / (len(queries.index) * len(B))
        patches, rows = (part, keys, B, V, chosen, v[chosen.nearest]), part.index.flatten()
        if kernel:
            gap = math.log(len(k) / (UNSEEN * tolerance))
            mean, log_sum = _compiled(*patches, first=first, causal=causal, scale=scale, gap=gap)
        else:
            mean, log_sum = _fused(*patches, **masks, scale=scale)
        average[rows] = mean.flatten(0, 1)
        left_out[rows] = (chosen.left_out[:, None] * (-log_sum).exp()).flatten() + UNSEEN * tolerance
    average, left_out = average[: len(q)], left_out[: len(q)]
    for rows in (~(left_out <= tolerance)).nonzero()[:, 0].split(max(1, dense.BLOCK // len(k))):
        average[rows] = over_all(q[rows], k, v, key_bias, rows + first, causal, exclude_self, scale)
        left_out[rows] = 0.0
    return Near(average, left_out, pairs)


def hardmax(q: Tensor, k: Tensor, v: Tensor, *, key_bias: Tensor | None = None, most: float = 1.0) -> Near | None:
    """The mean of v_j over argmax_j <q_i,k_j> as `dense.hardmax` has it; None as above."""
    bias = torch.zeros_like(k[:, 0]) if key_bias is None else key_bias
    if not bool(bias.isfinite().any()):
        return None
    keys = Patches.of(k)
    queries = keys if q is k else Patches.of(q)
    B, V = keys.gather(bias, -math.inf), keys.gather(v)
    average = v.new_empty(queries.index.numel(), v.shape[-1])
    pairs = 0.0
    for part in queries.parts(max(1, BOUNDS // len(B))):
        chosen = select(part, keys, torch.where(B.isneginf(), B, 0.0), 1.0, None)
        if len(chosen.listed) > most * len(part.index) * len(B):
            return None
        pairs += len(chosen.listed) / (len(queries.index) * len(B))
        for group, near, filling in chosen.groups(ENTRIES, B.shape[1]):
            seen = B[near].masked_fill(filling[..., None], -math.inf).flatten(1)
            K, values = keys.points[near].flatten(1, 2), V[near].flatten(1, 2)
            mean = dense.hardmax(part.points[group], K, values, key_bias=seen)[0]
            average[part.index[group].flatten()] = mean.flatten(0, 1)
    return Near(average[: len(q)], q.new_zeros(len(q)), pairs)


def _compiled(
    queries: Patches,
    keys: Patches,
    bias: Tensor,
    values: Tensor,
    chosen: Selection,
    origin: Tensor,
    *,
    first: int,
    causal: bool,
    scale: float,
    gap: float,
) -> tuple[Tensor, Tensor]:
    """Averages (A, s, v), and log-sum-exps over the reference (A, s), of patches of queries over their chosen keys.

    origin (A, v): from which values are measured.
    """
    average, log_sum = compiled.softmax(
        queries.points,
        queries.centre,
        keys.points,
        values,
        bias,
        chosen.k_star,
        origin,
        chosen.bias_star,
        chosen.start,
        chosen.listed,
        queries.index + first,
        keys.index,
        causal=causal,
        scale=scale,
        gap=gap,
        precise=scale * float(chosen.spread.max()) > dense.LOGIT_RANGE,
    )
    return average[..., : values.shape[-1]], log_sum


def _fused(
    queries: Patches,
    keys: Patches,
    bias: Tensor,
    values: Tensor,
    chosen: Selection,
    origin: Tensor,
    *,
    first: int,
    causal: bool,
    exclude_self: bool,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """What `_compiled` computes, by torch's fused kernel on groups of patches with as many keys each."""
    masked = causal or exclude_self
    average = values.new_empty(*queries.index.shape, values.shape[-1])
    log_sums = bias.new_empty(queries.index.shape)
    width, of_patch = keys.points.shape[-1], bias.shape[1]
    # One more patch, of which nothing is seen, fills up; rows of a patch are copied as one.
    weighed = F.pad(torch.cat([keys.points, bias[..., None]], -1), (0, 0, 0, 0, 0, 1))
    weighed[-1, :, -1] = -math.inf
    inside = torch.cat([(keys.points - keys.centre[:, None]).to(values.dtype), values], -1)
    weighed, inside, centre = (
        weighed.flatten(1),
        F.pad(inside.flatten(1), (0, 0, 0, 1)),
        F.pad(keys.centre, (0, 0, 0, 1)),
    )
    for group, near, filling in chosen.groups(MASKED_ENTRIES if masked else ENTRIES, of_patch):
        listed = near.masked_fill(filling, len(bias)).flatten()
        k_star, v_star, c = chosen.k_star[group], origin[group, None], queries.centre[group]
        seen = weighed[listed].view(len(group), -1, width + 1)
        shift = (seen @ torch.cat([scale * c, torch.ones_like(c[:, :1])], -1)[..., None])[..., 0]
        shift -= (chosen.bias_star[group] + scale * (k_star * c).sum(-1))[:, None]
        q = queries.points[group] - c[:, None]
        if values.dtype == torch.float32 and scale * float(chosen.spread[group].max()) > dense.LOGIT_RANGE:
            k = seen[..., :width] - k_star[:, None]
            v = inside[listed].view(len(group), -1, inside.shape[1] // of_patch)[..., width:].double() - v_star
        else:
            moved = (centre[listed].view(*near.shape, width) - k_star[:, None]).to(values.dtype)
            moved = torch.cat([moved, -v_star.expand(-1, near.shape[1], -1)], -1)[..., None, :]
            both = inside[listed].view(*near.shape, of_patch, -1).add_(moved).flatten(1, 2)
            k, v = both[..., :width], both[..., width:]
        q, shift = (z.to(v.dtype) for z in (q, shift))
        if masked:
            i, j = (z.int() for z in (queries.index[group] + first, keys.index[near].flatten(1)))
            mean, log_sum = _masked(q, k, v, shift, i, j, causal, exclude_self, scale)
        else:
            mean, log_sum = dense.softmax_and_log_sum(q, k, v, key_bias=shift, scale=scale)
        average[group] = (mean + v_star).to(values.dtype)
        log_sums[group] = log_sum.double()
    return average, log_sums


def _masked(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor,
    i: Tensor,
    j: Tensor,
    causal: bool,
    exclude_self: bool,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Average and log-sum-exp of queries that are the tokens i (g, m) over keys that are the tokens j (g, n)."""
    hidden = dense.hidden(i[..., None], j[:, None], causal, exclude_self)
    mean, log_sum = dense.pairwise(q, k, v, torch.where(hidden, -math.inf, bias[:, None]), scale)
    there = ~bias.isneginf()
    earliest = j.masked_fill(~there, torch.iinfo(j.dtype).max).amin(-1, keepdim=True)
    if causal:
        sees = i > earliest if exclude_self else i >= earliest
    else:
        sees = (i != earliest) | (there.sum(-1, keepdim=True) > 1)
    return mean, log_sum.masked_fill(~sees, -math.inf)


def over_all(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    i: Tensor,
    causal: bool,
    exclude_self: bool,
    scale: float,
) -> Tensor:
    """The average of queries that are the tokens i (m,) over every key, in float64."""
    logits = dense.logits(q * scale, k, bias)
    if causal or exclude_self:
        j = torch.arange(len(k), device=k.device)
        logits = logits.masked_fill(dense.hidden(i[:, None], j, causal, exclude_self), -math.inf)
    return (dense.probabilities(logits)[0] @ v.double()).to(v.dtype)
