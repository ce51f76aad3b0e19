"""Softmax averages over the keys that matter: at low temperature a query sees only the keys near its best one.

Queries and keys are cut into patches of neighbours. Let c and r be centre and radius of a patch of queries, P the patch
of keys in which c has its highest logit, p_j the softmax weights of c inside P, and

    L = log sum_{j in P} exp(scale <c, k_j> + log w_j),    m = sum_{j in P} p_j k_j.

By Jensen's inequality the normaliser of every query q of the patch is at least exp(L + scale <q - c, m>). So the
softmax weight of a key k_j is at most

    exp(scale <c, k_j> + log w_j - L + scale r |k_j - m|),

and patches of keys whose weights sum to less than the tolerance are left out. What is left out then has less than
`tolerance` of the weight of every query, and the average errs by at most twice the tolerance times the radius of the
values. The remaining logits, minus L + scale <q - c, m>, are scale <q - c, k_j - m> plus a number of the key: products
of small differences, which keep their digits at any scale.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from attn_flow.base.checks import MAX_FLOAT32_LOGIT
from attn_flow.kernels import dense
from attn_flow.kernels.clouds import average_each_cloud, default_tolerance

PATCH_SIZE = 32  # points in a patch of keys: smaller ones have better bounds, larger ones are faster
MAX_WIDTH = 16  # of keys; in more dimensions patches of neighbours are as wide as the cloud
BOUND_ENTRIES = 2**22  # bounds in memory at a time
GATHERED_KEYS = 2**16  # keys gathered at a time
EPS = torch.finfo(torch.float32).eps  # rounding of the bounds, which are computed in float32
HIDDEN = torch.finfo(torch.float32).min / 4  # stands for the log-weight -inf
SAMPLED_QUERIES = 8  # of every cloud, from which `estimated_share` is computed


def softmax_average(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    log_weights: Tensor | None = None,
    *,
    scale: float | Tensor = 1.0,
    tolerance: float | None = None,
) -> Tensor:
    """The average of the values under softmax weights, (..., m, v), without the keys that hardly count.

    `tolerance` is the share of every query's weight that may be left out. With 1e-6, small logits are computed in
    float32 whatever the dtype is.

    Example:
        >>> x = torch.nn.functional.normalize(torch.randn(1000, 3, dtype=torch.float64), dim=-1)
        >>> difference = softmax_average(x, x, x, scale=500.0) - dense.softmax_average(x, x, x, scale=500.0)
        >>> bool(difference.abs().max() < 1e-11)
        True
    """
    tolerance = tolerance or default_tolerance(values.dtype)
    is_shared = queries is keys and not isinstance(scale, Tensor)
    if isinstance(scale, Tensor):
        queries, scale = scale * queries, 1.0

    def average(q: Tensor, k: Tensor, v: Tensor, log_w: Tensor) -> Tensor:
        key_patches = cut_into_patches(k.double(), PATCH_SIZE)
        query_patches = join_pairs(key_patches) if is_shared else cut_into_patches(q.double(), 2 * PATCH_SIZE)
        return _average_patches(query_patches, key_patches, v, log_w.double(), float(scale), tolerance)

    return average_each_cloud(average, queries, keys, values, log_weights)


def estimated_share(
    queries: Tensor, keys: Tensor, log_weights: Tensor | None, scale: float | Tensor, tolerance: float
) -> float:
    """The share of keys within reach of a query, estimated from a few queries of every cloud.

    A key counts if its logit is less than log(n / tolerance) below the highest one; patches see somewhat more.
    """
    step = max(1, queries.shape[-2] // SAMPLED_QUERIES)
    logits = (scale * queries)[..., ::step, :] @ keys.mT
    logits = logits if log_weights is None else logits + log_weights[..., None, :]
    window = math.log(keys.shape[-2] / tolerance)
    return float((logits >= logits.amax(-1, keepdim=True) - window).double().mean())


@dataclass(frozen=True, eq=False)
class Patches:
    """Neighbouring points of a cloud in patches of equal size, and the balls that contain them.

    Args:
        index: (patches, size), the number of each point in the cloud; numbers from `count` on repeat the last point.
        points: (patches, size, k).
        centre, radius: (patches, k) and (patches,).
        count: the number of points of the cloud.
    """

    index: Tensor
    points: Tensor
    centre: Tensor
    radius: Tensor
    count: int

    def gather(self, z: Tensor) -> Tensor:
        """One row per point, z (n, ...), in patches (patches, size, ...)."""
        return z[self.index.clamp_max(self.count - 1)]

    def scatter(self, z: Tensor) -> Tensor:
        """One row per point in patches, z (patches, size, ...), in the order of the cloud (n, ...)."""
        rows = z.new_empty(self.index.numel(), *z.shape[2:])
        rows[self.index.flatten()] = z.flatten(0, 1)
        return rows[: self.count]


def cut_into_patches(x: Tensor, size: int) -> Patches:
    """The points x (n, k) halved across the widest axis, again and again, until patches have at most `size` points."""
    n = len(x)
    levels = max(0, math.ceil(math.log2(n / size)))
    index = torch.arange(-(-n // 2**levels) * 2**levels, device=x.device)[None]
    coordinates = x.float()[index[0].clamp_max(n - 1)]
    for _ in range(levels):
        z = coordinates[index]
        axis = (z.amax(1) - z.amin(1)).argmax(-1)
        along = z.gather(2, axis[:, None, None].expand(-1, z.shape[1], 1))[..., 0]
        index = index.gather(1, along.argsort(1)).reshape(2 * len(index), -1)
    return _with_balls(index, x[index.clamp_max(n - 1)], n)


def join_pairs(patches: Patches) -> Patches:
    """Patches of twice the size, from neighbouring pairs."""
    if len(patches.index) == 1:
        return patches
    index, points = (z.reshape(len(z) // 2, -1, *z.shape[2:]) for z in (patches.index, patches.points))
    return _with_balls(index, points, patches.count)


def _with_balls(index: Tensor, points: Tensor, count: int) -> Patches:
    centre = points.mean(1)
    return Patches(index, points, centre, (points - centre[:, None]).norm(dim=-1).amax(1), count)


def _average_patches(
    queries: Patches, keys: Patches, values: Tensor, log_weights: Tensor, scale: float, tolerance: float
) -> Tensor:
    """The averages (m, v) of one cloud."""
    bias = keys.gather(log_weights).masked_fill(keys.index >= keys.count, -torch.inf)  # (patches, size)
    if not bool(bias.isfinite().any()):
        return values.new_zeros(queries.count, values.shape[-1])
    (count, size, d), v = keys.points.shape, values.shape[-1]
    width = max(d + 1, v, dense.MIN_WIDTH)
    # (k_j, log w_j, 1) and the values, in patches. One more patch, of hidden keys, fills up groups.
    hidden = F.pad(bias.clamp_min(HIDDEN), (0, 0, 0, 1), value=HIDDEN)[..., None]
    key_rows = torch.cat([F.pad(keys.points, (0, 0, 0, 0, 0, 1)), hidden, torch.ones_like(hidden)], dim=-1)
    padded = F.pad(keys.gather(values), (0, width - v, 0, 0, 0, 1))
    value_rows = {dtype: padded.to(dtype) for dtype in (torch.float32, torch.float64)}
    result = values.new_empty(*queries.index.shape, v)
    for rows in torch.arange(len(queries.index), device=values.device).split(max(1, BOUND_ENTRIES // count)):
        c = queries.centre[rows]
        column, begin, m, L, logit_range = _select(c, queries.radius[rows], keys, bias, scale, tolerance)
        # The logits of the module's text are <(scale (q - c), 1), (k_j - m, s_j)> with s_j = scale <c, k_j> + log w_j
        # - L. The matrix T of a patch of queries maps (k_j, log w_j, 1) to (k_j - m, s_j).
        differences = scale * (queries.points[rows] - c[:, None])
        query_rows = F.pad(F.pad(differences, (0, 1), value=1.0), (0, width - d - 1))
        T = c.new_zeros(len(c), d + 2, width)
        T[:, range(d), range(d)] = 1.0
        T[:, :d, d], T[:, d, d], T[:, d + 1, :d], T[:, d + 1, d] = scale * c, 1.0, -m, -L
        for group, near in _groups(column, begin, size, empty=count):
            is_small = tolerance > EPS and float(logit_range[group].max()) <= MAX_FLOAT32_LOGIT
            dtype = torch.float32 if is_small else torch.float64
            k = key_rows.index_select(0, near.flatten()).reshape(len(group), -1, d + 2) @ T[group]
            u = value_rows[dtype].index_select(0, near.flatten()).reshape(len(group), -1, width)
            average = dense.softmax_average(query_rows[group].to(dtype), k.to(dtype), u)
            result[rows[group]] = average[..., :v].to(result.dtype)
    return queries.scatter(result)


def _select(
    centre: Tensor, radius: Tensor, keys: Patches, bias: Tensor, scale: float, tolerance: float
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The patches of keys that each of A patches of queries looks at.

    Returns:
        Their numbers (total,), row after row; where the rows begin (A + 1,); m (A, k) and L (A,) of the module's text;
        a bound on scale |q - c| |k_j - m| of what is kept (A,).
    """
    highest = _highest_logits(centre, keys.points, bias, scale)  # (A, B)
    nearest = highest.argmax(-1)
    logits = (keys.points[nearest] @ (scale * centre)[..., None])[..., 0] + bias[nearest]  # (A, size)
    L = torch.logsumexp(logits, -1)
    m = ((logits - L[:, None]).exp()[:, None] @ keys.points[nearest])[:, 0]
    farthest = torch.cdist(m.float(), keys.centre.float(), compute_mode="donot_use_mm_for_euclid_dist")
    farthest += keys.radius.float() + 8 * EPS * float(keys.points.abs().max())
    bound = torch.addcmul(highest, farthest, scale * radius.float()[:, None]) - L.float()[:, None]
    is_kept = bound > math.log(tolerance / bias.numel())  # the others sum to less than the tolerance
    row, column = is_kept.nonzero().unbind(-1)
    begin = F.pad(torch.bincount(row, minlength=len(L)).cumsum(0), (1, 0))
    logit_range = scale * radius * torch.where(is_kept, farthest, 0.0).amax(-1)
    return column, begin, m, L, logit_range


