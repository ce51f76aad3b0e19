"""Optimal transport on the line and on the circle, in time n log n.

Circle: Delon, Salomon and Sobolevski, SIAM J. Appl. Math. 70 (2010).
"""

from __future__ import annotations

import numpy as np

from attn_flow.transport.ground_cost import GroundCost
from attn_flow.transport.plan import MIN_MASS, Array, Index, Plan, north_west_corner


def line(x: Array, a: Array, y: Array, b: Array, cost: GroundCost) -> Plan:
    """The quantile coupling, which is optimal on the line: W_p^p = int_0^1 |F^{-1}(s) - G^{-1}(s)|^p ds."""
    if x.shape[1] != 1 or cost.name != "euclidean":
        raise ValueError(f"method 'line' needs d = 1 and cost 'euclidean', got d = {x.shape[1]} and {cost.name!r}.")
    order_x, order_y = np.argsort(x[:, 0], kind="stable"), np.argsort(y[:, 0], kind="stable")
    i, j, mass = north_west_corner(a[order_x], b[order_y])
    i, j = order_x[i], order_y[j]
    # The potentials satisfy u_i + v_j = c_ij on every step. So v changes by c(i', j') - c(i', j) from (i, j) to
    # (i', j'), where u changes first if both indices move.
    change = cost.of_pairs(x[i[1:]], y[j[1:]]) - cost.of_pairs(x[i[1:]], y[j[:-1]])
    v = np.full(len(y), -np.inf)
    v[j] = np.r_[0.0, np.cumsum(change)]
    return Plan(i, j, mass, v=v)


def circle(x: Array, a: Array, y: Array, b: Array, cost: GroundCost) -> Plan:
    """The optimal plan between unit vectors of the plane.

    W_p^p is the minimum over a shift theta of C(theta) = int_0^1 |F^{-1}(s) - G^{-1}(s - theta)|^p ds, where F and G
    are lifted to the line by G^{-1}(s + 1) = G^{-1}(s) + 2 pi. C is convex, so its minimum is found by bisection.
    """
    if x.shape[1] != 2 or cost.name != "geodesic":
        raise ValueError(f"method 'circle' needs d = 2 and cost 'geodesic', got d = {x.shape[1]} and {cost.name!r}.")
    n, m, p = len(x), len(y), cost.p
    s, t = (np.arctan2(z[:, 1], z[:, 0]) for z in (x, y))
    order_x, order_y = np.argsort(s, kind="stable"), np.argsort(t, kind="stable")
    s, t, F, G = s[order_x], t[order_y], np.cumsum(a[order_x]), np.cumsum(b[order_y])
    turns = np.array([[-1.0], [0.0], [1.0]])  # three turns of y reach every quantile for theta in [-1, 1]
    F, G, t = F / F[-1], (G / G[-1] + turns).ravel(), (t + 2 * np.pi * turns).ravel()

    def coupling(theta: float) -> tuple[Index, Index, Array]:
        end = np.union1d(F, np.clip(G + theta, 0.0, 1.0))
        start = np.r_[0.0, end[:-1]]
        is_step = end - start > MIN_MASS
        middle, mass = ((start + end) / 2)[is_step], (end - start)[is_step]
        i = np.minimum(np.searchsorted(F, middle), n - 1)
        return i, np.minimum(np.searchsorted(G, middle - theta), 3 * m - 1), mass

    def value(theta: float) -> float:
        i, j, mass = coupling(theta)
        return float(mass @ np.abs(s[i] - t[j]) ** p)

    def slope(theta: float) -> float:
        # The shifted quantile of y jumps from t_j to t_{j+1} at the level G_j + theta, once per turn.
        level = G[m : 2 * m] + theta
        turn = np.floor(level)
        start = s[np.minimum(np.searchsorted(F, level - turn, side="right"), n - 1)] + 2 * np.pi * turn
        return float((np.abs(start - t[m : 2 * m]) ** p - np.abs(start - t[m + 1 : 2 * m + 1]) ** p).sum())

    # All of y lies a turn above x at theta = -1 and a turn below it at theta = 1, so the minimum is between them.
    low, high = -1.0, 1.0
    while low < (middle := (low + high) / 2) < high and high - low > np.finfo(float).eps:
        low, high = (middle, high) if slope(middle) < 0 else (low, middle)
    i, j, mass = coupling(min((low, high), key=value))
    return Plan(order_x[i], order_y[j % m], mass)
