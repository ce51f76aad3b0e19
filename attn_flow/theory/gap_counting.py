"""The beta at which one key gets half of an attention row, from the gaps below the largest logit (arXiv 2605.12697).

A row of logits has gaps g_1 <= g_2 <= ... from its largest logit to the others. The largest weight is 1/(1 + S) with
S = sum_k e^{-beta g_k}, so one key has half of the row when S = 1. The scalings sqrt(log n), log n and log^2 n follow
from the counting function of the gaps. Only the abstract of the paper is known to us: the formulas are derived here.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike
from scipy.optimize import brentq
from scipy.special import log_ndtr, logsumexp, ndtri, zeta

from attn_flow.theory.domain import Array, integers, reals

BOUND_FACTOR = float(brentq(lambda p: zeta(p) - 2, 1.5, 2.0, xtol=1e-15))  # 1.7286, where zeta(p) = 2
MEDIAN_RATIO = float(1 / brentq(lambda a: np.sinc(a) - 0.5, 0.1, 0.9, xtol=1e-15))  # beta / hazard of the median row


def resolving_beta(logits: ArrayLike) -> Array:
    """Factor (...) on the logits at which one key gets half of its row: sum_k e^{-beta g_k} = 1.

    Above 1, the row as it is averages over several keys. Infinite if two keys share the largest logit. Newton's method
    starts at beta = 0 and converges from below, because log sum_k e^{-beta g_k} is convex and decreasing.

    Args:
        logits: rows (..., n) of at least two logits, which include the beta in use.

    >>> float(resolving_beta([1.0] + 8 * [0.0]) / np.log(8))  # equal gaps: log(n-1)/g
    1.0
    """
    g = _gaps(logits)
    is_tied = g[..., 0] == 0
    g = np.where(is_tied[..., None], 1.0, g)
    beta = np.zeros(g.shape[:-1])
    while True:
        log_sum = logsumexp(-beta[..., None] * g, axis=-1)
        slope = (np.exp(-beta[..., None] * g - log_sum[..., None]) * g).sum(-1)
        step = np.maximum(log_sum, 0.0) / slope
        beta = beta + step
        if np.all(step <= 1e-12 * beta):
            return np.where(is_tied, np.inf, beta)


def _gaps(logits: ArrayLike) -> Array:
    """Gaps (..., n-1) from the largest logit of every row (..., n) to the others, in increasing order."""
    s = reals("logits", logits)
    if s.ndim < 1 or s.shape[-1] < 2:
        raise ValueError(f"logits have shape {s.shape}, expected rows (..., n) of at least two.")
    s = -np.sort(-s, axis=-1)
    return s[..., :1] - s[..., 1:]


def gap_bounds(logits: ArrayLike) -> tuple[Array, Array]:
    """Bounds max_k log(k)/g_k <= `resolving_beta` <= p max_k log(k+1)/g_k, zeta(p) = 2, each (...).

    Lower: k e^{-beta g_k} <= S = 1. Upper: at b = max_k log(k+1)/g_k every e^{-b g_k} <= 1/(k+1), so S at p b is at
    most sum_k (k+1)^{-p} = zeta(p) - 1 = 1. Neither depends on n.

    >>> low, high = gap_bounds([1.0] + 8 * [0.0])
    >>> bool(low <= resolving_beta([1.0] + 8 * [0.0]) <= high)
    True
    """
    g = _gaps(logits)
    k = np.arange(1, g.shape[-1] + 1)
    with np.errstate(divide="ignore", invalid="ignore"):
        low = np.where(k == 1, 0.0, np.log(k) / g).max(-1)
        return low, BOUND_FACTOR * (np.log(k + 1) / g).max(-1)


def resolved_share(beta: ArrayLike, hazard: ArrayLike) -> Array:
    """Share of rows of many independent logits in which one key gets half: sin(pi a)/(pi a), a = hazard/beta < 1.

    The gaps are those of a Poisson process of intensity hazard e^{-hazard x}, so the weights have the Poisson-Dirichlet
    distribution PD(a), whose weights have density v^{-a-1} (1-v)^{a-1} sin(pi a)/pi. Zero for a >= 1. Half of the rows
    are resolved at beta = MEDIAN_RATIO hazard.

    Args:
        beta: inverse temperature (...), positive.
        hazard: hazard rate (...) of the distribution of the logits at its 1 - 1/n quantile.

    >>> resolved_share([1.0, 2.0], 1.0).round(4)
    array([0.    , 0.6366])
    """
    beta, hazard = reals("beta", beta, 0, is_open=True), reals("hazard", hazard, 0)
    return np.sinc(np.minimum(hazard / beta, 1.0)) * (hazard < beta)


def gaussian_hazard(n: ArrayLike) -> Array:
    """Hazard rate n phi(u) of the standard normal distribution at its 1 - 1/n quantile u, near sqrt(2 log n).

    >>> gaussian_hazard([16, 1024]).round(3)
    array([1.968, 3.374])
    """
    u = -ndtri(1 / integers("n", n, 2))
    return np.exp(-(u**2) / 2 - np.log(2 * np.pi) / 2 - log_ndtr(-u))
