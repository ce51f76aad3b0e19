"""Is a Gaussian layer stable? Growth rates of all its perturbations, degree by degree.

Where the leading eigenvalue lambda = v gamma of M is negative, the tokens of a cluster at e repel each other and
balance at a Gaussian of precision Sigma^-1 = beta (lambda - G_ V_)/|v| across e (THEORY 1; _ are compressions to
e^perp). Perturb its density to rho (1 + h). A token at y then sees its mean moved by P^-1 E[grad h] under N(B y,
P^-1), where P = beta G_ V_ / v and B = v V_^-1, so that h' = -div(rho du)/rho with du = V_ P^-1 E[grad h]. That
raises no degree of a polynomial h; on the top part of it, homogeneous of degree n, it is

    L_n h(y) = <A y, (grad h)(B y)>,      A = (V_ P^-1)^T Sigma^-1,

and the eigenvalues of L_1, L_2, ... are the rates. For commuting diagonal blocks they are
mu_k = [sum_j k_j (V_j/G_j)(lambda - lambda_j)/|v|] prod_i (v/V_i)^{k_i}; degree 1 is the offset of the cluster.
"""

from __future__ import annotations

import math
from itertools import combinations_with_replacement

import numpy as np
from numpy.typing import NDArray

from attn_flow.prediction.spectral import Array

Polynomial = dict[tuple[int, ...], float]


def mode_rates(V: Array, G: Array, v: float, gamma: float, degree: int) -> NDArray[np.complex128]:
    """The complex growth rates of the modes of one degree >= 1 of the layer; V, G (m, m) across e, v gamma < 0.

    >>> mode_rates(np.array([[0.5]]), np.array([[-3.0]]), v=-1.0, gamma=1.0, degree=3).real
    array([2.])
    """
    P = G @ V / v  # in units of beta, as the precision below
    precision = (v * gamma * np.eye(len(V)) - G @ V) / abs(v)
    A: Array = np.asarray((V @ np.linalg.inv(P)).T @ precision, dtype=np.float64)
    B: Array = np.asarray(v * np.linalg.inv(V), dtype=np.float64)
    rates: NDArray[np.complex128] = np.asarray(np.linalg.eigvals(_action(A, B, degree)), dtype=np.complex128)
    return rates


def degrees(m: int, largest: int = 12, entries: int = 120) -> range:
    """Degrees whose modes in m dimensions are few enough to be looked at: C(m + n - 1, n) <= entries."""
    n = 1
    while n < largest and math.comb(m + n, n + 1) <= entries:
        n += 1
    return range(1, n + 1)


def _action(A: Array, B: Array, n: int) -> Array:
    """The matrix of h -> <A y, (grad h)(B y)> on the monomials of degree n in m variables."""
    m = len(A)
    monomials = [tuple(np.bincount(c, minlength=m)) for c in combinations_with_replacement(range(m), n)]
    place = {k: i for i, k in enumerate(monomials)}
    one: Polynomial = {(0,) * m: 1.0}
    powers: dict[tuple[int, ...], Polynomial] = {(0,) * m: one}  # (B y)^k
    matrix = np.zeros((len(monomials), len(monomials)))
    for column, k in enumerate(monomials):
        for j in np.flatnonzero(k):
            image = _times(_power(B, _lower(k, int(j)), powers), A[j])
            for power, c in image.items():
                matrix[place[power], column] += k[j] * c
    return matrix


def _lower(k: tuple[int, ...], j: int) -> tuple[int, ...]:
    return (*k[:j], k[j] - 1, *k[j + 1 :])


def _power(B: Array, k: tuple[int, ...], known: dict[tuple[int, ...], Polynomial]) -> Polynomial:
    """(B y)^k = prod_j <B_j, y>^{k_j}."""
    if k not in known:
        j = next(j for j, power in enumerate(k) if power)
        known[k] = _times(_power(B, _lower(k, j), known), B[j])
    return known[k]


def _times(p: Polynomial, row: Array) -> Polynomial:
    """p(y) <row, y>."""
    product: Polynomial = {}
    for k, c in p.items():
        for j, r in enumerate(row):
            if r:
                raised = (*k[:j], k[j] + 1, *k[j + 1 :])
                product[raised] = product.get(raised, 0.0) + c * float(r)
    return product
