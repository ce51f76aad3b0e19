"""The limit map against closed forms, long integrations, and matrices whose spectral case is known by construction."""

import json
import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from inputs import F64, diag, matrix, tokens
from torch import Tensor

from attn_flow import Attention, Cloud, EllipsoidSupport, Gaussian, Sphere, UniformSphere, flow, limit
from attn_flow.measures import quadrature
from attn_flow.prediction import spectrum, zero_temperature_flow

EYE2, EYE3 = torch.eye(2, dtype=F64), torch.eye(3, dtype=F64)


def attention(G: Tensor, V: Tensor, **options: Any) -> Attention:
    return Attention.from_matrices(G, V, **options)


def similar(J: np.ndarray, seed: int, condition: float = 10.0) -> Tensor:
    """W J W^-1 with a random W of the given condition number: a matrix whose Jordan form is J."""
    rng = np.random.default_rng(seed)
    d = len(J)
    U, R = (np.linalg.qr(rng.normal(size=(d, d)))[0] for _ in range(2))
    W = U * np.geomspace(1, condition, d) @ R
    return torch.from_numpy(W @ J @ np.linalg.inv(W))


def jordan(size: int, a: float, lower: list[float]) -> np.ndarray:
    J = np.diag([a] * size + lower)
    J[np.arange(size - 1), np.arange(1, size)] = 1
    return J


# --- spectrum ---------------------------------------------------------------------------------------------------


@given(st.integers(0, 10_000), st.integers(1, 3), st.integers(1, 4))
@settings(max_examples=40, deadline=None)
def test_projector_commutes_and_has_the_leading_eigenvalue(seed: int, k: int, rest: int) -> None:
    lower = list(np.random.default_rng(seed).uniform(-3, 0.8, rest))
    M = similar(np.diag([1.0] * k + lower), seed)
    result = spectrum(M)
    Pi = result.projector
    assert (result.case, result.dimension) == ("fixed", k)
    torch.testing.assert_close(Pi @ Pi, Pi, rtol=0, atol=1e-9)
    torch.testing.assert_close(M @ Pi, Pi @ M, rtol=0, atol=1e-9)
    torch.testing.assert_close(M @ Pi, Pi, rtol=0, atol=1e-8)
    assert result.gap == pytest.approx(1 - max(lower), rel=1e-6)


@pytest.mark.parametrize("d", [3, 20, 60])
def test_projector_is_the_sum_over_leading_eigenvectors(d: int) -> None:
    """Pi = sum of r l^T over the leading eigenvalues, r the columns of W and l the rows of its inverse."""
    for seed in range(4):
        rng = np.random.default_rng(seed)
        M = rng.standard_normal((d, d)) @ np.diag(np.exp(2 * rng.standard_normal(d)))  # columns of many sizes
        values, W = np.linalg.eig(M)
        is_leading = values.real > values.real.max() - 1e-9 * np.abs(values).max()
        Pi = ((W * is_leading) @ np.linalg.inv(W)).real
        result = spectrum(torch.from_numpy(M))
        assert (result.case, result.dimension) == ("rotating" if is_leading.sum() == 2 else "fixed", is_leading.sum())
        assert result.gap == pytest.approx(result.leading - values.real[~is_leading].max(), rel=1e-7)
        error = 1e-13 * d * np.linalg.cond(W) * np.linalg.norm(Pi, 2) * np.linalg.norm(M, 2) / result.gap
        assert np.abs(result.projector.numpy() - Pi).max() < error


@pytest.mark.parametrize("size", [2, 3, 5])
@pytest.mark.parametrize("condition", [1.0, 100.0])
def test_jordan_blocks_survive_rounding(size: int, condition: float) -> None:
    """An eigenvalue solver returns `size` eigenvalues that are eps^(1/size) apart, up to 0.002 here."""
    for seed in range(5):
        result = spectrum(similar(jordan(size, 1.0, [0.2, -0.5, -3.0]), seed, condition))
        assert (result.case, result.dimension, result.index) == ("jordan", size, size)
        assert result.gap == pytest.approx(0.8, abs=0.02)


