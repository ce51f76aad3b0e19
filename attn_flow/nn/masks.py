"""Masks in the forms that HuggingFace models and nn.MultiheadAttention use."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from attn_flow.base import checks


def choose_mask(mask: Tensor | None, attention_mask: Tensor | None) -> Tensor | None:
    """The mask that was given, under either of its two names."""
    if mask is not None and attention_mask is not None:
        raise ValueError("mask and attention_mask are two names of one argument; pass one of them.")
    return attention_mask if mask is None else mask


def token_mask(mask: Tensor, x: Tensor, causal: bool = False) -> tuple[Tensor, Tensor]:
    """A padding mask in any of HuggingFace's forms as a boolean one.

    Args:
        mask: (batch, n), (batch, n, n), (batch, 1, 1, n) or (batch, 1, n, n). Booleans and integers have 1 for tokens,
            and so have floating-point masks (batch, n); floating-point masks with more axes are added to logits: 0 for
            tokens and a large negative number for padding.
        x: tokens (..., n, d).
        causal: whether a mask of pairs may hide later tokens too.

    Returns:
        The mask (..., n), True for tokens, and whether it is nothing but padding, shape (): a mask that hides a token
        from some queries only cannot be written as padding.

    Example:
        >>> token_mask(torch.tensor([[[[0.0, -1e9]]]]), torch.ones(1, 2, 3))[0]
        tensor([[ True, False]])
    """
    checks.require_same_device("mask", mask, "x", x)
    is_additive = mask.is_floating_point() and mask.ndim >= x.ndim
    tokens = mask if mask.dtype == torch.bool else mask >= 0 if is_additive else mask > 0
    is_padding = (mask <= 0).all() if is_additive else torch.ones((), dtype=torch.bool, device=x.device)
    if tokens.ndim == x.ndim + 1 and tokens.shape[-3] == 1:
        tokens = tokens[..., 0, :, :]
    n = x.shape[-2]
    pairs = tokens if tokens.ndim == x.ndim and tokens.shape[-2:] in ((1, n), (n, n)) else None
    tokens = tokens if pairs is None else pairs.any(-2)
    is_batch = all(a in (1, b) for a, b in zip(tokens.shape[:-1], x.shape[:-2]))
    if tokens.ndim != x.ndim - 1 or tokens.shape[-1] != n or not is_batch:
        forms = "(batch, n), (batch, n, n), (batch, 1, 1, n) or (batch, 1, n, n)"
        expected = f"{forms} with (batch, n) = {tuple(x.shape[:-1])}"
        raise ValueError(f"mask has shape {tuple(mask.shape)}, expected {expected}.")
    if pairs is not None and pairs.shape[-2] == n > 1:
        is_query = tokens[..., None]  # the rows of padding may hold anything
        is_plain = ((pairs == tokens[..., None, :]) | ~is_query).all()
        is_causal = ((pairs == tokens[..., None, :].expand_as(pairs).tril()) | ~is_query).all()
        is_padding = is_padding & (is_plain | is_causal if causal else is_plain)
    return tokens.expand(x.shape[:-1]), is_padding


class LogitMask(NamedTuple):
    """The masks of nn.MultiheadAttention.forward as numbers that are added to the logits."""

    bias: Tensor | None = None  # ([batch,] heads or 1, n or 1, m), finite
    causal: bool = False  # a causal mask, which is not part of the bias
    is_blind: Tensor | None = None  # queries that see no key, ([batch,] heads or 1, n or 1, 1)
    is_empty: Tensor | None = None  # clouds without keys, (batch) or ()
    is_padding: Tensor | None = None  # (), see `token_mask`


def logit_mask(
    x: Tensor,
    y: Tensor,
    queries: Tensor,
    key_padding_mask: Tensor | None,
    attn_mask: Tensor | None,
    attention_mask: Tensor | None,
    causal: bool,
    need_weights: bool,
) -> LogitMask:
    """The masks of tokens x ([batch,] n, d) that attend to tokens y ([batch,] m, d), as numbers.

    Args:
        queries: ([batch,] heads, n, k), in the dtype of the logits, which autocast may have changed.
        causal: replaces attn_mask. It stays apart if it is alone, where the fused kernel is faster, unless
            `need_weights`.
    """
    n, m, batch, heads = x.shape[-2], y.shape[-2], x.shape[:-2], queries.shape[-3]
    bias = is_empty = is_padding = None
    if attention_mask is not None:
        if key_padding_mask is not None:
            raise ValueError("attention_mask and key_padding_mask both hide padding; pass one of them.")
        is_token, is_padding = token_mask(attention_mask, y, causal)
        key_padding_mask = ~is_token
    if key_padding_mask is not None:
        bias = _additive("key_padding_mask", key_padding_mask, queries, tuple(y.shape[:-1]))
        is_empty, bias = bias.isneginf().all(-1), bias[..., None, None, :]
    if causal:
        if bias is None and not need_weights:
            return LogitMask(causal=True)
        attn_mask = torch.ones(n, n, dtype=torch.bool, device=x.device).triu(1)
    if attn_mask is not None:
        pairs = _additive("attn_mask", attn_mask, queries, (n, m), (math.prod(batch) * heads, n, m))
        pairs = pairs if pairs.ndim == 2 else pairs.unflatten(0, (*batch, heads))
        bias = pairs if bias is None else bias + pairs
    if bias is None:
        return LogitMask()
    is_blind = bias.isneginf().all(-1, keepdim=True)
    # A query that sees no key would have NaN; with finite numbers it has an average, which is then set to zero.
    return LogitMask(bias.clamp_min(torch.finfo(bias.dtype).min / 4), False, is_blind, is_empty, is_padding)


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
