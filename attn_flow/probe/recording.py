"""An encoder recorded on texts, and one text as the heads of a layer see it.

A head sees tokens only through queries, keys and values. `Heads` holds them for one text, with what positions add to
the scores, so that attention is softmax(queries keys^T) values in every architecture.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from attn_flow.attention import Attention
from attn_flow.base.processes import ALONE, Processes
from attn_flow.dynamics.trajectory import Trajectory
from attn_flow.hooks.capture import record
from attn_flow.hooks.layout import blocks
from attn_flow.hooks.positions import Positions, read_positions
from attn_flow.hooks.weights import attentions
from attn_flow.hooks.wrapping import scale_beta

MIN_TOKENS = 16  # a shorter text has too few keys to sample from


@dataclass(frozen=True, eq=False)
class Heads:
    """Queries, keys and values of one text in one layer. The logits are queries @ keys.mT.

    Args:
        queries, keys: (heads, n, k); the queries are multiplied by beta.
        values: (heads, n, v).
        output: the output projection O, (heads, d, v), and its bias (d,) or None.
        special: (n,), True for [CLS], [SEP] and the like.
        visible: (n, n), True where token i may attend to token j; None if every token sees every token.
    """

    queries: Tensor
    keys: Tensor
    values: Tensor
    output: Tensor
    output_bias: Tensor | None
    special: Tensor
    visible: Tensor | None = None

    @property
    def n(self) -> int:
        """Number of tokens."""
        return self.keys.shape[-2]

    @cached_property
    def logits(self) -> Tensor:
        """(heads, n, n), -inf where token i may not see token j."""
        logits = self.queries @ self.keys.mT
        return logits if self.visible is None else logits.masked_fill(~self.visible, -torch.inf)

    @cached_property
    def averages(self) -> Tensor:
        """What every head computes: softmax(logits) @ values, (heads, n, v)."""
        return self.logits.softmax(-1) @ self.values

    def combine(self, averages: Tensor) -> Tensor:
        """The sum of the heads' averages (..., heads, n, v) as the layer adds it to its tokens, (..., n, d)."""
        drift = torch.einsum("...hnv,hdv->...nd", averages, self.output)
        return drift if self.output_bias is None else drift + self.output_bias


@dataclass(frozen=True, eq=False)
class Recording:
    """The tokens of every text at every layer, and the attention of every layer.

    Args:
        attentions: by layer.
        windows: by layer, the distance beyond which tokens do not see each other; None if all do.
        positions: by layer, how positions enter the scores; None if they do not.
        states: [level][text] (n, d): the input of layer `level`'s attention; the last level is the encoder's output.
        outputs: [layer][text] (n, d): what attention adds.
        special: [text] (n,), True for special tokens.
        tokens: [text], the tokens in words.
        indices: the index of every text among the inputs.
        skipped: indices of inputs that are shorter than MIN_TOKENS.
        truncated: number of texts that were cut to the maximal length.
        unknown_share: share of tokens that the tokenizer does not know.
        digest: of the inputs.
        horizon, steps: the time that a layer lasts, and in how many steps: 1 and 1 in an encoder.
    """

    attentions: list[Attention]
    windows: list[int | None]
    positions: list[Positions | None]
    states: list[list[Tensor]]
    outputs: list[list[Tensor]]
    special: list[Tensor]
    tokens: list[list[str]]
    indices: list[int]
    skipped: tuple[int, ...] = ()
    truncated: int = 0
    unknown_share: float = 0.0
    digest: str = ""
    horizon: float = 1.0
    steps: int = 1

    @property
    def layers(self) -> int:
        return len(self.attentions)

    @property
    def texts(self) -> int:
        return len(self.special)

    @property
    def device(self) -> torch.device:
        return self.states[0][0].device

    @property
    def hides_tokens(self) -> bool:
        """Whether tokens in some layer see only a part of their text: causal or local attention."""
        return any(A.causal for A in self.attentions) or any(window is not None for window in self.windows)

    def heads(self, layer: int, text: int) -> Heads:
        """A text as the heads of a layer see it."""
        return self.heads_of(layer, self.states[layer][text], self.special[text])

    def heads_of(self, layer: int, x: Tensor, special: Tensor) -> Heads:
        """Any tokens x (n, d) as the heads of a layer see them."""
        return read_heads(self.attentions[layer], x, special, self.windows[layer], self.positions[layer])

    def first(self, texts: int) -> Recording:
        """The first few texts."""
        return replace(
            self,
            states=[level[:texts] for level in self.states],
            outputs=[level[:texts] for level in self.outputs],
            special=self.special[:texts],
            tokens=self.tokens[:texts],
            indices=self.indices[:texts],
        )


