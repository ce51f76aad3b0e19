"""The phases of a flow, read off W2(mu_t, P_# mu_0): it concentrates, may rest at its limit, and leaves it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor

from attn_flow.base import checks
from attn_flow.drawing import distance_figure, html_text
from attn_flow.dynamics.trajectory import Trajectory
from attn_flow.measures.cloud import Cloud
from attn_flow.prediction.limit_map import LimitMap
from attn_flow.prediction.requirements import Requirement
from attn_flow.prediction.spectrum import Array
from attn_flow.transport.distances import wasserstein

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FALL = 0.75  # a path concentrates if W2 falls at least to this part of its start
NEAR = 1.25  # it rests while W2 is within this factor of its least value, or of the predicted cluster width
REST = 2.0  # for at least this many of the times in which W2 fell by a factor of e


@dataclass(frozen=True)
class Phase:
    """One interval of time, and the rate of exponential decay or growth in it; None where nothing can be fitted.

    Attributes:
        name: "concentrating", "metastable", "terminal" or "spreading" (W2 never falls).
        rate, error: at which W2 decays while concentrating, and the clusters' offset grows in the terminal phase; its
            standard error.
        predicted: the rate that theory gives.
    """

    name: str
    start: float
    end: float
    rate: float | None = None
    error: float | None = None
    predicted: float | None = None


@dataclass(frozen=True, eq=False, repr=False)
class Phases:
    """The phases of a path, or of a batch of paths, with the curve from which they were read.

    Attributes:
        t, w2: times (T,), and W2(mu_t, P_# mu_0) (T, ...).
        t_min, min_w2: (...), the time of the least W2 and its value.
        intervals: the phases of one path, in order.
        note: why there is a metastable phase or none, in words.
        requires: the assumptions of the prediction, checked on the first cloud.
        doubts: why the prediction need not hold for this path.
        elements: the phases of the paths of a batch.
    """

    t: Tensor
    w2: Tensor
    t_min: Tensor
    min_w2: Tensor
    intervals: tuple[Phase, ...] = ()
    note: str = ""
    requires: tuple[Requirement, ...] = ()
    doubts: tuple[str, ...] = ()
    elements: tuple[Phases, ...] = ()

    def __repr__(self) -> str:
        if self.elements:
            return f"Phases(batch {tuple(self.t_min.shape)}, min W2 {self.min_w2.min():.3g} to {self.min_w2.max():.3g})"
        words = ", ".join(f"{phase.name} [{phase.start:.3g}, {phase.end:.3g}]" for phase in self.intervals)
        return f"Phases({words}; min W2 {self.min_w2:.3g} at t = {self.t_min:.3g}, {len(self.doubts)} doubts)"

    def plot(self) -> Figure:
        """A figure of W2 over time with the phases as shaded intervals; it needs matplotlib."""
        return distance_figure(self.t, self.w2, [(each.name, each.start, each.end) for each in self.intervals])

    def _repr_html_(self) -> str:  # for notebooks
        return html_text([repr(self), self.note, *self.doubts], self.plot)

    def as_dict(self) -> dict[str, Any]:
        """All numbers and words of one path, ready for JSON."""
        return {
            **{name: getattr(self, name).tolist() for name in ("t", "w2", "t_min", "min_w2")},
            "phases": [asdict(phase) for phase in self.intervals],
            "note": self.note,
            "requires": [asdict(need) for need in self.requires],
            "doubts": list(self.doubts),
        }


def w2_curve(path: Trajectory, limit: LimitMap) -> Tensor:
    """W2(mu_t, P_# mu_0) at every time of a path (T, ..., n, d), as (T, ...); to the moving push-forward if E rotates.

    Example:
        >>> from attn_flow import Attention, limit
        >>> from attn_flow.prediction import zero_temperature_flow
        >>> attention = Attention.from_matrices(torch.eye(2), torch.diag(torch.tensor([2.0, 1.0])))
        >>> path = zero_temperature_flow(attention, torch.tensor([[0.8, 0.6], [-0.8, 0.6]]), [0.0, 20.0])
        >>> w2_curve(path, limit(attention)).round(decimals=4)
        tensor([0.6325, 0.0000])
    """
    if limit.elements:
        curves = [w2_curve(*element) for element in _elements(path, limit)]
        return torch.stack(curves, dim=-1).unflatten(-1, path.x.shape[1:-2])
    start = Cloud(path.cloud(0).filled(), path.weights, path.mask)
    target = limit.push_forward(start, path.t - path.t[0] if limit.rotates else None)
    return wasserstein(Cloud(path.x, path.weights, path.mask), target)


def _elements(path: Trajectory, limit: LimitMap) -> Iterator[tuple[Trajectory, LimitMap]]:
    """The paths of a batch, one by one, each with its own beta and limit."""
    checks.require_shape("a cloud of the path", path.x[0], (*limit.shape, *path.x.shape[-2:]))
    batch, limits = path.x.shape[1:-2], limit.elements or (limit,)
    beta = np.asarray(path.about.get("field", {}).get("beta", math.nan), dtype=np.float64)  # "inf" is infinite
    betas = np.broadcast_to(beta[..., 0] if beta.ndim else beta, batch)  # the last axis are heads
    pick = lambda z, index: None if z is None else z.expand(*batch, z.shape[-1])[index]
    for i, index in enumerate(np.ndindex(*batch)):
        x, about = path.x[(slice(None), *index)], {"field": {"beta": float(betas[index])}}
        one = replace(path, x=x, weights=pick(path.weights, index), mask=pick(path.mask, index), about=about)
        yield one, limits[i % len(limits)]


@torch.no_grad()
def phases(path: Trajectory, limit: LimitMap, *, w2: ArrayLike | Tensor | None = None) -> Phases:
    """Split a path into concentration, rest and exit, with rates fitted and predicted.

    W2 is metastable if it stays within 25% of its least value (or of the predicted width of clusters) for at least
    twice the mean time in which it fell by a factor of e. Otherwise there is no metastable phase, and `note` says so.

    Args:
        path: a path (T, n, d) with T >= 3, as `flow` returns it, or a batch (T, ..., n, d).
        limit: `limit(attention)`; a batch of limits matches the last batch axes of the path.
        w2: the distances (T, ...) if they are known already.

    Example:
        >>> from attn_flow import Attention, flow, limit
        >>> from attn_flow.measures.quadrature import circle
        >>> G, V = torch.diag(torch.tensor([3.0, 1.0])).double(), torch.diag(torch.tensor([1.0, 1.02])).double()
        >>> attention = Attention.from_matrices(G, V, beta=100.0)
        >>> cloud = circle(100, lambda theta: torch.exp(torch.cos(theta - 1)))
        >>> path = flow(attention, cloud, torch.linspace(0, 20, 41), h=0.1)
        >>> [phase.name for phase in phases(path, limit(attention)).intervals]
        ['concentrating', 'metastable', 'terminal']
    """
    curve = (w2_curve(path, limit) if w2 is None else torch.as_tensor(w2, dtype=torch.float64)).detach().cpu().double()
    if curve.shape != path.x.shape[:-2] or len(path) < 3:
        raise ValueError(f"w2 has shape {tuple(curve.shape)}, expected {tuple(path.x.shape[:-2])} and 3 or more times.")
    if not bool((curve.isfinite() & (curve >= 0)).all()):
        raise ValueError("w2 has NaN, infinite or negative entries, expected distances.")
    curves = curve.reshape(len(path), -1).unbind(-1)
    each = tuple(_phases_of_path(*element, one) for element, one in zip(_elements(path, limit), curves))
    if curve.ndim == 1:
        return each[0]
    least = curve.min(0)
    return Phases(path.t, curve, path.t.cpu()[least.indices], least.values, elements=each)


def _phases_of_path(path: Trajectory, limit: LimitMap, curve: Tensor) -> Phases:
    t, w, m = path.t.cpu().double().numpy(), curve.numpy(), int(curve.argmin())
    beta = path.about["field"]["beta"]
    needs = limit.examine(path.cloud(0), beta=beta if beta > 0 else None)
    beta = beta if 0 < beta < math.inf else None
    doubts = [str(need) for need, before in zip(needs, limit.requires) if need.met is False and before.met is None]
    rounding = 8 * math.sqrt(torch.finfo(path.x.dtype).eps)  # W2^2 is a sum of squares of order one
    if beta is not None and limit.exit_rate and w[m] < rounding:
        reason = "only rounding breaks the symmetry of this distribution, and what follows is rounding too"
        doubts.append(f"W2 falls to {w[m]:.1g}, below {rounding:.1g}: {reason}")
    borders, note = _split(t, w, floor=0.0 if beta is None else limit.width(beta) or 0.0)
    rates: dict[str, tuple[float | None, ...]] = {}  # by phase: rate, error, predicted
    if "concentrating" in borders:
        predicted = None if limit.rates is None else limit.rates.decay()
        rates["concentrating"] = (*_fit_exponential(t[: m + 1], w[: m + 1], -1.0), predicted)
    if "terminal" in borders:
        # W2 saturates before its growth is exponential, unlike the offset of the clusters.
        growth = w if limit.exit_rate is None or limit.basis is None else _offset(path, limit.basis[:, 0], m)
        rates["terminal"] = (*_fit_exponential(t[m:], growth[m:], 1.0), limit.exit_rate)
    intervals = tuple(Phase(name, *border, *rates.get(name, ())) for name, border in borders.items())
    times = torch.from_numpy(t)
    return Phases(times, curve, times[m], curve[m], intervals, note, needs, tuple(doubts))


def _split(t: Array, w: Array, floor: float) -> tuple[dict[str, tuple[float, float]], str]:
    """The phases of a curve W2(t) that rests at `floor` or above, and why there is a metastable one or none."""
    begin, end, m = float(t[0]), float(t[-1]), int(w.argmin())
    if w[m] > FALL * w[0]:
        note = f"no concentration: W2 falls to {w[m] / w[0]:.2g} of its start, not to {FALL}"
        return {"spreading": (begin, end)}, note
    level, least = NEAR * max(w[m], floor), float(t[m])
    enter, leave = _crossing(t[m::-1], w[m::-1], level), _crossing(t[m:], w[m:], level)
    duration = REST * (enter - begin) / math.log(w[0] / level) if 0 < level < w[0] else 0.0
    note = f"W2 stays within 25% of its least value for {leave - enter:.3g}; a rest would last at least "
    note += f"{duration:.3g} (twice the time of a fall by a factor e)"
    borders = {"concentrating": (begin, enter), "metastable": (enter, leave), "terminal": (leave, end)}
    if leave <= enter or leave - enter < duration:
        note = f"no metastable phase: {note}"
        borders = {"concentrating": (begin, least), "terminal": (least, end if leave < end else least)}
    return {name: (start, stop) for name, (start, stop) in borders.items() if stop > start}, note


def _crossing(t: Array, w: Array, level: float) -> float:
    """The first time along t at which log w crosses the level from below, or the last time."""
    above = np.flatnonzero(w > level)
    if not len(above):
        return float(t[-1])
    i = above[0]
    share = math.log(level / w[i - 1]) / math.log(w[i] / w[i - 1]) if w[i - 1] > 0 else 1.0
    return float(t[i - 1] + share * (t[i] - t[i - 1]))


def _fit_exponential(t: Array, w: Array, sign: float) -> tuple[float | None, float | None]:
    """The slope of sign * log w and its standard error, where the curve is exponential; None if it is so nowhere.

    A stretch of at least 5 points and a change by a factor of e is exponential if the residuals of a line through log w
    are below 0.5% of its change, or explained by noise. The largest product of change and duration is fitted.
    """
    t, w = t[w > 0], w[w > 0]
    if len(t) < 5:
        return None, None
    y = sign * np.log(w)
    # Fourth differences of independent noise have 70 times its variance; those of a smooth bend are small.
    noise = 1.5 * np.median(np.abs(np.diff(y, 4))) / (0.6745 * math.sqrt(70))
    s, y = t - t.mean(), y - y.mean()
    sums = [np.concatenate([[0.0], np.cumsum(z)]) for z in (np.ones_like(s), s, y, s * s, s * y, y * y)]
    n, a, b, aa, ab, bb = (z[None, 1:] - z[:-1, None] for z in sums)  # over the points i, ..., j
    duration = s[None, :] - s[:, None]
    with np.errstate(all="ignore"):  # stretches of one point, and those with j < i
        spread, both = aa - a * a / n, ab - a * b / n
        slope = both / spread
        residual = np.clip(bb - b * b / n - slope * both, 0, None)
        change = slope * duration
        good = (n >= 5) & (np.sqrt(residual / n) <= 0.005 * change + noise) & (change >= 1)
    if not good.any():
        return None, None
    best = np.unravel_index(np.where(good, change * duration, 0.0).argmax(), change.shape)
    return float(slope[best]), float(np.sqrt(residual[best] / (n[best] - 2) / spread[best]))


def _offset(path: Trajectory, e: Tensor, m: int) -> Array:
    """The tangent of the angle between +-e and the larger of the clusters there (+e of two equal ones) at t[m], (T,).

    The centre of the cluster is the median of its tokens, which ignores those that linger elsewhere.
    """
    x, p, e = path.x, path.cloud(0).probabilities, e.to(path.x)
    side = (x[m] @ e).sign()
    chosen = (side == (1 if float((p * side).sum()) >= 0 else -1)) & (p > 0)
    x, p = x[:, chosen], p[chosen] / p[chosen].sum()
    across = torch.linalg.svd(e[None])[2][1:].mT
    tangents, order = (x @ across / (x @ e)[..., None]).sort(dim=1)  # (T, n, d - 1)
    middle = (p[order].cumsum(1) < 0.5).sum(1, keepdim=True).clamp(max=len(p) - 1)
    return tangents.gather(1, middle).norm(dim=(1, 2)).cpu().double().numpy()


class OverSeeds(NamedTuple):
    """The mean of a number over seeds, and the standard error of this mean."""

    mean: float
    error: float


def phases_over_seeds(path: Trajectory, limit: LimitMap) -> dict[str, OverSeeds]:
    """Means over a batch of paths (T, seeds, n, d): "t_min", "min_w2", and fitted rates by the name of their phase.

    Example:
        >>> from attn_flow import Attention, Sphere, flow, limit
        >>> attention = Attention.from_matrices(torch.eye(2), torch.diag(torch.tensor([2.0, 1.0])), beta=10.0)
        >>> x0 = Sphere().uniform(150, 2, generator=torch.Generator().manual_seed(0)).reshape(3, 50, 2)
        >>> result = phases_over_seeds(flow(attention, x0, torch.linspace(0, 8, 17), h=0.25), limit(attention))
        >>> result["min_w2"].error < result["min_w2"].mean
        True
    """
    if path.x.ndim != 4 or path.x.shape[1] < 2:
        raise ValueError(f"path.x has shape {tuple(path.x.shape)}, expected (T, seeds, n, d) with two or more seeds.")
    batch = phases(path, limit)
    numbers: dict[str, list[float]] = {"t_min": batch.t_min.tolist(), "min_w2": batch.min_w2.tolist()}
    for phase in (phase for one in batch.elements for phase in one.intervals):
        if phase.rate is not None:
            numbers.setdefault(phase.name, []).append(phase.rate)
    error = lambda z: float(np.std(z, ddof=1)) / math.sqrt(len(z))
    return {name: OverSeeds(float(np.mean(z)), error(z)) for name, z in numbers.items() if len(z) > 1}
