"""The limit map against closed forms, long integrations, and matrices whose spectral case is known by construction."""

import json
import math

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from attn_flow.attention import Attention
from attn_flow.dynamics.steppers import Adaptive
from attn_flow.geometry import Sphere
from attn_flow.measures import Cloud, EllipsoidSupport, Gaussian, Mixture, UniformSphere
from attn_flow.prediction import ResolutionWarning, limit, resolution
from attn_flow.prediction.spectral import levels, spectrum
from attn_flow.prediction.zero_temperature import linear_flow, zero_temperature_flow

f64 = torch.float64


def matrix(*rows: list[float]) -> Tensor:
    return torch.tensor(rows, dtype=f64)


def diag(*entries: float) -> Tensor:
    return torch.diag(torch.tensor(entries, dtype=f64))


def attention(G: Tensor, V: Tensor, beta: float = 1.0, **options: object) -> Attention:
    return Attention.from_matrices(G, V, beta, **options)


def similar(J: np.ndarray, seed: int, condition: float = 10.0) -> np.ndarray:
    """W J W^-1 with a random W of the given condition number: a matrix whose Jordan form is J."""
    rng = np.random.default_rng(seed)
    d = len(J)
    U, R = (np.linalg.qr(rng.normal(size=(d, d)))[0] for _ in range(2))
    W = U * np.geomspace(1, condition, d) @ R
    return W @ J @ np.linalg.inv(W)


def jordan(size: int, a: float, lower: list[float]) -> np.ndarray:
    J = np.diag([a] * size + lower)
    J[np.arange(size - 1), np.arange(1, size)] = 1
    return J


# --- spectrum ---------------------------------------------------------------------------------------------------


def test_the_oblique_projector_of_the_specification() -> None:
    found = limit(attention(matrix([2, 0.5], [0, 1]), torch.eye(2, dtype=f64)))
    assert (found.case, found.dimension, found.leading, found.gap) == ("fixed", 1, 2.0, 1.0)
    assert torch.allclose(found.projector, matrix([1, 0.5], [0, 0]), atol=1e-14)
    x = Sphere().retract(matrix([-0.2, 1.0]))
    assert torch.allclose(found.push_forward(x), matrix([1.0, 0.0]), atol=1e-14)  # orthogonal projection says -e1


@given(st.integers(0, 10_000), st.integers(1, 3), st.integers(1, 4))
@settings(max_examples=60, deadline=None)
def test_projector_is_the_spectral_one(seed: int, k: int, rest: int) -> None:
    lower = list(np.random.default_rng(seed).uniform(-3, 0.8, rest))
    M = similar(np.diag([1.0] * k + lower), seed)
    found = spectrum(M)
    Pi = found.projector
    assert (found.case, found.dimension) == ("fixed", k)
    assert np.allclose(Pi @ Pi, Pi, atol=1e-9)
    assert np.allclose(M @ Pi, Pi @ M, atol=1e-9)
    assert np.allclose(M @ Pi, Pi, atol=1e-8)  # eigenvalue 1 on E
    assert np.isclose(np.trace(Pi), k)
    assert np.isclose(found.gap, 1 - max(lower), rtol=1e-6)


@pytest.mark.parametrize("scale", [0.0, 2.0])
@pytest.mark.parametrize("d", [3, 20, 60])
def test_projector_of_any_matrix_is_the_sum_over_its_eigenvectors(d: int, scale: float) -> None:
    """Pi = sum of r l^T over the leading eigenvalues, r and l the columns of W and the rows of its inverse."""
    for seed in range(4):
        rng = np.random.default_rng(seed)
        M = rng.standard_normal((d, d)) @ np.diag(np.exp(scale * rng.standard_normal(d)))  # columns of many sizes
        values, W = np.linalg.eig(M)
        leading = values.real > values.real.max() - 1e-9 * np.abs(values).max()
        Pi = ((W * leading) @ np.linalg.inv(W)).real
        found = spectrum(M)
        assert (found.case, found.dimension) == ("rotating" if leading.sum() == 2 else "fixed", leading.sum())
        assert math.isclose(found.leading, values.real.max(), rel_tol=1e-9)
        assert math.isclose(found.gap, found.leading - values.real[~leading].max(), rel_tol=1e-7)
        rounding = 1e-13 * d * np.linalg.cond(W) * np.linalg.norm(Pi, 2)
        assert np.abs(found.projector - Pi).max() < rounding * np.linalg.norm(M, 2) / found.gap


@pytest.mark.parametrize("size", [2, 3, 4, 5, 6])
@pytest.mark.parametrize("condition", [1.0, 100.0])
def test_jordan_blocks_survive_rounding(size: int, condition: float) -> None:
    # An eigenvalue solver returns `size` distinct eigenvalues eps^(1/size) apart: up to .002 here.
    for seed in range(10):
        found = spectrum(similar(jordan(size, 1.0, [0.2, -0.5, -3.0]), seed, condition))
        assert (found.case, found.dimension, found.index) == ("jordan", size, size)
        assert math.isclose(found.gap, 0.8, abs_tol=0.02)


