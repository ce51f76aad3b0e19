"""W_p of one pair of clouds by an exact solver: coincident points, choice of the solver, value and error bound.

A solver takes points x (n, d), y (m, d) with positive probabilities a (n,), b (m,) and a `GroundCost`, and returns a
`Plan`. The distance is the cost of that fixed plan, whose gradient in x and y is the gradient of W_p by the envelope
theorem; the gradient in the masses is given by the dual potentials.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch

from attn_flow.transport.assignment import assignment, is_uniform
from attn_flow.transport.ground_cost import GroundCost
from attn_flow.transport.network_simplex import has_pot, simplex
from attn_flow.transport.one_dimension import circle, line
from attn_flow.transport.pair import Pair, Solution
from attn_flow.transport.plan import Array, Index, Plan, refine
from attn_flow.transport.shortlist import shortlist

SOLVERS: dict[str, Callable[[Array, Array, Array, Array, GroundCost], Plan]] = {
    "line": line,
    "circle": circle,
    "assignment": assignment,
    "simplex": simplex,
    "shortlist": shortlist,
}
# Up to this many points in each cloud "auto" takes a dense solver; beyond, the shortlist is faster.
SHORTLIST_FROM = 1_000
# Points closer than this part of the size of the clouds are merged, where at most MERGED_PART of all pairs remain.
COINCIDENT, MERGED_PART = 1e-10, 0.25


def exact_distance(pair: Pair, method: str, with_potentials: bool) -> Solution:
    """W_p of a pair on the CPU with the error that was proved, by a method in `SOLVERS` or the fastest of them."""
    pair, unit = pair.scaled()
    method, plan, moved = _solve(pair, method, with_potentials or pair.has_mass_gradient)
    value = pair.cost_of(plan)
    # The distance and the cost of the plan both change by at most `moved` when points are merged.
    error = _distance_error(value.item(), plan.gap, pair.cost.p) + 2 * moved
    potentials = None
    if with_potentials and plan.v is not None:
        cost_unit = torch.tensor(unit, dtype=torch.float64) ** pair.cost.p  # infinite where a float would overflow
        u, v = pair.dual_potentials(plan)
        potentials = u * cost_unit, v * cost_unit
    return Solution(value * unit, error * unit, method, plan, potentials)


def _solve(pair: Pair, method: str, needs_potentials: bool) -> tuple[str, Plan, float]:
    """The name of the solver, its plan between all points, and how far points were moved to merge them."""
    x, a, y, b = pair.arrays()
    cost, d = pair.cost, x.shape[1]
    if method == "auto" and d == 1 and cost.name == "euclidean":
        method = "line"
    elif method == "auto" and d == 2 and cost.name == "geodesic" and not pair.has_mass_gradient:
        method = "circle"
    rows, columns = np.flatnonzero(a), np.flatnonzero(b)  # solvers see only points with mass
    x, a, y, b = x[rows], a[rows], y[columns], b[columns]
    if method in ("auto", "shortlist") and has_pot():  # merged points have unequal masses, which need POT
        cell = COINCIDENT * pair.size() or 1.0
        (first_x, group_x), (first_y, group_y) = _coincident(x, cell), _coincident(y, cell)
    else:
        first_x, first_y = group_x, group_y = np.arange(len(x)), np.arange(len(y))
    if len(first_x) * len(first_y) > MERGED_PART * len(x) * len(y):
        method = _fastest_solver(a, b, needs_potentials) if method == "auto" else method
        plan, moved = SOLVERS[method](x, a, y, b, cost), 0.0
    else:
        masses_x: Array = np.bincount(group_x, a).astype(np.float64)
        masses_y: Array = np.bincount(group_y, b).astype(np.float64)
        method = _fastest_solver(masses_x, masses_y, True) if method == "auto" else method
        coarse = SOLVERS[method](x[first_x], masses_x, y[first_y], masses_y, cost)
        plan = Plan(*refine(coarse, a, group_x, b, group_y), coarse.gap, coarse.potential[group_y])
        moves = ((x, x[first_x][group_x]), (y, y[first_y][group_y]))
        moved = sum(float(cost.distance(*map(torch.from_numpy, move)).max()) for move in moves)
    v = None
    if plan.v is not None:
        v = np.full(len(pair.y), -np.inf)
        v[columns] = plan.v
    return method, replace(plan, i=rows[plan.i], j=columns[plan.j], v=v), moved


def _coincident(x: Array, cell: float) -> tuple[Index, Index]:
    """Groups of points x (n, d) in one cell of a grid: one point of each, (k,), and the group of every point, (n,)."""
    _, first, group = np.unique(np.round(x / cell), axis=0, return_index=True, return_inverse=True)
    return first, group.reshape(-1)


def _fastest_solver(a: Array, b: Array, needs_potentials: bool) -> str:
    """The fastest solver in any dimension, for points with masses a (n,) and b (m,)."""
    if has_pot() and len(a) * len(b) > SHORTLIST_FROM**2:
        return "shortlist"
    return "assignment" if is_uniform(a, b) and not (needs_potentials and has_pot()) else "simplex"


def _distance_error(value: float, gap: float, p: float) -> float:
    """W - (W^p - gap)^{1/p}: a gap of the cost as an error of the distance, without cancellation for small gaps."""
    if gap == 0:
        return 0.0
    part = gap / value**p if value > 0 else 1.0
    return value * -math.expm1(math.log1p(-part) / p) if part < 1 else gap ** (1 / p)
