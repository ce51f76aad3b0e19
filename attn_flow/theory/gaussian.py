"""Gaussian tokens stay Gaussian under softmax attention in R^d (Castin et al., arXiv 2501.18322).

The tilted mean of N(m, S) is m + beta S g, so the drift x' = V (m + beta S G x) is affine and
m' = V (m + beta S G m),   S' = beta (V S G S + S G^T S V^T).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike
from scipy.integrate import solve_ivp
from scipy.linalg import eigh

from attn_flow.theory.domain import Array, reals


def _covariance(S: ArrayLike) -> Array:
    S = reals("covariance", S)
    if not np.allclose(S, S.T) or np.linalg.eigvalsh(S).min() < -1e-12 * np.abs(S).max():
        raise ValueError("covariance is not symmetric or not nonnegative; expected a covariance matrix.")
    return S


def solve(
    t: ArrayLike, m0: ArrayLike, S0: ArrayLike, V: ArrayLike, G: ArrayLike, beta: float, ceiling: float = 1e12
) -> tuple[Array, Array, Array]:
    """Mean and covariance over time by numerical integration, up to a blow-up. arXiv 2501.18322.

    Args:
        t: increasing times (T,), at least 0.
        m0, S0: mean (d,) and covariance (d, d) at time 0.
        V, G: values and scores, (d, d).
        ceiling: the integration stops when an entry of S reaches this size.

    Returns:
        The times that were reached (T',), means (T', d) and covariances (T', d, d).

    >>> t, m, S = solve([0.0, 0.25, 9.0], [1.0], [[1.0]], [[1.0]], [[1.0]], beta=1.0)  # blows up at t = 0.5
    >>> t, S[-1].round(6)
    (array([0.  , 0.25]), array([[2.]]))
    """
    m0, S0, V, G = reals("mean", m0), _covariance(S0), reals("V", V), reals("G", G)
    t, d = np.atleast_1d(reals("t", t, 0)), len(m0)

    def velocity(_: float, y: Array) -> Array:
        m, S = y[:d], y[d:].reshape(d, d)
        growth = V @ S @ G @ S
        return np.concatenate([V @ (m + beta * S @ G @ m), (beta * (growth + growth.T)).ravel()])

    def room(_: float, y: Array) -> float:
        return ceiling - float(np.abs(y[d:]).max())

    room.terminal = True  # type: ignore[attr-defined]
    y0, span = np.concatenate([m0, S0.ravel()]), (0.0, max(float(t[-1]), 1e-300))
    path = solve_ivp(velocity, span, y0, t_eval=t, method="DOP853", rtol=1e-11, atol=1e-13, events=room)
    if path.status == -1 or not len(path.t):
        raise FloatingPointError(f"the covariance blows up before t = {t[0]:g} ({path.message}); use earlier times.")
    return path.t, path.y[:d].T, path.y[d:].T.reshape(-1, d, d)


def blow_up_time(S0: ArrayLike, v: float, G: ArrayLike, beta: float) -> float:
    """Time at which the covariance becomes infinite for V = v I and any G; infinity if it stays bounded.

    (S^{-1})' = -beta v (G + G^T), so S^{-1} is linear in time. In one dimension the time is 1 / (2 beta v G S0).
    arXiv 2501.18322.

    Args:
        S0: covariance (d, d) at time 0, positive definite.
        v: the value matrix is v I.
        G: scores (d, d).

    >>> round(blow_up_time([[0.5]], v=1.0, G=[[1.0]], beta=2.0), 6)
    0.5
    """
    S0, G = _covariance(S0), reals("G", G)
    A = beta * v * (G + G.T)
    top = float(eigh(A, np.linalg.inv(S0), eigvals_only=True)[-1])
    # Rounding must not turn a bounded covariance (top = 0) into a blow-up at a time near 1e16.
    return 1 / top if top > 1e-13 * float(np.abs(A).max() * np.abs(S0).max()) else float("inf")


def solve_scalar_values(
    t: ArrayLike, m0: ArrayLike, S0: ArrayLike, v: float, G: ArrayLike, beta: float
) -> tuple[Array, Array]:
    """Means (T, d) and covariances (T, d, d) in closed form for V = v I and symmetric G. arXiv 2501.18322.

    S(t) = (I - 2 beta v t S0 G)^{-1} S0,   m(t) = e^{vt} (I - 2 beta v t S0 G)^{-1/2} m0.

    Args:
        t: times (T,), at least 0 and below `blow_up_time`.
        m0, S0: mean (d,) and covariance (d, d) at time 0.
        v, G: the value matrix is v I; scores (d, d), symmetric.

    >>> m, S = solve_scalar_values([0.25], [1.0], [[1.0]], 1.0, [[1.0]], beta=1.0)
    >>> S
    array([[[2.]]])
    """
    m0, S0, G = reals("mean", m0), _covariance(S0), reals("G", G)
    t = np.atleast_1d(reals("t", t, 0))
    if not np.allclose(G, G.T):
        raise ValueError("G is not symmetric, as the closed form of the mean requires; use `solve` for a general G.")
    end = blow_up_time(S0, v, G, beta)
    if t.max() >= end:
        raise ValueError(f"t = {t.max():g}, expected t < {end:g}, the blow-up time.")
    # G W = S0^{-1} W diag(lam) and W^T S0^{-1} W = I, so S0 G = W diag(lam) W^{-1} with real lam.
    lam, W = eigh(G, np.linalg.inv(S0))
    shrink = 1 - 2 * beta * v * t[:, None] * lam  # (T, d)
    m = np.exp(v * t)[:, None] * ((shrink**-0.5 * np.linalg.solve(W, m0)) @ W.T)
    return m, np.einsum("ik,tk,jk->tij", W, 1 / shrink, W)
