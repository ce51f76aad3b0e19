"""Question 3: how cold is each head, and which description of its output applies to it?

The temperature of a head is the standard deviation of its logits. Warm heads average over many keys, and two moments
of the keys and values may describe them; frozen heads are described by the few keys with the largest logits.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from attn_flow.measures import Cloud, Gaussian, Mixture
from attn_flow.probe.averaging import Averaging, correlation, mean_over_texts, plain, ranks
from attn_flow.probe.findings import Finding
from attn_flow.probe.recording import Heads, Recording
from attn_flow.probe.sampling import head_phases, logit_sd
from attn_flow.theory.random_energy import PHASES, thresholds

FEW_KEYS = 4
DESCRIPTIONS = {"two_moments": "two moments", "four_keys": "the four largest logits", "argmax": "the largest logit"}


@dataclass(frozen=True, eq=False)
class Temperature:
    """How sharply every head attends, and the variance of its output that three descriptions explain.

    Args:
        tokens: (texts,), the mean number of keys that are not special and that a query sees.
        logit_sd: (layers, heads, texts), standard deviation of a query's logits over those keys.
        entropy: (layers, heads, texts), of the attention weights over the logarithm of the number of visible keys.
        largest_weight: (layers, heads, texts), mean over queries.
        effective_keys: (layers, heads, texts), the inverse of the mean over queries of sum_j p_j^2.
        two_moments: (layers, heads, texts), explained variance of a head's output by mean and covariance of its keys
            and values, special tokens apart; NaN if tokens see only a part of their text.
        four_keys, argmax: (layers, heads, texts), the same by attention to the keys with the four largest logits and
            to the key with the largest.
        exponent: (layers, heads), b of question 1; NaN if it was not measured.
    """

    tokens: Tensor
    logit_sd: Tensor
    entropy: Tensor
    largest_weight: Tensor
    effective_keys: Tensor
    two_moments: Tensor
    four_keys: Tensor
    argmax: Tensor
    exponent: Tensor

    def phases(self) -> Tensor:
        """0 warm, 1 middle, 2 frozen: the phase of every head at the mean length of the texts, (layers, heads)."""
        return head_phases(self.logit_sd, self.tokens)

    def finding(self, seed: int = 0) -> Finding:
        """How many heads are warm, middle and frozen, and which description does best in each; there is no verdict."""
        quantities = ("logit_sd", "entropy", "largest_weight", "effective_keys", *DESCRIPTIONS)
        means = {name: getattr(self, name).nanmean(-1) for name in quantities} | {"b": self.exponent}
        phases = self.phases()
        sizes = [int((phases == i).sum()) for i in range(len(PHASES))]
        medians = {
            name: {kind: median(means[kind][phases == i]) for kind in DESCRIPTIONS} for i, name in enumerate(PHASES)
        }
        low, high = thresholds(max(2, round(float(self.tokens.mean()))))
        lists = {name: plain(column) for name, column in means.items()}
        rows = [
            {"layer": i, "head": h, **{name: c[i][h] for name, c in lists.items()}, "phase": PHASES[phases[i, h]]}
            for i in range(phases.shape[0])
            for h in range(phases.shape[1])
        ]
        numbers = {
            "heads": rows,
            "phases": dict(zip(PHASES, sizes)),
            "thresholds": [float(low), float(high)],
            "explained": medians,
            "best_description": {name: best_description(medians[name]) for name in PHASES},
            "rank_correlation_with_logit_sd": {
                name: rank_correlation(means["logit_sd"], means[name]) for name in means if name != "logit_sd"
            },
        }
        parts = [_describe(*row) for row in zip(sizes, PHASES, medians.values()) if row[0]]
        return Finding(None, f"Of {phases.numel()} heads {', '.join(parts)}.", numbers)


def _describe(size: int, name: str, explained: dict[str, float | None]) -> str:
    """The number of heads of a phase and their best description, in words."""
    best = best_description(explained)
    description = "no description applies" if best is None else f"R2 {explained[best]:.2f} by {DESCRIPTIONS[best]}"
    return f"{size} {'is' if size == 1 else 'are'} {name} ({description})"


def measure_temperature(
    recording: Recording,
    averaging: Averaging | None = None,
    *,
    texts: int = 8,
    progress: Callable[[float], None] | None = None,
) -> Temperature:
    """Measure the temperature of every head and the descriptions of its output.

    Args:
        recording: an encoder on texts; only its first `texts` are used.
        averaging: question 1 of the same encoder, for the exponents b.
        texts: number of texts.
        progress: is called with the share that is done.

    Example:
        >>> from attn_flow.hooks.demo import tiny_bert
        >>> from attn_flow.probe.recording import record_encoder
        >>> recording = record_encoder(*tiny_bert(), ["a b c d e f g h i j " * 3])
        >>> measure_temperature(recording).finding().numbers["phases"]
        {'warm': 4, 'middle': 0, 'frozen': 0}
    """
    recording = recording.first(texts)
    columns, tokens = [], []
    for text in range(recording.texts):
        rows = []
        for layer in range(recording.layers):
            heads = recording.heads(layer, text)
            rows.append(_describe_heads(heads))
            if progress is not None:
                progress((text * recording.layers + layer + 1) / (recording.texts * recording.layers))
        columns.append([torch.stack([row[i] for row in rows]) for i in range(len(rows[0]))])
        tokens.append(float((heads.logits[0, :, ~heads.special] > -torch.inf).sum(-1).double().mean()))
    stacked = [torch.stack(values, -1).double().cpu() for values in zip(*columns)]
    exponent = torch.full(stacked[0].shape[:2], torch.nan, dtype=torch.float64)
    if averaging is not None and averaging.applies:
        exponent = mean_over_texts(averaging.head_exponents()).mean
    return Temperature(*[torch.tensor(tokens, dtype=torch.float64), *stacked, exponent])


@torch.no_grad()
def _describe_heads(heads: Heads) -> tuple[Tensor, ...]:
    """The columns of `Temperature` from logit_sd to argmax, for one text in one layer, each (heads,)."""
    weights = heads.logits.softmax(-1)
    visible = (heads.logits > -torch.inf).sum(-1).clamp(min=2)
    two_moments = describe_by_moments(heads) if heads.visible is None else torch.full_like(heads.averages, torch.nan)
    return (
        logit_sd(heads.logits, heads.special),
        (torch.special.entr(weights).sum(-1) / visible.log()).mean(-1),
        weights.amax(-1).mean(-1),
        1 / weights.square().sum(-1).mean(-1),
        explained(two_moments, heads.averages),
        explained(describe_by_keys(heads, FEW_KEYS), heads.averages),
        explained(describe_by_keys(heads, 1), heads.averages),
    )


def describe_by_moments(heads: Heads) -> Tensor:
    """Every head's output if its keys and values were Gaussian, special tokens apart, (heads, n, v).

    The keys and values that are not special have their mean and covariance; beyond sqrt(2 log N) standard deviations
    of the logits the Gaussian of N tokens saturates, as a random-energy model.
    """
    tokens = torch.cat([heads.keys, heads.values], -1)
    queries = torch.cat([heads.queries, torch.zeros_like(heads.values)], -1)
    regular, special = tokens[:, ~heads.special], tokens[:, heads.special]
    measure: Gaussian | Mixture = Gaussian.of_tokens(*Cloud(regular).moments(), regular.shape[1])
    if special.shape[1]:
        measure = Mixture([Cloud(special), measure], torch.tensor([special.shape[1], regular.shape[1]]).to(tokens))
    return measure.tilted_mean(queries, 1.0)[..., heads.keys.shape[-1] :]


def describe_by_keys(heads: Heads, count: int) -> Tensor:
    """Attention of every head over the keys with the largest logits of each query only, (heads, n, v)."""
    top = heads.logits.topk(min(count, heads.n), -1)
    weights = torch.zeros_like(heads.logits).scatter_(-1, top.indices, top.values.softmax(-1))
    return weights @ heads.values


def explained(predicted: Tensor, true: Tensor) -> Tensor:
    """Explained variance 1 - |predicted - true|^2 / |true - mean|^2 of outputs (..., n, v), in float64; at most 1."""
    predicted, true = predicted.double(), true.double()
    variance = (true - true.mean(-2, keepdim=True)).square().sum((-2, -1))
    return torch.where(variance > 0, 1 - (predicted - true).square().sum((-2, -1)) / variance, torch.nan)


def best_description(explained: dict[str, float | None]) -> str | None:
    """The description that explains most; None if none explains anything."""
    known = {name: value for name, value in explained.items() if value is not None and value > 0}
    return max(known, key=lambda name: known[name]) if known else None


def median(values: Tensor) -> float | None:
    """The median of the numbers that are known; None if there are none."""
    values = values[torch.isfinite(values)]
    return float(values.quantile(0.5)) if len(values) else None


def rank_correlation(x: Tensor, y: Tensor) -> float | None:
    """Spearman's rank correlation over heads, where both numbers are known."""
    known = torch.isfinite(x) & torch.isfinite(y)
    return correlation(ranks(x[known]), ranks(y[known]))
