"""The trainable layer: the flow of its attention, gradients of the steps, torch's machinery around it, masks."""

import copy
import math
import pickle

import pytest
import torch
from encoder_zoo import tiny
from torch import Tensor, nn

from attn_flow import Attention, Cloud, Ellipsoid, Euclidean, Sphere, dopri5, euler, flow
from attn_flow.hooks import replace_attention
from attn_flow.nn import ContinuousAttentionLayer as Layer
from attn_flow.nn import ContinuousMultiheadAttention as Multihead
from attn_flow.nn import FlowOptions, parameter_groups

F64 = torch.float64
LAYER_NORM = Ellipsoid.from_layer_norm(torch.tensor([1.1, 0.9, 1.0, 1.2], dtype=F64), 0.1 * torch.ones(4, dtype=F64))
MASK = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]])


def draw(*shape: int, seed: int = 0, dtype: torch.dtype = F64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def identity_layer(dim: int, beta: float, **options) -> Layer:
    """The layer with Q = K = V = O = I."""
    layer = Layer(dim, beta=beta, **options)
    for name in "QKVO":
        nn.init.eye_(layer.get_parameter(name).detach()[0])
    return layer


def make(dim: int = 4, heads: int = 2, seed: int = 0, **options) -> Layer:
    torch.manual_seed(seed)
    return Layer(dim, heads, **{"dtype": F64, "steps": 3, **options})


# --- what it computes -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"step": euler, "steps": 5},
        {"step": "dopri5", "horizon": 2.0},
        {"causal": True},
        {"beta": torch.tensor([0.5, 3.0])},
        {"head_dim": 7},
        {"geometry": Euclidean()},
        {"geometry": Sphere(2.0)},
        {"geometry": LAYER_NORM},
    ],
    ids=lambda options: " ".join(f"{k}={getattr(v, 'name', type(v).__name__)}" for k, v in options.items()),
)
def test_the_layer_is_the_flow_of_its_attention(options: dict) -> None:
    layer = make(**options)
    x, is_token = draw(2, 5, 4), MASK.bool()
    run = layer.options
    path = flow(
        layer.attention(),
        Cloud(x, mask=is_token),
        [0.0, run.horizon],
        geometry=run.geometry,
        step=run.step,
        h=run.horizon / run.steps,
    )
    out = layer(x, MASK)
    torch.testing.assert_close(out[is_token], path.x[-1][is_token])
    assert torch.equal(out[1, 3:], x[1, 3:])  # padding comes out as it went in
    states = layer(x, MASK, return_path=True)
    assert states.shape == (run.steps + 1, 2, 5, 4)
    assert torch.equal(states[-1], out)
    torch.testing.assert_close(states[0][is_token], run.geometry.retract(x[is_token]))


def test_batch_is_loop_and_padding_is_shortening() -> None:
    layer, x = make(causal=True), draw(3, 5, 4)
    torch.testing.assert_close(layer(x), torch.stack([layer(cloud) for cloud in x]))
    torch.testing.assert_close(layer(x, torch.arange(5).expand(3, 5) < 3)[:, :3], layer(x[:, :3]))
    torch.testing.assert_close(layer(x, torch.arange(5).expand(3, 5) >= 2)[:, 2:], layer(x[:, 2:]))


@pytest.mark.parametrize(("dim", "heads"), [(16, 1), (64, 1), (64, 4), (256, 8)])
@pytest.mark.parametrize("geometry", [Sphere(), Sphere(3.0), Euclidean()], ids=str)
def test_default_beta_attends_as_widely_as_multihead_attention(dim: int, heads: int, geometry: Sphere) -> None:
    """64 layer-normalised tokens: about 56.8 effective keys."""
    torch.manual_seed(0)
    x = torch.nn.functional.layer_norm(torch.randn(20, 64, dim), (dim,))

    def effective_keys(A: Tensor) -> float:
        return float((-(A * A.log()).sum(-1)).exp().mean())

    with torch.no_grad():
        A = Layer(dim, heads, geometry=geometry).attention().matrix(geometry.retract(x))
        theirs = nn.MultiheadAttention(dim, heads, batch_first=True)(x, x, x, average_attn_weights=False)[1]
    assert effective_keys(A) == pytest.approx(effective_keys(theirs), abs=1.5)
    assert effective_keys(A) == pytest.approx(56.8, abs=1.5)


