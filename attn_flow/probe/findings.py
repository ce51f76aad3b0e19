"""Verdicts: the rule in one function, and the sentences that carry it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

RESAMPLES = 1000


@dataclass(frozen=True)
class Finding:
    """verdict: "supported", "partly", "not supported", or None where none can be given; the sentence; its numbers.

    >>> print(Finding("partly", "in layers 0 and 2."))
    PARTLY: in layers 0 and 2.
    """

    verdict: str | None
    text: str
    numbers: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return self.text if self.verdict is None else f"{self.verdict.upper()}: {self.text}"


@dataclass(frozen=True, eq=False)
class Interval:
    """Means over texts and their bootstrap interval over texts, each of the shape of what was averaged."""

    mean: Tensor
    low: Tensor
    high: Tensor

    @property
    def known(self) -> bool:
        """Whether there is an interval: one text has none."""
        return bool(torch.isfinite(self.low).any())


def bootstrap(values: Tensor, seed: int = 0, level: float = 0.95) -> Interval:
    """Mean over the last axis (texts), and the percentile interval of means over resampled texts; NaN for one text."""
    return ratio_of_means(values, torch.ones_like(values), seed, level)


def ratio_of_means(above: Tensor, below: Tensor, seed: int = 0, level: float = 0.95) -> Interval:
    """Mean of `above` over the mean of `below`, texts on the last axis, resampled together."""
    above, below = above.double(), below.double()
    mean = above.mean(-1) / below.mean(-1)
    texts = above.shape[-1]
    if texts < 2:
        nothing = torch.full_like(mean, torch.nan)
        return Interval(mean, nothing, nothing)
    draws = torch.randint(texts, (RESAMPLES, texts), generator=torch.Generator().manual_seed(seed))
    ratios = above[..., draws].mean(-1) / below[..., draws].mean(-1)
    tail = (1 - level) / 2
    return Interval(mean, ratios.quantile(tail, dim=-1), ratios.quantile(1 - tail, dim=-1))


def decide(value: Interval, nulls: Sequence[Interval]) -> tuple[str | None, list[int]]:
    """The rule: an interval above 0 and above every null's. Returns the verdict and the layers where it holds.

    value, nulls: intervals with one entry per layer. All layers: "supported"; some: "partly"; none: "not supported".
    One text gives no interval, and so no verdict.

    >>> one = lambda low, high: Interval(torch.tensor([(low + high) / 2]), torch.tensor([low]), torch.tensor([high]))
    >>> decide(one(0.5, 0.6), [one(-0.2, 0.1)]), decide(one(0.5, 0.6), [one(0.3, 0.55)])
    (('supported', [0]), ('not supported', []))
    """
    if not value.known or not all(null.known for null in nulls):
        return None, []
    holds = value.low > 0
    for null in nulls:
        holds = holds & (value.low > null.high)
    layers = holds.nonzero()[:, 0].tolist() if holds.ndim else ([0] if bool(holds) else [])
    return ("supported" if len(layers) == holds.numel() else "partly" if layers else "not supported"), layers


def span(values: Tensor) -> str:
    """The smallest and the largest of some numbers, in words."""
    shown = values[torch.isfinite(values)]
    if not len(shown):
        return "not defined"
    low, high = float(shown.min()), float(shown.max())
    return f"{low:.2f}" if f"{low:.2f}" == f"{high:.2f}" else f"{low:.2f} to {high:.2f}"


def by_layer(values: Tensor) -> str:
    """Numbers layer by layer, as tables have them."""
    return " ".join(f"{v:.2f}".replace("0.", ".", 1) if abs(v) < 1 else f"{v:.2f}" for v in values.tolist())


def layers_named(indices: Sequence[int], of: int) -> str:
    """no layer, layer 3, layers 1, 2, or every layer."""
    if len(indices) == of:
        return "every layer"
    if not indices:
        return "no layer"
    return ("layer " if len(indices) == 1 else "layers ") + ", ".join(map(str, indices))
