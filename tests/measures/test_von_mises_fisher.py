"""The von Mises-Fisher law against quadrature, its samples and its limits; graded nodes in every dimension."""

import math

import numpy as np
import pytest
import torch

from attn_flow import UniformSphere, VonMisesFisher
from attn_flow.measures import quadrature

F64 = torch.float64


def law(d: int, kappa: float) -> VonMisesFisher:
    m = torch.randn(d, generator=torch.Generator().manual_seed(d), dtype=F64)
    return VonMisesFisher(m / m.norm(), kappa)


@pytest.mark.parametrize("d", [1, 2, 3, 7, 64])
@pytest.mark.parametrize("beta", [1e-9, 0.3, 5.0, 200.0])
def test_the_gradient_of_the_log_partition_is_the_tilted_mean(d, beta):
    for kappa in (0.0, 0.1, 4.0, 3000.0):
        mu = law(d, kappa)
        g = torch.randn(4, d, generator=torch.Generator().manual_seed(1), dtype=F64, requires_grad=True)
        (gradient,) = torch.autograd.grad(mu.log_partition(g, beta).sum(), g)
        assert float((gradient - mu.tilted_mean(g.detach(), beta)).abs().max()) < 1e-9


@pytest.mark.parametrize("kappa", [0.0, 2.0, 30.0])
def test_on_the_circle_it_is_what_quadrature_says(kappa):
    mu = law(2, kappa)
    angle = math.atan2(*mu.mean.flip(0).tolist())
    cloud = quadrature.circle(600, lambda theta: torch.exp(kappa * (torch.cos(theta - angle) - 1)))
    g = torch.tensor([[1.0, 0.5], [-0.3, 2.0]], dtype=F64)
    for beta in (0.0, 1e-8, 1.0, 20.0):
        assert float((mu.tilted_mean(g, beta) - cloud.tilted_mean(g, beta)).abs().max()) < 1e-12
        assert float((mu.log_partition(g, beta) - cloud.log_partition(g, beta)).abs().max()) < 1e-12
    assert float((mu.density(cloud.x) / 600 - cloud.probabilities).abs().max()) < 1e-14


def test_without_concentration_it_is_uniform():
    mu, nu, g = law(5, 0.0), UniformSphere(5), torch.randn(3, 5, generator=torch.Generator().manual_seed(0)).double()
    for beta in (0.0, 0.1, 50.0, math.inf):
        assert float((mu.tilted_mean(g, beta) - nu.tilted_mean(g, beta)).abs().max()) < 1e-15
        assert float((mu.log_partition(g, beta) - nu.log_partition(g, beta)).abs().max()) < 1e-13


@pytest.mark.parametrize("d", [1, 2, 3, 10])
@pytest.mark.parametrize("kappa", [0.0, 0.7, 25.0, 1e5])
def test_samples_have_its_mean_and_lie_on_the_sphere(d, kappa):
    mu, n = law(d, kappa), 4000
    y = mu.sample(n, generator=torch.Generator().manual_seed(3))
    assert float((y.norm(dim=-1) - 1).abs().max()) < 1e-14
    along = 1 - y @ mu.mean
    expected = 1 - mu.tilted_mean(torch.zeros(1, d, dtype=F64), 1.0)[0] @ mu.mean
    noise = float(along.std()) / math.sqrt(n)
    assert abs(float(along.mean() - expected)) < 4 * noise + 1e-14
    across = y.mean(0) - (y.mean(0) @ mu.mean) * mu.mean
    assert float(across.norm()) < 4 * float(y.std(0).norm()) / math.sqrt(n) + 1e-14


def test_bad_laws_are_refused():
    with pytest.raises(ValueError, match="expected unit vectors"):
        VonMisesFisher(torch.tensor([1.0, 1.0]), 1.0)
    with pytest.raises(ValueError, match="kappa = -1"):
        VonMisesFisher(torch.tensor([1.0, 0.0]), -1.0)
    with pytest.raises(ValueError, match="at least one token"):
        law(3, 1.0).sample(0)


@pytest.mark.parametrize("d", [3, 4, 5, 8])
def test_graded_nodes_reach_both_ends_of_the_axis_and_integrate(d):
    axis = law(d, 0.0).mean
    cloud = quadrature.graded(240, 64, 3 * axis)
    along = cloud.x @ axis
    assert float((cloud.x.norm(dim=-1) - 1).abs().max()) < 1e-14
    tail = 2 * math.exp(-quadrature.TAIL)  # tan(phi/2) = e^{-TAIL} at the outermost ring, about
    for end in (axis, -axis):
        assert float((cloud.x - end).norm(dim=-1).min()) < 2 * tail
    # Moments along the axis, E <e, y>^{2m} = prod (2j-1)/(d+2j-2), by the rings alone.
    moment = 1.0
    for m in range(1, 5):
        moment *= (2 * m - 1) / (d + 2 * m - 2)
        assert float((cloud.probabilities * along ** (2 * m)).sum()) == pytest.approx(moment, abs=1e-9)
    mu = VonMisesFisher(axis, 1.5)
    seen = quadrature.graded(400, 64, axis, mu.density)
    exact = float(mu.tilted_mean(torch.zeros(1, d, dtype=F64), 1.0)[0] @ axis)
    assert float(seen.mean @ axis) == pytest.approx(exact, abs=1e-9)


def test_graded_nodes_refuse_a_plane():
    with pytest.raises(ValueError, match="d >= 3"):
        quadrature.graded(10, 10, torch.ones(2))
    with pytest.raises(ValueError, match="n = 1, expected a whole number of at least 2"):
        quadrature.graded(1, 10, torch.ones(3))
    assert np.isfinite(quadrature.graded(3, 3, torch.ones(6)).x.numpy()).all()
