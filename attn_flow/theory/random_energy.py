"""Attention weights of Gaussian logits: Derrida's random-energy model (Phys. Rev. B 24, 2613, 1981).

Of m independent logits N(0, s^2), Z(s) = sum_j e^{s z_j} has the free energy of the random-energy model, with the
critical value s_c = sqrt(2 log m) at which a few keys take all of the weight. The participation ratio of the weights,
Y = sum_j p_j^2 = Z(2s)/Z(s)^2, falls as m^(-2b) with b = min(1/2, 1 - s/s_c) for s < s_c, and so does the squared error
of attention over m random keys whose values are independent of the logits. b leaves 1/2 at s_c/2, where Z(2s) freezes.
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
