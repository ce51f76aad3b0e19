"""Densities against particles and growth rates; Jacobians and Lyapunov exponents against closed forms."""

import math

import pytest
import torch

from attn_flow import (
    Attention,
    Cloud,
    Drift,
    Euclidean,
    Sphere,
    VonMisesFisher,
    density_flow,
    flow,
    linearise,
    lyapunov,
)
from attn_flow.measures import quadrature
from attn_flow.theory import metastability

f64 = torch.float64


@pytest.mark.parametrize("kind", ["softmax", "unnormalised"])
@pytest.mark.parametrize("k", [1, 2, 3])
def test_modes_of_the_circle_grow_at_their_rates(kind, k):
    """THEORY 3, beta = 5: SA .1787 .5141 .6827, USA 4.8671 14.0045 18.5961."""
    expected = {"softmax": (0.1787, 0.5141, 0.6827), "unnormalised": (4.8671, 14.0045, 18.5961)}[kind][k - 1]
    T = 0.1 / expected

    def density(x):
        return 1 + 1e-7 * torch.cos(k * torch.atan2(x[:, 1], x[:, 0]))

    path = density_flow(Attention.identity(2, 5.0, kind=kind), density, [0.0, T], bandwidth=24)
    assert float(path.growth_rates(k)[0]) == pytest.approx(expected, rel=2e-4)


def test_a_density_and_its_quadrature_cloud_move_alike():
    mu = VonMisesFisher(torch.tensor([1.0, 0.0, 0.0], dtype=f64), 1.0)
    A = Attention.from_matrices(torch.diag(torch.tensor([1.0, 2.0, 1.0], dtype=f64)), torch.eye(3, dtype=f64), 1.5)
    path = density_flow(A, mu, [0.0, 1.0])
    nodes = quadrature.fibonacci(3000)
    cloud = Cloud(nodes.x, nodes.weights * mu.density(nodes.x))
    particles = flow(A, cloud, [0.0, 1.0]).cloud(-1)
    torch.testing.assert_close(path.cloud(-1).mean, particles.mean, rtol=0, atol=2e-3)
    assert float(path.coefficients[-1, 0]) == pytest.approx(1.0)  # mass


def test_diffusion_decays_every_degree():
    still = Attention(V=torch.zeros(3, 3, dtype=f64))
    path = density_flow(still, lambda x: 1 + 0.5 * x[:, 2] + 0.3 * x[:, 0] * x[:, 1], [0.0, 0.7], diffusion=0.2)
    for degree in (1, 2):
        assert float(path.growth_rates(degree)[0]) == pytest.approx(-0.2 * degree * (degree + 1), rel=1e-6)


def test_unresolved_densities_are_refused():
    with pytest.raises(ValueError, match="bandwidth"):
        density_flow(Attention.identity(2, 5.0), lambda x: torch.exp(3 * x[:, 0]), [0.0, 20.0])
    waves = lambda x: torch.exp(20 * torch.cos(29 * torch.atan2(x[:, 1], x[:, 0])))  # degrees 29 and 58 of 64 only
    with pytest.raises(ValueError, match=r"its lowest value is -0\.2"):
        density_flow(Attention.identity(2), waves, 0.1, tail=1e-4)
    with pytest.raises(ValueError, match="dimension 4"):
        density_flow(Attention.identity(4), lambda x: x[:, 0], 1.0)
    with pytest.raises(ValueError, match="beta = inf"):
        density_flow(Attention.identity(2, math.inf), lambda x: 1 + 0 * x[:, 0], 1.0)
    path = density_flow(Attention.identity(2), lambda x: 1 + 0 * x[:, 0], 0.1)
    for x in (torch.eye(3), torch.eye(2)[None]):
        with pytest.raises(ValueError, match=r"expected \(P, 2\) unit vectors"):
            path.density(x)


def test_jacobian_against_finite_differences(generator):
    A = Attention.from_matrices(*torch.randn(2, 3, 3, generator=generator, dtype=f64), 1.0)
    x = Sphere().uniform(3, 3, generator=generator, dtype=f64)
    result = linearise(A, x)
    sphere = Sphere()

    def velocity(y):
        return sphere.tangent(y, A.drift(y))

    step = 1e-6
    for column in range(6):
        token, axis = divmod(column, 2)
        u = torch.zeros_like(x)
        u[token] = result.basis[token, :, axis]
        dv = (velocity(sphere.retract(x + step * u)) - velocity(sphere.retract(x - step * u))) / (2 * step)
        expected = torch.einsum("ida,id->ia", result.basis, dv).flatten()
        torch.testing.assert_close(result.jacobian[:, column], expected, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(("kind", "beta"), [("softmax", 2.0), ("unnormalised", 1.0)])
def test_consensus_contracts_at_its_rate(kind, beta):
    """THEORY 2: distances decay at rate 1 (softmax) and e^beta (unnormalised)."""
    x = torch.tensor([[0.0, 0.0, 1.0]], dtype=f64).repeat(5, 1)
    result = linearise(Attention.identity(3, beta, kind=kind), x)
    rate = 1.0 if kind == "softmax" else math.exp(beta)
    torch.testing.assert_close(result.eigenvalues.real[2:], torch.full((8,), -rate, dtype=f64))
    assert float(result.growth.abs()) < 1e-12


def test_lyapunov_exponents_of_a_linear_flow_and_of_padding(generator):
    M = torch.diag(torch.tensor([0.3, -0.2, -1.0], dtype=f64))
    field = Drift(lambda t, x: x @ M.T, tokenwise=True)
    x0 = torch.randn(2, 3, generator=generator, dtype=f64)
    result = lyapunov(field, x0, t=20.0, k=3, geometry=Euclidean(), generator=generator)
    torch.testing.assert_close(result.exponents, torch.tensor([0.3, 0.3, -0.2], dtype=f64), rtol=0, atol=1e-3)
    mask = torch.tensor([True, False])
    padded = lyapunov(field, Cloud(x0, mask=mask), t=20.0, k=3, geometry=Euclidean(), generator=generator)
    torch.testing.assert_close(padded.exponents, torch.diagonal(M), rtol=0, atol=1e-3)
    short = lyapunov(field, x0, t=0.1, k=6, geometry=Euclidean(), generator=generator)  # axes are still mixed
    assert torch.equal(short.exponents, short.exponents.sort(descending=True)[0])
    with pytest.raises(ValueError, match="at most 3"):
        lyapunov(field, Cloud(x0, mask=mask), t=1.0, k=4, geometry=Euclidean())


def test_fastest_mode_is_that_of_the_theory():
    growth = [float(metastability.growth_rate(k, 5.0, 2)) for k in (1, 2, 3, 4)]
    x = quadrature.circle(60).x
    result = linearise(Attention.identity(2, 5.0), x)
    assert float(result.growth) == pytest.approx(max(growth), rel=1e-6)
