"""Predictions piece by piece: windows of a fit, certificates, speeds, words; each against its definition or edge."""

import inspect
import itertools
import math
import re
from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy.integrate import quad
from scipy.linalg import expm
from scipy.optimize import curve_fit
from tolerances import rounding
from torch import Tensor

from attn_flow import Attention, Cloud, EllipsoidSupport, Gaussian, Sphere, Trajectory, UniformSphere, flow, limit
from attn_flow.dynamics.steppers import Adaptive, rk4
from attn_flow.measures.quadrature import circle
from attn_flow.prediction import (
    ResolutionWarning,
    fit_bound,
    over_seeds,
    phases,
    phases_over_seeds,
    propagation_of_chaos,
    resolution,
    settle,
)
from attn_flow.prediction.certificate import _jacobian, _newton, tangent_basis
from attn_flow.prediction.hermite import mode_rates
from attn_flow.prediction.requirements import _odd_moments, remedy
from attn_flow.prediction.spectral import _group_projector, levels, spectrum
from attn_flow.prediction.statistics import _before_saturation, _fit
from attn_flow.prediction.timeline import RoundingWarning, split, w2_curve
from attn_flow.prediction.zero_temperature import (
    NODES,
    _gauss_legendre,
    _invert,
    _legendre,
    integration,
    linear_flow,
    linear_part,
    zero_temperature_flow,
)
from attn_flow.transport.distances import wasserstein

F64 = torch.float64


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=F64)


def unit(*shape: int, seed: int = 0) -> Tensor:
    return Sphere().uniform(shape[:-1], shape[-1], generator=torch.Generator().manual_seed(seed), dtype=F64)


def matrix(*rows: list[float]) -> Tensor:
    return torch.tensor(rows, dtype=F64)


def diag(*entries: float) -> Tensor:
    return torch.diag(torch.tensor(entries, dtype=F64))


def attention(G: Tensor, V: Tensor, beta: float = 1.0, **options: Tensor) -> Attention:
    return Attention.from_matrices(G, V, beta, **options)


# --- the windows of a fit -----------------------------------------------------------------------------------------


def broken_line(t: np.ndarray, knots: list[tuple[float, float]]) -> np.ndarray:
    """exp of the broken line through (time, log w)."""
    return np.exp(np.interp(t, *zip(*knots)))


def test_the_rate_of_the_fall_is_that_of_its_straight_part() -> None:
    """Slopes 1, 1/2 and 1/4 above, between and below sqrt(w_0 level) and 2 level: the one between, exactly."""
    low = math.log(1e-3)
    level, twice = low + math.log(2), low + math.log(4)
    middle = level / 2
    times = [0.0, -middle, -middle + 2 * (middle - twice)]
    times.append(times[-1] + 4 * (twice - low))
    t = np.unique(np.concatenate([np.linspace(a, b, 12) for a, b in itertools.pairwise(times)]))
    w = broken_line(t, list(zip(times, [0.0, middle, twice, low])))
    (fall, rest) = split(t, w, {"concentrating": 7.0, "metastable": 8.0})
    assert (fall.phase, rest.phase) == ("concentrating", "metastable")
    assert fall.rate == pytest.approx(0.5, rel=1e-9)
    assert fall.error == pytest.approx(0.0, abs=1e-9)
    assert fall.end == pytest.approx(times[2] + 4 * math.log(2), rel=1e-12)  # where w is twice its minimum
    assert (fall.start, rest.end, fall.predicted, rest.predicted) == (0.0, t[-1], 7.0, 8.0)
    assert rest.rate == pytest.approx(-0.25, rel=1e-9)


@pytest.mark.parametrize("late", [4, 5])
def test_a_fall_with_four_late_points_or_fewer_is_fitted_from_seven_tenths_on(late: int) -> None:
    """w_0 = 1, level = .02: points of slope 1 from .7 to the middle, of slope 1/2 from there to twice the level."""
    low, middle = math.log(0.01), math.log(0.02) / 2
    early = np.linspace(math.log(0.7), middle + 0.05, 6)
    logs = [0.0, math.log(0.72), *early, *np.linspace(middle - 0.01, math.log(0.041), late), low, low]
    steps = np.abs(np.diff(logs)) * np.where(np.array(logs[1:]) > middle, 1.0, 2.0)
    t = np.concatenate([[0.0], np.cumsum(np.maximum(steps, 0.1))])
    t[1] = 0.2  # what is above .7 has another slope
    t[2:] += 1.0
    w = np.exp(logs)
    inside = (w <= 0.7 + 1e-12) & (w >= 0.04) if late == 4 else (w <= math.sqrt(0.02)) & (w >= 0.04)
    expected = -np.polyfit(t[inside], np.log(w[inside]), 1)[0]
    assert split(t, w)[0].rate == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("tangent", [False, True])
def test_the_rate_of_the_exit_is_that_of_its_window(tangent: bool) -> None:
    """W2 up to three tenths of what it comes to; a tangent from .5 to 30: slopes differ outside."""
    t = np.linspace(0, 20, 201)
    low = math.log(1e-3)
    bends = [(0.0, 0.0), (5.0, low), (7.0, low + 0.1), (13.0, low + 6), (16.0, low + 7.5), (20.0, low + 10.5)]
    w, leaving = broken_line(t, bends), None
    if tangent:
        leaving = broken_line(t, [(0, -9.0), (9.0, math.log(0.5)), (17.0, math.log(30.0)), (20.0, 9.0)])
    fall, rest, end = split(t, w, None, leaving)
    assert (fall.phase, rest.phase, end.phase) == ("concentrating", "metastable", "terminal")
    assert fall.end == rest.start == pytest.approx(5 * math.log(500) / math.log(1000), rel=1e-9)
    slope = 5.9 / 6
    assert rest.end == end.start == pytest.approx(7 + (math.log(2) - 0.1) / slope, rel=1e-9)
    still = (t >= rest.start) & (t <= rest.end)
    assert rest.rate == pytest.approx(np.polyfit(t[still], np.log(w[still]), 1)[0], rel=1e-9)
    inside = (t >= end.start) & ((w <= 0.3 * w.max()) if leaving is None else (leaving >= 0.5) & (leaving <= 30))
    curve = w if leaving is None else leaving
    assert end.rate == pytest.approx(np.polyfit(t[inside], np.log(curve[inside]), 1)[0], rel=1e-9)
    if tangent:
        assert end.rate == pytest.approx(math.log(60) / 8, rel=1e-6)
    assert w.max() > 2 > 1 == w[0]  # three tenths of what it comes to, not of where it began


def test_a_path_concentrates_from_three_quarters_on() -> None:
    t = np.linspace(0, 1, 11)
    for least, name in ((0.74, "concentrating"), (0.76, "spreading")):
        w = 1 - (1 - least) * np.sin(math.pi * t)
        assert split(t, w)[0].phase == (name if name == "spreading" else "metastable")  # within twice its least
    assert split(t, np.where(t < 0.05, 1.0, 0.0))[-1].rate is None  # nothing to fit
    assert [p.phase for p in split(t, np.where(t < 0.05, 1.0, 0.0))] == ["metastable"]


def test_the_error_of_a_slope_is_that_of_least_squares() -> None:
    t = np.linspace(0, 3, 40)
    noise = np.random.default_rng(0).normal(size=40)
    noise[0] = 10.0  # it falls to six tenths, and all of it is metastable
    found = split(t, np.exp(-2 + 0.05 * noise))[0]
    slope, covariance = np.polyfit(t, 0.05 * noise, 1, cov=True)
    assert (found.rate, found.error) == pytest.approx((slope[0], math.sqrt(covariance[0, 0])), rel=1e-9)


@pytest.mark.parametrize(
    ("t", "w"), [([0.0, 1.0, 2.0], [1.0, 0.5]), ([[0.0, 1.0, 2.0]], [[1.0, 0.5, 0.1]]), ([0.0, 1.0], [1.0, 0.5])]
)
def test_a_curve_has_a_value_at_each_of_three_times(t: list, w: list) -> None:
    with pytest.raises(ValueError, match=r"expected the same \(T,\) with at least 3 times"):
        split(t, w)
    for bad in (math.nan, math.inf, -1e-3):
        with pytest.raises(ValueError, match="w2 has NaN, infinite or negative entries"):
            split([0.0, 1.0, 2.0], [1.0, bad, 0.5])


