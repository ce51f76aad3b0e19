"""Which eigendirection wins when scores and values share a symmetric matrix (arXiv 2604.26085).

Model: softmax attention on the sphere with G = V = V^T. If one positive eigenvalue dominates in modulus, tokens in its
cone align with it. If V is negative definite, tokens split by sign along the most negative direction.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from attn_flow.theory.domain import Array, integers, reals


def homogeneous_eigenvalues(lam: ArrayLike, p: int, n: int) -> Array:
    """The n (d-1) Jacobian eigenvalues on the tangent space where all n tokens are at the eigenvector e_p, sorted.

    They are lambda_k - lambda_p for k != p, and -lambda_p with multiplicity n - 1 for each k. arXiv 2604.26085.

    Args:
        lam: eigenvalues (d,) of V.
        p: index of the eigenvalue.

    >>> homogeneous_eigenvalues([2.0, 1.0], p=0, n=3)
    array([-2., -2., -1.])
    """
    lam_p, others = _split_off(lam, p)
    return np.sort(np.concatenate([np.full((int(integers("n", n, 1)) - 1) * len(others), -lam_p), others - lam_p]))


def sign_split_eigenvalues(lam: ArrayLike, p: int, n_plus: int, n_minus: int, beta: float) -> Array:
    """The n (d-1) Jacobian eigenvalues with n_plus tokens at e_p and n_minus at -e_p, all real, sorted.

    A token at e_p pays P = n_+ e^{beta lambda_p} / (n_+ e^{beta lambda_p} + n_- e^{-beta lambda_p}) of its attention to
    its own side, a token at -e_p likewise Q. With phi_+ = lambda_p (2P-1) and phi_- = lambda_p (2Q-1) the eigenvalues
    are -phi_+ (n_+ - 1 times for each k != p), -phi_- (n_- - 1 times), and those of
    [[lambda_k P - phi_+, lambda_k (1-P)], [lambda_k (1-Q), lambda_k Q - phi_-]]. arXiv 2604.26085.

    Args:
        lam, p: eigenvalues and the index of one, as in `homogeneous_eigenvalues`.
        n_plus, n_minus: numbers of tokens on the two sides, at least 1.

    >>> bool(sign_split_eigenvalues([-0.4, -1.0, -4.0], 2, 1, 1, beta=1.0).max() < 0)  # a stable split
    True
    """
    lam_p, lam_k = _split_off(lam, p)
    counts = [int(integers("n_plus", n_plus, 1)), int(integers("n_minus", n_minus, 1))]
    x, tilt = float(reals("beta", beta, 0)) * lam_p, np.log(counts[0] / counts[1]) / 2
    P, Q = (1 + np.tanh(x + tilt)) / 2, (1 + np.tanh(x - tilt)) / 2
    phi = [lam_p * (2 * P - 1), lam_p * (2 * Q - 1)]
    a, d = lam_k * P - phi[0], lam_k * Q - phi[1]
    root = np.sqrt((a - d) ** 2 / 4 + lam_k**2 * (1 - P) * (1 - Q))
    inner = [np.full((count - 1) * len(lam_k), -value) for count, value in zip(counts, phi)]
    return np.sort(np.concatenate([*inner, (a + d) / 2 + root, (a + d) / 2 - root]))


def _split_off(lam: ArrayLike, p: int) -> tuple[float, Array]:
    """The eigenvalue lambda_p and the others."""
    lam = reals("lam", lam)
    if not 0 <= p < len(lam):
        raise ValueError(f"p = {p}, expected the index of one of {len(lam)} eigenvalues.")
    return float(lam[p]), np.delete(lam, p)
