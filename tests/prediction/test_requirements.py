"""What predictions assume; the counter-examples of THEORY 1 to what was once taken for granted."""

import json
import math

import numpy as np
import pytest
import torch
from torch import Tensor

from attn_flow.attention import Attention
from attn_flow.dynamics.particles import flow
from attn_flow.geometry import Sphere
from attn_flow.measures import quadrature
from attn_flow.prediction import LimitMap, limit, phases, zero_temperature_flow
from attn_flow.prediction.hermite import degrees, mode_rates
from attn_flow.prediction.timeline import RoundingWarning, w2_curve
from attn_flow.transport.distances import wasserstein

f64 = torch.float64


def matrix(*rows: list[float]) -> Tensor:
    return torch.tensor(rows, dtype=f64)


def diag(*entries: float) -> Tensor:
    return torch.diag(torch.tensor(entries, dtype=f64))


def rotation(degrees: float) -> Tensor:
    a = math.radians(degrees)
    return matrix([math.cos(a), -math.sin(a)], [math.sin(a), math.cos(a)])


def met(found: tuple) -> dict[str, bool | None]:
    return {need.name: need.met for need in found}


@pytest.mark.parametrize("m", range(1, 9))
def test_degrees_are_those_with_few_modes(m: int) -> None:
    few = [n for n in range(1, 13) if math.comb(m + n - 1, n) <= 120]
    assert list(degrees(m)) == few


# --- Jordan blocks ----------------------------------------------------------------------------------------------


def test_w2_at_a_jordan_block_by_transport() -> None:
    """M = [[1,1],[0,1]]: W2 ~ t^{-1/2} for a law whose crossing masses differ; 1/t for an even one, whose wrong sides
    replace each other: there W2^2 = 2 - 2 E|x_1|."""
    A = Attention.from_matrices(torch.eye(2, dtype=f64), matrix([1, 1], [0, 1]))
    found, t = limit(A), torch.tensor([0.0, 5.0, 20.0], dtype=f64)
    for uneven, expected in ((0.9, [1.0645, 1.0227]), (0.0, [1.4168, 1.5015])):  # sums of 2e6 closed-form nodes
        cloud = quadrature.circle(12_000, lambda theta, uneven=uneven: 1 + uneven * torch.cos(theta - 0.5))
        path = zero_temperature_flow(A, cloud.x, t).x
        target = found.push_forward(cloud.x)
        w2 = [float(wasserstein(x, target, weights_x=cloud.weights, weights_y=cloud.weights)) for x in path[1:]]
        power = found.evidence["algebraic_w2" if uneven else "algebraic_w2_even"]
        scaled = [w * time**power for w, time in zip(w2, t[1:].tolist())]
        assert scaled == pytest.approx(expected, abs=0.01)
        if not uneven:
            assert w2 == pytest.approx((2 - 2 * path[1:, :, 0].abs().mean(-1)).sqrt().tolist(), rel=1e-6)
        assert met(found.examine(cloud.x, weights=cloud.weights))["unequal crossing masses"] is bool(uneven)


# --- layers -----------------------------------------------------------------------------------------------------


def test_modes_of_a_layer_against_the_closed_form() -> None:
    """mu_k = [sum_j k_j (V_j/G_j)(lambda - lambda_j)/|v|] prod_i (v/V_i)^{k_i} for diagonal blocks."""
    V, G, v, gamma = np.array([-2.0, 1.5]), np.array([1.0, -3.0]), -1.0, 1.0
    for n in range(1, 6):
        expected = []
        for k in range(n + 1):
            powers = np.array([k, n - k])
            expected.append((powers * V / G * (v * gamma - V * G) / abs(v)).sum() * np.prod((v / V) ** powers))
        rates = mode_rates(np.diag(V), np.diag(G), v, gamma, n)
        assert np.allclose(np.sort(rates.real), np.sort(expected), rtol=1e-10)
        assert np.abs(rates.imag).max() < 1e-10


