"""An encoder recorded on texts, and one text as the heads of a layer see it.

`Heads` holds queries, keys and values of one text, with what positions add to the scores, so that attention is
softmax(queries keys^T) values in every architecture.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from attn_flow.attention.attention import Attention
from attn_flow.hooks.inputs import batches
from attn_flow.hooks.positions import Positions
from attn_flow.hooks.wrapping import scale_beta

MEASURED_TEXTS = 16  # of the questions about averaging, temperature and depth; more do not change the means
MIN_TOKENS = 16  # of a text, half of them not special; a shorter one has too few keys to sample from
RESOLUTION = 1e-10  # squares below this multiple of the squared output are rounding


@dataclass(frozen=True, eq=False)
class Heads:
    """Queries, keys and values of one text in one layer. The logits are queries @ keys.mT."""

    queries: Tensor  # (heads, n, k), multiplied by beta
    keys: Tensor  # (heads, n, k)
    values: Tensor  # (heads, n, v)
    output: Tensor  # the output projection O, (heads, d, v)
    output_bias: Tensor | None  # (d,)
    special: Tensor  # (n,), True for [CLS], [SEP] and the like
    visible: Tensor | None = None  # (n, n), True where token i may attend to token j; None if all tokens see all

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


Predict = Callable[[Heads, int, int], Tensor]  # (heads, layer, text) -> what attention adds, (n, d)


@dataclass(frozen=True, eq=False)
class Inputs:
    """A model and what it was run on, as in `probe`, so that it can be run again."""

    model: nn.Module
    source: Any
    texts: Sequence[str] | None = None
    max_length: int | None = None
    beta_factor: float = 1.0
    batch: int = 16

    def scaled(self) -> Any:
        """A context in which the model runs at `beta_factor` times its trained inverse temperature."""
        return nullcontext() if self.beta_factor == 1 else scale_beta(self.model, self.beta_factor)


@dataclass(frozen=True, eq=False)
class Recording:
    """The tokens of every text at every layer, and the attention of every layer."""

    attentions: list[Attention]  # by layer
    windows: list[int | None]  # by layer, the distance beyond which tokens do not see each other; None if all do
    positions: list[Positions | None]  # by layer, how positions enter the scores; None if they do not
    states: list[list[Tensor]]  # [level][text] (n, d), the inputs of attention layer by layer, and the encoder's output
    outputs: list[list[Tensor]]  # [layer][text] (n, d), what attention adds
    special: list[Tensor]  # [text] (n,), True for special tokens
    tokens: list[list[str]]  # [text], the tokens in words
    indices: list[int]  # of the texts among the inputs
    skipped: tuple[int, ...] = ()  # indices of inputs that are too short
    truncated: int = 0  # number of texts that were cut to the maximal length
    unknown_share: float = 0.0  # share of tokens that the tokenizer does not know
    digest: str = ""  # of the inputs
    horizon: float = 1.0  # the time that a layer lasts
    steps: int = 1  # of a layer in that time
    inputs: Inputs | None = None  # what was recorded

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
    def hides(self) -> str:
        """Why tokens in some layer see only a part of their text, in words; empty if all see all of it."""
        if any(A.causal for A in self.attentions):
            return "its tokens see only those before them"
        longest = max(len(special) for special in self.special)
        window = min((window for window in self.windows if window is not None), default=longest)
        if longest - 1 <= window:
            return ""
        shorter = f"; shorter texts (--max-length {window + 1}) can be asked" if window + 1 >= MIN_TOKENS else ""
        return f"layers see a window of {window} tokens each way{shorter}"

    @cached_property
    def batches(self) -> list[tuple[dict[str, Tensor], dict[int, int]]]:
        """What the model is run on: the inputs of each batch, and the index of the text in each of its rows."""
        inputs, indices, result = self.inputs, self.indices, []
        assert inputs is not None  # of every recording that was made from a model
        texts = None if inputs.texts is None else [inputs.texts[i] for i in indices]
        indices = indices if texts is None else list(range(len(texts)))
        for batch in batches(inputs.model, inputs.source, texts, inputs.batch, inputs.max_length):
            rows = {i - batch.first: text for text, i in enumerate(indices) if 0 <= i - batch.first < batch.size}
            if rows:
                result.append(({name: t.to(self.device) for name, t in batch.inputs.items()}, rows))
        return result

    def heads(self, layer: int, text: int, x: Tensor | None = None) -> Heads:
        """A text as the heads of a layer see it; or other tokens x (n, d) in its place."""
        x = self.states[layer][text] if x is None else x
        attention, window, positions = self.attentions[layer], self.windows[layer], self.positions[layer]
        H, i = attention.heads, torch.arange(len(x), device=x.device)
        beta = torch.as_tensor(attention.beta, dtype=torch.float64).to(x).expand(H)[:, None]
        queries, keys, values = (_project(x, H, weight) for weight in (attention.Q, attention.K, attention.V))
        if attention.query_bias is not None:
            queries = queries + attention.query_bias[:, None]
        if positions is not None:
            queries, keys = positions.queries(queries, beta), positions.keys(keys)
        output = torch.eye(attention.dim).to(x).expand(H, -1, -1) if attention.O is None else attention.O
        visible = None if window is None or len(x) - 1 <= window else (i[:, None] - i).abs() <= window
        if attention.causal:
            visible = (i[:, None] >= i) if visible is None else visible & (i[:, None] >= i)
        return Heads(beta[..., None] * queries, keys, values, output, attention.value_bias, self.special[text], visible)

    def explained_by_layer(self, predict: Predict) -> Tensor:
        """R2 of a prediction of what attention adds, against each text's mean output, (layers, texts)."""
        R2 = lambda layer, t: explained(predict(self.heads(layer, t), layer, t), self.outputs[layer][t])
        return torch.stack([torch.stack([R2(layer, t) for t in range(self.texts)]) for layer in range(self.layers)])

    def first(self, texts: int) -> Recording:
        """The first few texts."""
        states, outputs = ([level[:texts] for level in levels] for levels in (self.states, self.outputs))
        special, tokens, indices = self.special[:texts], self.tokens[:texts], self.indices[:texts]
        return replace(self, states=states, outputs=outputs, special=special, tokens=tokens, indices=indices)


def _project(x: Tensor, heads: int, weight: Tensor | None) -> Tensor:
    """(heads, n, k) of tokens x (n, d) under weights (heads, k, d), None for the identity, by one product."""
    if weight is None:
        return x.expand(heads, -1, -1)
    return (x @ weight.flatten(0, 1).mT).unflatten(-1, weight.shape[:2]).transpose(0, 1)


def exact(heads: Heads, layer: int, text: int) -> Tensor:
    """Attention itself, as a prediction."""
    return heads.combine(heads.averages)


def explained(predicted: Tensor, true: Tensor) -> Tensor:
    """R2 = 1 - |predicted - true|^2 / |true - mean|^2 of outputs (..., n, v), in float64; NaN for a constant output."""
    predicted, true = predicted.double(), true.double()
    variance = (true - true.mean(-2, keepdim=True)).square().sum((-2, -1))
    is_known = variance > RESOLUTION * true.square().sum((-2, -1))
    return torch.where(is_known, 1 - (predicted - true).square().sum((-2, -1)) / variance, torch.nan)


def directions(x: Tensor) -> Tensor:
    """x/|x| in float64: clouds of tokens are compared on the unit sphere."""
    x = x.double()
    return x / x.norm(dim=-1, keepdim=True)
