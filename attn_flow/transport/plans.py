"""W_p of one pair by an exact solver: which one, its plan, the cost of the fixed plan, and the error it leaves.

Every exact solver finds the plan without gradients; the distance is then the cost of that fixed plan, whose gradient
in x and y is the gradient of W_p (envelope theorem).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from attn_flow.base import checks
from attn_flow.transport.atoms import merged_clouds
from attn_flow.transport.candidates import TREE_DIMENSION, nearest, shortlist
from attn_flow.transport.coupling import SOLVERS, Array, Ground, Plan, leak, potential
from attn_flow.transport.entropic import certified
from attn_flow.transport.scales import extent_of

# Points closer than this part of the clouds' extent are one atom; the distance moved is part of the error.
COINCIDENT = 1e-10
# An error below this part of the extent is rounding: costs are sums of p-th powers in float64.
RESOLUTION = 1e-6
# Rounding of a cost of size one: sums of thousands of terms in float64.
ROUNDING = 1e-13
# Mass by which a plan of the pair before may miss the masses of this one.
FEASIBLE = 1e-12


@dataclass(frozen=True)
class Limits:
    """What "auto" takes on by itself; a solver asked for by name is not held to it.

    >>> from attn_flow.transport import solve
    >>> x = torch.randn(50, 2, generator=torch.Generator().manual_seed(0))
    >>> solve(x, x + 1, limits=Limits(dense=10)).method
    'shortlist'
    """

    dense: int = 1_000  # points a side up to which the dense solvers are fastest, in low dimension
    dense_high_dimension: int = 3_000  # and beyond a k-d tree's reach
    shortlist: int = 100_000  # points a side up to which it is affordable: minutes and a few hundred megabytes
    sinkhorn_seconds: float = 1e-6  # for every pair of points: schedule and interval of one blur, float64 on the CPU
    patience: float = 900.0  # seconds taken without being asked for

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            checks.number(name, value)
            if not value >= 0:
                raise ValueError(f"{name} = {value}, expected a number of at least 0.")


def solve_pair(
    x: Tensor,
    a: Tensor,
    y: Tensor,
    b: Tensor,
    ground: Ground,
    method: str,
    rtol: float,
    merge_tol: float | None,
    start: Plan | None,
    limits: Limits,
) -> tuple[Tensor, float, str, Plan | None]:
    """W_p of one pair, its error bound, the solver's name and its plan, of atoms where points were merged."""
    # Of nine tenths of the mass: a few far points must not set what counts as coincident, or as rounding.
    extent = extent_of(torch.cat([x, y]).detach(), torch.cat([a, b]).detach(), 0.9)
    mass_gradient = a.requires_grad or b.requires_grad
    # Equal points tie in every shortlist, so it too starts from atoms.
    if merge_tol is not None or (method in ("auto", "shortlist") and not mass_gradient):
        merged = merged_clouds(
            x, a, y, b, ground, COINCIDENT * extent if merge_tol is None else merge_tol, limits.dense
        )
        name = method if method != "auto" or merged is None else _choose(*merged[:4], ground, limits)
        if merged is not None and name != "beyond":
            distance, error, plan = _exact(*merged[:4], ground, name, start)
            error += merged[4]
            if good_enough(distance, error, rtol, extent, ground.p):
                return distance, error, f"merged {name}", plan
            if merge_tol is not None:
                raise ValueError(
                    f"merging within merge_tol = {merge_tol:.3g} gives {distance.item():.6g} with an error up to "
                    f"{error:.3g}, more than rtol = {rtol:g} of it; lower merge_tol."
                )
    name = _choose(x, a, y, b, ground, limits) if method == "auto" else method
    if name == "beyond":
        return *_beyond(x, a, y, b, ground, rtol, extent, limits), None
    distance, error, plan = _exact(x, a, y, b, ground, name, start)
    if not good_enough(distance, error, rtol, extent, ground.p):
        raise ValueError(
            f"method {name!r} proved only {distance.item():.6g} with an error up to {error:.3g}, more than "
            f"rtol = {rtol:g} of it; raise rtol, leave out points far from all others, or use method='assignment' or "
            "'simplex'."
        )
    return distance, error, name, plan


def _choose(x: Tensor, a: Tensor, y: Tensor, b: Tensor, ground: Ground, limits: Limits) -> str:
    """The cheapest exact solver for these sizes, or "beyond"."""
    (n, d), m = x.shape, len(y)
    mass_gradient = a.requires_grad or b.requires_grad
    if d == 1 and ground.cost == "euclidean":
        return "line"
    if d == 2 and ground.cost == "geodesic" and not mass_gradient:
        return "circle"
    if n * m <= (limits.dense if d <= TREE_DIMENSION else limits.dense_high_dimension) ** 2:
        uniform = n == m and all(float(w.max() - w.min()) <= 1e-12 / n for w in (a.detach(), b.detach()))
        return "assignment" if uniform and not mass_gradient else "simplex"
    return "shortlist" if max(n, m) <= limits.shortlist else "beyond"


