"""Causal attention: collapse on the first token (arXiv 2411.04990) and lost in the middle (arXiv 2605.09213).

Kinetic model on the circle, for positions u = j/N in [0, 1]: theta_j' = sum_{k<j} A_jk w'(theta_j - theta_k) with
w = e^{beta cos} and A_jk ~ e^{-(lambda/N) (j-k)}, normalised over k. Around uniform angles the Fourier mode n obeys
h_u' = a_n int_0^u k_lambda(u, s) h_s ds with a_n = n^2 I_n(beta), a Volterra equation solved by Bessel functions.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike
from scipy.special import i1e, ive

from attn_flow.theory.domain import Array, integers, reals


def consensus_rates(n: int) -> Array:
    """Contraction rates 1 - 1/j (n,) of the tokens j = 1..n of causal softmax attention near consensus.

    The deviations obey u_j' = (1/j) sum_{k<=j} u_k - u_j, a triangular system. The first token rests. arXiv 2411.04990.

    >>> consensus_rates(4).round(3)
    array([0.   , 0.5  , 0.667, 0.75 ])
    """
    return 1 - 1 / np.arange(1, int(integers("n", n, 1)) + 1)


def mode_rates(beta: float, modes: int = 200) -> Array:
    """Rates a_n = n^2 I_n(beta) (modes,) of the Fourier modes n = 1..modes, for beta <= 700. arXiv 2605.09213.

    >>> mode_rates(1.0, 3).round(4)
    array([0.5652, 0.543 , 0.1995])
    """
    n = np.arange(1, int(integers("modes", modes, 1)) + 1)
    beta = float(reals("beta", beta, 0, 700))
    return n**2 * ive(n, beta) * np.exp(beta)


def mode_weights(M: float, modes: int = 200) -> Array:
    """Weights w_n = e^{-pi^2 n^2 / (2 M^2)} (modes,) of the modes of a token with one of M symbols. arXiv 2605.09213.

    >>> mode_weights(8, 3).round(4)
    array([0.9258, 0.7346, 0.4996])
    """
    n = np.arange(1, int(integers("modes", modes, 1)) + 1)
    return np.exp(-((np.pi * n / float(reals("M", M, 0, is_open=True))) ** 2) / 2)


def retrieval(t: ArrayLike, s: ArrayLike, a: ArrayLike, lam: float) -> Array:
    """What the last token knows at time t of a mode of rate a that the token at position s started with, g (...).

    g_a(t, 1; s) = k_lambda(1, s) sqrt(a t / Y) I_1(2 sqrt(a t Y)), Y = log((e^lambda - 1) / (e^{lambda s} - 1)), where
    k_lambda(u, s) = lambda e^{-lambda (u-s)} / (1 - e^{-lambda u}) is 1/u at lambda = 0. arXiv 2605.09213.

    Args:
        t, s: time (...), at least 0, and position (...), 0 < s <= 1.
        a: rate of the mode (...), as in `mode_rates`.
        lam: lambda >= 0, the strength of the recency bias.

    >>> retrieval(1.0, [0.01, 0.5, 1.0], 1.0, 1.0).round(3)
    array([4.119, 1.509, 1.582])
    """
    t, a, s = reals("t", t, 0), reals("a", a, 0), reals("s", s, 1e-100, 1)
    lam = max(float(reals("lam", lam, 0)), 1e-200)  # so that both quotients have their limits at lambda = 0
    Y = lam * (1 - s) + np.log(np.expm1(-lam) / np.expm1(-lam * s))
    kernel = lam * np.exp(-lam * (1 - s)) / -np.expm1(-lam)
    x = a * t * Y
    # sqrt(at/Y) I_1(2 sqrt(atY)) = at I_1(z)/(z/2) with z = 2 sqrt(x); the quotient is 1 at x = 0.
    z = 2 * np.sqrt(np.where(x > 0, x, 1.0))
    return kernel * a * t * np.where(x > 0, 2 * i1e(z) * np.exp(z) / z, 1.0)


def retrieval_score(t: ArrayLike, s: ArrayLike, beta: float, lam: float, M: float, modes: int = 200) -> Array:
    """Retrieval profile S_t(s) = sum_n w_n g_{a_n}(t, 1; s) (...) over the positions s of the context.

    g is `retrieval`, w_n are the `mode_weights` of M symbols, and a_n the `mode_rates`. arXiv 2605.09213.

    >>> retrieval_score(1.0, [0.01, 0.5, 1.0], 1.0, 1.0, 8).round(3)  # both ends are remembered best
    array([1.89 , 1.266, 1.638])
    """
    t, s = np.broadcast_arrays(np.asarray(t, dtype=np.float64), np.asarray(s, dtype=np.float64))
    a, w = mode_rates(beta, modes), mode_weights(M, modes)
    is_relevant = (a > 0) & (w > 0)
    return (w[is_relevant] * retrieval(t[..., None], s[..., None], a[is_relevant], lam)).sum(-1)


def u_shape_time(beta: float, lam: float) -> float:
    """Time min(3 - sqrt 3, 2 (1 - e^{-lambda})) / max_n a_n up to which every retrieval profile is U-shaped.

    Both ends are then remembered better than the middle. lam is lambda > 0, the recency bias. arXiv 2605.09213.

    >>> round(u_shape_time(1.0, 1.0), 4)
    2.237
    """
    lam = float(reals("lam", lam, 0, is_open=True))
    return float(min(3 - np.sqrt(3), -2 * np.expm1(-lam)) / mode_rates(beta).max())


def recency_time(beta: float, lam: float, M: float, modes: int = 200) -> float:
    """Time t_crit = 2 (1 - e^{-lambda}) sum_n w_n a_n / sum_n w_n a_n^2 beyond which recency is lost.

    The slope of S_t at s = 1 vanishes at t_crit: g' = K (lambda a t - K (a t)^2 / 2) there, with
    K = lambda / (1 - e^{-lambda}). Arguments as in `retrieval_score`. arXiv 2605.09213.

    >>> round(recency_time(1.0, 1.0, 8), 6)
    2.457489
    """
    a, w = mode_rates(beta, modes), mode_weights(M, modes)
    if not (w * a**2).sum() > 0:
        raise ValueError(f"beta = {beta}, M = {M}: every mode has weight or rate zero; expected larger numbers.")
    return float(-2 * np.expm1(-float(reals("lam", lam, 0))) * (w * a).sum() / (w * a**2).sum())
