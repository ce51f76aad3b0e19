"""Hardmax attention in R^d: leaders, cells and the Frank-Wolfe gap (arXiv 2407.01602, arXiv 2508.09628).

Model: x_i <- (x_i + alpha mean{x_j : j in argmax_j <G x_i, x_j>}) / (1 + alpha). A token is a leader when it is its
own only argmax; a leader never moves. A token that is the mean of all it attends to, through ties, stands still too.
Tokens that follow a leader v stay in its cell {x : <Gx, v> >= <Gx, w>, all w}
and reach it geometrically. Read as Frank-Wolfe: a step of size alpha/(1+alpha) towards the maximiser of a linear form.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from attn_flow.theory.domain import Array, integers, number, real, within


def _tokens(x: ArrayLike, G: ArrayLike | None) -> tuple[Array, Array]:
    """x (n, d) and Gx (n, d)."""
    x = real("x", x)
    if x.ndim != 2:
        raise ValueError(f"x has shape {x.shape}, expected (n, d): one cloud of n tokens.")
    if G is None:
        return x, x
    G = real("G", G)
    if G.shape != (x.shape[1], x.shape[1]):
        raise ValueError(f"G has shape {G.shape}, expected (d, d) = {(x.shape[1], x.shape[1])} to match x.")
    return x, x @ G.T


def followed(x: ArrayLike, G: ArrayLike | None = None) -> NDArray[np.bool_]:
    """(n, n): whether token i attends to token j, j in argmax_j <G x_i, x_j>; ties to rounding are ties."""
    x, g = _tokens(x, G)
    scores = g @ x.T
    scale = np.linalg.norm(g, axis=1, keepdims=True) * np.linalg.norm(x, axis=1).max()
    return scores >= scores.max(1, keepdims=True) - 1e-14 * scale


def leaders(x: ArrayLike, G: ArrayLike | None = None) -> NDArray[np.intp]:
    """Indices of tokens at rest: those that are the mean of all they attend to. arXiv 2407.01602.

    Most are their own only argmax, as every token on a sphere is for G = c I (for another G, few are); through ties a
    token may stand still between others.

    >>> leaders([[-1.0], [0.0], [1.0]]).tolist()  # 0 attends to all three
    [0, 1, 2]
    """
    attends = followed(x, G)
    x = real("x", x)
    mean = attends @ x / attends.sum(1, keepdims=True)
    return np.flatnonzero(np.linalg.norm(mean - x, axis=1) <= 1e-14 * np.linalg.norm(x, axis=1).max())


def step(x: ArrayLike, alpha: float, G: ArrayLike | None = None) -> Array:
    """x_i <- (x_i + alpha mean_{argmax} x_j)/(1 + alpha). arXiv 2407.01602."""
    alpha = number("alpha", alpha, 0.0, open=True)
    x = real("x", x)
    attends = followed(x, G)
    return (x + alpha * (attends @ x) / attends.sum(1, keepdims=True)) / (1 + alpha)


def distance_to_leader(distance: ArrayLike, alpha: float, steps: ArrayLike) -> Array:
    """|x_k - v| = |x_0 - v| (1+alpha)^{-k}: exact while a token follows the one leader v."""
    alpha = number("alpha", alpha, 0.0, open=True)
    return within("distance", distance, 0.0) * (1 + alpha) ** -integers("steps", steps, 0)


def frank_wolfe_gap(x: ArrayLike, vertices: ArrayLike, G: ArrayLike | None = None) -> Array:
    """max_v <G x_i, v - x_i> >= 0 on the hull of `vertices` (k, d): zero iff hardmax no longer moves x_i uphill.

    The linear form is the gradient of f(x) = <x, G x>/2 for symmetric G. arXiv 2508.09628.
    """
    x, g = _tokens(x, G)
    vertices = real("vertices", vertices)
    if vertices.ndim != 2 or vertices.shape[1] != x.shape[1]:
        raise ValueError(f"vertices have shape {vertices.shape}, expected (k, d) with d = {x.shape[1]} to match x.")
    return (g @ vertices.T).max(1) - (g * x).sum(1)


def gap_bound(rise: ArrayLike, alpha: float, steps: ArrayLike) -> Array:
    """min_{k<K} gap_k <= (max f - f(x_0)) (1+alpha)/(alpha K), `rise` = max f - f(x_0), G positive semidefinite.

    f is convex, so a step gamma = alpha/(1+alpha) gains at least gamma gap_k: no smoothness constant. arXiv 2508.09628.
    """
    alpha = number("alpha", alpha, 0.0, open=True)
    return within("rise", rise, 0.0) * (1 + alpha) / (alpha * integers("steps", steps, 1))
