"""An encoder, recorded on texts: its tokens, and the attention of its layers as read from the weights."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from attn_flow.base.processes import ALONE, Processes
from attn_flow.hooks.capture import record
from attn_flow.hooks.inputs import batches
from attn_flow.hooks.layout import blocks, encoder_inside
from attn_flow.hooks.positions import read_positions
from attn_flow.hooks.self_check import first_tokens, self_check
from attn_flow.hooks.weights import attentions
from attn_flow.probe.findings import MIN_TEXTS
from attn_flow.probe.recording import MIN_TOKENS, Inputs, Recording


def record_encoder(
    model: nn.Module,
    source: Any,
    texts: Sequence[str] | None,
    max_unknown: float = 0.1,
    world: Processes = ALONE,
    **options: Any,
) -> Recording:
    """Record a model on texts of at least MIN_TOKENS tokens; `options` are those of `Inputs`.

    ValueError if the weights of its layers are not what they compute (`self_check`).
    """
    inputs = Inputs(encoder_inside(model), source, texts, **options)
    first = next(batches(inputs.model, source, texts, inputs.batch, inputs.max_length))
    self_check(inputs.model, first_tokens(first.inputs))
    layers, scaled = blocks(model), [A.with_beta(inputs.beta_factor * A.beta) for A in attentions(model)]
    L = len(scaled)
    points = ("attn.hook_in", "attn.hook_out", f"blocks.{L - 1}.hook_out")
    limits: dict[str, Any] = {"batch": inputs.batch, "max_length": inputs.max_length, "max_unknown": max_unknown}
    with torch.no_grad(), inputs.scaled():
        path = record(model, source, texts, points=points, world=world, **limits)
    assert path.mask is not None  # recorded paths have one
    x, mask, lengths = path.x, path.mask, path.mask.sum(-1).tolist()
    names, ids, special = path.labels.get("token"), path.labels.get("id"), path.labels["special"]
    is_long = [n >= MIN_TOKENS and n - sum(special[t]) >= MIN_TOKENS // 2 for t, n in enumerate(lengths)]
    indices = [t for t, keep in enumerate(is_long) if keep]
    if not indices:
        raise ValueError(
            f"no text has {MIN_TOKENS} tokens, half of them not special (the longest has {max(lengths)}); expected "
            f"longer texts, {MIN_TEXTS} or more for a verdict: put several sentences into one."
        )
    levels = [[x[level, t][mask[t]] for t in indices] for level in range(2 * L + 1)]
    digest = hashlib.sha256(str([(ids[t] if ids else None, special[t]) for t in indices]).encode())
    return Recording(
        attentions=scaled,
        windows=[block.window for block in layers],
        positions=read_positions(layers, x.shape[-2]),
        states=[*levels[:L], levels[-1]],
        outputs=levels[L:-1],
        special=[torch.tensor(special[t], dtype=torch.bool, device=x.device) for t in indices],
        tokens=[list(names[t]) if names else [str(i) for i in range(lengths[t])] for t in indices],
        indices=indices,
        skipped=tuple(t for t, keep in enumerate(is_long) if not keep),
        truncated=int(path.about.get("truncated") or 0),
        unknown_share=float(path.about.get("unknown_share") or 0.0),
        digest=digest.hexdigest(),
        inputs=inputs,
    )
