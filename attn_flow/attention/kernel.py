"""Which kernel computes the average: one rule, which `Attention(..., kernel=)` overrides."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from attn_flow.base.checks import can_read
from attn_flow.base.torch_private import uses_forward_mode
from attn_flow.kernels import dense, near, series

Kernel = Literal["auto", "dense", "near", "series"]
MIN_PAIRS = 2**22  # below this many query-key pairs, dense attention is always fastest
MAX_SHARE = 0.1  # of the keys within reach of a query: above it, dense attention is faster than near keys


def choose_kernel(
    kernel: Kernel,
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    log_weights: Tensor | None,
    scale: float | Tensor,
    tolerance: float | None = None,
    *,
    causal: bool = False,
    exclude_self: bool = False,
) -> Callable[..., Tensor]:
    """The function (queries, keys, values, log_weights, scale=, causal=, exclude_self=) -> average to call.

    "auto" takes a faster kernel only for large clouds on a CPU, without masks and without derivatives.
    """
    if kernel == "auto":
        tensors = [z for z in (queries, keys, values, log_weights, scale) if isinstance(z, Tensor)]
        has_gradient = torch.is_grad_enabled() and any(z.requires_grad for z in tensors)
        has_derivatives = has_gradient or uses_forward_mode() or not can_read(*tensors)
        is_large = queries.shape[-2] * keys.shape[-2] >= MIN_PAIRS and keys.shape[-1] <= near.MAX_WIDTH
        if not is_large or causal or exclude_self or has_derivatives or queries.device.type != "cpu":
            kernel = "dense"
        elif series.is_on_circle(keys, tolerance or series.TOLERANCE.get(values.dtype, 0.0)):
            kernel = "series"
        else:
            share = near.estimated_share(queries, keys, log_weights, scale=scale)
            kernel = "near" if share < MAX_SHARE else "dense"
    if kernel == "dense":
        return dense.softmax_average
    return partial((near if kernel == "near" else series).softmax_average, tolerance=tolerance)
