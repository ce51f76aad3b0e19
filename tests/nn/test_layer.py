"""The trainable module: gradients of the steps, torch's machinery around it, every form of mask."""

import copy
import math
import pickle

import pytest
import torch
from torch import Tensor, nn

from attn_flow import Adaptive, Attention, Ellipsoid, Euclidean, Sphere, dopri5, euler, push_forward, rk4
from attn_flow.attention import drift
from attn_flow.nn.layer import ContinuousAttentionLayer as Layer
from attn_flow.nn.layer import token_mask

F64 = torch.float64


def drawn(*shape: int, seed: int = 0, dtype: torch.dtype = F64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def layer(dim: int = 4, heads: int = 2, seed: int = 0, **options) -> Layer:
    torch.manual_seed(seed)
    return Layer(dim, heads, **{"dtype": F64, "steps": 3, **options})


def parameters(module: nn.Module) -> dict[str, Tensor]:
    return dict(module.named_parameters())


# --- what it computes -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"step": euler, "steps": 5},
        {"step": dopri5, "horizon": 2.0},
        {"kind": "unnormalised", "beta": 0.5},
        {"kind": "sinkhorn"},
        {"kind": "hardmax"},
        {"kind": "linear"},
        {"kind": "relu"},
        {"kind": "sigmoid"},
        {"causal": True},
        {"self_attention": False},
        {"beta": torch.tensor([0.5, 3.0])},
        {"beta": math.inf},
        {"bias": True},
        {"head_dim": 7},
        {"geometry": Euclidean()},
        {"geometry": Sphere(2.0)},
        {"geometry": Ellipsoid.from_layer_norm(1 + 0.1 * drawn(4, seed=1), drawn(4, seed=2))},
    ],
    ids=lambda options: " ".join(f"{k}={getattr(v, 'name', type(v).__name__)}" for k, v in options.items()),
)
def test_the_layer_is_the_flow_of_its_attention(options: dict) -> None:
    module = layer(**options)
    for bias in (module.query_bias, module.value_bias):
        if bias is not None:
            nn.init.normal_(bias)
    x = drawn(2, 5, 4)
    mask = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]])
    h = module.horizon / module.steps
    flow_options = {"geometry": module.geometry, "step": module.step, "h": h}
    expected = push_forward(module.attention(), x, module.horizon, mask=mask.bool(), **flow_options)
    out = module(x, mask)
    torch.testing.assert_close(out[mask.bool()], expected[mask.bool()])
    assert torch.equal(out[1, 3:], x[1, 3:])  # padding comes out as it went in
    path = module(x, mask, return_path=True)
    assert path.shape == (module.steps + 1, 2, 5, 4)
    assert torch.equal(path[-1], out)
    torch.testing.assert_close(path[0][mask.bool()], module.geometry.retract(x[mask.bool()]))


def test_deterministic_and_without_dropout() -> None:
    module, x = layer(), drawn(2, 5, 4)
    assert torch.equal(module.train()(x), module.eval()(x))


def test_beta_fixed_learned_and_scheduled() -> None:
    x = drawn(5, 4)
    assert layer(heads=2).beta.tolist() == pytest.approx([1 / math.sqrt(2)] * 2)
    assert layer(beta=3.0).state_dict().keys() == layer(beta=3.0, learn_beta=True).state_dict().keys()
    assert layer(beta=3.0).log_beta.shape == (2,)
    learned = layer(beta=torch.tensor([2.0, 3.0]), learn_beta=True)
    torch.testing.assert_close(learned.beta, torch.tensor([2.0, 3.0], dtype=F64))
    torch.testing.assert_close(learned(x), layer(beta=torch.tensor([2.0, 3.0]))(x))
    learned(x)[0].sum().backward()
    assert learned.log_beta.grad is not None
    assert bool((learned.log_beta.grad != 0).all())
    scheduled = layer(beta=2.0, beta_schedule=lambda s: 1 + s, horizon=0.5)
    expected = push_forward(lambda t: scheduled.attention(t / 0.5), x, 0.5, h=0.5 / 3)
    torch.testing.assert_close(scheduled(x), expected)
    assert scheduled.attention(0.5).beta.tolist() == pytest.approx([3.0, 3.0])


