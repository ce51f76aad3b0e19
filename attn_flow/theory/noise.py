"""Layers with random weights shared by all tokens: synchronisation by common noise (arXiv 2604.26898, 2601.21942).

A layer is x <- normalise(x + h attention(x) + sqrt(h) xi(x)) with a new centred Gaussian field xi in every layer,
E xi(x) xi(y)^T = kappa(<x, y>) I. For two tokens, rho = <x, y> is a diffusion on [-1, 1].
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import ArrayLike
from scipy.optimize import brentq

from attn_flow.kernels import bessel
from attn_flow.theory.domain import Array, integers, reals

Kernel = Callable[[Array], Array]


def drift(rho: ArrayLike, kappa: Kernel, d: ArrayLike) -> Array:
    """Drift (d - 2 + rho^2) kappa(rho) - (d-1) kappa(1) rho of rho (...) under the noise. arXiv 2604.26898.

    >>> float(drift(0.5, lambda rho: rho**2, 3))
    -0.6875
    """
    rho, d = reals("rho", rho, -1, 1), integers("d", d, 2)
    return (d - 2 + rho**2) * kappa(rho) - (d - 1) * kappa(np.ones_like(rho)) * rho


def diffusion(rho: ArrayLike, kappa: Kernel) -> Array:
    """Coefficient sqrt(2 (1 - rho^2) (kappa(1) - rho kappa(rho))) of dB (...) of rho. arXiv 2604.26898.

    >>> float(diffusion(0.0, lambda rho: rho**2))
    1.4142135623730951
    """
    rho = reals("rho", rho, -1, 1)
    return np.sqrt(2 * (1 - rho**2) * (kappa(np.ones_like(rho)) - rho * kappa(rho)))


def lyapunov(d: ArrayLike, kappa_1: ArrayLike = 1.0, kappa_slope_1: ArrayLike = 1.0, a: ArrayLike = 0.0) -> Array:
    """Exponent -[(d-1) kappa(1) - (d-3) kappa'(1)] - 2a (...) of 1 - rho near consensus; negative synchronises.

    arXiv 2604.26898.

    Args:
        kappa_1, kappa_slope_1: kappa(1) and kappa'(1) (...); the defaults are those of kappa(rho) = rho.
        a: strength of softmax attention (...), 1 attractive, -1 repulsive, 0 for noise alone.

    >>> lyapunov(8, a=[0.0, 1.0])
    array([-2., -4.])
    """
    d, a = integers("d", d, 2), reals("a", a)
    return -((d - 1) * reals("kappa_1", kappa_1) - (d - 3) * reals("kappa_slope_1", kappa_slope_1)) - 2 * a


def antipodal_lyapunov(beta: ArrayLike, d: ArrayLike) -> Array:
    """Exponent (d-3) - (d-1) tanh^2(beta) (...) of 1 + rho near the antipodal pair under random value matrices.

    Two tokens attend with softmax weights p = sigmoid(beta (1-rho)) and 1 - p, and a Gaussian matrix, new in every
    layer, moves each by W times its attention mean. Consensus has the exponent -(d-1) for every beta. arXiv 2601.21942.

    >>> antipodal_lyapunov([0.0, 1.0], 8).round(3)  # above `critical_beta` the antipodal pair attracts
    array([5.  , 0.94])
    """
    d = integers("d", d, 2)
    return d - 3 - (d - 1) * np.tanh(reals("beta", beta, 0)) ** 2


def critical_beta(d: ArrayLike) -> Array:
    """atanh sqrt((d-3)/(d-1)) (...), above which antipodal pairs attract under random values. arXiv 2601.21942.

    >>> critical_beta([3, 8]).round(4)
    array([0.    , 1.2389])
    """
    d = integers("d", d, 3)
    return np.arctanh(np.sqrt((d - 3) / (d - 1)))


def jump_beta(d: int) -> float:
    """The beta* with I_{d/2+1}(beta*) / I_{d/2}(beta*) = 1/d, for unnormalised attention against noise.

    At the noise that makes degree 1 marginal around the uniform distribution, its cubic term has the sign of
    d I_{d/2+1} - I_{d/2}: below beta* order appears continuously as the noise falls, above it with a jump. The
    threshold is in the abstract of arXiv 2606.05140; its derivation is ours.

    >>> round(jump_beta(2), 4)
    2.4469
    """
    d = int(integers("d", d, 2))
    excess = lambda u: float(bessel.ratio(d / 2, torch.tensor(np.exp(u), dtype=torch.float64))) - 1 / d
    return float(np.exp(brentq(excess, np.log(1e-3), np.log(1e3), xtol=1e-14)))
