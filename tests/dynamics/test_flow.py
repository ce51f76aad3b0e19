"""The flow: orders of convergence, closed forms, weights and masks, adaptive steps, noise, errors users meet."""

import math

import pytest
import torch

from attn_flow import (
    Adaptive,
    Attention,
    Cloud,
    Drift,
    Euclidean,
    Layers,
    Sphere,
    Trajectory,
    consensus,
    flow,
    linearise,
)
from attn_flow.attention import pre_norm
from attn_flow.dynamics import noise
from attn_flow.dynamics.step_size import StepWarning
from attn_flow.dynamics.steppers import dopri5

f64 = torch.float64


def start(generator, n=12, d=3):
    return Sphere().uniform(n, d, generator=generator, dtype=f64)


def test_the_weights_of_dopri5_meet_the_order_conditions():
    """sum_i b_i c_i^k = 1/(k + 1) for k below the order: five for the step, four for the embedded result."""
    c = torch.tensor([0.0, *(sum(row) for row in dopri5.a)], dtype=f64)
    for weights, order in ((dopri5.b, 5), (dopri5.embedded, 4)):
        moments = [float((torch.tensor(weights, dtype=f64) * c**k).sum()) for k in range(order + 1)]
        assert moments[:order] == pytest.approx([1 / (k + 1) for k in range(order)], abs=1e-14)
    assert moments[4] != pytest.approx(1 / 5, abs=1e-4)  # the embedded result is of order four only


@pytest.mark.parametrize(("step", "order"), [("euler", 1), ("rk4", 4), ("dopri5", 5)])
@pytest.mark.parametrize("geometry", [Sphere(), Euclidean()])
def test_order_of_convergence(generator, step, order, geometry):
    A = Attention.from_matrices(torch.randn(3, 3, generator=generator, dtype=f64), torch.eye(3, dtype=f64), 1.0)
    x0 = start(generator)
    exact = flow(A, x0, [0.0, 1.0], geometry=geometry, step=Adaptive(tol=1e-13)).x[-1]
    errors = [
        float((flow(A, x0, [0.0, 1.0], geometry=geometry, step=step, h=h).x[-1] - exact).abs().max())
        for h in (0.1, 0.05)
    ]
    assert math.log2(errors[0] / errors[1]) == pytest.approx(order, abs=0.7)


def test_two_tokens_by_their_scalar_equation(generator):
    """Two tokens at angle phi under V = Q = K = I: phi' = -2 sin(phi) / (1 + e^{beta (1 - cos phi)})."""
    phi, beta = torch.tensor(1.2, dtype=f64), 3.0
    x0 = torch.stack([torch.tensor([1.0, 0.0], dtype=f64), torch.stack([phi.cos(), phi.sin()])])
    path = flow(Attention.identity(2, beta), x0, [0.0, 2.0], h=0.01)
    for _ in range(20000):
        phi = phi - 1e-4 * 2 * phi.sin() / (1 + (beta * (1 - phi.cos())).exp())
    angle = float(torch.acos((path.x[-1, 0] * path.x[-1, 1]).sum()))
    assert angle == pytest.approx(float(phi), abs=1e-4)


