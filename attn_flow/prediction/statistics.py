"""Numbers over random seeds: means with errors, and the phases of a batch of paths."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from attn_flow.dynamics.trajectory import Trajectory
from attn_flow.prediction.limit_map import LimitMap
from attn_flow.prediction.phases import Phases, phases

RESAMPLES = 1000


@dataclass(frozen=True)
class OverSeeds:
    """A number over seeds: mean, standard error of the mean, and a bootstrap interval of 95% around it."""

    mean: float
    error: float
    low: float
    high: float
    values: tuple[float, ...]

    def __repr__(self) -> str:
        interval = f"[{self.low:.4g}, {self.high:.4g}]"
        return f"OverSeeds({self.mean:.4g} +- {self.error:.2g}, 95% {interval}, {len(self.values)} seeds)"


def over_seeds(values: Sequence[float], seed: int = 0) -> OverSeeds:
    """The mean, standard error and bootstrap interval of one number for each of two or more seeds.

    Args:
        values: the numbers.
        seed: of the bootstrap.

    Example:
        >>> over_seeds([1.0, 2.0, 3.0]).mean
        2.0
    """
    x = np.asarray(values, dtype=np.float64)
    if x.ndim != 1 or len(x) < 2 or not np.isfinite(x).all():
        raise ValueError(f"values of shape {x.shape}, expected one finite number for each of two or more seeds.")
    rows = np.random.default_rng(seed).integers(0, len(x), (RESAMPLES, len(x)))
    low, high = np.quantile(x[rows].mean(1), [0.025, 0.975])
    error = float(x.std(ddof=1) / math.sqrt(len(x)))
    return OverSeeds(float(x.mean()), error, float(low), float(high), tuple(x.tolist()))


@dataclass(frozen=True, eq=False, repr=False)
class PhasesOverSeeds:
    """The phases of every path of a batch, and their numbers over the batch.

    Attributes:
        each: the `Phases` of every path.
        t_min, min_w2: over the seeds.
        rates: by the name of the phase, over the paths with a fitted rate, if there are two or more.
        share: the fraction of the paths that have the phase.
    """

    each: tuple[Phases, ...]
    t_min: OverSeeds
    min_w2: OverSeeds
    rates: dict[str, OverSeeds]
    share: dict[str, float]

    def __repr__(self) -> str:
        rates = ", ".join(f"{name} {rate.mean:.3g} +- {rate.error:.2g}" for name, rate in self.rates.items())
        t_min = f"{self.t_min.mean:.3g} +- {self.t_min.error:.2g}"
        return f"PhasesOverSeeds({len(self.each)} paths, t_min {t_min}, {rates})"


def phases_over_seeds(path: Trajectory, limit: LimitMap) -> PhasesOverSeeds:
    """The phases of a batch of paths (T, seeds, n, d), as one call of `flow` on clouds (seeds, n, d) returns them.

    Example:
        >>> import torch
        >>> from attn_flow import Attention, Sphere, flow, limit
        >>> attention = Attention.from_matrices(torch.eye(2), torch.diag(torch.tensor([2.0, 1.0])), beta=10.0)
        >>> x0 = Sphere().uniform(150, 2, generator=torch.Generator().manual_seed(0)).reshape(3, 50, 2)
        >>> result = phases_over_seeds(flow(attention, x0, torch.linspace(0, 8, 17), h=0.25), limit(attention))
        >>> len(result.each), result.min_w2.low <= result.min_w2.mean <= result.min_w2.high
        (3, True)
    """
    if path.x.ndim != 4 or path.x.shape[1] < 2:
        raise ValueError(f"path.x has shape {tuple(path.x.shape)}, expected (T, seeds, n, d) with two or more seeds.")
    each = phases(path, limit, warn=False)
    rates: dict[str, list[float]] = {}
    counts: dict[str, int] = {}
    for one in each:
        for phase in (*one.intervals, *((one.settling,) if one.settling else ())):
            counts[phase.name] = counts.get(phase.name, 0) + 1
            if phase.rate is not None:
                rates.setdefault(phase.name, []).append(phase.rate)
    return PhasesOverSeeds(
        each.elements,
        over_seeds(each.t_min.tolist()),
        over_seeds(each.min_w2.tolist()),
        {name: over_seeds(values) for name, values in rates.items() if len(values) > 1},
        {name: count / len(each.elements) for name, count in counts.items()},
    )
