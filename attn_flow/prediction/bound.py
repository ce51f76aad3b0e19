"""The constants of the bound K (sqrt(log(beta+1)/beta) e^{Ct} + e^{-ct}), fitted to measured distances."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from scipy.optimize import least_squares

from attn_flow.dynamics.trajectory import Trajectory
from attn_flow.prediction.limit_map import LimitMap
from attn_flow.prediction.phases import FALL, w2_curve

Points = tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]  # t, beta and log W2 of one curve


@dataclass(frozen=True)
class Bound:
    """K (sqrt(log(beta+1)/beta) e^{Ct} + e^{-ct}), fitted to W2, each constant with its standard error.

    Attributes:
        C_error, c_error, K_error: a bootstrap over seeds. With one path for each beta, or for a rate that is 0, they
            are those of the fit, which takes the points of a path as independent: too small.
        cover: the factor by which K must be raised to lie above every point.
        residual: the root mean square of the residuals of log W2.
        seeds: how many paths were fitted for each beta.
    """

    C: float
    c: float
    K: float
    C_error: float
    c_error: float
    K_error: float
    cover: float
    residual: float
    seeds: int = 1

    def __call__(self, t: ArrayLike, beta: ArrayLike) -> NDArray[np.float64]:
        """The fitted W2 at times t and inverse temperatures beta, which broadcast."""
        return np.exp(_log_bound(np.array([math.log(self.K), self.C, self.c]), np.asarray(t), np.asarray(beta)))

    def __repr__(self) -> str:
        numbers = ((name, getattr(self, name), getattr(self, f"{name}_error")) for name in "CcK")
        words = ", ".join(f"{name} = {value:.4g} +- {error:.2g}" for name, value, error in numbers)
        errors = f"errors over {self.seeds} seeds" if self.seeds > 1 else "errors of the fit to one path: too small"
        return f"Bound({words} ({errors}), above all points by {self.cover:.3g} K, residual {self.residual:.2g})"


def fit_bound(
    paths: Sequence[Trajectory],
    limit: LimitMap,
    *,
    w2: Sequence[ArrayLike] | None = None,
    resamples: int = 200,
) -> Bound:
    """Fit the constants of W2(mu_t, P_# mu_0) <= K (sqrt(log(beta+1)/beta) e^{Ct} + e^{-ct}), arXiv 2605.10931.

    Least squares in log W2 with C >= 0 and c >= 0, until W2 has come back to 0.75 of its start and saturates. The bound
    is not sharp in beta: at a fixed time the distance to the zero-temperature flow falls almost like 1/beta (measured
    exponents are -0.97 to -0.89), not like sqrt(log beta/beta). K and C depend on the range of betas.

    Args:
        paths: one path (T, n, d), or (T, seeds, n, d), for each of two or more finite betas, as `flow` returns them.
        limit: the prediction `limit(attention)`.
        w2: their distances, each (T,) or (T, seeds), if they are known already.
        resamples: the draws of the bootstrap over seeds.

    Returns:
        A `Bound`.

    Example:
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
    if len({b for b in betas if isinstance(b, (int, float)) and 0 < b < math.inf}) < max(2, len(set(map(str, betas)))):
        raise ValueError(f"paths of beta {betas}; expected two or more finite inverse temperatures to tell C from c.")
    curves = [w2_curve(path, limit) for path in paths] if w2 is None else [torch.as_tensor(np.asarray(w)) for w in w2]
    points: list[list[Points]] = []  # by beta, then by seed
    for path, beta, curve in zip(paths, betas, curves, strict=True):
        t, w = path.t.double().numpy() - float(path.t[0]), curve.detach().cpu().double().numpy()
        if w.ndim not in (1, 2) or w.shape[0] != len(t) or w.size == 0:
            raise ValueError(f"w2 has shape {w.shape}, expected ({len(t)},) or ({len(t)}, seeds), as its path.")
        points.append([_before_saturation(t, float(beta), each) for each in w.reshape(len(t), -1).T])
    seeds = len(points[0])
    if any(len(each) != seeds for each in points):
        raise ValueError(f"paths of {[len(each) for each in points]} seeds, expected the same number for each beta.")
    highest = max(float(p[2].max(initial=-np.inf)) for each in points for p in each)
    start = np.array([highest, 0.5, 0.5 if limit.rates is None else limit.rates.decay()])
    best, residuals, errors = _fit([p for each in points for p in each], start)
    if seeds > 1:
        rows = np.random.default_rng(0).integers(0, seeds, (resamples, len(points), seeds))
        fits = [_fit([e[i] for e, row in zip(points, draw) for i in row], best)[0] for draw in rows]
        # At C = 0 or c = 0 the draws pile up at the boundary, and their spread says nothing.
        errors = np.where(best > [-np.inf, 0, 0], np.std(fits, axis=0, ddof=1), errors)
    K, (C, c) = math.exp(best[0]), best[1:].tolist()
    K_error, C_error, c_error = (errors * [K, 1, 1]).tolist()
    cover, residual = float(np.exp(-residuals.min())), float(np.sqrt(np.mean(residuals**2)))
    return Bound(C, c, K, C_error, c_error, K_error, cover, residual, seeds)


def _before_saturation(t: NDArray, beta: float, w: NDArray) -> Points:
    """The points of one curve until W2 has come back to FALL of its start."""
    back = np.flatnonzero((np.arange(len(w)) > w.argmin()) & (w > FALL * w[0]))
    is_valid = (w > 0) & (np.arange(len(w)) < (back[0] if len(back) else len(w)))
    return t[is_valid], np.full(int(is_valid.sum()), beta), np.log(w[is_valid])


def _fit(points: Sequence[Points], start: NDArray) -> tuple[NDArray, NDArray, NDArray]:
    """(log K, C, c), the residuals of log W2, and errors that take every point as independent."""
    t, beta, log_w = (np.concatenate(z) for z in zip(*points))
    if len(t) < 6:
        raise ValueError(f"{len(t)} points before W2 saturates, expected six or more to fit three constants.")
    lower = np.array([-np.inf, 0.0, 0.0])  # with free signs of C and c the two terms could exchange their roles
    residuals = lambda z: _log_bound(z, t, beta) - log_w
    fit = least_squares(residuals, start, x_scale=(1.0, 0.3, 0.3), bounds=(lower, np.inf))
    variance = float(fit.fun @ fit.fun) / (len(t) - 3)
    constants = np.where(fit.x <= lower + 1e-6, 0.0, fit.x)  # the solver stops just inside
    return constants, fit.fun, np.sqrt(variance * np.diag(np.linalg.pinv(fit.jac.T @ fit.jac)))


def _log_bound(z: NDArray, t: NDArray, beta: NDArray) -> NDArray[np.float64]:
    log_K, C, c = z
    cold = np.log(np.log1p(beta) / beta) / 2
    return np.asarray(log_K + np.logaddexp(cold + C * t, -c * t), dtype=np.float64)
