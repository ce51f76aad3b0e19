"""Patches of neighbours, and which patches of keys a patch of queries must look at (near.py derives the bound)."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from attn_flow.averages import dense

SIZE = 64  # points in a patch: fewer bound better, more are faster
SAMPLED = 8  # queries asked, before anything is put in order, how many keys they see
HALVINGS = 3  # of the interval of thresholds
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
        """What belongs to the points, z (n, ...), in patches (b, s, ...)."""
        return _padded(z, self.index.numel(), fill)[self.index]

    def parts(self, count: int) -> Iterator[Patches]:
        """Some patches at a time."""
        for one in zip(*(z.split(count) for z in (self.index, self.points, self.centre, self.radius))):
            yield Patches(*one)


@dataclass(frozen=True, eq=False)
class Selection:
    """The patches of keys that each of A patches of queries looks at: kept (A, B).

    reference (A,): the index of k*. left_out (A,): a bound on the mass of what is not kept, over that of k*.
    spread: a bound on |q_i - c| |k_j - k*| of what is.
    """

    kept: Tensor
    reference: Tensor
    left_out: Tensor
    spread: float

    def groups(self, entries: int, size: int) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Patches of queries (g,), of their keys (g, w), and which of these only fill up the rectangle (g, w)."""
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
    """Whether patches will leave less than the share `most` of pairs, asked of a few queries before anything is sorted.

    window: how far below the highest logit a key matters. A patch is taken to be as wide as the ball that holds SIZE
    neighbours.
    """
    some = q[:: max(1, len(q) // SAMPLED)]
    logits = dense.logits(some * scale, k, bias)
    top, best = logits.max(-1, keepdim=True)
    away = torch.cdist(k[best[:, 0]], k)
    radius, reach = (z.kthvalue(min(SIZE, z.shape[-1]), dim=-1, keepdim=True)[0] for z in (torch.cdist(some, q), away))
    seen = logits - top + scale * radius * (away + reach) >= -window
    return float(seen.float().mean()) < most


def select(queries: Patches, keys: Patches, bias: Tensor, scale: float, tolerance: float | None) -> Selection:
    """What to keep so that less than `tolerance` of any query's weights is left out; None: whatever can be maximal."""
    highest = _highest_logits(queries.centre, keys.points, bias, scale)
    nearest = highest.argmax(-1)
    logit, at = ((keys.points[nearest] @ queries.centre[..., None])[..., 0] * scale + bias[nearest]).max(-1)
    reference = keys.index[nearest, at]
    away = torch.cdist(keys.points[nearest, at], keys.centre, compute_mode=EXACT) + keys.radius
    spread = queries.radius[:, None] * away
    bound = highest - logit[:, None] + scale * spread
    if tolerance is None:
        return Selection(bound >= 0, reference, torch.zeros_like(logit), 0.0)
    bound += math.log(bias.shape[1] / tolerance)
    share = bound.float().exp()  # of the tolerance
    kept = bound > _threshold(bound, share)[:, None]
    left_out = tolerance * share.masked_fill_(kept, 0.0).sum(-1).double()
    return Selection(kept, reference, left_out, float(spread.masked_fill_(~kept, 0.0).max()))


def _highest_logits(c: Tensor, K: Tensor, bias: Tensor, scale: float) -> Tensor:
    """max_j scale <c_a, k_j> + bias_j over each patch of keys, (A, B), raised by all that float32 may lose."""
    keys = torch.cat([K, bias[..., None]], dim=-1).flatten(0, 1).float().T.contiguous()
    rows = torch.cat([scale * c, torch.ones_like(c[:, :1])], dim=-1).float()
    parts = [
        (some @ keys).unflatten(-1, bias.shape).amax(-1) for some in rows.split(max(1, dense.BLOCK // keys.shape[1]))
    ]
    size = scale * float(c.norm(dim=-1).max() * K.norm(dim=-1).max()) + float(bias[bias.isfinite()].abs().max())
    return torch.cat(parts).double() + 32 * torch.finfo(torch.float32).eps * size


def _threshold(bound: Tensor, share: Tensor) -> Tensor:
    """Per row a threshold below which share = e^bound sums to one or less: -log(columns), or higher by halving."""
    found, step = torch.full_like(bound[:, 0], -math.log(bound.shape[1])), math.log(bound.shape[1]) / 2
    for _ in range(HALVINGS):
        small = torch.where(bound <= (found + step)[:, None], share, 0.0).sum(-1) <= 1
        found, step = torch.where(small, found + step, found), step / 2
    return found


def _padded(z: Tensor, n: int, fill: float | None = None) -> Tensor:
    """z (m, ...) with its last row repeated, or `fill`, up to n rows."""
    rest = z[-1:].expand(n - len(z), *z.shape[1:])
    return torch.cat([z, rest if fill is None else torch.full_like(rest, fill)])
