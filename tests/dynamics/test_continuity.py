"""The continuity equation against closed forms, quadrature clouds, and itself: mass, modes, noise, resolution."""

import math

import pytest
import torch
from torch import Tensor

from attn_flow import Attention, Sphere, VonMisesFisher, density_flow, flow, wasserstein
from attn_flow.dynamics.harmonics import Harmonics, evaluated
from attn_flow.measures import quadrature
from attn_flow.theory.metastability import growth_rate

F64 = torch.float64


def skew(d: int, beta: float, kind: str = "softmax") -> Attention:
    """No symmetry, two heads, biases."""
    normal = lambda *shape: torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=F64)
    biases = {"query_bias": 0.2 * normal(2, d), "value_bias": 0.1 * normal(d)}
    return Attention.from_matrices(
        0.7 * normal(2, d, d), 0.4 * normal(2, d, d) + torch.eye(d), beta, **biases, kind=kind
    )


@pytest.mark.parametrize(("d", "bandwidth"), [(2, 12), (3, 7)])
def test_harmonics_are_orthonormal_and_their_gradients_those_of_autograd(d, bandwidth):
    basis = Harmonics.of(d, bandwidth)
    gram = basis.values.mT @ (basis.weights[:, None] * basis.values)
    assert float((gram - torch.eye(len(gram))).abs().max()) < 1e-13
    energy = torch.einsum("nad,nbd,n->ab", basis.gradients, basis.gradients, basis.weights)
    assert float((energy - torch.diag(basis.laplacian)).abs().max()) < 1e-11  # int |grad Y|^2 = l (l + d - 2)
    x = basis.x[::7].clone().requires_grad_()
    for j in (1, 5, len(gram) - 1):
        (ambient,) = torch.autograd.grad(evaluated(x / x.norm(dim=-1, keepdim=True), bandwidth)[:, j].sum(), x)
        assert float((ambient - basis.gradients[::7, j]).abs().max()) < 1e-10


@pytest.mark.parametrize("kind", ["softmax", "unnormalised", "sinkhorn"])
@pytest.mark.parametrize("d", [2, 3])
@pytest.mark.parametrize("diffusion", [0.0, 0.05])
def test_modes_grow_at_the_rates_of_the_linear_theory(d, kind, diffusion):
    """gamma_k - D k (k + d - 2) around the uniform law, arXiv 2410.23228."""
    beta = 2.0
    attention = Attention.identity(d, beta, dtype=F64, kind=kind)
    small = 1e-6
    bump = lambda x: 1 + small * (x[:, 0] + x[:, 1] * x[:, 0])  # degrees 1 and 2
    path = density_flow(attention, bump, [0.0, 0.2], diffusion=diffusion, bandwidth=10, tol=1e-14)
    for k in (1, 2):
        expected = float(growth_rate(k, beta, d, kind)) - diffusion * k * (k + d - 2)
        assert float(path.growth_rates(k)[0]) == pytest.approx(expected, abs=20 * small)  # what is quadratic


@pytest.mark.parametrize("kind", ["softmax", "unnormalised"])
def test_on_the_circle_it_is_the_flow_of_a_quadrature_cloud(kind):
    attention, mu = skew(2, 1.5, kind), VonMisesFisher(torch.tensor([0.6, 0.8], dtype=F64), 1.0)
    t = [0.0, 0.1, 0.2]
    path = density_flow(attention, mu, t, bandwidth=80)
    angle = math.atan2(0.8, 0.6)
    cloud = quadrature.circle(300, lambda theta: torch.exp(torch.cos(theta - angle)))
    particles = flow(attention, cloud.x, t, weights=cloud.weights, h=0.005)
    assert float((path.coefficients[:, 0] - 1).abs().max()) == 0  # mass
    mean, cov = path.moments()
    for i in range(3):
        other = particles.cloud(i).moments()
        assert float((mean[i] - other[0]).norm()) < 1e-8
        assert float((cov[i] - other[1]).norm()) < 1e-8
    seen = path.cloud(2)
    both = {"weights_x": seen.weights, "weights_y": particles.weights, "cost": "geodesic"}
    assert float(wasserstein(seen.x, particles.x[2], **both)) < 2 * math.pi / 241  # the spacing of the nodes


def test_on_the_sphere_it_is_the_flow_of_a_quadrature_cloud():
    attention, mu = skew(3, 1.0), VonMisesFisher(torch.tensor([0.0, 0.6, 0.8], dtype=F64), 1.0)
    path = density_flow(attention, mu, [0.0, 0.1], bandwidth=16)
    basis = Harmonics.of(3, 12)
    cloud = torch.stack([basis.x[:, 1], basis.x[:, 2], basis.x[:, 0]], dim=-1)  # other nodes than those of the path
    weights = basis.weights * mu.density(cloud)
    particles = flow(attention, cloud, [0.0, 0.1], weights=weights, h=0.05)
    mean, cov = path.moments()
    other = particles.cloud(1).moments()
    assert float((mean[1] - other[0]).norm()) < 1e-6
    assert float((cov[1] - other[1]).norm()) < 1e-6


