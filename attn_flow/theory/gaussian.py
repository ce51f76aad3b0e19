"""Gaussian tokens stay Gaussian under softmax attention in R^d (Castin et al., arXiv 2501.18322).

The tilted mean of N(m, S) is m + beta S g, so the drift x' = V (m + beta S G x) is affine and
m' = V (m + beta S G m),   S' = beta (V S G S + S G^T S V^T).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike
from scipy.integrate import solve_ivp

from attn_flow.theory.domain import Array, reals


def _covariance(S: ArrayLike) -> Array:
    S = reals("covariance", S)
    if S.ndim != 2 or S.shape[0] != S.shape[1]:
        raise ValueError(f"covariance has shape {S.shape}, expected (d, d).")
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

    (S^{-1})' = -beta v (G + G^T), so S(t) = R (I - beta v t R^T (G + G^T) R)^{-1} R^T with S0 = R R^T; in one dimension
    the time is 1 / (2 beta v G S0). If G is symmetric, the mean is e^{vt} (I - 2 beta v t S0 G)^{-1/2} m0.
    arXiv 2501.18322.

    Args:
        S0: covariance (d, d) at time 0.
        v: the value matrix is v I.
        G: scores (d, d).

    >>> round(blow_up_time([[0.5]], v=1.0, G=[[1.0]], beta=2.0), 6)
    0.5
    """
    S0, G = _covariance(S0), reals("G", G)
    variances, axes = np.linalg.eigh(S0)
    root, A = axes * np.sqrt(variances.clip(min=0)), beta * v * (G + G.T)
    top = float(np.linalg.eigvalsh(root.T @ A @ root)[-1])
    # Rounding must not turn a bounded covariance (top = 0) into a blow-up at a time near 1e16.
    return 1 / top if top > 1e-13 * float(np.abs(A).max() * np.abs(S0).max()) else float("inf")