def read_heads(
    attention: Attention,
    x: Tensor,
    special: Tensor | None = None,
    window: int | None = None,
    positions: Positions | None = None,
) -> Heads:
    """Queries, keys and values of one text x (n, d) under an attention.

    Example:
        >>> heads = read_heads(Attention.identity(2, beta=3.0), torch.eye(2))
        >>> heads.logits
        tensor([[[3., 0.],
                 [0., 3.]]])
    """
    n, device, H = len(x), x.device, attention.heads
    beta = torch.as_tensor(attention.beta, dtype=torch.float64).to(x).expand(H)[:, None]
    project = lambda weight: x.expand(H, -1, -1) if weight is None else x @ weight.mT  # (heads, n, k)
    queries, keys, values = (project(weight) for weight in (attention.Q, attention.K, attention.V))
    if attention.query_bias is not None:
        queries = queries + attention.query_bias[:, None]
    if positions is not None:
        queries, keys = positions.queries(queries, beta), positions.keys(keys)
    output = torch.eye(attention.dim).to(x).expand(H, -1, -1) if attention.O is None else attention.O
    i = torch.arange(n, device=device)
    visible = None if window is None else (i[:, None] - i).abs() <= window
    if attention.causal:
        visible = (i[:, None] >= i) if visible is None else visible & (i[:, None] >= i)
    special = torch.zeros(n, dtype=torch.bool, device=device) if special is None else special
    return Heads(beta[..., None] * queries, keys, values, output, attention.value_bias, special, visible)


def record_encoder(
    model: nn.Module,
    source: Any,
    texts: Sequence[str] | None,
    *,
    batch: int = 16,
    max_length: int | None = None,
    beta_factor: float = 1.0,
    max_unknown: float = 0.1,
    world: Processes = ALONE,
) -> Recording:
    """Record a model that runs at `beta_factor` times its trained inverse temperature; see `hooks.record`."""
    scaled = [A.with_beta(beta_factor * A.beta) for A in attentions(model)]
    points = ("attn.hook_in", "attn.hook_out", f"blocks.{len(scaled) - 1}.hook_out")
    with torch.no_grad(), nullcontext() if beta_factor == 1 else scale_beta(model, beta_factor):
        options: dict[str, Any] = {"batch": batch, "max_length": max_length, "max_unknown": max_unknown}
        path = record(model, source, texts, points=points, world=world, **options)
    layers = blocks(model)
    positions = read_positions(layers, path.x.shape[-2])
    return _split_texts(path, scaled, [block.window for block in layers], positions)


def _split_texts(
    path: Trajectory, scaled: list[Attention], windows: list[int | None], positions: list[Positions | None]
) -> Recording:
    """The recorded path text by text, without padding and without texts that are too short."""
    assert path.mask is not None  # recorded paths have one
    L, x, mask = len(scaled), path.x, path.mask
    lengths = mask.sum(-1).tolist()
    indices = [t for t, n in enumerate(lengths) if n >= MIN_TOKENS]
    if not indices:
        raise ValueError(
            f"no text has {MIN_TOKENS} tokens (the longest has {max(lengths)}); expected longer texts: put several "
            "sentences into one."
        )
    names, ids, special = path.labels.get("token"), path.labels.get("id"), path.labels["special"]
    tokens = [list(names[t]) if names else [str(i) for i in range(lengths[t])] for t in indices]
    states = [[x[level, t][mask[t]] for t in indices] for level in (*range(L), 2 * L)]
    contents = [
        f"{ids[t]} {special[t]} {tokens[i]}".encode() if ids else states[0][i].cpu().numpy().tobytes()
        for i, t in enumerate(indices)
    ]
    return Recording(
        scaled,
        windows,
        positions,
        states,
        [[x[L + layer, t][mask[t]] for t in indices] for layer in range(L)],
        [torch.tensor(special[t], dtype=torch.bool, device=x.device) for t in indices],
        tokens,
        indices,
        tuple(t for t in range(len(lengths)) if t not in indices),
        int(path.about.get("truncated") or 0),
        float(path.about.get("unknown_share") or 0.0),
        hashlib.sha256(b"\0".join(contents)).hexdigest(),
    )


def directions(x: Tensor) -> Tensor:
    """x/|x| in float64: clouds of tokens are compared on the unit sphere."""
    x = x.double()
    return x / x.norm(dim=-1, keepdim=True)