def test_the_exit_of_a_path_is_read_off_the_tangent_and_settling_off_the_mean() -> None:
    """Clusters of three tokens at +-(cos a, sin a), a(t) as x' = V x makes it: tan a = 1e-4 e^{t}, V = diag(1, 2)."""
    A = attention(diag(3, 1), diag(1, 2), 50.0)
    t = torch.linspace(0, 24, 97, dtype=F64)
    a = torch.atan(1e-3 * torch.exp(t - 3))
    e = torch.stack([a.cos(), a.sin()], -1)
    start = torch.tensor([0.9, 0.1, -0.8], dtype=F64) * torch.exp(-t)[:, None]  # they fall together first
    spread = torch.stack([-a.sin(), a.cos()], -1)[:, None] * start[..., None]
    x = Sphere().retract(e[:, None] + spread)
    x = torch.cat([x, -x[:, :2]], dim=1)
    path = Trajectory(t, x, about=flow(A, x[0], [0.0, 0.1]).about)
    found = phases(path, limit(A), warn=False)
    assert [p.phase for p in found.phases] == ["concentrating", "metastable", "terminal"]
    assert found.phases[2].rate == pytest.approx(1.0, abs=1e-3)
    assert found.settling is not None
    # the mean of each side is cos a = e^{-(t - 3)}/1e-3 away from e_2
    assert found.settling.rate == pytest.approx(1.0, abs=1e-2)
    assert found.settling.predicted == pytest.approx(1.0)
    assert (found.rounding, found.resolution is None) == (None, False)
    assert found.t_min == float(t[int(np.argmin(found.w2))])
    assert found.as_dict()["settling"]["phase"] == "settling"


# --- over seeds ---------------------------------------------------------------------------------------------------


def test_a_number_over_seeds_is_its_bootstrap() -> None:
    x = [1.0, 2.5, 2.0, 7.0]
    found = over_seeds(x, seed=3)
    means = np.array(x)[np.random.default_rng(3).integers(0, 4, (1000, 4))].mean(1)
    assert (found.low, found.high) == pytest.approx(tuple(np.quantile(means, [0.025, 0.975])), rel=1e-12)
    assert found.error == pytest.approx(np.std(x, ddof=1) / 2, rel=1e-12)
    assert repr(found).startswith("OverSeeds(3.125 +- ")
    for bad in ([1.0], [[1.0, 2.0], [1.0, 2.0]], [1.0, math.nan]):
        with pytest.raises(ValueError, match="expected one finite number for each of two or more seeds"):
            over_seeds(bad)  # type: ignore[arg-type]
    assert over_seeds([1.0, 2.0]).mean == 1.5


def test_points_of_a_curve_until_it_has_come_back() -> None:
    t = np.arange(8.0)
    w = np.array([1.0, 0.8, 0.2, 0.0, 0.5, 0.74, 0.76, 0.3])
    times, beta, log_w = _before_saturation(t, 9.0, w)
    assert times.tolist() == [0.0, 1.0, 2.0, 4.0, 5.0]  # up to .75 of its start, and where there is a logarithm
    assert beta.tolist() == [9.0] * 5
    np.testing.assert_allclose(log_w, np.log([1.0, 0.8, 0.2, 0.5, 0.74]))
    assert len(_before_saturation(t, 9.0, np.exp(-t))[0]) == 8


def test_the_errors_of_a_fit_are_those_of_least_squares() -> None:
    """Against scipy's curve_fit, which knows no bounds and no scales; and the bootstrap over seeds, draw by draw."""
    t, betas, rng = np.linspace(0, 5, 31), (30.0, 300.0), np.random.default_rng(0)
    cold = {b: math.sqrt(math.log(b + 1) / b) for b in betas}
    shape = lambda t, b, log_K, C, c: log_K + np.log(np.array([cold[z] for z in b]) * np.exp(C * t) + np.exp(-c * t))
    every = {b: np.exp(shape(t, [b] * 31, 0.3, 0.6, 0.5)[:, None] + 0.1 * rng.normal(size=(31, 3))) for b in betas}
    paths = [Trajectory(torch.from_numpy(t + 2), torch.ones(31, 1, 2), about={"attention": {"beta": b}}) for b in betas]
    target = limit(attention(diag(3, 1), diag(1, 2)))
    one = fit_bound(paths, target, w2=[every[b][:, 0] for b in betas])
    kept = [_before_saturation(t, b, every[b][:, 0]) for b in betas]
    times, of, logs = (np.concatenate(z) for z in zip(*kept))
    best, covariance = curve_fit(lambda z, *p: shape(*z, *p), (times, of), logs, (0.0, 0.5, 0.5))
    assert (math.log(one.K), one.C, one.c) == pytest.approx(tuple(best), rel=1e-4)
    errors = np.sqrt(np.diag(covariance))
    assert (one.K_error / one.K, one.C_error, one.c_error) == pytest.approx(tuple(errors), rel=1e-3)
    off = shape(times, of, *best) - logs
    assert one.cover == pytest.approx(math.exp(-off.min()), rel=1e-4)
    assert one.residual == pytest.approx(math.sqrt(np.mean(off**2)), rel=1e-6)
    assert (one.points, one.seeds) == (len(times), 1)
    assert one(times, of) == pytest.approx(np.exp(shape(times, of, *best)), rel=1e-4)
    several = fit_bound(paths, target, w2=[every[b] for b in betas], resamples=6, seed=5)
    points = [[_before_saturation(t, b, every[b][:, i]) for i in range(3)] for b in betas]
    centre, residuals, _ = _fit([p for each in points for p in each], np.array([0.0, 0.5, 0.5]))
    draws = np.random.default_rng(5).integers(0, 3, (6, 2, 3))
    again = [_fit([points[b][i] for b in range(2) for i in rows[b]], centre)[0] for rows in draws]
    assert (math.log(several.K), several.C, several.c) == pytest.approx(tuple(centre), rel=1e-4)
    spread = np.std(again, axis=0, ddof=1)
    assert (several.K_error / several.K, several.C_error, several.c_error) == pytest.approx(tuple(spread), rel=1e-2)
    assert (several.points, several.seeds) == (len(residuals), 3)


def test_a_fit_says_what_it_is_given() -> None:
    t, target = torch.arange(5.0, dtype=F64), limit(attention(diag(3, 1), diag(1, 2)))
    path = lambda beta: Trajectory(t, torch.ones(5, 1, 2), about={"attention": {"beta": beta}})
    w = [np.exp(-t.numpy())] * 2
    for betas in ((30.0, 30.0), (30.0, "inf"), (30.0, None), (30.0, 0.0), (math.inf, 30.0)):
        with pytest.raises(ValueError, match="expected two or more finite inverse temperatures"):
            fit_bound([path(b) for b in betas], target, w2=w)
    pair = [path(30.0), path(3.0)]
    for bad in (np.ones((5, 2, 2)), np.ones(4), np.ones((5, 0))):
        with pytest.raises(ValueError, match=r"w2 has shape .*, expected \(5,\) or \(5, seeds\), as its path"):
            fit_bound(pair, target, w2=[w[0], bad])
    short = [np.array([1.0, 0.5, 0.0, 0.0, 0.0])] * 2
    with pytest.raises(ValueError, match="4 points before W2 saturates, expected six or more"):
        fit_bound(pair, target, w2=short)
    three = [np.array([1.0, 0.5, 0.2, 0.0, 0.0])] * 2
    assert fit_bound(pair, target, w2=three).points == 6


