"""Attention beside its formula written out, its laws, and the errors users meet."""

import math

import pytest
import torch

from attn_flow import Attention, Cloud, Drift, Gaussian, Layers, Sphere, UniformSphere, flow
from attn_flow.attention import layer_norm_scaling, ngpt, peri_norm, pre_norm
from attn_flow.kernels.auto import choose_kernel

f64 = torch.float64


def draw(generator, *shape):
    return torch.randn(*shape, generator=generator, dtype=f64)


def random_attention(generator, d=4, heads=3, k=2, **options):
    beta = options.pop("beta", torch.rand(heads, generator=generator, dtype=f64) + 0.5)
    weights = [draw(generator, heads, k, d) for _ in range(3)]
    biases = {"query_bias": draw(generator, heads, k), "value_bias": draw(generator, d)}
    return Attention(*weights, draw(generator, heads, d, k), beta, **biases, **options)


def literal_drift(A, x, w, mask):
    """The formula of the module, token by token."""
    n = len(x)
    beta = A.beta if isinstance(A.beta, torch.Tensor) else torch.full((A.heads,), float(A.beta))
    drift = torch.zeros_like(x)
    for i in range(n):
        if not mask[i]:
            continue
        drift[i] = A.value_bias
        for h in range(A.heads):
            q = A.Q[h] @ x[i] + A.query_bias[h]
            seen = [j for j in range(n) if mask[j] and not (A.causal and j > i)]
            if not seen:
                continue
            logits = torch.stack([beta[h] * (q @ (A.K[h] @ x[j])) for j in seen])
            p = w[seen] / w[mask].sum()
            if A.kind == "unnormalised":
                weights = p * logits.exp()
            else:
                weights = (logits + p.log()).softmax(0)
            drift[i] += A.O[h] @ sum(weight * (A.V[h] @ x[j]) for weight, j in zip(weights, seen))
    return drift


@pytest.mark.parametrize("kind", ["softmax", "unnormalised"])
@pytest.mark.parametrize("causal", [False, True])
def test_drift_is_its_formula(generator, kind, causal):
    A = random_attention(generator, kind=kind, causal=causal)
    x, w = draw(generator, 6, 4), torch.rand(6, generator=generator, dtype=f64) + 0.1
    mask = torch.tensor([True, False, True, True, True, False])
    ones = torch.ones(6, dtype=f64)
    torch.testing.assert_close(A.drift(x), literal_drift(A, x, ones, ones.bool()))
    x[1] = 1e3  # padding may hold anything
    torch.testing.assert_close(A.drift(Cloud(x, w, mask)), literal_drift(A, x, w, mask))


@pytest.mark.parametrize(
    ("kind", "beta"), [("softmax", 0.7), ("softmax", math.inf), ("unnormalised", 0.7), ("sinkhorn", 0.7)]
)
def test_matrix_gives_the_drift(generator, kind, beta):
    A = random_attention(generator, kind=kind, beta=beta)
    x, w = draw(generator, 6, 4), torch.rand(6, generator=generator, dtype=f64) + 0.1
    cloud = Cloud(x, w)
    matrix = A.matrix(cloud)
    assert matrix.shape == (3, 6, 6)
    values = torch.einsum("hvd,nd->hnv", A.V, x)
    drift = torch.einsum("hdv,hnv->nd", A.O, matrix @ values) + A.value_bias
    torch.testing.assert_close(A.drift(cloud), drift)
    if kind != "unnormalised":
        torch.testing.assert_close(matrix.sum(-1), torch.ones(3, 6, dtype=f64))