def test_eigenvalues_that_tol_merges_do_not_lengthen_a_jordan_block() -> None:
    """[[1+e,1],[0,1]] + (1-e): a block of two whose square is as small as the spread e of what was merged."""
    M = np.diag([1 + 1e-8, 1.0, 1 - 1e-8])
    M[0, 1] = 1.0
    found = spectrum(M)
    assert (found.case, found.dimension, found.index) == ("jordan", 3, 2)


def test_rotating_and_rotating_jordan() -> None:
    R = np.array([[1.0, -0.7], [0.7, 1.0]])
    Z = np.zeros((2, 2))
    for seed in range(10):
        found = spectrum(similar(np.block([[R, Z], [Z, np.diag([0.3, -2.0])]]), seed))
        assert (found.case, found.dimension) == ("rotating", 2)
        assert np.allclose(found.frequencies, 0.7)
        double = np.block([[R, np.eye(2), Z], [Z, R, Z], [Z, Z, np.diag([0.3, -1.0])]])
        found = spectrum(similar(double, seed))
        assert (found.case, found.dimension) == ("jordan", 4)
        assert np.allclose(found.frequencies, 0.7, atol=1e-6)


def test_stationary_zero_and_real_part_not_modulus() -> None:
    assert spectrum(2 * np.eye(3)).case == "stationary"
    assert spectrum(np.zeros((2, 2))).case == "stationary"
    found = spectrum(np.diag([-5.0, 1.0, -1.0]))
    assert found.leading == 1.0
    assert np.allclose(np.abs(found.basis[:, 0]), [0, 1, 0])


def test_near_degenerate_gaps_follow_the_tolerance() -> None:
    M = np.diag([1.0, 1 - 1e-5, 0.0])
    assert spectrum(M).dimension == 1
    assert spectrum(M, tol=1e-4).dimension == 2
    assert spectrum(np.array([[2, 1e4], [0, 1.0]])).dimension == 1  # far from normal, yet two clear eigenvalues
    assert limit(attention(torch.from_numpy(M), torch.eye(3, dtype=f64)), tol=1e-4).tol == 1e-4


def test_spectrum_refuses_bad_matrices() -> None:
    with pytest.raises(ValueError, match=r"shape \(2, 3\), expected a square matrix"):
        spectrum(np.zeros((2, 3)))
    with pytest.raises(ValueError, match="not finite"):
        spectrum(np.array([[np.nan, 0], [0, 1]]))


def test_levels_group_real_parts() -> None:
    J = np.block([[np.array([[0.5, -1.0], [1.0, 0.5]]), np.zeros((2, 2))], [np.zeros((2, 2)), np.diag([2.0, -1.0])]])
    real = [level[0] for level in levels(similar(J, 1))]
    assert np.allclose(real, [2.0, 0.5, -1.0])
    assert [level[2].shape[1] for level in levels(similar(J, 1))] == [1, 2, 1]


# --- the limit map ----------------------------------------------------------------------------------------------


@given(st.integers(0, 10_000))
@example(8669)  # |G e| of the leading e is a hundredth of |G|: tokens rest long before the time asked for
@settings(max_examples=25, deadline=None)
def test_limit_map_is_the_long_time_limit(seed: int) -> None:
    """Whatever the case of a random M: a long zero-temperature run ends where the map says."""
    rng = torch.Generator().manual_seed(seed)
    A = Attention.random(3, law="gaussian", head_dim=3, dtype=f64, generator=rng)
    found = limit(A)
    x = Sphere().uniform(20, 3, generator=rng, dtype=f64)
    if found.case == "fixed" and found.gap is not None and found.gap > 0.3 * abs(torch.linalg.matrix_norm(A.M[0], 2)):
        end = zero_temperature_flow(A, x, [0.0, 60.0 * float(torch.linalg.matrix_norm(A.G[0], 2)) / found.gap]).x[-1]
        assert torch.allclose(end, found.push_forward(x), atol=1e-7)
    if found.case == "rotating":
        end = zero_temperature_flow(A, x, [0.0, 7.0]).x[-1]
        inside = found.push_forward(x, 7.0)
        assert torch.allclose(inside @ found.projector.mT, inside, atol=1e-9)
        assert torch.allclose(found.push_forward(end), inside) if not found.frequencies else True