def test_chaos_of_clouds_at_known_distances() -> None:
    """All tokens at one place, (1 + seed/10) n^{-.3} from the reference: the exponent, its bootstrap drawn again."""

    def sample(n: int, generator: torch.Generator) -> Tensor:
        chord = n**-0.3 * (1 + (generator.initial_seed() - 4) / 10)
        angle = 2 * math.asin(chord / 2)
        return torch.tensor([[math.cos(angle), math.sin(angle)]], dtype=F64).repeat(n, 1)

    at = Cloud(torch.tensor([[1.0, 0.0]], dtype=F64))
    sizes, seeds = [2, 5, 20], 3
    still = attention(torch.eye(2, dtype=F64), torch.zeros(2, 2, dtype=F64))
    found = propagation_of_chaos(still, sample, at, 0.0, sizes, seeds=seeds, seed=4)
    values = np.array([[n**-0.3 * (1 + i / 10) for i in range(seeds)] for n in sizes])
    for each, row in zip(found.w2, values):
        assert each.values == pytest.approx(tuple(row), rel=1e-7)
    assert found.exponent == pytest.approx(0.3, rel=1e-6)
    draws = np.random.default_rng(4).integers(0, seeds, (1000, 3, seeds))
    slopes = [-np.polyfit(np.log(sizes), np.log([values[k][row[k]].mean() for k in range(3)]), 1)[0] for row in draws]
    assert found.error == pytest.approx(np.std(slopes), rel=1e-6)
    for bad in ([5], [5, 5], [5, 0]):
        with pytest.raises(ValueError, match="expected"):
            propagation_of_chaos(still, sample, at, 0.0, bad, seeds=2)
    with pytest.raises(ValueError, match=r"sample\(5, generator\) gave 4 tokens, expected 5"):
        propagation_of_chaos(still, lambda n, g: torch.ones(4, 2, dtype=F64), at, 0.0, [5, 6], seeds=2)


# --- certificates -------------------------------------------------------------------------------------------------


def test_a_basis_of_the_tangent_plane() -> None:
    x = drawn(2, 3, 5, 4)
    x[0, 0, 0] = torch.tensor([0.0, 1.0, 0.0, 0.0], dtype=F64)
    x[0, 0, 1] = torch.tensor([-2.0, 0.0, 0.0, 0.0], dtype=F64)
    B = tangent_basis(x)
    assert B.shape == (2, 3, 5, 4, 3)
    torch.testing.assert_close(B.mT @ B, torch.eye(3, dtype=F64).expand(2, 3, 5, 3, 3), rtol=0, atol=1e-14)
    assert float((B.mT @ x[..., None]).abs().max()) < 1e-14


@pytest.mark.parametrize("joint", [False, True])
def test_jacobians_and_newtons_iteration(joint: bool) -> None:
    """P_x (M x + c mean(x)): autograd's whole Jacobian between tangent bases; Newton ends at e_1 with its rate."""
    M, c = diag(3.0, 1.0, -1.0), 0.3 if joint else 0.0
    sphere = Sphere()
    velocity = lambda x: sphere.tangent(x, x @ M.mT + c * x.mean(-2, keepdim=True))
    x = unit(4, 3)
    B = tangent_basis(x)
    whole = torch.autograd.functional.jacobian(velocity, x)  # (n, d, n, d)
    between = torch.einsum("ida,idje,jeb->iajb", B, whole, B)
    expected = between.reshape(8, 8) if joint else torch.stack([between[i, :, i] for i in range(4)])
    torch.testing.assert_close(_jacobian(velocity, x, B, joint), expected, rtol=0, atol=1e-13)
    near = sphere.retract(torch.tensor([1.0, 0.0, 0.0], dtype=F64) + 0.08 * unit(4, 3, seed=1))
    end, rate = _newton(velocity, near, sphere, joint)
    torch.testing.assert_close(end, torch.tensor([1.0, 0.0, 0.0], dtype=F64).expand(4, 3), rtol=0, atol=1e-14)
    # M - 3 across e_1 has -2 and -4; the mean pulls by -c, and along with it all tokens by 0
    assert rate.tolist() == pytest.approx([2.0] * 4, abs=1e-12)


@pytest.mark.parametrize(("horizon", "reached"), [(3.0, 3.0), (5.0, 5.0), (12.0, 12.0), (40.0, 40.0)])
def test_settle_gives_up_at_its_horizon(horizon: float, reached: float) -> None:
    """A saddle is never certified."""
    found = settle(attention(torch.eye(2, dtype=F64), diag(2, 1)), matrix([0.0, 1.0]), horizon=horizon)
    assert (found.t, bool(found.certified.any())) == (reached, False)
    assert float(found.rate) == pytest.approx(-1.0, abs=1e-9)


@pytest.mark.parametrize("support", [None, "tokens"])
def test_settle_doubles_its_spans_until_all_are_certified(support: str | None) -> None:
    """V = diag(2, 1), G = I: the tangent falls like e^{-t}; below 1e-3 |V| at t = 6.2 from 45 degrees: after 5 + 10."""
    A = attention(torch.eye(2, dtype=F64), diag(2, 1))
    x = Sphere().retract(matrix([1.0, 0.0], [1.0, 1.0], [-1.0, 1.0]))
    found = settle(A, x, support)
    assert found.t == 15.0
    assert bool(found.certified.all())
    torch.testing.assert_close(found.x, matrix([1.0, 0.0], [1.0, 0.0], [-1.0, 0.0]), rtol=0, atol=1e-12)
    assert found.rate.tolist() == pytest.approx([1.0] * 3, abs=1e-9)
    assert found.speed.tolist() == pytest.approx([0.0, math.exp(-15), math.exp(-15)], abs=2e-6)
    assert repr(found) == "Settled(3 of 3 tokens certified, x=float64 (3, 2), t=15)"
    early = settle(A, x[:1], support)
    assert (early.t, bool(early.certified.all())) == (5.0, True)
    batch = settle(A, torch.stack([x, 1.0 * x.flip(0)]), support)
    assert batch.certified.shape == (2, 3)
    torch.testing.assert_close(batch.x[1], found.x.flip(0), rtol=0, atol=1e-12)
    big = settle(A, 2.5 * x, support)
    torch.testing.assert_close(big.x, 2.5 * found.x, rtol=0, atol=1e-11)


def test_a_head_of_rank_one_is_refused_where_its_drift_jumps() -> None:
    e, eye = matrix([1.0, 0.0, 0.0]), torch.eye(3, dtype=F64)
    flat = attention(e.T @ e, eye)
    x = unit(3, 3)
    with pytest.raises(ValueError, match="head 0 has G of rank 1 in d = 3"):
        settle(flat, x)
    # beside a bias of another direction G x + b has more directions than two; a frozen cloud has its own answers
    turned = attention(e.T @ e, eye, query_bias=torch.tensor([0.0, 1.0, 0.0], dtype=F64))
    assert settle(turned, x).certified.shape == (3,)
    assert settle(flat, x, Cloud(unit(4, 3, seed=1))).certified.shape == (3,)
    line = attention(torch.ones(1, 1, dtype=F64), torch.ones(1, 1, dtype=F64))
    for support in (None, "tokens"):
        ends = settle(line, torch.tensor([[2.0], [-2.0]], dtype=F64), support)  # the sphere of R is two points
        assert (ends.x.tolist(), ends.certified.tolist()) == ([[2.0], [-2.0]], [True, True])


# --- can n tokens follow ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "beta",
    [None, 0.7, torch.tensor(0.7), torch.tensor([0.7]), torch.tensor([0.7, 3.0]), torch.tensor([[0.7, 3.0]] * 2)],
)
def test_a_resolution_is_its_sums(beta: float | Tensor | None) -> None:
    """Two heads with biases, a batch of clouds with weights and padding: number, noise, n, own argmax."""
    Q, bias, x = drawn(2, 3, 3, seed=1), drawn(2, 3, seed=2), drawn(2, 7, 3, seed=3)
    own = torch.tensor([1.3, 0.2], dtype=F64)
    A = Attention(Q, beta=own, query_bias=bias)
    w, mask = drawn(7, seed=4).exp(), torch.ones(2, 7, dtype=torch.bool)
    mask[1, 5:] = False
    found = resolution(A, x, weights=w, mask=mask, beta=beta, warn=False)
    used = torch.as_tensor(own if beta is None else beta, dtype=F64).expand(2, 2)
    for b in range(2):
        p = w * mask[b] / (w * mask[b]).sum()
        n = 1 / float(p.square().sum())
        assert float(found.n[b]) == pytest.approx(n, rel=1e-12)
        for h in range(2):
            g = x[b] @ Q[h].T + bias[h]
            reach = float((p * g.norm(dim=-1) * x[b].norm(dim=-1)).sum()) * float(used[b, h])
            assert float(found.number[b, h]) == pytest.approx(reach / n, rel=1e-12)  # n^{-2/(d-1)}, d = 3
            assert float(found.noise[b, h]) == pytest.approx(reach**2 / n, rel=1e-12)
            scores = (g @ x[b].T).masked_fill(~mask[b], -math.inf)
            mine = float((p * (scores.argmax(-1) == torch.arange(7))).sum())
            assert float(found.self_argmax[b, h]) == pytest.approx(mine, rel=1e-12)