def test_rotating_pairs_and_rotating_jordan_blocks() -> None:
    R, Z = np.array([[1.0, -0.7], [0.7, 1.0]]), np.zeros((2, 2))
    for seed in range(5):
        plain = spectrum(similar(np.block([[R, Z], [Z, np.diag([0.3, -2.0])]]), seed))
        assert (plain.case, plain.dimension, plain.frequencies) == ("rotating", 2, pytest.approx((0.7,)))
        double = np.block([[R, np.eye(2), Z], [Z, R, Z], [Z, Z, np.diag([0.3, -1.0])]])
        block = spectrum(similar(double, seed))
        assert (block.case, block.dimension, block.frequencies) == ("jordan", 4, pytest.approx((0.7,), abs=1e-6))


def test_spectra_of_simple_matrices() -> None:
    assert spectrum(2 * EYE3).case == spectrum(torch.zeros(2, 2)).case == "stationary"
    by_real_part = spectrum(diag(-5, 1, -1))  # the largest modulus is not the largest real part
    assert by_real_part.leading == 1.0
    assert by_real_part.basis[:, 0].abs().tolist() == pytest.approx([0, 1, 0])
    near = diag(1, 1 - 1e-5, 0)
    assert (spectrum(near).dimension, spectrum(near, tol=1e-4).dimension) == (1, 2)
    assert spectrum(matrix([2, 1e4], [0, 1])).dimension == 1  # far from normal, yet two clear eigenvalues
    merged = diag(1 + 1e-8, 1, 1 - 1e-8)
    merged[0, 1] = 1.0
    assert (spectrum(merged).case, spectrum(merged).index) == ("jordan", 2)  # merged eigenvalues add no index
    with pytest.raises(ValueError, match=r"shape \(2, 3\), expected a square matrix"):
        spectrum(torch.zeros(2, 3))


# --- the limit map ----------------------------------------------------------------------------------------------


@given(st.integers(0, 10_000))
@settings(max_examples=20, deadline=None)
def test_limit_map_is_the_long_time_limit(seed: int) -> None:
    rng = torch.Generator().manual_seed(seed)
    A = Attention.random(3, head_dim=3, dtype=F64, generator=rng)
    result, x = limit(A), Sphere().uniform(20, 3, generator=rng, dtype=F64)
    gap = result.spectrum.gap
    if result.case == "fixed" and gap > 0.3 * float(torch.linalg.matrix_norm(A.M[0], 2)):
        end = zero_temperature_flow(A, x, [0.0, 60.0 * float(torch.linalg.matrix_norm(A.G[0], 2)) / gap]).x[-1]
        torch.testing.assert_close(end, result.push_forward(x), rtol=0, atol=1e-7)
    elif result.case == "rotating":
        inside = result.push_forward(x, 7.0)
        torch.testing.assert_close(inside @ result.spectrum.projector.mT, inside, rtol=0, atol=1e-9)


def test_rotating_limit_follows_the_tokens() -> None:
    A = attention(matrix([1, -0.7, 0], [0.7, 1, 0], [0, 0, 0.2]), EYE3)
    result, x = limit(A), tokens(30, 3)
    assert result.rotates
    with pytest.raises(ValueError, match=r"rotate: no limit. Give a time"):
        result.push_forward(x)
    path = zero_temperature_flow(A, x, [0.0, 40.0, 41.0]).x
    torch.testing.assert_close(result.push_forward(x, [40.0, 41.0]), path[1:], rtol=0, atol=1e-8)
    torch.testing.assert_close(result.push_forward(x, 41.0), result.push_forward(x, [40.0, 41.0])[1])
    start = x * torch.tensor([1.0, 1.0, 0.0], dtype=F64)
    torch.testing.assert_close(result.push_forward(x, 0.0), start / start.norm(dim=-1, keepdim=True))
    # dt/dtau = |G e| = |1 + 0.7i| in the plane, so that the angle turns at 0.7/|1 + 0.7i|.
    angle = torch.atan2(path[1:, :, 1], path[1:, :, 0])
    turn = torch.remainder(angle[1] - angle[0], 2 * math.pi)
    assert turn.tolist() == pytest.approx([0.7 / math.hypot(1, 0.7)] * 30, abs=1e-6)


