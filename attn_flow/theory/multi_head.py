"""Several heads with V_h = G_h symmetric, a gradient flow (arXiv 2605.04279), for scalar heads G_h = m_h I.

The energy sum_h (1/(2 beta n^2)) sum_ij e^{beta <x_i, G_h x_j>} never decreases along the unnormalised flow.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from attn_flow.theory.domain import Array, cosines, integers, reals


def velocity(rho: ArrayLike, m: ArrayLike, beta: ArrayLike, n: ArrayLike) -> Array:
    """rho' = (2/n) (1-rho) ((n-1) rho + 1) sum_h m_h e^{beta m_h rho} (...) of equiangular tokens, unnormalised.

    m (..., heads) are the strengths of the heads. arXiv 2605.04279.

    >>> float(velocity(0.0, [1.0, 2.0], 1.0, 4))
    1.5
    """
    n, beta = integers("n", n, 2), reals("beta", beta, 0)
    rho, m = cosines(rho, n), np.atleast_1d(reals("m", m))
    force = (m * np.exp((beta * rho)[..., None] * m)).sum(-1)
    return 2 / n * (1 - rho) * ((n - 1) * rho + 1) * force


def terminal_rate(m: ArrayLike, beta: ArrayLike) -> Array:
    """Decay rate 2 sum_h m_h e^{beta m_h} (...) of 1 - rho near consensus, unnormalised, for m (..., heads).

    At least the rate of heads that all have the mean strength, if every m_h >= -2/beta: m e^{beta m} is convex there.
    arXiv 2605.04279.

    >>> terminal_rate([[0.5, 1.5], [1.0, 1.0]], 1.0).round(3)  # different heads are faster than equal ones
    array([15.094, 10.873])
    """
    m, beta = np.atleast_1d(reals("m", m)), reals("beta", beta, 0)
    return 2 * (m * np.exp(beta[..., None] * m)).sum(-1)
