"""Layers that are flows for good: the pretrained model by default, trained, restored, quantised, with caches."""

import copy
import pickle
import warnings
from typing import Any

import pytest
import torch
import transformers
from encoder_zoo import CAUSAL, every_architecture, fingerprint, inputs, mask, output, run, tiny
from tolerances import rounding
from torch import Tensor, nn

from attn_flow.hooks import (
    attentions,
    blocks,
    encoder_facts,
    flows,
    load,
    record,
    recording,
    replace_attention,
    restore_attention,
    scale_beta,
    self_check,
    wrap,
)
from attn_flow.nn import DeepStack

pytestmark = pytest.mark.filterwarnings("ignore:a layer evaluates its attention several times")
PER_HEAD = torch.tensor([0.5, 1.0, 2.0, 3.0])


@every_architecture
def test_by_default_no_bit_differs_and_it_can_be_undone(name: str) -> None:
    """torch's encoders have a fused path, and some products differ for weights that ask for a gradient."""
    model, x, tokens = tiny(name).requires_grad_(False), inputs(name), mask(name)
    fused = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        expected, before, keys = run(model, x), fingerprint(model), set(model.state_dict())
        assert replace_attention(model) is model
        assert keys < set(model.state_dict())
        assert torch.equal(run(model, x)[tokens], expected[tokens])
        assert flows(restore_attention(model)) == {}
        assert fingerprint(model) == before
        replace_attention(model, steps=3, learn_beta=True)
        assert fingerprint(restore_attention(copy.deepcopy(model))) == before
        assert torch.equal(run(restore_attention(model), x), expected)
    finally:
        torch.backends.mha.set_fastpath_enabled(fused)


@every_architecture
def test_it_is_the_wrap_with_the_same_options(name: str) -> None:
    model, x, tokens = tiny(name, torch.float64), inputs(name, torch.float64), mask(name)
    layers, options = None if name == "ALBERT" else [0, 2], {"steps": 2, "step": "rk4", "horizon": 1.5}
    with wrap(model, layers, beta_factor=PER_HEAD, **options):
        expected = run(model, x)
    replace_attention(model, layers, beta_factor=PER_HEAD, **options)
    # The factor goes through its logarithm, which is one more rounding.
    torch.testing.assert_close(run(model, x)[tokens], expected[tokens], rtol=0, atol=rounding(expected, 8 * 3 * 48))
    for flow in flows(model).values():  # options are those of the module, whenever the layer runs
        flow.beta_factor, flow.steps, flow.step, flow.horizon = 1.0, 1, "euler", 1.0
    plain = run(restore_attention(tiny(name, torch.float64)), x)
    torch.testing.assert_close(run(model, x)[tokens], plain[tokens], rtol=0, atol=rounding(plain, 8 * 3 * 48))


@pytest.mark.parametrize("name", ["BERT", "ALBERT", "GPT-2", "DeBERTa", "torch"])
def test_beta_learns(name: str) -> None:
    """The gradient of one log beta by central differences."""
    model, x, tokens = tiny(name, torch.float64), inputs(name, torch.float64), mask(name)
    h, rel = (1e-3, 1e-2) if name == "DeBERTa" else (1e-6, 1e-4)  # its norm works in float32
    replace_attention(model, steps=2, step="rk4", beta_factor=1.3, learn_beta=True)
    log_factor = flows(model)[1].log_beta_factor

    def loss() -> Tensor:
        return output(model, x)[tokens].sin().sum()

    (grad,) = torch.autograd.grad(loss(), [log_factor])
    shift = torch.tensor([0.0, h, 0.0, 0.0], dtype=torch.float64)
    with torch.no_grad():
        log_factor += shift
        up = loss()
        log_factor -= 2 * shift
        down = loss()
    assert float((up - down) / (2 * h)) == pytest.approx(float(grad[1]), rel=rel)


def test_copies_and_pickles_carry_their_flow() -> None:
    model, x = tiny("BERT"), inputs("BERT")
    replace_attention(model, steps=3, beta_factor=2.0, learn_beta=True)
    expected = run(model, x)
    copies = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()  # a copy that depends on the original would notice
    assert all(torch.equal(run(each, x), expected) for each in copies)


def test_models_of_one_config_do_not_touch_each_other(tmp_path) -> None:
    config = tiny("BERT").config
    before = config.to_dict()
    a, b, plain = (transformers.BertModel(config).eval() for _ in range(3))
    replace_attention(a, [0], steps=2)
    replace_attention(b, [1], steps=3)
    assert config.to_dict() == plain.config.to_dict() == before
    assert [entry["layers"] for entry in (a.config.attn_flow[0], b.config.attn_flow[0])] == [[0], [1]]
    assert all(module.config is a.config for module in a.modules() if hasattr(module, "config"))
    a.save_pretrained(tmp_path)
    assert torch.equal(run(load(tmp_path), inputs("BERT")), run(a, inputs("BERT")))
    again = replace_attention(restore_attention(load(tmp_path)), [0, 2], steps=2)
    assert again.config.attn_flow == [
        {"layers": [0, 2], "horizon": 1.0, "steps": 2, "step": "euler", "learn_beta": False}
    ]


