"""Question 1: does attention average over many tokens, and do the logits of a head say how well it does?

If it does, a random sample of m keys gives the output of attention up to an error that falls as m^(-1/2). The exponent
b of the true fall m^(-b) is measured in every layer and every head, and predicted for every head in two ways that have
no fitted number: from the standard deviation of its logits, as if they were Gaussian, and from the logits themselves.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from attn_flow.probe.findings import Finding, Interval, layers_named, ratio_of_means, span
from attn_flow.probe.recording import Heads, Recording
from attn_flow.probe.sampling import (
    SIZES,
    decay_exponent,
    gaussian_exponent,
    head_phases,
    logit_sd,
    permuted_keys,
    sample_sizes,
    sampled_averages,
    weight_errors,
)
from attn_flow.theory.random_energy import PHASES

MIN_TEXTS = 8  # for a verdict
MEAN_FIELD_EXPONENT = 0.5
NEAR_MEAN_FIELD = 0.4  # an exponent whose interval lies above this counts as the mean-field rate
HEAD_SHARE = 0.1  # of heads at the mean-field rate, from which the verdict is "partly"
RESOLUTION = 1e-10  # squared errors below this multiple of the squared output are rounding
PERMUTATIONS = 1000


@dataclass(frozen=True, eq=False)
class Averaging:
    """Errors of attention over random keys, texts on the last axis; no texts if tokens see only a part of their text.

    Args:
        tokens: (texts,), the number N of keys that are not special.
        sizes: (sizes, texts), the numbers m of keys in a sample.
        layer_errors: (layers, sizes, texts), squared error of what attention adds, over its variance over tokens.
        head_errors: (layers, heads, sizes, texts), the same of the heads' outputs.
        logits_errors: (layers, heads, sizes, texts), expected squared error with independent normal values.
        logit_sd: (layers, heads, texts), standard deviation of a query's logits over the keys that are not special.
        continuation: (layers, texts), explained variance of what attention adds to the first half of a text, if the
            keys and values are those of the second half.
        other_text: (layers, texts), the same with keys and values of another text.
    """

    tokens: Tensor
    sizes: Tensor
    layer_errors: Tensor
    head_errors: Tensor
    logits_errors: Tensor
    logit_sd: Tensor
    continuation: Tensor
    other_text: Tensor

    @property
    def applies(self) -> bool:
        """Whether the encoder was measured: every token sees every token."""
        return len(self.tokens) > 0

    def layer_exponents(self) -> Tensor:
        """b of every layer and text, (layers, texts)."""
        return self._exponents(self.layer_errors)

    def head_exponents(self) -> Tensor:
        """b of every head and text, (layers, heads, texts)."""
        return self._exponents(self.head_errors)

    def logits_exponents(self) -> Tensor:
        """b of every head and text from its logits alone, (layers, heads, texts)."""
        return self._exponents(self.logits_errors)

    def predicted_exponents(self) -> Tensor:
        """b of every head and text from the standard deviation of its logits alone, (layers, heads, texts)."""
        columns = [gaussian_exponent(sd, int(n)) for sd, n in zip(self.logit_sd.unbind(-1), self.tokens)]
        return torch.stack(columns, -1)

    def phases(self) -> Tensor:
        """0 warm, 1 middle, 2 frozen: the phase of every head at the mean length of the texts, (layers, heads)."""
        return head_phases(self.logit_sd, self.tokens)

    def curve(self) -> tuple[Tensor, Tensor]:
        """Sample sizes (sizes,) and relative errors (layers, sizes), geometric means over texts, for a figure."""
        return self.sizes.double().log().mean(-1).exp(), (self.layer_errors.log().nanmean(-1) / 2).exp()

    def _exponents(self, squared_errors: Tensor) -> Tensor:
        return decay_exponent(squared_errors.transpose(-1, -2), self.sizes.T, self.tokens[:, None])

    def finding(self, seed: int = 0) -> Finding:
        """The verdict and its numbers.

        A layer or head has the mean-field rate if the 95% interval of its b over texts holds 1/2 or lies above 0.4.
        "supported": every layer has it. "partly": some layer, or a tenth of the heads. Otherwise "not supported".
        """
        if not self.applies:
            return Finding(None, "Not measured: tokens of this encoder see only a part of their text.")
        layers, heads = (mean_over_texts(b, seed) for b in (self.layer_exponents(), self.head_exponents()))
        named = has_mean_field_rate(layers).nonzero()[:, 0].tolist()
        share = float(has_mean_field_rate(heads).double().mean())
        predictions = self._agreement(heads.mean, seed)
        numbers: dict[str, Any] = {
            "exponent": plain(layers.mean),
            "exponent_low": plain(layers.low),
            "exponent_high": plain(layers.high),
            "share_of_heads": share,
            "continuation": plain(self.continuation.mean(-1)),
            "other_text": plain(self.other_text.mean(-1)),
            "heads": self._rows(heads),
            **predictions,
        }
        texts = len(self.tokens)
        if texts < MIN_TEXTS:
            text = f"No verdict from fewer than {MIN_TEXTS} texts ({texts}): the error of m random keys falls as m^-b"
            return Finding(None, f"{text} with b = {span(layers.mean)} by layer.", numbers)
        L = len(layers.mean)
        verdict = "supported" if len(named) == L else "partly" if named or share >= HEAD_SHARE else "not supported"
        where = layers_named(named, L) if len(named) in (0, 1, 2, L) else f"{len(named)} of {L} layers"
        text = (
            f"Attention averages over many tokens in {where} and {share:.0%} of heads: the error of m random keys "
            f"falls as m^-b, b = {span(layers.mean)} by layer (a mean: 0.50)"
        )
        error = predictions["logits_b"]["rms_error"]
        text += "" if error is None else f"; logits predict heads' b to {error:.2f}"
        return Finding(verdict, text + ".", numbers)

    def _rows(self, heads: Interval) -> list[dict[str, Any]]:
        """One row per head, for tables and figures."""
        columns = {
            "b": heads.mean,
            "b_low": heads.low,
            "b_high": heads.high,
            "logit_sd": self.logit_sd.mean(-1),
            "predicted_b": self.predicted_exponents().nanmean(-1),
            "logits_b": self.logits_exponents().nanmean(-1),
        }
        lists = {name: plain(column) for name, column in columns.items()}
        phases = self.phases().tolist()
        return [
            {"layer": i, "head": h, **{name: c[i][h] for name, c in lists.items()}, "phase": PHASES[phases[i][h]]}
            for i in range(heads.mean.shape[0])
            for h in range(heads.mean.shape[1])
        ]

    def _agreement(self, b: Tensor, seed: int) -> dict[str, Any]:
        """Correlation and root mean square error over heads of the predictions of b and of their baselines."""
        predicted, logits = self.predicted_exponents().nanmean(-1), self.logits_exponents().nanmean(-1)
        known = torch.isfinite(b) & torch.isfinite(logits)
        layer_mean = torch.where(known, b, 0.0).sum(-1, keepdim=True) / known.sum(-1, keepdim=True)
        b, predicted, logits, layer_mean = (z[known] for z in (b, predicted, logits, layer_mean.expand(b.shape)))
        sd = self.logit_sd.mean(-1)[known]
        generator = torch.Generator().manual_seed(seed)
        orders = torch.rand(PERMUTATIONS, len(b), generator=generator, dtype=torch.float64).argsort(-1)
        permuted = [correlation(logits[order], b) for order in orders]
        largest = torch.tensor([r for r in permuted if r is not None], dtype=torch.float64)
        return {
            "predicted_b": agreement(predicted, b),
            "logits_b": agreement(logits, b),
            "mean_b": agreement(b.mean().expand(b.shape), b),
            "layer_mean_b": agreement(layer_mean, b),
            "permuted_heads": {  # the correlation that 95% of permutations do not reach
                "correlation": float(largest.quantile(0.95)) if len(largest) else None,
                "rms_error": root_mean_square(logits[orders] - b),
            },
            "rank_correlation_with_logit_sd": correlation(ranks(sd), ranks(b)),
        }


def measure_averaging(
    recording: Recording,
    generator: torch.Generator,
    *,
    texts: int = 16,
    draws: int = 16,
    queries: int = 64,
    progress: Callable[[float], None] | None = None,
) -> Averaging:
    """Measure the errors of attention over random keys.

    Args:
        recording: an encoder on texts; only its first `texts` are used.
        generator: of the samples, on the CPU.
        texts: number of texts.
        draws: number of samples of every size in every text and layer.
        queries: number of random tokens of a text at which the output of attention is compared.
        progress: is called with the share that is done.

    Example:
        >>> from attn_flow.hooks.demo import tiny_bert
        >>> from attn_flow.probe.recording import record_encoder
        >>> recording = record_encoder(*tiny_bert(), ["a b c d e f g h i j " * 3])
        >>> averaging = measure_averaging(recording, torch.Generator().manual_seed(0))
        >>> averaging.layer_exponents().shape  # layers and texts
        torch.Size([2, 1])
    """
    recording = recording.first(0 if recording.hides_tokens else texts)
    columns = []
    for text in range(recording.texts):
        rows = []
        for layer in range(recording.layers):
            rows.append(_measure_text(recording, layer, text, draws, queries, generator))
            if progress is not None:
                progress((text * recording.layers + layer + 1) / (recording.texts * recording.layers))
        columns.append([torch.stack([row[i] for row in rows]) for i in range(len(rows[0]))])
    lengths = [int((~special).sum()) for special in recording.special]
    if not columns:
        L, H = recording.layers, recording.attentions[0].heads
        shapes = [(L, SIZES), (L, H, SIZES), (L, H, SIZES), (L, H), (L,), (L,)]
        return Averaging(
            torch.zeros(0, dtype=torch.int64),
            torch.zeros(SIZES, 0, dtype=torch.int64),
            *(torch.zeros(*shape, 0, dtype=torch.float64) for shape in shapes),
        )
    return Averaging(
        torch.tensor(lengths),
        torch.stack([sample_sizes(n) for n in lengths], -1),
        *(torch.stack(values, -1).double().cpu() for values in zip(*columns)),
    )


@torch.no_grad()
def _measure_text(
    recording: Recording, layer: int, text: int, draws: int, queries: int, generator: torch.Generator
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The columns of `Averaging` from layer_errors on, for one text in one layer."""
    heads = recording.heads(layer, text)
    sizes = sample_sizes(int((~heads.special).sum()))
    chosen = torch.randperm(heads.n, generator=generator)[:queries].to(heads.queries.device)
    part = replace(heads, queries=heads.queries[:, chosen])
    head_errors, layer_errors = [], []
    order = permuted_keys(heads.special, draws, generator)
    for m in sizes.tolist():
        difference = sampled_averages(part, order[:, :m]) - heads.averages[:, chosen]
        head_errors.append(difference.double().square().sum(-1).mean((0, 2)))
        combined = torch.einsum("ahnv,hdv->and", difference, heads.output)
        layer_errors.append(combined.double().square().sum(-1).mean())
    output = torch.einsum("hnv,hdv->nd", heads.averages, heads.output)
    other = None if recording.texts == 1 else recording.heads(layer, (text + 1) % recording.texts)
    return (
        relative_errors(torch.stack(layer_errors), output),
        relative_errors(torch.stack(head_errors, -1), heads.averages),
        weight_errors(part.logits, heads.special, permuted_keys(heads.special, 4 * draws, generator), sizes),
        logit_sd(heads.logits, heads.special),
        explained_by(heads, heads),
        explained_by(heads, other) if other is not None else torch.tensor(torch.nan),
    )