def test_from_attention() -> None:
    for attention in (
        Attention.identity(4, 2.0, dtype=F64),
        Attention(drawn(3, 2, 4), drawn(3, 2, 4, seed=1), None, drawn(3, 4, 4, seed=2), 1.5, drawn(3, 2), drawn(4)),
        Attention(drawn(4, 4), V=drawn(4, 4, seed=1), kind="hardmax", causal=True, value_bias=drawn(4)),
        Attention(drawn(4, 4), V=drawn(4, 4, seed=1), beta=torch.tensor([0.5], dtype=F64), self_attention=False),
    ):
        module = Layer.from_attention(attention, steps=4)
        torch.testing.assert_close(module(drawn(5, 4)), push_forward(attention, drawn(5, 4), 1.0, h=0.25))
    with pytest.raises(ValueError, match=r"Q has shape \(2, 1, 4, 4\); a layer takes one attention, not a batch"):
        Layer.from_attention(Attention(drawn(2, 1, 4, 4)))


# --- gradients --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {"bias": True, "learn_beta": True, "beta": 1.3},
        {"step": dopri5, "steps": 2, "checkpoint": True},
        {"kind": "unnormalised", "causal": True},
        {"kind": "linear", "bias": True},
        {"kind": "sigmoid", "causal": True},
        {"geometry": Ellipsoid.from_layer_norm(1 + 0.1 * drawn(4, seed=1), drawn(4, seed=2))},
        {"self_attention": False},
    ],
    ids=["biases", "checkpoint", "unnormalised causal", "linear", "sigmoid causal", "layer norm", "no self"],
)
def test_gradcheck_through_the_steps(options: dict) -> None:
    module = layer(**{"steps": 2, **options})
    x, mask = drawn(2, 3, 4).requires_grad_(), torch.tensor([[True, True, True], [True, True, False]])
    names = list(parameters(module))

    def run(x: Tensor, *weights: Tensor) -> Tensor:
        return torch.func.functional_call(module, dict(zip(names, weights)), (x, mask))

    assert torch.autograd.gradcheck(run, (x, *parameters(module).values()), fast_mode=True)


def test_checkpointing_changes_nothing_but_memory() -> None:
    grads, saved = [], []
    for checkpoint in (False, True):
        module, x = layer(checkpoint=checkpoint, learn_beta=True, steps=6), drawn(2, 5, 4).requires_grad_()
        kept = 0

        def pack(z: Tensor) -> Tensor:
            nonlocal kept
            kept += z.numel()
            return z

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda z: z):
            out = module(x)
        saved.append(kept)
        (out * drawn(*out.shape, seed=3)).sum().backward()
        grads.append([x.grad, *(p.grad for p in module.parameters())])
    for plain, recomputed in zip(*grads):
        torch.testing.assert_close(plain, recomputed, rtol=1e-12, atol=1e-14)
    assert saved[1] < saved[0] / 5


@pytest.mark.parametrize(("geometry", "tensors"), [(Euclidean(), 5), (Sphere(), 6)], ids=["flat", "sphere"])
@pytest.mark.parametrize("many", [False, True])
def test_what_an_attention_keeps(geometry: Euclidean | Sphere, tensors: int, many: bool, monkeypatch) -> None:
    """Tokens, queries, keys, values and averages, each as large as x; on the sphere also the drift before projection.

    So it is for clouds that a drift would otherwise compute in parts.
    """
    if many:
        monkeypatch.setattr(drift, "AT_ONCE_WITH_GRADIENT", 0)
    saved = []
    for steps in (1, 2):
        module, x = layer(8, 2, geometry=geometry, steps=steps), drawn(3, 16, 8).requires_grad_()
        kept = {}

        def keep(z: Tensor, kept: dict = kept) -> Tensor:
            kept[z.untyped_storage().data_ptr()] = z.untyped_storage()
            return z

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda z: z):
            module(x)
        saved.append(sum(storage.nbytes() == x.untyped_storage().nbytes() for storage in kept.values()))
    assert saved[1] - saved[0] == 4 * tensors  # four attentions more