@pytest.mark.parametrize(
    ("kind", "beta"), [("softmax", 0.8), ("softmax", math.inf), ("unnormalised", 0.8), ("sinkhorn", 0.8)]
)
def test_laws(generator, kind, beta):
    """A permutation moves the drift along; a repeated token is a token of weight two; a rotation commutes."""
    G, V = draw(generator, 3, 3), draw(generator, 3, 3)
    A = Attention.from_matrices(G, V, beta, kind=kind)
    x = Sphere().uniform(7, 3, generator=generator, dtype=f64)
    drift, order = A.drift(x), torch.randperm(7, generator=generator)
    torch.testing.assert_close(A.drift(x[order]), drift[order])
    twice = A.drift(torch.cat([x, x[:1]]))
    weighted = A.drift(Cloud(x, torch.tensor([2.0, 1, 1, 1, 1, 1, 1], dtype=f64)))
    torch.testing.assert_close(twice[:7], weighted)
    R = torch.linalg.qr(draw(generator, 3, 3))[0]
    rotated = Attention.from_matrices(R @ G @ R.T, R @ V @ R.T, beta, kind=kind)
    torch.testing.assert_close(rotated.drift(x @ R.T), drift @ R.T)


def test_a_batch_is_a_loop(generator):
    G, V = draw(generator, 2, 1, 4, 4), draw(generator, 2, 1, 4, 4)
    beta = torch.tensor([[1.0], [3.0]], dtype=f64)
    x = draw(generator, 2, 5, 4)
    result = Attention.from_matrices(G, V, beta).drift(x)
    for i in range(2):
        one = Attention.from_matrices(G[i], V[i], float(beta[i])).drift(x[i])
        torch.testing.assert_close(result[i], one)
    swept = Attention.identity(4, beta=beta).drift(x[0])
    torch.testing.assert_close(swept[1], Attention.identity(4, 3.0).drift(x[0]))


def test_products_of_the_weights(generator):
    A = random_attention(generator)
    torch.testing.assert_close(A.G, A.K.mT @ A.Q)
    torch.testing.assert_close(A.M, A.O @ A.V @ A.K.mT @ A.Q)
    x, y = draw(generator, 4), draw(generator, 4)
    torch.testing.assert_close((A.Q[0] @ x + A.query_bias[0]) @ (A.K[0] @ y), (A.G[0] @ x + A.G_bias[0]) @ y)
    torch.testing.assert_close(Attention.identity(3).M, torch.eye(3)[None])


def test_a_context_replaces_the_cloud(generator):
    A = Attention.from_matrices(draw(generator, 3, 3), draw(generator, 3, 3), 1.3)
    x, y, w = draw(generator, 5, 3), draw(generator, 8, 3), torch.rand(8, generator=generator, dtype=f64)
    both = A.drift(Cloud(torch.cat([x, y]), torch.cat([torch.zeros(5, dtype=f64), w])))
    torch.testing.assert_close(A.with_context(Cloud(y, w)).drift(x), both[:5])
    padding, mask = torch.full_like(y[:1], torch.finfo(f64).min), torch.arange(9) < 8
    padded = Cloud(torch.cat([y, padding]), torch.cat([w, w[:1]]), mask)
    torch.testing.assert_close(A.with_context(padded).drift(x), both[:5])
    assert torch.equal(
        A.matrix(padded)[..., :8], A.matrix(Cloud(padded.zero_padding(padded.x), padded.weights, mask))[..., :8]
    )
    m, S = draw(generator, 3), torch.eye(3, dtype=f64) / 2
    g = x @ A.G[0].T
    torch.testing.assert_close(A.with_context(Gaussian(m, S)).drift(x), (m + 1.3 * g @ S) @ A.OV[0].T)
    cold = A.with_beta(math.inf).with_context(UniformSphere(3)).drift(x)
    torch.testing.assert_close(cold, (g / g.norm(dim=-1, keepdim=True)) @ A.OV[0].T)