def relative_errors(squared_errors: Tensor, output: Tensor) -> Tensor:
    """Squared errors (..., sizes) over the variance of the output (..., n, d) over tokens; NaN if they are rounding."""
    output = output.double()
    size = output.square().sum(-1).mean(-1)[..., None]
    variance = (output - output.mean(-2, keepdim=True)).square().sum(-1).mean(-1)[..., None]
    is_known = (squared_errors > RESOLUTION * size) & (variance > RESOLUTION * size)
    return torch.where(is_known, squared_errors / variance, torch.nan)


def explained_by(heads: Heads, source: Heads) -> Tensor:
    """Variance of what attention adds to the first half of a text that the second half of a source explains.

    The keys and values of the first half are exchanged for those of the source's second half, with the same total
    weight; special tokens stay. The source is the text itself (its continuation) or another text.
    """
    regular, special = (mask.nonzero()[:, 0] for mask in (~heads.special, heads.special))
    half = len(regular) // 2
    first, second = regular[:half], (~source.special).nonzero()[:, 0][-half:]

    def attend(other: Heads, chosen: Tensor) -> Tensor:
        keys, values = (
            torch.cat([a[:, special], b[:, chosen]], 1)
            for a, b in ((heads.keys, other.keys), (heads.values, other.values))
        )
        log_weights = torch.zeros(keys.shape[1]).to(keys)
        log_weights[len(special) :] = math.log(half / len(chosen))
        averages = scaled_dot_product_attention(
            heads.queries[:, first], keys, values, attn_mask=log_weights[None, :], scale=1.0
        )
        return heads.combine(averages).double()

    true, predicted = attend(heads, first), attend(source, second)
    return 1 - (predicted - true).square().sum() / (true - true.mean(0)).square().sum()