def test_beta_is_read_set_saved_loaded_and_reset() -> None:
    torch.set_default_dtype(F64)
    try:
        assert Layer(4, beta=3.0).beta.dtype == F64
    finally:
        torch.set_default_dtype(torch.float32)
    layer = make(beta=3.0)
    layer.beta = 8.0
    other = make(beta=1.0, learn_beta=True)
    other.load_state_dict(layer.state_dict())
    assert other.beta.tolist() == pytest.approx([8.0, 8.0])
    layer.reset_parameters()
    assert layer.beta.tolist() == pytest.approx([3.0, 3.0])
    cold = copy.deepcopy(layer).float()
    cold.load_state_dict(layer.state_dict() | {"log_beta": torch.full((2,), math.inf)})
    with pytest.raises(ValueError, match=r"the logits of x overflow; use .* beta"):
        cold(draw(5, 4).float())
    for beta, message in (
        (torch.ones(3), r"beta has shape \(3,\), expected \(\) or \(heads,\) = \(2,\)"),
        (torch.tensor([1.0, math.inf]), "expected positive, finite numbers"),
        (-1.0, "beta = -1.0, expected positive"),
    ):
        with pytest.raises(ValueError, match=message):
            layer.beta = beta


def test_weight_decay_spares_beta_in_its_parameter_group() -> None:
    model = nn.Sequential(make(beta=9.0, learn_beta=True), nn.Linear(4, 4, dtype=F64))
    bert = replace_attention(tiny("BERT"), learn_beta=True)
    assert [p.shape for p in parameter_groups(bert)[1]["params"]] == [(4,)] * 3
    others, betas = parameter_groups(model, weight_decay=0.5)
    assert [p.shape for p in betas["params"]] == [(2,)]
    assert len(others["params"]) == len(list(model.parameters())) - 1
    for groups, expected in (((others, betas), 9.0), (model.parameters(), None)):
        optimiser = torch.optim.AdamW(groups, lr=0.1, weight_decay=0.5)
        for p in model.parameters():
            p.grad = torch.zeros_like(p)
        optimiser.step()
        beta = float(model[0].beta[0].detach())
        assert beta == pytest.approx(9.0) if expected else beta < 8.2  # decay pulls beta to 1


# --- gradients --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {"learn_beta": True, "beta": 1.3},
        {"step": dopri5, "steps": 2, "checkpoint": True},
        {"causal": True},
        {"geometry": LAYER_NORM},
    ],
    ids=["learned beta", "checkpoint", "causal", "layer norm"],
)
def test_gradcheck_through_the_steps(options: dict) -> None:
    layer = make(**{"steps": 2, **options})
    x, mask = draw(2, 3, 4).requires_grad_(), torch.tensor([[True, True, True], [False, True, True]])
    names = [name for name, _ in layer.named_parameters()]

    def run(x: Tensor, *weights: Tensor) -> Tensor:
        return torch.func.functional_call(layer, dict(zip(names, weights)), (x, mask))

    assert torch.autograd.gradcheck(run, (x, *layer.parameters()), fast_mode=True)


def test_checkpointing_changes_nothing_but_memory() -> None:
    gradients, sizes = [], []
    for checkpoint in (False, True):
        layer, x = make(checkpoint=checkpoint, learn_beta=True, steps=6), draw(2, 5, 4).requires_grad_()
        saved = []
        with torch.autograd.graph.saved_tensors_hooks(
            lambda z, saved=saved: (saved.append(z.numel()), z)[1], lambda z: z
        ):
            out = layer(x)
        sizes.append(sum(saved))
        (out * draw(*out.shape, seed=3)).sum().backward()
        gradients.append([x.grad, *(p.grad for p in layer.parameters())])
    for plain, recomputed in zip(*gradients):
        torch.testing.assert_close(plain, recomputed, rtol=1e-12, atol=1e-14)
    assert sizes[1] < sizes[0] / 5


@pytest.mark.parametrize("causal", [True, False])
def test_padding_has_no_nan_in_gradients(causal: bool) -> None:
    """Left padding of zeros: queries without keys under the causal mask, tokens without direction on the sphere."""
    layer = make(causal=causal)
    x = draw(2, 5, 4)
    mask = torch.tensor([[False, False, True, True, True], [False] * 5])
    x = torch.where(mask[..., None], x, 0.0).requires_grad_()
    with pytest.warns(UserWarning, match="hides every token of a cloud"):
        out = layer(x, mask)
    assert torch.equal(out[1], x[1])
    out.square().sum().backward()
    assert all(bool(z.grad.isfinite().all()) for z in (x, *layer.parameters()))


