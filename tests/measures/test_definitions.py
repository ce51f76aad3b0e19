"""Each law against its definition written out, at both sides of every branch; and what is refused, at its edge."""

import math
from collections.abc import Callable

import mpmath
import numpy as np
import pytest
import torch
from scipy.integrate import quad
from scipy.special import ndtri
from tolerances import rounding
from torch import Tensor

from attn_flow import Cloud, EllipsoidSupport, Gaussian, Mixture, UniformSphere, VonMisesFisher
from attn_flow.measures import LogitLaw, OwnTokens, SeenGaussian, quadrature
from attn_flow.measures.elliptic import shrunk
from attn_flow.measures.sphere import length

F64 = torch.float64
EPS = torch.finfo(F64).eps


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=F64)


def covariances(*batch: int, d: int = 3, seed: int = 0) -> Tensor:
    A = drawn(*batch, d, d, seed=seed)
    return A @ A.mT / d + 0.1 * torch.eye(d, dtype=F64)


# --- clouds -------------------------------------------------------------------------------------------------------


def test_the_logarithm_of_a_weight_that_underflows_beside_the_largest() -> None:
    """1e-300 beside 1e300 is 0 as a share, and has a logarithm; a weight of 0 has none."""
    w = torch.tensor([[1e300, 1e-300, 0.0, 5e299], [1.0, 2.0, 0.0, 4.0]], dtype=F64)
    found = Cloud(drawn(2, 4, 3), w).log_weights
    assert found is not None
    for row, exact in zip(found.tolist(), w.tolist()):
        total = mpmath.log(mpmath.fsum(exact))
        expected = [float(mpmath.log(v) - total) if v > 0 else -math.inf for v in exact]
        assert row == pytest.approx(expected, rel=1e-14)


# --- ellipses -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [2, 3])
def test_two_tokens_are_a_bulk_and_fewer_are_none(n: int) -> None:
    mean, S = torch.zeros(3, dtype=F64), torch.eye(3, dtype=F64)
    assert Gaussian.bulk(mean, S, n).cap == pytest.approx(math.sqrt(2 * math.log(n)), rel=1e-15)
    with pytest.raises(ValueError, match=r"n = 1.9, expected at least 2 tokens in the bulk"):
        Gaussian.bulk(mean, S, 1.9)


@pytest.mark.parametrize("beta", [0.0, 0.3, 4.0, math.inf])
def test_laws_of_logits_are_their_sums(beta: float) -> None:
    """In a batch (2, 4) of laws: beta L = beta <g,m> + log mean_r e^{s t_r}, t counted from its mean."""
    mean, S, t, g = drawn(2, 4, 3, seed=1), covariances(2, 4), 1 + drawn(2, 4, 5, seed=2), drawn(2, 4, 6, 3, seed=3)
    law = LogitLaw(mean, S, t)
    L, m = law.log_partition(g, beta), law.tilted_mean(g, beta)
    assert L.shape == (2, 4, 6)
    for i in np.ndindex(2, 4, 6):
        at, query = i[:2], g[i]
        deviation = float((query @ S[at] @ query).sqrt())
        atoms = (deviation * (t[at] - t[at].mean())).tolist()
        axis = S[at] @ query / deviation
        if beta == 0:
            value, pull = 0.0, 0.0
        elif math.isinf(beta):
            value = max(atoms)
            pull = value / deviation
        else:
            shares = [math.exp(beta * a) for a in atoms]
            value = math.log(math.fsum(shares) / 5) / beta
            pull = math.fsum(a * e for a, e in zip(atoms, shares)) / math.fsum(shares) / deviation
        assert float(L[i]) == pytest.approx(float(query @ mean[at]) + value, rel=1e-12, abs=1e-13)
        torch.testing.assert_close(m[i], mean[at] + pull * axis, rtol=0, atol=rounding(m, 100))


def test_laws_of_logits_refuse_what_is_no_list_of_logits() -> None:
    mean, S = torch.zeros(3, dtype=F64), torch.eye(3, dtype=F64)
    for t in (torch.tensor(1.0, dtype=F64), torch.zeros(0, dtype=F64)):
        with pytest.raises(
            ValueError, match=r"t has shape .*, expected \(..., r\) with one standardised logit or more"
        ):
            LogitLaw(mean, S, t)
    assert LogitLaw(mean, S, torch.ones(2, dtype=F64)).to(torch.float32).t.dtype == torch.float32


