"""Propagation of chaos in an encoder of tables: tokens of one sample in the field of another sample.

Two samples A, B of n rows. Tokens of A move by themselves, x -> Phi(x; A), or passively in the other field,
p -> Phi(p; B). What separates p from x after a layer is what was there before, carried by the field, and what the
field adds:
    Phi(p; B) - Phi(x; A) = [Phi(p; B) - Phi(x; B)] + [Phi(x; B) - Phi(x; A)].
The second part is of order n^{-1/2} if both samples have one distribution; the first grows from layer to layer.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from attn_flow.experiments.encoders.tables import TableEncoder, draw_table
from attn_flow.probe.untrained import untrained_copy

STEP = 1e-3  # of a tangent, in units of the cloud's spread


@dataclass(frozen=True)
class TableDistribution:
    """Rows of `classes` normal classes whose centres are `spread` apart in units of the noise."""

    name: str
    spread: float
    classes: int = 3
    features: int = 10
    number: int = 0  # which centres

    def draw(self, n: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """n rows and their classes."""
        return draw_table(n, self.features, self.classes, self.spread, centres=self.number, generator=generator)


DISTRIBUTIONS = (
    TableDistribution("overlapping", 0.5),
    TableDistribution("separated", 1.5),
    TableDistribution("eight classes", 0.5, 8),
)


def moved(layer: Any, x: Tensor, field: Tensor) -> Tensor:
    """Phi(x; field): tokens x (n, d) after a post-norm layer in which they attend to `field` (m, d) only."""
    y = layer.norm1(x + layer.self_attn(x[None], field[None], field[None], need_weights=False)[0][0])
    return layer.norm2(y + layer.linear2(layer.activation(layer.linear1(y))))


def size(x: Tensor) -> float:
    """Root of the mean over tokens of |x|^2."""
    return math.sqrt(float(x.double().square().sum(-1).mean()))


def spread_of(x: Tensor) -> float:
    """Root of the mean squared distance of tokens from their mean."""
    return size(x - x.mean(0))


def two_samples(
    model: TableEncoder, rows: TableDistribution, n: int, generator: torch.Generator, baseline: str = ""
) -> tuple[Tensor, Tensor]:
    """Tokens of two samples of n rows, standardised together so that a row is the same token in both.

    baseline: "other distribution" (other centres for the second), "shuffled labels" (its classes permuted), or "".
    """
    x, y = rows.draw(n, generator)
    other = replace(rows, number=rows.number + 1) if baseline == "other distribution" else rows
    u, v = other.draw(n, generator)
    if baseline == "shuffled labels":
        v = v[torch.randperm(n, generator=generator)]
    tokens = model.rows(torch.cat([x, u]), torch.cat([y, v]))
    return tokens[:n], tokens[n:]


def passive_error(model: TableEncoder, A: Tensor, B: Tensor) -> dict[str, list[float]]:
    """By layer, in units of A's spread: |p - x|, and its two parts, carried and added by the field (see above)."""
    p = A
    parts: dict[str, list[float]] = {name: [] for name in ("error", "carried", "added")}
    for layer in model.layers:
        mixed = moved(layer, A, B)
        p, A, B = moved(layer, p, B), moved(layer, A, A), moved(layer, B, B)
        unit = spread_of(A)
        for name, part in (("error", p - A), ("carried", p - mixed), ("added", mixed - A)):
            parts[name].append(size(part) / unit)
    return parts


def growth(model: TableEncoder, x: Tensor, generator: torch.Generator) -> dict[str, list[float]]:
    """Factors by which small displacements of tokens grow in each layer, over the growth of the cloud's spread.

    passive: every token by itself in the field of the cloud; collective: the field moves along. Start at random.
    """
    growth_by_kind: dict[str, list[float]] = {}
    start = torch.randn(x.shape, generator=generator).to(x)
    start = start / size(start)
    for kind in ("passive", "collective"):
        cloud, tangent, factors = x, start, []
        for layer in model.layers:
            h = STEP * spread_of(cloud)
            near = cloud + h * tangent
            after = moved(layer, cloud, cloud)
            tangent = (moved(layer, near, near if kind == "collective" else cloud) - after) / h
            factors.append(size(tangent) * spread_of(cloud) / spread_of(after))
            tangent, cloud = tangent / size(tangent), after
        growth_by_kind[kind] = factors
    return growth_by_kind


def exponent(n: Sequence[int], error: Sequence[Sequence[float]]) -> tuple[float, float]:
    """Slope of log(mean error) in log n, and its standard error: error holds the seeds of every n.

    The error is that of the means, by the seeds' spread; where a size has one seed, the others' relative spread.
    """
    x = torch.tensor(n, dtype=torch.float64).log()
    means = torch.tensor([sum(e) / len(e) for e in error], dtype=torch.float64)
    relative = [torch.tensor(e).std() / math.sqrt(len(e)) / m for e, m in zip(error, means) if len(e) > 1]
    typical = float(torch.stack(relative).mean()) if relative else math.nan
    centred = x - x.mean()
    slope = float((centred * means.log()).sum() / centred.square().sum())
    return slope, typical / math.sqrt(float(centred.square().sum()))


def untrained_layers(model: TableEncoder, seed: int) -> TableEncoder:
    """The same encoder with untrained layers; its map from rows to tokens stays as trained."""
    untrained = untrained_copy(model, seed)
    untrained.encoder, untrained.y_encoder = model.encoder, model.y_encoder
    return untrained