def test_rotating_pair_needs_a_time_and_follows_it() -> None:
    M = matrix([1, -0.7, 0], [0.7, 1, 0], [0, 0, 0.2])
    A = attention(M, torch.eye(3, dtype=f64))
    found = limit(A)
    x = Sphere().uniform(30, 3, dtype=f64, generator=torch.Generator().manual_seed(0))
    assert found.case == "rotating"
    with pytest.raises(ValueError, match=r"rotate: no limit. Give the time"):
        found.push_forward(x)
    for t, distance in ((5.0, 0.5), (40.0, 1e-8)):
        y = zero_temperature_flow(A, x, [0.0, t]).x[-1]
        assert (y - found.push_forward(x, t)).norm(dim=-1).max() < distance
    # dt/dtau = |G e| = |1 + .7i| on the plane: the angle turns at .7/|1+.7i|
    late = zero_temperature_flow(A, x, [0.0, 40.0, 41.0]).x
    turned = torch.atan2(late[2][:, 1], late[2][:, 0]) - torch.atan2(late[1][:, 1], late[1][:, 0])
    expected = 0.7 / math.hypot(1, 0.7)
    assert torch.allclose(torch.remainder(turned, 2 * math.pi), torch.full_like(turned, expected), atol=1e-6)


def test_jordan_limit_and_its_rates() -> None:
    """Paired with their limits tokens are 1/t away, and t^{-1/2} in L2 (mass still crossing); W2 is below."""
    J = matrix([1, 1], [0, 1])
    A = attention(J, torch.eye(2, dtype=f64))
    found = limit(A)
    assert found.case == "jordan"
    assert found.evidence["algebraic_w1"] == 1.0
    assert found.evidence["algebraic_l2"] == found.evidence["algebraic_w2"] == 0.5
    assert found.evidence["algebraic_w2_even"] == 1.0
    theta = 2 * math.pi * (torch.arange(4000, dtype=f64) + 0.5) / 4000
    x = torch.stack([theta.cos(), theta.sin()], -1)
    target = found.push_forward(x)
    assert torch.allclose(target[:, 0], torch.sign(x[:, 1]))
    path = zero_temperature_flow(A, x, torch.tensor([0.0, 40.0, 160.0], dtype=f64)).x
    away = (path - target).norm(dim=-1)
    slope = lambda p: float(torch.log(away[2].pow(p).mean() / away[1].pow(p).mean()) / p / math.log(4))
    assert abs(slope(1) + 1) < 0.06
    assert abs(slope(2) + 0.5) < 0.03
    assert abs(float(away[2].median() * 160) - 1) < 0.05


def test_stationary_and_undefined() -> None:
    x = Sphere().uniform(10, 2, dtype=f64, generator=torch.Generator().manual_seed(0))
    found = limit(attention(2 * torch.eye(2, dtype=f64), torch.eye(2, dtype=f64)))
    assert found.case == "stationary"
    assert torch.allclose(found.push_forward(x), x)
    assert torch.allclose(zero_temperature_flow(found.attention, x, [0.0, 9.0]).x[-1], x)
    found = limit(attention(diag(1, 0), torch.eye(2, dtype=f64)))
    assert (found.case, found.off_kernel) == ("undefined", "fixed")
    assert torch.allclose(found.push_forward(x)[:, 0], torch.sign(x[:, 0]))
    with pytest.raises(ValueError, match="1 of 1 tokens lie in ker G"):
        found.push_forward(matrix([0.0, 1.0]))
    sinks = limit(attention(diag(1, 0), diag(-1, 1)))
    assert (sinks.case, sinks.off_kernel) == ("undefined", "undefined")
    with pytest.raises(ValueError, match="run into ker G in finite time"):
        sinks.push_forward(x)


def test_border_tokens_are_refused() -> None:
    found = limit(attention(diag(2, 1), torch.eye(2, dtype=f64)))
    with pytest.raises(ValueError, match="border between two limits"):
        found.push_forward(matrix([0.0, 1.0], [1.0, 0.0]))
    assert torch.allclose(found.push_forward(matrix([1e-30, 1.0])), matrix([1.0, 0.0]))  # tiny is not zero


def test_push_forward_is_batched_differentiable_and_keeps_norms() -> None:
    A = attention(matrix([2, 0.5, 0], [0, 2, 0], [0.3, 0, 1]), torch.eye(3, dtype=f64))
    found = limit(attention(diag(2, 2, 1), torch.eye(3, dtype=f64)))
    x = 3 * Sphere().uniform((2, 4, 5), 3, dtype=f64, generator=torch.Generator().manual_seed(0))
    y = found.push_forward(x)
    assert y.shape == x.shape
    assert torch.allclose(y.norm(dim=-1), torch.full_like(y[..., 0], 3.0))
    assert torch.allclose(y[1, 2], found.push_forward(x[1, 2]))
    z = x[0, 0].clone().requires_grad_()
    assert torch.autograd.gradcheck(found.push_forward, (z,))
    assert torch.autograd.gradcheck(lambda z: limit(A).push_forward(z, 1.5), (z,))
    assert found.push_forward(x.float()).dtype == torch.float32


def test_as_dict_is_json() -> None:
    for A in (attention(diag(3, 1), diag(1, 2)), attention(diag(1, 0), diag(1, 1)), Attention.random(3, heads=2)):
        numbers = json.loads(json.dumps(limit(A).as_dict(), allow_nan=False))
        for name in ("case", "dimension", "projector", "leading", "gap", "rate_w1", "rate_w2"):
            assert name in numbers


