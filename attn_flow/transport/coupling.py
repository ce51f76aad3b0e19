"""Exact optimal couplings of two weighted clouds: line, circle, assignment, network simplex.

Each solver takes clouds x (n, d), y (m, d), probabilities a (n,), b (m,), all positive, and a `Ground` cost, and
returns a `Plan`: who goes where with how much mass, and by how much its cost may exceed the optimum.
Peyre & Cuturi, Computational Optimal Transport (2019), chapters 2 and 3.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from attn_flow.base.memory import require
from attn_flow.geometry import angle

Array = NDArray[np.float64]
Index = NDArray[np.int64]

# Pivots after which the network simplex is stopped; its certificate then shows what is missing.
PIVOTS = 10_000_000
# Bytes for every entry of a dense cost matrix, as measured: the matrix, its powers, and what the solver holds.
ASSIGNMENT_BYTES = 24
SIMPLEX_BYTES = 50
# Cutting planes of the circle: every second one halves the bracket, so the last ones are at rounding.
CUTS = 120


@dataclass(frozen=True)
class Ground:
    """The ground cost c(x, y)^p: |x - y|^p, or (angle between unit vectors)^p."""

    p: float = 2.0
    cost: str = "euclidean"

    def expect_euclidean(self, method: str) -> None:
        """Raise ValueError, in the name of a method that knows no other, unless this is |x - y|^2."""
        if self != Ground():
            raise ValueError(f"method {method!r} got p = {self.p:g}, {self.cost} cost; expected p = 2, euclidean.")

    def distance(self, x: Tensor, y: Tensor) -> Tensor:
        """c(x_i, y_i), (..., d) x (..., d) -> (...)."""
        return angle(x, y) if self.cost == "geodesic" else (x - y).norm(dim=-1)

    def pairs(self, x: Array, y: Array) -> Array:
        """c(x_i, y_i)^p, (n, d) x (n, d) -> (n,)."""
        return self.distance(torch.from_numpy(x), torch.from_numpy(y)).numpy() ** self.p

    def matrix(self, x: Array, y: Array) -> Array:
        """c(x_i, y_j)^p, (n, m), from differences: the Gram matrix would lose half the digits near zero."""
        X, Y = torch.from_numpy(x), torch.from_numpy(y)
        c = _differences(X, Y)
        if self.cost == "geodesic":
            c = 2 * torch.atan2(c, _differences(X, -Y))
        return c.numpy() if self.p == 1 else (c**self.p).numpy()


def _differences(x: Tensor, y: Tensor) -> Tensor:
    return torch.cdist(x, y, compute_mode="donot_use_mm_for_euclid_dist")


@dataclass(frozen=True, eq=False)
class Plan:
    """mass[k] goes from x[i[k]] to y[j[k]]; the plan's cost exceeds the optimal one by at most `gap`.

    v (m,): an optimal dual potential of y where the solver has one: the derivative of the cost in b, up to a constant.
    """

    i: Index
    j: Index
    mass: Array
    gap: float = 0.0
    v: Array | None = None


def potential(plan: Plan) -> Array:
    """The plan's dual potential of y, or a ValueError where its solver has none."""
    if plan.v is None:
        raise ValueError("this solver has no potentials; use method='auto', 'simplex', 'shortlist' or 'line'.")
    return plan.v


def leak(plan: Plan, a: Array, b: Array) -> float:
    """Mass by which rounding makes the plan miss its marginals; times the largest cost, a part of the gap."""
    rows, columns = np.bincount(plan.i, plan.mass, len(a)), np.bincount(plan.j, plan.mass, len(b))
    return float(np.abs(rows - a).sum() + np.abs(columns - b).sum()) / 2