def test_a_stable_offset_does_not_make_a_permanent_layer() -> None:
    """G = 1 + R(60), V = -1 + -3 R(-60): the offset decays at 1, the covariance's anisotropy grows at 2/3."""
    G, V = torch.block_diag(diag(1), rotation(60)), torch.block_diag(diag(-1), -3 * rotation(-60))
    beta = 300.0
    found = limit(Attention.from_matrices(G, V, beta))
    assert found.evidence["layer_modes"][:2] == pytest.approx([-1.0, 2 / 3])
    assert found.exit_rate == pytest.approx(2 / 3)
    assert "left at the exit rate of its modes of degree 2" in found.evidence["layer"]
    # A Gaussian layer of 21 x 21 nodes at each end, its variances apart by 4%.
    u = torch.linspace(-3, 3, 21, dtype=f64)
    a, b = (z.flatten() for z in torch.meshgrid(u, u, indexing="ij"))
    width = math.sqrt(found.layer / 2 / beta)
    x = Sphere().retract(torch.stack([torch.ones_like(a), width * a, width * b], -1))
    w = torch.exp(-(a**2) / 2 * 0.98 - b**2 / 2 * 1.02)
    path = flow(found.attention, torch.cat([x, -x]), [0.0, 1.0, 2.0, 3.0], h=0.05, weights=w.repeat(2))
    y, p = path.x[:, : len(x), 1:], w / w.sum()
    y = y - (p[:, None] * y).sum(1, keepdim=True)
    spread = torch.linalg.eigvalsh(torch.einsum("n,tni,tnj->tij", p, y, y))
    anisotropy = (spread[:, 1] - spread[:, 0]) / spread.sum(-1)
    growth = torch.log(anisotropy[1:] / anisotropy[:-1])
    assert torch.allclose(growth, torch.full((3,), 2 / 3, dtype=f64), atol=0.05)


def test_high_modes_leave_no_layer() -> None:
    """G_perp < 0 < V_perp < |v|: mode 3 grows at 2 where the offset grows at 1/6, and higher ones ever faster."""
    found = limit(Attention.from_matrices(diag(1, -3), diag(-1, 0.5)))
    assert found.evidence["layer_modes"][:3] == pytest.approx([1 / 6, -2 / 3, 2.0])
    assert found.exit_rate == math.inf
    assert "no layer forms" in found.evidence["layer"]
    json.dumps(found.as_dict(), allow_nan=False)


def test_the_permanent_layer_of_the_specification_still_is() -> None:
    found = limit(Attention.from_matrices(diag(1, 2), diag(-1, -3)))
    assert found.exit_rate == 0.0
    assert max(found.evidence["layer_modes"]) < 0


# --- singular G -------------------------------------------------------------------------------------------------


def test_singular_G_and_a_rotation_never_end() -> None:
    """G = diag(1,1,0), V = J + 1: |G x| is constant along the flow; tokens turn for ever outside ker G."""
    A = Attention.from_matrices(diag(1, 1, 0), torch.block_diag(rotation(90), diag(1)))
    found = limit(A)
    assert (found.case, found.off_kernel) == ("undefined", "rotating")
    x = Sphere().retract(matrix([0.6, 0.3, 0.7]))
    path = zero_temperature_flow(A, x, torch.linspace(0, 20, 5, dtype=f64)).x
    size = (path @ A.G[0].mT).norm(dim=-1)
    assert torch.allclose(size, size[0].expand_as(size), atol=1e-10)
    assert torch.allclose(found.push_forward(x, 3.0), zero_temperature_flow(A, x, [0.0, 3.0]).x[-1], atol=1e-10)


def test_singular_G_and_a_nilpotent_M_have_a_limit() -> None:
    """G = [[0,1],[0,0]], V = I: tan(theta/2) = e^{-t} tan(theta_0/2), and the limit is sign(x_2) e_1."""
    A = Attention.from_matrices(matrix([0, 1], [0, 0]), torch.eye(2, dtype=f64))
    found = limit(A)
    assert (found.case, found.off_kernel) == ("undefined", "jordan")
    x = Sphere().retract(matrix([-0.3, 1.0], [0.5, -1.0]))
    assert torch.allclose(found.push_forward(x), matrix([1, 0], [-1, 0]), atol=1e-12)
    moved = zero_temperature_flow(A, x[:1], [0.0, 2.0]).x[-1, 0]
    half = lambda z: math.tan(math.atan2(float(z[1]), float(z[0])) / 2)
    assert half(moved) == pytest.approx(math.exp(-2) * half(x[0]), rel=1e-9)


def test_singular_G_and_a_singular_V_rest_outside_the_kernel() -> None:
    """V = 0 on what G sees: M has the eigenvalue 0 beyond ker G, and tokens rest where G x is not 0."""
    found = limit(Attention.from_matrices(diag(1, 1, 0), diag(0, -1, 1)))
    assert (found.case, found.off_kernel) == ("undefined", "fixed")
    sinks = limit(Attention.from_matrices(diag(1, 1, 0), diag(-1, -1, 1)))
    assert sinks.off_kernel == "undefined"
    with pytest.raises(ValueError, match="run into ker G before t = 50"):
        zero_temperature_flow(sinks.attention, Sphere().retract(matrix([0.5, 0.4, 0.3])), [0.0, 50.0])


