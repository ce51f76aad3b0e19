"""What the kernels that compute one cloud after the other share."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def default_tolerance(dtype: torch.dtype) -> float:
    """The accuracy of averages of values of this dtype, which it hardly resolves."""
    return 1e-12 if dtype == torch.float64 else 1e-6


def average_each_cloud(
    average: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor],
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    log_weights: Tensor | None,
) -> Tensor:
    """The averages (..., m, v) by a function of the queries, keys, values and log-weights of one cloud."""
    log_weights = keys.new_zeros(keys.shape[-2]) if log_weights is None else log_weights
    inputs = (queries, keys, values, log_weights[..., None])
    batch = torch.broadcast_shapes(*(z.shape[:-2] for z in inputs))
    q, k, v, log_w = (z.expand(*batch, *z.shape[-2:]).reshape(-1, *z.shape[-2:]) for z in inputs)
    result = torch.stack([average(*cloud) for cloud in zip(q, k, v, log_w[..., 0])])
    return result.reshape(*batch, *result.shape[1:])
