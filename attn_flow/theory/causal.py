"""Causal attention: collapse on the first token (arXiv 2411.04990) and lost in the middle (arXiv 2605.09213).

Kinetic model on the circle, positions u = j/N in [0, 1]: theta_j' = sum_{k<j} A_jk w'(theta_j - theta_k),
w = e^{beta cos}, A_jk ~ e^{-(lambda/N)(j-k)} normalised over k. Around uniform angles the n-th Fourier mode obeys
h_u' = a_n int_0^u k_lambda(u,s) h_s ds, a_n = n^2 I_n(beta), a Volterra equation solved by Bessel functions.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike
from scipy.special import i1e, ive

from attn_flow.theory.domain import Array, in_range, integer, number, within

MOST = 10**7  # tokens, or modes
EARLIEST = 1e-300  # a position above 0, where the memory and the retrieval are infinite
FLAT = 1e-300  # a lambda below counts as 0


def consensus_rates(n: int) -> Array:
    """1 - 1/j, j = 1..n: contraction rates of causal softmax attention, V = I, near consensus on x_1(0).

    u_j' = (1/j) sum_{k<=j} u_k - u_j is triangular; x_1 never moves, x_2 is the slowest at 1/2. arXiv 2411.04990.
    """
    return 1 - 1 / np.arange(1, integer("n", n, 1, MOST) + 1)


def mode_rates(beta: float, modes: int = 200) -> Array:
    """a_n = n^2 I_n(beta), n = 1..modes; modes past the last that counts underflow to 0. arXiv 2605.09213."""
    beta = number("beta", beta, 0.0, 700.0)
    n = np.arange(1, integer("modes", modes, 1, MOST) + 1)
    return n**2 * ive(n, beta) * np.exp(beta)


def memory(u: ArrayLike, s: ArrayLike, lam: float) -> Array:
    """k_lambda(u,s) = lambda e^{-lambda(u-s)} / (1 - e^{-lambda u}) for 0 <= s <= u; 1/u at lambda = 0. 2605.09213."""
    u, s = within("u", u, EARLIEST, 1.0), within("s", s, 0.0, 1.0)
    if np.any(s > u):
        raise ValueError(f"s = {np.max(s):.6g}, expected 0 <= s <= u: a token remembers earlier ones only.")
    lam = number("lam", lam, 0.0)
    if lam <= FLAT:
        return 1 / u + 0 * s
    return lam * np.exp(-lam * (u - s)) / -np.expm1(-lam * u)


def retrieval(t: ArrayLike, s: ArrayLike, a: ArrayLike, lam: float) -> Array:
    """g_a(t,1;s) = k_lambda(1,s) sqrt(a t/Y) I_1(2 sqrt(a t Y)), Y = log((e^lambda - 1)/(e^{lambda s} - 1)).

    What the last token knows at time t of a mode that token 0 < s <= 1 started with. It is sum_m (at)^m/m! k^{(m)}(1,s)
    over m-fold paths from s to 1. arXiv 2605.09213.
    """
    t, a, s = within("t", t, 0.0), within("a", a, 0.0), within("s", s, EARLIEST, 1.0)
    lam = number("lam", lam, 0.0)
    with np.errstate(over="ignore", invalid="ignore"):
        return in_range("the retrieval", _retrieval(t, s, a, lam))


def _retrieval(t: Array, s: Array, a: Array, lam: float) -> Array:
    Y = np.log(np.expm1(lam) / np.expm1(lam * s)) if lam > FLAT else -np.log(s)
    x = a * t * Y
    # sqrt(at/Y) I_1(2 sqrt(atY)) = at * I_1(z)/(z/2), z = 2 sqrt(x), and the quotient is 1 at x = 0
    z = 2 * np.sqrt(np.where(x > 0, x, 1.0))
    quotient = np.where(x > 0, 2 * i1e(z) * np.exp(z) / z, 1.0)
    return memory(1.0, s, lam) * a * t * quotient


def mode_weights(M: float, modes: int = 200) -> Array:
    """w_n = e^{-pi^2 n^2 / (2 M^2)}, n = 1..modes: a token that carries one of M symbols. arXiv 2605.09213."""
    n = np.arange(1, integer("modes", modes, 1, MOST) + 1)
    with np.errstate(over="ignore"):
        return np.exp(-((np.pi * n / number("M", M, 0.0, open=True)) ** 2) / 2)


def retrieval_score(t: ArrayLike, s: ArrayLike, beta: float, lam: float, M: float, modes: int = 200) -> Array:
    """S_t(s) = sum_n e^{-pi^2 n^2/(2 M^2)} g_{a_n}(t,1;s), a_n = n^2 I_n(beta). arXiv 2605.09213."""
    t, s = np.broadcast_arrays(within("t", t, 0.0), within("s", s, EARLIEST, 1.0))
    a, w = mode_rates(beta, modes), mode_weights(M, modes)
    seen = (a > 0) & (w > 0)
    return (w[seen] * retrieval(t[..., None], s[..., None], a[seen], lam)).sum(-1)


def u_shape_time(beta: float, lam: float) -> float:
    """min(3 - sqrt 3, 2(1 - e^{-lambda})) / sup_n a_n: up to it every retrieval profile is U-shaped. arXiv 2605.09213.

    Both ends are remembered better than the middle: primacy (log-divergent at s = 0) and recency (at s = 1).
    """
    lam = number("lam", lam, 0.0, open=True)
    return float(min(3 - np.sqrt(3), -2 * np.expm1(-lam)) / mode_rates(beta).max())


def recency_time(beta: float, lam: float, M: float, modes: int = 200) -> float:
    """t_crit = 2(1 - e^{-lambda}) sum_n w_n b_n / sum_n w_n b_n^2, b_n = n^2 I_n(beta): beyond it recency is lost.

    S_t'(1) = 0 at t_crit, from g' = K (lambda a t - K (a t)^2/2) at s = 1, K = lambda/(1 - e^{-lambda}). 2605.09213.
    """
    b, w = mode_rates(beta, modes), mode_weights(M, modes)
    if not (w * b**2).sum() > 0:
        raise ValueError(f"beta = {beta}, M = {M}: no mode is left that could be lost; expected larger ones.")
    return float(-2 * np.expm1(-number("lam", lam, 0.0)) * (w * b).sum() / (w * b**2).sum())
