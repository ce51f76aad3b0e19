"""The drift of a cold cloud over the keys that matter, with a bound on its error: `near` for every head and cloud."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from attn_flow.attention.heads import Heads
from attn_flow.attention.projections import (
    ALL,
    key_width,
    keys,
    output,
    output_norm,
    queries,
    scale,
    value_width,
    values,
    with_constant,
)
from attn_flow.averages import compiled, fourier, near
from attn_flow.averages.patches import worth

# The share of a query's weights that may be left out where nothing else is asked: what the dtype hardly resolves.
TRUNCATION = {torch.float32: 1e-6, torch.float64: 1e-12}
COMPILED_PAIRS = 2**22  # pairs of queries and keys from which the compiled kernel pays for putting them in order


@dataclass(frozen=True, eq=False)
class Truncated:
    """A drift (..., n, d) over the keys that matter: |drift - F| <= error (..., n), rounding to its dtype aside.

    pairs: the share looked at.
    """

    drift: Tensor
    error: Tensor
    pairs: float


def truncated_drift(
    a: Heads, x: Tensor, y: Tensor, bias: Tensor | None, first: int = 0, always: bool = False
) -> Truncated | None:
    """The drift of `against_cloud` with at most `truncation` of any query's weights left out; None if all matter."""
    tolerance = a.truncation if a.truncation is not None else TRUNCATION.get(x.dtype, 0.0)
    masked = a.causal or not a.self_attention
    if tolerance == 0 or a.kind == "unnormalised" or (a.cold and masked):
        return None
    if torch.is_autocast_enabled(x.device.type):  # it would round what the bounds are made of
        return None
    # The compiled kernel is faster than the fused one on everything.
    always = always or (_compiled(a, x) and x.shape[-2] * y.shape[-2] >= COMPILED_PAIRS)
    most = 1.0 if always else near.MASKED_WORTH if masked else near.WORTH
    if not always and not _skipping_pays(a, x, y, bias, tolerance, most):
        return None
    batch = a._batch(x.shape[:-2], y.shape[:-2], torch.Size(()) if bias is None else bias.shape[:-2])
    masks: dict[str, Any] = {"causal": a.causal, "exclude_self": not a.self_attention, "first": first}
    exact = a.to(x.dtype if a.cold else torch.float64)
    x64 = x.to(exact.Q.dtype)
    y64 = x64 if x is y else y.to(exact.Q.dtype)
    total, error, pairs = x.new_zeros(*batch, *x.shape[-2:]), x64.new_zeros(*batch, x.shape[-2]), 0.0
    for h in range(a.heads):
        head = slice(h, h + 1)
        found = []
        for q, k, b, v in _clouds(exact, x64, y64, bias, head, batch, values(a, y, head)):
            options: dict[str, Any] = {"key_bias": b, "most": most}
            if a.cold:
                one = near.hardmax(q, k, v, **options)
            elif not masked and fourier.fits(q, k, scale(a), tolerance, x.dtype):
                one = fourier.softmax(q, k, v, tolerance=tolerance, key_bias=b, scale=scale(a))
            else:
                one = near.softmax(q, k, v, tolerance=tolerance, scale=scale(a), **options, **masks)
            if one is None:
                return None
            found.append(one)
        average = torch.stack([one.average for one in found]).reshape(*batch, 1, x.shape[-2], -1)
        total += output(a, average, head)
        # The average of what was left out is no farther from that of the rest than two radii of the values.
        v = values(a, y, head)[..., 0, :, :]
        radius = (v - v.mean(-2, keepdim=True)).norm(dim=-1).amax(-1) * output_norm(a, head)
        error += 2 * torch.stack([one.left_out for one in found]).reshape(error.shape) * radius[..., None]
        pairs += sum(one.pairs for one in found) / (len(found) * a.heads)
    return Truncated(with_constant(a, total), error.to(x.dtype), pairs)


def _compiled(a: Heads, x: Tensor) -> bool:
    return not a.cold and compiled.serves(max(key_width(a), value_width(a)), x.dtype, x.device)


def _skipping_pays(a: Heads, x: Tensor, y: Tensor, bias: Tensor | None, tolerance: float, most: float) -> bool:
    """Whether every head and cloud is large, narrow and cold enough, before anything is copied."""
    pairs, width = x.shape[-2] * y.shape[-2], key_width(a)
    on_a_circle = width == 2 and not (a.cold or a.causal) and a.self_attention
    if width > near.WIDTH or pairs < (fourier.PAIRS if on_a_circle else near.PAIRS):
        return False
    batch = a._batch(x.shape[:-2], y.shape[:-2], torch.Size(()) if bias is None else bias.shape[:-2])
    window = 0.0 if a.cold else math.log(y.shape[-2] / tolerance)
    return all(
        (on_a_circle and fourier.fits(q, k, scale(a), tolerance, x.dtype))
        or (pairs >= near.PAIRS and worth(q, k, b, scale(a), window, most))
        for h in range(a.heads)
        for q, k, b, _ in _clouds(a, x, y, bias, slice(h, h + 1), batch)
    )


def _clouds(
    a: Heads, x: Tensor, y: Tensor, bias: Tensor | None, head: slice, batch: torch.Size, v: Tensor | None = None
) -> Iterator[tuple[Tensor, Tensor, Tensor | None, Tensor]]:
    """Queries (n, k), keys, key bias (n,) and what v (..., 1, n, v) is given, of one head, cloud by cloud.

    Queries that are the keys are the same tensor.
    """

    def each(z: Tensor) -> Tensor:
        return z.expand(*batch, 1, *z.shape[-2:]).reshape(-1, *z.shape[-2:])

    k = each(keys(a, y, head))
    same = x is y and a._Q_is_identity and a.query_bias is None and not isinstance(a.beta, Tensor)
    q = k if same else each(queries(a, x, head))
    b = None if bias is None else each(bias[..., head if bias.shape[-2] > 1 else ALL, :, None])[..., 0]
    v = k if v is None else each(v)
    for i in range(len(k)):
        one = k[i]
        yield one if same else q[i], one, None if b is None else b[i], v[i]
