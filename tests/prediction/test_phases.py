"""Phases of curves whose answer is known, and of flows whose phases theory gives; numbers over seeds."""

import json
import math

import numpy as np
import pytest
import torch
from inputs import F64, diag, skewed
from torch import Tensor

from attn_flow import Attention, Cloud, Sphere, Trajectory, flow, limit, phases
from attn_flow.measures.quadrature import circle
from attn_flow.prediction import Phases, fit_bound, phases_over_seeds, w2_curve, zero_temperature_flow


def attention(beta: float, G: Tensor | None = None, V: Tensor | None = None) -> Attention:
    return Attention.from_matrices(diag(3, 1) if G is None else G, diag(1, 2) if V is None else V, beta=beta)


def names(intervals: tuple) -> list[str]:
    return [phase.name for phase in intervals]


def phases_of_curve(t: np.ndarray, w2: np.ndarray, A: Attention) -> Phases:
    """The phases of a known curve W2(t); the path itself does not move."""
    still = torch.ones(len(t), 1, 2, dtype=F64) / math.sqrt(2)
    path = Trajectory(torch.from_numpy(t), still, about={"field": {"beta": A.beta}})
    return phases(path, limit(A), w2=w2)


# --- curves -----------------------------------------------------------------------------------------------------

TURNED = attention(10.0, V=torch.tensor([[1.0, 0.5], [0.3, 1.0]], dtype=F64))  # no exit rate: that of W2 is fitted


def test_rates_of_a_curve_with_a_rest() -> None:
    t = np.linspace(0, 60, 601)
    w = np.exp(-0.5 * t) + 1e-4 * np.exp(0.05 * t)
    result = phases_of_curve(t, w, TURNED)
    assert names(result.intervals) == ["concentrating", "metastable", "terminal"]
    fall, rest, end = result.intervals
    assert (fall.rate, end.rate) == pytest.approx((0.5, 0.05), rel=0.02)
    assert (fall.predicted, end.predicted, end.end) == (limit(TURNED).rates.decay(), None, 60)
    assert (fall.end, rest.end) == (rest.start, end.start)
    for moment in (rest.start, rest.end):
        assert np.interp(moment, t, w) == pytest.approx(1.25 * w.min(), rel=1e-3)
    assert "twice the time of a fall by a factor e" in result.note


def test_a_curve_that_falls_and_rises_at_once_does_not_rest() -> None:
    t = np.linspace(0, 40, 401)
    result = phases_of_curve(t, np.exp(-0.5 * t) + 1e-4 * np.exp(0.5 * t), TURNED)
    assert names(result.intervals) == ["concentrating", "terminal"]
    assert result.note.startswith("no metastable phase")
    fall, rise = result.intervals
    assert fall.end == rise.start == pytest.approx(math.log(1e4), abs=0.1)  # the least W2


def test_plain_curves() -> None:
    t = np.linspace(0, 10, 101)
    decay = phases_of_curve(t, np.exp(-t), TURNED).intervals[0]
    assert (decay.rate, decay.error) == (pytest.approx(1.0), pytest.approx(0.0, abs=1e-9))
    assert names(phases_of_curve(t, 1 + t, TURNED).intervals) == ["spreading"]
    at_once = phases_of_curve(t, np.where(t < 0.05, 1.0, 0.0), TURNED)  # at its limit after one step
    assert "metastable" in names(at_once.intervals)
    layer = attention(300.0, diag(1, 2), diag(-1, -3))  # clusters keep a width of W2 = 0.0258
    at_width = phases_of_curve(t, 0.02 * (1 - t / 20) + np.exp(-3 * t), layer)
    assert names(at_width.intervals) == ["concentrating", "metastable"]
    noise = np.exp(0.05 * np.random.default_rng(0).normal(size=101))
    fall = phases_of_curve(t, np.exp(-0.4 * t) * noise, TURNED).intervals[0]
    assert abs(fall.rate - 0.4) < 4 * fall.error
    assert fall.error < 0.05
    for w, words in (([1.0, 0.5], "3 or more times"), ([1.0, math.nan, 0.5], "expected distances")):
        with pytest.raises(ValueError, match=words):
            phases_of_curve(np.arange(float(len(w))), np.array(w), TURNED)


# --- flows ------------------------------------------------------------------------------------------------------


