"""Numbers over seeds: phases and settling of a batch, the constants of the bound, propagation of chaos."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from scipy.optimize import least_squares
from torch import Tensor

from attn_flow.attention import Attention
from attn_flow.dynamics.particles import push_forward
from attn_flow.dynamics.trajectory import Trajectory
from attn_flow.measures import Cloud
from attn_flow.prediction.certificate import Settled
from attn_flow.prediction.limit_map import LimitMap
from attn_flow.prediction.timeline import FALL, Phases, phases, w2_curve
from attn_flow.transport.distances import wasserstein

RESAMPLES = 1000


@dataclass(frozen=True)
class OverSeeds:
    """A number over seeds: its mean, the standard error of the mean, and a bootstrap interval of 95% around it.

    >>> over_seeds([1.0, 2.0, 3.0]).mean
    2.0
    """

    mean: float
    error: float
    low: float
    high: float
    values: tuple[float, ...]

    def __repr__(self) -> str:
        interval = f"[{self.low:.4g}, {self.high:.4g}]"
        return f"OverSeeds({self.mean:.4g} +- {self.error:.2g}, 95% {interval}, {len(self.values)} seeds)"


def over_seeds(values: Sequence[float], seed: int = 0) -> OverSeeds:
    """Mean, standard error and bootstrap interval of one number per seed; at least two of them."""
    x = np.asarray(values, dtype=np.float64)
    if x.ndim != 1 or len(x) < 2 or not np.isfinite(x).all():
        raise ValueError(f"values of shape {x.shape}, expected one finite number for each of two or more seeds.")
    drawn = np.random.default_rng(seed).integers(0, len(x), (RESAMPLES, len(x)))
    low, high = np.quantile(x[drawn].mean(1), [0.025, 0.975])
    return OverSeeds(
        float(x.mean()), float(x.std(ddof=1) / math.sqrt(len(x))), float(low), float(high), tuple(x.tolist())
    )


@dataclass(frozen=True, eq=False, repr=False)
class PhasesOverSeeds:
    """`phases` of every path of a batch, and their numbers over the batch; a rate over those that have one."""

    each: tuple[Phases, ...]
    t_min: OverSeeds
    min_w2: OverSeeds
    rates: dict[str, OverSeeds]  # by the name of the phase, where two or more paths have a fitted rate
    share: dict[str, float]  # of the paths that have this phase

    def __repr__(self) -> str:
        rates = ", ".join(f"{name} {rate.mean:.3g} +- {rate.error:.2g}" for name, rate in self.rates.items())
        return (
            f"PhasesOverSeeds({len(self.each)} paths, t_min {self.t_min.mean:.3g} +- {self.t_min.error:.2g}, {rates})"
        )


def phases_over_seeds(path: Trajectory, limit: LimitMap) -> PhasesOverSeeds:
    """`phases` of a batch of paths (T, seeds, n, d), as one call of `flow` on clouds (seeds, n, d) returns them.

    Example:
        >>> from attn_flow import Attention, Sphere, flow, limit
        >>> attention = Attention.from_matrices(torch.eye(2), torch.diag(torch.tensor([2.0, 1.0])), beta=10.0)
        >>> x0 = Sphere().uniform(150, 2, generator=torch.Generator().manual_seed(0)).reshape(3, 50, 2)
        >>> found = phases_over_seeds(flow(attention, x0, torch.linspace(0, 8, 17), h=0.25), limit(attention))
        >>> len(found.each), found.min_w2.low <= found.min_w2.mean <= found.min_w2.high
        (3, True)
    """
    if path.x.ndim != 4 or path.x.shape[1] < 2:
        raise ValueError(f"path.x has shape {tuple(path.x.shape)}, expected (T, seeds, n, d) with two or more seeds.")
    of = lambda z, i: None if z is None else z.expand(path.x.shape[1:-1])[i]
    each = tuple(
        phases(replace(path, x=path.x[:, i], weights=of(path.weights, i), mask=of(path.mask, i)), limit, warn=False)
        for i in range(path.x.shape[1])
    )
    named: dict[str, list[float]] = {}
    seen: dict[str, int] = {}
    for found in each:
        for phase in (*found.phases, *((found.settling,) if found.settling else ())):
            seen[phase.phase] = seen.get(phase.phase, 0) + 1
            if phase.rate is not None:
                named.setdefault(phase.phase, []).append(phase.rate)
    return PhasesOverSeeds(
        each,
        over_seeds([found.t_min for found in each]),
        over_seeds([found.min_w2 for found in each]),
        {name: over_seeds(rates) for name, rates in named.items() if len(rates) > 1},
        {name: count / len(each) for name, count in seen.items()},
    )


def certified_over_seeds(settled: Settled) -> OverSeeds:
    """The certified share of every cloud of a batch that `settle` was given, (seeds, n), over the seeds."""
    if settled.certified.ndim != 2:
        raise ValueError(f"certified has shape {tuple(settled.certified.shape)}, expected (seeds, n) of one batch.")
    return over_seeds(settled.certified.double().mean(-1).tolist())


# --- the bound ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Bound:
    """K ( sqrt(log(beta+1)/beta) e^{Ct} + e^{-ct} ), fitted to W2, each constant with its standard error.

    cover: the factor by which K must be raised to lie above every fitted point; residual: of log W2, root mean square.
    """

    C: float
    c: float
    K: float
    C_error: float
    c_error: float
    K_error: float
    cover: float
    residual: float
    points: int

    def __call__(self, t: ArrayLike, beta: ArrayLike) -> NDArray[np.float64]:
        """The fitted W2 at times t and inverse temperatures beta, which broadcast."""
        return np.exp(_log_bound(np.array([math.log(self.K), self.C, self.c]), np.asarray(t), np.asarray(beta)))

    def __repr__(self) -> str:
        numbers = ((name, getattr(self, name), getattr(self, f"{name}_error")) for name in "CcK")
        words = ", ".join(f"{name} = {value:.4g} +- {error:.2g}" for name, value, error in numbers)
        return f"Bound({words}, above all points by {self.cover:.3g} K, residual {self.residual:.2g})"


def fit_bound(paths: Sequence[Trajectory], limit: LimitMap, *, w2: Sequence[ArrayLike] | None = None) -> Bound:
    """The constants of W2(mu_t, P_# mu_0) <= K ( sqrt(log(beta+1)/beta) e^{Ct} + e^{-ct} ), arXiv 2605.10931.

    Args:
        paths: one path for each of two or more finite betas, as `flow` returns them.
        limit: the prediction, `limit(attention)`.
        w2: their distances, each (T,), if they are known already.

    Returns:
        A `Bound`. Least squares in log W2 over the times until W2 has come back to .75 of its start (from there on it
        saturates, and no longer grows). Errors are of the fit: points of one path are not independent.

    Example:
        >>> from attn_flow import Attention, flow, limit
        >>> from attn_flow.measures.quadrature import circle
        >>> G, V = torch.diag(torch.tensor([3.0, 1.0])).double(), torch.diag(torch.tensor([1.0, 2.0])).double()
        >>> cloud, t = circle(60, lambda theta: torch.exp(torch.cos(theta - 1))), torch.linspace(0, 10, 21)
        >>> runs = [Attention.from_matrices(G, V, beta=beta) for beta in (10.0, 40.0)]
        >>> paths = [flow(each, cloud.x, t, weights=cloud.weights, h=0.25) for each in runs]
        >>> bound = fit_bound(paths, limit(runs[0]))
        >>> bound.C < limit(runs[0]).C  # the admissible constant is far from sharp
        True
    """
    betas = [path.about.get("attention", {}).get("beta") for path in paths]
    if len({b for b in betas if isinstance(b, (int, float)) and 0 < b < math.inf}) < 2:
        raise ValueError(f"paths of beta {betas}; expected two or more finite inverse temperatures to tell C from c.")
    curves = [w2_curve(path, limit) for path in paths] if w2 is None else [torch.as_tensor(w) for w in w2]
    t_all, beta_all, w_all = [], [], []
    for path, beta, curve in zip(paths, betas, curves, strict=True):
        t, w = path.t.double().numpy() - float(path.t[0]), curve.detach().cpu().double().numpy()
        if w.shape != t.shape:
            raise ValueError(f"w2 has shape {w.shape}, expected {t.shape}: one distance at every time of its path.")
        back = np.flatnonzero((np.arange(len(w)) > w.argmin()) & (w > FALL * w[0]))
        held = slice(0, back[0] if len(back) else None)
        t_all.append(t[held])
        w_all.append(w[held])
        beta_all.append(np.full(len(t[held]), float(beta)))
    t, beta_each, w = (np.concatenate(z) for z in (t_all, beta_all, w_all))
    keep = w > 0
    t, beta_each, log_w = t[keep], beta_each[keep], np.log(w[keep])
    if len(t) < 6:
        raise ValueError(f"{len(t)} points before W2 saturates, expected six or more to fit three constants.")
    start = np.array([float(log_w.max()), 0.5, limit.rate_w2 or 0.5])
    found = least_squares(lambda z: _log_bound(z, t, beta_each) - log_w, start, x_scale=(1.0, 0.3, 0.3))
    spread = float(found.fun @ found.fun) / (len(t) - 3)
    errors = np.sqrt(spread * np.diag(np.linalg.pinv(found.jac.T @ found.jac)))
    log_K, C, c = found.x
    return Bound(
        C=float(C),
        c=float(c),
        K=math.exp(log_K),
        C_error=float(errors[1]),
        c_error=float(errors[2]),
        K_error=math.exp(log_K) * float(errors[0]),
        cover=float(np.exp(-found.fun.min())),
        residual=float(np.sqrt(np.mean(found.fun**2))),
        points=len(t),
    )


def _log_bound(z: NDArray, t: NDArray, beta: NDArray) -> NDArray[np.float64]:
    log_K, C, c = z
    cold = np.log(np.log1p(beta) / beta) / 2
    return np.asarray(log_K + np.logaddexp(cold + C * t, -c * t), dtype=np.float64)


# --- propagation of chaos -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Chaos:
    """W2(mu^n_t, mu_t) over seeds for every n, and the exponent a of W2 ~ n^{-a} with its bootstrap error."""

    n: tuple[int, ...]
    w2: tuple[OverSeeds, ...]
    exponent: float
    error: float

    def __repr__(self) -> str:
        return f"Chaos(n = {self.n[0]} to {self.n[-1]}, W2 ~ n^-{self.exponent:.3g} +- {self.error:.2g})"


def propagation_of_chaos(
    attention: Attention,
    sample: Callable[[int, torch.Generator], Tensor],
    reference: Cloud,
    t: float,
    n: Sequence[int],
    *,
    seeds: int = 10,
    h: float = 0.05,
    seed: int = 0,
) -> Chaos:
    """How fast n tokens follow the mean field: W2 between their cloud at time t and the reference, against n.

    Args:
        attention: any.
        sample: (n, generator) -> tokens (n, d), independent draws of the initial law.
        reference: mu_t itself, as a `Cloud`: `density_flow(...).cloud(-1)`, or a flow of quadrature nodes; much finer
            than the largest n.
        t: the time >= 0; h: the step. n: two or more sizes. seeds: clouds of each size. seed: of the first.

    Returns:
        `Chaos`. Without interaction the exponent is that of sampling: 1/2 on the circle, 1/(d - 1) for d >= 4.

    Example:
        >>> from attn_flow import Attention, VonMisesFisher
        >>> from attn_flow.measures.quadrature import circle
        >>> mu = VonMisesFisher(torch.tensor([1.0, 0.0], dtype=torch.float64), 1.0)
        >>> exact = circle(400, lambda theta: torch.exp(torch.cos(theta)))
        >>> draw = lambda n, generator: mu.sample(n, generator=generator)
        >>> free = Attention.identity(2, dtype=torch.float64)
        >>> found = propagation_of_chaos(free, draw, exact, 0.0, [20, 80], seeds=8)
        >>> 0.2 < found.exponent < 0.8
        True
    """
    if len(n) < 2 or seeds < 2 or min(n) < 1 or len(set(n)) < len(n):
        raise ValueError(f"n = {list(n)}, seeds = {seeds}: expected two or more sizes and two or more seeds.")
    found = []
    for size in n:
        distances = []
        for i in range(seeds):
            x0 = sample(size, torch.Generator().manual_seed(seed + i))
            x = push_forward(attention, x0, t, h=h)
            distances.append(float(wasserstein(x, reference.x.to(x), weights_y=reference.weights)))
        found.append(over_seeds(distances))
    values = np.array([each.values for each in found])  # (sizes, seeds)
    log_n = np.log(np.asarray(n, dtype=np.float64))
    slope = lambda w: -float(np.polyfit(log_n, np.log(w), 1)[0])
    drawn = np.random.default_rng(seed).integers(0, seeds, (RESAMPLES, len(n), seeds))
    means = np.take_along_axis(np.broadcast_to(values, drawn.shape), drawn, axis=2).mean(2)
    error = float(np.std([slope(w) for w in means]))
    return Chaos(tuple(int(size) for size in n), tuple(found), slope(values.mean(1)), error)
