"""Every measure's log-partition and its gradient: loops, closed forms, sampling, and float32 against float64."""

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from attn_flow import Cloud, EllipsoidSupport, Gaussian, Mixture, Sphere, UniformSphere, VonMisesFisher
from attn_flow.measures import LogitLaw, Measure
from attn_flow.measures.elliptic import shrunk

F64 = torch.float64
D = 3
BETAS = (0.0, 1e-12, 1e-6, 1e-3, 0.5, 1.0, 7.0, 60.0, 300.0, 1e4, 1e6, math.inf)


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=F64)


def cov(seed: int = 0) -> Tensor:
    A = drawn(D, D, seed=seed)
    return A @ A.T / D + 0.1 * torch.eye(D, dtype=F64)


def flat_cov() -> Tensor:
    """Rank 2."""
    A = drawn(D, D - 1, seed=9)
    return A @ A.T


weights = torch.tensor([0.5, 2.0, 1.0, 0.0, 3.0, 1.0, 0.2], dtype=F64)
mask = torch.tensor([True, True, False, True, True, True, True])
MEASURES: dict[str, Measure] = {
    "cloud": Cloud(drawn(7, D, seed=1)),
    "weighted": Cloud(drawn(7, D, seed=1), weights),
    "masked": Cloud(drawn(7, D, seed=1), None, mask),
    "weighted and masked": Cloud(drawn(7, D, seed=1), weights, mask),
    "one token": Cloud(drawn(1, D, seed=1)),
    "sphere": UniformSphere(D),
    "sphere of radius 2": UniformSphere(D, 2.0),
    "von Mises-Fisher": VonMisesFisher(torch.tensor([0.6, 0.0, -0.8], dtype=F64), 3.0),
    "sharp von Mises-Fisher": VonMisesFisher(torch.tensor([0.6, 0.0, -0.8], dtype=F64), 30.0),
    "gaussian": Gaussian(drawn(D, seed=2), cov()),
    "bulk": Gaussian.bulk(drawn(D, seed=2), cov(), 50),
    "logit law": LogitLaw(drawn(D, seed=2), cov(), drawn(6, seed=5)),
    "ellipsoid": EllipsoidSupport(drawn(D, seed=2), cov(), 1.7),
    "flat ellipsoid": EllipsoidSupport(drawn(D, seed=2), flat_cov(), 1.7),
    "mixture": Mixture(
        [
            Cloud(drawn(2, D, seed=3)),
            Gaussian.bulk(drawn(D, seed=4), cov(1), 20),
            UniformSphere(D),
            EllipsoidSupport(drawn(D, seed=2), cov(), 0.5),
        ],
        torch.tensor([1.0, 5.0, 2.0, 1.0], dtype=F64),
    ),
    "mixture with an empty component": Mixture(
        [Cloud(5 * drawn(2, D, seed=3)), UniformSphere(D)], torch.tensor([0.0, 1.0], dtype=F64)
    ),
}
every_measure = pytest.mark.parametrize("mu", MEASURES.values(), ids=MEASURES)
directions = torch.cat([drawn(6, D, seed=11), 1e-3 * drawn(2, D, seed=12)])


def exists(mu: Measure, beta: float) -> bool:
    """All but the zero-temperature limit of an unbounded support."""
    return not (isinstance(mu, Gaussian) and math.isinf(mu.cap) and math.isinf(beta))


every_measure_and_beta = pytest.mark.parametrize(
    ("name", "beta"), [(name, beta) for name, mu in MEASURES.items() for beta in BETAS if exists(mu, beta)]
)


# --- the law of all of them ---------------------------------------------------------------------------------------


@every_measure_and_beta
def test_the_tilted_mean_is_the_gradient_of_the_log_partition(name: str, beta: float) -> None:
    mu, g = MEASURES[name], directions.clone().requires_grad_()
    L = mu.log_partition(g, beta)
    (gradient,) = torch.autograd.grad(L.sum(), g) if L.requires_grad else (torch.zeros_like(g),)
    m = mu.tilted_mean(g.detach(), beta)
    assert L.shape == g.shape[:-1]
    assert m.shape == g.shape
    scale = m.norm(dim=-1, keepdim=True).clamp_min(1.0)
    assert float(((gradient - m) / scale).abs().max()) < 1e-9