@pytest.mark.parametrize(
    ("T", "method", "error"),
    [(5.0, {"method": "dopri5", "rtol": 1e-5, "atol": 1e-6}, 0.02), (10.0, {"method": "rk4"}, 0.05)],
    ids=["T=5", "T=10"],
)
def test_the_continuous_adjoint_is_wrong_here(T: float, method: dict, error: float) -> None:
    """THEORY 10: n = 100, d = 8, beta = 10. Reversed time expands, so the adjoint does not retrace the flow.

    The layer's gradient agrees with finite differences to 1e-6. torchdiffeq's adjoint is off by 4% at T = 5 with
    tolerances of 1e-5, and by 8% at T = 10 with the very steps of the layer (its adaptive method fails there).
    """
    from torchdiffeq import odeint_adjoint

    n, d, beta, h = 100, 8, 10.0, 0.1
    x0 = Sphere().uniform(n, d, generator=torch.Generator().manual_seed(0), dtype=F64)
    weight, direction = drawn(n, d, seed=1), drawn(n, d, seed=2)
    attention = Attention.identity(d, beta, dtype=F64)
    module = Layer.from_attention(attention, horizon=T, steps=round(T / h))
    loss = lambda x: (weight * module(x)).sum()
    x = x0.clone().requires_grad_()
    (ours,) = torch.autograd.grad(loss(x), x)
    with torch.no_grad():
        e = 1e-5
        slope = float(loss(x0 + e * direction) - loss(x0 - e * direction)) / (2 * e)
    assert float((ours * direction).sum()) == pytest.approx(slope, rel=1e-6)

    class Field(nn.Module):
        def forward(self, t: Tensor, x: Tensor) -> Tensor:
            return Sphere().tangent(x, attention.drift(x))

    if method["method"] == "rk4":
        method = {**method, "options": {"step_size": h}}
    end = odeint_adjoint(Field(), x, torch.tensor([0.0, T], dtype=F64), adjoint_params=(), **method)[-1]
    (adjoint,) = torch.autograd.grad((weight * end).sum(), x)
    tangent = lambda u: Sphere().tangent(x0, u)
    assert float((tangent(adjoint) - tangent(ours)).norm() / tangent(ours).norm()) > error


# --- torch's machinery ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"causal": True, "learn_beta": True}], ids=str)
def test_compile_without_graph_breaks(options: dict) -> None:
    torch._dynamo.reset()
    module, x = layer(steps=2, step=euler, **options), drawn(2, 5, 4)
    mask = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]])  # with causal=True in blocks of rows, else fused
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    for given in (mask,) if options else (None,):
        a, b = x.clone().requires_grad_(), x.clone().requires_grad_()
        plain, fused = module(a, given), compiled(b, given)
        torch.testing.assert_close(fused, plain)
        torch.testing.assert_close(
            *(torch.autograd.grad(y.square().sum() + y.sum(), z)[0] for y, z in ((plain, a), (fused, b)))
        )


def test_per_sample_gradients_by_vmap_of_grad() -> None:
    module, x = layer(steps=2), drawn(3, 5, 4)
    weights = {name: p.detach() for name, p in module.named_parameters()}

    def loss(weights: dict[str, Tensor], x: Tensor) -> Tensor:
        return torch.func.functional_call(module, weights, (x,)).sum()

    together = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(weights, x)
    for i in range(3):
        module.zero_grad()
        module(x[i]).sum().backward()
        for name, p in module.named_parameters():
            torch.testing.assert_close(together[name][i], p.grad)
    jacobian = torch.func.jacrev(module)(x[0])
    assert jacobian.shape == (5, 4, 5, 4)