def test_linear_drift_is_the_exponential(generator):
    M = torch.randn(3, 3, generator=generator, dtype=f64)
    x0 = torch.randn(4, 3, generator=generator, dtype=f64)
    path = flow(Drift(lambda t, x: x @ M.T), x0, [0.0, 0.7, 1.5], geometry=Euclidean(), step=Adaptive(tol=1e-11))
    for t, x in zip(path.t, path.x):
        torch.testing.assert_close(x, x0 @ torch.matrix_exp(t * M).T, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("step", ["rk4", "adaptive"])
def test_weights_masks_and_batches(generator, step):
    """A token of weight two is two tokens, padding is as if absent, a batch is a loop."""
    A, x0 = Attention.identity(3, 2.0), start(generator)
    times = [0.0, 1.0, 3.0]
    double = flow(A, torch.cat([x0, x0[:1]]), times, step=step).x[:, :12]
    w = torch.ones(12, dtype=f64)
    w[0] = 2
    torch.testing.assert_close(flow(A, Cloud(x0, w), times, step=step).x, double, rtol=0, atol=2e-5)
    mask = torch.ones(15, dtype=torch.bool)
    mask[[2, 7, 14]] = False
    padded = torch.zeros(15, 3, dtype=f64)
    padded[mask] = x0
    path = flow(A, Cloud(padded, mask=mask), times, step=step)
    torch.testing.assert_close(path.x[:, mask], flow(A, x0, times, step=step).x, rtol=0, atol=2e-5)
    assert path.cloud(-1).mask is not None
    batch = flow(A, Cloud(x0[None], torch.stack([w, torch.ones_like(w)])), times, step=step)
    torch.testing.assert_close(batch.x[:, 0], double, rtol=0, atol=2e-5)
    beta = torch.tensor([[0.5], [4.0]], dtype=f64)
    swept = flow(Attention.identity(3, beta), x0, times, step=step)
    assert swept.x.shape == (3, 2, 12, 3)
    torch.testing.assert_close(
        swept.x[:, 1], flow(Attention.identity(3, 4.0), x0, times, step=step).x, rtol=0, atol=2e-5
    )


def test_times_are_hit_without_extra_steps(generator):
    path = flow(Attention.identity(3), start(generator), torch.linspace(0, 12.5, 251, dtype=torch.float32), h=0.05)
    assert path.about["evaluations"] == 1000
    assert len(path) == 251


def test_layers_change_where_they_should(generator):
    x0, A, B = start(generator), Attention.identity(3, 1.0), Attention.identity(3, 9.0)
    both = flow(Layers([A, B], [0.0, 0.33, 1.0]), x0, [0.0, 1.0], step=Adaptive(tol=1e-11)).x[-1]
    first = flow(A, x0, [0.0, 0.33], step=Adaptive(tol=1e-11)).x[-1]
    torch.testing.assert_close(both, flow(B, first, [0.0, 0.67], step=Adaptive(tol=1e-11)).x[-1], rtol=0, atol=1e-8)


def test_adaptive_steps_cross_a_plateau_by_merging(generator):
    x0 = start(generator, n=32)
    path = flow(Attention.identity(3, 9.0), x0, [0.0, 50.0, 1e5], step=Adaptive(tol=1e-6))
    assert path.about["evaluations"] < 2000
    assert path.about["tokens_left"] < 32
    fixed = flow(Attention.identity(3, 9.0), x0, [0.0, 50.0], h=0.05).x[-1]
    torch.testing.assert_close(path.x[1], fixed, rtol=0, atol=1e-3)
    apart = flow(Attention.identity(3, 9.0), x0, [0.0, 50.0], step=Adaptive(merge=False))
    assert "tokens_left" not in apart.about
    with pytest.raises(ValueError, match="causal"):
        flow(Attention.identity(3, causal=True), x0, 1.0, step=Adaptive(merge=True))


def test_tokens_that_move_apart_do_not_join_the_tokens_at_the_origin():
    x0 = torch.tensor([[5.002, 5.002], [5.0021, 5.002], [1e-5, 1e-5], [2e-5, 2e-5]], dtype=f64)
    field = Drift(lambda t, x: torch.where(x.norm(dim=-1, keepdim=True) < 1, -x, x - 5.0), tokenwise=True)
    path = flow(field, x0, [0.0, 0.2], geometry=Euclidean(), step=Adaptive(tol=1e-3))
    assert path.about["tokens_left"] == 3
    torch.testing.assert_close(path.x[-1, :2], 5 + (x0[:2] - 5) * math.exp(0.2), rtol=0, atol=1e-5)


def test_stop_condition_ends_the_path(generator):
    x0 = Sphere().retract(start(generator) + torch.tensor([2.0, 0, 0], dtype=f64))
    for step in ("rk4", "adaptive"):
        path = flow(Attention.identity(3), x0, 200.0, step=step, stop=consensus(1e-2))
        assert path.about["stopped"] is not None
        assert float(path.t[-1]) < 200
        assert float((path.x[-1] - path.x[-1].mean(0)).norm(dim=-1).max()) < 1e-2


def test_pre_norm_moves_the_radius(generator):
    x0 = 2 * start(generator)
    path = flow(pre_norm(Attention.identity(3)), x0, [0.0, 1.0], geometry=Euclidean())
    assert float((path.x[-1].norm(dim=-1) - 2).abs().max()) > 0.1
    with pytest.raises(ValueError, match="Euclidean"):
        flow(pre_norm(Attention.identity(3)), x0, 1.0)


@pytest.mark.parametrize(
    ("make", "covariance"),
    [
        (lambda g: noise.independent(0.5, g), lambda x: 0.25 * torch.eye(len(x), dtype=f64)),
        (lambda g: noise.linear(0.5, g), lambda x: 0.25 * x @ x.T),
        (lambda g: noise.gaussian_field(torch.exp, 0.5, g), lambda x: 0.25 * (x @ x.T).exp()),
    ],
)
def test_noise_has_its_covariance(generator, make, covariance):
    x = start(generator, n=4)
    xi = make(generator)(x.expand(20000, 4, 3))
    sample = torch.einsum("bid,bjd->ij", xi, xi) / (3 * 20000)
    assert float((sample - covariance(x)).abs().max()) < 0.05 * float(covariance(x).max()) + 0.01


def test_noise_between_steps_is_reproducible_and_diffuses(generator):
    still, x0 = Attention(V=torch.zeros(3, 3, dtype=f64)), start(generator, n=400)
    runs = [
        flow(
            still, x0, [0.0, 0.5], h=0.005, step="euler", noise=noise.independent(0.4, torch.Generator().manual_seed(3))
        )
        for _ in range(2)
    ]
    assert torch.equal(runs[0].x, runs[1].x)
    cosine = float((runs[0].x[0] * runs[0].x[-1]).sum(-1).mean())
    assert cosine == pytest.approx(math.exp(-(0.4**2) * 0.5), abs=0.02)  # degree one decays at rate (d - 1) sigma^2 / 2


def test_gradients_through_the_flow(generator):
    x0 = start(generator, n=4).requires_grad_()
    V = torch.randn(3, 3, generator=generator, dtype=f64).requires_grad_()

    def end(x, v):
        return flow(Attention(V=v, beta=2.0), x, [0.0, 0.3], h=0.1).x[-1]

    assert torch.autograd.gradcheck(end, (x0, V))
    assert torch.autograd.gradcheck(
        lambda v: flow(Attention(V=v), x0.detach(), [0.0, 0.3], step="adaptive").x[-1], (V,), eps=1e-5, atol=1e-4
    )


def test_compiled_and_unvalidated_flows(generator):
    A, x0 = Attention.identity(3, 2.0), start(generator).float()
    expected = flow(A, x0, [0.0, 1.0]).x[-1]
    torch.testing.assert_close(flow(A, x0, [0.0, 1.0], validate=False).x[-1], expected)
    compiled = torch.compile(lambda x: flow(A, x, [0.0, 0.5, 1.0]).x[-1])
    torch.testing.assert_close(compiled(x0), expected, rtol=0, atol=1e-5)
    batch = torch.stack([x0, x0.flip(0)])
    mapped = torch.func.vmap(lambda x: flow(A, x, [0.0, 1.0]).x[-1])(batch)
    torch.testing.assert_close(mapped[0], expected, rtol=0, atol=1e-5)


def keep_still(t, x):
    return torch.zeros_like(x)


def test_cold_float32_flows_keep_their_digits(generator):
    x0, A = start(generator, n=60).float(), Attention.identity(3, 2000.0)
    path = flow(A, x0, [0.0, 2.0], h=0.02)
    assert path.x.dtype == torch.float32
    both = A + Drift(keep_still)
    assert flow(both, x0, 0.1, h=0.1).about["field"]["name"] == repr(both)
    exact = flow(A, x0.double(), [0.0, 2.0], h=0.02)
    assert float((path.x[-1] - exact.x[-1]).abs().max()) < 1e-5


def test_steps_that_are_too_long_are_named(generator):
    with pytest.warns(StepWarning, match="use h <="):
        flow(Attention.identity(3, 1.0, kind="unnormalised"), start(generator), [0.0, 4.0], h=2.0, step="euler")


def test_trajectories_are_saved_and_read(generator, tmp_path):
    w = torch.rand(12, generator=generator, dtype=f64) + 0.1
    path = flow(Attention.identity(3), Cloud(start(generator), w), [0.0, 1.0])
    path.save(tmp_path / "path.safetensors")
    read = Trajectory.load(tmp_path / "path.safetensors")
    assert torch.equal(read.x, path.x)
    assert torch.equal(read.weights, w)
    assert read.about == path.about
    assert len(path[1:]) == 1
    for index in (-1, path.t.argmax(), path.t.numpy().argmax()):
        assert torch.equal(path[index].x, path.x[1:])
    with pytest.raises(IndexError):
        path[2]
    assert len(list(path)) == 2
    (tmp_path / "path.safetensors").write_bytes(b"damaged")
    with pytest.raises(ValueError, match="safetensors"):
        Trajectory.load(tmp_path / "path.safetensors")


X = torch.eye(3)
A3 = Attention.identity(3)


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda: flow(A3, X, [1.0, 0.0]), ValueError, "increasing"),
        (lambda: flow(A3, X, -1.0), ValueError, "positive"),
        (lambda: flow(A3, X, math.nan), ValueError, "t = nan"),
        (lambda: flow(A3, X, 1.0, h=0.0), ValueError, "h = 0"),
        (lambda: flow(A3, X, 1.0, step="rk5"), ValueError, "rk4"),
        (lambda: flow(A3, X, 1.0, step=Adaptive), ValueError, "step = <class .* expected one of 'euler'"),
        (lambda: flow(A3, torch.zeros(2, 3), 1.0), ValueError, "without a direction"),
        (lambda: flow(A3, torch.zeros(2, 2), 1.0), ValueError, "expected"),
        (lambda: flow(A3, X, 1e12), ValueError, "larger h"),
        (lambda: flow(A3, X, 1.0, step="adaptive", validate=False), ValueError, "validate"),
        (lambda: flow(A3, [[1.0]], 1.0), TypeError, "torch.Tensor"),
        (lambda: flow(A3, X, 1.0, noise=0.1), TypeError, r"noise is 0\.1, expected a function such as .*independent"),
        (lambda: flow(Drift(lambda t, x: x * 1e30), X, 3.0, geometry=Euclidean()), FloatingPointError, "range"),
        (lambda: Adaptive(tol=0.0), ValueError, "tol"),
        (lambda: flow(A3, X, 10.0, step=Adaptive(max_steps=1)), FloatingPointError, "max_steps"),
        (lambda: linearise(A3, X.half()), TypeError, "x has dtype torch.float16, expected float32"),
        (lambda: Trajectory([0.0], X[None]), TypeError, "t is a list"),
        (lambda: Trajectory(X[0, :1], X[None], weights=[1.0] * 3), TypeError, "weights is a list"),
        (lambda: noise.independent(-1.0), ValueError, "sigma"),
    ],
)
def test_errors_name_what_is_wrong(call, error, words):
    with pytest.raises(error, match=words):
        call()