@pytest.mark.parametrize("kind", ["softmax", "unnormalised"])
def test_every_head_attends_to_a_measure_by_itself(generator, kind):
    A = random_attention(generator, kind=kind)
    mu, x = Gaussian(draw(generator, 4), torch.eye(4, dtype=f64) / 9), draw(generator, 2, 5, 4) / 2
    expected = A.value_bias.expand(2, 5, 4)
    for O, V, G, bias, beta in zip(A.O, A.V, A.G, A.G_bias, A.beta):
        g = x @ G.T + bias
        mean = mu.tilted_mean(g, float(beta))
        if kind == "unnormalised":
            mean = mean * (beta * mu.log_partition(g, float(beta))).exp()[..., None]
        expected = expected + mean @ (O @ V).T
    torch.testing.assert_close(A.with_context(mu).drift(x), expected)
    alone = A.copy_with(beta=A.beta.expand(2, 3))  # one beta per element of the batch and head
    torch.testing.assert_close(alone.with_context(mu).drift(x), expected)
    single = A.to(torch.float32).copy_with(beta=A.beta).with_context(mu.to(torch.float32))
    torch.testing.assert_close(single.drift(x.float()).double(), expected, rtol=1e-4, atol=1e-4)


def test_every_kernel_has_the_same_drift(generator):
    x = Sphere().uniform(2500, 2, generator=generator, dtype=f64)
    drifts = [Attention.identity(2, 60.0, kernel=kernel).drift(x) for kernel in ("dense", "near", "series", "auto")]
    for drift in drifts[1:]:
        torch.testing.assert_close(drift, drifts[0], rtol=0, atol=1e-10)
    rounded, cold = x.float(), Attention.identity(2, 1e5, kernel="series")  # rounding changes the lengths of the keys
    exact = cold.copy_with(kernel="dense").drift(rounded.double())
    torch.testing.assert_close(cold.drift(rounded).double(), exact, rtol=0, atol=1e-6)


def test_auto_keeps_the_masks_of_a_large_cold_cloud(generator):
    x = Sphere().uniform(2048, 3, generator=generator, dtype=f64)
    causal = Attention.identity(3, 1e4, causal=True).drift(x)
    torch.testing.assert_close(causal[0], x[0])  # the first token sees itself alone


def test_tokens_of_a_long_context_are_resolved(generator):
    x, y = 0.1 * torch.randn(5, 3, generator=generator), 100 * torch.randn(50, 3, generator=generator)
    A = Attention.identity(3, 30.0)
    torch.testing.assert_close(
        A.with_context(y).drift(x).double(), A.with_context(y.double()).drift(x.double()), rtol=1e-6, atol=1e-6
    )


@pytest.mark.parametrize("beta", [1e3, 1e6])
def test_cold_logits_of_float32_tokens_are_resolved(generator, beta):
    x = Sphere().uniform(300, 3, generator=generator)
    exact = Attention.identity(3, beta).drift(x.double())
    assert float((Attention.identity(3, beta).drift(x) - exact).abs().max()) < 1e-6


def test_derivatives_and_transforms(generator):
    A = Attention.from_matrices(draw(generator, 3, 3), draw(generator, 3, 3), 2.0)
    x = draw(generator, 4, 3).requires_grad_()
    w = (torch.rand(4, generator=generator, dtype=f64) + 0.1).requires_grad_()
    assert torch.autograd.gradcheck(lambda y, v: A.drift(Cloud(y, v)), (x, w))
    u = draw(generator, 4, 3)
    _, tangent = torch.func.jvp(A.drift, (x.detach(),), (u,))
    step = 1e-6
    difference = (A.drift(x.detach() + step * u) - A.drift(x.detach() - step * u)) / (2 * step)
    torch.testing.assert_close(tangent, difference, rtol=1e-6, atol=1e-8)
    batch = draw(generator, 3, 4, 3)
    torch.testing.assert_close(torch.func.vmap(A.drift)(batch), A.drift(batch))
    compiled = torch.compile(lambda field, y: field(0.0, y), fullgraph=True)
    for beta in (2.0, math.inf, 3.0):  # numbers that change become symbols of the compiler
        torch.testing.assert_close(compiled(A.with_beta(beta), batch), A.with_beta(beta).drift(batch))


