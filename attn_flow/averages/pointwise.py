"""Sums under weights that a pair of tokens has by itself, sum_j w_j phi(scale <q_i,k_j>) v_j: nothing is shared out.

    linear   phi(s) = s             relu   phi(s) = max(s, 0)             sigmoid   phi(s) = 1 / (1 + e^{-s})

Shapes and masks as in `dense`: key_bias holds log w_j, and w_j = 1/n without it. A hidden key adds nothing; the masses
of the others stay as they are. Memory is linear in n, and so is the time of the linear kind without a causal mask.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from attn_flow.averages import dense

PHI: dict[str, Callable[[Tensor], Tensor]] = {"linear": lambda s: s, "relu": torch.relu, "sigmoid": torch.sigmoid}


def weighted_sum(
    kind: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    key_bias: Tensor | None = None,
    causal: bool = False,
    exclude_self: bool = False,
    first: int = 0,
    scale: float = 1.0,
) -> Tensor:
    """sum_j w_j phi(scale <q_i,k_j>) v_j, (..., m, v), with the phi of this kind."""
    if kind == "linear" and not causal:
        return _linear(q * scale, k, v, key_bias, exclude_self, first)

    def rows(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, i: int) -> tuple[Tensor, Tensor]:
        total = weights(kind, q * scale, k, bias, causal, exclude_self, first + i) @ v
        return total, total[..., 0]  # no second result is asked for

    if key_bias is None:  # of all keys: a block of rows may be given the first of them only
        key_bias = torch.full_like(k[..., 0], -math.log(k.shape[-2]))
    return dense.in_blocks(rows, q, k, v, key_bias, first if causal else None)[0]


def weights(
    kind: str,
    q: Tensor,
    k: Tensor,
    bias: Tensor | None,
    causal: bool = False,
    exclude_self: bool = False,
    first: int = 0,
) -> Tensor:
    """w_j phi(<q_i,k_j>), (..., m, n), zero where hidden."""
    A = PHI[kind](q @ k.mT) * (1 / k.shape[-2] if bias is None else bias.exp()[..., None, :])
    if causal or exclude_self:
        i = torch.arange(first, first + q.shape[-2], device=q.device)[:, None]
        j = torch.arange(k.shape[-2], device=q.device)
        A = A.masked_fill(dense.hidden(i, j, causal, exclude_self), 0.0)
    return A


def _linear(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, exclude_self: bool, first: int) -> Tensor:
    """(sum_j w_j v_j k_j^T) q_i, less the query's own term: no pair is looked at."""
    weighted = v / k.shape[-2] if bias is None else v * bias.to(v.dtype).exp()[..., None]
    total = q @ (k.mT @ weighted)
    if not exclude_self:
        return total
    own = slice(first, first + q.shape[-2])
    return total - (q * k[..., own, :]).sum(-1, keepdim=True) * weighted[..., own, :]
