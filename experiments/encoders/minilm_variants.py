"""MiniLM and its untrained copy, texts for both, and the same encoder with parts of its blocks removed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from attn_flow.hooks import blocks
from attn_flow.hooks.demo import minilm, topics
from attn_flow.probe.untrained import untrained_copy


def trained_and_untrained(
    texts: int, n: int, seed: int = 0, dtype: torch.dtype = torch.float32
) -> tuple[dict[str, nn.Module], dict[str, Tensor]] | None:
    """{"trained": MiniLM, "untrained": its copy} and `token_ids` for both; None if its package is not installed."""
    try:
        model, tokenizer = minilm()
    except ModuleNotFoundError:
        return None
    models = {"trained": model.to(dtype), "untrained": untrained_copy(model, seed).to(dtype)}
    return models, token_ids(tokenizer, texts, n)


def token_ids(tokenizer: Any, texts: int, n: int) -> dict[str, Tensor]:
    """The first n tokens of some help pages of Python, [CLS] and [SEP] among them: (texts, n), without padding."""
    long = [page for page in topics() if len(page.split()) >= n]
    ids = tokenizer(long[:texts], truncation=True, max_length=n, return_tensors="pt", return_token_type_ids=False)
    return dict(ids)


@contextmanager
def remove_parts(model: nn.Module, *parts: str) -> Iterator[None]:
    """A post-norm encoder without its "ffn" (norms stay), or with a "shuffled ffn".

    Shuffled: what the feed-forward part adds goes to other tokens of the text, the same in every layer.
    """
    outputs = {"ffn": torch.zeros_like, "shuffled ffn": lambda out: out[:, _derangement(out.shape[1])]}
    with ExitStack() as stack:
        for block in {id(b.module): b for b in blocks(model)}.values():
            if block.norm_placement != "post":
                raise ValueError(f"{block.architecture.name} is {block.norm_placement}-norm, expected a post-norm one.")
            for part in parts:
                if part not in outputs:
                    raise ValueError(f"part {part!r}, expected 'ffn' or 'shuffled ffn'.")
                hook = lambda module, args, out, change=outputs[part]: change(out)
                stack.callback(block[block.architecture.ffn].register_forward_hook(hook).remove)
        yield


def _derangement(n: int) -> Tensor:
    """For every position another one: one cycle through all of them."""
    cycle = torch.randperm(n, generator=torch.Generator().manual_seed(n))
    return torch.empty_like(cycle).index_copy(0, cycle, cycle.roll(1))
