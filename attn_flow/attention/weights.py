"""Weights of attention: their shapes, their checks, and what they do to tokens."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from attn_flow.base import checks

AXES = {"Q": 3, "K": 3, "V": 3, "O": 3, "query_bias": 2, "value_bias": 1, "beta": 1}  # without batch axes


def check_weights(weights: Mapping[str, Tensor | None], dim: int) -> tuple[dict[str, Tensor | None], int]:
    """The weights with the axis of the heads, and the dimension d of the tokens; an error if their shapes disagree.

    Args:
        weights: Q, K, V, O, query_bias and value_bias; None is the identity, or no bias.
        dim: d, or 0 if the weights determine it.
    """
    present = {name: z for name, z in weights.items() if z is not None}
    for name, weight in present.items():
        checks.require_floating(name, weight)
        if weight.ndim < AXES[name] - 1 or 0 in weight.shape:
            axes = "(..., heads, rows, columns)" if AXES[name] == 3 else "(..., heads, k)"
            raise ValueError(f"{name} has shape {tuple(weight.shape)}, expected {axes} without empty axes.")
        checks.require_finite(name, weight)
        present[name] = weight[None] if weight.ndim == AXES[name] - 1 else weight  # one head
    dtypes = {name: weight.dtype for name, weight in present.items()}
    if len({*dtypes.values()}) > 1:
        raise ValueError(f"the weights have different dtypes {dtypes}; use one dtype.")
    widths = [z.shape[-2 if name == "O" else -1] for name, z in present.items() if name != "query_bias"]
    d: int = dim or max(widths, default=0)
    if d < 1:
        raise ValueError(f"dim = {dim}, expected at least 1 if all matrices are None, as in Attention.identity(3).")
    k = present["Q"].shape[-2] if "Q" in present and "K" in present else d
    v = present["V"].shape[-2] if "V" in present and "O" in present else d
    sizes = {"Q": (k, d), "K": (k, d), "V": (v, d), "O": (d, v), "query_bias": (k,), "value_bias": (d,)}
    for name, weight in present.items():
        checks.require_shape(name, weight, sizes[name])
    return {**weights, **present}, d


def as_beta(beta: float | Tensor) -> float | Tensor:
    """beta as a float if it is one number without a gradient, or infinite; otherwise as a tensor (..., heads or 1)."""
    checks.require_beta(beta)
    if not isinstance(beta, Tensor):
        return float(beta)
    if checks.can_read(beta) and not beta.requires_grad:
        if bool(beta.isinf().all()):
            return math.inf
        checks.require(beta.isfinite(), "beta mixes finite and infinite entries; use a separate call for beta = inf.")
        if beta.numel() == 1 and beta.ndim < 2:
            return float(beta)
    return beta[None] if beta.ndim == 0 else beta


def project(tokens: Tensor, weight: Tensor | None) -> Tensor:
    """weight_h x_i for every head and token: (..., 1, n, d) and (..., heads, k, d) -> (..., heads, n, k).

    None is the identity and returns the tokens themselves: kernels save work where queries and keys are one tensor.
    """
    if weight is None:
        return tokens
    product = tokens[..., 0, :, :] @ weight.flatten(-3, -2).mT  # (..., n, heads * k)
    return product.unflatten(-1, weight.shape[-3:-1]).transpose(-2, -3)


def sum_heads(average: Tensor, weight: Tensor | None) -> Tensor:
    """sum_h weight_h y_hi: (..., heads or 1, n, v) and (..., heads, d, v) -> (..., n, d); None is the identity."""
    if weight is None:
        return average.sum(-3) if average.shape[-3] > 1 else average[..., 0, :, :]
    average = average.expand(*average.shape[:-3], weight.shape[-3], -1, -1)
    return average.transpose(-2, -3).flatten(-2) @ weight.mT.flatten(-3, -2)


def bound_projection(radius: float | Tensor, weight: Tensor | None, bias: Tensor | None = None) -> float | Tensor:
    """An upper bound on |weight x + bias| for |x| <= radius, (..., heads).

    The norm of a matrix A, (k, d), is at most |(A A^T)^4|^(1/8) in the Frobenius norm, and that is at most k^(1/16)
    times the norm. It is cheaper than a singular value decomposition.
    """
    if weight is not None:
        size = torch.linalg.matrix_norm(weight, keepdim=True).clamp_min(torch.finfo(weight.dtype).tiny)
        gram = (weight / size) @ (weight / size).mT
        radius = radius * size[..., 0, 0] * torch.linalg.matrix_norm(torch.linalg.matrix_power(gram, 4)) ** 0.125
    return radius if bias is None else radius + bias.norm(dim=-1)