def test_phases_of_the_mean_field_flow() -> None:
    """beta = 100: W2 is least, 0.182, at t = 7.0; then V takes over at rate 1, and W2 tends to sqrt 2."""
    A = attention(100.0)
    path = flow(A, skewed(300), torch.arange(0, 751, 10) * 0.04, step="euler", h=0.04)
    result = phases(path, limit(A))
    assert float(result.t_min) == pytest.approx(7.0, abs=0.4)
    assert float(result.min_w2) == pytest.approx(0.182, abs=0.012)  # a lattice runs out of tail tokens: 0.173
    assert float(result.w2[-1]) == pytest.approx(math.sqrt(2), abs=1e-6)
    end = result.intervals[-1]
    assert (end.name, end.rate, end.predicted) == ("terminal", pytest.approx(1.0, abs=0.05), pytest.approx(1.0))
    assert result.doubts == ()
    json.dumps(result.as_dict())
    assert phases(path, limit(A), w2=result.w2.requires_grad_()).intervals == result.intervals


def test_warm_and_lukewarm_mean_field_flows() -> None:
    """beta = 1 never concentrates; beta = 10 comes to W2 = 0.51 at t = 3.6; both end at e_2."""
    for beta, least, t_min, first in ((1.0, 0.874, 0.0, "spreading"), (10.0, 0.510, 3.6, "concentrating")):
        A = attention(beta)
        result = phases(flow(A, skewed(400), torch.linspace(0, 30, 151), h=0.1), limit(A))
        assert (float(result.min_w2), float(result.t_min)) == (
            pytest.approx(least, abs=3e-3),
            pytest.approx(t_min, abs=0.2),
        )
        assert result.intervals[0].name == first
        assert float(result.w2[-1]) == pytest.approx(math.sqrt(2), abs=1e-6)


@pytest.mark.parametrize(("beta", "least", "t_min"), [(10.0, 0.617, 4.0), (100.0, 0.228, 9.0)])
def test_comparable_rates_leave_no_metastable_phase(beta: float, least: float, t_min: float) -> None:
    A = attention(beta, diag(2.2, 1), diag(1, 1.7))
    result = phases(flow(A, skewed(300), torch.linspace(0, 20, 81), h=0.1), limit(A))
    assert (float(result.min_w2), float(result.t_min)) == (
        pytest.approx(least, abs=2e-3),
        pytest.approx(t_min, abs=0.3),
    )
    assert names(result.intervals) == ["concentrating", "terminal"]
    assert result.note.startswith("no metastable phase")
    assert result.intervals[1].rate == pytest.approx(0.7, rel=0.03)  # the exit rate, where the curve is exponential


def test_zero_temperature_never_leaves() -> None:
    cloud, A = circle(400, towards=math.pi / 2), attention(math.inf)
    path = zero_temperature_flow(A, cloud, torch.linspace(0, 30, 61))
    result = phases(path, limit(A))
    assert names(result.intervals)[0] == "concentrating"
    assert result.intervals[0].rate == pytest.approx(1 / 3, rel=0.02)
    # For normal M, W2 is the L2 norm of the distance to the sphere of E.
    distance = (2 - 2 * path.x[..., 0].abs()).clamp(min=0)
    torch.testing.assert_close(result.w2, (distance * cloud.weights).sum(-1).sqrt(), rtol=0, atol=1e-7)


def test_distances_of_batches_masks_and_rotating_limits() -> None:
    A = Attention.from_matrices(
        torch.tensor([[1.0, -0.7, 0], [0.7, 1.0, 0], [0, 0, 0.2]], dtype=F64), torch.eye(3, dtype=F64), beta=math.inf
    )
    x = Sphere().uniform((2, 20), 3, dtype=F64, generator=torch.Generator().manual_seed(0))
    path = zero_temperature_flow(A, x, [0.0, 3.0, 30.0])
    curve = w2_curve(path, limit(A))
    assert curve.shape == (3, 2)
    assert bool((curve[2] < 1e-6).all())  # the moving push-forward is followed round
    padded = torch.cat([path.x, torch.zeros(3, 2, 4, 3, dtype=F64)], -2)
    hidden = Trajectory(path.t, padded, mask=(torch.arange(24) < 20).expand(2, 24))
    torch.testing.assert_close(w2_curve(hidden, limit(A)), curve)