# --- requirements -----------------------------------------------------------------------------------------------


def test_a_symmetric_law_is_told_so() -> None:
    """G = diag(4,1), V = diag(1,2), uniform nodes, beta = 100: W2 falls below rounding where t_min = log(100) = 4.6."""
    A = Attention.from_matrices(diag(4, 1), diag(1, 2), 100.0)
    found, cloud = limit(A), quadrature.circle(200)
    assert found.t_min(100.0) == pytest.approx(math.log(100))
    path = flow(A, cloud.x, torch.linspace(0, 40, 81, dtype=f64), weights=cloud.weights, h=0.1)
    with pytest.warns(RoundingWarning, match="only rounding breaks the symmetry of this law"):
        seen = phases(path, found)
    assert seen.min_w2 < 1e-7
    assert met(seen.requires)["asymmetric law"] is False
    assert any("asymmetric law (NOT met)" in doubt for doubt in seen.doubts)
    assert any("rounding" in doubt for doubt in seen.as_dict()["doubts"])
    lopsided = quadrature.circle(200, lambda theta: torch.exp(torch.cos(theta - 1)))
    assert met(found.examine(lopsided.x, weights=lopsided.weights, beta=100.0)) == {
        "large n": True,
        "little noise": None,
        "off the border": True,
        "simple leading eigenvalue": True,
        "bounded density": True,
        "asymmetric law": True,
    }


def test_a_reflection_that_G_does_not_share_protects_nobody() -> None:
    G = matrix([4, 0.3], [0, 1])
    found = limit(Attention.from_matrices(G, diag(1, 2)))
    if found.exit_rate:
        assert met(found.examine(quadrature.circle(100).x))["asymmetric law"] is True


def test_a_sample_that_shows_its_own_chance_is_told_so() -> None:
    """G = diag(3,1), V = diag(1,2), density e^{cos(theta-1)}: at beta = 300 the nodes come to W2 = .10; of 300 random
    tokens each sample stops elsewhere, at .47 to .51, though their argmax is resolved. At beta = 3 all agree."""
    density = lambda theta: torch.exp(torch.cos(theta - 1))
    G, V = diag(3, 1), diag(1, 2)
    found, nodes = limit(Attention.from_matrices(G, V)), quadrature.circle(300, density)
    many = quadrature.circle(60_000, density)
    chosen = torch.multinomial(many.weights, 300, True, generator=torch.Generator().manual_seed(0))
    t = torch.linspace(0, 10, 41, dtype=f64)
    for beta, noisy in ((3.0, False), (300.0, True)):
        A = Attention.from_matrices(G, V, beta)
        smooth = phases(flow(A, nodes.x, t, weights=nodes.weights, h=0.1), found)
        sample = phases(flow(A, many.x[chosen], t, h=0.1), found)
        assert (sample.min_w2 > 2 * smooth.min_w2) is noisy
        assert met(sample.requires)["little noise"] is not noisy
        assert (sample.resolution.verdict, smooth.resolution.verdict) == ("noisy" if noisy else "resolved", "resolved")
        assert any("sets the smallest W2; use a quadrature" in doubt for doubt in sample.doubts) is noisy
        reach = (many.x[chosen] @ G).norm(dim=-1).mean()
        assert float(sample.resolution.noise) == pytest.approx(float((beta * reach) ** 1.5 / 300), rel=1e-12)


def test_a_sample_is_asymmetric_by_chance() -> None:
    """Of the uniform law, which is symmetric, and of one that is not."""
    found = limit(Attention.from_matrices(diag(4, 1), diag(1, 2)))
    x = Sphere().uniform(1000, 2, dtype=f64, generator=torch.Generator().manual_seed(0))
    assert met(found.examine(x))["asymmetric law"] is False
    assert "by chance; use a quadrature" in str(found.examine(x)[-1])
    assert met(found.examine(Sphere().retract(x + matrix([0.3, 0.3]))))["asymmetric law"] is True
    # As nodes with weights the same asymmetry is the law's own.
    assert met(found.examine(x, weights=torch.ones(1000)))["asymmetric law"] is True


