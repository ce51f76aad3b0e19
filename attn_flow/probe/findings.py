"""The questions, what was probed and what was found as plain records, and statistics over texts and heads."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

MIN_TEXTS = 8  # for a verdict
RESAMPLES = 1000
QUESTIONS = {
    "averaging": "Does attention average over many tokens?",
    "clusters": "How few key-value clusters does a head need?",
    "temperature": "How cold is each head, and what describes it?",
    "limit": "Does a layer move towards the limit that its weights predict?",
}
DESCRIPTIONS = {"two_moments": "two moments", "four_keys": "the four largest logits", "argmax": "the largest logit"}


@dataclass(frozen=True)
class Finding:
    """The answer to a question.

    Args:
        verdict: "supported", "partly", "not supported", or None where there is none.
        text: the answer in one sentence.
        numbers: what it rests on, by name, as JSON values; None stands for a number that does not exist.
        value, baseline: its main number and what it is compared with, for a table.

    Example:
        >>> print(Finding("partly", "In layers 0 and 2."))
        PARTLY: In layers 0 and 2.
        >>> Finding(None, "", {"b": torch.tensor([0.5, torch.nan])}).numbers
        {'b': [0.5, None]}
    """

    verdict: str | None
    text: str
    numbers: dict[str, Any] = field(default_factory=dict)
    value: str = "not measured"
    baseline: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "numbers", _as_json(self.numbers))

    def __str__(self) -> str:
        return self.text if self.verdict is None else f"{self.verdict.upper()}: {self.text}"


@dataclass(frozen=True)
class About:
    """What was probed."""

    encoder: dict[str, Any]  # the facts of `hooks.encoder_facts`
    weights: str  # digest
    inputs: str  # digest
    texts: int
    tokens: int
    skipped: list[int]  # indices of the texts that were too short
    truncated: int  # how many texts were cut to `max_length`
    unknown_share: float  # share of tokens that the tokenizer does not know
    max_length: int | None
    batch: int
    beta_factor: float
    seed: int
    dtype: str  # of the computation
    device: str
    versions: dict[str, str]  # of the packages
    hides: str = ""  # why tokens see only a part of their text; empty if they see all
    key: str = ""  # a digest of all of the above: equal keys, equal results
    unexplained: list[float] = field(default_factory=list)  # by layer, share of attention that the weights do not give


@dataclass(frozen=True, eq=False)
class Reading:
    """Attention token by token in the first few texts, which stand one after another on the axis of tokens."""

    lengths: Tensor  # their numbers of tokens
    keys: Tensor  # (layers, heads, tokens), exp(entropy) of a query's attention: over how many keys it is spread
    received: Tensor  # (layers, tokens), attention that a token receives over its fair share, mean over heads
    weights: Tensor  # (layers, heads, m, m), attention among the first m tokens of the first of these texts


def _as_json(value: Any) -> Any:
    """Tensors as lists, and None in place of NaN and infinities."""
    if isinstance(value, dict):
        return {str(key): _as_json(entry) for key, entry in value.items()}
    if isinstance(value, Tensor):
        value = value.tolist()
    if isinstance(value, list | tuple):
        return [_as_json(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def answer(
    verdict: str | None, words: str, measured: str, texts: int, numbers: dict[str, Any], value: str, baseline: str
) -> Finding:
    """A finding of a verdict in words and what was measured; from few texts it has no verdict."""
    if texts < MIN_TEXTS:
        verdict, words = None, f"No verdict ({texts} of {MIN_TEXTS} texts)"
    return Finding(verdict, f"{words}: {measured}.", numbers, value, baseline)


@dataclass(frozen=True, eq=False)
class Interval:
    """Means over texts and their 95% intervals, each of the shape of what was averaged; one text has none: NaN."""

    mean: Tensor
    low: Tensor
    high: Tensor


def bootstrap(values: Tensor, seed: int = 0) -> Interval:
    """The mean over the texts (last axis) whose value is known, and the percentile interval over resampled texts."""
    values = values.double().where(values.isfinite(), torch.nan)
    means = values[..., resampled_texts(values.shape[-1], seed)].nanmean(-1)
    means[values.isfinite().sum(-1) < 2] = torch.nan
    return Interval(values.nanmean(-1), means.nanquantile(0.025, dim=-1), means.nanquantile(0.975, dim=-1))


def resampled_texts(texts: int, seed: int) -> Tensor:
    """Indices (RESAMPLES, texts) of texts drawn with replacement."""
    return torch.randint(texts, (RESAMPLES, texts), generator=torch.Generator().manual_seed(seed))


def correlation(x: Tensor, y: Tensor) -> float | None:
    """The correlation of two lists of numbers where both are known; None if one of them is constant."""
    known = torch.isfinite(x) & torch.isfinite(y)
    x, y = (z[known] - z[known].mean() for z in (x, y))
    scale = float(x.norm() * y.norm())
    return float(x @ y) / scale if len(x) > 2 and scale > 1e-9 * len(x) else None


def rank_correlation(x: Tensor, y: Tensor) -> float | None:
    """Spearman's rank correlation where both numbers are known; None if one of them is constant."""
    known = torch.isfinite(x) & torch.isfinite(y)
    ranks = lambda z: (z[:, None] - z).sign().sum(-1).double()  # equal numbers have equal ranks
    return correlation(ranks(x[known]), ranks(y[known]))


def span(values: Tensor) -> str:
    """The smallest and the largest of some numbers, in words; those that are not finite are left out."""
    finite = [f"{value:z.2f}" for value in sorted(values[torch.isfinite(values)].tolist())]
    return " to ".join(dict.fromkeys([finite[0], finite[-1]])) if finite else "not defined"


def with_interval(mean: float, low: float, high: float, digits: int = 2) -> str:
    """A number with its interval, in words; without an interval that is NaN.

    >>> with_interval(35.1, 26.0, 43.2, digits=0), with_interval(0.5, math.nan, math.nan)
    ('35 (26 to 43)', '0.50')
    """
    text = f"{mean:z.{digits}f}"
    return text if math.isnan(low + high) else f"{text} ({low:z.{digits}f} to {high:z.{digits}f})"


def layers_named(indices: Sequence[int], count: int) -> str:
    """Some of `count` layers in words: no layer, layer 3, layers 1, 2, or every layer."""
    if len(indices) == count:
        return "every layer"
    if not indices:
        return "no layer"
    return ("layer " if len(indices) == 1 else "layers ") + ", ".join(map(str, indices))