@every_measure
@pytest.mark.parametrize("beta", BETAS[:-1])  # at inf, ties of float32 scores are ties
def test_float32_agrees_with_float64_on_the_same_inputs(mu: Measure, beta: float) -> None:
    single = mu.to(torch.float32)
    g = directions.float()
    for name in ("log_partition", "tilted_mean"):
        value = getattr(single, name)(g, beta)
        exact = getattr(single.to(F64), name)(g.double(), beta)
        assert value.dtype == torch.float32
        assert bool(torch.isfinite(value).all())
        value, exact = (z if name == "tilted_mean" else z[:, None] for z in (value.double(), exact))
        error = (value - exact).norm(dim=-1) / exact.norm(dim=-1).clamp_min(1e-3)
        assert float(error.max()) < 1e-5


@every_measure
def test_the_log_partition_rises_from_the_mean_to_the_support_function(mu: Measure) -> None:
    """L_beta is nondecreasing in beta, from <g, mean> to max <g, y>, and convex in g; small beta joins beta = 0."""
    betas = [b for b in BETAS if exists(mu, b)]
    L = torch.stack([mu.log_partition(directions, b) for b in betas])
    assert bool((L.diff(dim=0) >= -1e-12).all())
    torch.testing.assert_close(L[1], L[0], rtol=0, atol=1e-10)
    torch.testing.assert_close(L[-2], L[-1], rtol=1e-4, atol=1e-4) if exists(mu, math.inf) else None
    g, f = directions, directions.flip(0)
    middle = mu.log_partition((g + f) / 2, 7.0)
    assert bool((middle <= (mu.log_partition(g, 7.0) + mu.log_partition(f, 7.0)) / 2 + 1e-12).all())


@every_measure
def test_beta_broadcasts_entry_by_entry(mu: Measure) -> None:
    """One call with a tensor of betas, 0 and inf among them, is the calls with its entries."""
    betas = [b for b in (0.0, 2.0, math.inf, 40.0) if exists(mu, b)]
    together = torch.tensor(betas, dtype=F64)[:, None]  # (betas, 1) against (m,)
    for call in (mu.log_partition, mu.tilted_mean):
        value = call(directions, together)
        torch.testing.assert_close(value, torch.stack([call(directions, b) for b in betas]))
    per_row = torch.tensor([betas[i % len(betas)] for i in range(len(directions))], dtype=F64)
    rows = torch.stack([mu.tilted_mean(g[None], float(b))[0] for g, b in zip(directions, per_row)])
    torch.testing.assert_close(mu.tilted_mean(directions, per_row), rows)


@every_measure
def test_no_nan_at_g_zero(mu: Measure) -> None:
    g = torch.zeros(1, D, dtype=F64, requires_grad=True)
    for beta in (0.0, 3.0, 1e6):
        mean = mu.tilted_mean(g.detach(), beta)
        torch.testing.assert_close(mean, mu.tilted_mean(g.detach(), 0.0), rtol=1e-6, atol=1e-6)
        (gradient,) = torch.autograd.grad(mu.log_partition(g, beta).sum() + 0 * g.sum(), g)
        assert bool(torch.isfinite(gradient).all())


# --- each of them against its definition --------------------------------------------------------------------------


def loop_cloud(cloud: Cloud, g: Tensor, beta: float) -> tuple[float, Tensor]:
    """(1/beta) log sum_j w_j e^{beta <g,x_j>} and its tilted mean, with Python's own sums."""
    n = cloud.x.shape[0]
    w = [1.0 if cloud.weights is None else float(cloud.weights[j]) for j in range(n)]
    w = [0.0 if cloud.mask is not None and not bool(cloud.mask[j]) else w[j] for j in range(n)]
    w = [v / math.fsum(w) for v in w]
    s = [math.fsum(float(a) * float(b) for a, b in zip(g, cloud.x[j])) for j in range(n)]
    if beta == 0:
        share = w
        L = math.fsum(w[j] * s[j] for j in range(n))
    elif math.isinf(beta):
        L = max(s[j] for j in range(n) if w[j] > 0)
        share = [w[j] if s[j] == L else 0.0 for j in range(n)]
    else:
        top = max(s[j] for j in range(n) if w[j] > 0)
        share = [w[j] * math.exp(beta * (s[j] - top)) if w[j] > 0 else 0.0 for j in range(n)]
        L = top + math.log(math.fsum(share)) / beta
    mean = sum(share[j] / math.fsum(share) * cloud.x[j] for j in range(n))
    assert isinstance(mean, Tensor)
    return L, mean


