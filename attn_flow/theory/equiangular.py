"""Equiangular tokens, <x_i, x_j> = rho for all i != j: one scalar ODE (arXiv 2312.10794, section 6).

rho' = 2 e^{beta rho} (1-rho) ((n-1) rho + 1) / (e^beta + (n-1) e^{beta rho}); `multi_head.velocity` is that of
unnormalised attention.

Independent tokens in high dimension start at rho = O(d^{-1/2}) and follow this ODE with an error near sqrt(log d / d).
`normalisation.solve("post", ...)` integrates it. Times are functions of the gap w = 1 - rho, which keeps its digits.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike
from scipy.special import exp1, expi, roots_laguerre

from attn_flow.theory.domain import Array, integers, reals

NODES, WEIGHTS = roots_laguerre(60)


def velocity(rho: ArrayLike, beta: ArrayLike, n: ArrayLike) -> Array:
    """rho' (...) of the equiangular ODE, for rho (...) from -1/(n-1) to 1. arXiv 2312.10794.

    >>> float(velocity(0.0, 0.0, 4))  # without temperature: 2 (1-rho) ((n-1) rho + 1) / n
    0.5
    """
    w, beta, n = 1 - reals("rho", rho, -1, 1), reals("beta", beta), integers("n", n, 2)
    return 2 * w * (n - (n - 1) * w) / (np.exp(beta * w) + n - 1)


def time_between(gap: ArrayLike, gap_end: ArrayLike, beta: ArrayLike, n: ArrayLike) -> Array:
    """Time (...) in which 1 - rho falls from `gap` to `gap_end`; infinite where e^{beta gap} overflows.

    T = int (e^{beta w} + n - 1) / (2 w (n - (n-1) w)) dw. With c = n/(n-1) and 1/(w (n - (n-1) w)) =
    (1/w + 1/(c-w)) / n it is a sum of logarithms and of exponential integrals: the antiderivative of
    e^{beta w} (1/w + 1/(c-w)) is Ei(beta w) + e^{beta w} S(beta (c-w)), S(x) = e^x E_1(x). From gap 1 to 0.001 it is
    the boundary of the phase diagram of arXiv 2312.10794.

    Args:
        gap, gap_end: 1 - rho at the start and at the end (...), 0 < gap_end <= gap < n/(n-1).

    >>> time_between(1.0, 0.001, [1.0, 4.0, 6.0, 9.0], 32).round(3)
    array([  5.27 ,   6.954,  15.995, 178.731])
    """
    beta, n = reals("beta", beta, 0), integers("n", n, 2)
    c = n / (n - 1)
    w0, w1 = reals("gap", gap, 0, 2, is_open=True), reals("gap_end", gap_end, 0, 2, is_open=True)
    if np.any(w0 >= c) or np.any(w1 > w0):
        raise ValueError(f"gap = {w0}, gap_end = {w1}, expected gap_end <= gap < n/(n-1) = {c}: rho only increases.")
    plain = np.log(w0 / w1) + np.log((c - w1) / (c - w0))
    is_positive = beta > 1e-300  # otherwise e^{beta w} is 1
    b = np.where(is_positive, beta, 1.0)
    with np.errstate(over="ignore", invalid="ignore"):
        start, end = (expi(b * w) + np.exp(b * w) * _scaled_exp1(b * (c - w)) for w in (w0, w1))
        tilted = np.where(is_positive, np.where(np.isfinite(start), start - end, np.inf), plain)
    return (tilted + (n - 1) * plain) / (2 * n)


def _scaled_exp1(x: Array) -> Array:
    """e^x E_1(x) = int_0^inf e^{-u} / (x + u) du, by Gauss-Laguerre quadrature where e^x would overflow."""
    far = (WEIGHTS / (np.maximum(x, 20.0)[..., None] + NODES)).sum(-1)
    near = np.minimum(x, 20.0)
    return np.where(x < 20.0, np.exp(near) * exp1(near), far)
