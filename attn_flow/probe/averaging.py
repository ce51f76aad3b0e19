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

from attn_flow.probe import findings
from attn_flow.probe.findings import Finding, Interval, bootstrap, correlation, span, with_interval
from attn_flow.probe.recording import MEASURED_TEXTS, RESOLUTION, Heads, Recording, explained
from attn_flow.probe.sampling import (
    decay_exponent,
    gaussian_exponent,
    head_rows,
    logit_sd,
    permuted_keys,
    sample_sizes,
    weight_errors,
)

HEAD_SHARE = 0.1  # of heads at the mean-field rate, from which the verdict is "partly"
PERMUTATIONS = 1000
QUERIES, DRAWS = 64, 16  # queries of a text, and samples of each size


@dataclass(frozen=True, eq=False)
class Averaging:
    """Errors of attention over random keys, texts on the last axis.

    `continuation` and `other_text` are the explained variance of what attention adds to the first half of a text, if
    the keys and values are those of its second half, or of another text.
    """

    tokens: Tensor  # (texts,), the number N of keys that are not special
    sizes: Tensor  # (sizes, texts), the numbers m of keys in a sample
    layer_errors: Tensor  # (layers, sizes, texts), squared error of what attention adds over its variance over tokens
    head_errors: Tensor  # (layers, heads, sizes, texts), the same of the heads' outputs
    logits_errors: Tensor  # (layers, heads, sizes, texts), expected squared error with independent normal values
    logit_sd: Tensor  # (layers, heads, texts), standard deviation of a query's logits over keys that are not special
    continuation: Tensor  # (layers, texts)
    other_text: Tensor  # (layers, texts)

    def exponents(self, squared_errors: Tensor) -> Tensor:
        """b (..., texts) of squared errors (..., sizes, texts)."""
        return decay_exponent(squared_errors.transpose(-1, -2), self.sizes.T, self.tokens[:, None])

    def finding(self, seed: int = 0) -> Finding:
        """The verdict and its numbers.

        A layer or head has the mean-field rate if the 95% interval of its b over texts holds 1/2 or lies above 0.4.
        "supported": every layer has it. "partly": some layer, or a tenth of the heads. Otherwise "not supported".
        """
        layers, heads = (bootstrap(self.exponents(e), seed) for e in (self.layer_errors, self.head_errors))
        if layers.mean.isnan().all():
            return Finding(None, "Not measured: no layer's output differs between tokens and depends on the sample.")
        predicted = [gaussian_exponent(sd, int(n)) for sd, n in zip(self.logit_sd.unbind(-1), self.tokens)]
        columns = {
            "b": heads.mean,
            "b_low": heads.low,
            "b_high": heads.high,
            "logit_sd": self.logit_sd.mean(-1),
            "predicted_b": torch.stack(predicted, -1).mean(-1),
            "logits_b": self.exponents(self.logits_errors).nanmean(-1),
        }
        named = has_mean_field_rate(layers).nonzero()[:, 0].tolist()
        share = float(has_mean_field_rate(heads).double().mean())
        numbers: dict[str, Any] = {
            "exponent": layers.mean,
            "exponent_low": layers.low,
            "exponent_high": layers.high,
            "share_of_heads": share,
            "continuation": self.continuation.mean(-1),
            "other_text": self.other_text.mean(-1),
            "heads": head_rows(columns),
            **compare_predictions(columns, seed),
        }
        L, error = len(layers.mean), numbers["logits_b"]["rms_error"]
        verdict = "supported" if len(named) == L else "partly" if named or share >= HEAD_SHARE else "not supported"
        where = findings.layers_named(named, L) if len(named) in (0, 1, 2, L) else f"{len(named)} of {L} layers"
        numbers["where"] = f"in {where} and {share:.0%} of heads"
        words = f"Attention averages over many tokens {numbers['where']}"
        measured = f"the error of m random keys falls as m^-b, b = {span(layers.mean)} by layer (a mean: 0.50)"
        if error is not None:
            measured += f"; logits predict heads' b to {error:.2f}"
        by_layer = sorted(row for row in zip(*(z.tolist() for z in vars(layers).values())) if math.isfinite(row[0]))
        ends = " to ".join(with_interval(*row) for row in by_layer[:: max(1, len(by_layer) - 1)])
        value = f"b = {ends} by layer"
        return findings.answer(verdict, words, measured, len(self.tokens), numbers, value, "0.50 in mean-field theory")


def has_mean_field_rate(b: Interval) -> Tensor:
    """Whether the interval of an exponent holds 1/2 or lies above 0.4."""
    return (b.high >= 0.5) & (b.low <= 0.5) | (b.low > 0.4)


