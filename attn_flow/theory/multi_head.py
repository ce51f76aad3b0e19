"""Several heads with V_h = G_h symmetric: a gradient flow (arXiv 2605.04279). Scalar heads G_h = m_h I in closed form.

The energy sum_h (1/(2 beta n^2)) sum_ij e^{beta <x_i, G_h x_j>} never decreases along the unnormalised flow.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from attn_flow.theory.domain import Array, integers, real, within


def velocity(rho: ArrayLike, m: ArrayLike, beta: ArrayLike, n: ArrayLike) -> Array:
    """rho' = (2/n) (1-rho) ((n-1)rho + 1) sum_h m_h e^{beta m_h rho}, unnormalised; m (..., heads). 2605.04279."""
    rho, n, beta = within("rho", rho, -1.0, 1.0), integers("n", n, 2), within("beta", beta, 0.0)
    m = np.atleast_1d(real("m", m))
    pull = (m * np.exp((beta * rho)[..., None] * m)).sum(-1)
    return 2 / n * (1 - rho) * ((n - 1) * rho + 1) * pull


def terminal_rate(m: ArrayLike, beta: ArrayLike) -> Array:
    """2 sum_h m_h e^{beta m_h}: decay rate of 1 - rho near consensus, unnormalised; m (..., heads). 2605.04279."""
    m, beta = np.atleast_1d(real("m", m)), within("beta", beta, 0.0)
    return 2 * (m * np.exp(beta[..., None] * m)).sum(-1)


def averaged_rate(m: ArrayLike, beta: ArrayLike) -> Array:
    """2 H mbar e^{beta mbar}: the terminal rate when every one of the H heads has the mean strength mbar.

    `terminal_rate` is at least this for m >= -2/beta, by Jensen: m e^{beta m} is convex there. arXiv 2605.04279.
    """
    m, beta = np.atleast_1d(real("m", m)), within("beta", beta, 0.0)
    mean = m.mean(-1)
    return 2 * m.shape[-1] * mean * np.exp(beta * mean)


def attention_entropy(rho: ArrayLike, beta: ArrayLike, n: ArrayLike) -> Array:
    """Entropy (nats) of one row of the equiangular softmax: p = 1/(1 + (n-1) e^{-beta(1-rho)}) on itself.

    The rest is shared evenly: -p log p - (1-p) log((1-p)/(n-1)); increases to log n as rho -> 1. arXiv 2605.04279.
    """
    rho, beta, n = within("rho", rho, -1.0, 1.0), within("beta", beta, 0.0), integers("n", n, 2)
    s = beta * (1 - rho)
    # log Z - mean logit, with logits s and 0: no p log p at p = 0
    log_z = np.logaddexp(s, np.log(n - 1))
    return log_z - s * np.exp(s - log_z)