def test_a_law_without_mass_where_tokens_linger_is_told_so() -> None:
    """c_2 = kappa/2 is the rate of tokens near +-e_2. Of a law that has none there W2 falls at g, as says its doubt."""
    found = limit(Attention.from_matrices(diag(1, 3), diag(3, 0.5)))
    assert (found.g, found.rate_w2) == pytest.approx((1.5, 0.25))
    for far, holds in ((0.0, True), (0.7, False)):
        nodes = quadrature.circle(4000)
        x = nodes.x[nodes.x[:, 0].abs() > far]
        path = zero_temperature_flow(found.attention, x, [0.0, 8.0, 9.0])
        w2 = w2_curve(path, found)
        assert float(torch.log(w2[1] / w2[2])) == pytest.approx(0.25 if holds else 1.5, rel=0.02)
        assert met(found.examine(x))["bounded density"] is holds
    peaked = quadrature.circle(4000, lambda theta: theta.cos().abs() ** -0.7)  # not bounded where tokens linger
    assert met(found.examine(peaked.x, weights=peaked.weights))["bounded density"] is False
    assert met(found.examine(x[:20]))["bounded density"] is None
    text = str(next(need for need in found.examine(x) if need.name == "bounded density"))
    assert "(NOT met)" in text
    assert text.endswith("share 0 there, 0.12 if it is flat")


def test_requirements_of_every_case() -> None:
    eye = torch.eye(2, dtype=f64)
    few = Sphere().uniform(20, 10, dtype=f64, generator=torch.Generator().manual_seed(0))
    found = limit(Attention.from_matrices(diag(3, *[1] * 9), torch.eye(10, dtype=f64)))
    assert met(found.examine(few, beta=100.0))["large n"] is False
    border = limit(Attention.from_matrices(diag(2, 1), eye)).examine(matrix([0, 1], [1, 0]))
    assert met(border)["off the border"] is False
    kernel = limit(Attention.from_matrices(diag(1, 0), eye)).examine(matrix([0, 1], [1, 0]))
    assert met(kernel)["outside ker G"] is False
    plane = limit(Attention.from_matrices(diag(2, 2, 1), torch.eye(3, dtype=f64)))
    assert met(plane.requires)["simple leading eigenvalue"] is False
    assert met(limit(Attention.random(3, heads=2, dtype=f64)).requires) == {"certificates": None}
    assert met(limit(Attention.identity(3, dtype=f64)).requires) == {"large n": None}
    assert "(not checked)" in str(plane.requires[0])
    with pytest.raises(ValueError, match=r"expected one cloud \(n, 3\)"):
        plane.examine(few)


# --- times ------------------------------------------------------------------------------------------------------


def test_settling_is_the_mean_not_the_merger_of_two_sides() -> None:
    """Nearly symmetric clusters meet at e2 from both sides at v_top = 2; their mean settles at v_top - v_next = 1."""
    A = Attention.from_matrices(diag(3, 1), diag(1, 2), 100.0)
    cloud = quadrature.circle(300, lambda theta: torch.exp(0.001 * torch.cos(theta - 1)))
    path = flow(A, cloud.x, torch.linspace(0, 36, 73, dtype=f64), weights=cloud.weights, h=0.1)
    found = phases(path, limit(A), warn=False).settling
    assert found is not None
    assert found.predicted == pytest.approx(1.0)
    assert found.rate == pytest.approx(1.0, abs=0.02)
    spread = (path.x[..., 0].square() * cloud.weights).sum(-1).sqrt()
    early = (path.t >= found.start) & (path.t <= found.start + 5)
    slope = np.polyfit(path.t[early].numpy(), -np.log(spread[early].numpy()), 1)[0]
    assert slope == pytest.approx(2.0, abs=0.1)  # what the spread would have said


def test_t_min_where_the_tail_is_slow() -> None:
    found = limit(Attention.from_matrices(diag(1.1, 1), diag(1, 1.05)))
    g, c, leaves = 0.05 / 1.1, 0.025, 0.05
    assert (found.g, found.rate_w2, found.exit_rate) == pytest.approx((g, c, leaves))
    assert found.t_min(1e4) == pytest.approx(math.log(1e4) / (2 * g) * (g + leaves) / (c + leaves))
    staying = limit(Attention.from_matrices(diag(1, 3), diag(3, 0.5)))
    assert staying.t_min(1e4) == pytest.approx(math.log(1e4) / (2 * staying.rate_w2))
    for beta in (0.0, -1.0, 0.5, math.nan, math.inf):
        for call in (found.t_min, found.t_beta):
            with pytest.raises(ValueError, match="expected 1 < beta < inf"):
                call(beta)


def graded(width: float, reach: float) -> tuple[Tensor, Tensor]:
    """Nodes and weights of the density e^{cos(theta - 1)}, graded towards +-e_2, where a flow spreads them."""
    u = torch.arange(-reach, reach, 0.8 * width, dtype=f64)
    theta = 2 * torch.atan(torch.tanh((u - u.mean()) / 2))
    theta = torch.cat([theta, theta + math.pi])
    w = torch.exp(torch.cos(theta - 1)) * torch.cos(theta).abs()
    return torch.stack([theta.cos(), theta.sin()], -1), w / w.sum()


