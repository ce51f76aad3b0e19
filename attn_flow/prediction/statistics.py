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

from attn_flow.attention import Field
from attn_flow.base import checks, memory
from attn_flow.dynamics.particles import push_forward
from attn_flow.dynamics.trajectory import Trajectory
from attn_flow.measures import Cloud
from attn_flow.prediction.certificate import Settled
from attn_flow.prediction.limit_map import LimitMap
from attn_flow.prediction.timeline import FALL, Phases, path_alone, phases, w2_curve
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
    checks.whole("seed", seed, 0)
    try:
        x = np.asarray(values, dtype=np.float64)
    except (TypeError, ValueError):
        raise ValueError(f"values is a {type(values).__name__}, expected one number for each seed.") from None
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
    path_alone(path)
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
    checks.instance("settled", settled, Settled, "what settle returns")
    if settled.certified.ndim != 2:
        raise ValueError(f"certified has shape {tuple(settled.certified.shape)}, expected (seeds, n) of one batch.")
    return over_seeds(settled.certified.double().mean(-1).tolist())


# --- the bound ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Bound:
    """K ( sqrt(log(beta+1)/beta) e^{Ct} + e^{-ct} ), fitted to W2, each constant with its standard error.

    cover: the factor by which K must be raised to lie above every fitted point; residual: of log W2, root mean square.
    seeds: how many paths of each beta; with two or more the errors are a bootstrap over them. With one, or of a rate
    that is 0, the least it may be, they are those of the fit, which takes points of one path as independent: too small,
    and no more than a lower bound.
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
    seeds: int = 1

    def __call__(self, t: ArrayLike, beta: ArrayLike) -> NDArray[np.float64]:
        """The fitted W2 at times t and inverse temperatures beta, which broadcast."""
        return np.exp(_log_bound(np.array([math.log(self.K), self.C, self.c]), np.asarray(t), np.asarray(beta)))

    def __repr__(self) -> str:
        numbers = ((name, getattr(self, name), getattr(self, f"{name}_error")) for name in "CcK")
        words = ", ".join(f"{name} = {value:.4g} +- {error:.2g}" for name, value, error in numbers)
        errors = f"errors over {self.seeds} seeds" if self.seeds > 1 else "errors of the fit to one path: too small"
        return f"Bound({words} ({errors}), above all points by {self.cover:.3g} K, residual {self.residual:.2g})"


Points = tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]  # t, beta and log W2 of one curve


def fit_bound(
    paths: Sequence[Trajectory],
    limit: LimitMap,
    *,
    w2: Sequence[ArrayLike] | None = None,
    resamples: int = 200,
    seed: int = 0,
) -> Bound:
    """The constants of W2(mu_t, P_# mu_0) <= K ( sqrt(log(beta+1)/beta) e^{Ct} + e^{-ct} ), arXiv 2605.10931.

    Args:
        paths: one path for each of two or more finite betas, as `flow` returns them; (T, n, d), or (T, seeds, n, d)
            with as many seeds for each.
        limit: the prediction, `limit(attention)`.
        w2: their distances, each (T,) or (T, seeds), if they are known already.
        resamples: draws of the bootstrap over seeds; seed: of these draws.

    Returns:
        A `Bound`. Least squares in log W2, with C >= 0 and c >= 0, over the times until W2 has come back to .75 of its
        start (from there on it saturates, and no longer grows). Errors are a bootstrap over seeds, whole curves at a
        time; of single paths only the error of the fit is known, which takes the points of a path as independent.

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
    checks.instance("paths", paths, Sequence, "a list of paths, one for each beta")
    for path in paths:
        path_alone(path)
    checks.instance("limit", limit, LimitMap, "a LimitMap; pass limit(attention)")
    betas = [path.about.get("attention", {}).get("beta") for path in paths]
    if len({b for b in betas if isinstance(b, (int, float)) and 0 < b < math.inf}) < 2:
        raise ValueError(f"paths of beta {betas}; expected two or more finite inverse temperatures to tell C from c.")
    checks.whole("resamples", resamples, 2)
    checks.whole("seed", seed, 0)
    if w2 is not None:
        checks.instance("w2", w2, Sequence, "a list of distances, (T,) or (T, seeds), one for each path")
        if len(w2) != len(paths):
            raise ValueError(f"w2 has {len(w2)} entries for {len(paths)} paths, expected one for each.")
    try:
        curves = [w2_curve(path, limit) for path in paths] if w2 is None else [torch.as_tensor(w) for w in w2]
    except (TypeError, RuntimeError):
        raise ValueError(
            "w2 holds what are no numbers, expected distances, (T,) or (T, seeds), of each path."
        ) from None
    every: list[list[Points]] = []  # by beta, then by seed
    for path, beta, curve in zip(paths, betas, curves, strict=True):
        t, w = path.t.double().numpy() - float(path.t[0]), curve.detach().cpu().double().numpy()
        if w.ndim not in (1, 2) or w.shape[0] != len(t) or w.size == 0:
            raise ValueError(f"w2 has shape {w.shape}, expected ({len(t)},) or ({len(t)}, seeds), as its path.")
        every.append([_before_saturation(t, float(beta), each) for each in w.reshape(len(t), -1).T])
    seeds = len(every[0])
    if any(len(each) != seeds for each in every):
        raise ValueError(f"paths of {[len(each) for each in every]} seeds, expected as many for each beta.")
    start = np.array([max(float(p[2].max(initial=-np.inf)) for each in every for p in each), 0.5, limit.rate_w2 or 0.5])
    (log_K, C, c), residuals, errors = _fit([p for each in every for p in each], start)
    if seeds > 1:
        drawn = np.random.default_rng(seed).integers(0, seeds, (resamples, len(every), seeds))
        again = [_fit([e[i] for e, row in zip(every, rows) for i in row], np.array([log_K, C, c]))[0] for rows in drawn]
        # At C = 0 or c = 0 draws pile up there and their spread says nothing.
        errors = np.where(np.array([np.inf, C, c]) > 0, np.std(again, axis=0, ddof=1), errors)
    return Bound(
        C=float(C),
        c=float(c),
        K=math.exp(log_K),
        C_error=float(errors[1]),
        c_error=float(errors[2]),
        K_error=math.exp(log_K) * float(errors[0]),
        cover=float(np.exp(-residuals.min())),
        residual=float(np.sqrt(np.mean(residuals**2))),
        points=len(residuals),
        seeds=seeds,
    )


def _before_saturation(t: NDArray, beta: float, w: NDArray) -> Points:
    """The points of one curve until W2 has come back to FALL of its start."""
    back = np.flatnonzero((np.arange(len(w)) > w.argmin()) & (w > FALL * w[0]))
    t, w = t[: back[0] if len(back) else None], w[: back[0] if len(back) else None]
    return t[w > 0], np.full(int((w > 0).sum()), beta), np.log(w[w > 0])


def _fit(points: Sequence[Points], start: NDArray) -> tuple[NDArray, NDArray, NDArray]:
    """(log K, C, c), the residuals of log W2, and errors that take every point as independent."""
    t, beta, log_w = (np.concatenate(z) for z in zip(*points))
    if len(t) < 6:
        raise ValueError(f"{len(t)} points before W2 saturates, expected six or more to fit three constants.")
    # C and c are rates of growth and decay: with signs free the two terms may exchange their parts.
    ends = ([-np.inf, 0.0, 0.0], np.inf)
    found = least_squares(lambda z: _log_bound(z, t, beta) - log_w, start, x_scale=(1.0, 0.3, 0.3), bounds=ends)
    spread = float(found.fun @ found.fun) / (len(t) - 3)
    at_most = np.array([-np.inf, 1e-6, 1e-6])  # what the solver leaves of an end
    return (
        np.where(found.x <= at_most, 0.0, found.x),
        found.fun,
        np.sqrt(spread * np.diag(np.linalg.pinv(found.jac.T @ found.jac))),
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
    attention: Field,
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
        attention: any field that `flow` takes: an `Attention` of any kind, a sum with a `Drift`, `Layers`.
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
    checks.whole("seeds", seeds, 2)
    checks.whole("seed", seed, 0)
    if not isinstance(reference, Cloud):
        raise ValueError(f"reference is a {type(reference).__name__}, expected a Cloud, such as quadrature nodes.")
    checks.function("sample", sample, "(n, generator) -> tokens (n, d)")
    checks.instance("n", n, Sequence, "two or more sizes")
    for size in n:
        checks.whole("a size in n", size)
    if len(n) < 2 or min(n) < 1 or len(set(n)) < len(n):
        raise ValueError(f"n = {list(n)}, seeds = {seeds}: expected two or more sizes and two or more seeds.")
    memory.require(8 * RESAMPLES * len(n) * seeds, f"a bootstrap over {seeds} seeds", "ask for fewer seeds")
    found = []
    for size in n:
        distances = []
        for i in range(seeds):
            x0 = sample(size, torch.Generator().manual_seed(seed + i))
            checks.tokens("sample(n, generator)", x0)
            if x0.shape[-2] != size:
                raise ValueError(f"sample({size}, generator) gave {x0.shape[-2]} tokens, expected {size}.")
            x = push_forward(attention, x0, t, h=h)
            if x.ndim + reference.x.ndim != 4:
                raise ValueError("attention, sample or reference are a batch, expected one of each; call it for each.")
            distances.append(float(wasserstein(x, reference.x.to(x), weights_y=reference.weights)))
        found.append(over_seeds(distances))
    values = np.array([each.values for each in found])  # (sizes, seeds)
    log_n = np.log(np.asarray(n, dtype=np.float64))
    slope = lambda w: -float(np.polyfit(log_n, np.log(w), 1)[0])
    drawn = np.random.default_rng(seed).integers(0, seeds, (RESAMPLES, len(n), seeds))
    means = np.take_along_axis(np.broadcast_to(values, drawn.shape), drawn, axis=2).mean(2)
    error = float(np.std([slope(w) for w in means]))
    return Chaos(tuple(int(size) for size in n), tuple(found), slope(values.mean(1)), error)