def staircase(a: Array, b: Array) -> tuple[Index, Index, Array]:
    """The monotone coupling of masses a (n,), b (m,) in the order given (north-west corner rule): i, j, mass."""
    A, B = np.cumsum(a), np.cumsum(b)
    # The two totals differ by rounding; they must end together, or a sliver of mass has nowhere to go.
    A, B = A / A[-1], B / B[-1]
    end = np.union1d(A, B)
    start = np.r_[0.0, end[:-1]]
    i = np.minimum(np.searchsorted(A, start, side="right"), len(a) - 1)
    j = np.minimum(np.searchsorted(B, start, side="right"), len(b) - 1)
    mass = end - start
    # Steps of rounding size pair points that do not belong together.
    step = mass > 1e-15
    return i[step], j[step], mass[step]


def line(x: Array, a: Array, y: Array, b: Array, ground: Ground) -> Plan:
    """d = 1: W_p^p = int_0^1 |F^{-1}(s) - G^{-1}(s)|^p ds, the quantile coupling, optimal for every p >= 1."""
    if x.shape[1] != 1 or ground.cost != "euclidean":
        raise ValueError(f"method 'line' got d = {x.shape[1]}, {ground.cost} cost; expected d = 1, euclidean.")
    ox, oy = np.argsort(x[:, 0], kind="stable"), np.argsort(y[:, 0], kind="stable")
    i, j, mass = staircase(a[ox], b[oy])
    i, j = ox[i], oy[j]
    # Potentials along the staircase: u_i + v_j = c_ij on each step, so v changes by c(i, j') - c(i, j) when j moves
    # with i held. Where both move at once (a degenerate corner) the path goes through (i', j): u first, then v.
    moved = ground.pairs(x[i[1:]], y[j[1:]]) - ground.pairs(x[i[1:]], y[j[:-1]])
    # A mass below rounding takes no step: -inf leaves it out of every minimum over j.
    v = np.full(len(y), -np.inf)
    v[j] = np.r_[0.0, np.cumsum(moved)]
    return Plan(i, j, mass, v=v)


def circle(x: Array, a: Array, y: Array, b: Array, ground: Ground) -> Plan:
    """Unit vectors of R^2: min over theta of C(theta) = int_0^1 |F^{-1}(s) - G^{-1}(s - theta)|^p ds, any p >= 1.

    F, G are lifted to the line with G^{-1}(s + 1) = G^{-1}(s) + 2 pi. C is convex and, for atoms, piecewise linear,
    so Kelley's cutting planes with one-sided derivatives end at a minimiser after finitely many cuts, and the two
    last tangents bound what is left. Delon, Salomon & Sobolevski, SIAM J. Appl. Math. 70 (2010).
    """
    if x.shape[1] != 2 or ground.cost != "geodesic":
        raise ValueError(f"method 'circle' got d = {x.shape[1]}, {ground.cost} cost; expected d = 2, geodesic.")
    if len(x) == 1 or len(y) == 1:  # one atom takes, or gives, everything: there is no other plan
        i, j = (z.ravel() for z in np.indices((len(x), len(y))))
        return Plan(i, j, a[i] * b[j])
    s, t = (np.arctan2(z[:, 1], z[:, 0]) for z in (x, y))
    ox, oy = np.argsort(s, kind="stable"), np.argsort(t, kind="stable")
    s, t, a, b = s[ox], t[oy], a[ox], b[oy]
    F, G = (np.cumsum(w) for w in (a, b))
    F, G = F / F[-1], G / G[-1]
    # Three turns of y reach every quantile for theta in [-1, 1].
    G = (G + np.array([[-1.0], [0.0], [1.0]])).ravel()
    lift_t = (t + 2 * np.pi * np.array([[-1.0], [0.0], [1.0]])).ravel()
    n, m = len(s), len(t)

    def coupling(theta: float) -> tuple[Index, Index, Array]:
        knots = np.union1d(F, np.clip(G + theta, 0.0, 1.0))
        start = np.r_[0.0, knots[:-1]]
        middle = (start + knots) / 2
        i = np.minimum(np.searchsorted(F, middle), n - 1)
        return i, np.minimum(np.searchsorted(G, middle - theta), 3 * m - 1), knots - start

    def value(theta: float) -> float:
        i, j, mass = coupling(theta)
        return float(mass @ np.abs(s[i] - lift_t[j]) ** ground.p)

    def slope(theta: float) -> float:
        # The jump of the shifted quantile from t_j to t_{j+1} at G_j + theta, taken once per turn of s.
        level = G[m : 2 * m] + theta
        turn = np.floor(level)
        at = s[np.minimum(np.searchsorted(F, level - turn, side="right"), n - 1)]
        here, following = lift_t[m : 2 * m] - 2 * np.pi * turn, lift_t[m + 1 : 2 * m + 1] - 2 * np.pi * turn
        return float((np.abs(at - here) ** ground.p - np.abs(at - following) ** ground.p).sum())

    # At theta = -1 all of y lies a turn above x, at theta = 1 a turn below: the minimum is between.
    low, high, best = -1.0, 1.0, 0.0
    c_low, c_high, k_low, k_high, least = value(low), value(high), slope(low), slope(high), value(best)
    theta, c, gap = best, least, least
    for cut in range(CUTS):
        k = slope(theta)
        if k < 0:
            low, c_low, k_low = theta, c, k
        else:
            high, c_high, k_high = theta, c, k
        if k_low >= 0 or k_high <= 0:
            # A flat tangent touches the minimum.
            least, best = min((c_low, low), (c_high, high), (least, best))
            gap = 0.0
            break
        theta = (c_high - c_low + k_low * low - k_high * high) / (k_low - k_high)
        gap = max(least - (c_low + k_low * (theta - low)), 0.0)
        # Every second cut bisects: tangents alone may creep along a long chain of breakpoints.
        theta = theta if cut % 2 == 0 else (low + high) / 2
        if gap <= 1e-14 * least or not low < theta < high:
            break
        c = value(theta)
        least, best = min((least, best), (c, theta))
    i, j, mass = coupling(best)
    return Plan(ox[i], oy[j % m], mass, gap=float(gap))