def test_warnings_point_to_who_asked() -> None:
    A, x = attention(diag(3, 1), diag(1, 2), 50.0), circle(40).x
    with pytest.warns(ResolutionWarning) as caught:
        resolution(attention(torch.eye(8, dtype=F64), torch.eye(8, dtype=F64), 1e3), unit(9, 8))
    path = Trajectory(torch.arange(4.0, dtype=F64), x.expand(4, 40, 2), about=flow(A, x, [0.0, 0.1]).about)
    with pytest.warns(RoundingWarning) as told:
        phases(path, limit(A), w2=np.array([1.0, 0.1, 1e-9, 0.1]))
    assert [w.filename for w in (caught[0], told[-1])] == [__file__] * 2


def test_tokens_of_a_line_are_told_apart_at_any_beta() -> None:
    x = torch.tensor([[1.0], [-1.0], [0.5]], dtype=F64)
    found = resolution(Attention.identity(1, 50.0, dtype=F64), x)
    assert (float(found.number), found.verdict) == (0.0, "resolved")
    assert repr(found) == "Resolution(resolved, number up to 0, n 3)"


@pytest.mark.parametrize(("noise", "verdict"), [(0.9, "resolved"), (1.1, "noisy")])
def test_a_sample_is_noisy_from_a_noise_of_one_on(noise: float, verdict: str) -> None:
    x = unit(1000, 3)
    unit_noise = float(resolution(Attention.identity(3, 1.0, dtype=F64), x).noise)
    beta = math.sqrt(noise / unit_noise)
    found = resolution(Attention.identity(3, beta, dtype=F64), x)
    assert float(found.number) < 0.1
    assert found.verdict == verdict
    nodes = resolution(Attention.identity(3, beta, dtype=F64), x, weights=torch.ones(1000))
    assert nodes.verdict == "resolved"


# --- spectra, rates, layers ---------------------------------------------------------------------------------------


def test_modes_do_not_depend_on_the_coordinates() -> None:
    V, G = np.diag([-2.0, 1.5, -0.7]), np.diag([1.0, -3.0, 2.0])
    R = np.linalg.qr(np.random.default_rng(0).normal(size=(3, 3)))[0]
    for n in range(1, 5):
        plain, turned = (mode_rates(S @ V @ S.T, S @ G @ S.T, -1.3, 0.8, n) for S in (np.eye(3), R))
        assert len(plain) == math.comb(n + 2, n)
        order = lambda z: np.sort(z.real)
        np.testing.assert_allclose(order(turned), order(plain), rtol=1e-7, atol=1e-7 * np.abs(plain).max())


@pytest.mark.parametrize("group", [[0], [1, 2], [0, 2], [0, 1, 2, 3]])
def test_projectors_of_groups_of_eigenvalues(group: list[int]) -> None:
    W = np.random.default_rng(1).normal(size=(4, 4))
    A = W @ np.diag([1.0, 0.3, -0.5, -2.0]) @ np.linalg.inv(W)
    mu = np.linalg.eigvals(A)
    chosen = [int(np.abs(mu - v).argmin()) for v in np.array([1.0, 0.3, -0.5, -2.0])[group]]
    keep = np.isin(range(4), group).astype(float)
    P = _group_projector(A, mu.astype(complex), chosen)
    np.testing.assert_allclose(P, (W * keep) @ np.linalg.inv(W), atol=1e-10)


def test_levels_span_their_invariant_subspaces() -> None:
    W = np.random.default_rng(2).normal(size=(5, 5))
    J = np.diag([2.0, 0.0, 0.0, 0.5, 0.5])
    J[1:3, 1:3] = [[-1.0, 0.8], [-0.8, -1.0]]
    M = W @ J @ np.linalg.inv(W)
    found = levels(M)
    assert [real for real, _, _ in found] == pytest.approx([2.0, 0.5, -1.0], abs=1e-10)
    assert [sorted(np.abs(imag)) for _, imag, _ in found] == [
        pytest.approx(z, abs=1e-7) for z in ([0.0], [0.0, 0.0], [0.8, 0.8])
    ]
    for (_, _, basis), columns in zip(found, ([0], [3, 4], [1, 2])):
        assert basis.shape == (5, len(columns))
        np.testing.assert_allclose(basis.T @ basis, np.eye(len(columns)), atol=1e-12)
        inside = W[:, columns]
        np.testing.assert_allclose(basis @ (basis.T @ inside), inside, atol=1e-8)


def test_speeds_of_levels_that_turn() -> None:
    """E and a lower level are planes that turn: |G e| averaged over a turn of e^{s A}, A^2 = -1 and not orthogonal."""
    top, low = np.array([[1.0, -4.0], [1.0, 1.0]]), np.array([[-0.5, -1.5], [0.6, -0.5]])
    G = diag(1.0, 2.5, 4.0, 0.7)
    M = torch.block_diag(torch.from_numpy(top), torch.from_numpy(low))
    found = limit(attention(G, M @ torch.linalg.inv(G)))

    def speed(block: np.ndarray, N: np.ndarray) -> float:
        b = abs(np.linalg.eigvals(block).imag).max()
        A = (block - block[0, 0] * np.eye(2)) / b

        def size(s: float) -> float:
            u = math.cos(s) * np.array([1.0, 0.0]) + math.sin(s) * A[:, 0]
            return float(np.linalg.norm(N @ u) / np.linalg.norm(u))

        return quad(size, 0, 2 * math.pi, epsabs=1e-12)[0] / (2 * math.pi)

    assert (found.case, found.gap) == ("rotating", pytest.approx(1.5))
    assert found.frequencies == pytest.approx((2.0,))
    assert found.g == pytest.approx(1.5 / speed(top, np.diag([1.0, 2.5])), rel=1e-9)
    assert found.tail == pytest.approx(2 * 1.5 / speed(low, np.diag([4.0, 0.7])), rel=1e-9)
    assert found.kappa == pytest.approx(found.tail / 2)
    assert found.rate_w1 == pytest.approx(min(found.g, found.tail))
    assert found.rate_w2 == pytest.approx(min(found.g, found.tail / 2))


def test_powers_of_a_jordan_block_and_of_two() -> None:
    one, two = np.eye(2) + np.diag([1.0], 1), np.eye(4)
    two[0, 1] = two[2, 3] = 1.0
    for M, power in ((one, 0.5), (two, 1.0)):
        found = limit(attention(torch.eye(len(M), dtype=F64), torch.from_numpy(M)))
        assert (found.case, found.evidence["nilpotency_index"]) == ("jordan", 2)
        assert (found.evidence["algebraic_l2"], found.evidence["algebraic_w2"]) == (power, power)
        assert (found.evidence["algebraic_w1"], found.evidence["algebraic_w2_even"]) == (1.0, 1.0)
    lower = np.diag([1.0, 1.0, 0.2])
    lower[0, 1] = 1.0
    found = limit(attention(torch.eye(3, dtype=F64), torch.from_numpy(lower)))
    assert (found.rate_w1, found.rate_w2, found.rate(1.0)) == (0.0, 0.0, 0.0)
    assert found.g is not None
    with pytest.raises(ValueError, match="case 'jordan' has no rate g, so no t_min"):
        found.t_min(100.0)


@pytest.mark.parametrize(
    ("G", "V", "exit_rate", "words"),
    [
        (diag(2, 1, 1), diag(1, 0.5, 1.7), 0.7, "each cluster sees itself and collapses"),
        (diag(2, 1, 1), diag(1, 0.5, 0.7), 0.0, "each cluster sees itself and collapses"),
        (diag(-2, 0.1, 0.1), diag(-1, 0.5, -1.7), 0.7, "each cluster sees its antipode and collapses"),
        (diag(-2, -1, 0.1), diag(-1, 1.7, 0.5), 0.7, "each cluster sees its antipode and collapses"),
        (diag(3, 1), matrix([1, 0.5], [0.3, 1.0]), None, "V e is not along e: V moves the clusters at once"),
        (diag(1, 1), diag(0, -1), None, "the leading eigenvalue is 0: clusters neither contract nor repel"),
        (diag(2, 2, 1), torch.eye(3, dtype=F64), None, "derived for one fixed direction; here case 'fixed', dim E = 2"),
    ],
)
def test_what_clusters_do_after_they_have_formed(G: Tensor, V: Tensor, exit_rate: float | None, words: str) -> None:
    found = limit(attention(G, V))
    assert found.exit_rate == (None if exit_rate is None else pytest.approx(exit_rate, abs=1e-12))
    assert words in found.evidence["layer"]
    assert found.layer is None
    with pytest.raises(ValueError, match="no Gaussian layer"):
        found.width(100.0)