def test_other_changes_beside_a_flow() -> None:
    model, x = tiny("BERT"), inputs("BERT")
    replace_attention(model, [1], steps=3, beta_factor=2.0)
    change = [check.omits for check in self_check(model, x)][1]
    assert "horizon=1, steps=3, step=euler" in change
    assert change.endswith("beta_factor [2.0, 2.0, 2.0, 2.0]")
    with pytest.raises(ValueError, match="layer 1 is a flow already"), wrap(model, steps=2):
        pass
    with scale_beta(model, 0.5):
        halved = record(model, x).x
    flows(model)[1].beta_factor = 1.0
    with scale_beta(model, 0.5, layers=[0, 2]):
        assert torch.equal(record(model, x).x, halved)
    plain = run(tiny("BERT"), x)
    with scale_beta(model, 0.5):  # in whatever order they are made and undone
        restore_attention(model)
        replace_attention(model, [0], steps=2)
    assert list(flows(model)) == [0]
    assert torch.equal(run(restore_attention(model), x), plain)


def test_bad_arguments() -> None:
    cases: list[tuple[dict[str, Any], str]] = [
        ({"steps": 0}, "steps = 0"),
        ({"step": "adaptive"}, "step = 'adaptive'"),
        ({"beta_factor": 0.0, "learn_beta": True}, "above 0"),
        ({"beta": torch.ones(3)}, r"\(heads,\) = \(4,\)"),
    ]
    for options, message in cases:
        model = tiny("BERT")
        with pytest.raises(ValueError, match=message):
            replace_attention(model, **options)
        assert fingerprint(model) == fingerprint(tiny("BERT"))
    with pytest.raises(ValueError, match=r"expected 1 or 4 finite numbers from 0"):
        flows(replace_attention(tiny("BERT"), torch.tensor([1])))[1].beta_factor = torch.ones(3)
    with pytest.raises(ValueError, match="one flow for all"):
        replace_attention(tiny("ALBERT"), [1])
    with pytest.raises(ValueError, match=r"is a flow already; undo that by restore_attention"):
        replace_attention(replace_attention(tiny("BERT"), [1]))
    with pytest.raises(ValueError, match="DeepStack is of no known architecture"):
        replace_attention(DeepStack(inputs=7, outputs=2, depth=2))


# --- caches ---


@pytest.mark.parametrize("name", sorted(CAUSAL & {"GPT-2", "Llama", "GPT-NeoX"}))
def test_generation_without_a_cache_is_a_literal_loop(name: str) -> None:
    kind = {"GPT-2": "GPT2LMHeadModel", "Llama": "LlamaForCausalLM", "GPT-NeoX": "GPTNeoXForCausalLM"}[name]
    torch.manual_seed(0)
    model = getattr(transformers, kind)(tiny(name).config).eval()
    nn.init.normal_(model.get_output_embeddings().weight)
    ids, before = inputs(name)["input_ids"][:1], model.generation_config.use_cache
    replace_attention(model, [1], beta_factor=2.0)
    assert not hasattr(model.base_model, "generate")  # the model inside has none
    flows(model)[1].steps = 3  # asked at every call
    options = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    with pytest.warns(UserWarning, match="without a cache of keys"):
        generated = model.generate(ids, **options)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # it was said once
        model.generate(ids, **options)
    expected = ids
    for _ in range(5):
        with torch.no_grad():
            logits = model(expected, use_cache=False).logits[:, -1]
        expected = torch.cat([expected, logits.argmax(-1, keepdim=True)], dim=1)
    assert torch.equal(generated, expected)
    with torch.no_grad():
        assert model(ids).past_key_values is None
    assert torch.equal(model.generate(ids, use_cache=True, **options), expected)
    config = transformers.GenerationConfig(use_cache=True)
    assert torch.equal(copy.deepcopy(model).generate(ids, generation_config=config, **options), expected)
    with wrap(model, [0], steps=2), torch.no_grad():
        restore_attention(model)
        assert model(ids).past_key_values is None
    assert model.generation_config.use_cache is before
    cached = model.generate(ids, use_cache=True, return_dict_in_generate=True, **options)
    assert cached.past_key_values is not None
    with torch.no_grad():
        assert model(ids).past_key_values is not None


# --- quantised models ---


