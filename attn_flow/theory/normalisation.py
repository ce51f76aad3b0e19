"""The place of the layer norm decides how fast directions contract (arXiv 2510.22026).

A token is x = r theta. Its direction obeys theta' = P_theta A / s with A_i = sum_j softmax_j(beta <theta_i, theta_j>)
theta_j. The schemes differ in the slowing s and in the growth r' of the norm; the last column is the
asymptotic decay.

| scheme | s | r' | 1 - rho |
|---|---|---|---|
| post | 1 | 0 | e^{-2t} |
| pre | r | <theta, A> | t^{-2} |
| peri | r norm(A) | <theta, A> / norm(A) | t^{-2} |
| ngpt | norm(A) / alpha | 0 | e^{-2 alpha t} |
| ln_scaling | sqrt(t+1) | 0 | e^{-4 sqrt t} |
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike
from scipy.integrate import solve_ivp

from attn_flow.base import checks
from attn_flow.theory.domain import Array, cosines, integers, reals

SCHEMES = ("post", "pre", "peri", "ngpt", "ln_scaling")


def solve(
    scheme: str, t: ArrayLike, beta: float, n: int = 2, rho0: float = 0.0, r0: float = 1.0, alpha: float = 1.0
) -> tuple[Array, Array]:
    """1 - rho(t) and r(t) of equiangular tokens under one of SCHEMES, by numerical integration.

    With w = 1 - rho, the weight q = 1/(e^{beta w} + n - 1) on each other token and p on itself, and S = n - (n-1) w:
    rho' = 2 q w S / s, <theta, A> = p + (n-1) q (1-w), norm(A)^2 = (p-q)^2 + 2 (p-q) q S + n q^2 S. arXiv 2510.22026.

    Args:
        t: increasing times (T,), at least 0.
        n: number of tokens; for n = 2 any pair is equiangular.
        rho0, r0: cosine and norm at time 0.
        alpha: step size of nGPT.

    Returns:
        1 - rho (T,) and r (T,).

    >>> gap, r = solve("pre", [0.0, 100.0], beta=1.0)
    >>> r.round(1)  # the norm grows like t
    array([  1. , 100.1])
    """
    checks.require_choice("scheme", scheme, SCHEMES)
    t = np.atleast_1d(reals("t", t, 0))
    n_, beta_ = float(integers("n", n, 2)), float(reals("beta", beta, 0))
    rho0 = float(cosines(reals("rho0", rho0, -1, 1, is_open=True), integers("n", n, 2)))
    r0, alpha = float(reals("r0", r0, 0, is_open=True)), float(reals("alpha", alpha, 0, is_open=True))

    def velocity(time: float, state: Array) -> Array:
        """Derivatives of -log(1 - rho) and of r."""
        w, r = np.exp(-state[0]), state[1]
        q = 1 / (np.exp(beta_ * w) + n_ - 1)
        p, S = 1 - (n_ - 1) * q, n_ - (n_ - 1) * w
        along = p + (n_ - 1) * q * (1 - w)
        norm = np.sqrt((p - q) ** 2 + 2 * (p - q) * q * S + n_ * q**2 * S)
        slowing = {"post": 1.0, "pre": r, "peri": r * norm, "ngpt": norm / alpha, "ln_scaling": np.sqrt(time + 1)}
        growth = {"pre": along, "peri": along / norm}
        return np.array([2 * q * S / slowing[scheme], growth.get(scheme, 0.0)])

    span = (0.0, max(float(t[-1]), 1e-300))
    path = solve_ivp(velocity, span, [-np.log1p(-rho0), r0], t_eval=t, method="DOP853", rtol=1e-10, atol=1e-12)
    return np.exp(-path.y[0]), path.y[1]
