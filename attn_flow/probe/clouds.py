"""A recorded encoder text by text, as the probe's questions want it."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from attn_flow.attention import Attention
from attn_flow.dynamics.trajectory import Trajectory
from attn_flow.hooks.capture import record
from attn_flow.hooks.temperature import scale_beta
from attn_flow.hooks.weights import attentions
from attn_flow.probe.closures import SINKS, WINDOW

SHORTEST = 2 * (SINKS + len(WINDOW)) + 4  # tokens below which a text leaves no bulk beside its atoms


@dataclass(frozen=True, eq=False)
class Clouds:
    """What was recorded of a model: attention's input and output per layer and text, the final states, labels."""

    attentions: list[Attention]
    z: list[list[Tensor]]  # [layer][text] (n, d): what attention sees; one more layer: what leaves the encoder
    out: list[list[Tensor]]  # [layer][text] (n, d): what it adds
    special: list[Tensor]  # [text] (n,)
    tokens: list[list[str]]

    @property
    def layers(self) -> int:
        return len(self.attentions)

    @property
    def texts(self) -> int:
        return len(self.special)


def record_clouds(
    model: nn.Module,
    source: Any,
    texts: Sequence[str] | None,
    batch: int,
    max_length: int | None,
    beta_factor: float = 1.0,
) -> tuple[Clouds, int, int]:
    """Record a model at `beta_factor` times its trained beta; also how many texts were too short, and how many cut."""
    found = [A.with_beta(beta_factor * A.beta) for A in attentions(model)]
    points = ("attn_in", "attn_out", f"resid_post.{len(found) - 1}")
    with torch.no_grad(), nullcontext() if beta_factor == 1 else scale_beta(model, beta_factor):
        path = record(model, source, texts, points=points, batch=batch, max_length=max_length)
    return by_text(path, found)


def by_text(path: Trajectory, found: list[Attention]) -> tuple[Clouds, int, int]:
    """The recorded path text by text, without padding and without texts too short to have a bulk."""
    assert path.mask is not None  # recorded paths have one
    L, x, mask = len(found), path.x, path.mask
    lengths = mask.sum(-1).tolist()
    kept = [t for t, n in enumerate(lengths) if n >= SHORTEST]
    if not kept:
        raise ValueError(
            f"no text has {SHORTEST} tokens (the longest has {max(lengths)}); expected longer texts: put several "
            "sentences into one."
        )
    names = path.labels.get("token")
    special = path.labels["special"]
    clouds = Clouds(
        found,
        [[x[level, t][mask[t]] for t in kept] for level in (*range(L), 2 * L)],
        [[x[L + level, t][mask[t]] for t in kept] for level in range(L)],
        [torch.tensor(special[t], dtype=torch.bool, device=x.device) for t in kept],
        [list(names[t]) if names else [str(i) for i in range(lengths[t])] for t in kept],
    )
    return clouds, len(lengths) - len(kept), int(path.about.get("truncated") or 0)


def directions(x: Tensor) -> Tensor:
    """x/|x| in float64: clouds are compared on the unit sphere."""
    x = x.double()
    return x / x.norm(dim=-1, keepdim=True)