def test_a_layer_that_sees_its_antipode_has_the_modes_of_its_reflection() -> None:
    """G and V negated: the same M, layer and width; each mode as large either way, so that what decays grows too."""
    G, V = diag(1, 2, 3), diag(-1, -3, -2)
    seen, mirrored = limit(attention(G, V)), limit(attention(-G, -V))
    assert seen.layer == pytest.approx(1 / (-1 + 6) + 1 / (-1 + 6))
    assert mirrored.layer == pytest.approx(seen.layer)
    assert seen.width(50.0) == pytest.approx(math.sqrt(0.4 / 50))
    first = [-3 + 1 / 2, -2 + 1 / 3]  # V_ - lambda/G_
    assert seen.evidence["layer_modes"][0] == pytest.approx(max(first))
    assert mirrored.evidence["layer_modes"][0] == pytest.approx(max(abs(z) for z in first))
    assert (seen.exit_rate, mirrored.exit_rate) == (0.0, pytest.approx(2.5))
    assert seen.evidence["layer"].startswith("leading eigenvalue < 0: a layer, permanent (modes to degree ")
    assert mirrored.evidence["layer"].endswith("left at the exit rate of its modes of degree 1")


def test_t_min_where_no_layer_forms() -> None:
    found = limit(attention(diag(1, -3), diag(-1, 0.5)))
    assert found.exit_rate == math.inf
    assert found.g == pytest.approx(0.5)
    assert found.t_min(100.0) == pytest.approx(math.log(100) / (2 * 0.5))


WORDS = {
    "fixed": (diag(2, 1), torch.eye(2, dtype=F64), r"1 leading eigenvalue\(s\) 2, semisimple, gap 1 > 2e-06"),
    "rotating": (
        matrix([1, -0.5], [0.5, 1]),
        torch.eye(2, dtype=F64),
        r"leading eigenvalues 1 \+- 0.5i, semisimple: no pointwise limit",
    ),
    "jordan": (matrix([1, 1], [0, 1]), torch.eye(2, dtype=F64), "Jordan block of index 2 at 1: approach like 1/t"),
    "stationary": (torch.eye(2, dtype=F64), diag(3, 3), r"M = 3 I to 3e-06: every direction is stationary"),
    "off the kernel": (diag(1, 0), torch.eye(2, dtype=F64), "G is singular: undefined on ker G; off it, 1 leading"),
    "into the kernel": (
        diag(1, 0),
        diag(-1, 1),
        "G is singular and the leading real part 0 <= 0: tokens run into ker G in finite time",
    ),
    "along the kernel": (
        matrix([0, 1], [0, 0]),
        torch.eye(2, dtype=F64),
        r"Jordan block of index 2 at 0: towards ker G, exponentially in t, or like 1/t where \|G x\| stays",
    ),
}


@pytest.mark.parametrize("name", WORDS)
def test_a_limit_says_why(name: str) -> None:
    G, V, words = WORDS[name]
    found = limit(attention(G, V))
    assert re.search(words, found.evidence["because"])
    size = float(torch.linalg.matrix_norm(V @ G, 2))
    assert found.evidence["gap_threshold"] == pytest.approx(max(1e-6 * size, found.gap_error), rel=1e-9)


def test_a_rotating_jordan_block_at_zero_is_not_derived() -> None:
    J = np.zeros((5, 5))
    J[0:2, 0:2] = J[2:4, 2:4] = [[0.0, -1.0], [1.0, 0.0]]
    J[0, 2] = J[1, 3] = 1.0
    found = limit(attention(torch.from_numpy(J), torch.eye(5, dtype=F64)))
    assert (found.case, found.off_kernel) == ("undefined", "undefined")
    assert "a rotating Jordan block leads at 0: nothing is derived for it" in found.evidence["because"]
    with pytest.raises(ValueError, match="no limit is established: G is singular"):
        found.push_forward(unit(2, 5), 1.0)


@pytest.mark.parametrize("size", [2, 3, 4])
def test_a_nilpotent_map_never_ends(size: int) -> None:
    """G = J, V = I: x = e^{tau J} x_0 are polynomials of tau, |G x|/|x| ~ 1/tau, and t ~ log tau."""
    J = np.diag(np.ones(size - 1), 1)
    found = limit(attention(torch.from_numpy(J), torch.eye(size, dtype=F64)))
    assert (found.case, found.off_kernel, found.evidence["nilpotency_index"]) == ("undefined", "jordan", size)
    x = unit(3, size)
    expected = torch.zeros_like(x)
    expected[:, 0] = x[:, -1].sign()
    torch.testing.assert_close(found.push_forward(x), expected, rtol=0, atol=1e-12)


def test_reasons_for_no_linear_limit() -> None:
    eye, b = torch.eye(2, dtype=F64), torch.tensor([0.1, 0.0], dtype=F64)
    two = Attention.random(2, heads=2, dtype=F64)
    cases = [
        (limit(two), "several heads: x'"),
        (limit(attention(eye, eye, query_bias=b)), "a query bias: x'"),
        (limit(attention(eye, eye, value_bias=b)), "a value bias: x'"),
        (limit(attention(eye, eye, query_bias=b, value_bias=b)), "a query bias and a value bias: x'"),
        (limit(attention(eye, eye), "tokens"), "tokens attend to themselves: x'"),
        (limit(attention(eye, eye), Cloud(unit(3, 2))), "the support is no centred ellipsoid: x'"),
        (limit(two, "tokens"), "several heads: x'"),
    ]
    for found, words in cases:
        assert found.case == "nonlinear"
        assert found.evidence["because"].startswith(words)
        assert (found.terminal_case is None) == (words in ("a value bias: x'", "a query bias and a value bias: x'"))
    zero = attention(diag(2, 1), eye, query_bias=0 * b, value_bias=0 * b)
    assert limit(zero).case == "fixed"


def test_a_moving_push_forward_at_the_start_is_the_projection() -> None:
    found = limit(attention(torch.block_diag(matrix([1, -0.7], [0.7, 1]), diag(0.2)), torch.eye(3, dtype=F64)))
    x = 2 * unit(2, 4, 3)
    start = x.clone()
    start[..., 2] = 0
    expected = 2 * start / start.norm(dim=-1, keepdim=True)
    for t in ([0.0], [0.0, 1.0]):
        moved = found.moving_push_forward(x, torch.tensor(t, dtype=F64))
        assert moved.shape == (len(t), 2, 4, 3)
        torch.testing.assert_close(moved[0], expected, rtol=0, atol=1e-13)
    x[1, 2] = torch.tensor([0.0, 0.0, 2.0], dtype=F64)
    with pytest.raises(ValueError, match="1 of 8 tokens have Pi x = 0 to rounding"):
        found.moving_push_forward(x, torch.tensor([0.0], dtype=F64))


def need(found: tuple, name: str) -> bool | None:
    return next(each.met for each in found if each.name == name)


@pytest.mark.parametrize(("near", "met"), [(20, False), (30, True), (90, True), (110, False)])
def test_a_density_is_bounded_within_a_factor_of_two_of_a_flat_one(near: int, met: bool) -> None:
    """Of 400 tokens 50 have |Pi x| below a quarter of its median if the density is flat there."""
    found = limit(attention(diag(4, 1), diag(1, 2)))
    c = torch.where(torch.arange(400) < near, 0.19, 0.8).double()
    x = torch.stack([c, (1 - c.square()).sqrt()], -1)
    assert need(found.examine(x), "bounded density") is met
    few = torch.where(torch.arange(121) < 15, 0.1, 0.8).double()
    x = torch.stack([few, (1 - few.square()).sqrt()], -1)
    assert need(found.examine(x), "bounded density") is True
    assert need(found.examine(x[:119]), "bounded density") is None