def mean_over_texts(values: Tensor, seed: int = 0) -> Interval:
    """Mean over the texts (last axis) whose value is known, with its bootstrap interval."""
    known = torch.isfinite(values)
    return ratio_of_means(torch.where(known, values, 0.0), known.double(), seed)


def has_mean_field_rate(b: Interval) -> Tensor:
    """Whether the interval of an exponent holds 1/2 or lies above 0.4."""
    return (b.high >= MEAN_FIELD_EXPONENT) & (b.low <= MEAN_FIELD_EXPONENT) | (b.low > NEAR_MEAN_FIELD)


def agreement(predicted: Tensor, b: Tensor) -> dict[str, float | None]:
    """Correlation and root mean square error of a prediction, both (heads,)."""
    return {"correlation": correlation(predicted, b), "rms_error": root_mean_square(predicted - b)}


def root_mean_square(errors: Tensor) -> float | None:
    """The root of the mean square; None if there are no numbers."""
    return float(errors.square().mean().sqrt()) if errors.numel() else None


def correlation(x: Tensor, y: Tensor) -> float | None:
    """The correlation of two lists of numbers; None if one of them is constant."""
    if len(x) < 3:
        return None
    x, y = x - x.mean(), y - y.mean()
    scale = float(x.norm() * y.norm())
    return float(x @ y) / scale if scale > 1e-9 * len(x) else None


def ranks(x: Tensor) -> Tensor:
    """Ranks of numbers (n,), as float64."""
    return x.argsort().argsort().double()


def plain(values: Tensor) -> Any:
    """Nested lists of numbers, with None for what is not a finite number."""
    if values.ndim:
        return [plain(row) for row in values]
    return float(values) if math.isfinite(float(values)) else None
