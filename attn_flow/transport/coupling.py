"""The ground cost, and transport plans in sparse form.

Every exact solver takes points x (n, d), y (m, d) with positive probabilities a (n,), b (m,) and a `GroundCost`, and
returns a `Plan`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from attn_flow.geometry import angle

Array = NDArray[np.float64]
Index = NDArray[np.int64]

# The most entries of an n x m matrix that a solver may build: n = m = 5,000. The matrix takes 0.2 GB in float64, and
# solvers hold up to seven of them.
MAX_ENTRIES = 25_000_000
# Steps of a coupling below this mass are rounding errors and pair points that do not belong together.
MIN_MASS = 1e-15


def require_matrix(n: int, m: int) -> None:
    """Raise ValueError if an n x m matrix has more than `MAX_ENTRIES` entries."""
    if n * m > MAX_ENTRIES:
        raise ValueError(
            f"a {n:,} x {m:,} cost matrix has more than {MAX_ENTRIES:,} entries; use method='shortlist', whose memory "
            "is linear in the number of points, method='sliced', or merge_tol for clustered points."
        )


@dataclass(frozen=True)
class GroundCost:
    """c(x, y)^p, where c is the Euclidean distance or, if the name is "geodesic", the angle between unit vectors."""

    p: float = 2.0
    name: str = "euclidean"

    @property
    def is_squared_euclidean(self) -> bool:
        return self.p == 2 and self.name == "euclidean"

    def distance(self, x: Tensor, y: Tensor) -> Tensor:
        """c(x_i, y_i), from (..., d) and (..., d) to (...)."""
        return angle(x, y) if self.name == "geodesic" else (x - y).norm(dim=-1)

    def of_pairs(self, x: Array, y: Array) -> Array:
        """c(x_i, y_i)^p, from (n, d) and (n, d) to (n,)."""
        return self.distance(torch.from_numpy(x), torch.from_numpy(y)).numpy() ** self.p

    def matrix(self, x: Array, y: Array) -> Array:
        """c(x_i, y_j)^p, from (n, d) and (m, d) to (n, m).

        It is computed from differences, because the Gram matrix would lose half of the digits near zero.
        """
        require_matrix(len(x), len(y))
        c = _distances(x, y)
        if self.name == "geodesic":
            c = 2 * np.arctan2(c, _distances(x, -y))
        return c if self.p == 1 else c**self.p

    def bound(self, x: Array, y: Array) -> float:
        """An upper bound on every c(x_i, y_j)^p."""
        diagonal = float(np.linalg.norm(np.ptp(np.concatenate([x, y]), axis=0)))
        return (np.pi if self.name == "geodesic" else diagonal) ** self.p


def _distances(x: Array, y: Array) -> Array:
    """|x_i - y_j|, (n, m)."""
    mode = "donot_use_mm_for_euclid_dist"
    return torch.cdist(torch.from_numpy(x), torch.from_numpy(y), compute_mode=mode).numpy()


@dataclass(frozen=True, eq=False)
class Plan:
    """A transport plan in sparse form: mass[k] goes from x[i[k]] to y[j[k]].

    Args:
        i, j, mass: (k,) each.
        gap: an upper bound on the cost of this plan minus the optimal cost.
        v: the dual potential of y, (m,), with -inf where it is not known; None if the solver has none.
    """

    i: Index
    j: Index
    mass: Array
    gap: float = 0.0
    v: Array | None = None

    @property
    def potential(self) -> Array:
        """The dual potential of y, (m,); ValueError if the solver has none."""
        if self.v is None:
            raise ValueError("this method has no dual potentials; use method='auto', 'simplex' or 'shortlist'.")
        return self.v

    def mass_error(self, a: Array, b: Array) -> float:
        """The mass by which rounding makes the plan miss its marginals a (n,) and b (m,)."""
        rows, columns = np.bincount(self.i, self.mass, len(a)), np.bincount(self.j, self.mass, len(b))
        return float(np.abs(rows - a).sum() + np.abs(columns - b).sum()) / 2


def north_west_corner(a: Array, b: Array) -> tuple[Index, Index, Array]:
    """The monotone coupling of masses a (n,) and b (m,) in the order given: i, j and mass, (k,) each."""
    A, B = np.cumsum(a), np.cumsum(b)
    A, B = A / A[-1], B / B[-1]  # the totals differ by rounding
    end = np.union1d(A, B)
    start = np.r_[0.0, end[:-1]]
    i = np.minimum(np.searchsorted(A, start, side="right"), len(a) - 1)
    j = np.minimum(np.searchsorted(B, start, side="right"), len(b) - 1)
    is_step = end - start > MIN_MASS
    return i[is_step], j[is_step], (end - start)[is_step]


def refine(coarse: Plan, a: Array, group_x: Index, b: Array, group_y: Index) -> tuple[Index, Index, Array]:
    """A plan between points of masses a (n,), b (m,) that moves every group of points as the coarse plan does.

    Args:
        coarse: a plan between the groups.
        group_x, group_y: the group of every point, (n,) and (m,).

    Returns:
        i, j and mass, (k,) each.
    """
    order = np.lexsort((coarse.j, coarse.i))
    target, mass = coarse.j[order], coarse.mass[order]
    # Sorted by group of x, the points of x share out the mass of the moves; sorted by group of y, those of y do.
    order_x, order_y, by_target = (np.argsort(z, kind="stable") for z in (group_x, group_y, target))
    i, _, mass_x = north_west_corner(a[order_x], mass)
    j, move, mass_y = north_west_corner(b[order_y], mass[by_target])
    by_move = np.argsort(by_target[move], kind="stable")
    # Within each move, the points of x meet those of y in any order.
    s, t, mass = north_west_corner(mass_x, mass_y[by_move])
    return order_x[i[s]], order_y[j[by_move[t]]], mass