@pytest.mark.parametrize(("there", "back", "met"), [(7, 0, True), (0, 7, True), (6, 1, False), (3, 3, False)])
def test_masses_that_cross_differ_by_more_than_twice_their_chance(there: int, back: int, met: bool) -> None:
    """M = [[1, 1], [0, 1]]: tokens with a small x_2 > 0 and x_1 < 0 cross, or with x_2 < 0 and x_1 > 0 back."""
    found = limit(attention(torch.eye(2, dtype=F64), matrix([1, 1], [0, 1])))
    small = [(-1.0, 0.01)] * there + [(1.0, -0.01)] * back + [(1.0, 0.01), (-1.0, -0.01)]
    others = [(1.0, 0.05), (-1.0, -0.05), (-1.0, 0.05), (1.0, -0.05)] * 6
    x = Sphere().retract(matrix(*map(list, small + others + [(0.0, 1.0), (0.0, -1.0)] * 40))[:100])
    assert need(found.examine(x), "unequal crossing masses") is met
    text = next(each.text for each in found.examine(x) if each.name == "unequal crossing masses")
    noise = f"+- {math.sqrt(there + back) / len(x):.1g}"  # which side is called up is the SVD's to say
    either = (f"; here {a / len(x):.3g} and {b / len(x):.3g}, {noise}" for a, b in ((there, back), (back, there)))
    assert text.endswith(tuple(either))


def test_a_law_is_asymmetric_along_the_direction_in_which_clusters_leave() -> None:
    """A layer's offset leaves along the largest V_i - lambda/G_i: 2 - 1/5 of e_3, not 3 - 1/.4 of e_2."""
    found = limit(attention(diag(-1, -0.4, -5), diag(1, 3, 2)))
    assert (found.leading, bool(found.exit_rate)) == (pytest.approx(-1.0), True)
    base = torch.cat([unit(20, 3), unit(20, 3) * torch.tensor([1.0, -1.0, 1.0], dtype=F64)])
    even = torch.cat([base, base * torch.tensor([1.0, 1.0, -1.0], dtype=F64)])
    for axis, met in ((1, False), (2, True)):
        w = 1 + 0.3 * even[:, axis]
        assert need(found.examine(even, weights=w), "asymmetric law") is met
    collapsing = limit(attention(diag(9, 1, 1), diag(1, 3, 2)))  # there along the largest V_i
    for axis, met in ((1, True), (2, False)):
        w = 1 + 0.3 * even[:, axis]
        assert need(collapsing.examine(even, weights=w), "asymmetric law") is met


@pytest.mark.parametrize(("least", "lost"), [(7.0, True), (9.0, False)])
def test_rounding_decides_below_eight_of_its_roots(least: float, lost: bool) -> None:
    A = attention(diag(3, 1), diag(1, 2), 50.0)
    x = circle(40).x
    path = Trajectory(torch.arange(4.0, dtype=F64), x.expand(4, 40, 2), about=flow(A, x, [0.0, 0.1]).about)
    floor = math.sqrt(torch.finfo(F64).eps)
    w2 = np.array([1.0, 0.1, least * floor, 0.1])
    found = phases(path, limit(A), w2=w2, warn=False)
    assert (found.rounding is not None) is lost
    assert found.min_w2 == least * floor
    stays = limit(attention(diag(1, 3), diag(3, 0.5), 50.0))
    assert phases(path, stays, w2=w2, warn=False).rounding is None  # clusters that stay may come as near as they like
    cold = replace(path, about={"attention": {"beta": "inf"}})
    assert phases(cold, limit(A), w2=w2, warn=False).rounding is None
    if lost:
        assert found.rounding == pytest.approx(8 * floor)
        assert "W2 falls to 1e-07, below 1e-07: only rounding breaks the symmetry" in found.doubts[-1]


def test_remedies_by_dimension() -> None:
    assert [remedy(d).startswith("use a quadrature") for d in (2, 3, 4, 8)] == [True, True, False, False]


# --- zero temperature ---------------------------------------------------------------------------------------------


def test_legendre_polynomials_their_coefficients_and_the_inverse_of_an_integral() -> None:
    z = torch.linspace(-1, 1, 7, dtype=F64)
    exact = np.polynomial.legendre.legvander(z.numpy(), NODES)
    np.testing.assert_allclose(_legendre(z), exact, atol=1e-14)
    nodes, weights, to_coefficients = _gauss_legendre(z)
    assert float(weights.sum()) == pytest.approx(2.0, rel=1e-14)
    speed = 2 + torch.sin(nodes)  # of the clock; its integral from -1 is 2 (z + 1) - cos z + cos 1
    a = speed[None] @ to_coefficients
    np.testing.assert_allclose(np.polynomial.legendre.legval(0.3, a[0].numpy()), 2 + math.sin(0.3), rtol=1e-13)
    where = torch.tensor([-1.0, -0.4, 0.0, 0.7, 1.0], dtype=F64)
    target = 2 * (where + 1) - where.cos() + math.cos(1)
    found = _invert(a.expand(5, -1), target)
    torch.testing.assert_close(found, (where + 1) / 2, rtol=0, atol=1e-14)


def test_the_exact_flow_is_the_matrix_exponential_where_G_is_the_identity() -> None:
    """x(t) along e^{t V / r} x_0 at radius r, for many times in one panel and many panels, in a batch."""
    V = drawn(3, 3, seed=4)
    x = torch.tensor([0.5, 2.0], dtype=F64)[:, None, None] * unit(2, 5, 3)
    t = torch.tensor([0.0, 0.01, 0.02, 0.5, 1.5], dtype=F64)
    found = linear_flow(V, torch.eye(3, dtype=F64), x, t)
    for k, b in np.ndindex(5, 2):
        r = (0.5, 2.0)[b]
        y = x[b] @ torch.from_numpy(expm((t[k] / r * V).numpy())).mT  # torch's own has 12 digits at t = .01
        torch.testing.assert_close(found[k, b], r * y / y.norm(dim=-1, keepdim=True), rtol=0, atol=rounding(x, 30))
    with pytest.raises(ValueError, match="t reaches -1, expected nonnegative times"):
        linear_flow(V, torch.eye(3, dtype=F64), x, torch.tensor([-1.0, 1.0], dtype=F64))
    still = linear_flow(2 * torch.eye(3, dtype=F64), torch.eye(3, dtype=F64), x, t)
    assert torch.equal(still, x.expand(5, 2, 5, 3))


def test_the_time_at_which_tokens_are_in_the_kernel() -> None:
    """G = diag(1, 1, 0), V = diag(-1, -1, 1): the angle to the pole has phi' = -cos(phi), 0 at asinh(tan phi_0)."""
    A = attention(diag(1, 1, 0), diag(-1, -1, 1))
    x = Sphere(2.0).retract(matrix([0.5, 0.4, 0.3]))
    there = 2 * math.asinh(math.hypot(0.5, 0.4) / 0.3)
    before = zero_temperature_flow(A, x, [0.0, 0.9 * there]).x[-1, 0]
    phi = 2 * math.atan(math.tanh((there - 0.9 * there) / 4))  # gd of what is left
    assert math.atan2(float(before[:2].norm()), float(before[2])) == pytest.approx(phi, rel=1e-9)
    with pytest.raises(ValueError, match=r"1 tokens run into ker G before t = 50") as told:
        zero_temperature_flow(A, x, [0.0, 50.0])
    at = float(re.search(r"they are there at t = ([\d.]+)\. Ask", str(told.value)).group(1))  # type: ignore[union-attr]
    assert at == pytest.approx(there, rel=1e-3)


def test_a_path_may_start_at_any_time() -> None:
    A, x = attention(diag(3, 1), diag(1, 2)), unit(4, 2)
    plain, later = (zero_temperature_flow(A, x, [a, a + 0.5, a + 2.0]) for a in (0.0, 7.0))
    torch.testing.assert_close(later.x, plain.x, rtol=0, atol=1e-12)
    assert later.t.tolist() == [7.0, 7.5, 9.0]
    assert len(zero_temperature_flow(A, x, 2.0)) == 101
    assert float(zero_temperature_flow(A, x, 2.0).t[-1]) == 2.0
    stepped = zero_temperature_flow(A, x, [7.0, 9.0], step=rk4, h=0.02)
    torch.testing.assert_close(stepped.x[-1], plain.x[-1], rtol=0, atol=1e-6)
    assert (plain.about["step"], stepped.about["step"], stepped.about["h"]) == ("exact time change", "rk4", 0.02)


