"""The names of activations, in the vocabulary of TransformerLens, with their shapes."""

from __future__ import annotations

import re
from collections.abc import Sequence

POINTS = {
    "hook_in": "residual stream before the block (batch, pos, d)",
    "attn.hook_in": "input of attention, normalised in pre-norm models (batch, pos, d)",
    "attn.q.hook_out": "queries, before any rotation (batch, pos, head, d_head)",
    "attn.k.hook_out": "keys, before any rotation (batch, pos, head, d_head); grouped keys have fewer heads",
    "attn.v.hook_out": "values (batch, pos, head, d_head)",
    "attn.hook_attn_scores": "logits, -inf where a token is hidden (batch, head, query pos, key pos)",
    "attn.hook_pattern": "attention weights (batch, head, query pos, key pos)",
    "attn.hook_out": "what attention adds to the residual stream (batch, pos, d)",
    "hook_resid_mid": "residual stream between attention and feed-forward part (batch, pos, d)",
    "mlp.hook_out": "what the feed-forward part adds to it (batch, pos, d)",
    "hook_out": "residual stream after the block (batch, pos, d)",
}
PER_HEAD = ("attn.q.hook_out", "attn.k.hook_out", "attn.v.hook_out")
PAIRS = ("attn.hook_attn_scores", "attn.hook_pattern")
DEPTH = {"hook_resid_mid": 0.5, "hook_out": 1.0}  # after the start of the block, which is at its index


def split_name(name: str) -> tuple[int, str]:
    """The layer and the point of a full name: "blocks.3.attn.hook_out" is (3, "attn.hook_out")."""
    _, layer, point = name.split(".", 2)
    return int(layer), point


def depth_of(name: str) -> float:
    """Where in the encoder an activation is, counted in layers."""
    layer, point = split_name(name)
    return layer + DEPTH.get(point, 0.0)


def parse_points(points: str | Sequence[str], layers: int) -> list[str]:
    """Full names of points: "attn.hook_out" means all layers, "resid" the residual stream at all levels 0 to L."""
    names: list[str] = []
    for name in [points] if isinstance(points, str) else points:
        match = re.fullmatch(r"blocks\.(\d+)\.(.+)", name)
        point = match[2] if match else name
        if point == "resid" and not match:
            names += [f"blocks.{i}.hook_in" for i in range(layers)] + [f"blocks.{layers - 1}.hook_out"]
        elif point not in POINTS:
            raise ValueError(
                f"point {name!r}, expected 'resid', or one of {', '.join(POINTS)}, also after 'blocks.0.'."
            )
        elif match and int(match[1]) >= layers:
            raise ValueError(f"point {name!r}: the model has {layers} layers, expected 0 to {layers - 1}.")
        else:
            names += [name] if match else [f"blocks.{i}.{point}" for i in range(layers)]
    if not names:
        raise ValueError(f"points is empty, expected at least one of: resid, {', '.join(POINTS)}.")
    return names
