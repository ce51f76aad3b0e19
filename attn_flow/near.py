"""Averages over the keys that matter: at low temperature a query sees the keys nearest to it, and the rest is skipped.

Queries and keys are put into blocks of neighbours. For queries i of a block with centre c and radius r, and any key
k* as reference, the logit of key j over that of k* is

    l_ij = scale <q_i, k_j - k*> + bias_j - bias*  <=  scale <c, k_j - k*> + bias_j - bias* + scale r |k_j - k*|,

so a block of keys has a bound on its share of every softmax in the block of queries. Blocks are skipped while these
sum to less than the tolerance. What was kept then proves it row by row, against the log-sum-exp it found; a row that
fails (a mask hid its reference) is averaged over all keys. Where l_ij matters, the differences q_i - c and k_j - k*
are small: taken in float64 and multiplied in the dtype of the values, they keep float32 accurate at any beta.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from attn_flow import kernels

SIZE = 64  # points in a block: fewer bound better, more are faster
PAIRS = 2**26  # pairs of queries and keys below which putting them in order costs more than 5% of the average itself
WIDTH = 16  # width of keys beyond which blocks of neighbours are as wide as the cloud
WORTH, MASKED_WORTH = 0.4, 0.06  # share of pairs above which the dense kernel is faster, without and with a mask
SAMPLED = 8  # queries asked, before anything is put in order, how many keys they see
BOUNDS = 2**20  # bounds held at once
ENTRIES, MASKED_ENTRIES = 2**17, 2**14  # keys gathered at once; a mask makes a matrix of each block
EXACT = "donot_use_mm_for_euclid_dist"  # the other way cancels for near points


@dataclass(frozen=True, eq=False)
class Near:
    """Averages (m, v); a bound (m,) on the share of each query's weights left out; the share of pairs looked at."""

    average: Tensor
    left_out: Tensor
    pairs: float


