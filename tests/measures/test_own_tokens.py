"""Laws of each query's own: few tokens, or the moments of what it sees, against loops over queries."""

import math

import pytest
import torch

from attn_flow.measures import Cloud, Gaussian, Mixture, OwnTokens, SeenGaussian


@pytest.fixture
def own(generator) -> tuple[OwnTokens, torch.Tensor]:
    x = torch.randn(5, 3, 4, generator=generator, dtype=torch.float64)
    weights = torch.rand(5, 3, generator=generator, dtype=torch.float64) + 0.1
    weights[0, 0] = 0.0
    return OwnTokens(x, weights), torch.randn(5, 4, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize("beta", [0.5, 3.0, math.inf])
def test_own_tokens_mean_is_the_gradient_of_the_log_partition(own, beta):
    mu, g = own
    g.requires_grad_()
    (gradient,) = torch.autograd.grad(mu.log_partition(g, beta).sum(), g)
    assert torch.allclose(gradient, mu.tilted_mean(g, beta), atol=1e-12)


def test_own_tokens_are_weighted_sums_query_by_query(own):
    mu, g = own
    beta = 1.7
    for i in range(5):
        Z, numerator = 0.0, torch.zeros(4, dtype=torch.float64)
        for j in range(3):
            e = float(mu.weights[i, j]) * math.exp(beta * float(g[i] @ mu.x[i, j]))
            Z, numerator = Z + e, numerator + e * mu.x[i, j]
        assert float(mu.log_partition(g, beta)[i]) == pytest.approx(math.log(Z) / beta, rel=1e-12)
        assert torch.allclose(mu.tilted_mean(g, beta)[i], numerator / Z, atol=1e-12)


def test_a_query_without_tokens_has_no_mass_and_no_nan():
    mu = OwnTokens(torch.ones(2, 1, 3), torch.tensor([[0.0], [1.0]]))
    g = torch.ones(2, 3)
    assert mu.log_partition(g, 1.0).tolist() == [-math.inf, 3.0]
    assert bool(torch.isfinite(mu.tilted_mean(g, 1.0)).all())
    both = Mixture([mu, OwnTokens(torch.zeros(2, 1, 3), torch.ones(2, 1))], torch.ones(2))
    assert torch.allclose(both.tilted_mean(g, 1.0)[0], torch.zeros(3))


def test_own_tokens_say_which_shapes_do_not_fit():
    with pytest.raises(ValueError, match=r"weights have shape \(2, 3\), expected \(..., n, w\)"):
        OwnTokens(torch.zeros(2, 4, 5), torch.ones(2, 3))


@pytest.mark.parametrize("cap", [math.inf, 1.5])
def test_seen_gaussian_that_sees_all_is_the_gaussian_with_its_mass(generator, cap):
    x = torch.randn(20, 4, generator=generator, dtype=torch.float64)
    g = torch.randn(7, 4, generator=generator, dtype=torch.float64)
    whole = Gaussian.fit(Cloud(x), shrinkage=0.0, cap=cap)
    seen = SeenGaussian(x, torch.ones(7, 20, dtype=torch.float64), cap)
    for beta in (0.3, 2.0):
        assert torch.allclose(seen.tilted_mean(g, beta), whole.tilted_mean(g, beta), atol=1e-12)
        expected = whole.log_partition(g, beta) + math.log(20) / beta
        assert torch.allclose(seen.log_partition(g, beta), expected, atol=1e-12)


def test_seen_gaussian_sees_each_querys_own_tokens_only(generator):
    x = torch.randn(6, 3, generator=generator, dtype=torch.float64)
    past = torch.ones(6, 6, dtype=torch.float64).tril()
    g = torch.randn(6, 3, generator=generator, dtype=torch.float64)
    seen = SeenGaussian(x, past, 2.0)
    for i in range(6):
        prefix = SeenGaussian(x[: i + 1], torch.ones(1, i + 1, dtype=torch.float64), 2.0)
        assert torch.allclose(seen.tilted_mean(g, 0.8)[i], prefix.tilted_mean(g[i : i + 1], 0.8)[0], atol=1e-12)


def test_a_float32_law_of_low_rank_may_be_widened(generator):
    """Checked in float32; as float64 its rounding would look like asymmetry."""
    x = torch.randn(3, 40, generator=generator)
    law = Gaussian.fit(Cloud(x), shrinkage=0.0)
    assert law.to(torch.float64).cov.dtype == torch.float64
