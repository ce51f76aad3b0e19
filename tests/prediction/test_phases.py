"""Phases of curves whose answer is known, and of the flow of THEORY 1."""

import json
import math

import numpy as np
import pytest
import torch

from attn_flow.attention import Attention
from attn_flow.dynamics.particles import flow
from attn_flow.dynamics.steppers import euler
from attn_flow.dynamics.trajectory import Trajectory
from attn_flow.measures.quadrature import circle
from attn_flow.prediction import ResolutionWarning, limit
from attn_flow.prediction.timeline import phases, split, w2_curve
from attn_flow.prediction.zero_temperature import zero_temperature_flow

f64 = torch.float64


def attention(beta: float) -> Attention:
    G, V = (torch.diag(torch.tensor(entries, dtype=f64)) for entries in ([3.0, 1.0], [1.0, 2.0]))
    return Attention.from_matrices(G, V, beta)


def test_split_of_a_made_curve() -> None:
    t = np.linspace(0, 40, 401)
    w = np.exp(-0.5 * t) + 1e-4 * np.exp(0.25 * t)
    found = {p.phase: p for p in split(t, w, {"concentrating": 0.5, "terminal": 0.25})}
    assert list(found) == ["concentrating", "metastable", "terminal"]
    assert found["concentrating"].rate == pytest.approx(0.5, rel=0.05)
    assert found["terminal"].rate == pytest.approx(0.25, rel=0.05)
    assert found["concentrating"].end == found["metastable"].start < found["metastable"].end
    assert found["terminal"].end == 40
    low = w.min()
    assert np.interp(found["metastable"].start, t, w) == pytest.approx(2 * low, rel=1e-3)
    assert np.interp(found["metastable"].end, t, w) == pytest.approx(2 * low, rel=1e-3)


def test_split_of_pure_decay_growth_and_noise() -> None:
    t = np.linspace(0, 10, 101)
    decay = split(t, np.exp(-t))
    assert [p.phase for p in decay] == ["concentrating", "metastable"]
    assert decay[0].rate == pytest.approx(1.0)
    assert decay[0].error == pytest.approx(0.0, abs=1e-9)
    assert [p.phase for p in split(t, 1 + t)] == ["spreading"]
    noise = np.exp(0.05 * np.random.default_rng(0).normal(size=101))
    rates = split(t, np.exp(-0.4 * t) * noise)[0]
    assert abs(rates.rate - 0.4) < 4 * rates.error
    assert 0.001 < rates.error < 0.05


def test_split_refuses_what_is_no_curve() -> None:
    with pytest.raises(ValueError, match="at least 3 times"):
        split([0.0, 1.0], [1.0, 0.5])
    with pytest.raises(ValueError, match="expected distances"):
        split([0.0, 1, 2], [1.0, np.nan, 0.5])


def test_phases_of_the_mean_field_flow() -> None:
    """beta = 100: min W2 .182 at t = 7.0, then V takes over (exit rate 1, settling rate 1) and W2 -> sqrt 2."""
    cloud = circle(300, lambda theta: torch.exp(torch.cos(theta - 1)))
    A = attention(100.0)
    path = flow(A, cloud.x, torch.arange(0, 751, 10) * 0.04, step=euler, h=0.04, weights=cloud.weights)
    found = phases(path, limit(A))
    assert [p.phase for p in found.phases] == ["concentrating", "metastable", "terminal"]
    assert found.t_min == pytest.approx(7.0, abs=0.4)
    assert found.min_w2 == pytest.approx(0.182, abs=0.012)  # a lattice runs out of tail tokens: .173
    assert found.w2[-1] == pytest.approx(math.sqrt(2), abs=1e-6)
    assert found.phases[0].predicted == pytest.approx(1 / 3)
    assert found.phases[2].predicted == pytest.approx(1.0)
    assert found.phases[2].rate == pytest.approx(1.0, abs=0.15)
    assert found.settling is not None
    assert found.settling.rate == pytest.approx(1.0, abs=0.03)  # Euler, h = .04
    assert found.resolution is not None
    assert found.resolution.verdict == "resolved"
    json.dumps(found.as_dict())