def test_moments_of_another_width_are_refused_also_in_a_batch() -> None:
    for mean, S in ((torch.zeros(3), torch.eye(2)), (torch.zeros(2, 4, 3), torch.eye(2).expand(2, 4, 2, 2))):
        with pytest.raises(ValueError, match=r"cov has shape .*, expected \(..., d, d\) to match a mean of shape"):
            Gaussian(mean, S)


def test_the_rank_of_an_ellipsoid() -> None:
    """Of a batch the largest; of a point 1; as given; and m_beta at small beta is m + beta rho^2 S g / rank."""
    flat = torch.diag(torch.tensor([1.0, 2.0, 0.0], dtype=F64))
    point = torch.zeros(3, 3, dtype=F64)
    mean = torch.zeros(3, dtype=F64)
    assert EllipsoidSupport(mean.expand(3, 3), torch.stack([point, flat, flat / 2]), 1.0).rank == 2
    assert EllipsoidSupport(mean, point, 1.0).rank == 1
    assert EllipsoidSupport.fit(Cloud(drawn(1, 3))).rank == 1
    g, beta, rho = drawn(4, 3), 1e-7, 1.5
    for rank in (None, 2, 3):
        law = EllipsoidSupport(mean, flat, rho, rank)
        slope = law.tilted_mean(g, beta) / beta
        torch.testing.assert_close(slope, rho**2 / (rank or 2) * g @ flat, rtol=1e-9, atol=1e-9)
    assert EllipsoidSupport.fit(Cloud(drawn(9, 3)), rho=2.5).rho == 2.5
    assert EllipsoidSupport.fit(Cloud(drawn(9, 3))).rho == math.sqrt(3)


def test_a_query_without_spread_is_answered_by_the_mean() -> None:
    flat, mean = torch.diag(torch.tensor([1.0, 2.0, 0.0], dtype=F64)), drawn(3)
    g = torch.tensor([[0.0, 0.0, 3.0]], dtype=F64)
    laws = (Gaussian(mean, flat, 2.0), LogitLaw(mean, flat, drawn(4)), EllipsoidSupport(mean, flat, 1.0))
    for law in laws:
        for beta in (0.0, 2.0, math.inf):
            assert torch.equal(law.tilted_mean(g, beta), mean[None])
            assert float(law.log_partition(g, beta)) == pytest.approx(float(g @ mean), rel=1e-15)


def test_shrinkage_of_weighted_clouds_and_of_a_point() -> None:
    """Ledoit and Wolf's share with n = 1/sum w^2, in a batch: the sums written out."""
    d, n = 6, 5
    x, w = drawn(2, n, d, seed=3), (0.3 * drawn(2, n, seed=4)).exp()
    x[..., 0] = 4 * torch.tensor([1.0, -1.0, 1.0, -1.0, 1.0], dtype=F64)  # one axis leads
    cloud = Cloud(x, w)
    mean, S = cloud.moments()
    found = shrunk(S, cloud)
    for b in range(2):
        p = w[b] / w[b].sum()
        scale = S[b].trace() / d
        distance = (S[b] - scale * torch.eye(d, dtype=F64)).square().sum()
        off = [torch.outer(x[b, j] - mean[b], x[b, j] - mean[b]) - S[b] for j in range(n)]
        noise = sum(p[j] * off[j].square().sum() for j in range(n)) * p.square().sum()
        a = float(min(noise, distance) / distance)
        assert 0 < a < 1
        torch.testing.assert_close(found[b], (1 - a) * S[b] + a * scale * torch.eye(d, dtype=F64), rtol=0, atol=1e-13)
    assert torch.equal(Gaussian.fit(Cloud(drawn(1, d))).cov, torch.zeros(d, d, dtype=F64))
    given = Gaussian.fit(Cloud(x[0], w[0]), shrinkage=0.25, cap=2.0)
    torch.testing.assert_close(given.cov, 0.75 * S[0] + 0.25 * S[0].trace() / d * torch.eye(d, dtype=F64))
    assert given.cap == 2.0


# --- mixtures -----------------------------------------------------------------------------------------------------


def test_a_mixture_names_six_components() -> None:
    named = lambda k: repr(Mixture([UniformSphere(2)] * k, torch.ones(k)))
    for k in (1, 3, 6):
        names = ", ".join(["UniformSphere"] * k)
        assert named(k) == f"Mixture({k} components: {names}; weights=float32 ({k},))"
    names = ", ".join(["UniformSphere"] * 6)
    assert named(7) == f"Mixture(7 components: {names}, ...; weights=float32 (7,))"


