"""At which beta one key takes half of an attention row: counting the gaps below its largest logit (arXiv 2605.12697).

Only the abstract is known to us (critical beta from the gap-counting function of each row; it covers the scalings
sqrt(log n), log n and log^2 n): all below is derived here. A row of logits s_j has gaps g_1 <= g_2 <= ... from its
largest one to the others, N(g) = #{j : g_j <= g} of them up to g. The largest weight at inverse temperature beta is
1/(1 + S), S = sum_j e^{-beta g_j} = beta int e^{-beta g} N(g) dg, so one key holds half of the row from S = 1 on.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike
from scipy.optimize import brentq
from scipy.special import log_ndtr, logsumexp, ndtri, zeta

from attn_flow.theory.domain import Array, integers, real, within

SHARP = float(brentq(lambda p: zeta(p) - 2, 1.5, 2.0, xtol=1e-15))  # 1.7286: sum_k (k+1)^{-p} = 1


def gaps(logits: ArrayLike) -> Array:
    """g_k, from the largest logit of every row (..., n) to the others, growing: (..., n - 1).

    >>> gaps([3.0, 1.0, 2.5])
    array([0.5, 2. ])
    """
    s = real("logits", logits)
    if s.ndim < 1 or s.shape[-1] < 2:
        raise ValueError(f"logits have shape {s.shape}, expected rows (..., n) of two or more.")
    falling = -np.sort(-s, axis=-1)
    return falling[..., :1] - falling[..., 1:]


def resolving_beta(logits: ArrayLike) -> Array:
    """The inverse temperature (...) from which on one key holds half of its row: sum_k e^{-beta g_k} = 1.

    In units of the beta that is inside the logits already: above 1 the row as it is averages over several keys.
    inf where two keys share the largest logit. Newton's method from beta = 0 on log sum_k e^{-beta g_k}, which is
    convex and falls: it comes from below, and quadratically.

    >>> float(resolving_beta([1.0] + 8 * [0.0]) / np.log(8))  # equal gaps: log(n-1)/g
    1.0
    """
    g = gaps(logits)
    tied = g[..., 0] == 0
    g = np.where(tied[..., None], 1.0, g)
    beta = np.zeros(g.shape[:-1])
    while True:
        log_sum = logsumexp(-beta[..., None] * g, axis=-1)
        slope = (np.exp(-beta[..., None] * g - log_sum[..., None]) * g).sum(-1)
        step = np.maximum(log_sum, 0.0) / slope
        beta = beta + step
        if np.all(step <= 1e-12 * beta):
            break
    return np.where(tied, np.inf, beta)


def gap_bounds(logits: ArrayLike) -> tuple[Array, Array]:
    """max_k log(k)/g_k <= beta_c <= p max_k log(k+1)/g_k with zeta(p) = 2: what counting gaps alone says of a row.

    Below: k e^{-beta g_k} <= S = 1. Above: at b = max_k log(k+1)/g_k each e^{-b g_k} <= 1/(k+1), so that p b makes
    S <= sum_k (k+1)^{-p} = zeta(p) - 1 = 1. Neither depends on n; k = N(g_k) for gaps that differ.

    >>> low, high = gap_bounds([1.0] + 8 * [0.0])
    >>> bool(low <= resolving_beta([1.0] + 8 * [0.0]) <= high)
    True
    """
    g = gaps(logits)
    k = np.arange(1, g.shape[-1] + 1)
    with np.errstate(divide="ignore", invalid="ignore"):
        low = np.where(k == 1, 0.0, np.log(k) / g).max(-1)
        return low, SHARP * (np.log(k + 1) / g).max(-1)


def resolved_share(beta: ArrayLike, hazard: ArrayLike) -> Array:
    """Share of rows of many independent logits where one key holds half: sin(pi a)/(pi a), a = hazard/beta < 1, else 0.

    hazard is the hazard rate of the logits' law at its 1 - 1/n quantile: there gaps are those of a Poisson process of
    intensity hazard e^{-hazard x}, weights follow the Poisson-Dirichlet law PD(a), whose weights have the density
    v^{-a-1} (1-v)^{a-1} sin(pi a)/pi, and at most one exceeds 1/2. Half of the rows are resolved at 1.6574 hazard.

    >>> resolved_share([1.0, 2.0], 1.0).round(4)  # 2/pi
    array([0.    , 0.6366])
    """
    beta, hazard = within("beta", beta, 0.0, open=True), within("hazard", hazard, 0.0)
    return np.sinc(np.minimum(hazard / beta, 1.0)) * (hazard < beta)


MEDIAN = float(1 / brentq(lambda a: np.sinc(a) - 0.5, 0.1, 0.9, xtol=1e-15))  # beta_c / hazard of the median row


def gaussian_hazard(n: ArrayLike) -> Array:
    """n phi(u), u the 1 - 1/n quantile of the standard normal law: near sqrt(2 log n), the scaling of Gaussian logits.

    >>> gaussian_hazard([16, 1024]).round(3)
    array([1.968, 3.374])
    """
    n = integers("n", n, 2)
    u = -ndtri(1 / n)
    return np.exp(-(u**2) / 2 - np.log(2 * np.pi) / 2 - log_ndtr(-u))


def edge_hazard(n: ArrayLike) -> Array:
    """log^2 n: of logits 1 - g below an edge that few reach, P(gap to the edge < g) = e^{-1/g}."""
    return np.log(integers("n", n, 2)) ** 2