@dataclass(frozen=True, eq=False)
class Blocks:
    """Points (b, s, k) that are neighbours, their indices (b, s), and the balls (b, k), (b,) that hold them.

    There are 2^levels blocks, equally full: indices beyond the last point are padding, copies of it.
    """

    index: Tensor
    points: Tensor
    centre: Tensor
    radius: Tensor

    @classmethod
    def of(cls, x: Tensor) -> Blocks:
        """The cloud x (n, k) halved along the widest axis of each half, until there are at most SIZE points in each."""
        n = len(x)
        levels = max(0, math.ceil(math.log2(n / SIZE)))
        full = -(-n // 2**levels) * 2**levels
        index = torch.arange(full, device=x.device)[None]
        rough = _padded(x.float(), full)
        for _ in range(levels):
            z = rough[index]
            axis = (z.amax(1) - z.amin(1)).argmax(-1)
            along = z.gather(2, axis[:, None, None].expand(-1, z.shape[1], 1))[..., 0]
            index = index.gather(1, along.argsort(1)).reshape(2 * len(index), -1)
        points = _padded(x, full)[index]
        centre = points.mean(1)
        return cls(index, points, centre, (points - centre[:, None]).norm(dim=-1).amax(1))

    def gather(self, z: Tensor, fill: float | None = None) -> Tensor:
        """What belongs to the points, z (n, ...), in blocks (b, s, ...)."""
        return _padded(z, self.index.numel(), fill)[self.index]

    def parts(self, count: int) -> Iterator[Blocks]:
        """Some blocks at a time."""
        for one in zip(*(z.split(count) for z in (self.index, self.points, self.centre, self.radius))):
            yield Blocks(*one)


@dataclass(frozen=True, eq=False)
class Selection:
    """The blocks of keys that each of A blocks of queries looks at: kept (A, B).

    reference (A,): the index of k*. left_out (A,): a bound on the mass of what is not kept, over that of k*.
    """

    kept: Tensor
    reference: Tensor
    left_out: Tensor

    def groups(self, entries: int, size: int) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Blocks of queries (g,), their blocks of keys (g, w), and which of these only fill up the rectangle (g, w)."""
        count = self.kept.sum(-1)
        order = count.argsort()
        kept_first = torch.argsort(self.kept.to(torch.uint8), dim=-1, descending=True, stable=True)
        widths = count[order].tolist()
        start = 0
        for end in range(1, len(widths) + 1):
            alike = end < len(widths) and widths[end] <= 1.15 * widths[start] + 1
            if not alike or (end + 1 - start) * widths[end] * size > entries:
                group, width = order[start:end], widths[end - 1]
                yield group, kept_first[group, :width], torch.arange(width, device=group.device) >= count[group, None]
                start = end


def worth(q: Tensor, k: Tensor, bias: Tensor | None, scale: float, window: float, most: float) -> bool:
    """Whether blocks will leave less than the share `most` of pairs, asked of a few queries before anything is sorted.

    window: how far below the highest logit a key matters. A block is taken to be as wide as the ball that holds SIZE
    neighbours.
    """
    some = q[:: max(1, len(q) // SAMPLED)]
    logits = kernels.logits(some * scale, k, bias)
    top, best = logits.max(-1, keepdim=True)
    away = torch.cdist(k[best[:, 0]], k)
    radius, reach = (z.kthvalue(SIZE, dim=-1, keepdim=True)[0] for z in (torch.cdist(some, q), away))
    seen = logits - top + scale * radius * (away + reach) >= -window
    return float(seen.float().mean()) < most


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
    masked = causal or exclude_self
    bias = k.new_zeros(len(k)) if key_bias is None else key_bias.double()
    if not bool(bias.isfinite().any()):
        return None
    keys = Blocks.of(k)
    queries = keys if q is k else Blocks.of(q)
    B, V = keys.gather(bias, -math.inf), keys.gather(v)
    average, left_out = v.new_empty(queries.index.numel(), v.shape[-1]), q.new_empty(queries.index.numel())
    pairs = 0.0
    for part in queries.parts(max(1, BOUNDS // len(B))):
        chosen = _select(part, keys, B, scale, tolerance)
        if float(chosen.kept.float().mean()) > most:
            return None
        pairs += float(chosen.kept.sum()) / (len(queries.index) * len(B))
        star = k[chosen.reference, None], v[chosen.reference, None], bias[chosen.reference, None]
        for group, blocks, filling in chosen.groups(MASKED_ENTRIES if masked else ENTRIES, B.shape[1]):
            k_star, v_star, bias_star = (z[group] for z in star)
            c = part.centre[group]
            Q, K = part.points[group] - c[:, None], keys.points[blocks].flatten(1, 2) - k_star
            shift = B[blocks].masked_fill(filling[..., None], -math.inf).flatten(1) - bias_star
            shift += scale * (K @ c[..., None])[..., 0]
            values = V[blocks].flatten(1, 2) - v_star
            low = [z.to(v.dtype) for z in (Q, K, values, shift)]
            Q, K, values, shift = (
                low if not kernels.loses_digits(low[0], low[1], scale) else (Q, K, values.double(), shift)
            )
            i, j = part.index[group] + first, keys.index[blocks].flatten(1)
            if masked:
                mean, log_sum = _masked(Q, K, values, shift, i, j, causal, exclude_self, scale)
            else:
                mean, log_sum = kernels.softmax_and_log_sum(Q, K, values, key_bias=shift, scale=scale)
            rows = part.index[group].flatten()
            average[rows] = (mean + v_star).flatten(0, 1).to(v.dtype)
            left_out[rows] = (chosen.left_out[group, None] * (-log_sum.double()).exp()).flatten()
    average, left_out = average[: len(q)], left_out[: len(q)]
    for rows in (~(left_out <= tolerance)).nonzero()[:, 0].split(max(1, kernels.BLOCK // len(k))):
        average[rows] = over_all(q[rows], k, v, key_bias, rows + first, causal, exclude_self, scale)
        left_out[rows] = 0.0
    return Near(average, left_out, pairs)


def hardmax(q: Tensor, k: Tensor, v: Tensor, *, key_bias: Tensor | None = None, most: float = 1.0) -> Near | None:
    """The mean of v_j over argmax_j <q_i,k_j> as `kernels.hardmax` has it; None as above."""
    bias = torch.zeros_like(k[:, 0]) if key_bias is None else key_bias
    if not bool(bias.isfinite().any()):
        return None
    keys = Blocks.of(k)
    queries = keys if q is k else Blocks.of(q)
    B, V = keys.gather(bias, -math.inf), keys.gather(v)
    average = v.new_empty(queries.index.numel(), v.shape[-1])
    pairs = 0.0
    for part in queries.parts(max(1, BOUNDS // len(B))):
        chosen = _select(part, keys, torch.where(B.isneginf(), B, 0.0), 1.0, None)
        if float(chosen.kept.float().mean()) > most:
            return None
        pairs += float(chosen.kept.sum()) / (len(queries.index) * len(B))
        for group, blocks, filling in chosen.groups(ENTRIES, B.shape[1]):
            seen = B[blocks].masked_fill(filling[..., None], -math.inf).flatten(1)
            K, values = keys.points[blocks].flatten(1, 2), V[blocks].flatten(1, 2)
            mean = kernels.hardmax(part.points[group], K, values, key_bias=seen)[0]
            average[part.index[group].flatten()] = mean.flatten(0, 1)
    return Near(average[: len(q)], q.new_zeros(len(q)), pairs)


def _select(queries: Blocks, keys: Blocks, bias: Tensor, scale: float, tolerance: float | None) -> Selection:
    """What to keep so that less than `tolerance` of any query's weights is left out; None: whatever can be maximal."""
    highest = _highest_logits(queries.centre, keys.points, bias, scale)
    nearest = highest.argmax(-1)
    logit, at = ((keys.points[nearest] @ queries.centre[..., None])[..., 0] * scale + bias[nearest]).max(-1)
    reference = keys.index[nearest, at]
    away = torch.cdist(keys.points[nearest, at], keys.centre, compute_mode=EXACT) + keys.radius
    bound = highest - logit[:, None] + scale * queries.radius[:, None] * away
    if tolerance is None:
        return Selection(bound >= 0, reference, torch.zeros_like(logit))
    bound += math.log(bias.shape[1] / tolerance)
    share = bound.float().exp()  # of the tolerance
    kept = bound > _threshold(bound, share)[:, None]
    return Selection(kept, reference, tolerance * share.masked_fill_(kept, 0.0).sum(-1).double())


def _highest_logits(c: Tensor, K: Tensor, bias: Tensor, scale: float) -> Tensor:
    """max_j scale <c_a, k_j> + bias_j over each block of keys, (A, B), raised by all that float32 may lose."""
    keys, b = K.flatten(0, 1).float().T.contiguous(), bias.flatten().float()
    parts = [
        torch.addmm(b, rows, keys, alpha=scale).unflatten(-1, bias.shape).amax(-1)
        for rows in c.float().split(max(1, kernels.BLOCK // len(b)))
    ]
    size = scale * float(c.norm(dim=-1).max() * K.norm(dim=-1).max()) + float(bias[bias.isfinite()].abs().max())
    return torch.cat(parts).double() + 32 * torch.finfo(torch.float32).eps * size


def _threshold(bound: Tensor, share: Tensor) -> Tensor:
    """Per row the highest of some thresholds below which share = e^bound sums to one or less; -log(columns) does."""
    found = torch.full_like(bound[:, 0], -math.log(bound.shape[1]))
    for cut in range(math.floor(float(found[0])) + 1, 1):
        small = torch.where(bound <= cut, share, 0.0).sum(-1) <= 1
        found = torch.where(small, found.clamp_min(cut), found)
    return found


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
    hidden = kernels.hidden(i[..., None], j[:, None], causal, exclude_self)
    mean, log_sum = kernels.pairwise(q, k, v, torch.where(hidden, -math.inf, bias[:, None]), scale)
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
    logits = kernels.logits(q * scale, k, bias)
    if causal or exclude_self:
        j = torch.arange(len(k), device=k.device)
        logits = logits.masked_fill(kernels.hidden(i[:, None], j, causal, exclude_self), -math.inf)
    return (kernels.probabilities(logits)[0] @ v.double()).to(v.dtype)


def _padded(z: Tensor, n: int, fill: float | None = None) -> Tensor:
    """z (m, ...) with its last row repeated, or `fill`, up to n rows."""
    rest = z[-1:].expand(n - len(z), *z.shape[1:])
    return torch.cat([z, rest if fill is None else torch.full_like(rest, fill)])
