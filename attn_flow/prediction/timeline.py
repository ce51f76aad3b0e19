"""Phases of one path: when it concentrates, rests and leaves, with rates fitted and predicted.

Low-temperature attention first falls towards P_# mu_0 (rate c_2), stays there for times of order log(beta), and for
finite beta is taken over by V (arXiv 2605.10931; THEORY 1). The phases are read off one curve, W2(mu_t, P_# mu_0).
"""

from __future__ import annotations

import math
import warnings
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from attn_flow.base import checks
from attn_flow.dynamics.trajectory import Trajectory
from attn_flow.observe.quantities import alignment
from attn_flow.prediction.finite_n import Resolution, resolution
from attn_flow.prediction.limit_map import LimitMap
from attn_flow.prediction.requirements import Requirement
from attn_flow.prediction.zero_temperature import filled
from attn_flow.transport.distances import Limits, solve

FALL = 0.75  # a path concentrates if W2 falls at least to this part of its start
PLATEAU = 2.0  # and is metastable while W2 is within this factor of its minimum


class RoundingWarning(UserWarning):
    """The path came closer to its limit than rounding can hold: what breaks the symmetry of the law is rounding."""


@dataclass(frozen=True)
class Phase:
    """One interval, and the slope of log W2 in it; None where there is nothing to fit or to compare."""

    phase: str  # "concentrating", "metastable" or "terminal"; "spreading" for a path that never concentrates
    start: float
    end: float
    rate: float | None = None  # decay of W2 where it concentrates, growth elsewhere
    error: float | None = None  # standard error of the fit
    predicted: float | None = None