def test_zero_temperature_never_leaves() -> None:
    cloud = circle(400, towards=math.pi / 2)
    A = attention(math.inf)
    path = zero_temperature_flow(A, cloud.x, torch.linspace(0, 30, 61, dtype=f64))
    path = Trajectory(path.t, path.x, cloud.weights, about=path.about)
    found = phases(path, limit(A))
    assert [p.phase for p in found.phases] == ["concentrating", "metastable"]
    assert found.phases[0].rate == pytest.approx(1 / 3, rel=0.02)
    assert found.settling is None
    assert found.resolution is None
    # The L^p identity: W2 is the L2 norm of the distance to the sphere of E.
    away = 2 - 2 * path.x[..., 0].abs()
    assert np.allclose(found.w2, (away * cloud.weights).sum(-1).clamp(min=0).sqrt(), atol=1e-7)


def test_w2_curve_of_batches_masks_and_rotating_limits() -> None:
    M = torch.tensor([[1.0, -0.7, 0], [0.7, 1.0, 0], [0, 0, 0.2]], dtype=f64)
    A = Attention.from_matrices(M, torch.eye(3, dtype=f64), math.inf)
    x = torch.randn(2, 20, 3, dtype=f64, generator=torch.Generator().manual_seed(0))
    x = x / x.norm(dim=-1, keepdim=True)
    path = zero_temperature_flow(A, x, torch.tensor([0.0, 3.0, 30.0], dtype=f64))
    found = limit(A)
    curve = w2_curve(path, found)
    assert curve.shape == (3, 2)
    assert bool((curve[2] < 1e-6).all())  # the moving push-forward is followed round
    padded = torch.cat([path.x, torch.zeros(3, 2, 4, 3, dtype=f64)], -2)
    mask = torch.arange(24) < 20
    hidden = Trajectory(path.t, padded, mask=mask.expand(2, 24))
    assert torch.allclose(w2_curve(hidden, found), curve, atol=1e-12)


def test_phases_carry_the_resolution() -> None:
    A = Attention.from_matrices(torch.diag(torch.tensor([3.0] + [1.0] * 5, dtype=f64)), torch.eye(6, dtype=f64), 1e3)
    x = torch.randn(40, 6, dtype=f64, generator=torch.Generator().manual_seed(0))
    path = flow(A, x, [0.0, 0.5, 1.0])
    with pytest.warns(ResolutionWarning):
        found = phases(path, limit(A))
    assert found.resolution is not None
    assert found.resolution.verdict == "unresolved"
    with pytest.raises(ValueError, match=r"expected one path \(T, n, d\)"):
        phases(Trajectory(path.t, path.x[:, None]), limit(A))


@pytest.mark.parametrize(("degree", "rate"), [(1, 1 / 6), (2, -2 / 3), (3, 2.0)])
def test_modes_of_a_layer_that_cannot_stay_grow_as_derived(degree, rate):
    """V = diag(-1, .5), G = diag(1, -3): a Hermite mode on the Gaussian of variance 2/beta, through the flow itself."""
    G, V = torch.diag(torch.tensor([1.0, -3.0], dtype=f64)), torch.diag(torch.tensor([-1.0, 0.5], dtype=f64))
    beta, small = 1e4, 1e-4
    s, z = math.sqrt(2 / beta), torch.linspace(-9, 9, 301, dtype=f64)
    mode = {1: lambda y: y, 2: lambda y: y**2 - 1, 3: lambda y: y**3 - 3 * y}[degree]
    x0 = torch.stack([torch.cos(s * z), torch.sin(s * z)], -1)
    moments = []
    for sign in (1, -1):
        w = torch.exp(-(z**2) / 2) * (1 + sign * small * mode(z))
        path = flow(Attention.from_matrices(G, V, beta=beta), x0, [0.0, 0.01, 0.02], weights=w / w.sum(), h=0.01)
        moments.append((w / w.sum() * mode(torch.atan2(path.x[..., 1], path.x[..., 0]) / s)).sum(-1))
    a = moments[0] - moments[1]
    early, late = (float((a[i + 1] / a[i]).log()) / 0.01 for i in (0, 1))
    assert 1.5 * early - 0.5 * late == pytest.approx(rate, abs=0.02)  # at t = 0; the line's own error is O(t^2)
