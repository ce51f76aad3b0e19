"""Patches of neighbours, and which patches of keys a patch of queries must look at (near.py derives the bound)."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from attn_flow.averages import compiled, dense

SIZE = 32  # points in a patch: fewer bound better, more are faster
SAMPLED = 8  # queries asked, before anything is put in order, how many keys they see
CORNERS = 1.2  # a patch's radius over that of a ball of as many points: it is cut along axes
UNCOUNTED = 12.0  # how far below their part of the tolerance patches are not even listed
SET_ASIDE = math.exp(-UNCOUNTED)  # part of the tolerance for all of them
HALVINGS = 3  # of the interval of thresholds
EPS = torch.finfo(torch.float32).eps  # of the bounds
EXACT = "donot_use_mm_for_euclid_dist"  # the other way cancels for near points


@dataclass(frozen=True, eq=False)
class Patches:
    """Points (b, s, k) that are neighbours, their indices (b, s), and the balls (b, k), (b,) that hold them.

    There are 2^levels patches, equally full: indices beyond the last point are padding, copies of it.
    """

    index: Tensor
    points: Tensor
    centre: Tensor
    radius: Tensor

    @classmethod
    def of(cls, x: Tensor) -> Patches:
        """The cloud x (n, k) cut across the widest axis of each part, until there are at most SIZE points in each."""
        n = len(x)
        levels = _levels(n)
        full = _fill(n) * 2**levels
        rough = _padded(x.float(), full)
        if compiled.orders(x):
            index = compiled.halved(rough, levels)
        else:
            index = torch.arange(full, device=x.device)[None]
            while levels:
                cut = 2 - levels % 2  # into four where that is possible: sorting is what takes time
                z = rough[index]
                axis = (z.amax(1) - z.amin(1)).argmax(-1)
                along = z.gather(2, axis[:, None, None].expand(-1, z.shape[1], 1))[..., 0]
                index = index.gather(1, along.argsort(1)).reshape(2**cut * len(index), -1)
                levels -= cut
        return cls.around(index, _padded(x, full)[index])

    def paired(self) -> Patches:
        """Two neighbours as one."""
        if len(self.index) == 1:
            return self
        return Patches.around(*(z.reshape(len(z) // 2, -1, *z.shape[2:]) for z in (self.index, self.points)))

    @classmethod
    def around(cls, index: Tensor, points: Tensor) -> Patches:
        """With the balls around the means."""
        centre = points.mean(1)
        return cls(index, points, centre, (points - centre[:, None]).norm(dim=-1).amax(1))

    def gather(self, z: Tensor, fill: float | None = None) -> Tensor:
        """What belongs to the points, z (n, ...), in patches (b, s, ...)."""
        return _padded(z, self.index.numel(), fill)[self.index]

    def parts(self, count: int) -> Iterator[Patches]:
        """Some patches at a time."""
        for one in zip(*(z.split(count) for z in (self.index, self.points, self.centre, self.radius))):
            yield Patches(*one)


@dataclass(frozen=True, eq=False)
class Selection:
    """The patches of keys that each of A patches of queries looks at, row by row (l,), and where rows begin (A + 1,).

    k_star (A, k), bias_star (A,): a point that stands for a key, and its bias. left_out (A,): a bound on the mass of
    what is not kept, over that of k*. spread (A,): a bound on |q_i - c| |k_j - k*| of what is. nearest (A,): a key.
    """

    listed: Tensor
    start: Tensor
    k_star: Tensor
    bias_star: Tensor
    left_out: Tensor
    spread: Tensor
    nearest: Tensor

    def groups(self, entries: int, size: int) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Patches of queries (g,), of their keys (g, w), and which of these only fill up the rectangle (g, w)."""
        listed, count = self.listed, self.start.diff()
        order = count.argsort()
        widths = count[order].tolist()
        begun = 0
        for end in range(1, len(widths) + 1):
            alike = end < len(widths) and widths[end] <= 1.15 * widths[begun] + 1
            if not alike or (end + 1 - begun) * widths[end] * size > entries:
                group, place = order[begun:end], torch.arange(widths[end - 1], device=order.device)
                at = (self.start[group, None] + place).clamp_max(len(listed) - 1)
                yield group, listed[at], place >= count[group, None]
                begun = end


