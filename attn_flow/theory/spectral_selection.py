"""Which eigendirection wins when scores and values share a symmetric matrix (arXiv 2604.26085).

Model: softmax attention on the sphere with G = V = V^T: x_i' = P_{x_i} sum_j softmax_j(beta <x_i, V x_j>) V x_j.
One positive eigenvalue dominating in modulus: tokens in its cone align with it. V negative definite: tokens
split by sign along the most negative direction.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from attn_flow.theory.domain import Array, eigenvalues, integer, integers, real, within

MOST = 10**7  # tokens


def _others(lam: ArrayLike, p: int) -> tuple[float, Array]:
    """lambda_p, and the remaining eigenvalues."""
    lam = eigenvalues("lam", lam)
    p = integer("p", p, 0, len(lam) - 1)
    return float(lam[p]), np.delete(lam, p)


def homogeneous_eigenvalues(lam: ArrayLike, p: int, n: int) -> Array:
    """Jacobian eigenvalues on the tangent space at x_i = e_p for all i, sorted, n(d-1) of them. arXiv 2604.26085.

    -lambda_p (n-1 fold for each k != p) and lambda_k - lambda_p. `lam` (d,) or V (d, d).
    """
    n = integer("n", n, 1, MOST)
    lam_p, others = _others(lam, p)
    return np.sort(np.concatenate([np.full((n - 1) * len(others), -lam_p), others - lam_p]))


def split_weights(lam_p: ArrayLike, n_plus: ArrayLike, n_minus: ArrayLike, beta: ArrayLike) -> tuple[Array, Array]:
    """P = n_+ e^{beta lambda} / (n_+ e^{beta lambda} + n_- e^{-beta lambda}), and Q with n_+, n_- exchanged.

    The attention a token at +e_p (at -e_p) pays to its own side.
    """
    n_plus, n_minus = integers("n_plus", n_plus, 1), integers("n_minus", n_minus, 1)
    x = within("beta", beta, 0.0) * real("lam_p", lam_p)
    tilt = np.log(n_plus / n_minus) / 2
    return (1 + np.tanh(x + tilt)) / 2, (1 + np.tanh(x - tilt)) / 2


def sign_split_eigenvalues(lam: ArrayLike, p: int, n_plus: int, n_minus: int, beta: float) -> Array:
    """Jacobian eigenvalues at n_+ tokens at e_p and n_- at -e_p, sorted, n(d-1) of them, all real. arXiv 2604.26085.

    With phi_+ = lambda_p (2P-1), phi_- = lambda_p (2Q-1): -phi_+ (n_+ - 1 fold for each k != p), -phi_-
    (n_- - 1 fold), and those of [[lambda_k P - phi_+, lambda_k (1-P)], [lambda_k (1-Q), lambda_k Q - phi_-]].
    """
    lam_p, lam_k = _others(lam, p)
    n_plus, n_minus = integer("n_plus", n_plus, 1, MOST), integer("n_minus", n_minus, 1, MOST)
    P, Q = split_weights(lam_p, n_plus, n_minus, beta)
    phi_plus, phi_minus = lam_p * (2 * P - 1), lam_p * (2 * Q - 1)
    a, d = lam_k * P - phi_plus, lam_k * Q - phi_minus
    bc = lam_k**2 * (1 - P) * (1 - Q)
    root = np.sqrt((a - d) ** 2 / 4 + bc)
    inner = np.concatenate(
        [np.full((n_plus - 1) * len(lam_k), -phi_plus), np.full((n_minus - 1) * len(lam_k), -phi_minus)]
    )
    return np.sort(np.concatenate([inner, (a + d) / 2 + root, (a + d) / 2 - root]))
