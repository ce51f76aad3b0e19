"""Which clusters appear from noise, where and when, and how long they live.

Bruno, Pasqualotto, Agazzi, arXiv 2410.23228 (linear instability of the uniform law); arXiv 2509.25040 (multiscale
sequel: heat phase, pairing); Geshkovski, Koubbi, Polyanskiy, Rigollet, arXiv 2410.06833 (exponential life times).
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import ArrayLike
from scipy.integrate import quad
from scipy.optimize import brentq
from scipy.special import logsumexp

from attn_flow.averages import bessel
from attn_flow.base import checks
from attn_flow.theory import equiangular
from attn_flow.theory.domain import Array, in_range, integer, integers, number, real, within
from attn_flow.theory.synchronisation import KINDS

HIGHEST = 10**5  # degree of a harmonic; each takes a Bessel function


def _ratio(nu: float, beta: ArrayLike) -> Array:
    return bessel.ratio(nu, torch.as_tensor(np.asarray(beta, dtype=np.float64))).numpy()


def log_harmonic(k: ArrayLike, beta: ArrayLike, d: int = 2) -> Array:
    """log l_k, l_k = I_{k+nu}(beta) / I_nu(beta), nu = d/2 - 1: how much softmax weights see of a degree-k harmonic."""
    k, beta, d = integers("k", k, 0, HIGHEST), within("beta", beta, 0.0, 1e7), integer("d", d, 2)
    levels, position = np.unique(k, return_inverse=True)
    log_l, table = np.zeros_like(beta), []
    with np.errstate(divide="ignore"):
        for order in range(int(levels[-1]) + 1):
            if order in levels:
                table.append(log_l)
            log_l = log_l + np.log(_ratio(order + d / 2 - 1, beta))
    # table: (levels, *beta.shape); pick each k's level, then broadcast k against beta
    k_b, beta_b = np.broadcast_arrays(position.reshape(k.shape), np.arange(beta.size).reshape(beta.shape))
    return np.stack(table).reshape(len(levels), -1)[k_b, beta_b]


def log_growth_rate(k: ArrayLike, beta: ArrayLike, d: int = 2, kind: str = "softmax") -> Array:
    """log gamma_k (see `growth_rate`); finite where gamma_k itself would overflow (unnormalised, beta > 700)."""
    checks.one_of("kind", kind, KINDS)
    k, beta, d = integers("k", k, 1, HIGHEST), within("beta", beta, 0.0, 1e7, open=True), integer("d", d, 2)
    log_l = log_harmonic(k, beta, d)
    log_gamma = np.log(k * (k + d - 2)) - np.log(beta) + log_l
    if kind == "unnormalised":
        log_gamma = log_gamma + bessel.log_i(d / 2 - 1, torch.as_tensor(beta)).numpy()
    if kind == "sinkhorn":
        log_gamma = log_gamma - np.log1p(np.exp(log_l))
    return log_gamma


def growth_rate(k: ArrayLike, beta: ArrayLike, d: int = 2, kind: str = "softmax") -> Array:
    """Growth rate gamma_k of a degree-k harmonic around the uniform law on S^{d-1}, nu = d/2 - 1, V = I.

    unnormalised  k(k+d-2) Gamma(d/2) (2/beta)^nu I_{k+nu}(beta) / beta     (circle: k^2 I_k(beta) / beta)
    softmax       k(k+d-2) I_{k+nu}(beta) / (beta I_nu(beta))
    sinkhorn      k(k+d-2) / beta * l/(1+l),  l = I_{k+nu}(beta) / I_nu(beta)
    For V = -I the rate is -gamma_k. arXiv 2410.23228 (its notebook plots k^2 I_k/(pi beta), too small by pi).
    """
    return np.exp(log_growth_rate(k, beta, d, kind))


def heat_rate(k: ArrayLike, beta: ArrayLike, d: int = 2) -> Array:
    """k(k+d-2)/beta, the limit of softmax gamma_k for k^2 << beta: backward heat of diffusivity 1/beta, V = I.

    For V = -I, forward heat: harmonics decay at this rate over times t = O(beta). arXiv 2509.25040.
    """
    k, beta, d = integers("k", k, 1), within("beta", beta, 0.0, open=True), integer("d", d, 2)
    return k * (k + d - 2) / beta


def k_max(beta: ArrayLike, d: int = 2, kind: str = "softmax") -> Array:
    """argmax_k gamma_k, the number of clusters the linear phase selects on the circle; ~ sqrt(2 beta).

    log gamma_k is concave in k (I_nu is log-concave in nu), so the first k with gamma_{k+1} <= gamma_k is it.
    """
    beta, d = within("beta", beta, 0.0, 1e7, open=True), integer("d", d, 2)
    # gamma_k ~ s e^{-s/2} with s = k(k+d-2)/beta peaks at s = 2 (Sinkhorn: 2.56), so s = 4 is far enough to start from
    top = int(np.ceil(np.sqrt(4 * beta.max() + (d / 2 - 1) ** 2) - (d / 2 - 1))) + 2
    while True:
        k = np.arange(1, top + 1).reshape(-1, *[1] * beta.ndim)
        best = 1 + np.argmax(log_growth_rate(k, beta, d, kind), axis=0)
        if best.max() < top:
            return best
        top *= 2


def switch_point(k: int, d: int = 2, kind: str = "softmax") -> float:
    """The beta at which k_max steps from k to k+1: gamma_{k+1}(beta) = gamma_k(beta).

    Softmax and unnormalised share it: I_{k+1+nu}/I_{k+nu}(beta) = k(k+d-2) / ((k+1)(k+d-1)), whose left side
    increases from 0 to 1, so there is one root. Circle: 1.0445, 3.1654, 6.2113, 10.2285, 15.2363. arXiv 2410.23228.
    """
    checks.one_of("kind", kind, KINDS)
    k, d = integer("k", k, 1, HIGHEST), integer("d", d, 2)
    wanted = np.log(k * (k + d - 2) / ((k + 1) * (k + d - 1)))
    if kind == "sinkhorn":
        difference = lambda u: float(np.diff(log_growth_rate(np.array([k, k + 1]), np.exp(u), d, kind))[0])
    else:
        difference = lambda u: float(np.log(_ratio(k + d / 2 - 1, np.exp(u))) - wanted)
    high = np.log((k + 1.0) * (k + d))  # s = k(k+d-2)/beta = 2 is the peak for large beta
    while difference(high) <= 0:
        high += 1.0
    low = high - 1.0
    while difference(low) > 0:
        low -= 1.0
    return float(np.exp(brentq(difference, low, high, xtol=1e-14)))


def exit_time(n: ArrayLike, beta: ArrayLike, d: int = 2, kind: str = "softmax") -> Array:
    """log(n) / (2 gamma_max): when harmonics of size n^{-1/2} (n iid tokens) have grown to O(1). arXiv 2410.23228."""
    n = integers("n", n, 2)
    return np.log(n) / (2 * growth_rate(k_max(beta, d, kind), beta, d, kind))


def fourier(theta: ArrayLike, k: int, weights: Array | None = None) -> np.ndarray:
    """c_k = mean of e^{-i k theta} over the last axis."""
    angles = np.atleast_1d(real("theta", theta))
    masses = np.ones(angles.shape[-1]) if weights is None else within("weights", weights, 0.0)
    if masses.shape[-1:] != angles.shape[-1:] or not masses.sum() > 0:
        raise ValueError(f"weights have shape {masses.shape}, expected masses (n,) of n = {angles.shape[-1]} angles.")
    return np.average(np.exp(-1j * integer("k", k, 1) * angles), axis=-1, weights=masses)


def merge_time(beta: ArrayLike, phi: ArrayLike, phi_end: ArrayLike = 0.1) -> Array:
    """Time for two equal clusters at angle phi to close to phi_end, softmax: exact, by exponential integrals.

    phi' = -2 sin(phi) e^{beta cos phi} / (e^beta + e^{beta cos phi}): the equiangular ODE of two tokens at
    rho = cos phi. `merge_time_law` is its large-beta form. arXiv 2509.25040.
    """
    phi, phi_end = within("phi", phi, 0.0, np.pi, open=True), within("phi_end", phi_end, 0.0, np.pi, open=True)
    # 1 - cos phi without cancellation
    gap, gap_end = 2 * np.sin(phi / 2) ** 2, 2 * np.sin(phi_end / 2) ** 2
    return equiangular.time_between(gap, gap_end, beta, n=2)


def merge_time_unequal(beta: float, phi: float, phi_end: float = 0.1, mass: float = 0.5) -> float:
    """`merge_time` for clusters of masses p and 1-p, by quadrature, with w = 1 - cos phi:

    phi' = -sin(phi) [ (1-p)/(p e^{beta w} + 1-p) + p/((1-p) e^{beta w} + p) ]. arXiv 2509.25040.
    """
    beta, p = number("beta", beta, 0.0), number("mass", mass, 0.0, 1.0, open=True)
    phi, phi_end = (number("phi", a, 0.0, np.pi, open=True) for a in (phi, phi_end))

    def slowness(log_phi: float) -> float:
        a = np.exp(log_phi)
        e = np.exp(2 * beta * np.sin(a / 2) ** 2)
        return float(a / np.sin(a) / ((1 - p) / (p * e + 1 - p) + p / ((1 - p) * e + p)))

    return float(quad(slowness, np.log(phi_end), np.log(phi), epsrel=1e-10, limit=500)[0])


def merge_time_law(beta: ArrayLike, phi: ArrayLike) -> Array:
    """T ~ e^{beta (1 - cos phi)} / (2 beta sin^2 phi) for beta (1 - cos phi) >> 1. arXiv 2509.25040."""
    beta, phi = within("beta", beta, 0.0, open=True), within("phi", phi, 0.0, np.pi, open=True)
    with np.errstate(over="ignore", invalid="ignore"):
        time = np.exp(2 * beta * np.sin(phi / 2) ** 2) / (2 * beta * np.sin(phi) ** 2)
    return in_range("the time", time)


def log_energy_level(masses: ArrayLike, beta: float, cosines: ArrayLike | None = None) -> float:
    """log E_beta of point clusters, E_beta = (1/(2 beta)) sum_ab m_a m_b e^{beta <x_a, x_b>}: a step of the staircase.

    `cosines` (k, k) of the centres; without it centres are far apart and E_beta = e^beta/(2 beta) sum_a m_a^2, so a
    merger of masses a, b lifts the energy by e^beta a b / beta. arXiv 2410.06833.
    """
    m, beta = within("masses", masses, 0.0), number("beta", beta, 0.0, open=True)
    if m.ndim != 1 or not m.sum() > 0:
        raise ValueError(f"masses have shape {m.shape} and sum {m.sum():.3g}, expected (k,) with some mass.")
    with np.errstate(divide="ignore"):
        log_m = np.log(m / m.sum())
    if cosines is None:
        return float(beta - np.log(2 * beta) + logsumexp(2 * log_m))
    log_mm = log_m[:, None] + log_m[None, :]
    return float(logsumexp(log_mm + beta * within("cosines", cosines, -1.0, 1.0)) - np.log(2 * beta))