def share_seen(
    q: Tensor, k: Tensor, bias: Tensor | None, scale: float, window: float, paired: bool = False
) -> tuple[float, float]:
    """The share of pairs that patches will leave, and that of queries whose logits then need float64, both about.

    Asked of a few queries before anything is sorted; window: how far below the highest logit a key matters. A patch is
    taken to be a ball that holds as many neighbours, CORNERS times as wide; a key is seen with its patch, whose
    nearest point is closer to the reference (on a sphere logits fall like the square of the distance). paired: patches
    of queries are joined two by two while float32 will do.
    """
    some = q[:: max(1, len(q) // SAMPLED)]
    logits = dense.logits(some * scale, k, bias)
    top, best = logits.max(-1, keepdim=True)
    away, apart = torch.cdist(k[best[:, 0]], k), torch.cdist(some, q)
    reach = CORNERS * _ball(away, _fill(len(k)))
    gap = (top - logits) * (1 - reach / away.clamp_min(torch.finfo(away.dtype).tiny)).clamp_min(0.0).square()

    def seen_by(radius: Tensor) -> tuple[float, float]:
        spread = scale * radius * (away + reach)
        seen = gap <= window + spread
        precise = spread.where(seen, 0.0).amax(-1) > dense.LOGIT_RANGE
        return float(seen.float().mean()), float(precise.float().mean())

    if paired:
        wide = CORNERS * _ball(apart, 2 * _fill(len(q)))
        if range_of_logits(float(wide.mean()), window, scale) <= dense.LOGIT_RANGE:
            return seen_by(wide)
    return seen_by(CORNERS * _ball(apart, _fill(len(q))))


def range_of_logits(r: float, window: float, scale: float) -> float:
    """scale |q_i - c| |k_j - k*|, about, for the farthest key that matters to a patch of radius r on a sphere."""
    return r * (2 * scale * r + math.sqrt((scale * r) ** 2 + 2 * window * scale))


def _levels(n: int) -> int:
    """How often a cloud of n points is halved."""
    return max(0, math.ceil(math.log2(n / SIZE)))


def _fill(n: int) -> int:
    """Points in a patch of a cloud of n."""
    return -(-n // 2 ** _levels(n))


def _ball(distances: Tensor, count: int) -> Tensor:
    """The radius (..., 1) that holds so many of the points at these distances (..., n)."""
    return distances.kthvalue(min(count, distances.shape[-1]), dim=-1, keepdim=True)[0]


def select(queries: Patches, keys: Patches, bias: Tensor, scale: float, tolerance: float | None) -> Selection:
    """What to keep so that less than `tolerance` of any query's weights is left out; None: whatever can be maximal.

    The log-sum-exp L is convex in the query, L(q) >= L(c) + scale <q - c, m>, with m the mean of the keys as c sees
    them; so m is a reference, with the weight of all of them. Those of the patch that is nearest to c are enough.
    """
    highest = _highest_logits(queries.centre, keys.points, bias, scale)
    nearest = highest.argmax(-1)
    near_points = keys.points[nearest]
    logits = (near_points @ queries.centre[..., None])[..., 0] * scale + bias[nearest]
    logit, at = logits.max(-1)
    if tolerance is None:
        k_star = near_points[torch.arange(len(at), device=at.device), at]
    else:
        logit = torch.logsumexp(logits, -1)
        k_star = ((logits - logit[:, None]).exp()[:, None] @ near_points)[:, 0]
    longest = float(keys.points.abs().max())
    away = torch.cdist(k_star.float(), keys.centre.float(), compute_mode=EXACT) + keys.radius.float()
    away += 8 * EPS * longest  # what was rounded
    r = queries.radius.float()
    bound = torch.addcmul(highest, away, scale * r[:, None]).sub_(logit.float()[:, None])
    columns = bias.shape[0]
    floor = 0.0 if tolerance is None else math.log(tolerance / (bias.shape[1] * columns)) - UNCOUNTED
    row, column = (bound >= floor).nonzero().unbind(-1)
    left_out = torch.zeros_like(logit)
    if tolerance is not None:
        bound = bound[row, column] + math.log(bias.shape[1] / tolerance)
        share = bound.exp()  # of the tolerance
        above = bound > _threshold(bound, share, row, len(logit), columns)[row]
        left_out.index_add_(0, row, share.masked_fill(above, 0.0).double())
        left_out = tolerance * (left_out + SET_ASIDE)
        row, column = row[above], column[above]
    start = F.pad(torch.bincount(row, minlength=len(logit)).cumsum(0), (1, 0))
    spread = r * torch.zeros_like(away).index_put_((row, column), away[row, column]).amax(-1)
    bias_star = logit - scale * (k_star * queries.centre).sum(-1)
    return Selection(column, start, k_star, bias_star, left_out, spread, keys.index[nearest, at])


def _highest_logits(c: Tensor, K: Tensor, bias: Tensor, scale: float) -> Tensor:
    """max_j scale <c_a, k_j> + bias_j over each patch of keys, (A, B), raised by all that float32 may lose."""
    points = torch.cat([K, bias[..., None]], dim=-1).float()
    rows = torch.cat([scale * c, torch.ones_like(c[:, :1])], dim=-1).float()
    size = scale * float(c.norm(dim=-1).max() * K.norm(dim=-1).max()) + float(bias[bias.isfinite()].abs().max())
    if compiled.orders(K):
        return compiled.highest(rows, points) + 32 * EPS * size
    keys = points.flatten(0, 1).T.contiguous()
    step = max(1, dense.BLOCK // keys.shape[1])
    # Into the same memory, again and again: pages that are new cost more than the product.
    logits, found = rows.new_empty(step, keys.shape[1]), rows.new_empty(len(rows), len(bias))
    for i in range(0, len(rows), step):
        some = torch.mm(rows[i : i + step], keys, out=logits[: len(rows) - i])
        torch.amax(some.unflatten(-1, bias.shape), -1, out=found[i : i + step])
    return found.add_(32 * EPS * size)


def _threshold(bound: Tensor, share: Tensor, row: Tensor, rows: int, columns: int) -> Tensor:
    """Per row a threshold below which share = e^bound sums to one or less: -log(columns), or higher by halving."""
    found, step = bound.new_full((rows,), -math.log(columns) - 2 * SET_ASIDE), math.log(columns) / 2
    for _ in range(HALVINGS):
        below = share.masked_fill(bound > (found + step)[row], 0.0)
        small = torch.zeros_like(found, dtype=torch.float64).index_add_(0, row, below.double()) <= 1 - SET_ASIDE
        found, step = torch.where(small, found + step, found), step / 2
    return found


def _padded(z: Tensor, n: int, fill: float | None = None) -> Tensor:
    """z (m, ...) with its last row repeated, or `fill`, up to n rows."""
    rest = z[-1:].expand(n - len(z), *z.shape[1:])
    return torch.cat([z, rest if fill is None else torch.full_like(rest, fill)])
