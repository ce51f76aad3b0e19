"""One attention layer on n -> infinity keys: at which beta attention stops averaging (arXiv 2510.05554, 2605.08505).

Two geometries. Equiangular tokens at cosine rho: beta = gamma log n is critical at gamma = 1/(1-rho).
Uniform keys on S^{d-1}: beta = b n^{2/(d-1)} is critical, and there the weights follow a Poisson law: keys near a
query, at distances u n^{-1/(d-1)}, form a Poisson process in R^{d-1} of intensity 1/|S^{d-1}|, weighted e^{-b u^2/2}.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike
from scipy.optimize import brentq
from scipy.special import gammaln

from attn_flow.theory.domain import Array, in_range, integer, integers, within

LEGENDRE = np.polynomial.legendre.leggauss(400)


def output_correlation(rho: ArrayLike, beta: ArrayLike, n: ArrayLike) -> Array:
    """Cosine of two outputs A_i = sum_j softmax_j(beta <x_i,x_j>) x_j of one layer, n equiangular tokens, exactly.

    A_i = (p-q) x_i + q sum_j x_j; with S = 1 + (n-1) rho: <A_i,A_j> = (p-q)^2 rho + 2(p-q) q S + n q^2 S, and
    |A_i|^2 the same with 1 for rho. Its limits are `output_correlation_limit`. arXiv 2510.05554.
    """
    rho, beta, n = within("rho", rho, -1.0, 1.0), within("beta", beta, 0.0), integers("n", n, 2, np.inf)
    if np.any(rho < -1 / (n - 1)):
        raise ValueError(f"rho = {np.min(rho):.6g}, expected at least -1/(n-1): no n tokens have such a cosine.")
    x = np.exp(-beta * (1 - rho))  # everything divided by e^beta: large beta underflows to the identity
    q, S = x / (1 + (n - 1) * x), 1 + (n - 1) * rho
    p = 1 - (n - 1) * q
    common = 2 * (p - q) * q * S + n * q**2 * S
    return ((p - q) ** 2 * rho + common) / ((p - q) ** 2 + common)


def critical_gamma(rho: ArrayLike) -> Array:
    """1/(1-rho): self-attention e^beta balances the others' n e^{beta rho} at beta = gamma log n. arXiv 2510.05554."""
    return 1 / (1 - within("rho", rho, -1.0, 1.0, open=True))


def output_correlation_limit(rho: ArrayLike, gamma: ArrayLike) -> Array:
    """Limit n -> infinity of `output_correlation` at beta = gamma log n, 0 < rho < 1. arXiv 2510.05554.

    1 below gamma = 1/(1-rho) (collapse in one layer), 4 rho/(1+3 rho) at it, rho above (attention does nothing).
    """
    rho, gamma = within("rho", rho, 0.0, 1.0, open=True), within("gamma", gamma, 0.0)
    scale = gamma * (1 - rho)
    at = np.isclose(scale, 1.0, rtol=1e-12)
    return np.where(at, 4 * rho / (1 + 3 * rho), np.where(scale < 1, 1.0, rho))


def critical_beta(n: ArrayLike, d: ArrayLike, b: ArrayLike = 1.0) -> Array:
    """b n^{2/(d-1)}: the beta at which a uniform cloud of n keys on S^{d-1} starts to be resolved. arXiv 2605.08505."""
    return within("b", b, 0.0) * integers("n", n, 1) ** (2 / (integers("d", d, 2) - 1))


def crowd(b: ArrayLike, d: int) -> Array:
    """nu = (2 pi/b)^{(d-1)/2} / |S^{d-1}|: mean of Sigma = sum_j e^{-b u_j^2/2}, the neighbours' weight (self: 1)."""
    b, d = within("b", b, 0.0, open=True), integer("d", d, 2)
    log_sphere = np.log(2) + d / 2 * np.log(np.pi) - gammaln(d / 2)
    return np.exp((d - 1) / 2 * np.log(2 * np.pi / b) - log_sphere)


def _shot(s: Array, d: int, order: int) -> Array:
    """(1/Gamma(D/2)) int_0^inf x^{D/2-1} f(e^{-x}) dx, D = d-1; f(v) = 1 - e^{-sv} (order 0), v^order e^{-sv}."""
    nodes, weights = LEGENDRE
    top = np.sqrt(np.log1p(s) + 45.0)[..., None]  # x = y^2 removes the root singularity at x = 0 when d = 2
    y = top * (nodes + 1) / 2
    sv = s[..., None] * np.exp(-(y**2))
    f = -np.expm1(-sv) if order == 0 else np.exp(-order * y**2 - sv)
    return (weights * top * y ** (d - 2) * f).sum(-1) / np.exp(gammaln((d - 1) / 2))


def laplace(s: ArrayLike, b: float, d: int) -> Array:
    """E e^{-s Sigma} of the neighbours' weight Sigma = sum_j e^{-b u_j^2/2} at beta = b n^{2/(d-1)}. arXiv 2605.08505.

    exp(-nu F(s)), F(s) = -sum_{m>=1} (-s)^m / (m! m^{(d-1)/2}), nu = `crowd`: Campbell's formula for the Poisson law.
    """
    with np.errstate(over="ignore", invalid="ignore"):
        return in_range("the Laplace transform", np.exp(-crowd(b, d) * _shot(within("s", s, 0.0), int(d), 0)))


def _over_laplace(integrand: Array, s: Array) -> float:
    """int_0^inf integrand ds on the nodes of `_log_nodes`."""
    return float((LEGENDRE[1] * 0.5 * 64.0 * s * integrand).sum())


def _log_nodes() -> Array:
    """s = e^x, x in [-60, 4]: both e^{-s} and the scales s ~ 1/nu of a crowd up to e^{25} are inside."""
    return np.exp(-60.0 + 32.0 * (LEGENDRE[0] + 1))


def self_weight(b: float, d: int) -> float:
    """E 1/(1 + Sigma) = int_0^inf e^{-s} E e^{-s Sigma} ds: the mean attention a token pays to itself. 2605.08505."""
    s = _log_nodes()
    return _over_laplace(np.exp(-s) * laplace(s, b, d), s)


def participation(b: float, d: int) -> float:
    """E sum_j w_j^2 over a token and its neighbours, 1 / (effective number of keys attended to). arXiv 2605.08505.

    int_0^inf s e^{-s} E e^{-s Sigma} (1 + nu int v^2 e^{-sv}) ds by Mecke's formula.
    """
    s = _log_nodes()
    with np.errstate(over="ignore", invalid="ignore"):
        found = _over_laplace(s * np.exp(-s) * laplace(s, b, d) * (1 + crowd(b, d) * _shot(s, int(d), 2)), s)
    return float(in_range("the participation", np.asarray(found)))


def balance(d: int) -> float:
    """The b at which a token pays half of its attention to itself: the critical constant of beta = b n^{2/(d-1)}."""
    d = integer("d", d, 2)
    return float(np.exp(brentq(lambda log_b: self_weight(float(np.exp(log_b)), d) - 0.5, -20.0, 20.0, xtol=1e-13)))