def _beyond(
    x: Tensor, a: Tensor, y: Tensor, b: Tensor, ground: Ground, rtol: float, extent: float, limits: Limits
) -> tuple[Tensor, float, str]:
    """More points than the shortlist affords: merge as far as rtol allows, else Sinkhorn with its interval."""
    tol = rtol * extent / 8
    for _ in range(2):
        merged = merged_clouds(x, a, y, b, ground, tol, limits.dense)
        name = "beyond" if merged is None else _choose(*merged[:4], ground, limits)
        if merged is None or name == "beyond":
            break
        distance, error, _ = _exact(*merged[:4], ground, name)
        error += merged[4]
        if good_enough(distance, error, rtol, extent, ground.p):
            return distance, error, f"merged {name}"
        tol = rtol * distance.item() / 8
    if ground != Ground(2.0, "euclidean"):
        raise ValueError(
            f"clouds of {len(x)} and {len(y)} points, p = {ground.p:g}, {ground.cost} cost: beyond "
            f"{limits.shortlist} points only the Euclidean p = 2 distance is certified. "
            "Subsample, or use method='sliced'."
        )
    seconds = limits.sinkhorn_seconds * len(x) * len(y)
    if seconds > limits.patience:
        raise ValueError(
            f"clouds of {len(x)} and {len(y)} points would take about {seconds / 3600:.1f} hours of method='sinkhorn'; "
            "subsample, merge near points by merge_tol, use method='sliced', or ask for method='sinkhorn' or "
            "'shortlist' by name."
        )
    return (*certified(x, a, y, b, ground, rtol, None, 0.9, "sinkhorn", torch.float64), "sinkhorn")


def _exact(
    x: Tensor, a: Tensor, y: Tensor, b: Tensor, ground: Ground, method: str, start: Plan | None = None
) -> tuple[Tensor, float, Plan]:
    """The cost of the solver's plan, as a distance, the error that its gap allows, and the plan."""
    plan = plan_of(x, a, y, b, ground, method, start)
    distance = plan_cost(x, a, y, b, ground, plan)
    return distance, gap_in_distance(distance.item(), plan.gap, ground.p), plan


def good_enough(distance: Tensor, error: float, rtol: float, extent: float, p: float) -> bool:
    """Within rtol, or no more than rounding, which costs of size extent^p turn into a distance by their p-th root."""
    return error <= max(rtol * distance.item(), RESOLUTION * extent, ROUNDING ** (1 / p) * extent)


def gap_in_distance(distance: float, gap: float, p: float) -> float:
    """W - (W^p - gap)^{1/p}: a gap of the cost as an error of the distance, without cancellation for small gaps."""
    if gap == 0:
        return 0.0
    share = gap / distance**p if distance > 0 else 1.0
    return distance * -math.expm1(math.log1p(-share) / p) if share < 1 else gap ** (1 / p)


def plan_of(x: Tensor, a: Tensor, y: Tensor, b: Tensor, ground: Ground, method: str, start: Plan | None = None) -> Plan:
    """The solver's plan on the points that carry mass, with indices of all points."""
    X, A, Y, B = (z.detach().cpu().numpy() for z in (x, a, y, b))
    i, j = np.flatnonzero(A), np.flatnonzero(B)
    centre = Y.mean(0) if ground.cost == "euclidean" else 0.0
    both = np.concatenate([X, Y])
    # Coordinates of order one: solvers stop at absolute tolerances. W_p scales with them.
    unit = float(np.ptp(both, 0).max()) if ground.cost == "euclidean" else 1.0
    unit = unit or 1.0
    scaled = (X[i] - centre) / unit, A[i], (Y[j] - centre) / unit, B[j]
    if method == "shortlist":
        plan = shortlist(*scaled, ground, start=_feasible(start, A, B, unit**ground.p))
    else:
        plan = SOLVERS[method](*scaled, ground)
    v = None
    if plan.v is not None:
        v = np.full(len(Y), -np.inf)
        v[j] = plan.v * unit**ground.p
    return Plan(i[plan.i], j[plan.j], plan.mass, plan.gap * unit**ground.p, v)


def in_units(before: tuple[Plan, float] | None, unit: float, p: float) -> Plan | None:
    """The plan of the pair before, its potential in the units of this one."""
    if before is None:
        return None
    plan, other = before
    return plan if plan.v is None else replace(plan, v=plan.v * (other / unit) ** p)


def _feasible(start: Plan | None, A: Array, B: Array, unit: float) -> Plan | None:
    """The plan in costs of size `unit`, if it moves A to B: it is then feasible whatever the points are."""
    if start is None or start.v is None or len(start.v) != len(B) or start.i.max() >= len(A):
        return None
    moves = (A > 0).all() and (B > 0).all() and leak(start, A, B) < FEASIBLE
    return replace(start, v=start.v / unit) if moves else None


def plan_cost(x: Tensor, a: Tensor, y: Tensor, b: Tensor, ground: Ground, plan: Plan) -> Tensor:
    """(sum_k mass_k c(x_i, y_j)^p)^{1/p} of the fixed plan: its gradients in x, y, and in a, b by the potentials."""
    i, j, mass = (torch.from_numpy(z).to(x.device) for z in (plan.i, plan.j, plan.mass))
    c = ground.distance(x[i], y[j])
    top = c.detach().max()
    # The p-th root has no derivative at zero; the distance has the subgradient zero there, as c itself has.
    if top == 0:
        return (mass * c).sum()
    total = (mass * (c / top) ** ground.p).sum()
    if a.requires_grad or b.requires_grad:
        u, v = (torch.from_numpy(z).to(x) for z in _potentials(x, y, ground, plan))
        total = total + ((a - a.detach()) @ u + (b - b.detach()) @ v) / top**ground.p
    return top * total ** (1 / ground.p)


def _potentials(x: Tensor, y: Tensor, ground: Ground, plan: Plan) -> tuple[Array, Array]:
    """u_i = min_j c_ij - v_j and v_j = min_i c_ij - u_i: dW_p^p/da and dW_p^p/db, at points without mass too."""
    X, Y = x.detach().cpu().numpy(), y.detach().cpu().numpy()
    v = potential(plan)
    known = np.isfinite(v)
    u = nearest(X, Y[known], v[known], 1, ground)[2]
    return u, nearest(Y, X, u, 1, ground)[2]