def test_a_batch_of_paths_and_limits_is_a_loop() -> None:
    G = torch.stack([diag(3, 1), diag(1, 3)])[:, None]
    A = Attention.from_matrices(G, diag(1, 2)[None], beta=torch.tensor([[20.0], [50.0]], dtype=F64))
    cloud = skewed(60)
    path = flow(A, cloud, torch.linspace(0, 8, 17), h=0.2)
    batch = phases(path, limit(A))
    for i, beta in enumerate((20.0, 50.0)):
        one = attention(beta, G[i, 0])
        alone = phases(flow(one, cloud, torch.linspace(0, 8, 17), h=0.2), limit(one))
        torch.testing.assert_close(batch.elements[i].w2, alone.w2)
        assert names(batch.elements[i].intervals) == names(alone.intervals)
    assert batch.min_w2.shape == (2,)
    three = flow(attention(50.0), Cloud(cloud.x.expand(3, 60, 2), cloud.weights), [0.0, 1.0, 2.0])
    with pytest.raises(ValueError, match=r"a cloud of the path has shape \(3, 60, 2\), expected \(..., 2, 60, 2\)"):
        phases(three, limit(A))


def test_only_rounding_breaks_a_symmetric_distribution() -> None:
    """G = diag(4,1), V = diag(1,2), uniform nodes, beta = 100: W2 falls below rounding, where t_min = log(100)."""
    A = attention(100.0, diag(4, 1))
    path = flow(A, circle(100), torch.linspace(0, 36, 37), h=0.2)
    result = phases(path, limit(A))
    assert float(result.min_w2) < 1e-7
    assert "asymmetric distribution (NOT met)" in result.doubts[0]
    assert "only rounding breaks the symmetry" in result.as_dict()["doubts"][1]


def test_two_equal_clusters_leave_together() -> None:
    """Masses that are equal to the last bit on both sides of E, and an offset that grows at 0.3."""
    t = torch.linspace(0, 20, 101, dtype=F64)
    offset = 1e-3 * torch.exp(0.3 * t)
    sides = [torch.stack([torch.full_like(t, side), offset], dim=-1) for side in (1.0, -1.0)]
    path = Trajectory(t, Sphere().retract(torch.stack(sides, dim=1)))
    end = phases(path, limit(attention(10.0)), w2=torch.exp(-t) + offset).intervals[-1]
    assert (end.name, end.rate) == ("terminal", pytest.approx(0.3))


@pytest.mark.slow
def test_exponents_of_the_least_distance() -> None:
    """min W2 ~ beta^{-1/2} for kappa >= 3 g, a "fast tail" of `requires`; less near kappa = 2 g."""
    cases = ((diag(3, 1), diag(1, 2), -0.52, -0.46, True), (diag(2.2, 1), diag(1, 1.7), -0.45, -0.36, False))
    for G, V, low, high, is_fast in cases:
        rates, requires = limit(attention(10.0, G, V)).rates, limit(attention(10.0, G, V)).requires
        assert [need.met for need in requires if need.name == "fast tail"] == [is_fast]
        assert rates.kappa / (2 * rates.g) == pytest.approx(float(G[0, 0]) / 2)
        least = []
        for beta in (100.0, 1000.0):
            A = attention(beta, G, V)
            least.append(float(w2_curve(flow(A, skewed(800), torch.linspace(0, 16, 65), h=0.1), limit(A)).min()))
        assert low < math.log10(least[1] / least[0]) < high


def test_the_error_from_zero_temperature_falls_faster_than_the_bound() -> None:
    """Like beta^{-0.97} at t = 1, where the bound has sqrt(log beta/beta)."""
    cloud, errors = skewed(400), []
    for beta in (100.0, 1000.0):
        warm = flow(attention(beta), cloud, [0.0, 1.0], h=0.05)
        cold = zero_temperature_flow(attention(beta), cloud, [0.0, 1.0])
        errors.append(float(((warm.x[-1] - cold.x[-1]).square().sum(-1) * cloud.weights).sum().sqrt()))
    assert math.log10(errors[1] / errors[0]) == pytest.approx(-0.97, abs=0.03)


# --- over seeds -------------------------------------------------------------------------------------------------


def test_phases_over_seeds_are_those_of_each_path() -> None:
    A = Attention.from_matrices(torch.eye(2, dtype=F64), diag(2, 1), beta=10.0)
    x0 = Sphere().uniform((4, 40), 2, generator=torch.Generator().manual_seed(0), dtype=F64)
    path = flow(A, x0, torch.linspace(0, 10, 21), h=0.25)
    result = phases_over_seeds(path, limit(A))
    alone = [phases(Trajectory(path.t, path.x[:, i], about=path.about), limit(A)) for i in range(4)]
    assert result["t_min"].mean == pytest.approx(np.mean([float(each.t_min) for each in alone]))
    least = [float(each.min_w2) for each in alone]
    assert result["min_w2"] == pytest.approx((np.mean(least), np.std(least, ddof=1) / 2))
    falls = [each.intervals[0].rate for each in alone if each.intervals[0].rate is not None]
    assert result["concentrating"].mean == pytest.approx(np.mean(falls))
    with pytest.raises(ValueError, match="two or more seeds"):
        phases_over_seeds(Trajectory(path.t, path.x[:, 0]), limit(A))


