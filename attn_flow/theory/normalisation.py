"""Where the layer norm sits decides how fast directions contract (arXiv 2510.22026).

A token is x = r theta; its direction obeys theta' = (1/s) P_theta A with
A_i = sum_j softmax_j(beta <theta_i,theta_j>) theta_j.

| scheme | s | r' | 1 - rho |
|---|---|---|---|
| post | 1 | - | e^{-2t} |
| pre | r | <theta,A> | t^{-2} |
| peri | r abs(A) | <theta,A>/abs(A) | t^{-2} |
| ngpt | abs(A)/alpha | - | e^{-2 alpha t} |
| ln_scaling | sqrt(t+1) | - | e^{-4 sqrt t} |
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import ArrayLike
from scipy.integrate import solve_ivp

from attn_flow.base import checks
from attn_flow.theory.domain import Array, integers, number, within

Slowing = Callable[[Array, Array, Array, Array, float], Array]  # s(t, r, <theta,A>, |A|, alpha), and r' alike
SCHEMES: dict[str, tuple[Slowing, Slowing]] = {
    "post": (lambda t, r, a, A, alpha: np.ones_like(A), lambda t, r, a, A, alpha: 0 * a),
    "pre": (lambda t, r, a, A, alpha: r, lambda t, r, a, A, alpha: a),
    "peri": (lambda t, r, a, A, alpha: r * A, lambda t, r, a, A, alpha: a / A),
    "ngpt": (lambda t, r, a, A, alpha: A / alpha, lambda t, r, a, A, alpha: 0 * a),
    "ln_scaling": (lambda t, r, a, A, alpha: np.sqrt(t + 1), lambda t, r, a, A, alpha: 0 * a),
}


def attention_moments(gap: ArrayLike, beta: ArrayLike, n: ArrayLike) -> tuple[Array, Array, Array]:
    """Equiangular tokens with 1 - rho = gap: rho' for s = 1, <theta,A>, and |A|.

    With q = 1/(e^{beta w} + n - 1) on each other token, p = 1 - (n-1) q on itself, S = n - (n-1) w:
    rho' = 2 q w S,  <theta,A> = p + (n-1) q (1-w),  |A|^2 = (p-q)^2 + 2 (p-q) q S + n q^2 S. arXiv 2510.22026.
    """
    n, beta = integers("n", n, 2), within("beta", beta, 0.0)
    w = within("gap", gap, 0.0, float(np.max(n / (n - 1))))
    q = 1 / (np.exp(beta * w) + n - 1)
    p, S = 1 - (n - 1) * q, n - (n - 1) * w
    return 2 * q * w * S, p + (n - 1) * q * (1 - w), np.sqrt((p - q) ** 2 + 2 * (p - q) * q * S + n * q**2 * S)


def solve(
    scheme: str, t: ArrayLike, beta: float, n: int = 2, rho0: float = 0.0, r0: float = 1.0, alpha: float = 1.0
) -> tuple[Array, Array]:
    """1 - rho(t) and r(t) of equiangular tokens (n = 2: any pair) at increasing times t >= 0 (T,). arXiv 2510.22026."""
    checks.one_of("scheme", scheme, tuple(SCHEMES))
    slowing, growth = SCHEMES[scheme]
    t = np.atleast_1d(within("t", t, 0.0))
    r0, alpha = number("r0", r0, 0.0, open=True), number("alpha", alpha, 0.0, open=True)
    rho0 = number("rho0", rho0, -1.0, 1.0, open=True)

    def velocity(time: float, state: Array) -> Array:
        w, r = np.exp(-state[0]), state[1]
        pull, a, A = attention_moments(w, beta, n)
        when = np.asarray(time)
        return np.array([pull / (w * slowing(when, r, a, A, alpha)), growth(when, r, a, A, alpha)])

    span = (0.0, max(float(t[-1]), 1e-300))
    path = solve_ivp(velocity, span, [-np.log1p(-rho0), r0], t_eval=t, method="DOP853", rtol=1e-10, atol=1e-12)
    return np.exp(-path.y[0]), path.y[1]


def law(scheme: str, t: ArrayLike, r0: float = 1.0, alpha: float = 1.0) -> Array:
    """The law of 1 - rho once tokens are close, 1 at t = 0: |A| = <theta,A> = 1, so (1-rho)' = -2 (1-rho)/s.

    post e^{-2t}; pre, peri (1 + t/r0)^{-2}; ngpt e^{-2 alpha t}; ln_scaling e^{-4(sqrt(t+1) - 1)}. arXiv 2510.22026.
    """
    checks.one_of("scheme", scheme, tuple(SCHEMES))
    t, r0, alpha = within("t", t, 0.0), number("r0", r0, 0.0, open=True), number("alpha", alpha, 0.0, open=True)
    laws: dict[str, Callable[[], Array]] = {
        "post": lambda: np.exp(-2 * t),
        "pre": lambda: (1 + t / r0) ** -2,
        "peri": lambda: (1 + t / r0) ** -2,
        "ngpt": lambda: np.exp(-2 * alpha * t),
        "ln_scaling": lambda: np.exp(-4 * (np.sqrt(t + 1) - 1)),
    }
    return laws[scheme]()