def compare_predictions(columns: dict[str, Tensor], seed: int) -> dict[str, Any]:
    """Correlation and root mean square error over heads of the predictions of b and of their baselines."""
    b, logits = columns["b"], columns["logits_b"]
    known = torch.isfinite(b) & torch.isfinite(logits)
    layer_mean = b.where(known, torch.nan).nanmean(-1, keepdim=True).expand(b.shape)[known]
    predicted, sd, b, logits = (z[known] for z in (columns["predicted_b"], columns["logit_sd"], b, logits))
    predictions = {"predicted_b": predicted, "logits_b": logits, "mean_b": b.mean().expand(b.shape)}
    predictions["layer_mean_b"] = layer_mean
    generator = torch.Generator().manual_seed(seed)
    orders = torch.rand(PERMUTATIONS, len(b), generator=generator, dtype=torch.float32).argsort(-1)
    permuted = torch.tensor([correlation(logits[order], b) or 0.0 for order in orders], dtype=torch.float64)
    rms = lambda errors: float(errors.square().mean().sqrt()) if errors.numel() else None
    return {
        **{name: {"correlation": correlation(z, b), "rms_error": rms(z - b)} for name, z in predictions.items()},
        # the correlation that 95% of permutations do not reach
        "permuted_heads": {"correlation": float(permuted.quantile(0.95)), "rms_error": rms(logits[orders] - b)},
        "rank_correlation_with_logit_sd": findings.rank_correlation(sd, b),
    }


def measure_averaging(
    recording: Recording, generator: torch.Generator, *, progress: Callable[[float], None] = lambda share: None
) -> Averaging:
    """Measure the errors of attention over random keys on the first texts; `progress` gets the share done."""
    recording, texts = recording.first(MEASURED_TEXTS), []
    for text in range(recording.texts):
        rows = [_measure_text(recording, layer, text, generator) for layer in range(recording.layers)]
        texts.append([torch.stack(column) for column in zip(*rows)])
        progress((text + 1) / recording.texts)
    lengths = [int((~special).sum()) for special in recording.special]
    sizes = torch.stack([sample_sizes(n) for n in lengths], -1)
    measured = (torch.stack(values, -1).double().cpu() for values in zip(*texts))
    return Averaging(torch.tensor(lengths), sizes, *measured)


@torch.no_grad()
def _measure_text(recording: Recording, layer: int, text: int, generator: torch.Generator) -> tuple[Tensor, ...]:
    """The columns of `Averaging` from layer_errors on, for one text in one layer."""
    heads = recording.heads(layer, text)
    sizes = sample_sizes(int((~heads.special).sum()))
    chosen = torch.randperm(heads.n, generator=generator)[:QUERIES].to(heads.queries.device)
    part = replace(heads, queries=heads.queries[:, chosen])
    head_errors, layer_errors = [], []
    order = permuted_keys(heads.special, DRAWS, generator)
    for m in sizes.tolist():
        difference = sampled_averages(part, order[:, :m]) - heads.averages[:, chosen]
        head_errors.append(difference.square().sum(-1).double().mean((0, 2)))
        combined = torch.einsum("ahnv,hdv->and", difference, heads.output)
        layer_errors.append(combined.square().sum(-1).double().mean())
    output = torch.einsum("hnv,hdv->nd", heads.averages, heads.output)
    other = None if recording.texts == 1 else recording.heads(layer, (text + 1) % recording.texts)
    return (
        _relative_errors(torch.stack(layer_errors), output),
        _relative_errors(torch.stack(head_errors, -1), heads.averages),
        weight_errors(part.logits, heads.special, permuted_keys(heads.special, 4 * DRAWS, generator), sizes),
        logit_sd(heads.logits, heads.special),
        explained_by(heads, heads),
        torch.tensor(torch.nan) if other is None else explained_by(heads, other),
    )


def sampled_averages(heads: Heads, sample: Tensor) -> Tensor:
    """What every head computes from samples (draws, m) of its regular keys, (draws, heads, queries, v)."""
    draws, m = sample.shape
    special = heads.special.nonzero()[:, 0]
    kept = torch.cat([special.expand(draws, -1), sample], dim=-1)
    keys, values = (z[:, kept].transpose(0, 1) for z in (heads.keys, heads.values))
    return _weighted_attention(heads.queries, keys, values, len(special), (heads.n - len(special)) / m)


def _weighted_attention(queries: Tensor, keys: Tensor, values: Tensor, special: int, weight: float) -> Tensor:
    """Attention (..., heads, queries, v) in which all keys but the first `special` ones have a weight."""
    log_weights = torch.zeros(keys.shape[-2]).to(keys)
    log_weights[special:] = math.log(weight)
    queries = queries.expand(*keys.shape[:-2], -1, -1)
    return scaled_dot_product_attention(queries, keys, values, attn_mask=log_weights[None, :], scale=1.0)


def _relative_errors(squared_errors: Tensor, output: Tensor) -> Tensor:
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
    special, regular = heads.special.nonzero()[:, 0], (~heads.special).nonzero()[:, 0]
    half = len(regular) // 2
    first, second = regular[:half], (~source.special).nonzero()[:, 0][-half:]
    outputs = []
    for other, chosen in ((source, second), (heads, first)):
        pairs = ((heads.keys, other.keys), (heads.values, other.values))
        keys, values = (torch.cat([a[:, special], b[:, chosen]], 1) for a, b in pairs)
        averages = _weighted_attention(heads.queries[:, first], keys, values, len(special), half / len(chosen))
        outputs.append(heads.combine(averages))
    return explained(*outputs)