def test_limits_of_other_kinds_are_refused() -> None:
    with pytest.raises(ValueError, match="kind 'unnormalised'"):
        limit(Attention.identity(2, kind="unnormalised"))
    with pytest.raises(ValueError, match="causal=True"):
        limit(Attention.identity(2, causal=True))
    with pytest.raises(ValueError, match="predict one attention at a time"):
        limit(Attention(Q=torch.eye(2).expand(3, 1, 2, 2)))


# --- rates ------------------------------------------------------------------------------------------------------


def test_rates_of_the_specification() -> None:
    found = limit(attention(diag(3, 1), diag(1, 2)))
    assert (found.g, found.kappa, found.rate_w1, found.rate_w2) == pytest.approx((1 / 3, 1, 1 / 3, 1 / 3))
    assert pytest.approx(2 * (3 + 2)) == found.C  # |V| (cond G + 2)
    assert found.t_min(100) == pytest.approx(1.5 * math.log(100))
    assert found.t_beta(100) == pytest.approx(math.log(100 / math.log(101)) / (2 * (1 / 3 + 10)))
    assert (found.exit_rate, found.terminal_rate) == pytest.approx((1, 1))
    slow = limit(attention(diag(1, 3), diag(3, 0.5)))
    assert (slow.rate_w1, slow.rate_w2, slow.exit_rate) == pytest.approx((0.5, 0.25, 0.0))


def test_a_lower_level_can_be_the_slowest() -> None:
    """Counter-example to c_p = min(g, k kappa/p) in d = 3: M = diag(3,2,1), |G e_3| = 10 keeps mass near e_3.

    min(g, kappa/p) = 1 and .5 for p = 1, 2; the mass near e_3 decays at (2+1)/10, so that c_p = .3/p.
    """
    A = attention(diag(0.5, 1, 10), diag(6, 2, 0.1))
    found = limit(A)
    assert (found.g, found.kappa, found.rate_w1, found.rate_w2) == pytest.approx((2, 1, 0.3, 0.15))
    # One octant in logarithmic gnomonic coordinates around e_3: resolves masses down to e^-60.
    u = torch.linspace(-24, 24, 81, dtype=f64)
    a, b = torch.meshgrid(u.exp(), u.exp(), indexing="ij")
    y = torch.stack([a.flatten(), b.flatten(), torch.ones(81**2, dtype=f64)], -1)
    w = a.flatten() * b.flatten() / y.norm(dim=-1) ** 3
    x = y / y.norm(dim=-1, keepdim=True)
    path = zero_temperature_flow(A, x, torch.tensor([0.0, 20.0, 30.0], dtype=f64)).x
    away = (path - torch.tensor([1.0, 0, 0], dtype=f64)).norm(dim=-1)
    for p in (1, 2):
        rate = float(torch.log((w * away[1] ** p).sum() / (w * away[2] ** p).sum()) / p / 10)
        assert rate == pytest.approx(found.rate(p), rel=0.02)


def test_rotating_rate_averages_the_turn() -> None:
    """E a plane with |G e| between 1 and 3 on it: the gap is divided by the mean of |G e| over a turn of e^{tau M}."""
    G = diag(1, 3, 1)
    M = matrix([1, -2, 0], [2, 1, 0], [0, 0, 0.5])
    A = attention(G, M @ torch.linalg.inv(G))
    found = limit(A)
    x = Sphere().retract(matrix([1.0, 0.4, 0.5]))
    path = zero_temperature_flow(A, x, torch.tensor([0.0, 20.0, 60.0], dtype=f64)).x[:, 0]
    height = path[:, 2].abs() / path[:, :2].norm(dim=-1)
    assert float(torch.log(height[1] / height[2]) / 40) == pytest.approx(found.g, rel=0.01)


def test_bound_on_the_angle_of_symmetric_M(generator: torch.Generator) -> None:
    """tan^2 angle(x_t, E) <= tan^2 angle(x_0, E) e^{-2ct}, c = (lambda_1 - lambda_2)/|G|."""
    for _ in range(5):
        G = torch.randn(4, 4, generator=generator, dtype=f64)
        S = torch.randn(4, 4, generator=generator, dtype=f64)
        A = attention(G, (S + S.mT) @ torch.linalg.inv(G))
        found = limit(A)
        x = Sphere().uniform(50, 4, generator=generator, dtype=f64)
        path = zero_temperature_flow(A, x, torch.linspace(0, 4, 9, dtype=f64)).x
        inside = (path @ found.projector.mT).norm(dim=-1)
        tan = (1 - inside**2).clamp(min=0).sqrt() / inside
        c = found.gap / float(torch.linalg.matrix_norm(G, 2))
        t = torch.linspace(0, 4, 9, dtype=f64)[:, None]
        assert bool((tan <= tan[0] * torch.exp(-c * t) * (1 + 1e-7) + 1e-7).all())


