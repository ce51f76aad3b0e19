"""Equiangular tokens, <x_i, x_j> = rho for all i != j: one scalar ODE (arXiv 2312.10794, section 6).

rho' = 2 e^{beta rho} (1-rho) ((n-1) rho + 1) / (e^beta + (n-1) e^{beta rho}); `multi_head.velocity` is that of
unnormalised attention.

Independent tokens in high dimension start at rho = O(d^{-1/2}) and follow this ODE with an error near sqrt(log d / d).
`normalisation.solve("post", ...)` integrates it. Times are functions of the gap w = 1 - rho, which keeps its digits.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike
from scipy.integrate import quad

from attn_flow.theory.domain import Array, cosines, integers, reals

MAX_EXPONENT = 700.0  # e^709 is the largest float64


def velocity(rho: ArrayLike, beta: ArrayLike, n: ArrayLike) -> Array:
    """rho' (...) of the equiangular ODE, for rho (...) from -1/(n-1) to 1. arXiv 2312.10794.

    >>> float(velocity(0.0, 0.0, 4))  # without temperature: 2 (1-rho) ((n-1) rho + 1) / n
    0.5
    """
    beta, n = reals("beta", beta), integers("n", n, 2)
    w = 1 - cosines(rho, n)
    return 2 * w * (n - (n - 1) * w) / (np.exp(beta * w) + n - 1)


def time_between(gap: ArrayLike, gap_end: ArrayLike, beta: ArrayLike, n: ArrayLike) -> Array:
    """Time (...) in which w = 1 - rho falls from `gap` to `gap_end`; infinite where e^{beta gap} overflows.

    T = int (e^{beta w} + n - 1) / (2 w (n - (n-1) w)) dw, by quadrature. From gap 1 to 0.001 it is the boundary of the
    phase diagram of arXiv 2312.10794.

    Args:
        gap, gap_end: 1 - rho at the start and at the end (...), 0 < gap_end <= gap < n/(n-1).

    >>> time_between(1.0, 0.001, [1.0, 4.0, 6.0, 9.0], 32).round(3)
    array([  5.27 ,   6.954,  15.995, 178.731])
    """
    beta, n = reals("beta", beta, 0), integers("n", n, 2)
    start, end = reals("gap", gap, 0, 2, is_open=True), reals("gap_end", gap_end, 0, 2, is_open=True)
    if np.any(start >= n / (n - 1)) or np.any(end > start):
        expected = f"gap_end <= gap < n/(n-1) = {n / (n - 1)}"
        raise ValueError(f"gap = {start}, gap_end = {end}, expected {expected}: rho only increases.")

    def time(gap: float, gap_end: float, beta: float, n: float) -> float:
        def slowness(log_w: float) -> float:  # dt / d log(w)
            w = np.exp(log_w)
            return float((np.exp(beta * w) + n - 1) / (2 * (n - (n - 1) * w)))

        if beta * gap > MAX_EXPONENT:
            return np.inf
        return float(quad(slowness, np.log(gap_end), np.log(gap), epsrel=1e-10, limit=500)[0])

    return np.vectorize(time, otypes=[float])(start, end, beta, n)