@pytest.mark.parametrize(
    ("components", "weights", "message"),
    [
        ([], torch.ones(0), "expected one weight per component and at least one component"),
        ([UniformSphere(2)], torch.ones(2), r"weights have shape \(2,\) for 1 components"),
        ([UniformSphere(2), 3.0], torch.ones(2), "components hold a float, expected measures"),
        ({1, 2}, torch.ones(2), "components is a set, expected a list of measures"),
    ],
)
def test_what_is_no_mixture(components: object, weights: Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Mixture(components, weights)  # type: ignore[arg-type]


# --- each query's own ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("beta", [0.0, 1.7, math.inf])
def test_own_tokens_are_their_sums_at_any_temperature(beta: float) -> None:
    """In a batch (2, 3) of 5 queries with 4 tokens each, some of weight 0 and two of them the same."""
    x, w, g = drawn(2, 3, 5, 4, 2, seed=1), drawn(2, 3, 5, 4, seed=2).exp(), drawn(2, 3, 5, 2, seed=3)
    x[..., 1, :] = x[..., 0, :]
    x[0, :, :, :2] *= 3  # often the largest: a tie
    x[..., 3, :] *= 9
    w[..., 3] = 0.0  # larger still, and not there
    mu = OwnTokens(x, w)
    L, m = mu.log_partition(g, beta), mu.tilted_mean(g, beta)
    assert m.shape == g.shape
    for i in np.ndindex(2, 3, 5):
        scores = [float(g[i] @ x[i][j]) for j in range(3)]
        mass = w[i][:3].tolist()
        if beta == 0:
            value, share = math.fsum(a * s for a, s in zip(mass, scores)) / math.fsum(mass), mass
        elif math.isinf(beta):
            value = max(scores)
            share = [a if s >= value - 1e-12 else 0.0 for a, s in zip(mass, scores)]
        else:
            share = [a * math.exp(beta * s) for a, s in zip(mass, scores)]
            value = math.log(math.fsum(share)) / beta
        assert float(L[i]) == pytest.approx(value, rel=1e-12, abs=1e-12)
        mean = sum(share[j] / math.fsum(share) * x[i][j] for j in range(3))
        torch.testing.assert_close(m[i], mean, rtol=0, atol=rounding(x, 100))


def test_own_tokens_need_an_axis_of_their_own() -> None:
    with pytest.raises(ValueError, match=r"expected \(..., n, w, d\)"):
        OwnTokens(torch.zeros(2, 3), torch.ones(2))
    with pytest.raises(ValueError, match=r"weights have shape \(3, 4\), expected \(..., n, w\)"):
        OwnTokens(torch.zeros(6, 3, 5, 2), torch.ones(3, 4))
    assert OwnTokens(torch.zeros(6, 3, 5, 2), torch.ones(3, 5)).to(F64).weights.dtype == F64


@pytest.mark.parametrize("cap", [math.inf, 1.2])
def test_seen_gaussians_are_their_moments(cap: float) -> None:
    """In a batch, seen by weights of any total: mean and covariance written out, the pull saturated beyond cap."""
    x, sees, g = drawn(2, 7, 3, seed=1), 0.05 * drawn(2, 5, 7, seed=2).exp(), drawn(2, 5, 3, seed=3)
    seen = SeenGaussian(x, sees, cap)
    sides = set()
    for beta in (0.2, 3.0):
        L, m = seen.log_partition(g, beta), seen.tilted_mean(g, beta)
        for b, i in np.ndindex(2, 5):
            mass = float(sees[b, i].sum())
            p = sees[b, i] / sees[b, i].sum()
            mean = p @ x[b]
            S = sum(p[j] * torch.outer(x[b, j] - mean, x[b, j] - mean) for j in range(7))
            s = beta * float((g[b, i] @ S @ g[b, i]).sqrt())
            H = s**2 / 2 if s < cap else s * cap - cap**2 / 2
            sides.add(s < cap)
            assert float(L[b, i]) == pytest.approx(
                float(g[b, i] @ mean) + (H + math.log(mass)) / beta, rel=1e-12, abs=1e-12
            )
            pull = beta if s < cap else cap / (s / beta)
            torch.testing.assert_close(m[b, i], mean + pull * (S @ g[b, i]), rtol=0, atol=rounding(m, 100))
    assert sides == ({True, False} if cap < math.inf else {True})


def test_a_query_that_sees_nothing_has_no_mass_and_no_nan() -> None:
    x, sees, g = drawn(4, 3), torch.zeros(2, 4, dtype=F64), drawn(2, 3, seed=1)
    sees[1, 2] = 1.0
    for cap in (math.inf, 2.0):
        law = SeenGaussian(x, sees, cap)
        assert float(law.log_partition(g, 1.5)[0]) == -math.inf
        torch.testing.assert_close(law.tilted_mean(g, 1.5), torch.stack([torch.zeros(3, dtype=F64), x[2]]))
        assert law.to(torch.float32).sees.dtype == torch.float32
        assert law.to(torch.float32).cap == cap


# --- nodes --------------------------------------------------------------------------------------------------------


def test_nodes_of_a_circle_are_where_they_are_said_to_be() -> None:
    n = 6  # even, and no multiple of 4
    lattice, graded = quadrature.circle(n), quadrature.circle(n, towards=0.4)
    for i in range(n):
        theta = 2 * math.pi * (i + 0.5) / n
        assert lattice.x[i].tolist() == pytest.approx([math.cos(theta), math.sin(theta)], abs=1e-15)
        u = 18.0 * (2 * (i % 3 + 0.5) / 3 - 1)
        phi = 2 * math.atan(math.exp(u)) * (1 if i < 3 else -1)
        assert graded.x[i].tolist() == pytest.approx([math.cos(0.4 + phi), math.sin(0.4 + phi)], abs=1e-14)
    masses = [1 / math.cosh(18.0 * (2 * (i + 0.5) / 3 - 1)) for i in range(3)] * 2
    assert graded.weights.tolist() == pytest.approx([m / math.fsum(masses) for m in masses], rel=1e-13)
    assert lattice.weights.tolist() == pytest.approx([1 / n] * n, rel=1e-15)


def test_nodes_of_fibonacci_are_where_they_are_said_to_be() -> None:
    n, cloud = 9, quadrature.fibonacci(9)
    for i in range(n):
        z = 1 - (2 * i + 1) / n
        phi, r = math.pi * (3 - math.sqrt(5)) * (i + 0.5), math.sqrt(1 - z**2)
        assert cloud.x[i].tolist() == pytest.approx([r * math.cos(phi), r * math.sin(phi), z], abs=1e-14)
    assert cloud.weights.tolist() == pytest.approx([1 / n] * n, rel=1e-15)


def around(n: int, d: int) -> np.ndarray:
    """Nodes of equal weight on the sphere of R^d: a lattice, Fibonacci's, or Sobol's and their antipodes."""
    if d == 2:
        return quadrature.circle(n).x.numpy()
    if d == 3:
        return quadrature.fibonacci(n).x.numpy()
    half = -(-n // 2)
    x = ndtri(torch.quasirandom.SobolEngine(d).draw(half + 2, dtype=F64)[2:].numpy())  # not the corner and the centre
    x /= np.linalg.norm(x, axis=1, keepdims=True)
    return np.concatenate([x, -x])[:n]


@pytest.mark.parametrize("d", [3, 4, 5, 6])
@pytest.mark.parametrize("sign", [1, -1])
def test_graded_nodes_are_rings_turned_by_the_golden_angle(d: int, sign: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Up to the rotation that takes the first coordinate to the axis: heights, all angles between nodes, weights."""
    n, across, asked = 4, 5, []
    axis = drawn(d, seed=d)
    axis = sign * axis.sign()[0] * axis
    plain = quadrature.memory.require_tensor
    monkeypatch.setattr(quadrature.memory, "require_tensor", lambda *a, **k: (asked.append(a), plain(*a, **k)))
    cloud = quadrature.graded(n, across, 3 * axis)
    assert asked[0] == (cloud.x.numel(),)
    side, nodes, weights = around(across, d - 1), [], []
    for i in range(n):
        u = 18.0 * (2 * (i + 0.5) / n - 1)
        turn = math.pi * (math.sqrt(5) - 1) * i
        for k in range(across):
            a, b = side[k, :2]
            ring = [math.cos(turn) * a - math.sin(turn) * b, math.sin(turn) * a + math.cos(turn) * b, *side[k, 2:]]
            nodes.append([-math.tanh(u), *(np.array(ring) / math.cosh(u))])
            weights.append(math.cosh(u) ** -(d - 1))
    expected = np.array(nodes)
    np.testing.assert_allclose(cloud.x @ (axis / axis.norm()), expected[:, 0], atol=1e-14)
    np.testing.assert_allclose(cloud.x @ cloud.x.mT, expected @ expected.T, atol=1e-13)
    assert cloud.weights.tolist() == pytest.approx((np.array(weights) / math.fsum(weights)).tolist(), rel=1e-12)


@pytest.mark.parametrize("axis", [torch.ones(2), torch.ones(3, 3), torch.zeros(3), torch.full((3,), math.inf)])
def test_what_is_no_axis(axis: Tensor) -> None:
    with pytest.raises(ValueError, match=r"axis has shape .*, expected a direction \(d,\) with d >= 3"):
        quadrature.graded(4, 4, axis)


def spoilt(value: float) -> Callable[[Tensor], Tensor]:
    """A density that is 1 but at one node."""
    return lambda theta: torch.where(theta == theta.flatten()[0], value, 1.0)


@pytest.mark.parametrize("value", [math.nan, math.inf, -1e-9])
def test_one_bad_value_of_a_density_is_enough(value: float) -> None:
    with pytest.raises(ValueError, match=r"density must be finite and nonnegative, with some mass"):
        quadrature.circle(8, spoilt(value))
    with pytest.raises(ValueError, match=r"with some mass"):
        quadrature.circle(8, torch.zeros_like)
    assert float(quadrature.circle(8, spoilt(0.0)).weights[0]) == 0.0
    with pytest.raises(ValueError, match="expected an angle and an even number of nodes"):
        quadrature.circle(8, towards=value if not math.isfinite(value) else math.inf)


# --- spheres and the law of von Mises and Fisher ------------------------------------------------------------------


@pytest.mark.parametrize("law", [UniformSphere(3, 2.0), VonMisesFisher(torch.tensor([0.0, 0.6, 0.8], dtype=F64), 0.0)])
def test_no_direction_no_pull(law: UniformSphere | VonMisesFisher) -> None:
    zero = torch.zeros(1, 3, dtype=F64)
    for beta in (0.0, 2.0, math.inf):
        assert torch.equal(law.tilted_mean(zero, beta), zero)
        assert float(law.log_partition(zero, beta)) == 0.0


@pytest.mark.parametrize("kappa", [0.0, 1e-3, 0.7, 40.0, 1e6])
@pytest.mark.parametrize("beta", [1e-9, 1e-3, 0.3, 20.0, 3e5])
def test_the_log_partition_of_von_mises_and_fisher_to_its_digits(kappa: float, beta: float) -> None:
    """In d = 3, I(z) = sinh(z)/z: with 60 digits, where float64 would cancel those of log I(|z|) - log I(kappa)."""
    mean = torch.tensor([0.0, 0.6, 0.8], dtype=F64)
    g = torch.tensor([[0.3, -0.2, 0.9], [0.1, 0.5, -0.4], [2.0, -1.0, 0.0]], dtype=F64)
    found = VonMisesFisher(mean, kappa).log_partition(g, beta)
    with mpmath.workdps(60):
        log_i = lambda z: mpmath.log(mpmath.sinh(z) / z) if z > 0 else mpmath.mpf(0)
        for i in range(3):
            along = mpmath.fsum(mpmath.mpf(float(m)) * float(q) for m, q in zip(mean, g[i]))
            square = mpmath.fsum(mpmath.mpf(float(q)) ** 2 for q in g[i])
            b, k = mpmath.mpf(beta), mpmath.mpf(kappa)
            size = mpmath.sqrt(k**2 + 2 * k * b * along + b**2 * square)  # |kappa mean + beta g|, of a unit mean
            exact = (log_i(size) - log_i(k)) / b
            assert float(found[i]) == pytest.approx(float(exact), rel=1e-11, abs=20 * EPS * float(g[i].norm()))


def test_unit_vectors_are_such_to_four_roots_of_rounding() -> None:
    mu = VonMisesFisher(torch.tensor([0.6, 0.8], dtype=F64), 2.0)
    for off in (3 * EPS**0.5, -3 * EPS**0.5):
        VonMisesFisher((1 + off) * mu.mean, 1.0)
        mu.density((1 + off) * mu.mean)
    for off in (5 * EPS**0.5, -5 * EPS**0.5):
        with pytest.raises(ValueError, match="expected unit vectors"):
            VonMisesFisher((1 + off) * mu.mean, 1.0)
        with pytest.raises(ValueError, match="no unit vectors"):
            mu.density((1 + off) * mu.mean)
    both = torch.stack([mu.mean, 2 * mu.mean])
    with pytest.raises(ValueError, match="mean has norms from 1 to 2"):
        VonMisesFisher(both, 1.0)
    with pytest.raises(ValueError, match="no unit vectors"):
        mu.density(both)
    with pytest.raises(ValueError, match=r"y has shape \(3,\), expected \(..., 2\) unit vectors"):
        mu.density(torch.ones(3, dtype=F64))


@pytest.mark.parametrize("mean", [torch.tensor(1.0), torch.zeros(2, 0)])
def test_a_direction_has_coordinates(mean: Tensor) -> None:
    with pytest.raises(ValueError, match=r"mean has shape .*, expected \(..., d\)"):
        VonMisesFisher(mean, 1.0)


def test_what_can_be_sampled() -> None:
    mu = VonMisesFisher(torch.tensor([0.6, 0.8], dtype=F64), 1e9)
    assert mu.sample(2, generator=torch.Generator().manual_seed(0)).shape == (2, 2)
    with pytest.raises(ValueError, match=r"kappa = 1.1e\+09, expected at most 1e\+09 to sample from"):
        VonMisesFisher(mu.mean, 1.1e9).sample(2)
    for n in (0, 2.0):
        with pytest.raises(ValueError, match="expected at least one token, a whole number"):
            mu.sample(n)  # type: ignore[arg-type]
    batch = VonMisesFisher(torch.stack([mu.mean, -mu.mean]).expand(3, 2, 2), 1e4)
    y = batch.sample(7, generator=torch.Generator().manual_seed(0))
    assert y.shape == (3, 2, 7, 2)
    assert float((y @ mu.mean)[:, 0].min()) > 0.99 > -0.99 > float((y @ mu.mean)[:, 1].max())


@pytest.mark.parametrize("d", [2, 3, 6])
@pytest.mark.parametrize("kappa", [0.0, 0.8, 12.0])
def test_samples_have_its_law_and_take_one_round_of_proposals(d: int, kappa: float) -> None:
    """<mean, y> has the density (1 - s^2)^{(d-3)/2} e^{kappa s}: Kolmogorov's distance of 4000 draws is below
    1.95/sqrt(4000) but for one seed of a thousand. Wood's proposals are taken more often than one time in two."""
    mean = torch.zeros(d, dtype=F64)
    mean[-1] = 1.0
    n, generator = 4000, torch.Generator().manual_seed(1)
    drop = VonMisesFisher(mean, kappa)._drop(n, generator)
    after, once = generator.get_state(), torch.Generator().manual_seed(1)
    torch.randn(2 * n + 16, d, generator=once, dtype=F64)
    torch.rand(2 * n + 16, generator=once, dtype=F64)
    assert torch.equal(after, once.get_state())
    # s = cos(a): the density of a is sin^{d-2}(a) e^{kappa cos a}
    weight = lambda a: math.sin(a) ** (d - 2) * math.exp(kappa * (math.cos(a) - 1))
    ordered = torch.acos(1 - drop).sort().values
    total = quad(weight, 0, math.pi)[0]
    for share in (0.02, 0.1, 0.25, 0.5, 0.75, 0.9, 0.98):
        below = quad(weight, 0, float(ordered[int(share * n)]))[0] / total
        assert below == pytest.approx(share, abs=1.95 / math.sqrt(n))


def test_betas_that_cannot_be_looked_at_are_warm() -> None:
    """Under vmap nobody reads whether a beta is 0 or inf."""
    law, g = Gaussian(drawn(3), covariances()), drawn(4, 3, seed=1)
    betas = torch.tensor([0.5, 2.0, 7.0], dtype=F64)
    found = torch.func.vmap(lambda b: law.tilted_mean(g, b))(betas)
    torch.testing.assert_close(found, torch.stack([law.tilted_mean(g, float(b)) for b in betas]))


@pytest.mark.parametrize("scale", [1.0, 1e200, 1e-200])
def test_lengths_of_queries_of_any_size(scale: float) -> None:
    """3, 4 and 12 make 13, beside entries that are nothing beside them."""
    g = torch.tensor([[3.0, 4.0, 12.0, 1e-200], [0.0, 0.0, 0.0, 0.0]], dtype=F64) * scale
    torch.testing.assert_close(length(g), torch.tensor([13.0, 0.0], dtype=F64) * scale, rtol=1e-15, atol=0.0)