LAYERS = [
    # G, V, exit rate, beta W2^2
    ((1.0, 2.0), (-1.0, -3.0), 0.0, 1 / 5),  # permanent: THEORY 1's example
    ((1.0, -2.0), (-1.0, 2.0), 1.5, 1 / 3),  # v_1 < 0, yet the layer's mean is unstable
    ((-1.0, -2.0), (1.0, 2.0), 1.5, 1 / 3),  # v_1 > 0, yet there is a layer: clusters see their antipodes
    ((-3.0, 1.0), (-1.0, 2.0), 1.0, None),  # v_1 < 0, no layer at all, and an exit
]


@pytest.mark.parametrize(("G", "V", "exit_rate", "layer"), LAYERS)
def test_layers_and_exits(G: tuple, V: tuple, exit_rate: float, layer: float | None) -> None:
    """Counter-examples to "v_1 < 0: a permanent layer and no exit": the sign that matters is that of lambda_1."""
    from attn_flow.dynamics.particles import flow
    from attn_flow.measures.quadrature import circle

    beta = 300.0
    A = attention(diag(*G), diag(*V), beta)
    found = limit(A)
    assert found.exit_rate == pytest.approx(exit_rate)
    assert found.layer == (None if layer is None else pytest.approx(layer))
    # Both clusters, slightly off centre; the offset's growth is the exit.
    cloud = circle(300, lambda theta: torch.exp(-20 * theta.sin() ** 2) * (1 + 0.001 * theta.sin()))
    T = 3.5 if layer else 9.0  # g = 1/3 only: the clusters form later
    path = flow(A, cloud.x, [0.0, T, T + 1], h=0.03, weights=cloud.weights)
    right = cloud.weights * (cloud.x[:, 0] > 0)
    offset = (right * path.x[..., 1]).sum(-1).abs()
    if exit_rate:
        assert float(torch.log(offset[2] / offset[1])) == pytest.approx(exit_rate, rel=0.02)
    else:
        assert offset[2] < offset[1] < offset[0]
    if layer is not None:
        width = float((right * path.x[1][:, 1] ** 2).sum() / right.sum()) ** 0.5
        assert width == pytest.approx(found.width(beta), rel=0.02)
    else:
        with pytest.raises(ValueError, match="no Gaussian layer"):
            found.width(beta)


def test_the_exit_of_a_layer_that_is_no_gaussian() -> None:
    """Triangular blocks across e_1 with G V not symmetric: the offset's rates V_ii - lambda/G_ii can be read off."""
    G, V = torch.eye(3, dtype=f64), -torch.eye(3, dtype=f64)
    G[1:, 1:] = matrix([-3.0, 0.7], [0.0, 1.0])
    V[1:, 1:] = matrix([0.5, 0.4], [0.0, -3.0])
    found = limit(attention(G, V))
    assert (found.leading, found.case) == (pytest.approx(-1.0), "fixed")
    assert "not symmetric across E" in found.evidence["layer"]
    assert found.exit_rate == pytest.approx(max(0.5 + 1 / -3.0, -3.0 + 1 / 1.0))


def test_t_beta_balances_the_bound_in_w2() -> None:
    """sqrt(log(beta+1)/beta) e^{Ct} = e^{-c_2 t} there, for the exponent of W2 and not of W1."""
    found = limit(attention(diag(1.3, 1), diag(1, 1.05)))  # a slow tail
    assert found.rate(1.0) > found.rate(2.0)
    for beta in (10.0, 1000.0):
        t = found.t_beta(beta)
        terms = math.sqrt(math.log(beta + 1) / beta) * math.exp(found.C * t), math.exp(-found.rate(2.0) * t)
        assert terms[0] == pytest.approx(terms[1], rel=1e-12)


# --- exact zero-temperature flow --------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(4))
def test_exact_flow_solves_the_ode(seed: int) -> None:
    from scipy.integrate import solve_ivp

    rng = torch.Generator().manual_seed(seed)
    d = 2 + seed
    W, N = (torch.randn(d, d, generator=rng, dtype=f64) for _ in range(2))
    x0 = Sphere().uniform(4, d, generator=rng, dtype=f64)

    def velocity(t: float, y: np.ndarray) -> np.ndarray:
        x = y.reshape(4, d)
        g = x @ N.numpy().T
        F = g / np.linalg.norm(g, axis=1, keepdims=True) @ W.numpy().T
        return (F - (x * F).sum(1, keepdims=True) * x).ravel()

    t = np.array([0.0, 0.4, 2.0, 6.0])
    reference = solve_ivp(velocity, (0, 6), x0.numpy().ravel(), "DOP853", t, rtol=1e-12, atol=1e-13).y
    exact = linear_flow(W, N, x0, torch.from_numpy(t))
    assert torch.allclose(exact, torch.from_numpy(reference.T.reshape(4, 4, d)), atol=1e-8)