class PackedLinear(nn.Linear):
    """A Linear with 8-bit weights packed in a column, as bitsandbytes has them."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__(linear.in_features, linear.out_features)
        self.register_buffer("step", linear.weight.detach().abs().max() / 127)
        packed = (linear.weight.detach() / self.step).round().add(128).to(torch.uint8).view(-1, 1)
        self.weight, self.bias = nn.Parameter(packed, requires_grad=False), linear.bias

    def forward(self, x: Tensor) -> Tensor:
        weight = (self.weight.view(self.out_features, self.in_features).to(x.dtype) - 128) * self.step
        return nn.functional.linear(x, weight, self.bias)


def pack(model: nn.Module) -> nn.Module:
    for module in list(model.modules()):
        for name, child in module.named_children():
            if type(child) is nn.Linear:
                setattr(module, name, PackedLinear(child))
    return model


def quantise(model: nn.Module) -> nn.Module:
    return torch.ao.quantization.quantize_dynamic(model, {nn.Linear}, dtype=torch.qint8)


@pytest.mark.filterwarnings("ignore:.*deprecated:DeprecationWarning")
@pytest.mark.parametrize("convert", [pack, quantise])
@pytest.mark.parametrize("name", ["BERT", "Llama"])
def test_quantised_models(name: str, convert) -> None:
    x, options = inputs(name), {"beta": 0.7, "steps": 2}
    plain = run(convert(tiny(name)), x)
    before, after = replace_attention(convert(tiny(name)), **options), convert(replace_attention(tiny(name), **options))
    expected = run(before, x)
    assert torch.equal(run(after, x), expected)
    assert float((expected - plain)[mask(name)].abs().max()) > 0.1
    assert torch.equal(run(restore_attention(before), x), plain)
    model = convert(tiny(name))
    with scale_beta(model, 2.0):
        colder = run(model, x)
    assert torch.equal(run(replace_attention(model, beta_factor=2.0), x), colder)
    model = restore_attention(model)
    with recording(model, "blocks.1.attn.hook_pattern") as cache:
        run(model, x)
        weights = cache["blocks.1.attn.hook_pattern"]
    torch.testing.assert_close(weights.sum(-1), torch.ones(2, 4, 7))
    assert all("quantised" in check.omits for check in self_check(model, x))
    assert encoder_facts(model)["head_dim"] == 8
    with pytest.raises(ValueError, match=r"quantised.* unquantised"):
        attentions(model)


def test_quantised_then_replaced_then_adapted() -> None:
    peft = pytest.importorskip("peft")
    model = replace_attention(pack(tiny("BERT")), steps=2, beta_factor=2.0, learn_beta=True)
    frozen = run(model, inputs("BERT"))
    config = peft.LoraConfig(target_modules=["query", "value"], modules_to_save=["attn_flow"])
    adapted = peft.get_peft_model(model, config).eval()
    assert torch.equal(run(adapted, inputs("BERT")), frozen)  # an adapter starts at zero
    output(adapted, inputs("BERT")).sin().sum().backward()
    grads = [p.grad for name, p in adapted.named_parameters() if p.requires_grad and "lora_A" not in name]
    assert all(grad is not None and float(grad.abs().sum()) > 0 for grad in grads)


# --- checkpointing ---


def without_dropout(model: nn.Module) -> None:
    """Training mode without dropout, which is drawn at random."""
    model.train()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for name in ("dropout_prob", "attention_dropout", "dropout"):
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, 0.0)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("name", ["BERT", "ModernBERT", "GPT-2", "Llama", "T5 encoder", "DeBERTa-v2"])
def test_gradient_checkpointing(name: str, reentrant: bool) -> None:
    """The gradient of the query weights without checkpointing, and with it in wrapped and in replaced layers."""
    factors = {0: 0.7, 2: 1.3}
    grads: dict[str, Tensor] = {}
    for kind in ("plain", "wrapped", "replaced"):
        model, x = tiny(name, torch.float64), inputs(name, torch.float64)
        if kind != "plain":
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})
            model.enable_input_require_grads()
        without_dropout(model)
        if kind == "replaced":
            for layer, factor in factors.items():
                replace_attention(model, [layer], steps=3, beta_factor=factor, learn_beta=True)
            output(model, x).sin().sum().backward()
        else:
            with scale_beta(model, 0.7, 0), scale_beta(model, 1.3, 2), wrap(model, [0, 2], steps=3):
                output(model, x).sin().sum().backward()
            assert not blocks(model)[0].module._forward_pre_hooks
        grads[kind] = torch.cat([block[block.architecture.q].weight.grad.flatten() for block in blocks(model)])
    for grad in grads.values():
        torch.testing.assert_close(grad, grads["plain"], rtol=1e-9, atol=1e-12)