@pytest.mark.parametrize("kind", ["softmax", "unnormalised", "sinkhorn"])
def test_autocast(generator, kind):
    A, x = Attention.random(4, 2, kind=kind, generator=generator), torch.randn(6, 4, generator=generator)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        drift, matrix = A.drift(x), A.matrix(x)
    torch.testing.assert_close(drift, A.drift(x), rtol=0.1, atol=0.05)
    torch.testing.assert_close(matrix, A.matrix(x), rtol=0.1, atol=0.05)


def test_a_drift_towards_a_context_is_compiled(generator):
    A, x = random_attention(generator), draw(generator, 2, 5, 4)
    for context in (UniformSphere(4), Cloud(x[0]), x[1]):
        compiled = torch.compile(
            lambda y, context=context: A.with_context(context).drift(y), fullgraph=True, backend="aot_eager"
        )
        torch.testing.assert_close(compiled(x), A.with_context(context).drift(x))


def test_gradients_reach_weights_and_beta(generator):
    G, V, beta = (
        z.requires_grad_() for z in (draw(generator, 2, 2), draw(generator, 2, 2), torch.tensor([1.5], dtype=f64))
    )
    x = draw(generator, 5, 2)
    assert torch.autograd.gradcheck(lambda g, v, b: Attention.from_matrices(g, v, b).drift(x), (G, V, beta))


def test_fields_add_up_and_change(generator):
    x = draw(generator, 5, 3)
    A, B = Attention.identity(3, 1.0), Attention.identity(3, 4.0)
    force = Drift(lambda t, y: t * y, tokenwise=True)
    torch.testing.assert_close((A + B + force)(2.0, x), A.drift(x) + B.drift(x) + 2 * x)
    layers = Layers([A, B], times=[0.0, 1.0, 3.0])
    torch.testing.assert_close(layers(0.5, x), A.drift(x))
    torch.testing.assert_close(layers(1.0, x), B.drift(x))
    assert layers.jumps == (1.0,)
    with pytest.raises(ValueError, match="no field from t = 4"):
        layers(4.0, x)
    unit = x / x.norm(dim=-1, keepdim=True)
    drift = A.drift(unit)
    torch.testing.assert_close(pre_norm(A)(0.0, x), drift)
    torch.testing.assert_close(peri_norm(A)(0.0, x), drift / drift.norm(dim=-1, keepdim=True))
    torch.testing.assert_close(ngpt(A, 0.5)(0.0, unit), 0.5 * drift / drift.norm(dim=-1, keepdim=True))
    torch.testing.assert_close(layer_norm_scaling(A)(3.0, unit), drift / 2)


def test_random_weights(generator):
    A = Attention.random(64, heads=2, generator=generator, dtype=f64)
    assert A.Q.shape == (2, 32, 64)
    x = Sphere().uniform(200, 64, generator=generator, dtype=f64)
    for matrix in (A.G[0], A.OV[0]):  # of rank d / heads
        assert 0.25 < float((x @ matrix.T).square().sum(-1).mean()) < 1


def test_fields_print_what_they_are():
    A = Attention.identity(3, beta=torch.tensor([1.0, 2.0]), causal=True)
    assert repr(A) == "Attention(heads=2, dim=3, beta=tensor (2,), softmax, causal)"
    assert A.summary()["beta"] == [1.0, 2.0]
    B = Attention.identity(3, math.inf).with_context(UniformSphere(3))
    assert repr(B) == "Attention(heads=1, dim=3, beta=inf, softmax, context=UniformSphere)"
    assert B.summary()["beta"] == "inf"
    assert repr(pre_norm(B + Drift(math.sin))) == f"pre_norm of {B} + Drift(sin)"
    assert (B + A).summary() == {"name": f"{B} + {A}"}
    assert "batch=(2,)" in repr(Attention(Q=torch.zeros(2, 1, 3, 3)))