def test_rotating_push_forward_costs_the_same_for_any_size_of_M() -> None:
    """M = [[1.5, -k, 0], [4/k, 1.5, 0], [0, 0, 0.5]] turns at frequency 2 whatever k is."""
    G = diag(1, 2, 1)
    for k in (1.0, 1e4, 1e7):  # steps in proportion to k would reach their limit
        A = attention(G, matrix([1.5, -k, 0], [4 / k, 1.5, 0], [0, 0, 0.5]) @ torch.linalg.inv(G))
        assert limit(A).push_forward(tokens(5, 3), 20.0)[:, 2].abs().max() < 1e-12


def test_jordan_limit_is_reached_like_one_over_t() -> None:
    A = attention(matrix([1, 1], [0, 1]), EYE2)
    result = limit(A)
    assert (result.case, result.power, result.rates) == ("jordan", 0.5, None)
    assert result.t_min(10.0) is None
    theta = 2 * math.pi * (torch.arange(4000, dtype=F64) + 0.5) / 4000
    x = torch.stack([theta.cos(), theta.sin()], -1)
    torch.testing.assert_close(result.push_forward(x)[:, 0], torch.sign(x[:, 1]))
    path = zero_temperature_flow(A, x, [0.0, 40.0, 160.0]).x
    distance = (path - result.push_forward(x)).norm(dim=-1)
    slope = lambda p: float(torch.log(distance[2].pow(p).mean() / distance[1].pow(p).mean()) / p / math.log(4))
    assert (slope(1), slope(2)) == (pytest.approx(-1, abs=0.06), pytest.approx(-0.5, abs=0.03))
    two = torch.block_diag(matrix([1, 1], [0, 1]), matrix([1, 1], [0, 1]))
    assert limit(attention(two, torch.eye(4, dtype=F64))).power == 1.0


@pytest.mark.parametrize(("V", "case"), [(EYE2, "fixed"), (diag(-1, 1), "undefined"), (diag(0, 1), "undefined")])
def test_singular_scores(V: Tensor, case: str) -> None:
    result = limit(attention(diag(1, 0), V))
    assert result.case == case
    if case == "undefined":
        with pytest.raises(ValueError, match=r"G is singular .* tokens may run into ker G"):
            result.push_forward(tokens(3, 2))
    else:
        torch.testing.assert_close(result.push_forward(matrix([0.6, 0.8])), matrix([1.0, 0.0]))


def test_flows_beside_the_kernel() -> None:
    """G = diag(1,1,0), V = J + 1 keeps |G x|; G = [[0,1],[0,0]], V = I has tan(theta/2) = e^{-t} tan(theta_0/2)."""
    turning = attention(diag(1, 1, 0), torch.block_diag(matrix([0, -1], [1, 0]), diag(1)))
    size = (zero_temperature_flow(turning, tokens(4, 3), [0.0, 7.0, 20.0]).x @ turning.G[0].mT).norm(dim=-1)
    torch.testing.assert_close(size, size[:1].expand_as(size))
    nilpotent, x = attention(matrix([0, 1], [0, 0]), EYE2), Sphere().retract(matrix([-0.3, 1.0], [0.5, -1.0]))
    y = zero_temperature_flow(nilpotent, x, [0.0, 2.0]).x[-1]
    half = lambda z: torch.tan(torch.atan2(z[:, 1], z[:, 0]) / 2)
    torch.testing.assert_close(half(y)[0], math.exp(-2) * half(x)[0])


def test_tokens_between_two_limits_are_refused() -> None:
    result = limit(attention(diag(2, 1), EYE2))
    with pytest.raises(ValueError, match="1 of 2 tokens have Pi x = 0 to rounding"):
        result.push_forward(matrix([0.0, 1.0], [1.0, 0.0]))
    torch.testing.assert_close(result.push_forward(matrix([1e-30, 1.0])), matrix([1.0, 0.0]))  # tiny is not zero


