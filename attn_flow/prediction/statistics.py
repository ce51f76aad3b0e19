"""The phases of a batch of paths as numbers over random seeds."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from attn_flow.dynamics.trajectory import Trajectory
from attn_flow.prediction.limit_map import LimitMap
from attn_flow.prediction.phases import Phases, phases


class OverSeeds(NamedTuple):
    """The mean of a number over seeds, and the standard error of this mean."""

    mean: float
    error: float


@dataclass(frozen=True, eq=False)
class PhasesOverSeeds:
    """The phases of every path of a batch, and their numbers over the batch.

    Attributes:
        t_min, min_w2: the time of the least W2 and its value.
        rates: by the name of the phase, over the paths with a fitted rate, if there are two or more.
        each: the `Phases` of every path.
    """

    t_min: OverSeeds
    min_w2: OverSeeds
    rates: dict[str, OverSeeds]
    each: tuple[Phases, ...]

    def __repr__(self) -> str:
        numbers = {"t_min": self.t_min, "min W2": self.min_w2, **self.rates}
        words = ", ".join(f"{name} {number.mean:.3g} +- {number.error:.2g}" for name, number in numbers.items())
        return f"PhasesOverSeeds({len(self.each)} paths, {words})"


def phases_over_seeds(path: Trajectory, limit: LimitMap) -> PhasesOverSeeds:
    """The phases of a batch of paths (T, seeds, n, d), as one call of `flow` on clouds (seeds, n, d) returns them.

    Example:
        >>> import torch
        >>> from attn_flow import Attention, Sphere, flow, limit
        >>> attention = Attention.from_matrices(torch.eye(2), torch.diag(torch.tensor([2.0, 1.0])), beta=10.0)
        >>> x0 = Sphere().uniform(150, 2, generator=torch.Generator().manual_seed(0)).reshape(3, 50, 2)
        >>> result = phases_over_seeds(flow(attention, x0, torch.linspace(0, 8, 17), h=0.25), limit(attention))
        >>> len(result.each), result.min_w2.error < result.min_w2.mean
        (3, True)
    """
    if path.x.ndim != 4 or path.x.shape[1] < 2:
        raise ValueError(f"path.x has shape {tuple(path.x.shape)}, expected (T, seeds, n, d) with two or more seeds.")
    batch = phases(path, limit, warn=False)
    rates: dict[str, list[float]] = {}
    for one in batch:
        for phase in (*one.intervals, one.settling):
            if phase is not None and phase.rate is not None:
                rates.setdefault(phase.name, []).append(phase.rate)
    return PhasesOverSeeds(
        t_min=_over_seeds(batch.t_min.tolist()),
        min_w2=_over_seeds(batch.min_w2.tolist()),
        rates={name: _over_seeds(values) for name, values in rates.items() if len(values) > 1},
        each=batch.elements,
    )


def _over_seeds(values: Sequence[float]) -> OverSeeds:
    return OverSeeds(float(np.mean(values)), float(np.std(values, ddof=1)) / math.sqrt(len(values)))