def test_state_dict_pickle_and_deepcopy() -> None:
    x = drawn(2, 5, 4)
    module = layer(bias=True, beta=2.0, geometry=Sphere(2.0), step=dopri5)
    other = layer(seed=1, bias=True, beta=7.0, geometry=Sphere(2.0), step=dopri5)
    assert not torch.equal(other(x), module(x))
    other.load_state_dict(module.state_dict())
    assert torch.equal(other(x), module(x))
    for copied in (pickle.loads(pickle.dumps(module)), copy.deepcopy(module)):
        assert torch.equal(copied(x), module(x))
        assert copied.Q is not module.Q


def test_meta_device() -> None:
    """Shapes without memory: construction and forward touch no host tensor."""
    for options in ({}, {"causal": True, "bias": True}, {"kind": "unnormalised"}, {"kind": "sinkhorn"}, {"beta": 5.0}):
        module = Layer(8, 2, device="meta", steps=1, step=euler, **options)
        x = torch.empty(3, 7, 8, device="meta")
        mask = torch.ones(3, 7, device="meta", dtype=torch.bool)
        for given in (None, mask):
            out = module(x, given)
            assert out.shape == x.shape
            assert out.is_meta
    assert all(p.is_meta for p in module.parameters())


@pytest.mark.parametrize(("dtype", "error"), [(torch.float32, 1e-5), (torch.bfloat16, 0.1)])
def test_dtypes(dtype: torch.dtype, error: float) -> None:
    module, x = layer(), Sphere().retract(drawn(2, 5, 4))
    low = copy.deepcopy(module).to(dtype)
    mask = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]])
    z = x.to(dtype).requires_grad_()
    out = low(z, mask)
    assert out.dtype == dtype
    torch.testing.assert_close(out.double(), module(x, mask), rtol=0, atol=error)
    out.sum().backward()
    assert z.grad is not None
    assert bool(torch.isfinite(z.grad).all())


@pytest.mark.parametrize(
    "options",
    [{}, {"causal": True}, {"kind": "unnormalised"}, {"self_attention": False}, {"kind": "linear"}, {"kind": "relu"}],
    ids=str,
)
def test_autocast(options: dict) -> None:
    module = layer(dtype=torch.float32, **options)
    x = Sphere().uniform((2, 6), 4, generator=torch.Generator().manual_seed(0)).requires_grad_()
    mask = torch.tensor([[1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 0, 0]])
    exact = module(x, mask)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = module(x, mask)
        assert module.attention().drift(x.detach()).dtype == torch.bfloat16
    assert out.dtype == torch.float32
    torch.testing.assert_close(out, exact, rtol=0, atol=0.1)
    out.sum().backward()
    assert all(p.grad is not None and bool(torch.isfinite(p.grad).all()) for p in module.parameters())


def test_an_ellipsoid_moves_with_the_layer() -> None:
    ellipsoid = Ellipsoid.from_layer_norm(1 + 0.1 * drawn(4, seed=1))
    module = layer(geometry=ellipsoid).to(torch.float32)
    assert module(drawn(5, 4).float()).dtype == torch.float32


def test_it_trains() -> None:
    """Tokens learn to gather at a target: the loss of a small problem falls to a tenth."""
    torch.manual_seed(0)
    module = Layer(4, 2, steps=4, horizon=2.0, learn_beta=True, bias=True)
    x, target = Sphere().uniform((16, 6), 4), torch.tensor([1.0, 0, 0, 0])
    optimiser = torch.optim.Adam(module.parameters(), lr=0.05)
    losses = []
    for _ in range(60):
        loss = (module(x) - target).square().sum(-1).mean()
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.1 * losses[0]


# --- masks ------------------------------------------------------------------------------------------------------------


