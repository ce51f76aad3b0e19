"""Layers with random weights shared by all tokens: synchronisation by common noise (arXiv 2604.26898, 2601.21942).

x <- normalise(x + h attention(x) + sqrt(h) xi(x)), xi a centred Gaussian field with E xi(x) xi(y)^T = kappa(<x,y>) I,
fresh in every layer. Two tokens: rho = <x,y> is a diffusion on [-1, 1].
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import ArrayLike
from scipy.optimize import brentq

from attn_flow.averages import bessel
from attn_flow.base import checks
from attn_flow.theory.domain import Array, integer, integers, real, within

Kernel = Callable[[Array], Array]
# kappa, and kappa'(1)
KERNELS: dict[str, tuple[Kernel, float]] = {
    "linear": (lambda rho: rho, 1.0),
    "constant": (lambda rho: np.ones_like(rho), 0.0),
    "quadratic": (lambda rho: rho**2, 2.0),
    "exponential": (lambda rho: np.exp(rho - 1), 1.0),
    "mixed": (lambda rho: (1 + rho) / 2, 0.5),
}


def drift(rho: ArrayLike, kappa: Kernel, d: ArrayLike) -> Array:
    """(d-2+rho^2) kappa(rho) - (d-1) kappa(1) rho, the noise part of the drift of rho. arXiv 2604.26898."""
    rho, d = within("rho", rho, -1.0, 1.0), integers("d", d, 2)
    checks.function("kappa", kappa, "of rho, such as one of KERNELS")
    return (d - 2 + rho**2) * kappa(rho) - (d - 1) * kappa(np.ones_like(rho)) * rho


def diffusion(rho: ArrayLike, kappa: Kernel) -> Array:
    """sqrt(2 (1-rho^2) (kappa(1) - rho kappa(rho))), the coefficient of dB. arXiv 2604.26898."""
    rho = within("rho", rho, -1.0, 1.0)
    checks.function("kappa", kappa, "of rho, such as one of KERNELS")
    return np.sqrt(2 * (1 - rho**2) * (kappa(np.ones_like(rho)) - rho * kappa(rho)))


def attention_drift(rho: ArrayLike, beta: ArrayLike, a: ArrayLike = 1.0) -> Array:
    """2a (1-rho^2) / (1 + e^{beta(1-rho)}): what two-token softmax attention of strength a adds to the drift of rho."""
    rho, beta = within("rho", rho, -1.0, 1.0), within("beta", beta, 0.0)
    return 2 * real("a", a) * (1 - rho**2) / (1 + np.exp(beta * (1 - rho)))


def lyapunov(d: ArrayLike, kappa_1: ArrayLike = 1.0, kappa_slope_1: ArrayLike = 1.0, a: ArrayLike = 0.0) -> Array:
    """-[(d-1) kappa(1) - (d-3) kappa'(1)] - 2a: the exponent of 1 - rho near consensus; negative synchronises.

    a = +1 attractive softmax attention, -1 repulsive, 0 noise alone. arXiv 2604.26898.
    """
    d = integers("d", d, 2)
    at_1, slope_1 = real("kappa_1", kappa_1), real("kappa_slope_1", kappa_slope_1)
    return -((d - 1) * at_1 - (d - 3) * slope_1) - 2 * real("a", a)


def value_moments(rho: ArrayLike, beta: ArrayLike) -> tuple[Array, Array]:
    """D = |m_1|^2, C = <m_1, m_2> of two tokens' attention means m_i = p x_i + (1-p) x_j, p = sigmoid(beta(1-rho)).

    A random value matrix W (iid Gaussian) moves token i by W m_i: covariances D I and C I. arXiv 2601.21942.
    """
    rho, beta = within("rho", rho, -1.0, 1.0), within("beta", beta, 0.0)
    p = 1 / (1 + np.exp(-beta * (1 - rho)))
    q = 1 - p
    return p**2 + q**2 + 2 * p * q * rho, (p**2 + q**2) * rho + 2 * p * q


def value_drift(rho: ArrayLike, beta: ArrayLike, d: ArrayLike) -> Array:
    """(d-2+rho^2) C - (d-1) D rho: drift of rho under random values (see `value_moments`). arXiv 2601.21942."""
    D, C = value_moments(rho, beta)
    rho = np.asarray(rho, dtype=np.float64)
    return (integers("d", d, 2) - 2 + rho**2) * C - (np.asarray(d) - 1) * D * rho


def value_diffusion(rho: ArrayLike, beta: ArrayLike) -> Array:
    """sqrt(2 (1-rho^2) (D - rho C)): coefficient of dB of rho under random values. arXiv 2601.21942."""
    D, C = value_moments(rho, beta)
    rho = np.asarray(rho, dtype=np.float64)
    return np.sqrt(2 * (1 - rho**2) * (D - rho * C))


def antipodal_lyapunov(beta: ArrayLike, d: ArrayLike) -> Array:
    """(d-3) - (d-1) tanh^2(beta): exponent of 1 + rho near the antipodal pair under random values.

    Negative, so antipodal attracting, iff tanh^2(beta) > (d-3)/(d-1). arXiv 2601.21942.
    """
    return integers("d", d, 2) - 3 - (np.asarray(d) - 1) * np.tanh(within("beta", beta, 0.0)) ** 2


def consensus_lyapunov(d: ArrayLike) -> Array:
    """-(d-1): exponent of 1 - rho near consensus under random values, for every beta."""
    return 1.0 - integers("d", d, 2)


def critical_beta(d: ArrayLike) -> Array:
    """atanh sqrt((d-3)/(d-1)), d >= 3: above it antipodal pairs attract under random values. arXiv 2601.21942."""
    d = integers("d", d, 3)
    return np.arctanh(np.sqrt((d - 3) / (d - 1)))


def jump_beta(d: int) -> float:
    """beta* with I_{d/2+1}/I_{d/2}(beta*) = 1/d: unnormalised attention against noise, arXiv 2606.05140 (abstract).

    Derived here: at the noise D_c = gamma_1/(d-1) that makes degree 1 marginal around the uniform law, its cubic term
    has the sign of d I_{d/2+1} - I_{d/2}. Below beta* order appears smoothly as D falls, above it with a jump.
    On the circle: a_1' = (w_1 - D) a_1 + (2 w_2 - w_1) a_1 a_2 and a_2 = w_1 a_1^2 / (2 (w_1 - w_2)), w_k = I_k/beta.
    """
    d = integer("d", d, 2)
    excess = lambda u: float(bessel.ratio(d / 2, torch.tensor(np.exp(u), dtype=torch.float64))) - 1 / d
    return float(np.exp(brentq(excess, np.log(1e-3), np.log(1e3), xtol=1e-14)))
