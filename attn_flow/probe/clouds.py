"""A recorded encoder text by text, as the probe's questions want it."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from attn_flow.attention import Attention
from attn_flow.base.processes import ALONE, Processes
from attn_flow.dynamics.trajectory import Trajectory
from attn_flow.hooks.capture import record
from attn_flow.hooks.layout import blocks
from attn_flow.hooks.positions import Positions, read_positions
from attn_flow.hooks.temperature import scale_beta
from attn_flow.hooks.weights import attentions
from attn_flow.probe.closures import SINKS, WINDOW
from attn_flow.probe.head_space import HeadSpace, as_heads_see

SHORTEST = 2 * (SINKS + len(WINDOW)) + 4  # tokens below which a text leaves no bulk beside its atoms


@dataclass(frozen=True, eq=False)
class Clouds:
    """What was recorded of a model: attention's input and output per layer and text, the final states, labels."""

    attentions: list[Attention]
    windows: list[int | None]  # by layer: tokens farther apart than this do not see each other; None: all do
    places: list[Positions | None]  # by layer: how the places of tokens enter its scores; None: they do not
    z: list[list[Tensor]]  # [layer][text] (n, d): what attention sees; one more layer: what leaves the encoder
    out: list[list[Tensor]]  # [layer][text] (n, d): what it adds
    special: list[Tensor]  # [text] (n,)
    tokens: list[list[str]]
    kept: list[int]  # places of these texts among those given
    skipped: int = 0  # texts too short
    truncated: int = 0
    unknown: float = 0.0  # share of tokens that the tokenizer does not know
    content: str = ""  # digest of the tokens, their ids and marks, or of the states that were read

    @property
    def layers(self) -> int:
        return len(self.attentions)

    @property
    def texts(self) -> int:
        return len(self.special)

    @property
    def partial(self) -> bool:
        """Whether tokens somewhere see only a part of their text."""
        return any(A.causal for A in self.attentions) or any(w is not None for w in self.windows)

    def space(self, layer: int, text: int, attention: Attention | None = None) -> HeadSpace:
        """A text as a layer's heads see it, or as those of another attention would."""
        return self.seen_by(layer, self.z[layer][text], self.special[text], attention)

    def seen_by(self, layer: int, x: Tensor, special: Tensor, attention: Attention | None = None) -> HeadSpace:
        """Any tokens x (n, d) as a layer's heads see them."""
        return as_heads_see(
            attention or self.attentions[layer],
            x,
            special,
            local(len(x), self.windows[layer], x.device),
            self.places[layer],
        )

    def first(self, texts: int) -> Clouds:
        """The first few texts."""
        return replace(
            self,
            z=[level[:texts] for level in self.z],
            out=[level[:texts] for level in self.out],
            special=self.special[:texts],
            tokens=self.tokens[:texts],
            kept=self.kept[:texts],
        )


def local(n: int, window: int | None, device: torch.device) -> Tensor | None:
    """(n, n) True where |i - j| <= window; None where every token is seen."""
    if window is None:
        return None
    i = torch.arange(n, device=device)
    return (i[:, None] - i).abs() <= window


def record_clouds(
    model: nn.Module,
    source: Any,
    texts: Sequence[str] | None,
    batch: int = 16,
    max_length: int | None = None,
    beta_factor: float = 1.0,
    max_unknown: float = 0.1,
    world: Processes = ALONE,
) -> Clouds:
    """Record a model run at `beta_factor` times its trained inverse temperature; see `record` for the rest."""
    found = [A.with_beta(beta_factor * A.beta) for A in attentions(model)]
    points = ("attn.hook_in", "attn.hook_out", f"blocks.{len(found) - 1}.hook_out")
    with torch.no_grad(), nullcontext() if beta_factor == 1 else scale_beta(model, beta_factor):
        path = record(
            model,
            source,
            texts,
            points=points,
            batch=batch,
            max_length=max_length,
            max_unknown=max_unknown,
            world=world,
        )
    length, here = path.x.shape[-2], blocks(model)
    return by_text(path, found, [block.window for block in here], read_positions(here, length))


def by_text(
    path: Trajectory, found: list[Attention], windows: list[int | None], placed: list[Positions | None]
) -> Clouds:
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
    z = [[x[level, t][mask[t]] for t in kept] for level in (*range(L), 2 * L)]
    ids = path.labels.get("id")
    tokens = [list(names[t]) if names else [str(i) for i in range(lengths[t])] for t in kept]
    read = [
        f"{ids[t]} {special[t]} {tokens[i]}".encode() if ids else z[0][i].cpu().numpy().tobytes()
        for i, t in enumerate(kept)
    ]
    return Clouds(
        found,
        windows,
        placed,
        z,
        [[x[L + level, t][mask[t]] for t in kept] for level in range(L)],
        [torch.tensor(special[t], dtype=torch.bool, device=x.device) for t in kept],
        tokens,
        kept,
        len(lengths) - len(kept),
        int(path.about.get("truncated") or 0),
        float(path.about.get("unknown_share") or 0.0),
        hashlib.sha256(b"\0".join(read)).hexdigest(),
    )


def directions(x: Tensor) -> Tensor:
    """x/|x| in float64: clouds are compared on the unit sphere."""
    x = x.double()
    return x / x.norm(dim=-1, keepdim=True)