def test_push_forward_keeps_norms_batches_clouds_and_gradients() -> None:
    result, x = limit(attention(diag(2, 2, 1), EYE3)), 3 * tokens(2, 4, 5, 3)
    y = result.push_forward(x)
    torch.testing.assert_close(y.norm(dim=-1), torch.full_like(y[..., 0], 3.0))
    torch.testing.assert_close(y[1, 2], result.push_forward(x[1, 2]))
    cloud = result.push_forward(Cloud(x[0, 0], torch.arange(1.0, 6.0).double()))
    assert cloud.weights.tolist() == [1, 2, 3, 4, 5]
    torch.testing.assert_close(cloud.x, y[0, 0])
    z = x[0, 0].clone().requires_grad_()
    assert torch.autograd.gradcheck(result.push_forward, (z,))
    assert result.push_forward(x.float()).dtype == torch.float32


def test_a_batch_of_matrices_is_a_loop() -> None:
    G = torch.stack([diag(3, 1), diag(1, 3), matrix([1, -0.7], [0.7, 1])])[:, None]
    batch = limit(attention(G, EYE2[None]))
    x = tokens(3, 6, 2)
    assert (batch.case, batch.shape) == ("batch", (3,))
    assert [one.case for one in batch.elements] == ["fixed", "fixed", "rotating"]
    torch.testing.assert_close(batch.push_forward(x, 2.0)[1], limit(attention(G[1], EYE2)).push_forward(x[1], 2.0))
    assert len(batch.as_dict()["elements"]) == 3
    assert "This is a batch of 3 limits" in batch._repr_html_()
    assert [need.name for need in batch.requires] == ["one attention"]
    with pytest.raises(ValueError, match=r"do not broadcast \(x \(2,\), the limits \(3,\)"):
        batch.push_forward(x[:2])


def test_as_dict_is_json() -> None:
    for A in (attention(diag(3, 1), diag(1, 2)), attention(diag(1, -3), diag(-1, 0.5)), Attention.random(3, heads=2)):
        numbers = json.loads(json.dumps(limit(A).as_dict(), allow_nan=False))
        assert {"case", "dimension", "projector", "leading", "gap", "rate_w1", "rate_w2"} <= set(numbers)


def test_kinds_without_a_limit_are_refused() -> None:
    with pytest.raises(ValueError, match="kind 'unnormalised'"):
        limit(Attention.identity(2, kind="unnormalised"))
    with pytest.raises(ValueError, match="causal=True"):
        limit(Attention.identity(2, causal=True))
    with pytest.raises(ValueError, match="causal=True"):
        zero_temperature_flow(Attention.identity(2, causal=True), EYE2.float(), 1.0)
    with pytest.raises(ValueError, match="beta = 0, expected a positive"):
        limit(attention(EYE2, EYE2)).width(0)
    with pytest.raises(ValueError, match="tol = nan"):
        limit(attention(EYE2, EYE2), tol=math.nan)
    with pytest.raises(ValueError, match=r"the covariance of the context has shape \(3, 3\)"):
        limit(attention(EYE2, EYE2, context=EllipsoidSupport(torch.zeros(3, dtype=F64), EYE3, 1.0)))
    with pytest.raises(ValueError, match=r"t = -1.0, expected a finite time"):
        limit(attention(EYE2, EYE2)).push_forward(tokens(2, 2), -1.0)


# --- rates ------------------------------------------------------------------------------------------------------


def test_rates_of_the_specification() -> None:
    result = limit(attention(diag(3, 1), diag(1, 2)))
    rates = result.rates
    assert (rates.g, rates.kappa, rates.decay(1), rates.decay(2)) == pytest.approx((1 / 3, 1, 1 / 3, 1 / 3))
    assert pytest.approx(2 * (3 + 2)) == rates.C  # |V| (cond G + 2)
    assert result.t_min(100) == pytest.approx(1.5 * math.log(100))
    assert (result.terminal.exit_rate, result.terminal.rate) == pytest.approx((1, 1))
    with pytest.raises(ValueError, match=r"p = 0.5, expected"):
        rates.decay(0.5)
    for beta in (0.5, math.nan, math.inf):
        with pytest.raises(ValueError, match="expected 1 < beta < inf"):
            result.t_min(beta)


