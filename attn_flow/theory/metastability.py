"""Which clusters appear from noise, when, and how long they live.

Bruno, Pasqualotto, Agazzi, arXiv 2410.23228 (linear instability of the uniform distribution) and arXiv 2509.25040 (heat
phase, pairing of clusters); Geshkovski, Koubbi, Polyanskiy, Rigollet, arXiv 2410.06833 (exponential life times).
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import ArrayLike
from scipy.integrate import quad
from scipy.optimize import brentq

from attn_flow.base import checks
from attn_flow.kernels import bessel
from attn_flow.theory.domain import Array, integers, reals
from attn_flow.theory.equiangular import MAX_EXPONENT
from attn_flow.theory.synchronisation import KINDS


def growth_rate(k: ArrayLike, beta: ArrayLike, d: int = 2, kind: str = "softmax") -> Array:
    """Growth rate gamma_k (...) of harmonics of degree k around the uniform distribution on S^{d-1}, nu = d/2 - 1.

    unnormalised  k(k+d-2) Gamma(d/2) (2/beta)^nu I_{k+nu}(beta) / beta     (circle: k^2 I_k(beta) / beta)
    softmax       k(k+d-2) I_{k+nu}(beta) / (beta I_nu(beta))
    sinkhorn      k(k+d-2) / beta * l/(1+l),  l = I_{k+nu}(beta) / I_nu(beta)

    For V = -I the rate is -gamma_k. For k^2 << beta the softmax rate is k(k+d-2)/beta: a backward heat equation. The
    noise n^{-1/2} of n independent tokens grows to O(1) in the time log(n) / (2 max gamma_k). arXiv 2410.23228, whose
    notebook plots k^2 I_k/(pi beta), a rate too small by pi.

    >>> growth_rate([1, 2, 3, 4], 5.0).round(4)
    array([0.1787, 0.5141, 0.6827, 0.6001])
    """
    return np.exp(_log_growth_rate(k, beta, d, kind))


def _log_growth_rate(k: ArrayLike, beta: ArrayLike, d: int, kind: str) -> Array:
    """log gamma_k, which is finite where gamma_k overflows."""
    checks.require_choice("kind", kind, KINDS)
    k, beta, d = integers("k", k, 1), reals("beta", beta, 0, is_open=True), int(integers("d", d, 2))
    orders = np.arange(int(k.max()))  # log(I_{k+nu}/I_nu) is a sum over neighbouring orders
    with np.errstate(divide="ignore"):
        steps = [np.log(bessel.ratio(order + d / 2 - 1, torch.as_tensor(beta)).numpy()) for order in orders]
    table = np.cumsum([np.zeros_like(beta), *steps], axis=0).reshape(len(orders) + 1, -1)  # (orders, beta.size)
    row, column = np.broadcast_arrays(k.astype(int), np.arange(beta.size).reshape(beta.shape))
    log_l = table[row, column]
    log_gamma = np.log(k * (k + d - 2)) - np.log(beta) + log_l
    if kind == "unnormalised":
        log_gamma = log_gamma + bessel.log_i(d / 2 - 1, torch.as_tensor(beta)).numpy()
    if kind == "sinkhorn":
        log_gamma = log_gamma - np.log1p(np.exp(log_l))
    return log_gamma


def k_max(beta: ArrayLike, d: int = 2, kind: str = "softmax") -> Array:
    """The degree argmax_k gamma_k (...) that grows fastest: the number of clusters on the circle, near sqrt(2 beta).

    arXiv 2410.23228.

    >>> k_max([1.0, 5.0, 7.0])
    array([1, 3, 4])
    """
    beta, d = reals("beta", beta, 0, is_open=True), int(integers("d", d, 2))
    # gamma_k ~ s e^{-s/2} with s = k(k+d-2)/beta has its maximum at s = 2 (Sinkhorn: 2.56); s = 4 is the first guess.
    top = int(np.ceil(np.sqrt(4 * beta.max() + (d / 2 - 1) ** 2) - (d / 2 - 1))) + 2
    while True:
        k = np.arange(1, top + 1).reshape(-1, *[1] * beta.ndim)
        best = 1 + np.argmax(_log_growth_rate(k, beta, d, kind), axis=0)
        if best.max() < top:  # log gamma_k is concave in k
            return best
        top *= 2


def switch_point(k: int, d: int = 2, kind: str = "softmax") -> float:
    """The beta at which `k_max` steps from k to k+1: gamma_{k+1} = gamma_k. arXiv 2410.23228.

    >>> [round(switch_point(k), 4) for k in (1, 2, 3)]
    [1.0445, 3.1654, 6.2113]
    """
    checks.require_choice("kind", kind, KINDS)
    k, d = int(integers("k", k, 1)), int(integers("d", d, 2))
    difference = lambda u: float(np.diff(_log_growth_rate(np.array([k, k + 1]), np.exp(u), d, kind))[0])
    high = np.log((k + 1.0) * (k + d))  # near the root for large beta
    while difference(high) <= 0:
        high += 1.0
    low = high - 1.0
    while difference(low) > 0:
        low -= 1.0
    return float(np.exp(brentq(difference, low, high, xtol=1e-14)))


def merge_time(beta: ArrayLike, phi: ArrayLike, phi_end: ArrayLike = 0.1, mass: ArrayLike = 0.5) -> Array:
    """Time (...) in which two clusters of masses p and 1-p at the angle phi approach to phi_end, softmax attention.

    With w = 1 - cos phi, phi' = -sin(phi) [(1-p)/(p e^{beta w} + 1-p) + p/((1-p) e^{beta w} + p)], integrated by
    quadrature; infinite where e^{beta w} overflows. arXiv 2509.25040. For equal masses it is
    `equiangular.time_between` with n = 2, which tends to e^{beta w} / (2 beta sin^2 phi) for beta w >> 1.

    Args:
        phi, phi_end: angles at the start and at the end (...), 0 < phi_end <= phi < pi.
        mass: p, the mass of one cluster (...), 0 < p < 1.

    >>> float(merge_time(4.0, np.pi / 2).round(2))
    10.02
    """
    beta, p = reals("beta", beta, 0), reals("mass", mass, 0, 1, is_open=True)
    phi, phi_end = reals("phi", phi, 0, np.pi, is_open=True), reals("phi_end", phi_end, 0, np.pi, is_open=True)
    if np.any(phi_end > phi):
        raise ValueError(f"phi = {phi}, phi_end = {phi_end}, expected phi_end <= phi: the clusters only approach.")

    def time(beta: float, phi: float, phi_end: float, p: float) -> float:
        if beta * (1 - np.cos(phi)) > MAX_EXPONENT:
            return np.inf

        def slowness(log_angle: float) -> float:  # dt / d log(angle)
            a = np.exp(log_angle)
            e = np.exp(2 * beta * np.sin(a / 2) ** 2)
            return float(a / np.sin(a) / ((1 - p) / (p * e + 1 - p) + p / ((1 - p) * e + p)))

        return float(quad(slowness, np.log(phi_end), np.log(phi), epsrel=1e-10, limit=500)[0])

    return np.vectorize(time, otypes=[float])(beta, phi, phi_end, p)