def test_the_logits_of_every_field_are_bounded():
    A = Attention.identity(3, beta=5.0)
    fields = (A, A + Drift(math.sin), ngpt(A), pre_norm(A), peri_norm(A), A.with_beta(math.inf))
    # pre_norm and peri_norm evaluate the attention at tokens of length one.
    assert [float(field.logit_bound(2.0)) for field in fields] == [20.0, 20.0, 20.0, 5.0, 5.0, 0.0]
    assert (A + Drift(math.sin)).not_exchangeable_because == ("Drift(sin), which is not tokenwise",)


EYE = torch.eye(3)
ONE = Attention.identity(3)


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda: Attention(), ValueError, "dim"),
        (lambda: Attention(Q=[[1.0]]), TypeError, "torch.Tensor"),
        (lambda: Attention(Q=EYE.long()), TypeError, "floating"),
        (lambda: Attention(Q=EYE, dim=-1), ValueError, "dim = -1"),
        (lambda: Attention.random(4, heads=0), ValueError, "heads = 0"),
        (lambda: Attention.identity(3.0), TypeError, "d = 3.0, expected an integer"),
        (lambda: Attention.identity(3, beta=[1.0, 2.0]), TypeError, "beta is a list, expected a number or a torch"),
        (lambda: Attention.identity(3, beta=torch.tensor([1.0, math.inf])), ValueError, "mixes"),
        (lambda: Attention.identity(3, kind="sinkhorn", causal=True), ValueError, "sinkhorn"),
        (lambda: Attention.identity(3, kernel="near", causal=True), ValueError, "causal = False"),
        (lambda: Attention(Q=EYE).drift(torch.zeros(4, 3, dtype=f64)), ValueError, "use x.to"),
        (lambda: ONE.with_context(EYE.double()).drift(EYE), ValueError, "context has dtype torch.float64 and x"),
        (lambda: Attention.identity(3, kernel="near", kind="sinkhorn"), ValueError, "needs kind = 'softmax'"),
        (lambda: Attention.identity(3, kernel="near", tolerance=-1.0), ValueError, "tolerance = -1.0"),
        (
            lambda: Attention.identity(3, kernel="near").drift(EYE.clone().requires_grad_()),
            NotImplementedError,
            "kernel 'near' has no derivatives",
        ),
        (
            lambda: flow(ONE.with_beta(torch.ones(2, 1)) + ONE.with_beta(torch.ones(3, 1)), EYE, 1.0),
            ValueError,
            r"field 0 \(2,\), field 1 \(3,\)",
        ),
        (lambda: flow(ONE, [[1.0, 0.0, 0.0]], 1.0, validate=False), TypeError, "x0 is a list"),
        (
            lambda: Attention.identity(3, beta=torch.ones(2, 1)).drift(torch.zeros(5, 4, 3)),
            ValueError,
            "beta\\[:, None",
        ),
        (lambda: Layers([Attention.identity(3)], times=[1.0, 0.0]), ValueError, "increasing"),
        (lambda: Layers("a", times=[0.0, 1.0]), TypeError, "field 0 is a str"),
        (lambda: ONE + "a", TypeError, "unsupported operand"),
        (lambda: flow(lambda t: ONE, EYE, 1.0), TypeError, "field is a function, expected Attention"),
        (lambda: Drift(lambda t, x: x.double())(0.0, EYE), ValueError, "expected torch.float32"),
        (lambda: Drift(lambda t, x: x[:, :2])(0.0, EYE), ValueError, r"\(3, 2\) at t = 0, expected .*\(3, 3\)"),
        (lambda: Drift(lambda t, x: None)(0.0, EYE), TypeError, "returned a NoneType"),
        (lambda: Attention(Q=torch.tensor(1.0)), ValueError, r"Q has shape \(\)"),
        (lambda: Attention(Q=torch.zeros(0, 3, 3)), ValueError, "without empty axes"),
        (lambda: Attention(Q=torch.zeros(2, 1, 3, 3), K=torch.zeros(4, 1, 3, 3)), ValueError, "do not broadcast"),
        (
            lambda: Attention(Q=torch.zeros(2, 3, 3)).with_beta(torch.ones(3)),
            ValueError,
            r"do not broadcast .*beta \(3,\)",
        ),
        (lambda: Attention.identity(3, kind="sinkhorn").with_beta(math.inf), ValueError, "hardmax"),
        (lambda: Attention.identity(3, causal=True).with_context(EYE).drift(EYE), ValueError, "exclude each other"),
        (lambda: Attention.identity(3, context="tokens"), TypeError, "context is a str, expected a measure"),
        (lambda: ONE.with_context([1.0]).drift(EYE), TypeError, "context is a list, expected a measure"),
        (lambda: ONE.with_context(EYE[:, :2]).drift(EYE), ValueError, r"context has shape \(3, 2\)"),
        (
            lambda: ONE.with_context(UniformSphere(4)).drift(EYE),
            ValueError,
            r"expected \(\.\.\., m, 4\) for this measure",
        ),
        (lambda: ONE.with_context(Gaussian(EYE[0].double(), EYE.double())).drift(EYE), ValueError, "use measure.to"),
        (lambda: ONE.with_context(EYE).matrix(EYE), ValueError, r"use with_context\(None\)"),
        (lambda: Attention.identity(3, 1e4, kind="unnormalised").drift(EYE), FloatingPointError, "not finite"),
        (lambda: Attention.from_matrices(EYE, EYE[0]), ValueError, r"V has shape \(3,\)"),
        (lambda: Attention.from_matrices(EYE, EYE[:2, :2]), ValueError, r"G has shape \(3, 3\) and V \(2, 2\)"),
        (lambda: Attention.from_matrices(EYE.numpy(), EYE), TypeError, "G is a ndarray, expected a torch.Tensor"),
    ],
)
def test_errors_name_what_is_wrong(call, error, words):
    with pytest.raises(error, match=words):
        call()


