"""One attention layer on very many keys: the beta at which attention stops averaging (arXiv 2510.05554, 2605.08505).

Equiangular tokens with cosine rho: beta = gamma log n is critical at gamma = 1/(1-rho).
Uniform keys on the sphere S^{d-1}: beta = b n^{2/(d-1)} is critical. There the keys near a query, at the distances
u n^{-1/(d-1)}, form a Poisson process in R^{d-1} of intensity 1/|S^{d-1}|, and have the weights e^{-b u^2/2}.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike
from scipy.optimize import brentq
from scipy.special import gammaln

from attn_flow.theory.domain import Array, cosines, integers, reals

NODES, WEIGHTS = np.polynomial.legendre.leggauss(400)
# Quadrature for int_0^inf ds with s = e^x, x in [-60, 4]: both e^{-s} and neighbour weights up to e^25 are resolved.
S_NODES = np.exp(-60.0 + 32.0 * (NODES + 1))
S_WEIGHTS = 32.0 * WEIGHTS * S_NODES


def output_correlation(rho: ArrayLike, beta: ArrayLike, n: ArrayLike) -> Array:
    """Cosine (...) of two outputs sum_j softmax_j(beta <x_i, x_j>) x_j of one layer on n equiangular tokens.

    The output is (p-q) x_i + q sum_j x_j. With S = 1 + (n-1) rho the product of two outputs is
    (p-q)^2 rho + 2 (p-q) q S + n q^2 S, and the squared norm of one has 1 in place of rho. At beta = gamma log n the
    limit of many tokens is 1 for gamma < 1/(1-rho) (one layer collapses the tokens), 4 rho / (1 + 3 rho) at it, and
    rho above (attention does nothing). arXiv 2510.05554.

    >>> float(output_correlation(0.5, 2 * np.log(1e12), 1e12).round(4))  # at gamma = 1/(1-rho)
    0.8
    """
    beta, n = reals("beta", beta, 0), reals("n", n, 2)
    rho = cosines(rho, n)
    x = np.exp(-beta * (1 - rho))  # everything is divided by e^beta, which may overflow
    q, S = x / (1 + (n - 1) * x), 1 + (n - 1) * rho
    p = 1 - (n - 1) * q
    common = 2 * (p - q) * q * S + n * q**2 * S
    return ((p - q) ** 2 * rho + common) / ((p - q) ** 2 + common)


def critical_beta(n: ArrayLike, d: ArrayLike, b: ArrayLike = 1.0) -> Array:
    """beta = b n^{2/(d-1)} (...), at which a layer starts to resolve n uniform keys on S^{d-1}. arXiv 2605.08505.

    `critical_constant` is the b at which a token pays half of its attention to itself.

    >>> critical_beta([100, 10000], 3)
    array([  100., 10000.])
    """
    return reals("b", b, 0) * integers("n", n, 1) ** (2 / (integers("d", d, 2) - 1))


def self_weight(b: float, d: int) -> float:
    """Mean attention E 1/(1 + Sigma) that a token pays to itself at beta = b n^{2/(d-1)}. arXiv 2605.08505.

    Sigma = sum_j e^{-b u_j^2/2} is the weight of the neighbours, and E 1/(1 + Sigma) = int_0^inf e^{-s} L(s) ds with
    its Laplace transform L(s) = exp(-nu F(s)), F(s) = -sum_{m>=1} (-s)^m / (m! m^{(d-1)/2}), where
    nu = (2 pi/b)^{(d-1)/2} / |S^{d-1}| is the mean of Sigma (Campbell's formula).

    >>> round(self_weight(0.4, 3), 3)
    0.501
    """
    return float((S_WEIGHTS * np.exp(-S_NODES - _neighbours(b, d, 0))).sum())


def participation(b: float, d: int) -> float:
    """Mean of sum_j w_j^2 over the keys of a row at beta = b n^{2/(d-1)}: 1 / (effective number of keys).

    int_0^inf s e^{-s} L(s) (1 + nu int v^2 e^{-sv}) ds with L and nu of `self_weight`, by Mecke's formula.
    arXiv 2605.08505.

    >>> round(participation(0.4, 3), 3)
    0.374
    """
    second = 1 + _neighbours(b, d, 2)
    return float((S_WEIGHTS * S_NODES * np.exp(-S_NODES - _neighbours(b, d, 0)) * second).sum())


def critical_constant(d: int) -> float:
    """The b at which `self_weight` is 1/2, so that beta = b n^{2/(d-1)} is the critical beta. arXiv 2605.08505.

    >>> round(critical_constant(3), 3)
    0.399
    """
    return float(np.exp(brentq(lambda log_b: self_weight(float(np.exp(log_b)), d) - 0.5, -20.0, 20.0, xtol=1e-13)))


def _neighbours(b: float, d: int, order: int) -> Array:
    """nu/Gamma(D/2) int_0^inf x^{D/2-1} f(e^{-x}) dx at the nodes s, with D = d - 1.

    f(v) = 1 - e^{-sv} for order 0, which gives -log of the mean of e^{-s Sigma}; otherwise f(v) = v^order e^{-sv}.
    """
    b, d = float(reals("b", b, 0, is_open=True)), int(integers("d", d, 2))
    # x = y^2 removes the root singularity at x = 0 for d = 2; the integrand ends where x^{D/2-1} e^{-x} does.
    top = np.sqrt(np.log1p(S_NODES) + 45.0 + 2 * d)[:, None]
    y = top * (NODES + 1) / 2
    sv = S_NODES[:, None] * np.exp(-(y**2))
    f = -np.expm1(-sv) if order == 0 else np.exp(-order * y**2 - sv)
    log_sphere = np.log(2) + d / 2 * np.log(np.pi) - gammaln(d / 2)
    log_nu = (d - 1) / 2 * np.log(2 * np.pi / b) - log_sphere
    log_factor = log_nu - gammaln((d - 1) / 2) + (d - 2) * np.log(y)
    return (WEIGHTS * top * np.exp(np.minimum(log_factor, 600.0)) * f).sum(-1)  # it overflows where b is nearly 0