# Of that density at +-e_2: both values added, and the gradient of its logarithm in x_1.
RHO = (math.exp(math.sin(1)) + math.exp(-math.sin(1))) / (2 * math.pi * 1.2660658777520082)  # I_0(1)
GRADIENT = math.cos(1)


def test_without_an_exit_w2_rests_at_the_mass_that_crossed() -> None:
    """delta = rho a V_1/(2 kappa G_2 beta) ends on the wrong side: W2 = 2 sqrt(delta)."""
    beta = 100.0
    A = Attention.from_matrices(diag(1, 3), diag(3, 0.5), beta)
    found = limit(A)
    assert (found.exit_rate, found.kappa) == pytest.approx((0.0, 0.5))
    x, w = graded(1 / math.sqrt(3 * beta), 12.0)
    path = flow(A, x, [0.0, 20.0], weights=w, h=0.2)
    delta = RHO * GRADIENT * 3 / (2 * found.kappa * 3 * beta)
    assert float(w2_curve(path, found)[-1]) == pytest.approx(2 * math.sqrt(delta), rel=0.01)


@pytest.mark.parametrize(("beta", "rate"), [(30.0, 0.41), (100.0, 0.35)])
def test_C_is_admissible_and_far_from_sharp(beta: float, rate: float) -> None:
    """Token by token, the distance between the flows at beta and at zero temperature grows slower than e^{Ct}."""
    cloud, t = quadrature.circle(400, lambda theta: torch.exp(torch.cos(theta - 1))), [0.0, 2.0, 6.0]
    A = Attention.from_matrices(diag(3, 1), diag(1, 2), beta)
    warm, cold = flow(A, cloud.x, t, weights=cloud.weights, h=0.1).x, zero_temperature_flow(A, cloud.x, t).x
    error = ((warm - cold).square().sum(-1) * cloud.weights).sum(-1).sqrt()
    assert float(torch.log(error[2] / error[1]) / 4) == pytest.approx(rate, abs=0.02)
    admissible = limit(A).C
    assert admissible == pytest.approx(10.0)


@pytest.mark.slow
def test_what_w2_is_made_of_where_the_tail_is_slow() -> None:
    """W2^2 = A e^{-kappa t} + B beta^{-(1 + x/g)} e^{2xt} + D beta^{-2} e^{kappa t}: tokens that linger, clusters that
    leave, and the mass that crossed the border, which transport repairs with tokens that linger there.
    """
    beta = 300.0
    A = Attention.from_matrices(diag(1.3, 1), diag(1, 1.05), beta)
    found = limit(A)
    width = 1 / math.sqrt(1.3 * beta)
    x, w = graded(width, 20.0)
    path = flow(A, x, torch.linspace(0, 22, 111, dtype=f64), weights=w, h=0.2)
    c, s = path.x.unbind(-1)
    crossed = (w * (c[40] > 0)).sum() - w[x[:, 0] > 0].sum()  # by t = 8 all that will
    assert float(crossed) * beta == pytest.approx(RHO * GRADIENT / (2 * found.kappa), rel=0.06)
    squared = w2_curve(path, found).square()
    near = (w * (2 - 2 * c.abs())).sum(-1)
    cluster = (w * torch.where(s.abs() < 8 * width, s.square(), 0.0)).sum(-1)
    least = int(squared.argmin())
    assert float(path.t[least]) == pytest.approx(19.6, abs=0.2)
    rate = lambda part: float(torch.log(part[least + 4] / part[least - 4]) / 1.6)
    assert [rate(cluster), rate(near - cluster)] == pytest.approx([2 * found.exit_rate, -found.kappa], abs=0.02)
    assert rate(squared - near) == pytest.approx(found.kappa, abs=0.05)


def test_reprs_are_short() -> None:
    A = Attention.from_matrices(diag(*range(1, 31)), torch.eye(30, dtype=f64))
    found = limit(A)
    assert isinstance(found, LimitMap)
    assert repr(found) == "LimitMap(fixed, dim E = 1, leading 30, gap 1, rate_w2 0.0172414)"
    biased = limit(Attention.from_matrices(diag(2, 1), diag(1, 1), query_bias=torch.ones(2, dtype=f64)))
    settled = biased.settle(matrix([0.6, 0.8]))
    assert len(repr(settled)) < 300
    assert "certified" in repr(settled)