def test_the_continuous_adjoint_is_wrong_here() -> None:
    """n = 100, d = 8, beta = 10, T = 5. Reversed time expands, so the adjoint does not retrace the flow.

    The layer's gradient agrees with finite differences to 1e-6; torchdiffeq's adjoint is off by more than 2%.
    """
    from torchdiffeq import odeint_adjoint

    x0 = Sphere().uniform(100, 8, generator=torch.Generator().manual_seed(0), dtype=F64)
    weight, direction = draw(100, 8, seed=1), draw(100, 8, seed=2)
    attention = Attention.identity(8, 10.0)
    layer = identity_layer(8, 10.0, horizon=5.0, steps=50, dtype=F64)
    x, e = x0.clone().requires_grad_(), 1e-5
    (ours,) = torch.autograd.grad((weight * layer(x)).sum(), x)
    with torch.no_grad():
        ends = [float((weight * layer(x0 + sign * e * direction)).sum()) for sign in (1, -1)]
    assert float((ours * direction).sum()) == pytest.approx((ends[0] - ends[1]) / (2 * e), rel=1e-6)

    class Field(nn.Module):
        def forward(self, t: Tensor, x: Tensor) -> Tensor:
            return Sphere().tangent(x, attention.drift(x))

    times = torch.tensor([0.0, 5.0], dtype=F64)
    end = odeint_adjoint(Field(), x, times, adjoint_params=(), method="dopri5", rtol=1e-5, atol=1e-6)[-1]
    (adjoint,) = torch.autograd.grad((weight * end).sum(), x)
    difference = Sphere().tangent(x0, adjoint - ours).norm() / Sphere().tangent(x0, ours).norm()
    assert float(difference) > 0.02


# --- torch's machinery ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"causal": True, "learn_beta": True}], ids=str)
def test_compile_and_export(options: dict) -> None:
    torch._dynamo.reset()
    layer, x = make(steps=2, step="euler", **options), draw(2, 5, 4)
    arguments = (MASK,) if options else ()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    a, b = x.clone().requires_grad_(), x.clone().requires_grad_()
    plain, graph = layer(a, *arguments), compiled(b, *arguments)
    torch.testing.assert_close(graph, plain)
    torch.testing.assert_close(
        *(torch.autograd.grad(y.square().sum() + y.sum(), z)[0] for y, z in ((plain, a), (graph, b)))
    )
    exported = torch.export.export(layer, (x, *arguments)).module()
    torch.testing.assert_close(exported(x, *arguments), plain)


def test_vmap_of_grad_gives_gradients_per_sample() -> None:
    layer, x = make(steps=2), draw(3, 5, 4)
    weights = {name: p.detach() for name, p in layer.named_parameters()}

    def loss(weights: dict[str, Tensor], x: Tensor) -> Tensor:
        return torch.func.functional_call(layer, weights, (x,)).sum()

    gradients = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(weights, x)
    for i in range(3):
        layer.zero_grad()
        layer(x[i]).sum().backward()
        for name, p in layer.named_parameters():
            torch.testing.assert_close(gradients[name][i], p.grad)


def test_state_dict_pickle_and_deepcopy() -> None:
    x, options = draw(2, 5, 4), {"geometry": LAYER_NORM, "step": dopri5}
    layer, other = make(beta=2.0, **options), make(seed=1, beta=7.0, **options)
    other.load_state_dict(layer.state_dict())
    for copied in (other, pickle.loads(pickle.dumps(layer)), copy.deepcopy(layer)):
        assert torch.equal(copied(x), layer(x))
        assert copied.Q is not layer.Q


def test_meta_device_and_reset() -> None:
    for options in ({}, {"causal": True}, {"beta": 5.0}):
        layer = Layer(8, 2, device="meta", step="euler", **options)
        x, mask = torch.empty(3, 7, 8, device="meta"), torch.ones(3, 7, device="meta", dtype=torch.bool)
        assert layer(x).is_meta
        assert layer(x, mask).shape == x.shape
    layer.to_empty(device="cpu").reset_parameters()
    assert layer.beta.tolist() == pytest.approx([5.0, 5.0])
    assert bool(layer(torch.randn(3, 8)).isfinite().all())


