"""Fields beside attention: drifts of one's own, sums, layers; closed forms, orders across jumps, what is refused."""

import math

import pytest
import torch
from torch import Tensor, nn

from attn_flow import (
    Adaptive,
    Attention,
    ContinuousAttentionLayer,
    Drift,
    Euclidean,
    Layers,
    Sphere,
    Trajectory,
    UniformSphere,
    density_flow,
    dopri5,
    euler,
    flow,
    limit,
    push_forward,
    resolution,
    rk4,
    zero_temperature_flow,
)
from attn_flow.observe.quantities import attention_statistics
from attn_flow.prediction import settle

F64 = torch.float64
FLAT = Euclidean()


def tokens(n: int | tuple[int, ...], d: int, seed: int = 0) -> Tensor:
    return Sphere().uniform(n, d, generator=torch.Generator().manual_seed(seed), dtype=F64)


def matrix(d: int, seed: int) -> Tensor:
    return torch.randn(d, d, generator=torch.Generator().manual_seed(seed), dtype=F64) / d**0.5


def random(seed: int = 1, d: int = 3, **options) -> Attention:
    return Attention.random(d, 2, generator=torch.Generator().manual_seed(seed), dtype=F64, **options)


# --- drifts ---------------------------------------------------------------------------------------------------------


def test_a_linear_drift_alone_is_the_matrix_exponential() -> None:
    A, x0 = matrix(3, 1), tokens(5, 3)
    linear = Drift(lambda t, x: x @ A.T)
    exact = x0 @ torch.linalg.matrix_exp(2 * A).T
    found = push_forward(linear, x0, 2.0, geometry=FLAT, step=Adaptive(tol=1e-12))
    torch.testing.assert_close(found, exact, atol=1e-10, rtol=0)
    # On the sphere P_x A x moves the direction of e^{tA} x: the projection happens once.
    found = push_forward(linear, x0, 2.0, step=Adaptive(tol=1e-12))
    torch.testing.assert_close(found, exact / exact.norm(dim=-1, keepdim=True), atol=1e-10, rtol=0)


def test_a_forcing_in_time_is_its_integral() -> None:
    """x' = cos(t) u: x = x_0 + sin(t) u, for what broadcasts to the tokens."""
    u, x0 = torch.tensor([1.0, -2.0], dtype=F64), tokens(4, 2)
    found = flow(Drift(lambda t, x: math.cos(t) * u), x0, [1.0, 2.5], geometry=FLAT, step=dopri5, h=0.01)
    torch.testing.assert_close(found.x[-1], x0 + (math.sin(2.5) - math.sin(1.0)) * u, atol=1e-12, rtol=0)


@pytest.mark.parametrize("options", [{}, {"kind": "linear"}, {"causal": True}], ids=str)
def test_the_drift_of_an_attention_as_a_field_of_ones_own(options) -> None:
    """flow(Drift(A)), flow(A/2 + A/2) and flow(A) are one flow; sums do not depend on their order."""
    A, x0 = random(**options), tokens((2, 6), 3)
    half = Attention(A.Q, A.K, A.V, A.O / 2, A.beta, kind=A.kind, causal=A.causal)
    own, ffn = Drift(lambda t, x: A.drift(x)), Drift(lambda t, x: torch.tanh(x), tokenwise=True)
    expected = flow(A, x0, 2.0).x
    torch.testing.assert_close(flow(own, x0, 2.0).x, expected, atol=1e-12, rtol=0)
    torch.testing.assert_close(flow(half + half, x0, 2.0).x, expected, atol=1e-12, rtol=0)
    torch.testing.assert_close(flow(A + ffn, x0, 2.0).x, flow(ffn + own, x0, 2.0).x, atol=1e-12, rtol=0)


