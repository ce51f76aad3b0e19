"""The masks of nn.MultiheadAttention as numbers that are added to the logits."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from attn_flow.base import checks


def logit_mask(
    queries: Tensor, keys: Tensor, padding: Tensor | None, pairs: Tensor | None, is_causal: bool
) -> tuple[Tensor | None, Tensor | None]:
    """The masks of nn.MultiheadAttention.forward as finite numbers that are added to the logits.

    Args:
        queries, keys: ([batch,] heads, n, k) and ([batch,] heads, m, k).
        padding, pairs, is_causal: key_padding_mask, attn_mask, and whether to take the causal mask instead of it.

    Returns:
        The numbers ([batch or 1,] heads or 1, n or 1, m), and from which queries they hide every key (with m = 1);
        both None without a mask.
    """
    *batch, heads, n, m = *queries.shape[:-1], keys.shape[-2]
    masks = []
    if padding is not None:
        masks.append(_additive("key_padding_mask", padding, queries, (*batch, m))[..., None, None, :])
    if is_causal:
        pairs = torch.ones(n, n, dtype=torch.bool, device=queries.device).triu(1)
    if pairs is not None:
        pairs = _additive("attn_mask", pairs, queries, (n, m), (math.prod(batch) * heads, n, m))
        of = (*batch, heads) if pairs.ndim == 3 else (1,) * (len(batch) + 1)
        masks.append(pairs.reshape(*of, n, m))
    if not masks:
        return None, None
    total = sum(masks[1:], start=masks[0])
    # A query that sees no key would have NaN; with finite numbers it has an average, which is then set to zero.
    return total.clamp_min(torch.finfo(total.dtype).min / 4), total.isneginf().all(-1, keepdim=True)


def _additive(name: str, mask: Tensor, queries: Tensor, *shapes: tuple[int, ...]) -> Tensor:
    """A mask of torch, where True hides or numbers are added to the logits, as numbers in the dtype of the queries."""
    checks.require_same_device(name, mask, "query", queries)
    if mask.shape not in shapes:
        raise ValueError(f"{name} has shape {tuple(mask.shape)}, expected {' or '.join(map(str, shapes))}.")
    if mask.dtype == torch.bool:
        return torch.zeros_like(mask, dtype=queries.dtype).masked_fill(mask, -math.inf)
    if not mask.is_floating_point():
        raise TypeError(f"{name} has dtype {mask.dtype}, expected bool (True hides) or floating point.")
    return mask.to(queries.dtype)
