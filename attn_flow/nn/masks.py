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


class Masks(NamedTuple):
    """Numbers added to the logits of keys ([batch,] m) and of pairs ([batch, heads,] n, m), and the causal mask.

    `is_padding` () says whether a HuggingFace mask was nothing but padding; None if there was none.
    """

    log_weights: Tensor | None
    pairs: Tensor | None
    causal: bool
    is_padding: Tensor | None


def torch_masks(
    x: Tensor,
    y: Tensor,
    heads: int,
    key_padding_mask: Tensor | None,
    attn_mask: Tensor | None,
    causal: bool,
    attention_mask: Tensor | None,
) -> Masks:
    """The masks of nn.MultiheadAttention.forward, or HuggingFace's, for queries x and keys y ([batch,] n or m, d)."""
    log_weights = is_padding = pairs = None
    if attention_mask is not None:
        if key_padding_mask is not None:
            raise ValueError("attention_mask and key_padding_mask both hide padding; pass one of them.")
        tokens, is_padding = token_mask(attention_mask, y, causal)
        key_padding_mask = ~tokens
    if key_padding_mask is not None:
        log_weights = _additive("key_padding_mask", key_padding_mask, x)
        if log_weights.shape != y.shape[:-1]:
            expected = f"([batch,] m) = {tuple(y.shape[:-1])}"
            raise ValueError(f"key_padding_mask has shape {tuple(log_weights.shape)}, expected {expected}.")
    if attn_mask is not None and not causal:
        pairs = _additive("attn_mask", attn_mask, x)
        n, m, clouds = x.shape[-2], y.shape[-2], math.prod(x.shape[:-2]) * heads
        if pairs.shape not in ((n, m), (clouds, n, m)):
            expected = f"(n, m) = {(n, m)} or (batch * heads, n, m) = {(clouds, n, m)}"
            raise ValueError(f"attn_mask has shape {tuple(pairs.shape)}, expected {expected}.")
        pairs = pairs if pairs.ndim == 2 else pairs.unflatten(0, (*x.shape[:-2], heads))
        pairs = pairs if log_weights is None else pairs + log_weights[..., None, None, :]
    return Masks(log_weights, pairs, causal, is_padding)


def _additive(name: str, mask: Tensor, x: Tensor) -> Tensor:
    """A mask of torch, where True hides or numbers are added to the logits, as numbers in the dtype of x."""
    checks.require_same_device(name, mask, "query", x)
    if mask.dtype == torch.bool:
        return torch.zeros_like(mask, dtype=x.dtype).masked_fill(mask, -torch.inf)
    if not mask.is_floating_point():
        raise TypeError(f"{name} has dtype {mask.dtype}, expected bool (True hides) or floating point.")
    return mask.to(x.dtype)