def test_the_moving_cloud_has_weights_and_padding() -> None:
    """Hardmax over tokens: padding is seen by nobody."""
    A = attention(torch.eye(2, dtype=F64), torch.eye(2, dtype=F64))
    x = Sphere().retract(matrix([1.0, 0.2], [0.1, 1.0], [-1.0, 0.3]))
    x = torch.stack([x[0], x[1], x[2]])
    G = matrix([0.0, -1.0], [1.0, 0.0])  # each looks a quarter turn ahead
    B = attention(G, torch.eye(2, dtype=F64))
    mask = torch.tensor([True, True, False])
    with_padding = zero_temperature_flow(B, x, [0.0, 0.4], "tokens", mask=mask, weights=torch.ones(3))
    alone = zero_temperature_flow(B, x[:2], [0.0, 0.4], "tokens")
    torch.testing.assert_close(with_padding.x[:, :2], alone.x)
    assert with_padding.mask is mask
    everyone = zero_temperature_flow(B, x, [0.0, 0.4], "tokens")
    assert float((everyone.x[-1, :2] - alone.x[-1]).abs().max()) > 0.01
    assert torch.allclose(zero_temperature_flow(A, x, [0.0, 0.4], "tokens").x[-1], x)


def test_how_a_flow_that_is_not_linear_is_integrated() -> None:
    A, x = attention(diag(3, 1), diag(1, 2)), 2 * unit(4, 2)
    nodes, mixed = Cloud(unit(3, 2)), EllipsoidSupport(torch.ones(2, dtype=F64), torch.eye(2, dtype=F64), 1.0)
    plain = integration(A, x, None)
    assert plain["geometry"].radius == pytest.approx(2.0, rel=1e-15)
    assert plain["context"] == UniformSphere(2)
    assert integration(A, x, mixed)["context"] is mixed
    assert "context" not in integration(A, x, "tokens")
    steps = [integration(A, x, support)["step"] for support in (None, mixed, nodes, "tokens")]
    assert steps == [Adaptive(tol=1e-9), Adaptive(tol=1e-9), rk4, rk4]
    for off, fine in ((0.9e-4, True), (1.1e-4, False)):
        uneven = x * torch.tensor([1.0, 1.0, 1.0, 1 - off], dtype=F64)[:, None]
        if fine:
            integration(A, uneven, None)
        else:
            with pytest.raises(ValueError, match="expected one sphere"):
                integration(A, uneven, None)


@pytest.mark.parametrize("make", [lambda m, S: EllipsoidSupport(m, S, 2.0), lambda m, S: Gaussian(m, S, cap=2.0)])
def test_a_support_is_centred_to_a_millionth_of_its_reach(make) -> None:  # type: ignore[no-untyped-def]
    A, S = attention(diag(3, 1), diag(1, 2)), diag(0.25, 9.0)
    reach = 2.0 * 3.0
    at = lambda off: torch.tensor([off * reach, 0.0], dtype=F64)
    found = linear_part(A, make(at(0.9e-6), S))
    assert found is not None
    W, N = found
    torch.testing.assert_close(W, 2.0 * diag(0.5, 6.0))
    torch.testing.assert_close(N, diag(1.5, 3.0))
    assert linear_part(A, make(at(1.1e-6), S)) is None
    assert linear_part(A, make(at(1.1e-3), S), tol=2e-3) is not None
    sphere = linear_part(A, UniformSphere(2, 3.0))
    assert sphere is not None
    torch.testing.assert_close(sphere[0], 3 * diag(1, 2))
    with pytest.raises(ValueError, match=r"support has batched moments \(2, 2\), expected \(d,\)"):
        linear_part(A, make(torch.zeros(2, 2, dtype=F64), S.expand(2, 2, 2)))


def test_what_a_cloud_says_about_the_requirements() -> None:
    """The words and numbers of each requirement, for nodes of the circle."""
    A = attention(diag(4, 1), diag(1, 2))
    found, cloud = limit(A), circle(200, lambda theta: torch.exp(torch.cos(theta - 1)))
    needs = {need.name: need for need in found.examine(cloud.x, weights=cloud.weights, beta=50.0)}
    p, x = cloud.probabilities, cloud.x
    reach = float((p * (x @ A.G[0].T).norm(dim=-1)).sum())
    number = 50.0 * reach * float(p.square().sum()) ** 2
    assert needs["large n"].text.endswith(f"; here {number:.3g}")
    assert needs["off the border"].text.endswith("; 0 of 200 here")
    odd = max(
        abs(float((p * side * x[:, 1] * x[:, 0] ** a * x[:, 1] ** b).sum()))
        for side in (x[:, 0] > 0, x[:, 0] < 0)
        for a in (0, 2)
        for b in (0, 2)
    )
    assert needs["asymmetric law"].text.endswith(f"; asymmetry {odd:.2g}")
    along = x[:, 0].abs()
    order = along.argsort()
    median = along[order[int((p[order].cumsum(0) < 0.5).sum())]]
    share = float(p[along < median / 4].sum())
    assert needs["bounded density"].text.endswith(f"; share {share:.2g} there, 0.12 if it is flat")
    sample = {need.name: need for need in found.examine(x[::2], beta=50.0)}
    plain = float((x[::2] @ A.G[0].T).norm(dim=-1).mean())
    assert f"here {(50.0 * plain) ** 1.5 / 100:.3g} n" in sample["little noise"].text
    assert sample["little noise"].met is False
    assert needs["little noise"].met is None
    far = replace(found, attention=A)
    assert {need.met for need in far.requires} == {None, True}


# --- units --------------------------------------------------------------------------------------------------------

EYE3 = torch.eye(3, dtype=F64)
SCALED = {
    "fixed": (matrix([3, 0.5, 0], [0, 1, 0.2], [0, 0, 0.7]), diag(1, 2, 0.5)),
    "V moves them at once": (diag(3, 1, 0.5), matrix([1, 0.5, 0], [0.3, 1, 0], [0, 0, 0.1])),
    "a leading 0": (EYE3, diag(0, -1, -2)),
    "a layer": (diag(1, 2, 3), diag(-1, -3, -2)),
    "a layer that is left": (diag(-1, -2, -3), diag(1, 3, 2)),
    "no layer": (diag(1, -3, -4), diag(-1, 0.5, 0.6)),
    "no Gaussian": (
        torch.block_diag(diag(1), matrix([-3, 0.7], [0, 1])),
        torch.block_diag(diag(-1), matrix([0.5, 0.4], [0, -3])),
    ),
    "singular across E": (diag(1, 2, 0), diag(-1, -3, -2)),
    "rotating": (torch.block_diag(matrix([1, -0.7], [0.7, 1]), diag(0.2)), EYE3),
    "jordan": (matrix([1, 1, 0], [0, 1, 0], [0, 0, 0.2]), EYE3),
    "stationary": (EYE3, 3 * EYE3),
    "off the kernel": (diag(1, 0, 0.5), EYE3),
    "into the kernel": (diag(1, 0.5, 0), diag(-1, -2, 1)),
    "at rest beside the kernel": (diag(1, 1, 0), diag(0, -1, 1)),
    "nilpotent": (matrix([0, 1, 0], [0, 0, 0], [0, 0, -1]), EYE3),
}


