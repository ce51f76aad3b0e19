"""The questions, an answer to one of them, and intervals over texts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from attn_flow.base.files import to_plain

RESAMPLES = 1000
QUESTIONS = {
    "averaging": "Does attention average over many tokens?",
    "clusters": "How few key-value clusters does a head need?",
    "temperature": "How cold is each head, and what describes it?",
    "limit": "Does a layer move towards the limit that its weights predict?",
}


@dataclass(frozen=True)
class Finding:
    """The answer to a question.

    Args:
        verdict: "supported", "partly", "not supported", or None where there is none.
        text: the answer in one sentence.
        numbers: what it rests on, by name; None stands for a number that does not exist.

    Example:
        >>> print(Finding("partly", "In layers 0 and 2."))
        PARTLY: In layers 0 and 2.
    """

    verdict: str | None
    text: str
    numbers: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return self.text if self.verdict is None else f"{self.verdict.upper()}: {self.text}"


@dataclass(frozen=True, eq=False)
class Interval:
    """Means over texts and their 95% intervals, each of the shape of what was averaged; NaN for a single text."""

    mean: Tensor
    low: Tensor
    high: Tensor

    @property
    def known(self) -> bool:
        """Whether there is an interval: one text has none."""
        return bool(torch.isfinite(self.low).any())


def bootstrap(values: Tensor, seed: int = 0, level: float = 0.95) -> Interval:
    """The mean over the last axis (texts), and the percentile interval of means over resampled texts.

    Example:
        >>> interval = bootstrap(torch.tensor([1.0, 2.0, 3.0]))
        >>> float(interval.mean), bool(interval.low < 2.0 < interval.high)
        (2.0, True)
    """
    return ratio_of_means(values, torch.ones_like(values), seed, level)


def ratio_of_means(above: Tensor, below: Tensor, seed: int = 0, level: float = 0.95) -> Interval:
    """The mean of `above` over the mean of `below`, texts on the last axis, which are resampled together."""
    above, below = above.double(), below.double()
    mean = above.mean(-1) / below.mean(-1)
    texts = above.shape[-1]
    if texts < 2:
        unknown = torch.full_like(mean, torch.nan)
        return Interval(mean, unknown, unknown)
    draws = torch.randint(texts, (RESAMPLES, texts), generator=torch.Generator().manual_seed(seed))
    ratios = above[..., draws].mean(-1) / below[..., draws].mean(-1)
    tail = (1 - level) / 2
    return Interval(mean, ratios.quantile(tail, dim=-1), ratios.quantile(1 - tail, dim=-1))


def span(values: Tensor) -> str:
    """The smallest and the largest of some numbers, in words; those that are not finite are left out.

    >>> span(torch.tensor([0.18, 0.29, 0.2]))
    '0.18 to 0.29'
    """
    finite = values[torch.isfinite(values)]
    if not len(finite):
        return "not defined"
    low, high = f"{float(finite.min()):.2f}", f"{float(finite.max()):.2f}"
    return low if low == high else f"{low} to {high}"


def layers_named(indices: Sequence[int], count: int) -> str:
    """Some of `count` layers in words: no layer, layer 3, layers 1, 2, or every layer."""
    if len(indices) == count:
        return "every layer"
    if not indices:
        return "no layer"
    return ("layer " if len(indices) == 1 else "layers ") + ", ".join(map(str, indices))


def without_nan(value: Any) -> Any:
    """JSON values with None in place of NaN and infinities.

    >>> without_nan({"b": [0.5, float("nan")]})
    {'b': [0.5, None]}
    """
    value = to_plain(value) if not isinstance(value, dict | list | tuple | float) else value
    if isinstance(value, dict):
        return {str(key): without_nan(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [without_nan(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