@given(
    seed=st.integers(0, 2**32),
    n=st.integers(1, 9),
    beta=st.sampled_from((0.0, 0.01, 1.0, 30.0, 1e4, math.inf)),
    weighted=st.booleans(),
    masked=st.booleans(),
)
@settings(max_examples=60, deadline=None)
def test_cloud_is_its_loop(seed: int, n: int, beta: float, weighted: bool, masked: bool) -> None:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, D, generator=generator, dtype=F64)
    w = torch.rand(n, generator=generator, dtype=F64) + 0.1 if weighted else None
    keep = torch.arange(n) % 2 == 0 if masked else None
    cloud = Cloud(x, w, keep)
    g = torch.randn(4, D, generator=generator, dtype=F64)
    for i in range(4):
        L, mean = loop_cloud(cloud, g[i], beta)
        assert float(cloud.log_partition(g[i : i + 1], beta)) == pytest.approx(L, rel=1e-11, abs=1e-11)
        torch.testing.assert_close(cloud.tilted_mean(g[i : i + 1], beta)[0], mean, rtol=1e-9, atol=1e-9)


def test_weights_that_another_precision_cannot_hold_keep_their_shares() -> None:
    """1e-300 and 3e-300 are 0 in float32, and 1/4 and 3/4 of a cloud."""
    for size in (1e-300, 1e300):
        cloud = Cloud(torch.eye(2, dtype=torch.float64), size * torch.tensor([1.0, 3.0], dtype=torch.float64))
        assert cloud.to(torch.float32).mean.tolist() == [0.25, 0.75]
        assert cloud.to(torch.float64).mean.tolist() == [0.25, 0.75]


def test_hardmax_ties_are_averaged_by_weight() -> None:
    x = torch.tensor([[1.0, 0.0], [1.0, 1.0], [1.0, -2.0], [-1.0, 0.0]], dtype=F64)
    g = torch.tensor([[1.0, 0.0]], dtype=F64)
    torch.testing.assert_close(Cloud(x).tilted_mean(g, math.inf), x[:3].mean(0, keepdim=True))
    w = torch.tensor([1.0, 3.0, 0.0, 100.0], dtype=F64)
    torch.testing.assert_close(Cloud(x, w).tilted_mean(g, math.inf), torch.tensor([[1.0, 0.75]], dtype=F64))
    tiny = torch.tensor([1e-300, 3e-300, 0.0, 1.0], dtype=F64)  # ties share by ratio, however small they are
    torch.testing.assert_close(Cloud(x, tiny).tilted_mean(g, math.inf), torch.tensor([[1.0, 0.75]], dtype=F64))


@given(seed=st.integers(0, 2**32), beta=st.sampled_from((0.0, 1.0, 50.0, math.inf)))
@settings(max_examples=20, deadline=None)
def test_a_repeated_token_is_an_atom_of_weight_two(seed: int, beta: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    x, g = torch.randn(5, D, generator=generator, dtype=F64), torch.randn(3, D, generator=generator, dtype=F64)
    twice = Cloud(torch.cat([x, x[:1]]))
    once = Cloud(x, torch.tensor([2, 1, 1, 1, 1]))  # whole numbers are weights too
    torch.testing.assert_close(twice.log_partition(g, beta), once.log_partition(g, beta))
    torch.testing.assert_close(twice.tilted_mean(g, beta), once.tilted_mean(g, beta))


def sampled(draw: Callable[[torch.Generator], Tensor], g: Tensor, beta: float) -> Tensor:
    """The tilted mean of a large sample."""
    y = draw(torch.Generator().manual_seed(0))
    share = (beta * g @ y.T).softmax(-1)
    return share @ y


@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0])
def test_closed_forms_against_samples(beta: float) -> None:
    n, g = 200_000, 0.5 * drawn(2, D, seed=5)
    S, m = cov(), drawn(D, seed=2)
    root = torch.linalg.cholesky(S)
    uniform = lambda r: Sphere().uniform(n, D, generator=r, dtype=F64)
    gauss = lambda r: m + torch.randn(n, D, generator=r, dtype=F64) @ root.T
    for mu, draw in (
        (UniformSphere(D, 2.0), lambda r: 2 * uniform(r)),
        (Gaussian(m, S), gauss),
        (EllipsoidSupport(m, S, 1.7), lambda r: m + 1.7 * uniform(r) @ root.T),
    ):
        torch.testing.assert_close(mu.tilted_mean(g, beta), sampled(draw, g, beta), rtol=0, atol=0.02)