def test_w2_closed_form_on_the_circle() -> None:
    """G = I, V = diag(2,1): W2(mu_t, P_# mu_0) = sqrt(2 - (4/pi) asin(s)/s), s = sqrt(1 - e^{-2t})."""
    A = attention(torch.eye(2, dtype=f64), diag(2, 1))
    theta = 2 * math.pi * (torch.arange(4096, dtype=f64) + 0.5) / 4096
    x = torch.stack([theta.cos(), theta.sin()], -1)
    target = limit(A).push_forward(x)
    path = zero_temperature_flow(A, x, torch.tensor([0.0, 1.0, 2.0], dtype=f64)).x
    w2 = (path - target).square().sum(-1).mean(-1).sqrt()
    for t, number in ((1, 0.604159), (2, 0.394814)):
        s = math.sqrt(1 - math.exp(-2 * t))
        assert math.sqrt(2 - 4 / math.pi * math.asin(s) / s) == pytest.approx(number, abs=5e-7)
        assert float(w2[t]) == pytest.approx(number, abs=1e-6)


def test_exact_flow_laws(generator: torch.Generator) -> None:
    A = attention(torch.randn(3, 3, generator=generator, dtype=f64), torch.randn(3, 3, generator=generator, dtype=f64))
    x = Sphere().uniform((2, 7), 3, generator=generator, dtype=f64)
    flow = lambda x, t, A=A: zero_temperature_flow(A, x, [0.0, t]).x[-1]
    assert torch.allclose(flow(flow(x, 1.3), 2.2), flow(x, 3.5), atol=1e-11)  # semigroup
    assert torch.allclose(flow(x, 2.0)[1], flow(x[1], 2.0), atol=1e-13)  # batch = loop
    assert torch.allclose(flow(3 * x, 3 * 2.0), 3 * flow(x, 2.0), atol=1e-11)  # radius r: time t/r
    R = torch.linalg.qr(torch.randn(3, 3, generator=generator, dtype=f64))[0]
    turned = attention(R @ A.G[0] @ R.mT, R @ A.values[0] @ R.mT)
    assert torch.allclose(flow(x @ R.mT, 2.0, turned), flow(x, 2.0) @ R.mT, atol=1e-10)
    doubled = attention(5 * A.G[0], A.values[0])
    assert torch.allclose(flow(x, 2.0, doubled), flow(x, 2.0), atol=1e-11)  # only the direction of G x matters


def test_exact_flow_resolves_tiny_components_and_long_times() -> None:
    """d/dt log(x_1/x_2) = 1 near e_2 for G = diag(3,1), V = diag(1,2): e^{-69} takes 69 units of time to leave."""
    A = attention(diag(3, 1), diag(1, 2))
    path = zero_temperature_flow(A, matrix([math.exp(-69), 1.0]), torch.tensor([0.0, 60.0, 400.0], dtype=f64)).x[:, 0]
    assert float(path[1, 0]) == pytest.approx(math.exp(-9), rel=1e-6)
    assert float(path[2, 0]) == pytest.approx(1.0)


def test_exact_flow_errors() -> None:
    A = attention(diag(1, 0), torch.eye(2, dtype=f64))
    with pytest.raises(ValueError, match="lies in ker G"):
        zero_temperature_flow(A, matrix([0.0, 1.0]), 1.0)
    with pytest.raises(ValueError, match="expected one sphere"):
        zero_temperature_flow(Attention.random(2, heads=2, dtype=f64), matrix([0.0, 1.0], [3.0, 0.0]), 1.0)
    with pytest.raises(ValueError, match="support = 'token'"):
        zero_temperature_flow(A, matrix([1.0, 1.0]), 1.0, "token")


# --- supports ---------------------------------------------------------------------------------------------------


def test_ellipsoidal_support_has_the_covariance_inside(generator: torch.Generator) -> None:
    G, V, B = (torch.randn(3, 3, generator=generator, dtype=f64) for _ in range(3))
    S = B @ B.mT
    A = attention(G, V)
    support = EllipsoidSupport(torch.zeros(3, dtype=f64), S, 1.5)
    found = limit(A, support)
    expected = spectrum((V @ S @ G).numpy())
    assert found.case == expected.case
    assert np.allclose(found.projector, expected.projector, atol=1e-8)
    assert limit(A, Gaussian(support.mean, S, cap=1.5)).leading == pytest.approx(found.leading)
    x = Sphere().uniform(10, 3, generator=generator, dtype=f64)
    exact = zero_temperature_flow(A, x, [0.0, 1.0], support).x[-1]
    integrated = zero_temperature_flow(A, x, [0.0, 1.0], support, step=Adaptive(tol=1e-9)).x[-1]
    assert torch.allclose(exact, integrated, atol=1e-6)
    with pytest.raises(ValueError, match="without cap"):
        limit(A, Gaussian(support.mean, S))


