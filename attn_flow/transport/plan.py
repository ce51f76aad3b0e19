"""Transport plans in sparse form, and the coupling of masses in the order in which they are given."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Index = NDArray[np.int64]

# Steps of a coupling below this mass are rounding errors and pair points that do not belong together.
MIN_MASS = 1e-15


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
