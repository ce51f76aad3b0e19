"""How much softmax attention can amplify a perturbation of the tokens (Castin, Ablin, Peyré, arXiv 2312.14820).

The map is f(x)_i = V sum_j p_ij x_j with p_ij = softmax_j(beta <G x_i, x_j>). With m_i and S_i the mean and covariance
of the tokens under p_i, its derivative is
df_i = V [sum_j p_ij dx_j + beta S_i G dx_i + beta sum_j p_ij (x_j - m_i) <G x_i, dx_j>].
Norms of perturbations are Euclidean over all tokens, as in W_2 between paired clouds.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike
from scipy.special import softmax

from attn_flow.theory.domain import Array, integers, reals


def local_lipschitz(x: ArrayLike, beta: float, G: ArrayLike | None = None, V: ArrayLike | None = None) -> float:
    """The local Lipschitz constant at tokens x (n, d): the largest singular value of the (n d, n d) Jacobian.

    Args:
        x: tokens (n, d), of any length.
        G, V: matrices of scores and of values (d, d); None is the identity.

    >>> round(local_lipschitz([[1.0, 0.0], [-1.0, 0.0]], beta=0.0), 6)  # the plain mean contracts
    1.0
    """
    x, beta = reals("x", x), float(reals("beta", beta, 0))
    if x.ndim != 2:
        raise ValueError(f"x has shape {x.shape}, expected (n, d): one cloud of n tokens.")
    n, d = x.shape
    G, V = (np.eye(d) if A is None else reals(name, A) for name, A in (("G", G), ("V", V)))
    g = x @ G.T
    p = softmax(beta * g @ x.T, axis=1)
    centred = x - (p @ x)[:, None]  # (i, j, d)
    blocks = p[:, :, None, None] * (np.eye(d) + beta * centred[..., None] * g[:, None, None, :])  # (i, j, d, d)
    covariance = np.einsum("ij,ija,ijb->iab", p, centred, centred)
    blocks[np.arange(n), np.arange(n)] += beta * covariance @ G
    return float(np.linalg.norm((V @ blocks).transpose(0, 2, 1, 3).reshape(n * d, n * d), 2))


def lipschitz_bound(a: ArrayLike, n: ArrayLike | None = None, value_norm: ArrayLike = 1.0) -> Array:
    """A bound |V| ((1 + a) sqrt(c) + a), c = min(n, e^{2a}), on the Lipschitz constant over a ball (...).

    The three terms of the derivative are bounded one by one: the covariance of points in a ball of radius R is at most
    R^2, and the attention that one token receives from all is at most n, and at most e^{2a}. Without n it is the bound
    for measures. Derived here; arXiv 2312.14820 proves bounds of this kind.

    Args:
        a: beta |G| R^2 (...), with the spectral norm of G and the radius R of the ball.
        n: number of tokens (...); None for any number of them.
        value_norm: spectral norm of V (...).

    >>> lipschitz_bound([0.0, 1.0]).round(3)
    array([1.   , 6.437])
    """
    a = reals("a", a, 0)
    with np.errstate(over="ignore"):
        received = np.exp(2 * a if n is None else np.minimum(2 * a, np.log(integers("n", n, 1))))
    return reals("value_norm", value_norm, 0) * ((1 + a) * np.sqrt(received) + a)