def test_unit_sphere_as_support_is_the_full_sphere(generator: torch.Generator) -> None:
    A = Attention.random(3, head_dim=3, dtype=f64, generator=generator)
    x = Sphere().uniform(10, 3, generator=generator, dtype=f64)
    assert torch.equal(limit(A, UniformSphere(3)).projector, limit(A).projector)
    mixture = Mixture([UniformSphere(3)], torch.ones(1, dtype=f64))
    assert limit(A, mixture).case == "nonlinear"
    a, b = (zero_temperature_flow(A, x, [0.0, 1.0], s).x[-1] for s in (None, mixture))
    assert torch.allclose(a, b, atol=1e-6)


def test_off_centre_support_is_nonlinear_and_certified() -> None:
    A = attention(torch.eye(3, dtype=f64), torch.eye(3, dtype=f64))
    support = EllipsoidSupport(torch.tensor([2.0, 0, 0], dtype=f64), torch.eye(3, dtype=f64), 0.5)
    found = limit(A, support)
    assert found.case == "nonlinear"
    x = Sphere().uniform(20, 3, dtype=f64, generator=torch.Generator().manual_seed(1))
    end = found.push_forward(x)
    # x' = P_x(m + rho x): m wins, every token goes to m/|m|
    assert torch.allclose(end, torch.tensor([1.0, 0, 0], dtype=f64).expand(20, 3), atol=1e-9)


def test_frozen_cloud_and_moving_tokens() -> None:
    points = Sphere().retract(matrix([1, 0.1], [-1, 0.3], [0.0, -1.0]))
    A = attention(torch.eye(2, dtype=f64), torch.eye(2, dtype=f64))
    x = Sphere().uniform(12, 2, dtype=f64, generator=torch.Generator().manual_seed(0))
    end = limit(A, Cloud(points)).push_forward(x)
    nearest = points[(x @ points.mT).argmax(-1)]
    assert torch.allclose(end, nearest, atol=1e-9)  # V = I: towards the point it attends to
    # The moving cloud with G = V = I: every token is its own argmax, at rest but not an isolated equilibrium.
    moving = limit(A, "tokens").settle(x, horizon=5.0)
    assert torch.allclose(moving.x, x)
    assert not bool(moving.certified.any())


def test_several_heads_are_certified_or_not() -> None:
    x = Sphere().uniform(8, 4, dtype=f64, generator=torch.Generator().manual_seed(0))
    A = Attention.random(4, heads=3, head_dim=4, dtype=f64, generator=torch.Generator().manual_seed(0))
    found = limit(A)
    assert found.case == "nonlinear"
    assert "several heads" in found.evidence["because"]
    settled = found.settle(x)
    assert bool(settled.certified.all())
    assert bool((settled.rate > 0).all())
    drift = sum(g / g.norm(dim=-1, keepdim=True) @ A.values[h].mT for h in range(3) for g in [settled.x @ A.G[h].mT])
    velocity = drift - (drift * settled.x).sum(-1, keepdim=True) * settled.x
    assert float(velocity.norm(dim=-1).max()) < 1e-9
    assert torch.allclose(found.push_forward(x), settled.x)
    # This one turns for ever: nothing may be certified.
    turning = Attention.random(4, heads=3, head_dim=4, dtype=f64, generator=torch.Generator().manual_seed(1))
    settled = limit(turning).settle(x[:3], horizon=30.0)
    assert not bool(settled.certified.any())
    assert float(settled.speed.min()) > 0.01


def test_a_plateau_is_no_limit() -> None:
    """A saddle: exactly at e_2 the speed is 0, the Jacobian has +1, and the token is refused."""
    A = attention(diag(3, 1), diag(1, 2), value_bias=torch.tensor([0.0, 0.0], dtype=f64), query_bias=None)
    biased = Attention.from_matrices(diag(3, 1), diag(1, 2), query_bias=torch.tensor([0.0, 1e-3], dtype=f64))
    assert limit(A).case == "fixed"  # biases that are zero are no biases
    settled = limit(biased).settle(matrix([0.0, 1.0]), horizon=10.0)
    assert not bool(settled.certified.any())
    assert float(settled.speed) < 1e-12
    with pytest.raises(ValueError, match="1 of 1 tokens have no certified limit"):
        limit(biased).push_forward(matrix([0.0, 1.0]))


@pytest.mark.parametrize("unit", [1e-8, 1.0, 1e8])
def test_levels_are_told_apart_relative_to_the_matrix(unit: float) -> None:
    """diag(2, 2 - 1e-8, 1) in any unit: the first two are one level, as far apart as the rounding of an estimate."""
    found = levels(unit * np.diag([2.0, 2.0 - 1e-8, 1.0]))
    assert [real / unit for real, _, _ in found] == pytest.approx([2.0, 1.0], rel=1e-7)
    assert [basis.shape[1] for _, _, basis in found] == [2, 1]


# --- resolution -------------------------------------------------------------------------------------------------


