"""Which kernel computes a softmax average: one rule, which `Attention(..., kernel=)` overrides."""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from attn_flow.kernels import dense, near, series
from attn_flow.kernels.clouds import default_tolerance

MIN_PAIRS = 2**22  # below this many query-key pairs, dense attention is always fastest
MAX_SHARE = 0.1  # of the keys within reach of a query: above it, dense attention is faster than near keys


def choose_kernel(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    log_weights: Tensor | None,
    scale: float | Tensor,
    tolerance: float | None = None,
) -> Literal["dense", "near", "series"]:
    """The name of the fastest kernel; "near" and "series" only for large clouds on a CPU, without derivatives."""
    is_large = queries.shape[-2] * keys.shape[-2] >= MIN_PAIRS and keys.shape[-1] <= near.MAX_WIDTH
    if not is_large or queries.device.type != "cpu" or not dense.is_plain(queries, keys, values, log_weights, scale):
        return "dense"
    tolerance = tolerance or default_tolerance(values.dtype)
    share = near.estimated_share(queries, keys, log_weights, scale, tolerance)
    if series.is_on_circle(keys, tolerance):
        largest_logit = float((scale * queries).norm(dim=-1).amax() * keys.norm(dim=-1).amax())
        if series.term_count(largest_logit) < share * keys.shape[-2]:  # terms and keys in reach cost about the same
            return "series"
    return "near" if share < MAX_SHARE else "dense"