def test_a_lower_level_can_be_the_slowest() -> None:
    """M = diag(3,2,1) with |G e_3| = 10: min(g, kappa/p) is 1 and 0.5, but the mass near e_3 decays at (2+1)/10."""
    A = attention(diag(0.5, 1, 10), diag(6, 2, 0.1))
    rates = limit(A).rates
    assert (rates.g, rates.kappa, rates.decay(1), rates.decay(2)) == pytest.approx((2, 1, 0.3, 0.15))
    # One octant in logarithmic coordinates around e_3, which resolves masses down to e^-60.
    u = torch.linspace(-24, 24, 81, dtype=F64)
    a, b = torch.meshgrid(u.exp(), u.exp(), indexing="ij")
    y = torch.stack([a.flatten(), b.flatten(), torch.ones(81**2, dtype=F64)], -1)
    w = a.flatten() * b.flatten() / y.norm(dim=-1) ** 3
    path = zero_temperature_flow(A, Sphere().retract(y), [0.0, 20.0, 30.0]).x
    distance = (path - torch.tensor([1.0, 0, 0], dtype=F64)).norm(dim=-1)
    for p in (1, 2):
        rate = float(torch.log((w * distance[1] ** p).sum() / (w * distance[2] ** p).sum()) / p / 10)
        assert rate == pytest.approx(rates.decay(p), rel=0.02)


def test_the_rate_of_a_rotating_limit_averages_a_turn() -> None:
    G, M = diag(1, 3, 1), matrix([1, -2, 0], [2, 1, 0], [0, 0, 0.5])
    A = attention(G, M @ torch.linalg.inv(G))
    path = zero_temperature_flow(A, Sphere().retract(matrix([1.0, 0.4, 0.5])), [0.0, 20.0, 60.0]).x[:, 0]
    height = path[:, 2].abs() / path[:, :2].norm(dim=-1)
    assert float(torch.log(height[1] / height[2]) / 40) == pytest.approx(limit(A).rates.g, rel=0.01)


@pytest.mark.parametrize("c", [1e-8, 1e8])
def test_units(c: float) -> None:
    """G times c changes no direction and no rate; V times c is the clock."""
    G, V = matrix([3, 0.5, 0], [0, 1, 0.2], [0, 0, 0.7]), diag(1, 2, 0.5)
    plain, scores, values = (limit(attention(*pair)) for pair in ((G, V), (c * G, V), (G, c * V)))
    for scaled, clock in ((scores, 1.0), (values, c)):
        assert (scaled.case, scaled.spectrum.gap / c) == (plain.case, pytest.approx(plain.spectrum.gap))
        for name in ("g", "kappa", "tail", "C"):
            assert getattr(scaled.rates, name) / clock == pytest.approx(getattr(plain.rates, name), rel=1e-6)
        torch.testing.assert_close(scaled.push_forward(tokens(5, 3)), plain.push_forward(tokens(5, 3)))


# --- what clusters do afterwards --------------------------------------------------------------------------------

AFTERWARDS = [
    # G, V, exit rate, words
    (diag(2, 1, 1), diag(1, 0.5, 1.7), 0.7, "sees itself and collapses"),
    (diag(2, 1, 1), diag(1, 0.5, 0.7), 0.0, "sees itself and collapses"),
    (diag(-2, 0.1, 0.1), diag(-1, 0.5, -1.7), 0.7, "sees its antipode and collapses"),
    (diag(3, 1), matrix([1, 0.5], [0.3, 1.0]), None, "V turns the limit direction e"),
    (diag(1, 1), diag(0, -1), None, "the leading eigenvalue of M is 0"),
    (diag(2, 2, 1), EYE3, None, "dim E = 1"),
    (diag(1, 2), diag(-1, -3), 0.0, "keep a Gaussian width"),
    (diag(1, 2, 3), diag(-1, -3, -2), 0.0, "keep a Gaussian width"),
    (diag(1, -3), diag(-1, 0.5), None, "repel each other"),
    (diag(1, -2), diag(-1, 2), None, "repel each other"),
]


@pytest.mark.parametrize(("G", "V", "exit_rate", "words"), AFTERWARDS)
def test_what_clusters_do(G: Tensor, V: Tensor, exit_rate: float | None, words: str) -> None:
    terminal = limit(attention(G, V)).terminal
    assert terminal.exit_rate == (None if exit_rate is None else pytest.approx(exit_rate, abs=1e-12))
    assert words in terminal.reason