def test_a_drift_of_ones_own_is_called_in_the_dtype_of_the_tokens() -> None:
    """The logits need float64, but the user's function is written for float32 and keeps its size."""
    turn = torch.tensor([[0.0, -1.0, 0.0], [1.0, 0.0, 0.0], [0.0, 0.0, 0.0]])
    x0 = Sphere().uniform(8, 3, generator=torch.Generator().manual_seed(0))
    paths = []
    for x in (x0, x0.double()):
        field = Attention.identity(3, beta=1000.0) + Drift(lambda t, z, dtype=x.dtype: z @ turn.to(dtype))
        paths.append(flow(field, x, [0.0, 1.0]).x[-1])
    assert paths[0].dtype == torch.float32
    assert torch.allclose(paths[0].double(), paths[1], atol=1e-4)


@pytest.mark.parametrize(
    ("n", "d", "beta", "kernel"),
    [
        (2048, 3, 1e4, "near"),
        (2048, 2, 100.0, "series"),
        (2048, 2, 1e6, "near"),  # the series would have 8,700 terms
        (2000, 3, 1e4, "dense"),
        (2048, 3, 1.0, "dense"),
        (2048, 17, 1e4, "dense"),
    ],
)
def test_auto_takes_another_kernel_only_for_large_cold_clouds(n: int, d: int, beta: float, kernel: str) -> None:
    x = Sphere().uniform(n, d, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    assert choose_kernel(x, x, x, None, beta) == kernel
    rounded = x.float().double()  # tokens that were given in float32
    assert choose_kernel(rounded, rounded, rounded, None, beta, tolerance=1e-6) == kernel


def test_many_float16_tokens_have_a_finite_drift() -> None:
    x = torch.ones(70_000, 2, dtype=torch.float16)  # the sum of this drift is beyond float16
    assert torch.equal(Attention.identity(2, beta=0.0).drift(x), x)