def forms(tokens: Tensor) -> dict[str, Tensor]:
    """HuggingFace's ways to write one padding mask."""
    batch, n = tokens.shape
    lowest = torch.finfo(torch.float32).min
    square = tokens[:, None, None, :].expand(batch, 1, n, n)
    return {
        "bool": tokens,
        "int64": tokens.long(),
        "float": tokens.float(),
        "3-D": tokens[:, None, :].expand(batch, n, n).long(),
        "3-D float": tokens[:, None, :].expand(batch, n, n).float(),
        "4-D bool row": tokens[:, None, None, :],
        "4-D bool": square,
        "4-D numbers": square.float(),
        "4-D additive row": torch.where(tokens[:, None, None, :], 0.0, lowest),
        "4-D additive": torch.where(square, 0.0, lowest),
        "4-D -inf": torch.where(square, 0.0, -math.inf),
    }


TOKENS = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0], [0, 0, 1, 1, 1]]).bool()


@pytest.mark.parametrize("form", list(forms(TOKENS)))
def test_every_form_of_a_mask_is_the_same_mask(form: str) -> None:
    module, x = layer(), drawn(3, 5, 4)
    assert torch.equal(token_mask(forms(TOKENS)[form], x), TOKENS)
    assert torch.equal(module(x, forms(TOKENS)[form]), module(x, TOKENS))
    for i in range(3):
        torch.testing.assert_close(module(x[i : i + 1, TOKENS[i]])[0], module(x, TOKENS)[i, TOKENS[i]])


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_what_transformers_hands_to_its_attention_is_understood(implementation: str) -> None:
    from transformers import BertConfig, BertModel

    config = BertConfig(vocab_size=9, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8)
    model = BertModel._from_config(config, attn_implementation=implementation).eval()
    seen: list[Tensor] = []

    def catch(module: nn.Module, given: tuple, named: dict) -> None:
        seen.extend(z for z in (*given, *named.values()) if isinstance(z, Tensor) and z.ndim == 4)

    model.encoder.layer[0].attention.self.register_forward_pre_hook(catch, with_kwargs=True)
    model(torch.zeros(3, 5, dtype=torch.long), TOKENS.long())
    assert len(seen) == 1
    assert torch.equal(token_mask(seen[0], drawn(3, 5, 8)), TOKENS)


def test_a_causal_mask_needs_a_causal_layer() -> None:
    x, n = drawn(3, 5, 4), 5
    causal = TOKENS[:, None, None, :] & torch.ones(n, n, dtype=torch.bool).tril()
    torch.testing.assert_close(layer(causal=True)(x, causal), layer(causal=True)(x, TOKENS))
    with pytest.raises(ValueError, match=r"mask of shape \(3, 1, 5, 5\) hides tokens from some queries and not from"):
        layer()(x, causal)
    window = causal & torch.ones(n, n, dtype=torch.bool).triu(-1)
    with pytest.raises(ValueError, match=r"expected padding. For the causal mask build the layer with causal=True"):
        layer(causal=True)(x, window)


def test_left_padding_under_a_causal_mask_has_finite_gradients() -> None:
    """Padding queries see nobody at all: they send back zero, not NaN."""
    module, x = layer(causal=True), drawn(3, 5, 4).requires_grad_()
    module(x, TOKENS).square().sum().backward()
    assert x.grad is not None
    assert bool(torch.isfinite(x.grad).all())
    assert all(bool(torch.isfinite(p.grad).all()) for p in module.parameters() if p.grad is not None)


def test_zero_rows_may_hide_behind_the_mask() -> None:
    x = drawn(3, 5, 4).masked_fill(~TOKENS[..., None], 0.0).requires_grad_()
    layer()(x, TOKENS).sum().backward()
    assert x.grad is not None
    assert bool(torch.isfinite(x.grad).all())


