"""Optimal transport between equal numbers of points of equal mass: the assignment problem."""

from __future__ import annotations

import numpy as np
from scipy.optimize import linear_sum_assignment

from attn_flow.transport.ground_cost import GroundCost
from attn_flow.transport.plan import Array, Plan


def is_uniform(a: Array, b: Array) -> bool:
    """Whether the two clouds have the same number of points, all of the same mass up to rounding."""
    return len(a) == len(b) and float(max(np.ptp(a), np.ptp(b))) <= 1e-12 / len(a)


def assignment(x: Array, a: Array, y: Array, b: Array, cost: GroundCost) -> Plan:
    """The permutation s with the smallest mean of c(x_i, y_s(i))^p, by the Jonker-Volgenant algorithm of scipy.

    The algorithm of scipy does not return its dual potentials.
    """
    if not is_uniform(a, b):
        raise ValueError(
            f"method 'assignment' needs two clouds of equally many points of equal mass, got {len(a)} and {len(b)} "
            "points with masses; use method='simplex'."
        )
    i, j = linear_sum_assignment(cost.matrix(x, y))
    return Plan(i, j, np.full(len(x), 1 / len(x)))
