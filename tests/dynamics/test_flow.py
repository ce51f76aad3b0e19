"""The flow: requested times, laws, closed forms and rates of the papers, noise, placements, stopping."""

import inspect
import math
import re
import warnings

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.integrate import solve_ivp
from torch import Tensor

from attn_flow import (
    Adaptive,
    Attention,
    Cloud,
    Euclidean,
    Sphere,
    UniformSphere,
    consensus,
    dopri5,
    euler,
    flow,
    push_forward,
    rk4,
)
from attn_flow.dynamics import kicks, placement
from attn_flow.dynamics.integrator import StepWarning
from attn_flow.dynamics.pacing import Pace
from attn_flow.dynamics.steppers import Velocity
from attn_flow.geometry import Geometry
from attn_flow.measures.quadrature import circle

F64 = torch.float64


def identity(d: int, beta: float | Tensor, **options) -> Attention:
    return Attention.identity(d, beta, dtype=F64, **options)


def tokens(n: int | tuple[int, ...], d: int, seed: int = 0) -> Tensor:
    return Sphere().uniform(n, d, generator=torch.Generator().manual_seed(seed), dtype=F64)


def random_attention(d: int, seed: int, **options) -> Attention:
    return Attention.random(d, 2, generator=torch.Generator().manual_seed(seed), dtype=F64, **options)


# --- times ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("step", [euler, rk4, dopri5, Adaptive()], ids=lambda s: s.name)
def test_requested_times_are_hit_exactly(step) -> None:
    """The path at irregular times is the same flow asked for each of them alone, and t comes back bit for bit."""
    times = torch.tensor([0.25, 0.3, 1.0, 1.0 + 1e-7, 2.7], dtype=F64)
    attention, x0 = random_attention(3, 1), tokens(5, 3)
    path = flow(attention, x0, times, step=step, h=0.1)
    assert torch.equal(path.t, times)
    assert torch.equal(path.x[0], Sphere().retract(x0))
    assert len(path) == 5
    for i in range(1, 5):
        alone = flow(attention, x0, [0.25, float(times[i])], step=step, h=1e-2 if step is euler else 0.05).x[-1]
        torch.testing.assert_close(path.x[i], alone, rtol=0, atol=0.1 if step is euler else 1e-5)


def test_steps_are_equal_and_at_most_h() -> None:
    seen: list[tuple[float, float]] = []

    def step(velocity: Velocity, t: float, x: Tensor, h: float, geometry: Geometry) -> Tensor:
        seen.append((t, h))
        return geometry.retract(x + h * velocity(t, x))

    path = flow(identity(3, 1.0), tokens(4, 3), [0.0, 1.0, 1.25], step=step, h=0.3)
    assert [h for _, h in seen] == pytest.approx([0.25] * 5)
    assert [t for t, _ in seen] == pytest.approx([0, 0.25, 0.5, 0.75, 1.0])
    assert path.about["step"] == "step"
    assert path.about["evaluations"] == 5
    assert flow(identity(3, 1.0), tokens(4, 3), [0.0, 0.3], h=0.1).about["evaluations"] == 12  # .3/.1 is 3 steps of 4


def test_a_number_is_a_hundred_and_one_times() -> None:
    path = flow(identity(3, 1.0), tokens(4, 3), 2.0, h=1.0)
    torch.testing.assert_close(path.t, torch.linspace(0, 2, 101, dtype=F64))


def test_push_forward_is_the_end_of_the_path() -> None:
    attention, x0 = random_attention(3, 1), tokens(5, 3)
    assert torch.equal(push_forward(attention, x0, 1.5), flow(attention, x0, [0, 1.5]).x[-1])
    assert torch.equal(push_forward(attention, 3 * x0, 0.0), Sphere().retract(3 * x0))


# --- laws -----------------------------------------------------------------------------------------------------------

seeds = st.integers(0, 2**32)
laws = settings(max_examples=8, deadline=None)


@given(seeds)
@laws
def test_semigroup(seed: int) -> None:
    attention, x0 = random_attention(3, seed), tokens(5, 3, seed)
    there = push_forward(attention, push_forward(attention, x0, 0.6, h=0.1), 0.4, h=0.1)
    torch.testing.assert_close(there, push_forward(attention, x0, 1.0, h=0.1), rtol=0, atol=1e-12)