@pytest.mark.parametrize(("dtype", "error"), [(torch.float32, 1e-5), (torch.bfloat16, 0.1)])
@pytest.mark.parametrize("geometry", [Sphere(), LAYER_NORM], ids=["sphere", "layer norm"])
def test_dtypes_and_autocast(dtype: torch.dtype, error: float, geometry: Sphere) -> None:
    layer, x = make(geometry=geometry), draw(2, 5, 4)
    low, z = copy.deepcopy(layer).to(dtype), x.to(dtype).requires_grad_()
    out = low(z, MASK)
    assert out.dtype == dtype
    exact = layer(geometry.retract(x), MASK)
    torch.testing.assert_close(out.double()[0], exact[0], rtol=0, atol=3 * error)
    out.sum().backward()
    assert bool(z.grad.isfinite().all())
    single = copy.deepcopy(layer).float()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        mixed = single(x.float(), MASK)
    assert mixed.dtype == torch.float32
    torch.testing.assert_close(mixed.double()[0], exact[0], rtol=0, atol=0.3)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_many_tokens_whose_sum_half_precision_cannot_hold(dtype: torch.dtype) -> None:
    x = torch.full((64, 128, 16), 0.6, dtype=dtype)
    for module in (Layer(16, 2, geometry=Euclidean(), dtype=dtype), Multihead(16, 2, batch_first=True, dtype=dtype)):
        out = module(x) if isinstance(module, Layer) else module(x, x, x)[0]
        assert bool(out.isfinite().all())


def test_logits_that_float32_cannot_resolve_are_computed_in_float64() -> None:
    """Logits of 1e5 that differ by about one, because the tokens are close together."""
    layer = identity_layer(3, 1e5)
    x = Sphere().retract(torch.tensor([1.0, 2.0, 3.0]) + 1e-2 * draw(16, 3).float())
    exact = copy.deepcopy(layer).double()(x.double())
    rounding = 4 * torch.finfo(x.dtype).eps
    torch.testing.assert_close(layer(x).double(), exact, rtol=0, atol=rounding)
    layer.validate = False  # float32 throughout
    assert float((layer(x) - exact).abs().max()) > rounding


# --- masks and errors -------------------------------------------------------------------------------------------------


def test_masks() -> None:
    x, keep = draw(2, 5, 4), MASK.bool()
    layer = make()
    expected = layer(x, keep)
    assert torch.equal(layer(x, MASK), expected)
    assert torch.equal(layer(x, attention_mask=MASK), expected)
    with pytest.raises(TypeError, match=r"mask has dtype torch\.float32, expected True or the integer 1 for tokens"):
        layer(x, torch.where(keep, 0.0, -1e9))
    for shape in ((2, 4), (2, 1, 5, 5)):
        with pytest.raises(ValueError, match=r"mask has shape \(2, .*\), expected \(..., n\) = \(2, 5\)"):
            layer(x, torch.ones(shape))
    with pytest.raises(TypeError, match="mask is a list, expected a torch"):
        layer(x, MASK.tolist())
    with pytest.raises(ValueError, match="pass one of them"):
        layer(x, keep, attention_mask=keep)


def test_errors() -> None:
    layer, x = make(), draw(2, 5, 4)
    zero, huge = x.clone(), x.clone()
    zero[1, 2], huge[1, 2] = 0, 1e200
    for tokens, message in (
        (draw(4), r"x has shape \(4,\), expected"),
        (x.float(), r"x has dtype torch.float32 and the layer torch.float64; use x.to"),
        (x * math.nan, "x has NaN or infinite entries"),
        (zero, "x has a token without a direction"),
        (huge, "x has a token without a direction .zero, or too long"),  # its square overflows
    ):
        with pytest.raises(ValueError, match=message):
            layer(tokens)
    for options, message in (
        ({"horizon": -1.0}, "horizon = -1.0, expected a positive"),
        ({"steps": 0}, "steps = 0, expected an integer"),
        ({"geometry": Ellipsoid(torch.zeros(3), torch.ones(3))}, "the centre of the geometry has shape"),
        ({"step": "adaptive"}, "a layer takes equal steps"),
    ):
        with pytest.raises(ValueError, match=message):
            make(**options)
    for geometry in ("sphere", Sphere):
        with pytest.raises(TypeError, match=r"geometry is a (str|type), expected a Geometry"):
            make(geometry=geometry)


def test_flow_options_are_one_frozen_object() -> None:
    layer = make(horizon=2.0, step="euler", checkpoint=True)
    assert layer.options == FlowOptions(2.0, 3, "euler", Sphere(), True)
    assert "3 attentions a forward pass" in repr(layer)
    with pytest.raises(AttributeError):
        layer.options.horizon = 1.0
