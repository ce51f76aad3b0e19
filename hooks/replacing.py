"""Layers that are flows for good: `replace_attention`, trained, saved and loaded like any model.

Parameters keep their names. A replaced attention module gains one child, `attn_flow`, a `LayerFlow` whose
`log_beta_factor` (heads,) is part of the state. It is looked up whenever the layer runs, so that whatever takes its
place (a trained copy under PEFT's modules_to_save) is what acts.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain
from typing import TypeVar

import torch
from torch import Tensor, nn

from attn_flow.hooks.caching import restore_cache, stop_caching
from attn_flow.hooks.evaluation import ChangedAttention, changed_attention, read_settings
from attn_flow.hooks.layer_flow import LayerFlow, StepName
from attn_flow.hooks.layout import ENTRY, blocks, blocks_to_change, choose_layers, distinct
from attn_flow.hooks.saving import update_config
from attn_flow.hooks.wrapping import resolve_factor

Model = TypeVar("Model", bound=nn.Module)


def replace_attention(
    model: Model,
    layers: int | Iterable[int] | None = None,
    *,
    beta: float | Tensor | None = None,
    beta_factor: float | Tensor | None = None,
    horizon: float = 1.0,
    steps: int = 1,
    step: StepName = "euler",
    learn_beta: bool = False,
) -> Model:
    """Make the attention of some layers the flow of their own weights, for good: to fine-tune, save and load.

    Args:
        model: a known encoder, or something that holds one, such as a BertForSequenceClassification or a
            SentenceTransformer. It is changed in place. LoRA adapters may come before or after.
        layers: indices of layers; all by default. A shared block (ALBERT) has one flow for all its layers.
        beta, beta_factor, horizon, steps, step: as in `wrap`, with the name of a step. The default, one Euler step of
            size one at the trained temperature, is the pretrained layer.
        learn_beta: make beta a parameter: its logarithm, one per head. Under PEFT it is trained as well with
            LoraConfig(modules_to_save=["attn_flow"]).

    Returns:
        The model itself. `model.save_pretrained(folder)` keeps the flow, see `load`. Dropout is drawn anew in every
        evaluation of attention. Causal models run without a cache of keys and values where a layer evaluates its
        attention several times. `restore_attention` undoes all of it.

    Example:
        >>> from attn_flow.hooks import flows
        >>> from attn_flow.hooks.demo import tiny_bert
        >>> model = tiny_bert()[0]  # or AutoModel.from_pretrained("bert-base-uncased")
        >>> model = replace_attention(model, layers=[1], steps=4, step="rk4", beta_factor=2.0, learn_beta=True)
        >>> flows(model)
        {1: LayerFlow(heads=2, horizon=1.0, steps=4, step=rk4, learn_beta=True)}
        >>> [name for name, _ in model.named_parameters() if "attn_flow" in name]
        ['encoder.layer.1.attention.self.attn_flow.log_beta_factor']
    """
    all_blocks = blocks_to_change(model)
    chosen = choose_layers(len(all_blocks), layers)
    for block in (all_blocks[i] for i in chosen):
        shared = [b.index for b in all_blocks if b.module is block.module]
        if not set(shared) <= set(chosen):
            raise ValueError(
                f"layer {block.index} shares its block with layers {shared}, which has one flow for all of them; "
                "expected all or none of them in `layers`."
            )
        if read_settings(block)[0] is not None:
            raise ValueError(f"layer {block.index} is a flow already; undo that by restore_attention(model) first.")
    new_flows = []
    for block in distinct(all_blocks[i] for i in chosen):
        # Quantised weights are integers, but a new parameter is not.
        tensors = chain(block.attn.parameters(), block.module.parameters(), block.module.buffers())
        like = next((t for t in tensors if t.is_floating_point()), torch.zeros(()))
        flow = LayerFlow(block.heads, horizon, steps, step, learn_beta, device=like.device, dtype=like.dtype)
        factor = resolve_factor(block, beta, beta_factor)
        if factor is not None:
            flow.beta_factor = factor
        new_flows.append((block, flow))
    for block, flow in new_flows:
        block.attn.add_module(ENTRY, flow)
        if changed_attention(block) is None:
            ChangedAttention(block)
    stop_caching(model, all_blocks)
    update_config(model)
    return model


def restore_attention(model: Model) -> Model:
    """Undo `replace_attention`: all layers are as pretrained again.

    Args:
        model: a known encoder, or something that holds one. It is changed in place.

    Returns:
        The model itself. Weights that were trained since stay as they are.

    Example:
        >>> from attn_flow.hooks import flows
        >>> from attn_flow.hooks.demo import tiny_bert
        >>> model = replace_attention(tiny_bert()[0], steps=4)
        >>> flows(restore_attention(model))
        {}
    """
    all_blocks = blocks(model)
    for block in all_blocks:
        changed = changed_attention(block)
        if changed is not None and hasattr(block.attn, ENTRY):
            delattr(block.attn, ENTRY)
            changed.remove()
    restore_cache(all_blocks)
    update_config(model)
    return model