def test_density_at_points_amplitudes_and_turns():
    mu = VonMisesFisher(torch.tensor([0.0, 0.0, 1.0], dtype=F64), 1.2)
    attention = Attention.identity(3, 1.0, dtype=F64)
    path = density_flow(attention, mu, [0.0, 0.3], bandwidth=12)
    x = Sphere().uniform(20, 3, generator=torch.Generator().manual_seed(0), dtype=F64)
    assert float((path.density(x)[0] - mu.density(x)).abs().max()) < 1e-9
    assert float(path.amplitudes()[0, 0]) == 1
    # The flow of an O(3)-equivariant attention commutes with rotations.
    Q = torch.linalg.qr(torch.randn(3, 3, generator=torch.Generator().manual_seed(1), dtype=F64))[0]
    turned = density_flow(attention, VonMisesFisher(Q @ mu.mean, 1.2), [0.0, 0.3], bandwidth=12)
    assert float((turned.density(x @ Q.mT)[1] - path.density(x)[1]).abs().max()) < 1e-7
    assert float((turned.amplitudes() - path.amplitudes()).abs().max()) < 1e-7


def test_heat_alone_is_exact():
    still = Attention.from_matrices(torch.eye(2, dtype=F64), torch.zeros(2, 2, dtype=F64))
    path = density_flow(still, lambda x: 1 + 0.5 * x[:, 0], [0.0, 3.0], diffusion=0.7, bandwidth=4)
    assert float(path.amplitudes()[1, 1] / path.amplitudes()[0, 1]) == pytest.approx(math.exp(-2.1), rel=1e-13)


def test_noise_decides_whether_the_uniform_law_stays():
    """Unnormalised attention against diffusion: gamma_1 = D (d - 1) separates decay from growth."""
    attention = Attention.identity(3, 1.0, dtype=F64, kind="unnormalised")
    critical = float(growth_rate(1, 1.0, 3, "unnormalised")) / 2
    bump = lambda x: 1 + 1e-3 * x[:, 0]
    for factor, grows in ((0.9, True), (1.1, False)):
        path = density_flow(attention, bump, [0.0, 1.0], diffusion=factor * critical, bandwidth=6)
        assert bool(path.growth_rates(1)[0] > 0) is grows


def test_what_it_cannot_resolve_it_refuses_with_a_bandwidth():
    attention = Attention.identity(2, 3.0, dtype=F64)
    bump: object = lambda x: 1 + 0.5 * x[:, 0]
    with pytest.raises(ValueError, match=r"not resolved at t = .*bandwidth = 32 or more"):
        density_flow(attention, bump, [0.0, 8.0], bandwidth=16)
    with pytest.raises(ValueError, match="not resolved at the start"):
        density_flow(attention, VonMisesFisher(torch.tensor([1.0, 0.0], dtype=F64), 500.0), [0.0, 1.0], bandwidth=16)


def test_bad_arguments_are_refused():
    uniform: object = lambda x: torch.ones(len(x), dtype=F64)
    cases: list[tuple[Attention, dict[str, object], str]] = [
        (Attention.identity(4, dtype=F64), {}, "dimension 4"),
        (Attention.identity(2, causal=True, dtype=F64), {}, "causal"),
        (Attention.identity(2, beta=math.inf, dtype=F64), {}, "beta = inf"),
        (Attention.identity(2, dtype=F64), {"diffusion": -1.0}, "diffusion = -1"),
        (Attention.identity(2, dtype=F64), {"bandwidth": 2}, "bandwidth = 2"),
    ]
    for attention, options, words in cases:
        with pytest.raises(ValueError, match=words):
            density_flow(attention, uniform, [0.0, 1.0], **options)  # type: ignore[arg-type]
    negative: object = lambda x: x[:, 0]
    with pytest.raises(ValueError, match="values from -1 to 1, expected finite numbers >= 0"):
        density_flow(Attention.identity(2, dtype=F64), negative, [0.0, 1.0])  # type: ignore[arg-type]
    short: object = lambda x: x[:3, 0] ** 2
    with pytest.raises(ValueError, match=r"density returned shape \(3,\), expected"):
        density_flow(Attention.identity(2, dtype=F64), short, [0.0, 1.0])  # type: ignore[arg-type]


def test_the_repr_is_short():
    path = density_flow(Attention.identity(2, dtype=F64), _flat, [0.0, 1.0], bandwidth=8)
    assert repr(path) == "DensityPath(2 times from 0 to 1, circle, bandwidth 8, float64 (2, 17))"


def _flat(x: Tensor) -> Tensor:
    return torch.ones(len(x), dtype=F64)