def test_langevin_ratio_in_three_dimensions() -> None:
    """A_3(z) = coth z - 1/z, and L = log(sinh(z)/z)/beta."""
    g = torch.tensor([[0.0, 0.3, 0.4]], dtype=F64)
    for beta in (0.2, 3.0, 40.0):
        z = 0.5 * beta
        assert float(UniformSphere(3).tilted_mean(g, beta).norm()) == pytest.approx(1 / math.tanh(z) - 1 / z, rel=1e-12)
        log_partition = math.log(math.sinh(z) / z) / beta
        assert float(UniformSphere(3).log_partition(g, beta)) == pytest.approx(log_partition, rel=1e-12)


def test_gaussian_bulk_is_the_random_energy_model() -> None:
    """beta L = beta<g,m> + s^2/2 below s = sqrt(2 log n), and beta<g,m> + s cap - log n beyond (THEORY 11)."""
    n, m, S, g = 400, drawn(D, seed=2), cov(), drawn(1, D, seed=6)
    deviation = float((g @ S @ g.T).sqrt())
    bulk, cap = Gaussian.bulk(m, S, n), math.sqrt(2 * math.log(n))
    for beta in (0.5 * cap / deviation, 0.99 * cap / deviation, 2 * cap / deviation, 50.0):
        s = beta * deviation
        log_n_less = s**2 / 2 if s < cap else s * cap - math.log(n)
        exact = float(g @ m) + log_n_less / beta
        assert float(bulk.log_partition(g, beta)) == pytest.approx(exact, rel=1e-12)
        pull = beta if s < cap else cap / deviation
        torch.testing.assert_close(bulk.tilted_mean(g, beta), m + pull * g @ S)
    ellipsoid = EllipsoidSupport(m, S, cap)
    torch.testing.assert_close(bulk.tilted_mean(g, math.inf), ellipsoid.tilted_mean(g, math.inf))
    with pytest.raises(ValueError, match=r"Gaussian without cap has no support at beta = inf; use Gaussian.bulk"):
        Gaussian(m, S).tilted_mean(g, math.inf)


def test_ellipsoid_support_function() -> None:
    """m + rho S g / sqrt(g^T S g) at zero temperature: the farthest point along g."""
    m, S, rho = drawn(D, seed=2), cov(), 1.7
    mu = EllipsoidSupport(m, S, rho)
    far = mu.tilted_mean(directions, math.inf)
    inverse = torch.linalg.inv(S)
    size = torch.einsum("id,de,ie->i", far - m, inverse, far - m)
    torch.testing.assert_close(size, torch.full_like(size, rho**2))
    torch.testing.assert_close((directions * far).sum(-1), mu.log_partition(directions, math.inf))
    assert EllipsoidSupport(m, flat_cov(), rho).rank == D - 1


