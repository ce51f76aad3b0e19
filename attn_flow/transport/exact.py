"""W_p of one pair of clouds by an exact solver: coincident points, choice of the solver, value and error bound.

A solver takes points x (n, d), y (m, d) with positive probabilities a (n,), b (m,) and a `GroundCost`, and returns a
`Plan`. The distance is the cost of that fixed plan, whose gradient in x and y is the gradient of W_p by the envelope
theorem; the gradient in the masses is given by the dual potentials. A new solver is a function in a file of its own, a
row in `SOLVERS` and a line in the docstring of `solve`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from attn_flow.transport.assignment import assignment, dual_potential, is_uniform
from attn_flow.transport.ground_cost import MAX_ENTRIES, GroundCost, c_transform
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
DENSE_POINTS = 1_000
# Up to this many points "auto" takes the shortlist, in minutes and a few hundred megabytes.
MAX_POINTS = 100_000
# Points closer than this part of the size of the clouds are merged, where at most MERGED_PART of all pairs remain.
COINCIDENT, MERGED_PART = 1e-10, 0.25


def exact_distance(pair: Pair, method: str, with_potentials: bool) -> Solution:
    """W_p of a pair with the error that was proved.

    Args:
        pair: the two clouds, on the CPU.
        method: a name in `SOLVERS`, or "auto" for the fastest of them.
        with_potentials: whether to compute dual potentials.
    """
    pair, unit = pair.scaled()
    p, d = pair.cost.p, pair.x.shape[1]
    if method == "auto" and d == 1 and pair.cost.name == "euclidean":
        method = "line"
    elif method == "auto" and d == 2 and pair.cost.name == "geodesic" and not pair.has_mass_gradient:
        method = "circle"
    name, plan, moved = _solve_merged(pair, method, with_potentials or pair.has_mass_gradient)
    value = plan_cost(pair, plan)
    # The distance and the cost of the plan both change by at most `moved` when points are merged.
    error = _distance_error(value.item(), plan.gap, p) + 2 * moved
    potentials = None
    if with_potentials and plan.v is not None:
        u, v = (torch.from_numpy(z) for z in dual_potentials(pair, plan))
        cost_unit = torch.tensor(unit, dtype=torch.float64) ** p  # infinite where a number would raise OverflowError
        potentials = u * cost_unit, v * cost_unit
    return Solution(value * unit, error * unit, name, plan, potentials)


def _solve_merged(pair: Pair, method: str, with_potentials: bool) -> tuple[str, Plan, float]:
    """The name of the solver, its plan between all points, and how far points were moved to merge them."""
    x, a, y, b = pair.arrays()
    rows, columns = np.flatnonzero(a), np.flatnonzero(b)  # solvers see only points with mass
    x, a, y, b = x[rows], a[rows], y[columns], b[columns]
    group_x, group_y = np.arange(len(x)), np.arange(len(y))
    if method in ("auto", "shortlist"):
        cell = COINCIDENT * pair.size() or 1.0
        group_x, group_y = _grid_cells(x, cell), _grid_cells(y, cell)
    moved = 0.0
    pairs = (1 + int(group_x.max())) * (1 + int(group_y.max()))
    if pairs <= MERGED_PART * len(x) * len(y) and has_pot():  # merged points have unequal masses
        first_x, first_y = (np.unique(group, return_index=True)[1] for group in (group_x, group_y))
        masses_x: Array = np.bincount(group_x, a).astype(np.float64)
        masses_y: Array = np.bincount(group_y, b).astype(np.float64)
        name, coarse = _solve(x[first_x], masses_x, y[first_y], masses_y, pair.cost, method, with_potentials)
        i, j, mass = refine(coarse, a, group_x, b, group_y)
        plan = Plan(i, j, mass, coarse.gap, None if coarse.v is None else coarse.v[group_y])
        for z, merged in ((x, x[first_x][group_x]), (y, y[first_y][group_y])):
            moved += float(pair.cost.distance(torch.from_numpy(z), torch.from_numpy(merged)).max())
        name = f"merged {name}"
    else:
        name, plan = _solve(x, a, y, b, pair.cost, method, with_potentials)
    v = None
    if plan.v is not None:
        v = np.full(len(pair.y), -np.inf)
        v[columns] = plan.v
    return name, replace(plan, i=rows[plan.i], j=columns[plan.j], v=v), moved


def _grid_cells(x: Array, cell: float) -> Index:
    """Labels (n,) of the cells of a grid that the points lie in."""
    return np.unique(np.round(x / cell), axis=0, return_inverse=True)[1].reshape(-1)


def _solve(
    x: Array, a: Array, y: Array, b: Array, cost: GroundCost, method: str, with_potentials: bool
) -> tuple[str, Plan]:
    """The name of the solver and its plan."""
    if method == "auto":
        method = _fastest_solver(a, b)
    plan = SOLVERS[method](x, a, y, b, cost)
    if with_potentials and method == "assignment":
        plan = replace(plan, v=dual_potential(x, y, plan, cost))
    return method, plan


def _fastest_solver(a: Array, b: Array) -> str:
    """The fastest solver in any dimension, for points with masses a (n,) and b (m,)."""
    n, m = len(a), len(b)
    # The shortlist needs POT.
    is_dense = n * m <= (DENSE_POINTS**2 if has_pot() else MAX_ENTRIES)
    if not is_dense and max(n, m) > MAX_POINTS:
        raise ValueError(
            f"clouds of {n:,} and {m:,} points have more than {MAX_POINTS:,}; take a random part of them, use "
            "method='sliced', or ask for method='shortlist', which may take an hour."
        )
    return "shortlist" if not is_dense else "assignment" if is_uniform(a, b) else "simplex"


def plan_cost(pair: Pair, plan: Plan) -> Tensor:
    """(sum_k mass_k c(x_i, y_j)^p)^{1/p} of a fixed plan, with its gradients in the points and the masses."""
    i, j, mass = (torch.from_numpy(z) for z in (plan.i, plan.j, plan.mass))
    p, c = pair.cost.p, pair.cost.distance(pair.x[i], pair.y[j])
    largest = c.detach().max()
    if largest == 0:  # the p-th root has no derivative at zero; this has the derivative zero
        return (mass * c).sum()
    total = (mass * (c / largest) ** p).sum()
    if pair.has_mass_gradient:
        u, v = (torch.from_numpy(z) for z in dual_potentials(pair, plan))
        total = total + ((pair.a - pair.a.detach()) @ u + (pair.b - pair.b.detach()) @ v) / largest**p
    return largest * total ** (1 / p)


def dual_potentials(pair: Pair, plan: Plan) -> tuple[Array, Array]:
    """u (n,) and v (m,) with u_i + v_j <= c_ij^p for all points, with and without mass.

    They are the derivatives of W_p^p in the masses, up to a constant.
    """
    x, _, y, _ = pair.arrays()
    v = plan.potential
    is_known = np.isfinite(v)
    u = c_transform(x, y[is_known], v[is_known], pair.cost)
    return u, c_transform(y, x, u, pair.cost)


def _distance_error(value: float, gap: float, p: float) -> float:
    """W - (W^p - gap)^{1/p}: a gap of the cost as an error of the distance, without cancellation for small gaps."""
    if gap == 0:
        return 0.0
    part = gap / value**p if value > 0 else 1.0
    return value * -math.expm1(math.log1p(-part) / p) if part < 1 else gap ** (1 / p)