def test_a_drift_with_placement_padding_and_context() -> None:
    """Placements normalise what both see, padding stays, the context is the attention's alone."""
    A, x0, mask = random(), tokens((2, 5), 3), torch.tensor([[True] * 5, [True] * 3 + [False] * 2])
    push = Drift(lambda t, x: 0 * x + torch.tensor([1.0, 0.0, 0.0], dtype=F64))
    padded = flow(A + push, x0, [0, 1.0], mask=mask)
    torch.testing.assert_close(padded.x[-1, 1, :3], flow(A + push, x0[1, :3], [0, 1.0]).x[-1], atol=1e-12, rtol=0)
    assert torch.equal(padded.x[-1, 1, 3:], padded.x[0, 1, 3:])
    mu = UniformSphere(3)
    alone = flow(Drift(lambda t, x: A.drift(x, mu) + push.f(t, x)), x0, 1.0)
    torch.testing.assert_close(flow(A + push, x0, 1.0, context=mu).x, alone.x, atol=1e-12, rtol=0)
    with pytest.raises(ValueError, match=r"Drift\(<lambda>\) attends to nobody; expected an Attention in it"):
        flow(push, x0, 1.0, context=mu)


def test_gradients_reach_the_weights_of_a_module() -> None:
    class FFN(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.W = nn.Parameter(matrix(3, 5))

        def forward(self, t: float, x: Tensor) -> Tensor:
            return torch.tanh(x @ self.W.T)

    ffn, A, x0 = FFN(), random(), tokens(4, 3)
    value = lambda: push_forward(A + Drift(ffn), x0, 0.5)[0, 0]
    (gradient,) = torch.autograd.grad(value(), ffn.W)
    e = torch.zeros(3, 3, dtype=F64)
    e[1, 2] = 1e-5
    values = []
    with torch.no_grad():
        for sign in (1, -1):
            ffn.W += sign * e
            values.append(value())
            ffn.W -= sign * e
    assert float((values[0] - values[1]) / 2e-5) == pytest.approx(float(gradient[1, 2]), abs=1e-9)
    assert flow(A + Drift(ffn), x0, 0.1).about["attention"]["sum"][1] == {"drift": "FFN", "tokenwise": False}


def test_only_tokenwise_drifts_merge() -> None:
    A, x0 = Attention.identity(3, 2.0, dtype=F64), tokens(20, 3)
    each = lambda t, x: 0.1 * x.sin()
    merged = flow(A + Drift(each, tokenwise=True), x0, [0, 30.0], step=Adaptive())
    assert merged.about["tokens_left"] == 1
    apart = flow(A + Drift(each), x0, [0, 30.0], step=Adaptive())
    assert "tokens_left" not in apart.about
    torch.testing.assert_close(merged.x, apart.x, atol=1e-4, rtol=0)
    with pytest.raises(ValueError, match=r"merge=True with Drift\(<lambda>\), which is not tokenwise"):
        flow(A + Drift(each), x0, 1.0, step=Adaptive(merge=True))


# --- kinds ----------------------------------------------------------------------------------------------------------


def test_linear_attention_is_its_closed_form() -> None:
    """V = -I in R^d: C' = -2 beta C^2 for the second moments C, so x(t) = (I + 2 beta t C_0)^{-1/2} x_0."""
    beta, T, x0 = 1.5, 2.0, tokens(7, 3) * 1.3
    w = torch.linspace(0.5, 2, 7, dtype=F64)
    A = Attention.from_matrices(torch.eye(3, dtype=F64), -torch.eye(3, dtype=F64), beta, kind="linear")
    found = push_forward(A, x0, T, geometry=FLAT, weights=w, step=Adaptive(tol=1e-12, merge=False))
    C = torch.einsum("j,jd,je->de", w / w.sum(), x0, x0)
    size, axes = torch.linalg.eigh(C)
    root = axes / (1 + 2 * beta * T * size).sqrt() @ axes.T
    torch.testing.assert_close(found, x0 @ root, atol=1e-10, rtol=0)


def test_relu_and_sigmoid_where_they_are_linear() -> None:
    """Scores of one sign make relu linear; sigma(s) = 1/2 + tanh(s/2)/2, so at small beta half the mean and s/4."""
    x0 = tokens(6, 3).abs()
    options = {"geometry": FLAT, "h": 0.01}
    relu, linear = (push_forward(Attention.identity(3, 0.5, dtype=F64, kind=k), x0, 0.5, **options) for k in KINDS[:2])
    torch.testing.assert_close(relu, linear, atol=1e-12, rtol=0)
    beta = 1e-3
    sigmoid = Attention.identity(3, beta, dtype=F64, kind="sigmoid").drift(x0)
    quarter = Attention.identity(3, beta / 4, dtype=F64, kind="linear").drift(x0)
    # The next term of sigma is s^3/48, |s| <= beta.
    torch.testing.assert_close(sigmoid, x0.mean(0) / 2 + quarter, atol=beta**3 / 48, rtol=0)


KINDS = ("relu", "linear", "sigmoid")


# --- layers ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("step", [rk4, Adaptive(tol=1e-8)], ids=["fixed", "adaptive"])
def test_layers_are_flows_one_after_another(step) -> None:
    """Of equal layers one flow; of others the composition; the kept times need not be the jumps."""
    A, B, x0 = random(1), random(2, beta=4.0) + Drift(lambda t, x: x.sin()), tokens(6, 3)
    options = {"step": step, "h": 0.05}
    tol = 1e-12 if step is rk4 else 1e-6
    same = flow(Layers([A, A, A], [0.0, 0.4, 0.7, math.inf]), x0, [0.0, 0.5, 1.0], **options)
    torch.testing.assert_close(same.x, flow(A, x0, [0.0, 0.5, 1.0], **options).x, atol=1e-6, rtol=0)
    both = flow(Layers([A, B], [0.0, 0.4, 1.0]), x0, [0.0, 0.2, 0.4, 1.0], **options)
    there = push_forward(A, x0, 0.4, **options)
    torch.testing.assert_close(both.x[2], there, atol=tol, rtol=0)
    torch.testing.assert_close(both.x[3], flow(B, there, [0.4, 1.0], **options).x[-1], atol=tol, rtol=0)
    assert both.t.tolist() == [0.0, 0.2, 0.4, 1.0]


@pytest.mark.parametrize(("step", "order"), [(euler, 1), (rk4, 4)], ids=["euler", "rk4"])
def test_steps_keep_their_order_across_a_jump(step, order) -> None:
    """A jump that no multiple of h hits; inside a step it would leave order 1 of rk4's 4."""
    A, B, x0 = random(1), random(2, beta=3.0), tokens(5, 3)
    layers = Layers([A, B], [0.0, 1 / 3, 1.0])
    exact = push_forward(B, push_forward(A, x0, 1 / 3, h=1e-3), 2 / 3, h=1e-3)
    errors = [float((push_forward(layers, x0, 1.0, step=step, h=h) - exact).norm()) for h in (1 / 12, 1 / 24)]
    assert math.log2(errors[0] / errors[1]) == pytest.approx(order, abs=0.25)
    # The stage at the end of a step belongs to the layer before the jump: only then does one step of A end there.
    first = push_forward(layers, x0, 1 / 3, step=step, h=1.0)
    torch.testing.assert_close(first, push_forward(A, x0, 1 / 3, step=step, h=1.0), atol=1e-15, rtol=0)


def test_a_drift_that_returns_nan_is_named() -> None:
    x = Sphere().uniform(4, 3)
    with pytest.raises(FloatingPointError, match="a Drift of your own may have returned NaN"):
        flow(Attention.identity(3) + Drift(lambda t, x: x * math.nan), x, t=1.0)


def test_a_path_remembers_its_field(tmp_path) -> None:
    A = Attention.identity(3, 2.0, dtype=F64)
    field = Layers([A, A.with_beta(9.0) + Drift(torch.tanh_, tokenwise=True)], [0.0, 1.0, math.inf])
    layers = field.summary()
    own = {"heads": 1, "dim": 3, "kind": "softmax", "causal": False, "self_attention": True}
    drift = {"drift": "tanh_", "tokenwise": True}
    assert layers["layers"] == [{**own, "beta": 2.0}, {"sum": [{**own, "beta": 9.0}, drift]}]
    assert layers["times"] == [0.0, 1.0, "inf"]
    path = flow(Layers([A, A.with_beta(9.0)], [0.0, 1.0, math.inf]), tokens(4, 3), [0.0, 2.0])
    path.save(tmp_path / "path.safetensors")
    assert Trajectory.load(tmp_path / "path.safetensors").about == path.about
    assert path.about["attention"]["times"] == [0.0, 1.0, "inf"]


# --- refused --------------------------------------------------------------------------------------------------------

A, X = random(), tokens(5, 3)
FFN = Drift(torch.tanh, tokenwise=True)
REFUSED = {
    "no function": (lambda: Drift(3.0), "f is a float, expected a function of"),
    "a wrong shape": (
        lambda: flow(Drift(lambda t, x: x[:2]), X, 1.0),
        r"Drift\(<lambda>\) returned torch.float64 \(2, 3\) at t = 0, expected torch.float64 \(5, 3\)",
    ),
    "a wrong dtype": (lambda: flow(Drift(lambda t, x: x.float()), X, 1.0), "returned torch.float32"),
    "no tensor": (lambda: flow(Drift(lambda t, x: None), X, 1.0), r"what Drift\(<lambda>\) returned is a NoneType"),
    "no field": (lambda: flow(3.0, X, 1.0), "attention is a float, expected an Attention, Drift, Layers or a schedule"),
    "a schedule of numbers": (lambda: flow(lambda t: t, X, 1.0), "the schedule returned a float at t = 0"),
    "too few times": (lambda: Layers([A, A], [0, 1]), "2 times for 2 layers, expected one more"),
    "no layers": (lambda: Layers([], [0]), "1 times for 0 layers"),
    "times that fall": (lambda: Layers([A, A], [0, 2, 1]), "expected finite times that increase strictly"),
    "a layer that is none": (lambda: Layers([A, torch.tanh], [0, 1, 2]), "field 1 is a builtin_function_or_method"),
    "beyond the last layer": (
        lambda: flow(Layers([A, A], [0, 1, 2]), X, 3.0),
        r"Layers\(2 fields from t = 0 to 2\), asked from t = 1.98 to 2.01; expected times between its own",
    ),
    "another dimension": (lambda: flow(A + Attention.identity(2, dtype=F64), X, 1.0), r"x has shape \(5, 3\), exp"),
    "limit": (lambda: limit(A + FFN), r"limit has no theory for Attention \+ Drift, expected an Attention alone"),
    "limit of layers": (lambda: limit(Layers([A], [0, 1])), "limit has no theory for Layers"),
    "limit of a kind": (lambda: limit(Attention.identity(3, kind="relu")), "attention of kind 'relu'"),
    "zero temperature": (lambda: zero_temperature_flow(FFN, X, 1.0), "zero_temperature_flow has no theory for Drift"),
    "zero temperature of a kind": (
        lambda: zero_temperature_flow(Attention.identity(3, dtype=F64, kind="linear"), X, 1.0),
        "beta = inf with kind = 'linear'",
    ),
    "densities": (lambda: density_flow(A + FFN, lambda x: 1 + x[:, 0], 1.0), "density_flow has no theory for"),
    "settle": (lambda: settle(A + FFN, X), "settle has no theory for"),
    "resolution": (lambda: resolution(A + FFN, X), "resolution has no theory for"),
    "resolution of a kind": (lambda: resolution(random(kind="sigmoid"), X), "kind 'sigmoid' sees every token"),
    "statistics": (lambda: attention_statistics(A + FFN, X), "attention_statistics has no theory for"),
    "a layer": (lambda: ContinuousAttentionLayer.from_attention(A + FFN), "a layer takes an Attention alone"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_by_name(name) -> None:
    call, message = REFUSED[name]
    with pytest.raises(ValueError, match=message):
        call()
