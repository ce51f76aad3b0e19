"""The constants of the bound K (sqrt(log(beta+1)/beta) e^{Ct} + e^{-ct}), fitted to measured distances."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike
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

    def __call__(self, t: ArrayLike, beta: ArrayLike) -> Array:
        """The fitted W2 at times t and inverse temperatures beta, which broadcast."""
        return np.exp(_log_bound((math.log(self.K), self.C, self.c), np.asarray(t), np.asarray(beta)))


def fit_bound(paths: Sequence[Trajectory], limit: LimitMap, *, w2: Sequence[ArrayLike] | None = None) -> Bound:
    """Fit the constants of W2(mu_t, P_# mu_0) <= K (sqrt(log(beta+1)/beta) e^{Ct} + e^{-ct}), arXiv 2605.10931.

    Least squares in log W2 with C >= 0 and c >= 0, until W2 has come back to 0.75 of its start and saturates. The bound
    is not sharp in beta: at a fixed time the distance to the zero-temperature flow falls almost like 1/beta (measured
    exponents are -0.97 to -0.89), not like sqrt(log beta/beta). K and C depend on the range of betas.

    Args:
        paths: one path (T, n, d), or (T, seeds, n, d), for each of two or more finite betas, as `flow` returns them.
        limit: the prediction `limit(attention)`.
        w2: their distances, each (T,) or (T, seeds), if they are known already.

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
    curves = [w2_curve(path, limit).detach().cpu() for path in paths] if w2 is None else w2
    columns = [np.asarray(curve, dtype=np.float64) for curve in curves]
    columns = [curve[:, None] if curve.ndim == 1 else curve for curve in columns]
    expected = [(len(path), columns[0].shape[1]) for path in paths]
    if [curve.shape for curve in columns] != expected:
        raise ValueError(f"w2 has shapes {[curve.shape for curve in columns]}, expected (T, seeds) = {expected}.")
    seeds = [
        np.hstack([_before_saturation(*one) for one in zip(paths, betas, curves_of_seed)])
        for curves_of_seed in zip(*(curve.T for curve in columns))
    ]
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
    lower = np.array([-np.inf, 0.0, 0.0])  # with free signs of C and c the two terms could exchange their roles
    start = np.array([log_w.max(), *np.maximum(rates, 1e-3)])
    residuals = lambda z: _log_bound(z, t, beta) - log_w
    fit = least_squares(residuals, start, x_scale=(1.0, 0.3, 0.3), bounds=(lower, np.inf))
    best = np.where(fit.x <= lower + 1e-6, 0.0, fit.x)  # the solver stops just inside
    return best.tolist(), float(np.sqrt(np.mean(fit.fun**2)))


def _log_bound(constants: Sequence[float], t: Array, beta: Array) -> Array:
    log_K, C, c = constants
    cold = np.log(np.log1p(beta) / beta) / 2
    return np.asarray(log_K + np.logaddexp(cold + C * t, -c * t), dtype=np.float64)
