"""Every measure: its mean is the gradient of its log-partition, its limits in beta, and closed forms."""

import math

import pytest
import torch

from attn_flow import Cloud, EllipsoidSupport, Gaussian, Mixture, Sphere, UniformSphere, VonMisesFisher
from attn_flow.measures import quadrature

f64 = torch.float64
D = 3


def draw(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=f64)


def covariance(d=D):
    A = draw(d, d, seed=3)
    return A @ A.T / d


def weighted_cloud():
    mask = torch.tensor([True] * 6 + [False])
    return Cloud(draw(7, D), draw(7, seed=1).exp(), mask)


MEASURES = {
    "cloud": weighted_cloud(),
    "sphere": UniformSphere(D, 1.5),
    "gaussian": Gaussian(draw(D), covariance()),
    "capped gaussian": Gaussian(draw(D), covariance(), cap=1.2),
    "ellipsoid": EllipsoidSupport(draw(D), covariance(), rho=2.0),
    "von mises fisher": VonMisesFisher(Sphere().retract(draw(1, D))[0], 2.5),
    "mixture": Mixture(
        [weighted_cloud(), UniformSphere(D), Gaussian(draw(D), covariance())], torch.tensor([1.0, 2, 3])
    ),
}


@pytest.mark.parametrize("name", MEASURES)
@pytest.mark.parametrize("beta", [0.3, 2.0])
def test_tilted_mean_is_the_gradient_of_the_log_partition(name, beta):
    mu, g = MEASURES[name], draw(4, D, seed=9).requires_grad_()
    (gradient,) = torch.autograd.grad(mu.log_partition(g, beta).sum(), g)
    torch.testing.assert_close(gradient, mu.tilted_mean(g, beta), rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("name", MEASURES)
def test_a_tensor_of_betas_is_a_loop(name):
    mu, g = MEASURES[name], draw(4, D, seed=9)
    betas = [0.0, 0.5, 3.0, 20.0]
    for function in (mu.log_partition, mu.tilted_mean):
        rows = torch.stack([function(g, beta)[i] for i, beta in enumerate(betas)])
        torch.testing.assert_close(function(g, torch.tensor(betas, dtype=f64)), rows)
    for small in (1e-7, 1e-12, 1e-300):  # no rounding error is divided by beta
        torch.testing.assert_close(mu.log_partition(g, small), mu.log_partition(g, 0.0), rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", ["cloud", "sphere", "capped gaussian", "ellipsoid", "von mises fisher"])
def test_zero_temperature_is_the_maximum_over_the_support(name):
    mu, g = MEASURES[name], draw(4, D, seed=9)
    cold = mu.tilted_mean(g, math.inf)
    torch.testing.assert_close((g * cold).sum(-1), mu.log_partition(g, math.inf))
    torch.testing.assert_close(mu.log_partition(g, 1e9), mu.log_partition(g, math.inf), rtol=1e-6, atol=1e-6)


def test_cloud_by_its_definition():
    cloud, g = weighted_cloud(), draw(2, D, seed=9)
    x, w = cloud.x[:6], cloud.weights[:6] / cloud.weights[:6].sum()
    torch.testing.assert_close(cloud.probabilities[:6], w)
    assert float(cloud.probabilities[6]) == 0
    torch.testing.assert_close(cloud.mean, w @ x)
    mean, cov = cloud.moments()
    torch.testing.assert_close(cov, sum(w[j] * torch.outer(x[j] - mean, x[j] - mean) for j in range(6)))
    for i in range(2):
        partition = sum(w[j] * torch.exp(2.0 * g[i] @ x[j]) for j in range(6))
        torch.testing.assert_close(cloud.log_partition(g, 2.0)[i], partition.log() / 2)
    assert torch.equal(cloud.filled()[6], cloud.x[0])
    padded = Cloud(torch.cat([cloud.x[:6], g[:1].sign() * torch.finfo(f64).max]), cloud.weights, cloud.mask)
    torch.testing.assert_close(padded.tilted_mean(g, 2.0), cloud.tilted_mean(g, 2.0))
    torch.testing.assert_close(padded.moments(), cloud.moments())
    assert float(cloud.max_norm) == pytest.approx(float(x.norm(dim=-1).max()))


@pytest.mark.parametrize("beta", [1e-3, 1e-2, 1.0, 30.0])
def test_two_tokens_have_a_hyperbolic_cosine(beta):
    cloud, g = Cloud(torch.tensor([[-1.0], [1.0]], dtype=f64)), torch.tensor([[1.0]], dtype=f64)
    assert float(cloud.log_partition(g, beta)) == pytest.approx(math.log(math.cosh(beta)) / beta, rel=1e-9)
    assert float(cloud.tilted_mean(g, beta)) == pytest.approx(math.tanh(beta), rel=1e-12)


def test_weights_of_any_size_and_their_gradients():
    x = draw(3, 2)
    huge = Cloud(x, torch.tensor([1e308, 1e308, 0.0], dtype=f64))
    torch.testing.assert_close(huge.probabilities, torch.tensor([0.5, 0.5, 0.0], dtype=f64))
    assert bool(huge.log_partition(1e200 * x, 0.0).isfinite().all())  # 0 times the square of a length
    w = torch.tensor([1.0, 0.0, 2.0], dtype=f64, requires_grad=True)
    Cloud(x, w).log_weights[[0, 2]].sum().backward()
    assert bool(w.grad.isfinite().all())


@pytest.mark.parametrize("d", [2, 3])
def test_sphere_and_von_mises_fisher_by_quadrature(d):
    g, beta = draw(1, d, seed=4), 1.7
    axis = draw(d, seed=5)
    nodes, tolerance = (quadrature.circle(200), 1e-10) if d == 2 else (quadrature.fibonacci(20000), 1e-4)
    sphere = UniformSphere(d)
    torch.testing.assert_close(sphere.tilted_mean(g, beta), nodes.tilted_mean(g, beta), rtol=0, atol=tolerance)
    mu = VonMisesFisher(axis / axis.norm(), 2.0)
    density = Cloud(nodes.x, nodes.weights * mu.density(nodes.x))
    torch.testing.assert_close(mu.tilted_mean(g, beta), density.tilted_mean(g, beta), rtol=0, atol=tolerance)
    torch.testing.assert_close(mu.log_partition(g, beta), density.log_partition(g, beta), rtol=0, atol=tolerance)


@pytest.mark.parametrize(("d", "kappa"), [(1, 0.5), (2, 5.0), (3, 5.0)])
def test_von_mises_fisher_samples(generator, d, kappa):
    mu = VonMisesFisher(torch.eye(d, dtype=f64)[-1], kappa)
    x = mu.sample(20000, generator=generator)
    torch.testing.assert_close(x.norm(dim=-1), torch.ones(20000, dtype=f64))
    expected = mu.tilted_mean(torch.zeros(1, d, dtype=f64), 0.0)[0]
    assert float((x.mean(0) - expected).abs().max()) < 5 / math.sqrt(20000)


def test_gaussian_closed_forms():
    m, S, g = draw(D), covariance(), draw(4, D, seed=9)
    torch.testing.assert_close(Gaussian(m, S).tilted_mean(g, 1.5), m + 1.5 * g @ S)
    deviation = torch.einsum("md,de,me->m", g, S, g).sqrt()
    bulk = Gaussian.of_tokens(m, S, n=50)
    torch.testing.assert_close(bulk.log_partition(g, math.inf), g @ m + math.sqrt(2 * math.log(50)) * deviation)
    cloud = Cloud(draw(50, D))
    fit = Gaussian.fit(cloud)
    torch.testing.assert_close(fit.cov, cloud.moments()[1])
    support = EllipsoidSupport.fit(cloud)
    g0 = torch.zeros(1, D, dtype=f64)
    torch.testing.assert_close(support.tilted_mean(g0, 1.0)[0], cloud.mean)


def test_mixture_of_clouds_is_the_joint_cloud():
    x, y, g = draw(4, D), draw(6, D, seed=1), draw(3, D, seed=9)
    mixture = Mixture([Cloud(x), Cloud(y)], torch.tensor([1.0, 3.0], dtype=f64))
    weights = torch.cat([torch.full((4,), 1 / 16, dtype=f64), torch.full((6,), 3 / 24, dtype=f64)])
    joint = Cloud(torch.cat([x, y]), weights)
    several = Mixture(mixture.components, torch.stack([mixture.weights, mixture.weights.flip(0)]))
    for beta in (0.0, 0.8, 5.0, math.inf):
        torch.testing.assert_close(several.tilted_mean(g, beta)[0], mixture.tilted_mean(g, beta))
        torch.testing.assert_close(mixture.tilted_mean(g, beta), joint.tilted_mean(g, beta))
        torch.testing.assert_close(mixture.log_partition(g, beta), joint.log_partition(g, beta))


def test_quadrature_integrates_polynomials():
    cloud = quadrature.circle(64, lambda theta: 1 + 0.5 * torch.cos(theta - 1))
    torch.testing.assert_close(cloud.mean, 0.25 * torch.tensor([math.cos(1), math.sin(1)], dtype=f64))
    crowded = quadrature.circle(600, lambda theta: 1 + 0.5 * torch.cos(theta - 1), towards=0.3)
    torch.testing.assert_close(crowded.mean, cloud.mean, rtol=0, atol=1e-8)
    uniform, sphere = quadrature.fibonacci(5000), quadrature.fibonacci(5000, lambda x: 1 + x[:, 0])
    torch.testing.assert_close(sphere.mean, torch.tensor([1 / 3, 0, 0], dtype=f64), rtol=0, atol=1e-4)
    second = torch.einsum("ni,nj->ij", uniform.x, uniform.x) / 5000
    torch.testing.assert_close(second, torch.eye(3, dtype=f64) / 3, rtol=0, atol=1e-4)


def test_measures_move_between_dtypes():
    g = draw(4, D, seed=9)
    for name, mu in MEASURES.items():
        single = mu.to(torch.float32).tilted_mean(g.float(), 0.5)
        assert single.dtype == torch.float32
        torch.testing.assert_close(single.double(), mu.tilted_mean(g, 0.5), rtol=1e-4, atol=1e-4, msg=name)


def test_half_precision_clouds_have_moments():
    x = draw(30, D)
    for measure in (Gaussian, EllipsoidSupport):
        half = measure.fit(Cloud(x.half())).cov.double()
        torch.testing.assert_close(half, measure.fit(Cloud(x)).cov, rtol=0, atol=0.02)


ONE = torch.ones(1, 2)


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda: Cloud(torch.zeros(0, 2)), ValueError, "n >= 1"),
        (lambda: Cloud(torch.zeros(2)), ValueError, r"\(\.\.\., n, d\)"),
        (lambda: Cloud([[1.0]]), TypeError, "torch.Tensor"),
        (lambda: Cloud(torch.tensor([[math.inf, 0.0]])), ValueError, "infinite"),
        (lambda: Cloud(ONE, mask=torch.tensor([False])), ValueError, "hides every token"),
        (lambda: Cloud(ONE, mask=torch.tensor([1])), TypeError, "boolean"),
        (lambda: Cloud(ONE, weights=torch.tensor([-1.0])), ValueError, "nonnegative"),
        (lambda: Cloud(ONE, weights=torch.tensor([0.0])), ValueError, "all zero"),
        (lambda: Cloud(ONE, weights=torch.ones(2)), ValueError, "match x"),
        (lambda: Gaussian(torch.zeros(2), torch.tensor([[1.0, 1.0], [0.0, 1.0]])), ValueError, "symmetric"),
        (lambda: Gaussian(torch.zeros(2), torch.diag(torch.tensor([1.0, -1.0]))), ValueError, "eigenvalue"),
        (lambda: Gaussian(torch.zeros(2), torch.eye(2)).tilted_mean(ONE, math.inf), ValueError, "cap"),
        (lambda: VonMisesFisher(torch.ones(2), 1.0), ValueError, "unit"),
        (lambda: Mixture([], torch.ones(0)), ValueError, "one weight per component"),
        (lambda: Mixture([UniformSphere(2)], torch.zeros(1)), ValueError, "weights"),
        (lambda: Mixture([UniformSphere(2)], [1.0]), TypeError, "weights is a list"),
        (lambda: Cloud(torch.zeros(2, 5, 3), mask=torch.ones(3, 5) > 0), ValueError, r"broadcast .*mask \(3,\)"),
        (lambda: Cloud(ONE).tilted_mean(torch.ones(1, 3), 1.0), ValueError, r"expected \(\.\.\., m, 2\)"),
        (lambda: Cloud(ONE).log_partition(ONE.double(), 1.0), ValueError, "use measure.to"),
        (lambda: VonMisesFisher(ONE[0] / 2**0.5, 1.0).tilted_mean(torch.ones(1, 3), 1.0), ValueError, "m, 2"),
        (lambda: quadrature.circle(1), ValueError, "at least 2"),
        (lambda: quadrature.circle(2.5), TypeError, "integer"),
        (lambda: quadrature.circle(8, lambda theta: 1.0), TypeError, r"density\(x\) is a float"),
        (lambda: quadrature.fibonacci(8, lambda x: -x[:, 0]), ValueError, r"density\(x\) has values from"),
    ],
)
def test_errors_name_what_is_wrong(call, error, words):
    with pytest.raises(error, match=words):
        call()
