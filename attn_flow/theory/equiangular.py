"""Equiangular tokens, <x_i, x_j> = rho for i != j: one scalar ODE, exact in time (arXiv 2312.10794, section 6).

High dimension: iid tokens start at rho = O(d^{-1/2}) and follow it with error ~ sqrt(log d / d).
Everything is written in the gap w = 1 - rho, so that rho -> 1 costs no digits.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike
from scipy.integrate import solve_ivp
from scipy.special import exp1, expi, roots_laguerre

from attn_flow.base import checks
from attn_flow.theory.domain import Array, in_range, integers, number, within

KINDS = ("softmax", "unnormalised")
LAGUERRE = roots_laguerre(60)


def gap_velocity(gap: ArrayLike, beta: ArrayLike, n: ArrayLike, kind: str = "softmax") -> Array:
    """w' = -rho' for w = 1 - rho:
    softmax       rho' = 2 e^{beta rho} (1-rho)((n-1)rho+1) / (e^beta + (n-1) e^{beta rho})
    unnormalised  rho' = (2/n) e^{beta rho} (1-rho)((n-1)rho+1).                               arXiv 2312.10794
    """
    checks.one_of("kind", kind, KINDS)
    n = integers("n", n, 2)
    w, beta = within("gap", gap, 0.0, float(np.max(n / (n - 1)))), within("beta", beta)
    shape = 2 * w * (n - (n - 1) * w)
    if kind == "unnormalised":
        return -shape * np.exp(beta * (1 - w)) / n
    return -shape / (np.exp(beta * w) + n - 1)


def velocity(rho: ArrayLike, beta: ArrayLike, n: ArrayLike, kind: str = "softmax") -> Array:
    """rho' of the equiangular ODE (see `gap_velocity`), for -1/(n-1) <= rho <= 1."""
    return -gap_velocity(1 - within("rho", rho, -1.0, 1.0), beta, n, kind)


def _scaled_exp1(x: Array) -> Array:
    """e^x E_1(x) = int_0^inf e^{-u}/(x+u) du: Gauss-Laguerre where e^x would overflow."""
    nodes, weights = LAGUERRE
    far = (weights / (np.maximum(x, 20.0)[..., None] + nodes)).sum(-1)
    near = np.minimum(x, 20.0)
    return np.where(x < 20.0, np.exp(near) * exp1(near), far)


def time_between(gap: ArrayLike, gap_end: ArrayLike, beta: ArrayLike, n: ArrayLike, kind: str = "softmax") -> Array:
    """Time for 1 - rho to fall from `gap` to `gap_end`, exactly; infinite where float64 ends (beta gap > 709).

    T = int (e^{beta w} + n - 1) / (2 w (n - (n-1) w)) dw, and with 1/(w (n-(n-1)w)) = (1/n)(1/w + 1/(c-w)),
    c = n/(n-1):  2n int e^{beta w}/... = Ei(beta w) - e^{beta w} S(beta (c-w)) up to sign, S(x) = e^x E_1(x).
    The unnormalised flow has n e^{-beta} e^{beta w} in place of e^{beta w} + n - 1.
    """
    checks.one_of("kind", kind, KINDS)
    n, beta = integers("n", n, 2), within("beta", beta, 0.0)
    c = n / (n - 1)
    w0, w1 = within("gap", gap, 0.0, float(np.max(c)), open=True), within("gap_end", gap_end, 0.0, 2.0, open=True)
    if np.any(w0 >= c) or np.any(w1 > w0):
        raise ValueError(f"gap = {w0}, gap_end = {w1}, expected gap_end <= gap < n/(n-1) = {c}: rho only increases.")
    plain = np.log(w0 / w1) + np.log((c - w1) / (c - w0))
    warm = beta > 1e-300  # below, e^{beta w} is 1
    b = np.where(warm, beta, 1.0)
    with np.errstate(over="ignore", invalid="ignore"):
        antiderivative = lambda w: expi(b * w) + np.exp(b * w) * _scaled_exp1(b * (c - w))
        longest = antiderivative(w0)
        tilted = np.where(warm, np.where(np.isfinite(longest), longest - antiderivative(w1), np.inf), plain)
    if kind == "unnormalised":
        return in_range("the time", np.exp(-beta) * tilted / 2)
    return (tilted + (n - 1) * plain) / (2 * n)


def time_to_reach(rho: ArrayLike, beta: ArrayLike, n: ArrayLike, rho0: ArrayLike = 0.0, kind: str = "softmax") -> Array:
    """Time from rho0 to rho; at rho = .999, rho0 = 0 it is the curve on the phase diagram (t, beta). 2312.10794.

    Iid tokens in high d start at rho0 = 0 and the diagram's boundary is this curve.
    """
    return time_between(1 - within("rho0", rho0, -1.0, 1.0), 1 - within("rho", rho, -1.0, 1.0), beta, n, kind)


def solve(t: ArrayLike, beta: float, n: int, rho0: float = 0.0, kind: str = "softmax") -> Array:
    """1 - rho(t) at increasing times t >= 0 (T,); integrated in y = -log(1 - rho), accurate to the smallest gaps."""
    t = np.atleast_1d(within("t", t, 0.0))
    y0 = -np.log1p(-number("rho0", rho0, -1.0, 1.0, open=True))

    def log_velocity(_: float, y: Array) -> Array:
        w = np.exp(-y)
        return -gap_velocity(w, beta, n, kind) / w

    path = solve_ivp(
        log_velocity, (0.0, max(float(t[-1]), 1e-300)), [y0], t_eval=t, method="DOP853", rtol=1e-11, atol=1e-12
    )
    return np.exp(-path.y[0])