def test_the_width_of_clusters_is_the_simulated_one() -> None:
    """V = diag(-1,-3), G = diag(1,2), beta = 300: W2 = 0.0258."""
    A = Attention.from_matrices(diag(1, 2), diag(-1, -3), beta=300.0)
    width = limit(A).width(300.0)
    assert width == pytest.approx(0.0258, abs=5e-5)
    theta = torch.linspace(-0.4, 0.4, 81, dtype=F64)
    x = torch.stack([theta.cos(), theta.sin()], -1)
    end = flow(A, torch.cat([x, -x]), [0.0, 8.0], h=0.05).x[-1]
    assert float((2 - 2 * end[:, 0].abs()).mean().sqrt()) == pytest.approx(width, rel=0.02)


def test_a_stable_offset_does_not_make_a_width_stable() -> None:
    """G = 1 + R(60), V = -1 - 3 R(-60): the offset decays at 1, but the covariance's anisotropy grows at 2/3."""
    turn = lambda a: matrix([math.cos(a), -math.sin(a)], [math.sin(a), math.cos(a)])
    G, V = torch.block_diag(diag(1), turn(math.pi / 3)), torch.block_diag(diag(-1), -3 * turn(-math.pi / 3))
    result = limit(attention(G, V))
    assert (result.exit_rate, result.width(300.0)) == (None, None)


# --- limits that are not linear ---------------------------------------------------------------------------------


def test_tokens_of_several_heads_are_followed_until_they_rest() -> None:
    x = tokens(8, 4)
    A = Attention.random(4, heads=3, head_dim=4, dtype=F64, generator=torch.Generator().manual_seed(0))
    result = limit(A)
    assert result.case == "nonlinear"
    met = {need.name: need.met for need in result.examine(Cloud(x), beta=300.0)}
    assert met == {"enough tokens": False, "little sampling noise": False, "tokens come to rest": None}
    assert "several heads" in result.reason
    assert result.rates is result.t_min(10.0) is None
    end = result.push_forward(x)
    drift = sum(g / g.norm(dim=-1, keepdim=True) @ A.OV[h].mT for h in range(3) for g in [end @ A.G[h].mT])
    assert Sphere().tangent(end, drift).norm(dim=-1).max() < 1e-6
    torch.testing.assert_close(result.push_forward(2.5 * torch.stack([x, x]))[1], 2.5 * end, rtol=0, atol=1e-6)
    turning = Attention.random(4, heads=3, head_dim=4, dtype=F64, generator=torch.Generator().manual_seed(1))
    with pytest.raises(ValueError, match="3 of 3 tokens have no established limit"):
        limit(turning).push_forward(x[:3])


def test_tokens_that_rest_at_a_saddle_have_no_limit() -> None:
    biased = limit(attention(diag(3, 1), diag(2, 1), query_bias=torch.tensor([0.1, 0.0], dtype=F64)))
    x = matrix([0.6, 0.8], [-0.6, 0.8])
    torch.testing.assert_close(biased.push_forward(x), matrix([1.0, 0.0], [-1.0, 0.0]), rtol=0, atol=1e-6)
    upright = limit(attention(diag(3, 1), diag(1, 2), query_bias=torch.tensor([0.0, 1e-3], dtype=F64)))
    with pytest.raises(ValueError, match="1 of 2 tokens have no established limit"):
        upright.push_forward(matrix([0.0, 1.0], [0.6, 0.8]))


def test_heads_whose_drift_jumps_are_refused() -> None:
    flat = Attention.random(3, heads=2, head_dim=1, dtype=F64, generator=torch.Generator().manual_seed(0))
    sinks = attention(diag(1, 1, 0).expand(2, 3, 3), diag(-1, -1, 1).expand(2, 3, 3))
    for A in (flat, sinks):
        with pytest.raises(ValueError, match=r"no established limit|no limit is established"):
            limit(A).push_forward(tokens(6, 3))


