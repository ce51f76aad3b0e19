"""Hardmax attention in R^d: leaders, cells and the Frank-Wolfe gap (arXiv 2407.01602, arXiv 2508.09628).

Model: x_i <- (x_i + alpha mean{x_j : j in argmax_j <G x_i, x_j>}) / (1 + alpha). A leader is a token at rest. A token
that attends to one leader v stays in its cell {x : <G x, v> >= <G x, w> for all w} and approaches it like
(1 + alpha)^{-k} after k steps. Each step is a Frank-Wolfe step of size alpha/(1+alpha) for a linear form.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from attn_flow.theory.domain import Array, reals

ROUNDING = 1e-14  # relative differences of scores below this count as ties


def argmax_matrix(x: ArrayLike, G: ArrayLike | None = None) -> NDArray[np.bool_]:
    """Whether token i attends to token j, (n, n): j in argmax_j <G x_i, x_j>; ties up to rounding are ties.

    Args:
        x: tokens (n, d).
        G: score matrix (d, d); None is the identity.

    >>> argmax_matrix([[1.0], [2.0]])  # both attend to the second
    array([[False,  True],
           [False,  True]])
    """
    x, g = _directions(x, G)
    scores = g @ x.T
    scale = np.linalg.norm(g, axis=1, keepdims=True) * np.linalg.norm(x, axis=1).max()
    return scores >= scores.max(1, keepdims=True) - ROUNDING * scale


def _directions(x: ArrayLike, G: ArrayLike | None) -> tuple[Array, Array]:
    """x (n, d) and G x (n, d)."""
    x = reals("x", x)
    if x.ndim != 2:
        raise ValueError(f"x has shape {x.shape}, expected (n, d): one cloud of n tokens.")
    return x, x if G is None else x @ reals("G", G).T


def leaders(x: ArrayLike, G: ArrayLike | None = None) -> NDArray[np.intp]:
    """Indices of the tokens at rest: each is the mean of the tokens it attends to. arXiv 2407.01602.

    Most leaders are their own only argmax, as every token on a sphere is for G = c I. Through ties a token may also
    rest between others. x (n, d) and G as in `argmax_matrix`.

    >>> leaders([[-1.0], [0.0], [1.0]])  # the token at 0 attends to all three
    array([0, 1, 2])
    """
    x = np.asarray(x, dtype=np.float64)
    motion = np.linalg.norm(_attention_mean(x, G) - x, axis=1)
    return np.flatnonzero(motion <= ROUNDING * np.linalg.norm(x, axis=1).max())


def _attention_mean(x: Array, G: ArrayLike | None) -> Array:
    attends = argmax_matrix(x, G)
    return attends @ x / attends.sum(1, keepdims=True)


def step(x: ArrayLike, alpha: float, G: ArrayLike | None = None) -> Array:
    """The tokens (n, d) after one step x_i <- (x_i + alpha mean_{argmax} x_j) / (1 + alpha), alpha > 0.

    x (n, d) and G as in `argmax_matrix`. arXiv 2407.01602.

    >>> step([[1.0], [2.0]], alpha=1.0)
    array([[1.5],
           [2. ]])
    """
    alpha, x = float(reals("alpha", alpha, 0, is_open=True)), np.asarray(x, dtype=np.float64)
    return (x + alpha * _attention_mean(x, G)) / (1 + alpha)


def frank_wolfe_gap(x: ArrayLike, vertices: ArrayLike, G: ArrayLike | None = None) -> Array:
    """max_v <G x_i, v - x_i> (n,) over the vertices v: zero if hardmax attention no longer moves x_i uphill.

    For symmetric G the linear form is the gradient of f(x) = <x, G x> / 2. If G is positive semidefinite, a step gains
    at least alpha/(1+alpha) times the gap, so the smallest gap of the first K steps is at most
    (max f - f(x_0)) (1+alpha) / (alpha K). arXiv 2508.09628.

    Args:
        x, G: tokens (n, d) and score matrix, as in `argmax_matrix`.
        vertices: points (k, d) whose hull contains the tokens.

    >>> frank_wolfe_gap([[0.5], [1.0]], [[-1.0], [1.0]])
    array([0.25, 0.  ])
    """
    x, g = _directions(x, G)
    return (g @ reals("vertices", vertices).T).max(1) - (g * x).sum(1)
