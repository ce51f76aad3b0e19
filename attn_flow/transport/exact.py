"""W_p of one pair of clouds by an exact solver: units, merging, choice of the solver, value and error bound.

A solver takes points x (n, d), y (m, d) with positive probabilities a (n,), b (m,) and a `GroundCost`, and returns a
`Plan`. The distance is the cost of that fixed plan, whose gradient in x and y is the gradient of W_p by the envelope
theorem; the gradient in the masses is given by the dual potentials. A new solver is a function in a file of its own, a
row in `SOLVERS` and a line in the docstring of `solve`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from attn_flow.transport import merging
from attn_flow.transport.assignment import assignment, dual_potential, is_uniform
from attn_flow.transport.ground_cost import MAX_ENTRIES, GroundCost, c_transform
from attn_flow.transport.network_simplex import MAX_LINPROG_ENTRIES, has_pot, simplex
from attn_flow.transport.one_dimension import circle, line
from attn_flow.transport.plan import Array, Index, Plan, north_west_corner
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
# Points closer than this part of the extent of the clouds are merged.
COINCIDENT = 1e-10
# Errors below RESOLUTION and below ROUNDING^{1/p}, as parts of the extent, are rounding errors of the costs.
RESOLUTION, ROUNDING = 1e-6, 1e-13
# The lengths of points may differ by this much, relative to their mean, on what is called a sphere.
SPHERE_RTOL = 1e-4


class CertificateError(ValueError):
    """The error that was proved for a distance is larger than the tolerance rtol.

    Example:
        >>> from attn_flow.transport import Sinkhorn, wasserstein
        >>> try:
        ...     wasserstein(torch.eye(3), torch.eye(3) + 0.1, method=Sinkhorn(blur=1.0))
        ... except CertificateError:
        ...     print("use method='auto'")
        use method='auto'
    """


@dataclass(frozen=True, eq=False)
class Pair:
    """Points x (n, d), y (m, d) with probabilities a (n,), b (m,), in float64 on the CPU, and the ground cost."""

    x: Tensor
    a: Tensor
    y: Tensor
    b: Tensor
    cost: GroundCost

    @property
    def has_mass_gradient(self) -> bool:
        return self.a.requires_grad or self.b.requires_grad

    def arrays(self) -> tuple[Array, Array, Array, Array]:
        """x, a, y and b as numpy arrays."""
        x, a, y, b = (z.detach().numpy() for z in (self.x, self.a, self.y, self.b))
        return x, a, y, b

    def scaled(self) -> tuple[Pair, float]:
        """The pair with coordinates of order one, and the unit that its distances were divided by.

        The unit is a power of two, so the division is exact, and p-th powers of distances neither overflow nor vanish.
        With cost "geodesic" the points become unit vectors.
        """
        points = torch.cat([self.x[self.a > 0], self.y[self.b > 0]]).detach()
        unit = 1.0
        for size in (points.abs().max(), (points.amax(0) - points.amin(0)).max()):
            if 0 < float(size) < math.inf:  # the difference of huge coordinates may overflow
                unit = math.ldexp(1.0, math.frexp(float(size))[1] - 1)
        x, y = self.x / unit, self.y / unit
        if self.cost.name == "euclidean":
            return replace(self, x=x, y=y), unit
        norms = (points / unit).norm(dim=-1)
        radius = float(norms.mean())
        if radius == 0 or float((norms - radius).abs().max()) > SPHERE_RTOL * radius:
            raise ValueError(
                "cost 'geodesic' needs points on one sphere around the origin, but the longest point is "
                f"{float(norms.max() / norms.min()):.6g} times as long as the shortest; use Sphere(radius).retract on "
                "the points, or cost='euclidean'."
            )
        x, y = (z / z.norm(dim=-1, keepdim=True) for z in (x, y))
        return replace(self, x=x, y=y), unit * radius


@dataclass(frozen=True, eq=False)
class Solution:
    """The distance of a pair with its error bound, the name of the method, the plan and the potentials."""

    value: Tensor
    error: float
    method: str
    plan: Plan | None = None
    potentials: tuple[Array, Array] | None = None


def solve_pair(pair: Pair, method: str, rtol: float, merge_tol: float | None, with_potentials: bool) -> Solution:
    """W_p of a pair within the relative error rtol, or up to rounding; `CertificateError` if that was not proved.

    Args:
        pair: the two clouds.
        method: "auto" or a name in `SOLVERS`.
        rtol: the largest relative error.
        merge_tol: points closer than this are merged. With None, the methods "auto" and "shortlist" merge coincident
            points, unless the gradient in the masses is needed.
        with_potentials: whether to compute dual potentials.
    """
    p, share = pair.cost.p, 1.0
    outliers: list[tuple[Index, Index, Array]] = []
    if method == "auto" and pair.cost.name == "euclidean" and not pair.has_mass_gradient:
        pair, outliers, share = _drop_shared_outliers(pair)
    pair, unit = pair.scaled()
    size = merging.extent(torch.cat([pair.x, pair.y]).detach(), torch.cat([pair.a, pair.b]).detach(), 0.9)
    if merge_tol is not None:
        merge_tol = merge_tol / unit
    elif method in ("auto", "shortlist") and not pair.has_mass_gradient:
        merge_tol = COINCIDENT * size
    solution = None if merge_tol is None else _solve_merged(pair, method, merge_tol, with_potentials)
    if solution is None:
        solution = _solve(pair, method, with_potentials)
    value, error, name, plan = solution
    if error > max(rtol * value.item(), RESOLUTION * size, ROUNDING ** (1 / p) * size):
        raise CertificateError(
            f"method {name!r} proves W_{p:g} = {value.item() * unit:.6g} only up to {error * unit:.3g}, "
            f"more than rtol = {rtol:g} of it; use a larger rtol, a smaller merge_tol if you set one, or "
            "method='assignment' or 'simplex', and remove points far from all others."
        )
    potentials = None
    if with_potentials and plan.v is not None and not outliers:
        with np.errstate(over="ignore", under="ignore"):
            u, v = (z * np.float64(unit) ** p for z in dual_potentials(pair, plan))
        potentials = u, v
    i, j, mass = (np.concatenate(z) for z in zip((plan.i, plan.j, plan.mass * share), *outliers))
    size = unit * share ** (1 / p)
    return Solution(value * size, error * size, name, Plan(i, j, mass), potentials)


def _drop_shared_outliers(pair: Pair) -> tuple[Pair, list[tuple[Index, Index, Array]], float]:
    """Remove isolated points that carry equal mass in both clouds; they do not move.

    Returns:
        The pair where their mass is zero, their part of the plan (i, j and mass of each outlier), and the mass left.
    """
    outliers = []
    a, b = pair.a.numpy(), pair.b.numpy()
    rest_a, rest_b = a.copy(), b.copy()
    for rows, columns in merging.shared_outliers(pair.x.detach(), pair.a, pair.y.detach(), pair.b, pair.cost.p):
        i, j, mass = north_west_corner(a[rows], b[columns])
        outliers.append((rows[i], columns[j], mass * a[rows].sum()))
        rest_a[rows] = rest_b[columns] = 0.0
    if not outliers:
        return pair, outliers, 1.0
    share = float(rest_a.sum())
    rest = replace(pair, a=torch.from_numpy(rest_a / share), b=torch.from_numpy(rest_b / rest_b.sum()))
    return rest, outliers, share


def _solve_merged(
    pair: Pair, method: str, merge_tol: float, with_potentials: bool
) -> tuple[Tensor, float, str, Plan] | None:
    """Merge points within merge_tol and solve, where that saves time; otherwise None."""
    group_x, group_y = (merging.coincident_groups(z, merge_tol) for z in (pair.x, pair.y))
    pairs = (1 + int(group_x.max())) * (1 + int(group_y.max()))
    all_pairs = len(pair.x) * len(pair.y)
    # Small clouds of equal masses lose the fast assignment solver when points are merged, so more has to be saved.
    if pairs > (0.25 if all_pairs <= DENSE_POINTS**2 else 0.95) * all_pairs:
        return None
    if pairs > MAX_LINPROG_ENTRIES and not has_pot():
        return None
    x, a, moved_x = merging.merge(pair.x, pair.a, group_x, pair.cost)
    y, b, moved_y = merging.merge(pair.y, pair.b, group_y, pair.cost)
    value, error, name, plan = _solve(Pair(x, a, y, b, pair.cost), method, with_potentials)
    _, masses_x, _, masses_y = pair.arrays()
    i, j, mass = merging.refine(plan, masses_x, group_x, masses_y, group_y)
    plan = Plan(i, j, mass, v=None if plan.v is None else plan.v[group_y])
    return value, error + moved_x + moved_y, f"merged {name}", plan


def _solve(pair: Pair, method: str, with_potentials: bool) -> tuple[Tensor, float, str, Plan]:
    """The distance of a pair as it is, its error, the name of the solver and the plan."""
    if method == "auto":
        method = _choose(pair)
    plan = exact_plan(pair, method, with_potentials or pair.has_mass_gradient)
    value = plan_cost(pair, plan)
    return value, _distance_error(value.item(), plan.gap, pair.cost.p), method, plan


def _choose(pair: Pair) -> str:
    """The fastest exact solver for a pair."""
    (n, d), m = pair.x.shape, len(pair.y)
    _, a, _, b = pair.arrays()
    if d == 1 and pair.cost.name == "euclidean":
        return "line"
    if d == 2 and pair.cost.name == "geodesic" and not pair.has_mass_gradient:
        return "circle"
    if n * m > DENSE_POINTS**2 and max(n, m) > MAX_POINTS:
        raise ValueError(
            f"clouds of {n:,} and {m:,} points have more than {MAX_POINTS:,}; take a random part of them, merge near "
            "points with merge_tol, use method='sliced', or ask for method='shortlist', which may take an hour."
        )
    is_dense = n * m <= (DENSE_POINTS**2 if has_pot() else MAX_ENTRIES)  # the shortlist needs POT
    return "shortlist" if not is_dense else "assignment" if is_uniform(a, b) else "simplex"


def exact_plan(pair: Pair, method: str, with_potentials: bool = False) -> Plan:
    """The plan of the named solver, which sees only points with mass; its indices are those of all points."""
    x, a, y, b = pair.arrays()
    rows, columns = np.flatnonzero(a), np.flatnonzero(b)
    centre = y.mean(0) if pair.cost.name == "euclidean" else 0.0
    x, a, y, b = x[rows] - centre, a[rows], y[columns] - centre, b[columns]
    plan = SOLVERS[method](x, a, y, b, pair.cost)
    if with_potentials and method == "assignment":
        plan = replace(plan, v=dual_potential(x, y, plan, pair.cost))
    v = None
    if plan.v is not None:
        v = np.full(len(pair.y), -np.inf)
        v[columns] = plan.v
    return Plan(rows[plan.i], columns[plan.j], plan.mass, plan.gap, v)


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