def test_other_supports() -> None:
    B = tokens(3, 3)
    S, A, x = B @ B.mT, attention(tokens(3, 3, seed=1), tokens(3, 3, seed=2)), tokens(10, 3, seed=3)
    ellipsoid = EllipsoidSupport(torch.zeros(3, dtype=F64), S, 1.5)
    result = limit(A.with_context(ellipsoid))
    torch.testing.assert_close(result.spectrum.projector, spectrum(A.OV[0] @ S @ A.G[0]).projector)
    gaussian = limit(A.with_context(Gaussian(ellipsoid.mean, S, cap=1.5)))
    assert gaussian.spectrum.leading == pytest.approx(result.spectrum.leading)
    sphere = limit(A.with_context(UniformSphere(3)))
    torch.testing.assert_close(sphere.spectrum.projector, limit(A).spectrum.projector)
    for radius in (1.0, 2.0):
        exact = zero_temperature_flow(A.with_context(ellipsoid), radius * x, [0.0, 1.0]).x[-1]
        cold = A.with_beta(math.inf).with_context(ellipsoid)
        stepped = flow(cold, radius * x, [0.0, 1.0], geometry=Sphere(radius), step="adaptive").x[-1]
        torch.testing.assert_close(exact, stepped, rtol=0, atol=1e-4)
    with pytest.raises(ValueError, match="without cap"):
        limit(A.with_context(Gaussian(ellipsoid.mean, S)))
    identity = attention(EYE3, EYE3)
    off_centre = EllipsoidSupport(torch.tensor([2.0, 0, 0], dtype=F64), EYE3, 0.5)
    end = limit(identity.with_context(off_centre)).push_forward(x)  # x' = P_x (m + rho x): every token goes to m/|m|
    torch.testing.assert_close(end, torch.tensor([1.0, 0, 0], dtype=F64).expand(10, 3), rtol=0, atol=1e-6)
    points = tokens(3, 3, seed=4)
    nearest = points[(x @ points.mT).argmax(-1)]
    torch.testing.assert_close(limit(identity.with_context(points)).push_forward(x), nearest)


# --- the exact flow ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(3))
def test_exact_flow_solves_the_ode(seed: int) -> None:
    from scipy.integrate import solve_ivp

    d = 3 + 3 * seed
    G, V, x0 = tokens(d, d, seed=seed) * d**0.5, tokens(d, d, seed=9) * d**0.5, tokens(4, d, seed=7)

    def velocity(t: float, y: np.ndarray) -> np.ndarray:
        x = y.reshape(4, d)
        g = x @ G.numpy().T
        F = g / np.linalg.norm(g, axis=1, keepdims=True) @ V.numpy().T
        return (F - (x * F).sum(1, keepdims=True) * x).ravel()

    t = [0.0, 0.4, 2.0, 6.0]
    reference = solve_ivp(velocity, (0, 6), x0.numpy().ravel(), "DOP853", t, rtol=1e-12, atol=1e-13).y
    path = zero_temperature_flow(attention(G, V), x0, t).x
    torch.testing.assert_close(path, torch.from_numpy(reference.T.reshape(4, 4, d)), rtol=0, atol=1e-8)


def test_w2_closed_form_on_the_circle() -> None:
    """G = I, V = diag(2,1): W2(mu_t, P_# mu_0) = sqrt(2 - (4/pi) asin(s)/s), s = sqrt(1 - e^{-2t})."""
    A = attention(EYE2, diag(2, 1))
    theta = 2 * math.pi * (torch.arange(4096, dtype=F64) + 0.5) / 4096
    x = torch.stack([theta.cos(), theta.sin()], -1)
    path = zero_temperature_flow(A, x, [0.0, 1.0, 2.0]).x
    w2 = (path - limit(A).push_forward(x)).square().sum(-1).mean(-1).sqrt()
    assert w2[1:].tolist() == pytest.approx([0.604159, 0.394814], abs=1e-6)