@given(seeds)
@laws
def test_equivariance_and_scaling(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    attention, x0 = random_attention(3, seed, beta=3.0), tokens(5, 3, seed)
    Q, K, V, O = attention.Q, attention.K, attention.V, attention.O
    assert K is not None
    assert V is not None
    end = push_forward(attention, x0, 1.0, h=0.2)
    p = torch.randperm(5, generator=generator)
    torch.testing.assert_close(push_forward(attention, x0[p], 1.0, h=0.2), end[p])
    R = torch.linalg.qr(torch.randn(3, 3, generator=generator, dtype=F64))[0]
    turned = Attention(Q @ R.T, K @ R.T, V @ R.T, R @ O, 3.0)
    torch.testing.assert_close(push_forward(turned, x0 @ R.T, 1.0, h=0.2), end @ R.T)
    torch.testing.assert_close(push_forward(Attention(5 * Q, K, V, O, 3.0 / 5), x0, 1.0, h=0.2), end)


@given(seeds, st.sampled_from([("softmax", 1), ("unnormalised", 1), ("unnormalised", 3)]))
@laws
def test_the_energy_never_decreases_and_tokens_stay_on_the_sphere(seed: int, case: tuple[str, int]) -> None:
    """V_h = G_h symmetric: sum_h (1/(2 beta n^2)) sum_ij e^{beta <x_i, G_h x_j>} (THEORY 0); one head for SA."""
    (kind, heads), beta, n = case, 1.0, 6
    generator = torch.Generator().manual_seed(seed)
    attention = Attention.random(3, heads, None, "symmetric", beta, generator=generator, dtype=F64, kind=kind)
    path = flow(attention, tokens(n, 3, seed), torch.linspace(0, 1, 21), step=Adaptive(tol=1e-7))
    logits = beta * torch.einsum("tid,hde,tje->thij", path.x, attention.G, path.x)
    energy = logits.exp().sum((-3, -2, -1)) / (2 * beta * n**2)
    assert bool((energy.diff() >= -1e-6 * energy[1:]).all())
    torch.testing.assert_close(path.x.norm(dim=-1), torch.ones_like(path.x[..., 0]), rtol=0, atol=1e-14)


def test_several_softmax_heads_can_lower_the_energy() -> None:
    """THEORY 0's monotone energy is USA's: softmax heads weigh their parts by 1/Z_h, and V_h = G_h is not enough."""
    beta, generator = 4.0, torch.Generator().manual_seed(103)
    rates = {}
    for kind in ("softmax", "unnormalised"):
        generator.manual_seed(103)
        attention = Attention.random(2, 2, None, "symmetric", beta, generator=generator, dtype=F64, kind=kind)
        x = Sphere().uniform(3, 2, generator=generator, dtype=F64)
        v = Sphere().tangent(x, attention.drift(x))
        e = (beta * torch.einsum("id,hde,je->hij", x, attention.G, x)).exp()
        rates[kind] = float(torch.einsum("hij,id,hde,je->", e, v, attention.G, x)) / 9
    assert rates["softmax"] < -1000
    assert rates["unnormalised"] > 0


@pytest.mark.parametrize("kind", ["softmax", "unnormalised"])
def test_energy_balance(kind: str) -> None:
    """dE/dt = (1/n) sum |x_i'|^2 for USA, weighted by Z_i = (1/n) sum_k e^{beta <x_i,x_k>} for SA (THEORY 0)."""
    beta, n, h = 1.5, 7, 1e-3
    x0 = tokens(n, 3)
    attention = identity(3, beta, kind=kind)
    energy = lambda x: float((beta * x @ x.T).exp().sum() / (2 * beta * n**2))
    slope = (energy(push_forward(attention, x0, h)) - energy(x0)) / h
    speed2 = Sphere().tangent(x0, attention.drift(x0)).square().sum(-1)
    Z = (beta * x0 @ x0.T).exp().mean(-1) if kind == "softmax" else torch.ones(n, dtype=F64)
    assert slope == pytest.approx(float((Z * speed2).mean()), rel=5e-3)


def test_a_batch_is_a_loop_with_weights_masks_and_betas() -> None:
    x0, beta = tokens((3, 2, 6), 3), torch.tensor([0.5, 3.0, 20.0], dtype=F64)
    w = torch.rand(2, 6, generator=torch.Generator().manual_seed(1), dtype=F64)
    mask = torch.ones(3, 1, 6, dtype=torch.bool)
    mask[1, :, 4:] = False
    path = flow(identity(3, beta[:, None, None]), x0, [0, 0.5, 2.0], weights=w, mask=mask)
    assert path.x.shape == (3, 3, 2, 6, 3)
    for i in range(3):
        for j in range(2):
            keep = mask[i, 0]
            alone = flow(identity(3, float(beta[i])), x0[i, j][keep], [0, 0.5, 2.0], weights=w[j][keep])
            torch.testing.assert_close(path.x[:, i, j][:, keep], alone.x)
    assert torch.equal(path.x[0, 1, :, 4:], path.x[2, 1, :, 4:])  # padding stays put
    sweep = flow(identity(3, beta[:, None]), x0[0, 0], [0, 1.0])  # one cloud, many betas
    assert sweep.x.shape == (2, 3, 6, 3)
    torch.testing.assert_close(sweep.x[-1, 1], push_forward(identity(3, 3.0), x0[0, 0], 1.0))


def test_padding_may_hold_anything() -> None:
    """Zero rows, on every placement: the drift of padding is never divided by its length."""
    x0 = tokens(5, 3)
    padded = torch.cat([torch.zeros(1, 3, dtype=F64), x0, 100 * torch.ones(2, 3, dtype=F64)])
    mask = torch.tensor([False] + [True] * 5 + [False] * 2)
    for place in (placement.post, placement.pre, placement.peri, placement.ngpt(0.5), placement.ln_scaling):
        end = push_forward(identity(3, 2.0), padded, 1.0, mask=mask, placement=place)
        torch.testing.assert_close(end[mask], push_forward(identity(3, 2.0), x0, 1.0, placement=place))
        assert bool(torch.isfinite(end).all())


def test_gradients_through_the_flow() -> None:
    x0 = tokens(4, 3).requires_grad_()
    Q = torch.randn(3, 3, dtype=F64, requires_grad=True)
    run = lambda x, Q: push_forward(Attention(Q, beta=2.0), x, 0.3, h=0.1)
    assert torch.autograd.gradcheck(run, (x0, Q))


def test_float32_in_float32_out() -> None:
    x0 = tokens(5, 3).float()
    path = flow(Attention.identity(3, 2.0), x0, [0, 1.0])
    assert path.x.dtype == torch.float32
    assert path.t.dtype == F64
    torch.testing.assert_close(path.x[-1].double(), push_forward(identity(3, 2.0), x0.double(), 1.0), rtol=0, atol=1e-5)


def test_an_attention_that_changes_in_time() -> None:
    """beta(t) = 1 + t through a function, against steps of frozen attention, first order in their length."""
    x0 = tokens(6, 3)
    schedule = lambda t: identity(3, 1.0 + t)
    end = push_forward(schedule, x0, 2.0)
    errors = []
    for steps in (20, 40):
        x = x0
        for i in range(steps):
            x = push_forward(schedule(2.0 * i / steps), x, 2.0 / steps)
        errors.append(float((x - end).norm()))
    assert math.log2(errors[0] / errors[1]) == pytest.approx(1.0, abs=0.1)
    assert flow(schedule, x0, [0, 0.1]).about["attention"] == {"scheduled": "<lambda>"}


# --- closed forms and the papers' numbers -----------------------------------------------------------------------------


def test_zero_temperature_against_the_uniform_law_is_linear() -> None:
    """G = I: x' = P_x V x, so that x(t) = e^{tV} x_0 / |e^{tV} x_0| (THEORY 1)."""
    V = torch.randn(3, 3, generator=torch.Generator().manual_seed(0), dtype=F64)
    attention = Attention.from_matrices(torch.eye(3, dtype=F64), V, math.inf)
    x0 = tokens(10, 3)
    path = flow(attention, x0, [0, 0.5, 1.5], context=UniformSphere(3), h=0.02)
    for t, x in zip(path.t, path.x):
        torch.testing.assert_close(x, Sphere().retract(x0 @ torch.linalg.matrix_exp(t * V).T), rtol=0, atol=1e-6)


def test_mean_field_flow_is_the_flow_of_every_token_by_itself() -> None:
    law, x0, attention = Cloud(tokens(50, 3, seed=3)), tokens(6, 3), random_attention(3, 2)
    together = push_forward(attention, x0, 1.0, context=law)
    for i in range(6):
        torch.testing.assert_close(together[i : i + 1], push_forward(attention, x0[i : i + 1], 1.0, context=law))


@pytest.mark.parametrize(
    ("kind", "beta", "rate"),
    [
        ("softmax", 0.5, 1.0),
        ("softmax", 4.0, 1.0),
        ("unnormalised", 0.5, 1.6487),
        ("unnormalised", 1.0, 2.7181),
        ("unnormalised", 2.0, 7.3883),
    ],
)
def test_synchronisation_rates_near_consensus(kind: str, beta: float, rate: float) -> None:
    """Distances decay at 1 (SA) and e^beta (USA) near consensus, 1 - <x_i,x_j> at twice that (THEORY 2)."""
    x0 = Sphere().retract(torch.tensor([1.0, 0, 0], dtype=F64) + 1e-3 * tokens(6, 3))
    times = [0.0, 1 / rate, 2 / rate]
    path = flow(identity(3, beta, kind=kind), x0, times, step=dopri5, h=0.02 / rate)
    gap = (path.x[:, :1] - path.x).norm(dim=-1).amax(-1)
    assert float((gap[1] / gap[2]).log()) * rate == pytest.approx(rate, abs=5e-4 * rate)
    defect = (path.x[:, :1] - path.x).square().sum(-1).amax(-1) / 2  # 1 - <x_i,x_j>, without cancellation
    assert float((defect[1] / defect[2]).log()) == pytest.approx(2.0, abs=1e-3)


@pytest.mark.parametrize(("beta", "rate"), [(0.0, 0.4998), (0.25, 0.3892)])
def test_synchronisation_rate_of_a_density_on_the_circle(beta: float, rate: float) -> None:
    """Density (1 + .6 cos)/2pi, USA: mass leaves the antipode at e^-beta, so W2 decays at e^-beta / 2 (THEORY 2)."""
    cloud = circle(160, lambda theta: 1 + 0.6 * torch.cos(theta), towards=0.0)
    assert cloud.weights is not None
    path = flow(identity(2, beta, kind="unnormalised"), cloud.x, [0, 6.0, 10.0], weights=cloud.weights, h=0.1)
    e1 = torch.tensor([1.0, 0.0], dtype=F64)
    W2 = (cloud.weights * (path.x - e1).square().sum(-1)).sum(-1).sqrt()
    assert float((W2[1] / W2[2]).log() / 4) == pytest.approx(rate, abs=1e-3)


def test_two_thirds_against_one_third_is_stationary() -> None:
    """2/3 delta_e + 1/3 delta_-e does not move under USA, although it is no consensus (THEORY 2)."""
    x0 = torch.tensor([[1.0, 0.0], [-1.0, 0.0]], dtype=F64)
    w = torch.tensor([2.0, 1.0], dtype=F64)
    end = push_forward(identity(2, 0.5, kind="unnormalised"), x0, 2.0, weights=w)
    torch.testing.assert_close(end, x0, rtol=0, atol=1e-14)


@pytest.mark.parametrize(("beta", "time"), [(1.0, 5.270), (4.0, 6.954), (6.0, 15.995), (9.0, 178.73)])
def test_equiangular_time_to_consensus(beta: float, time: float) -> None:
    """n = 32 orthogonal tokens stay equiangular and reach rho = .999 at THEORY 4's time, SA."""
    half = 0.5 * 10 ** -(2 if beta == 9 else 3)  # the last digit given
    x0 = torch.eye(32, dtype=F64)
    path = flow(identity(32, beta), x0, [0, time - half, time + half], step=Adaptive(tol=1e-9))
    G = path.x[1:] @ path.x[1:].mT
    off = G[:, ~torch.eye(32, dtype=torch.bool)]
    torch.testing.assert_close(off.amin(-1), off.amax(-1), rtol=0, atol=1e-6)
    assert float(off[0].max()) < 0.999 < float(off[1].min())


@pytest.mark.parametrize("kind", ["softmax", "unnormalised"])
def test_equiangular_ode(kind: str) -> None:
    """rho' = 2 e^{beta rho}(1-rho)((n-1)rho+1)/(e^beta + (n-1)e^{beta rho}), and (2/n) e^{beta rho}(...) for USA."""
    n, beta = 5, 2.0

    def velocity(t: float, rho: np.ndarray) -> np.ndarray:
        shape = np.exp(beta * rho) * (1 - rho) * ((n - 1) * rho + 1)
        if kind == "unnormalised":
            return 2 / n * shape
        return 2 * shape / (np.exp(beta) + (n - 1) * np.exp(beta * rho))

    times = np.array([0.0, 0.5, 1.0, 2.0])
    exact = solve_ivp(velocity, (0, 2), [0.0], t_eval=times, rtol=1e-10, atol=1e-12).y[0]
    path = flow(identity(n, beta, kind=kind), torch.eye(n, dtype=F64), times, h=0.01)
    torch.testing.assert_close(path.x[:, 0].mul(path.x[:, 1]).sum(-1), torch.tensor(exact), rtol=0, atol=1e-7)


def test_causal_tokens_go_to_the_first() -> None:
    """THEORY 8: causal attention with V = I drives every token to x_1(0), which never moves."""
    x0 = tokens(6, 3)
    end = push_forward(identity(3, 1.0, causal=True), x0, 60.0, h=0.1)
    torch.testing.assert_close(end[0], x0[0], rtol=0, atol=1e-12)
    assert float(Sphere().distance(end, x0[:1].expand(6, 3)).max()) < 1e-2
    alone = push_forward(identity(3, 1.0, causal=True, self_attention=False), x0, 1.0)
    torch.testing.assert_close(alone[0], x0[0])  # it sees nobody


def test_hardmax_leaders_in_flat_space() -> None:
    """x <- (x + a mean_argmax x)/(1 + a) of arXiv 2407.01602 is an Euler step of hardmax in shrinking coordinates."""
    x0 = torch.randn(8, 2, generator=torch.Generator().manual_seed(0), dtype=F64)
    a = 0.3
    attention = identity(2, math.inf)
    step = push_forward(attention, x0, a, geometry=Euclidean(), step=euler, h=a) / (1 + a)
    for i in range(8):
        scores = [float(x0[i] @ x0[j]) for j in range(8)]
        leader = x0[scores.index(max(scores))]
        torch.testing.assert_close(step[i], (x0[i] + a * leader) / (1 + a))


# --- placements -------------------------------------------------------------------------------------------------------


def two_tokens(name: str, t: np.ndarray, beta: float, rho0: float, r0: float, alpha: float) -> np.ndarray:
    """rho(t) of two tokens with theta' = (1/s) P A and the radii of THEORY 9's table, as scalar ODEs."""

    def velocity(t: float, state: np.ndarray) -> list[float]:
        rho, r = state
        q = math.exp(beta * rho) / (math.exp(beta) + math.exp(beta * rho))
        along, size = 1 - q + q * rho, math.sqrt((1 - q) ** 2 + q**2 + 2 * q * (1 - q) * rho)
        s = {"post": 1, "pre": r, "peri": r * size, "ngpt": size / alpha, "ln_scaling": math.sqrt(t + 1)}[name]
        growth = {"pre": along, "peri": along / size}.get(name, 0.0)
        return [2 * q * (1 - rho**2) / s, growth]

    return solve_ivp(velocity, (0, t[-1]), [rho0, r0], t_eval=t, rtol=1e-11, atol=1e-12).y[0]


@pytest.mark.parametrize("name", ["post", "pre", "peri", "ngpt", "ln_scaling"])
def test_placements_against_the_reduced_ode(name: str) -> None:
    beta, rho0, alpha = 1.5, -0.3, 0.7
    r0 = 2.0 if name in ("pre", "peri") else 1.0
    place = placement.ngpt(alpha) if name == "ngpt" else getattr(placement, name)
    x0 = r0 * torch.tensor([[1.0, 0, 0], [rho0, math.sqrt(1 - rho0**2), 0]], dtype=F64)
    times = np.array([0.0, 0.5, 1.0, 3.0, 6.0])
    path = flow(identity(3, beta), x0, times, placement=place, h=0.02)
    theta = Sphere().retract(path.x)
    exact = two_tokens(name, times, beta, rho0, r0, alpha)
    torch.testing.assert_close((theta[:, 0] * theta[:, 1]).sum(-1), torch.tensor(exact), rtol=0, atol=1e-7)
    assert path.about["placement"] == place.name


def test_flat_placements_need_flat_space() -> None:
    with pytest.raises(
        ValueError, match=r"placement 'pre' moves the radius of tokens; expected geometry=Euclidean\(\)"
    ):
        flow(identity(3, 1.0), tokens(3, 3), 1.0, placement=placement.pre, geometry=Sphere())


# --- noise ------------------------------------------------------------------------------------------------------------


def still(d: int) -> Attention:
    """No attention at all."""
    return Attention(torch.eye(d, dtype=F64), V=torch.zeros(d, d, dtype=F64))


def test_covariances_of_the_kicks() -> None:
    """E xi_i xi_j^T = sigma^2 (delta_ij, 1, <x_i,x_j>, kernel(<x_i,x_j>)) I over 40,000 draws."""
    x = tokens(3, 2).expand(40_000, 3, 2)
    gram, sigma, eye = x[0] @ x[0].T, 0.7, torch.eye(3, dtype=F64)
    kernel = lambda rho: (1 + rho) ** 2 / 4
    cases = {
        "independent": (kicks.independent(sigma), eye),
        "common": (kicks.common(sigma), torch.ones(3, 3, dtype=F64)),
        "linear": (kicks.linear(sigma), gram),
        "field": (kicks.field(kernel, sigma), kernel(gram)),
    }
    for name, (kick, expected) in cases.items():
        xi = kick(x, torch.Generator().manual_seed(0))
        covariance = torch.einsum("bid,bje->ijde", xi, xi) / len(xi)
        exact = sigma**2 * torch.einsum("ij,de->ijde", expected, torch.eye(2, dtype=F64))
        assert float((covariance - exact).abs().max()) < 0.02, name
        assert float(xi.mean(0).abs().max()) < 0.02, name


def test_noise_scales_with_the_square_root_of_the_step_and_follows_its_generator() -> None:
    x0 = tokens((2000, 2), 3)
    run = lambda h, seed: push_forward(
        still(3), x0, h, step=euler, h=h, noise=kicks.independent(0.1), generator=torch.Generator().manual_seed(seed)
    )
    spread = [float((run(h, 7) - x0).square().sum(-1).mean()) for h in (0.01, 0.04)]
    assert spread[0] == pytest.approx(0.1**2 * 0.01 * 2, rel=0.05)  # two tangent directions
    assert spread[1] / spread[0] == pytest.approx(4.0, rel=0.05)
    assert torch.equal(run(0.01, 3), run(0.01, 3))
    assert not torch.equal(run(0.01, 3), run(0.01, 4))
    torch.testing.assert_close(run(0.01, 3).norm(dim=-1), torch.ones(2000, 2, dtype=F64))
    mask = torch.tensor([True, False])
    held = push_forward(still(3), x0, 0.1, mask=mask, noise=kicks.common(1.0))
    torch.testing.assert_close(held[:, 1], x0[:, 0])  # padding is put on the first token and is not kicked


@pytest.mark.parametrize(("attention", "exponent"), [(None, -2.0), (1.0, -4.0)])
def test_lyapunov_exponent_of_shared_random_weights(attention: float | None, exponent: float) -> None:
    """log(1 - rho) falls at -[(d-1) kappa(1) - (d-3) kappa'(1)] - 2a: -2 and -4 for kappa = rho, d = 8 (THEORY 7)."""
    d, pairs, T, h = 8, 2000, 1.0, 0.005
    x0 = tokens((pairs, 1), d)
    x0 = Sphere().retract(x0 + torch.cat([0 * x0, 1e-4 * tokens((pairs, 1), d, seed=1)], dim=-2))
    a = still(d) if attention is None else identity(d, attention)
    generator = torch.Generator().manual_seed(2)
    end = push_forward(a, x0, T, step=euler, h=h, noise=kicks.linear(1.0), generator=generator)
    defect = lambda x: (x[:, 0] - x[:, 1]).square().sum(-1) / 2
    slope = float((defect(end).log() - defect(x0).log()).mean()) / T
    assert slope == pytest.approx(exponent, abs=0.15)


def test_a_field_needs_a_positive_kernel() -> None:
    with pytest.raises(ValueError, match=r"kernel is not positive semidefinite: eigenvalue -"):
        push_forward(still(3), tokens(4, 3), 0.1, noise=kicks.field(lambda rho: -rho))


# --- stopping and showing ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("step", [rk4, Adaptive()], ids=lambda s: s.name)
def test_stop_at_consensus(step) -> None:
    x0 = tokens((2, 6), 3)
    path = flow(identity(3, 1.0), x0, [0, 100.0, 200.0], step=step, stop=consensus(1e-2))
    assert len(path) == 2
    assert 1 < float(path.t[-1]) < 100
    spread = (path.x[-1] - path.x[-1].mean(-2, keepdim=True)).norm(dim=-1)
    assert float(spread.max()) < 1e-2
    assert path.about["stopped"] == f"stop condition at t = {float(path.t[-1]):.6g}"


def test_stop_at_a_time_or_by_a_callback() -> None:
    seen: list[float] = []

    def watch(t: float, cloud: Cloud) -> bool:
        seen.append(t)
        return t >= 0.35

    path = flow(identity(3, 1.0), tokens(6, 3), [0, 1.0, 2.0], h=0.1, stop=watch)
    assert seen == pytest.approx([0.1, 0.2, 0.3, 0.4])
    assert float(path.t[-1]) == pytest.approx(0.4)
    torch.testing.assert_close(path.x[-1], push_forward(identity(3, 1.0), tokens(6, 3), 0.4, h=0.1))
    # A tensor with one answer per cloud of the batch: all of them must agree.
    per_cloud = lambda t, cloud: torch.tensor([True, t > 0.25])
    assert float(flow(identity(3, 1.0), tokens((2, 6), 3), [0, 1.0], h=0.1, stop=per_cloud).t[-1]) == pytest.approx(0.3)
    never = flow(identity(3, 1.0), tokens(6, 3), [0, 1.0], stop=lambda t, cloud: False)
    assert never.about["stopped"] is None


def test_progress_is_silent_unless_asked(capsys: pytest.CaptureFixture[str]) -> None:
    flow(identity(3, 1.0), tokens(4, 3), [0, 0.1])
    assert capsys.readouterr() == ("", "")
    flow(identity(3, 1.0), tokens(4, 3), [0, 0.1], progress=True)
    shown = capsys.readouterr()
    assert shown.out == ""
    assert "flow" in shown.err
    assert "100%" in shown.err


def test_what_a_path_remembers() -> None:
    import json

    path = flow(identity(3, math.inf), tokens(4, 3), [0, 0.1])
    about = json.loads(json.dumps(path.about))
    assert about["attention"]["beta"] == "inf"
    assert about["geometry"] == "Sphere"
    assert about["step"] == "rk4"
    assert about["h"] == 0.05
    assert flow(identity(3, 1.0), tokens(4, 3), [0, 0.1], step=Adaptive()).about["h"] is None


# --- steps ---------------------------------------------------------------------------------------------------------


def test_a_step_by_name_is_the_step() -> None:
    x0 = Sphere().uniform(8, 3, generator=torch.Generator().manual_seed(0), dtype=F64)
    attention = Attention.identity(3, 2.0, dtype=F64)
    for name, step in {"euler": euler, "rk4": rk4, "dopri5": dopri5, "adaptive": Adaptive()}.items():
        assert torch.equal(flow(attention, x0, [0, 1], step=name).x, flow(attention, x0, [0, 1], step=step).x)
    assert str(inspect.signature(flow)).count("tensor") == 0  # help() shows rk4, not its tableau
    assert "= rk4" in str(inspect.signature(flow))
    with pytest.raises(ValueError, match="step = 'heun', expected one of 'euler', 'rk4', 'dopri5', 'adaptive'"):
        flow(attention, x0, [0, 1], step="heun")


@pytest.mark.parametrize(("step", "V", "h"), [("rk4", 1.0, 5.0), ("rk4", 200.0, 0.05), ("euler", 1.0, 1.0)])
def test_a_step_that_tokens_outrun_warns_with_one_that_they_do_not(step: str, V: float, h: float) -> None:
    x0 = Sphere().uniform(50, 3, generator=torch.Generator().manual_seed(0), dtype=F64)
    attention = Attention.from_matrices(torch.eye(3, dtype=F64), V * torch.diag(torch.tensor([1.0, 2.0, 3.0]).double()))
    exact = flow(attention, x0, [0, 10 * h], step=Adaptive(1e-9)).x[-1]
    with pytest.warns(StepWarning, match=r"use h <= ") as caught:
        wrong = flow(attention, x0, [0, 10 * h], step=step, h=h).x[-1]
    assert len(caught) == 1
    better = float(re.search(r"use h <= ([\d.e-]+)", str(caught[0].message)).group(1))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        right = flow(attention, x0, [0, 10 * h], step=step, h=better).x[-1]
    errors = [float((x - exact).norm(dim=-1).max()) for x in (wrong, right)]
    assert errors[1] < 0.1
    assert errors[1] < errors[0] / 2 or errors[0] < 1e-6  # a limit that any path reaches


@pytest.mark.parametrize("step", [euler, rk4, dopri5])
@pytest.mark.parametrize("size", [1e-3, 1.0, 1e3])
def test_a_step_warns_from_its_local_error_on(step, size: float) -> None:
    """x' = c x, one step: u = |h v| / max(1, |x|) with u^(p+1)/(p+1)! = .1 at the border.

    A tiny token grows a thousandfold in that step, which an embedded result notices before the border.
    """
    order = {euler: 1, rk4: 4, dopri5: 5}[step]
    border = (0.1 * math.factorial(order + 1)) ** (1 / (order + 1)) * max(1.0, size) / size
    for c, warns in ((0.99 * border, False), (1.01 * border, True)):
        growing = Attention.from_matrices(torch.eye(1, dtype=F64), c * torch.eye(1, dtype=F64))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            flow(growing, torch.full((1, 1), size, dtype=F64), [0.0, 1.0], geometry=Euclidean(), step=step, h=1.0)
        noticed = step is dopri5 and size < 1
        assert any(issubclass(w.category, StepWarning) for w in caught) is (warns or noticed)


@pytest.mark.parametrize("step", ["euler", "rk4", "dopri5"])
@pytest.mark.parametrize("beta", [1.0, 5.0, 20.0])
def test_values_too_large_for_the_default_step_warn(step: str, beta: float) -> None:
    """Tokens here are no faster than a step can carry them, but their velocity turns within it."""
    x0 = Sphere().uniform(5, 3, generator=torch.Generator().manual_seed(0), dtype=F64)
    for V in (20.0, 50.0, 100.0, 200.0, 300.0, 400.0, 800.0):
        attention = Attention.from_matrices(torch.eye(3, dtype=F64), V * torch.eye(3, dtype=F64), beta)
        exact = flow(attention, x0, [0, 1.0], step=Adaptive(1e-9, merge=False)).x[-1]
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", StepWarning)
            error = float((flow(attention, x0, [0, 1.0], step=step, h=0.01).x[-1] - exact).norm(dim=-1).max())
        assert caught or error < 0.015


@pytest.mark.parametrize("z", [0.1, 0.5, 1.0])
def test_the_error_of_a_step_is_estimated(z: float) -> None:
    """Two steps of x' = z x from 1, whose stages are polynomials of z: Euler against the trapezoidal rule, rk4 with the
    next velocity in place of its last stage's, dopri5 against its embedded result."""
    P = 1 + z + z**2 / 2 + z**3 / 6 + z**4 / 24
    P5 = P + z**5 / 120 + z**6 / 600
    embedded = P + 1097 / 120000 * z**5 + 161 / 120000 * z**6 + z**7 / 24000
    estimates = {
        euler: z / 2 * z / (1 + z),
        rk4: z / 6 * abs(P - (1 + z + z**2 / 2 + z**3 / 4)) / P,
        dopri5: abs(P5 - embedded) / P5,
    }
    for step, estimate in estimates.items():
        pace, x = Pace(step), torch.ones(1, 1, dtype=F64)
        for _ in range(2):
            x = pace.take(lambda t, y: z * y, 0.0, x, 1.0, Euclidean())
        farthest, error = pace.seen()
        assert float(farthest) == pytest.approx(z, rel=1e-12)
        assert float(error) == pytest.approx(estimate, rel=1e-9)
        pace.forget()
        pace.take(lambda t, y: -z * y, 0.0, x, 1.0, Euclidean())  # a jump of the field is no error
        assert float(pace.seen()[1]) == pytest.approx(estimate, rel=1e-9) or step is dopri5


def test_the_default_step_does_not_warn() -> None:
    x0 = Sphere().uniform(50, 3, generator=torch.Generator().manual_seed(0), dtype=F64)
    G, V = (torch.diag(torch.tensor(z, dtype=F64)) for z in ([3.0, 1.0, 1.0], [1.0, 2.0, 1.0]))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        flow(Attention.from_matrices(G, V, beta=30.0), x0, [0, 5])
        flow(Attention.from_matrices(G, V, beta=30.0), x0, [0, 5], step="euler", h=0.1)


@pytest.mark.parametrize("t", [math.nan, math.inf, -1.0])
def test_a_push_forward_asks_for_a_time(t: float) -> None:
    with pytest.raises(ValueError, match="expected a finite time of at least 0"):
        push_forward(Attention.identity(2), torch.eye(2), t)


@pytest.mark.parametrize("beta", [4.0, 500.0])
def test_a_fixed_step_flow_compiles_as_one_graph_in_its_precision(beta: float) -> None:
    """beta = 500 needs float64 on the sphere; compiled code does not look, and knows it from before."""
    torch.compiler.reset()
    x = Sphere().uniform(16, 3, generator=torch.Generator().manual_seed(0))
    attention = Attention.identity(3, beta=beta)
    compiled = torch.compile(lambda y: push_forward(attention, y, 0.1), fullgraph=True, backend="aot_eager")
    with pytest.raises(Exception, match=r"call attention\.needs_float64"):
        compiled(x)
    attention.needs_float64(1.0)
    exact = push_forward(attention.to(F64), x.double(), 0.1)
    torch.testing.assert_close(compiled(x).double(), exact, rtol=0, atol=20 * torch.finfo(x.dtype).eps)
