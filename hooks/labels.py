"""Names of tokens and marks of special ones, for the positions of a forward pass."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from attn_flow.hooks.inputs import TokenBatch
from attn_flow.hooks.layout import Block


def special_marks(block: Block, call: dict[str, Any], batch: TokenBatch, mask: Tensor, tokenizer: Any = None) -> Tensor:
    """True for special tokens ([CLS], [SEP], class and register tokens of images), (batch, pos).

    Args:
        call: the arguments of the forward pass by name.
        mask: True for tokens, (batch, pos).
    """
    marks = torch.zeros_like(mask)
    if batch.special is not None:
        for b, row in enumerate(batch.special):
            marks[b, : len(row)] = torch.tensor(row[: mask.shape[1]], device=mask.device)
    elif isinstance(call.get("pixel_values"), Tensor):
        marks[:, : mask.shape[1] - _patch_grid(block, call, mask.shape[1])[0]] = True
    elif tokenizer is not None and isinstance(call.get("input_ids"), Tensor):
        ids = call["input_ids"]
        marks = torch.isin(ids, torch.tensor(tokenizer.all_special_ids, device=ids.device)).to(mask.device)
    return marks


def token_strings(
    block: Block, call: dict[str, Any], batch: TokenBatch, mask: Tensor, tokenizer: Any = None
) -> list[list[str]]:
    """A name for every position: the token, its id, the place of a patch, or the position itself."""
    if batch.tokens is not None:
        return batch.tokens
    (texts, n), ids = mask.shape, call.get("input_ids")
    if isinstance(call.get("pixel_values"), Tensor):
        patches, columns = _patch_grid(block, call, n)
        names = ["[CLS]", *(f"[REG{i}]" for i in range(1, n - patches))][: n - patches]
        return [names + [f"patch {i // columns},{i % columns}" for i in range(patches)]] * texts
    if isinstance(ids, Tensor):
        return [tokenizer.convert_ids_to_tokens(r) if tokenizer else [str(i) for i in r] for r in ids.tolist()]
    return [[str(i) for i in range(n)]] * texts


def _patch_grid(block: Block, call: dict[str, Any], n: int) -> tuple[int, int]:
    """Number of patches and of their columns, of n tokens of an image. Class and register tokens come first."""
    config: Any = block.root.config
    height, width = call["pixel_values"].shape[-2:]
    rows, columns = height // config.patch_size, width // config.patch_size
    if rows * columns > n:
        raise ValueError(
            f"{n} tokens for {rows} x {columns} patches of {config.patch_size} pixels; expected at least as many."
        )
    return rows * columns, columns