def test_resolution_of_the_specification() -> None:
    """d = 10, n = 1000, G = diag(3,1,...): 94% of tokens are their own argmax."""
    x = Sphere().uniform(1000, 10, dtype=f64, generator=torch.Generator().manual_seed(0))
    A = attention(diag(3, *[1] * 9), torch.eye(10, dtype=f64), beta=100.0)
    with pytest.warns(ResolutionWarning, match="the mean-field limit need not hold"):
        found = resolution(A, x)
    assert found.verdict == "unresolved"
    assert float(found.self_argmax) == pytest.approx(0.94, abs=0.02)
    scores = x @ A.G[0].mT @ x.mT
    assert float(found.self_argmax) == pytest.approx(float((scores.argmax(1) == torch.arange(1000)).double().mean()))
    reach = (x @ A.G[0].mT).norm(dim=-1).mean()
    assert float(found.number) == pytest.approx(float(100 * reach * 1000 ** (-2 / 9)))


@pytest.mark.parametrize("dtype", [torch.float32, f64])
def test_every_token_of_a_sphere_is_its_own_argmax(dtype: torch.dtype) -> None:
    """<x, y> <= |x|^2 on a sphere of any radius, where rounding is that of |x|^2."""
    for radius in (1e-3, 1.0, 1e3):
        x = Sphere(radius).uniform(400, 60, dtype=dtype, generator=torch.Generator().manual_seed(0))
        assert float(resolution(Attention.identity(60, 1e-9, dtype=dtype), x).self_argmax) == pytest.approx(1.0)


def test_many_tokens_that_do_not_interact_are_certified_one_by_one() -> None:
    """2100 tokens are more than are certified together; those that do not interact need not be."""
    biased = Attention.from_matrices(diag(3, 1), diag(2, 1), query_bias=torch.tensor([0.1, 0.0], dtype=f64))
    angle = torch.linspace(-1.2, 1.2, 2100, dtype=f64)
    settled = limit(biased).settle(torch.stack([angle.cos(), angle.sin()], -1))
    assert bool(settled.certified.all())
    assert torch.allclose(settled.x, matrix([1.0, 0.0]).expand(2100, 2), atol=1e-9)


@pytest.mark.parametrize(
    ("number", "verdict"),
    [(0.099, "resolved"), (0.101, "marginal"), (0.99, "marginal"), (1.01, "unresolved")],
)
def test_the_verdict_of_a_resolution_goes_by_its_number(number: float, verdict: str) -> None:
    """Which is proportional to beta; weights, or it would be the noise of a sample that decides."""
    x = Sphere().uniform(40, 3, dtype=f64, generator=torch.Generator().manual_seed(0))
    weights = torch.full((40,), 1 / 40, dtype=f64)
    unit = float(resolution(Attention.identity(3, 1.0, dtype=f64), x, weights=weights, warn=False).number.max())
    found = resolution(Attention.identity(3, number / unit, dtype=f64), x, weights=weights, warn=False)
    assert float(found.number.max()) == pytest.approx(number)
    assert found.verdict == verdict


def test_resolution_is_batched_and_weighted(recwarn: pytest.WarningsRecorder) -> None:
    x = Sphere().uniform((3, 40), 2, dtype=f64, generator=torch.Generator().manual_seed(0))
    A = Attention.random(2, heads=2, head_dim=2, beta=1.0, dtype=f64, generator=torch.Generator().manual_seed(0))
    found = resolution(A, x)
    assert found.number.shape == (3, 2)
    assert found.verdict == "resolved"
    assert len(recwarn) == 0
    mask = torch.ones(3, 40, dtype=torch.bool)
    mask[:, 30:] = False
    masked = resolution(A, x, mask=mask)
    assert torch.allclose(masked.number, resolution(A, x[:, :30]).number)
    assert torch.allclose(masked.self_argmax, resolution(A, x[:, :30]).self_argmax)


def test_the_moving_push_forward_at_many_times_is_each_of_them() -> None:
    V = torch.tensor([[2.0, -1, 0], [1, 2, 0], [0, 0, 1]]).double()
    found = limit(Attention.from_matrices(torch.diag(torch.tensor([1.0, 2, 1])).double(), V))
    x = Sphere().uniform(5, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    for t in ([0.0, 1.0, 2.5], [0.5, 3.0]):
        together = found.moving_push_forward(x, torch.tensor(t, dtype=torch.float64))
        alone = torch.stack([found.push_forward(x, each) for each in t])
        assert float((together - alone).abs().max()) < 1e-12


def test_tokens_rest_at_a_leading_direction_only() -> None:
    """At e_1 for good; at the saddle e_2 exactly, and away from it from a distance of 1e-12."""
    A = attention(matrix([2, 0], [0, 1]), torch.eye(2, dtype=f64))
    x = matrix([0.6, 0.8], [0, 1], [1e-12, 1])
    late = zero_temperature_flow(A, x, [0.0, 20.0, 1000.0, 2000.0]).x
    assert torch.equal(late[:, 1], x[1].expand(4, 2))
    assert (late[2:, ::2] - matrix([1, 0])).abs().max() < 1e-14