@dataclass(frozen=True, eq=False, repr=False)
class Phases:
    """The phases of one path, and the curve they were read off."""

    t: list[float]
    w2: list[float]
    t_min: float
    min_w2: float
    phases: tuple[Phase, ...]
    settling: Phase | None  # the final approach to V's leading subspace
    resolution: Resolution | None  # can these tokens follow the mean-field prediction at this beta
    requires: tuple[Requirement, ...] = ()  # what the prediction assumes, checked on the first cloud
    rounding: float | None = None  # the W2 below which rounding decides, where the path fell below it

    @property
    def doubts(self) -> tuple[str, ...]:
        """Why the prediction need not hold here: assumptions the cloud does not meet, and W2 below rounding."""
        found = tuple(str(need) for need in self.requires if need.met is False)
        if self.rounding is None:
            return found
        text = f"W2 falls to {self.min_w2:.1g}, below {self.rounding:.1g}: only rounding breaks the symmetry of this"
        return (*found, f"{text} law, and what follows is rounding too")

    def __repr__(self) -> str:
        words = ", ".join(f"{p.phase} [{p.start:.3g}, {p.end:.3g}]" for p in self.phases)
        return f"Phases({words}; min W2 {self.min_w2:.3g} at t = {self.t_min:.3g}, {len(self.doubts)} doubts)"

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON."""
        found = {"t": self.t, "w2": self.w2, "t_min": self.t_min, "min_w2": self.min_w2}
        return found | {
            "phases": [asdict(phase) for phase in self.phases],
            "settling": None if self.settling is None else asdict(self.settling),
            "resolution": None if self.resolution is None else self.resolution.verdict,
            "requires": [asdict(need) for need in self.requires],
            "doubts": list(self.doubts),
        }


def w2_curve(path: Trajectory, limit: LimitMap) -> Tensor:
    """W2(mu_t, P_# mu_0) at every time of a path, (T, ...); against the moving push-forward where E rotates."""
    x0 = filled(path.x[0], path.mask)
    options: Any = {"weights_x": path.weights, "weights_y": path.weights, "mask_x": path.mask, "mask_y": path.mask}
    target = None if limit.frequencies else limit.push_forward(x0)
    if target is not None and limit.case == "fixed" and limit.dimension == 1:
        # Two atoms +-e: their masses, and the small problem, in place of n copies of each.
        side = (target @ limit.basis[:, 0].to(target)).sign()  # type: ignore[index]
        right = (path.cloud(0).probabilities * (side > 0)).sum(-1)
        if bool(((right > 0) & (right < 1)).all()):
            e = target[..., :1, :] * side[..., :1, None]
            target = torch.cat([e, -e], dim=-2)
            options |= {"weights_y": torch.stack([right, 1 - right], -1), "mask_y": None, "method": "simplex"}
    if target is None:
        target = limit.moving_push_forward(x0, path.t - path.t[0])
    # Along a path each plan starts from the one before, which pays from a few hundred tokens on.
    return solve(path.x, target, **options, limits=Limits(dense=300)).distance


def path_alone(path: Trajectory) -> None:
    """Refuse what is no path."""
    if not isinstance(path, Trajectory):
        raise ValueError(f"path is a {type(path).__name__}, expected a Trajectory, as flow gives it.")


def phases(path: Trajectory, limit: LimitMap, *, w2: ArrayLike | Tensor | None = None, warn: bool = True) -> Phases:
    """When a path concentrates, rests and leaves, with rates fitted and predicted.

    Args:
        path: one path (T, n, d), T >= 3, as `flow` returns it. For a batch, call it on its elements.
        limit: the prediction, `limit(attention)`.
        w2: W2(mu_t, P_# mu_0) (T,) if it is known already; otherwise it is computed.
        warn: warn where the tokens cannot resolve the prediction (`ResolutionWarning`), or where W2 falls below what
            rounding can hold.

    Returns:
        `Phases`: the intervals with their rates, the minimum, the settling on V's leading direction, whether the
        requirements of the prediction are met by the path's first cloud, and doubts in words.

    Example:
        >>> from attn_flow import Attention, flow, limit
        >>> from attn_flow.measures.quadrature import circle
        >>> G, V = torch.diag(torch.tensor([3.0, 1.0])).double(), torch.diag(torch.tensor([1.0, 2.0])).double()
        >>> attention = Attention.from_matrices(G, V, beta=30.0)
        >>> cloud = circle(100, lambda theta: torch.exp(torch.cos(theta - 1)))
        >>> path = flow(attention, cloud.x, torch.linspace(0, 20, 41), weights=cloud.weights, h=0.1)
        >>> [phase.phase for phase in phases(path, limit(attention)).phases]
        ['concentrating', 'metastable', 'terminal']
    """
    path_alone(path)
    if path.x.ndim != 3:
        raise ValueError(
            f"path.x has shape {tuple(path.x.shape)}, expected one path (T, n, d); take its elements one by one, "
            "for example Trajectory(path.t, path.x[:, b])."
        )
    checks.times(path.t)
    if not isinstance(limit, LimitMap):
        raise ValueError(f"limit is a {type(limit).__name__}, expected a LimitMap; pass limit(attention).")
    curve = w2_curve(path, limit) if w2 is None else w2
    try:
        w = np.asarray(curve.detach().cpu() if isinstance(curve, Tensor) else curve, dtype=np.float64)
    except (TypeError, ValueError):
        raise ValueError(f"w2 is a {type(w2).__name__}, expected W2 at every time of the path, (T,).") from None
    t = path.t.detach().cpu().double().numpy()
    exit_rate = limit.exit_rate if limit.exit_rate is None or math.isfinite(limit.exit_rate) else None
    predicted = {"concentrating": limit.rate_w2, "metastable": 0.0, "terminal": exit_rate}
    found = split(t, w, predicted, _tangent(path, limit))
    beta = path.about.get("attention", {}).get("beta")
    finite = float(beta) if isinstance(beta, (int, float)) and beta > 0 else None
    # W2^2 is a sum of squares of order one; at beta = inf and for clusters that stay it may fall to nothing.
    floor = 8 * math.sqrt(torch.finfo(path.x.dtype).eps)
    lost = finite is not None and bool(limit.exit_rate) and float(w.min()) < floor
    result = Phases(
        t=t.tolist(),
        w2=w.tolist(),
        t_min=float(t[w.argmin()]),
        min_w2=float(w.min()),
        phases=found,
        settling=_settling(path, limit, t) if found[-1].phase == "terminal" else None,
        resolution=_resolution(path, limit, warn, finite),
        requires=limit.examine(path.x[0], weights=path.weights, mask=path.mask, beta=finite),
        rounding=floor if lost else None,
    )
    if warn and lost:
        warnings.warn(result.doubts[-1], RoundingWarning, stacklevel=2)
    return result


def split(
    t: ArrayLike,
    w2: ArrayLike,
    predicted: dict[str, float | None] | None = None,
    leaving: ArrayLike | None = None,
) -> tuple[Phase, ...]:
    """Phases of a curve W2(t): it concentrates until W2 is within PLATEAU of its minimum, is metastable while it stays
    so, terminal after. A curve that never falls to FALL of its start is one spreading phase.

    leaving (T,): what grows exponentially while clusters leave, by default W2 (which saturates; a tangent does not).
    """
    t, w = np.asarray(t, dtype=np.float64), np.asarray(w2, dtype=np.float64)
    if t.ndim != 1 or t.shape != w.shape or len(t) < 3:
        raise ValueError(f"t has shape {t.shape} and w2 {w.shape}, expected the same (T,) with at least 3 times.")
    if not (np.isfinite(w).all() and (w >= 0).all()):
        raise ValueError("w2 has NaN, infinite or negative entries, expected distances.")
    known = predicted or {}
    m = int(w.argmin())
    if w[m] > FALL * w[0]:
        return (Phase("spreading", float(t[0]), float(t[-1])),)
    level = PLATEAU * w[m]
    enters = _crossing(t, w, level, range(m, 0, -1))
    leaves = _crossing(t, w, level, range(m, len(t) - 1))
    enters, leaves = float(t[0]) if enters is None else enters, float(t[-1]) if leaves is None else leaves
    found = []
    if enters > t[0]:
        # Straight part of the fall: past the first transient, before the floor bends it.
        falling = (t <= enters) & (w >= min(2 * level, 0.5 * w[0]))
        late = falling & (w <= math.sqrt(w[0] * level))
        rate, error = _slope(t, w, late if late.sum() > 4 else falling & (w <= 0.7 * w[0]), -1.0)
        found.append(Phase("concentrating", float(t[0]), enters, rate, error, known.get("concentrating")))
    rate, error = _slope(t, w, (t >= enters) & (t <= leaves), 1.0)
    found.append(Phase("metastable", enters, leaves, rate, error, known.get("metastable")))
    if leaves < t[-1]:
        inside = (t >= leaves) & (w <= 0.3 * w[t >= leaves].max())
        if leaving is not None:
            # A tangent: from 27 to 88 degrees, where the clusters outweigh what was left behind elsewhere.
            inside = (t >= leaves) & (np.asarray(leaving) >= 0.5) & (np.asarray(leaving) <= 30)
        rate, error = _slope(t, w if leaving is None else np.asarray(leaving), inside, 1.0)
        found.append(Phase("terminal", leaves, float(t[-1]), rate, error, known.get("terminal")))
    return tuple(found)


def _tangent(path: Trajectory, limit: LimitMap) -> NDArray | None:
    """tan of the L2 angle to E, which grows at exactly v_top - v_1 under x' = P_x V x once clusters are points."""
    if limit.basis is None:
        return None
    inside = (
        (alignment(filled(path.x, path.mask), limit.basis) * path.cloud(0).probabilities)
        .sum(-1)
        .detach()
        .cpu()
        .double()
        .numpy()
    )
    return np.sqrt(np.clip(1 - inside, 0, None) / np.clip(inside, 1e-8, None))  # 0 to 1e4, beyond rounding


def _crossing(t: NDArray, w: NDArray, level: float, order: range) -> float | None:
    """Where log w crosses the level first, going from the minimum in the given order of intervals."""
    for i in order:
        j = i + (1 if order.step > 0 else -1)
        if w[j] > level:
            share = math.log(level / w[i]) / math.log(w[j] / w[i]) if w[i] > 0 else 1.0
            return float(t[i] + share * (t[j] - t[i]))
    return None


def _slope(t: NDArray, w: NDArray, inside: NDArray, sign: float) -> tuple[float | None, float | None]:
    """Least-squares slope of sign * log w, with its standard error; None with fewer than 3 points."""
    inside = inside & (w > 0)
    if inside.sum() < 3:
        return None, None
    s, y = t[inside] - t[inside].mean(), sign * np.log(w[inside])
    slope = float(s @ y / (s @ s))
    residual = y - y.mean() - slope * s
    return slope, float(np.sqrt(residual @ residual / (len(s) - 2) / (s @ s)))


def _settling(path: Trajectory, limit: LimitMap, t: NDArray) -> Phase | None:
    """The offset of what has gathered at V's leading direction +-e, against v_top - v_next.

    A cluster that sees only itself has y_i' = V_ m - v_top y_i: its mean m decays at v_top - v_next, differences of its
    tokens at v_top. So the mean of each side is fitted, not the spread: two clusters that arrive from both
    sides and merge would show v_top. Where V leads by more than one direction there is no such mean.
    """
    if limit.terminal_basis is None or limit.terminal_rate is None or limit.terminal_basis.shape[1] > 1:
        return None
    e, p = limit.terminal_basis.to(path.x)[:, 0], path.cloud(0).probabilities
    side = torch.stack([path.x[-1] @ e >= 0, path.x[-1] @ e < 0]).to(path.x) * p  # (2, n)
    outside = path.x - (path.x @ e)[..., None] * e
    offset = torch.einsum("sn,tnd->tsd", side, outside) / path.x[0].norm(dim=-1).mean()
    mass = side.sum(-1).clamp_min(torch.finfo(path.x.dtype).tiny)
    w = (offset.square().sum(-1) / mass).sum(-1).sqrt().detach().cpu().double().numpy()
    spread = (p * outside.square().sum(-1)).sum(-1).sqrt().detach().cpu().double().numpy()
    # Small enough to be linear, and above the rounding of a mean.
    inside = (np.arange(len(t)) > spread.argmax()) & (spread < 0.1) & (w > 1e3 * torch.finfo(path.x.dtype).eps)
    rate, error = _slope(t, w, inside, -1.0)
    if rate is None:
        return None
    return Phase("settling", float(t[inside][0]), float(t[inside][-1]), rate, error, limit.terminal_rate)


def _resolution(path: Trajectory, limit: LimitMap, warn: bool, beta: float | None) -> Resolution | None:
    if beta is None:
        return None
    cloud = {"weights": path.weights, "mask": path.mask}
    return resolution(limit.attention.to(path.x.dtype), path.x[0], **cloud, beta=beta, warn=warn)