C, DECAY, K = 0.7, 0.4, 0.02  # constants of a made bound
TARGET = limit(attention(1.0))  # tokens go to +-e_1


def bound_of(beta: float, t: np.ndarray) -> np.ndarray:
    return K * (math.sqrt(math.log(beta + 1) / beta) * np.exp(C * t) + np.exp(-DECAY * t))


def paths_of(t: np.ndarray, curves: dict[float, np.ndarray]) -> list[Trajectory]:
    """Paths of one token, or of one for every seed, whose distance to e_1 is a given curve for each beta."""
    paths = []
    for beta, curve in curves.items():
        angle = 2 * torch.asin(torch.from_numpy(curve) / 2)
        x = torch.stack([angle.cos(), angle.sin()], dim=-1)[..., None, :]
        paths.append(Trajectory(torch.from_numpy(t), x, about={"field": {"beta": beta}}))
    return paths


def test_the_constants_of_a_known_bound() -> None:
    t, curves = np.linspace(0, 6, 61), {}
    for beta in (30.0, 300.0, 3000.0):
        curves[beta] = bound_of(beta, t)
    exact = fit_bound(paths_of(t, curves), TARGET)
    assert (exact.C, exact.c, exact.K, exact.residual) == pytest.approx((C, DECAY, K, 0.0), rel=1e-5, abs=1e-6)
    noise = np.random.default_rng(0)
    shaken = {beta: w * np.exp(0.05 * noise.normal(size=61)) for beta, w in curves.items()}
    result = fit_bound(paths_of(t, shaken), TARGET)
    assert (result.C, result.c, result.K) == pytest.approx((C, DECAY, K), rel=0.1)
    assert result.residual == pytest.approx(0.05, rel=0.2)
    assert math.isnan(result.C_error)


def test_errors_over_seeds() -> None:
    """Whole curves that are off by a factor each: the error of K is that of the mean of these factors."""
    t, factors = np.linspace(0, 6, 61), np.exp(0.2 * np.random.default_rng(1).normal(size=12))
    curves = {beta: bound_of(beta, t)[:, None] * factors for beta in (30.0, 300.0, 3000.0)}
    result = fit_bound(paths_of(t, curves), TARGET)
    assert pytest.approx(K * np.exp(np.log(factors).mean()), rel=1e-4) == result.K
    assert result.K_error / result.K == pytest.approx(np.log(factors).std(ddof=1) / math.sqrt(12), rel=1e-3)
    assert (result.C, result.C_error) == (pytest.approx(C, rel=1e-4), pytest.approx(0, abs=1e-4))


def test_a_growth_that_is_not_there_is_zero() -> None:
    """W2 that falls to a floor and stays has C = 0."""
    t, noise, curves = np.linspace(0, 10, 41), np.random.default_rng(0), {}
    for beta in (30.0, 100.0):
        floor = 0.3 * math.sqrt(math.log(1 + beta) / beta)
        curves[beta] = (floor + np.exp(-0.4 * t)) * np.exp(noise.normal(0, 0.05, 41))
    result = fit_bound(paths_of(t, curves), TARGET)
    assert result.C == 0.0
    assert result.c > 0


def test_fits_that_cannot_be_made() -> None:
    t = np.arange(5.0)
    with pytest.raises(ValueError, match="two or more finite inverse temperatures"):
        fit_bound(paths_of(t, {30.0: np.exp(-t), math.inf: np.exp(-t)}), TARGET)
    with pytest.raises(ValueError, match="expected six or more"):
        fit_bound(paths_of(t, {30.0: np.array([1.0, 0.5, 0, 0, 0]), 3.0: np.array([1.0, 0.5, 0, 0, 0])}), TARGET)
    with pytest.raises(ValueError, match=r"paths of \[2, 3\] seeds, expected the same number"):
        fit_bound(paths_of(t, {30.0: np.ones((5, 2)), 3.0: np.ones((5, 3))}), TARGET)