@pytest.mark.parametrize("unit_of", ["G", "V"])
@pytest.mark.parametrize("c", [1e-8, 1e8])
@pytest.mark.parametrize("name", SCALED)
def test_a_limit_in_other_units_is_the_same(name: str, c: float, unit_of: str) -> None:
    """G times c changes no direction; V times c is the clock. Rates follow V, eigenvalues both, layers 1/G."""
    G, V = SCALED[name]
    plain = limit(attention(G, V))
    found = limit(attention(c * G, V) if unit_of == "G" else attention(G, c * V))
    clock = 1.0 if unit_of == "G" else c
    same = lambda a, b: (a is None and b is None) or a == b or a == pytest.approx(b, rel=1e-6, abs=1e-6 * abs(b or 1))
    assert (found.case, found.off_kernel, found.dimension) == (plain.case, plain.off_kernel, plain.dimension)
    for quantity in ("leading", "gap"):
        assert same(getattr(found, quantity) / c, getattr(plain, quantity)), quantity
    for quantity in ("g", "kappa", "tail", "rate_w1", "rate_w2", "C", "exit_rate", "terminal_rate"):
        a, b = getattr(found, quantity), getattr(plain, quantity)
        assert same(None if a is None else a / clock, b), quantity
    assert [f / c for f in found.frequencies] == pytest.approx(list(plain.frequencies))
    assert same(None if found.layer is None else found.layer * c / clock, plain.layer)
    assert np.allclose(found.evidence["layer_modes"], clock * np.array(plain.evidence["layer_modes"]))
    assert found.evidence["layer"] == plain.evidence["layer"]
    for constant in ("nilpotency_index", "projector_norm", "condition_of_G", "algebraic_w2"):
        assert same(found.evidence.get(constant), plain.evidence.get(constant))
    assert found.terminal_case == plain.terminal_case
    assert [each.name for each in found.requires] == [each.name for each in plain.requires]
    if plain.case != "undefined" and not plain.frequencies:
        x = unit(5, 3)
        torch.testing.assert_close(found.push_forward(x), plain.push_forward(x), rtol=0, atol=1e-9)
        needs = [each.met for each in found.examine(x, beta=3.0 if unit_of == "V" else 3.0 / c)]
        assert needs == [each.met for each in plain.examine(x, beta=3.0)]


@pytest.mark.parametrize(("c", "t"), [(0.01, 635.0), (1e-6, 5.0 * (2**21 - 1)), (100.0, 5.0)])
def test_settle_in_other_units(c: float, t: float) -> None:
    """V times c: t c = 6.2 is reached after spans of 5, 10, 20, ..."""
    A = attention(EYE3[:2, :2], c * diag(2, 1))
    found = settle(A, Sphere().retract(matrix([1.0, 1.0])), horizon=1e10)
    assert (bool(found.certified), found.t) == (True, t)
    assert float(found.rate) == pytest.approx(c, rel=1e-6)


def test_moments_on_either_side_written_out() -> None:
    """E x_0-side, s c^a s^b with a, b in {0, 2} along the direction in which clusters leave, and their chance."""
    found = limit(attention(diag(9, 1, 1), diag(1, 2, 3)))
    y, p = unit(7, 3), drawn(7, seed=2).exp()
    p = p / p.sum()
    moments = _odd_moments(found, y, p)
    assert moments is not None
    expected, chance = [], []
    for side in (1, -1):
        for a, b in ((0, 0), (0, 2), (2, 0), (2, 2)):
            terms = [float(p[i] * y[i, 2] * y[i, 0] ** a * y[i, 2] ** b) * bool(side * y[i, 0] > 0) for i in range(7)]
            expected.append(abs(math.fsum(terms)))
            chance.append(math.sqrt(math.fsum(z * z for z in terms)))
    order = (
        range(8)
        if float((y[:, 0] * found.basis[0, 0]).sign()[0]) == float(y[0, 0].sign())
        else [4, 5, 6, 7, 0, 1, 2, 3]
    )
    assert [float(moments[0][i]) for i in order] == pytest.approx(expected, rel=1e-12)
    assert [float(moments[1][i]) for i in order] == pytest.approx(chance, rel=1e-12)
    # No reflection that both share: any law leaves.
    skew = limit(attention(matrix([9, 0, 0], [0, 1, 0.01], [0, 0, 1]), diag(1, 2, 3)))
    assert [z.tolist() for z in _odd_moments(skew, y, p)] == [[1.0], [0.0]]  # type: ignore[union-attr]
    plane = limit(attention(diag(2, 2, 1), EYE3))
    assert _odd_moments(plane, y, p) is None


def test_phases_over_seeds_count_who_has_which() -> None:
    """Three seeds with weights and padding of their own; the last one never concentrates."""
    A = attention(torch.eye(2, dtype=F64), diag(2, 1), 10.0)
    t = torch.linspace(0, 8, 33, dtype=F64)
    x0 = unit(3, 30, 2)
    x0[2] = Sphere().retract(matrix([1.0, 1e-3]).expand(30, 2) * torch.linspace(1, 2, 30, dtype=F64)[:, None])
    w, mask = drawn(3, 30, seed=1).exp(), torch.ones(3, 30, dtype=torch.bool)
    mask[1, 20:] = False
    path = flow(A, x0, t, weights=w, mask=mask, h=0.25)
    x = path.x.clone()
    x[:, 2] = x0[2]  # it rests
    path = replace(path, x=x)
    target = limit(A)
    found = phases_over_seeds(path, target)
    alone = [phases(Trajectory(path.t, x[:, i], w[i], mask[i], path.about), target, warn=False) for i in range(3)]
    assert found.t_min.values == pytest.approx(tuple(each.t_min for each in alone))
    assert found.min_w2.values == pytest.approx(tuple(each.min_w2 for each in alone))
    names = [phase.phase for each in alone for phase in each.phases] + ["settling" for each in alone if each.settling]
    assert found.share == pytest.approx({name: names.count(name) / 3 for name in names})
    assert {"spreading", "concentrating", "metastable"} <= set(found.share)
    for name, rate in found.rates.items():
        rates = [
            phase.rate for each in alone for phase in each.phases if phase.phase == name and phase.rate is not None
        ]
        assert rate.values == pytest.approx(tuple(rates))
        assert len(rates) > 1
    assert "spreading" not in found.rates


@pytest.mark.parametrize("c", [1e-8, 1.0, 1e8])
def test_frequencies_keep_their_digits_and_are_told_once(c: float) -> None:
    """Four planes that lead together, turning by pi/4, twice by 1/sqrt(3), and by a billionth more, in any unit."""
    turn = [math.pi / 4, 1 / math.sqrt(3), 1 / math.sqrt(3), 1 / math.sqrt(3) + 1e-9]
    M = np.kron(np.eye(4), np.eye(2)) + np.kron(np.diag(turn), np.array([[0.0, -1.0], [1.0, 0.0]]))
    R = np.linalg.qr(np.random.default_rng(0).normal(size=(9, 9)))[0]
    found = spectrum(c * R @ np.pad(M, (0, 1)) @ R.T)
    assert (found.case, found.dimension) == ("rotating", 8)
    assert np.array(found.frequencies) / c == pytest.approx(sorted(turn[:2]), rel=1e-12)


@pytest.mark.parametrize("sides", ["both", "one", "both and one"])
def test_w2_to_two_atoms_is_w2_to_the_push_forward(sides: str) -> None:
    """With weights and padding, in a batch: the small problem of two atoms, and the large one of n tokens."""
    A = attention(diag(3, 1), diag(1, 2), 20.0)
    x0, w = unit(2, 12, 2), drawn(2, 12, seed=1).exp()
    if sides != "both":
        x0[1, :, 0] = x0[1, :, 0].abs()
    if sides == "one":
        x0[0, :, 0] = -x0[0, :, 0].abs()
    mask = torch.ones(2, 12, dtype=torch.bool)
    mask[0, 9:] = False
    path = flow(A, x0, [0.0, 1.0, 3.0], weights=w, mask=mask, h=0.1)
    found = limit(A)
    curve = w2_curve(path, found)
    assert curve.shape == (3, 2)
    for b in range(2):
        keep = mask[b]
        target = found.push_forward(x0[b][keep])
        for k in range(3):
            exact = wasserstein(path.x[k, b][keep], target, weights_x=w[b][keep], weights_y=w[b][keep])
            assert float(curve[k, b]) == pytest.approx(float(exact), abs=1e-7)


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        (limit, {"tol": 1e-6}),
        (spectrum, {"tol": 1e-6}),
        (levels, {"tol": 1e-6}),
        (linear_part, {"tol": 1e-6}),
        (settle, {"horizon": 100.0, "h": 0.05}),
        (zero_temperature_flow, {"h": 0.05}),
        (fit_bound, {"resamples": 200, "seed": 0}),
        (propagation_of_chaos, {"seeds": 10, "h": 0.05, "seed": 0}),
    ],
)
def test_what_a_call_means_that_says_no_more(call, expected) -> None:  # type: ignore[no-untyped-def]
    """Numbers of reports and papers are those of the defaults: they do not change unseen."""
    given = inspect.signature(call).parameters
    assert {name: given[name].default for name in expected} == expected