def _highest_logits(centre: Tensor, points: Tensor, bias: Tensor, scale: float) -> Tensor:
    """max_j scale <c_a, k_j> + log w_j over each patch of keys, (A, B), raised by what float32 may have lost."""
    keys = torch.cat([points, bias[..., None]], dim=-1).float().flatten(0, 1).T.contiguous()
    rows = torch.cat([scale * centre, torch.ones_like(centre[:, :1])], dim=-1).float()
    largest_bias = float(bias[bias.isfinite()].abs().max())
    size = scale * float(centre.norm(dim=-1).max() * points.norm(dim=-1).max()) + largest_bias
    step = max(1, dense.BLOCK_ENTRIES // keys.shape[1])
    # Every block uses the same memory: new pages cost more than the product.
    logits, highest = rows.new_empty(step, keys.shape[1]), rows.new_empty(len(rows), len(bias))
    for i in range(0, len(rows), step):
        block = torch.mm(rows[i : i + step], keys, out=logits[: len(rows) - i])
        torch.amax(block.unflatten(-1, bias.shape), -1, out=highest[i : i + step])
    return highest.add_(32 * EPS * size)


def _groups(column: Tensor, begin: Tensor, size: int, empty: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Patches of queries (g,) with about equally many patches of keys (g, w), filled up with the patch `empty`."""
    count = begin.diff()
    order = count.argsort()
    widths = count[order].tolist()
    start = 0
    for end in range(1, len(widths) + 1):
        is_similar = end < len(widths) and widths[end] <= 1.15 * widths[start] + 1
        if not is_similar or (end + 1 - start) * widths[end] * size > GATHERED_KEYS:
            group, place = order[start:end], torch.arange(widths[end - 1], device=order.device)
            position = (begin[group, None] + place).clamp_max(len(column) - 1)
            yield group, torch.where(place < count[group, None], column[position], empty)
            start = end