@given(seed=st.integers(0, 2**32), beta=st.sampled_from((0.0, 1e-9, 2.0, 300.0, math.inf)))
@settings(max_examples=20, deadline=None)
def test_a_mixture_of_clouds_is_the_cloud_of_all(seed: int, beta: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    a, b = torch.randn(4, D, generator=generator, dtype=F64), torch.randn(6, D, generator=generator, dtype=F64)
    wa, wb = torch.rand(4, generator=generator, dtype=F64), torch.rand(6, generator=generator, dtype=F64)
    g = torch.randn(3, D, generator=generator, dtype=F64)
    mixture = Mixture([Cloud(a, wa), Cloud(b, wb)], torch.stack([wa.sum(), wb.sum()]))
    everything = Cloud(torch.cat([a, b]), torch.cat([wa, wb]))
    torch.testing.assert_close(mixture.log_partition(g, beta), everything.log_partition(g, beta))
    torch.testing.assert_close(mixture.tilted_mean(g, beta), everything.tilted_mean(g, beta), rtol=1e-6, atol=1e-9)
    shares = mixture.responsibilities(g, beta)
    torch.testing.assert_close(shares.sum(-1), torch.ones_like(shares[:, 0]))


def test_batches_are_loops() -> None:
    x, w = drawn(2, 4, 7, D, seed=1), drawn(2, 4, 7, seed=2).exp()
    keep = drawn(2, 4, 7, seed=3) > -1
    g, beta = drawn(2, 4, 5, D, seed=4), torch.tensor([[1.0], [50.0]], dtype=F64)[..., None]  # (2, 1, 1)
    mean, S = drawn(2, 4, D, seed=5), torch.stack([cov(i) for i in range(8)]).reshape(2, 4, D, D)
    builds: list[Callable[..., Measure]] = [
        lambda i: Cloud(x[i], w[i], keep[i]),
        lambda i: Gaussian(mean[i], S[i], 2.0),
        lambda i: EllipsoidSupport(mean[i], S[i], 2.0),
        lambda i: Mixture([Cloud(x[i]), Gaussian(mean[i], S[i], 2.0)], w[i][..., :2]),
    ]
    for build in builds:
        together = build(...).tilted_mean(g, beta)
        for i in range(2):
            for j in range(4):
                alone = build((i, j)).tilted_mean(g[i, j], float(beta[i]))
                torch.testing.assert_close(together[i, j], alone, rtol=1e-9, atol=1e-9)


# --- fits ---------------------------------------------------------------------------------------------------------


def test_fits_have_the_moments_of_the_cloud() -> None:
    x, w = drawn(50, D, seed=1), drawn(50, seed=2).exp()
    mean = sum(w[j] / w.sum() * x[j] for j in range(50))
    S = sum(w[j] / w.sum() * torch.outer(x[j] - mean, x[j] - mean) for j in range(50))
    for fit in (Gaussian.fit(Cloud(x, w)), EllipsoidSupport.fit(Cloud(x, w))):
        torch.testing.assert_close(fit.mean, mean)
        torch.testing.assert_close(fit.cov, S)
    ellipsoid = EllipsoidSupport.fit(Cloud(x, w))
    # rho = sqrt(rank) makes S its covariance: the slope of the tilted mean at beta = 0.
    g, small = drawn(4, D, seed=3), 1e-6
    slope = (ellipsoid.tilted_mean(g, small) - ellipsoid.mean) / small
    torch.testing.assert_close(slope, g @ S, rtol=1e-5, atol=1e-5)


def test_shrinkage() -> None:
    """With n <= d tokens the covariance is shrunk to full rank by Ledoit and Wolf's amount; never silently beyond."""
    d = 20
    true = torch.diag(torch.linspace(0.2, 3, d, dtype=F64))
    x = drawn(10, d, seed=3) @ true.sqrt()
    cloud = Cloud(x)
    _, S = cloud.moments()
    fitted = Gaussian.fit(cloud).cov
    assert int(torch.linalg.matrix_rank(fitted)) == d
    torch.testing.assert_close(fitted.trace(), S.trace())
    assert float((fitted - true).norm()) < 0.75 * float((S - true).norm())
    # Ledoit and Wolf (2004), lemma 3.2 with their sums written out.
    mu, n = S.trace() / d, 10
    distance = (S - mu * torch.eye(d, dtype=F64)).square().sum() / d
    centred = x - x.mean(0)
    noise = sum((torch.outer(c, c) - S).square().sum() / d for c in centred) / n**2
    a = float(min(noise, distance) / distance)
    torch.testing.assert_close(fitted, (1 - a) * S + a * mu * torch.eye(d, dtype=F64))
    torch.testing.assert_close(shrunk(S, cloud, 0.0), S)
    torch.testing.assert_close(shrunk(S, cloud, 1.0), mu * torch.eye(d, dtype=F64))
    with pytest.raises(ValueError, match=r"shrinkage = 2, expected a number in \[0, 1\]"):
        Gaussian.fit(cloud, shrinkage=2)
