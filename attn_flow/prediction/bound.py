"""The constants of the bound K (sqrt(log(beta+1)/beta) e^{Ct} + e^{-ct}), fitted to measured distances."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.optimize import least_squares

from attn_flow.dynamics.trajectory import Trajectory
from attn_flow.prediction.limit_map import LimitMap
from attn_flow.prediction.phases import FALL, w2_curve
from attn_flow.prediction.spectrum import Array


@dataclass(frozen=True)
class Bound:
    """K (sqrt(log(beta+1)/beta) e^{Ct} + e^{-ct}), with standard errors over seeds (NaN for one path of each beta).

    `residual` is the root mean square of the residuals of log W2.
    """

    C: float
    c: float
    K: float
    C_error: float
    c_error: float
    K_error: float
    residual: float


def fit_bound(paths: Sequence[Trajectory], limit: LimitMap) -> Bound:
    """Fit the constants of W2(mu_t, P_# mu_0) <= K (sqrt(log(beta+1)/beta) e^{Ct} + e^{-ct}), arXiv 2605.10931.

    Least squares in log W2 with C >= 0 and c >= 0, until W2 has come back to 0.75 of its start and saturates. The bound
    is not sharp in beta: at a fixed time the distance to the zero-temperature flow falls almost like 1/beta (measured
    exponents are -0.97 to -0.89), not like sqrt(log beta/beta). K and C depend on the range of betas.

    Args:
        paths: one path (T, n, d), or (T, seeds, n, d), for each of two or more finite betas, as `flow` returns them.
        limit: the prediction `limit(attention)`.

    Example:
        >>> import torch
        >>> from attn_flow import Attention, flow, limit
        >>> from attn_flow.measures.quadrature import circle
        >>> G, V = torch.diag(torch.tensor([3.0, 1.0])).double(), torch.diag(torch.tensor([1.0, 2.0])).double()
        >>> cloud, t = circle(60, lambda theta: torch.exp(torch.cos(theta - 1))), torch.linspace(0, 10, 21)
        >>> runs = [Attention.from_matrices(G, V, beta=beta) for beta in (10.0, 40.0)]
        >>> paths = [flow(each, cloud, t, h=0.25) for each in runs]
        >>> fit_bound(paths, limit(runs[0])).C < limit(runs[0]).rates.C  # the admissible constant is far from sharp
        True
    """
    betas = [path.about.get("field", {}).get("beta") for path in paths]
    if not all(isinstance(b, (int, float)) and 0 < b < math.inf for b in betas) or len(set(betas)) < 2:
        raise ValueError(f"paths of beta {betas}; expected two or more finite inverse temperatures to tell C from c.")
    curves = [w2_curve(path, limit).detach().cpu().double().reshape(len(path), -1).T.numpy() for path in paths]
    counts = [len(each) for each in curves]
    if len(set(counts)) > 1:
        raise ValueError(f"paths of {counts} seeds, expected the same number for each beta.")
    seeds = [np.hstack([_before_saturation(*one) for one in zip(paths, betas, seed)]) for seed in zip(*curves)]
    (log_K, C, c), residual = _fit(np.hstack(seeds), (0.5, 0.5 if limit.rates is None else limit.rates.decay()))
    K, errors = math.exp(log_K), [math.nan] * 3
    if len(seeds) > 1:
        fits = [_fit(points, (C, c))[0] for points in seeds]
        errors = (np.std(fits, axis=0, ddof=1) / math.sqrt(len(seeds))).tolist()
    return Bound(C, c, K, errors[1], errors[2], K * errors[0], residual)


def _before_saturation(path: Trajectory, beta: float, w: Array) -> Array:
    """Times, beta and log W2 (3, points) of one curve until W2 has come back to FALL of its start."""
    t, index = path.t.double().numpy() - float(path.t[0]), np.arange(len(w))
    is_back = (index > w.argmin()) & (w > FALL * w[0])
    is_valid = (w > 0) & (np.cumsum(is_back) == 0)
    return np.stack([t[is_valid], np.full(int(is_valid.sum()), beta), np.log(w[is_valid])])


def _fit(points: Array, rates: tuple[float, float]) -> tuple[list[float], float]:
    """[log K, C, c] and the rms residual of times, beta and log W2 (3, points), from a first guess of (C, c)."""
    t, beta, log_w = points
    if len(t) < 6:
        raise ValueError(f"{len(t)} points before W2 saturates, expected six or more to fit three constants.")
    cold = np.log(np.log1p(beta) / beta) / 2
    lower = np.array([-np.inf, 0.0, 0.0])  # with free signs of C and c the two terms could exchange their roles
    start = np.array([log_w.max(), *np.maximum(rates, 1e-3)])
    residuals = lambda z: z[0] + np.logaddexp(cold + z[1] * t, -z[2] * t) - log_w  # z = log K, C, c
    fit = least_squares(residuals, start, x_scale=(1.0, 0.3, 0.3), bounds=(lower, np.inf))
    best = np.where(fit.x <= lower + 1e-6, 0.0, fit.x)  # the solver stops just inside
    return best.tolist(), float(np.sqrt(np.mean(fit.fun**2)))