def test_exact_flow_laws(generator: torch.Generator) -> None:
    G, V = (torch.randn(3, 3, generator=generator, dtype=F64) for _ in range(2))
    x = Sphere().uniform((2, 7), 3, generator=generator, dtype=F64)
    run = lambda x, t, G=G, V=V: zero_temperature_flow(attention(G, V), x, [0.0, t]).x[-1]
    torch.testing.assert_close(run(run(x, 1.3), 2.2), run(x, 3.5), rtol=0, atol=1e-10)  # semigroup
    torch.testing.assert_close(run(x, 2.0)[1], run(x[1], 2.0))  # batch = loop
    torch.testing.assert_close(run(3 * x, 2.0), 3 * run(x, 2.0), rtol=0, atol=1e-10)  # a larger sphere sees itself
    small = zero_temperature_flow(attention(G, V, context=UniformSphere(3)), 3 * x, [0.0, 6.0]).x[-1]
    torch.testing.assert_close(small, 3 * run(x, 2.0), rtol=0, atol=1e-10)  # and takes longer to see a smaller one
    R = torch.linalg.qr(torch.randn(3, 3, generator=generator, dtype=F64))[0]
    torch.testing.assert_close(run(x @ R.mT, 2.0, R @ G @ R.mT, R @ V @ R.mT), run(x, 2.0) @ R.mT, rtol=0, atol=1e-9)
    torch.testing.assert_close(run(x, 2.0, 5 * G), run(x, 2.0), rtol=0, atol=1e-10)  # only the direction of G x


@pytest.mark.parametrize("radius", [1.0, 3.0])
def test_cold_flow_on_a_sphere_of_any_radius(radius: float) -> None:
    """Tokens that fill a sphere move as the exact flow and the integrated one (a value bias) say, and at its rates."""
    nodes = quadrature.circle(1000)
    x = Cloud(radius * nodes.x, nodes.weights)
    for bias in (None, torch.tensor([0.3, 0.4], dtype=F64)):
        A = Attention.from_matrices(diag(3, 1), diag(1, 2), beta=3000.0, value_bias=bias)
        warm = flow(A, x, [0.0, 1.0], h=0.02, geometry=Sphere(radius)).x[-1]
        cold = zero_temperature_flow(A, x, [0.0, 1.0]).x[-1]
        assert float((warm - cold).norm(dim=-1).mean()) < 2e-3 * radius
    rates = limit(attention(diag(3, 1), diag(1, 2), context=UniformSphere(2, radius))).rates
    assert (rates.g, rates.kappa) == pytest.approx((1 / 3, 1))


def test_exact_flow_of_tiny_components_and_long_times() -> None:
    """d/dt log(x_1/x_2) = 1 near e_2 for G = diag(3,1), V = diag(1,2): e^{-69} takes 69 units of time to leave."""
    A = attention(diag(3, 1), diag(1, 2))
    path = zero_temperature_flow(A, matrix([math.exp(-69), 1.0]), [0.0, 60.0, 400.0]).x[:, 0]
    assert path[1:, 0].tolist() == pytest.approx([math.exp(-9), 1.0], rel=1e-6)


def test_exact_flow_keeps_weights_and_says_when_tokens_leave_its_domain() -> None:
    A = attention(diag(1, 1, 0), diag(-1, -1, 1))
    mask = torch.tensor([True, True, False])
    cloud = Cloud(torch.where(mask[:, None], tokens(3, 3), 0.0), torch.ones(3).double(), mask)
    path = zero_temperature_flow(A, cloud, [0.0, 0.01])
    assert path.mask is not None
    assert path.weights is not None
    x = Sphere(2.0).retract(matrix([0.5, 0.4, 0.3]))
    arrival = math.asinh(math.hypot(0.5, 0.4) / 0.3)  # the angle to the pole has phi' = -cos(phi)
    with pytest.raises(ValueError, match=f"1 tokens come to t = {arrival:.2f}.* and not to 50: they run into ker G"):
        zero_temperature_flow(A, x, [0.0, 50.0])
    with pytest.raises(ValueError, match="lies in ker G"):
        zero_temperature_flow(A, matrix([0.0, 0.0, 1.0]), 1.0)
    with pytest.raises(ValueError, match="expected one sphere"):
        zero_temperature_flow(Attention.random(2, heads=2, dtype=F64), matrix([0.0, 1.0], [3.0, 0.0]), 1.0)
    spinning = limit(attention(matrix([1, -0.7], [0.7, 1]), EYE2))
    with pytest.raises(ValueError, match=r"tokens turn .* times before t = 1e\+12; ask for a shorter time"):
        spinning.push_forward(tokens(1, 2), 1e12)