# --- bad arguments ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dim": 5}, r"dim = 5 is no multiple of heads = 2; give head_dim"),
        ({"dim": 0}, r"dim = 0, expected a whole number of at least 1"),
        ({"head_dim": 0}, r"head_dim = 0, expected a whole number of at least 1"),
        ({"steps": 0}, r"steps = 0, expected a whole number of at least 1"),
        ({"steps": 2.5}, r"steps = 2.5, expected a whole number of at least 1"),
        ({"horizon": 0.0}, r"horizon = 0.0, expected a positive, finite number"),
        ({"horizon": -1.0}, r"horizon = -1.0, expected a positive, finite number"),
        ({"horizon": math.inf}, r"horizon = inf, expected a positive, finite number"),
        ({"beta": -1.0}, r"beta = -1.0, expected 0 <= beta <= inf"),
        ({"beta": torch.tensor([1.0, 2.0, 3.0])}, r"beta has shape \(3,\), expected \(\) or \(heads,\) = \(2,\)"),
        ({"beta": math.inf, "learn_beta": True}, r"beta = inf cannot be learned; expected positive and finite"),
        ({"kind": "cosine"}, r"kind = 'cosine', expected one of 'softmax', 'unnormalised', 'hardmax', 'sinkhorn'"),
        (
            {"kind": "relu", "beta": math.inf},
            r"beta = inf with kind = 'relu'; only softmax has a zero-temperature limit",
        ),
        ({"step": Adaptive()}, r"step = Adaptive.*expected a step function such as rk4: a layer takes equal steps"),
    ],
    ids=str,
)
def test_bad_construction(options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        layer(**options)


def test_bad_input() -> None:
    module, x = layer(), drawn(2, 5, 4)
    zero = x.clone()
    zero[1, 2] = 0
    for given, mask, message in (
        (drawn(2, 5, 3), None, r"x has shape \(2, 5, 3\), expected \(..., n, dim\) = \(..., n, 4\)"),
        (drawn(4), None, r"x has shape \(4,\), expected \(..., n, dim\)"),
        (x.float(), None, r"x has dtype torch.float32 and the layer torch.float64; use x.to"),
        (x * math.nan, None, r"x has 40 NaN or infinite entries of 40"),
        (zero, None, r"x has a row that Sphere cannot place \(a zero row has no direction\); remove it, hide it"),
        (drawn(2, 5, 4), torch.ones(2, 4), r"mask has shape \(2, 4\), expected \(batch, n\), .* = \(2, 5\)"),
        (drawn(2, 5, 4), torch.zeros(2, 5), r"mask hides every token of a cloud"),
        (drawn(2, 5, 4), torch.ones(2, 3, 5, 5), r"mask has shape \(2, 3, 5, 5\), expected"),
    ):
        with pytest.raises(ValueError, match=message):
            module(given, mask)


def test_leaving_the_range_names_the_time() -> None:
    module = Layer.from_attention(Attention(torch.eye(4), V=1e20 * torch.eye(4)), geometry=Euclidean(), steps=4)
    with pytest.raises(FloatingPointError, match=r"tokens left the range of torch.float32 at t = 0.25 of 1; use more"):
        module(drawn(5, 4).float())


def test_repr() -> None:
    assert "heads=2" in repr(layer())
    assert "step=rk4" in repr(layer(step=rk4))


def test_a_compiled_layer_keeps_the_precision_that_was_chosen() -> None:
    """beta = 500 on the sphere needs float64; the layer ran once, and compiled code does not look."""
    torch.compiler.reset()
    layer = Layer.from_attention(Attention.identity(3, beta=500.0))
    x = torch.nn.functional.normalize(torch.randn(16, 3, generator=torch.Generator().manual_seed(0)), dim=-1)
    eager = layer(x)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")(x)
    exact = Layer.from_attention(Attention.identity(3, beta=500.0).to(torch.float64))(x.double())
    for found in (eager, compiled):
        torch.testing.assert_close(found.double(), exact, rtol=0, atol=20 * torch.finfo(x.dtype).eps)
