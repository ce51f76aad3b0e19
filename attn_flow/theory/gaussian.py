"""A Gaussian law of tokens stays Gaussian under softmax attention in R^d (Castin et al., arXiv 2501.18322).

The tilted mean of N(m, S) is m + beta S g, so x' = V (m + beta S G x) is affine:
m' = V (m + beta S G m),   S' = beta (V S G S + S G^T S V^T).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike
from scipy.integrate import solve_ivp
from scipy.linalg import eigh

from attn_flow.theory.domain import Array, in_range, number, real, square, within


def _law(m: ArrayLike, S: ArrayLike) -> tuple[Array, Array]:
    m, S = real("mean", m), real("covariance", S)
    if m.ndim != 1 or S.shape != (len(m), len(m)):
        raise ValueError(f"mean has shape {m.shape} and covariance {S.shape}, expected (d,) and (d, d).")
    if not np.allclose(S, S.T):
        raise ValueError("covariance is not symmetric; expected a symmetric matrix, e.g. (S + S.T)/2.")
    if (least := float(np.linalg.eigvalsh(S).min(initial=0.0))) < -1e-12 * float(np.abs(S).max(initial=0.0)):
        raise ValueError(f"covariance has the eigenvalue {least:.3g} < 0, expected a nonnegative matrix.")
    return m, S


def velocity(m: ArrayLike, S: ArrayLike, V: ArrayLike, G: ArrayLike, beta: float) -> tuple[Array, Array]:
    """(m', S') of the mean and covariance. arXiv 2501.18322."""
    m, S = _law(m, S)
    V, G, beta = square("V", V, len(m)), square("G", G, len(m)), number("beta", beta)
    growth = V @ S @ G @ S
    return V @ (m + beta * S @ G @ m), beta * (growth + growth.T)


def solve(
    t: ArrayLike, m0: ArrayLike, S0: ArrayLike, V: ArrayLike, G: ArrayLike, beta: float, ceiling: float = 1e12
) -> tuple[Array, Array, Array]:
    """Times reached (T,), means (T, d) and covariances (T, d, d); stops where ||S|| passes `ceiling` (blow-up)."""
    m0, S0 = _law(m0, S0)
    t, d = np.atleast_1d(within("t", t, 0.0)), len(m0)
    ceiling = number("ceiling", ceiling, 0.0, open=True)
    velocity(m0, S0, V, G, beta)  # of which some may be refused

    def packed(_: float, y: Array) -> Array:
        S = y[d:].reshape(d, d)
        dm, dS = velocity(y[:d], (S + S.T) / 2, V, G, beta)
        return np.concatenate([dm, dS.ravel()])

    def too_large(_: float, y: Array) -> float:
        return ceiling - float(np.abs(y[d:]).max())

    too_large.terminal = True  # type: ignore[attr-defined]
    y0 = np.concatenate([m0, S0.ravel()])
    span = (0.0, max(float(t[-1]), 1e-300))
    path = solve_ivp(packed, span, y0, t_eval=t, method="DOP853", rtol=1e-11, atol=1e-13, events=too_large)
    if path.status == -1 or not len(path.t):
        raise FloatingPointError(f"the law blows up, or moves too fast, before t = {t[0]:.6g}: {path.message}")
    return path.t, path.y[:d].T, path.y[d:].T.reshape(-1, d, d)


def blow_up_time(S0: ArrayLike, v: float, G: ArrayLike, beta: float) -> float:
    """1 / max eigenvalue of beta v (G + G^T) relative to S0^{-1}; inf if none is positive. For V = v I, any G.

    (S^{-1})' = -beta v (G + G^T), so S^{-1}(t) = S0^{-1} - beta v t (G + G^T) until it stops being positive.
    Scalar case: 1/(2 beta v g s_0). arXiv 2501.18322.
    """
    S0 = np.atleast_2d(real("S0", S0))
    S0 = _law(np.zeros(len(S0)), S0)[1]
    G, v, beta = square("G", G, len(S0)), number("v", v), number("beta", beta)
    A = in_range("beta v (G + G^T)", np.float64(beta) * v * (G + G.T))
    top = float(eigh(A, np.linalg.inv(S0), eigvals_only=True)[-1])
    # rounding must not turn a stable law (top = 0) into one that blows up at 1e16
    return 1 / top if top > 1e-13 * float(np.abs(A).max() * np.abs(S0).max()) else float("inf")


def scalar_value(
    t: ArrayLike, m0: ArrayLike, S0: ArrayLike, v: float, G: ArrayLike, beta: float
) -> tuple[Array, Array]:
    """Means (T, d) and covariances (T, d, d) in closed form for V = v I and symmetric G, t < `blow_up_time`.

    S(t) = (I - 2 beta v t S0 G)^{-1} S0,   m(t) = e^{vt} (I - 2 beta v t S0 G)^{-1/2} m0. arXiv 2501.18322.
    """
    m0, S0 = _law(m0, S0)
    G, v, beta = square("G", G, len(m0)), number("v", v), number("beta", beta)
    if not np.allclose(G, G.T):
        raise ValueError("G is not symmetric; the closed form of the mean needs it. Use `solve` for a general G.")
    t = np.atleast_1d(within("t", t, 0.0))
    end = blow_up_time(S0, v, G, beta)
    if t.max() >= end:
        raise ValueError(f"t = {t.max():.6g}, expected t < {end:.6g}, the blow-up time.")
    # S0 G = R diag(lam) R^{-1} with real lam, because it is similar to S0^{1/2} G S0^{1/2}
    lam, W = eigh(G, np.linalg.inv(S0))  # G W = S0^{-1} W diag(lam), W^T S0^{-1} W = I
    R_inverse = W.T @ np.linalg.inv(S0)
    shrink = 1 - 2 * beta * v * t[:, None] * lam  # (T, d)
    m = np.exp(v * t)[:, None] * ((shrink**-0.5 * (R_inverse @ m0)) @ W.T)
    S = np.einsum("ik,tk,jk->tij", W, 1 / shrink, W)
    return m, S
