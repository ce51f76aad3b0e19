"""Transport plans in sparse form, and plans that follow from an order or from a plan between groups."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Index = NDArray[np.int64]

MIN_MASS = 1e-15  # smaller steps of a coupling are rounding errors and pair points that do not belong together


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

    group_x (n,) and group_y (m,) are the group of every point. Returns i, j and mass, (k,) each.
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
