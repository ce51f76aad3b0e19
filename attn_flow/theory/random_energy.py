"""Attention weights of Gaussian logits: Derrida's random-energy model (Phys. Rev. B 24, 2613, 1981).

Of m independent logits N(0, s^2), Z(s) = sum_j e^{s z_j} has the free energy of the random-energy model, with the
critical value s_c = sqrt(2 log m) at which a few keys take all of the weight. The participation ratio of the weights,
Y = sum_j p_j^2 = Z(2s)/Z(s)^2, falls as m^(-2b), and so does the squared error of attention over m random keys whose
values are independent of the logits.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from attn_flow.theory.domain import Array, integers, reals

PHASES = ("warm", "middle", "frozen")


def thresholds(n: ArrayLike) -> tuple[Array, Array]:
    """The standard deviations sqrt(log n / 2) and sqrt(2 log n) between warm, middle and frozen rows of n logits.

    >>> low, high = thresholds(512)
    >>> float(low.round(2)), float(high.round(2))
    (1.77, 3.53)
    """
    critical = np.sqrt(2 * np.log(integers("n", n, 2)))
    return critical / 2, critical


def phase(s: ArrayLike, n: ArrayLike) -> Array:
    """0 (warm: the mean over many keys), 1 (middle) or 2 (frozen: a few keys whatever n is), as an index into PHASES.

    >>> phase([1.0, 2.0, 5.0], 512)
    array([0., 1., 2.])
    """
    s = reals("s", s, 0)
    low, high = thresholds(n)
    return np.where(s >= high, 2.0, np.where(s >= low, 1.0, 0.0))


def participation_ratio(s: ArrayLike, m: ArrayLike) -> Array:
    """sum_j p_j^2 at large m: e^{s^2}/m (warm), e^{-(s_c - s)^2} (middle), 1 - s_c/s (frozen).

    The middle value lacks a factor that changes more slowly than any power of m. In the warm phase Z(s) and Z(2s) are
    their means. In the middle phase Z(2s) is frozen at its largest term, e^{2 s s_c}. In the frozen phase the weights
    have the Poisson-Dirichlet distribution of parameter s_c/s.

    Args:
        s: standard deviation (...) of the logits.
        m: number (...) of keys, at least 2.

    >>> participation_ratio([1.0, 8.0], 512).round(4)
    array([0.0053, 0.5585])
    """
    s, m = np.broadcast_arrays(reals("s", s, 0), integers("m", m, 2))
    low, critical = thresholds(m)
    frozen = 1 - critical / np.maximum(s, critical)
    return np.where(s < low, np.exp(s**2) / m, np.where(s < critical, np.exp(-((critical - s) ** 2)), frozen))


def sampling_exponent(s: ArrayLike, m: ArrayLike) -> Array:
    """The exponent b = min(1/2, 1 - s/sqrt(2 log m)) of the error m^(-b) of attention over m random keys, at least 0.

    It is -1/2 the derivative of the logarithm of `participation_ratio` with respect to log m.

    Args:
        s: standard deviation (...) of the logits.
        m: number (...) of keys, at least 2.

    >>> sampling_exponent([1.0, 2.65, 5.0], 512).round(3)
    array([0.5 , 0.25, 0.  ])
    """
    s = reals("s", s, 0)
    return np.clip(1 - s / thresholds(m)[1], 0.0, 0.5)