def assignment(x: Array, a: Array, y: Array, b: Array, ground: Ground) -> Plan:
    """n = m, uniform: W_p^p = min over permutations of (1/n) sum c(x_i, y_sigma(i))^p (Jonker-Volgenant)."""
    n = len(x)
    if n != len(y) or np.ptp(a) > 1e-12 / n or np.ptp(b) > 1e-12 / n:
        raise ValueError(
            f"method 'assignment' got {n} and {len(y)} points with weights; expected equal numbers of equal weights. "
            "Use method='simplex'."
        )
    _require(ASSIGNMENT_BYTES, "assignment", x, y)
    i, j = linear_sum_assignment(ground.matrix(x, y))
    return Plan(i, j, np.full(n, 1 / n))


def simplex(x: Array, a: Array, y: Array, b: Array, ground: Ground) -> Plan:
    """min <P, C> over P 1 = a, P^T 1 = b by the network simplex (POT), with the gap its own potentials prove."""
    import ot

    _require(SIMPLEX_BYTES, "simplex", x, y)
    C = ground.matrix(x, y)
    unit = C.max()
    if unit == 0:
        return Plan(*staircase(a, b), v=np.zeros(len(y)))
    # Costs of order one: the solver's stopping tolerance is absolute.
    P, log = ot.emd(a / a.sum(), b / b.sum(), C / unit, numItermax=PIVOTS, log=True)
    i, j = np.nonzero(P)
    v = log["v"] * unit
    plan = Plan(i, j, P[i, j], v=v)
    gap = max(float(plan.mass @ C[i, j] - (a @ (C - v).min(1) + b @ v)), 0.0)
    return replace(plan, gap=gap + leak(plan, a, b) * float(unit))


def _require(size: int, method: str, x: Array, y: Array) -> None:
    what = f"method {method!r} on the cost matrix of {len(x)} x {len(y)} points"
    require(size * len(x) * len(y), what, "use method='shortlist', whose memory is linear, or merge_tol for clusters")


SOLVERS: dict[str, Callable[[Array, Array, Array, Array, Ground], Plan]] = {
    "line": line,
    "circle": circle,
    "assignment": assignment,
    "simplex": simplex,
}
