"""Layers that are flows for good: the pretrained model at one Euler step of one, saved, loaded, trained."""

import copy
import json
import logging
import math
import pickle

import pytest
import torch
import transformers
from encoder_zoo import ZOO, every_architecture, inputs, mask, output, tiny
from tolerances import rounding
from torch import Tensor, nn

from attn_flow.hooks import blocks, flows, load, load_encoder, record, replace_attention, scale_beta, wrap
from attn_flow.hooks.demo import tiny_bert
from attn_flow.hooks.trust import altered

PER_HEAD = torch.tensor([0.5, 1.0, 2.0, 3.0])


def run(model: nn.Module, x: dict[str, Tensor]) -> Tensor:
    with torch.no_grad():
        return output(model, x)


@every_architecture
def test_by_default_it_is_the_pretrained_model(name: str) -> None:
    model, x, tokens = tiny(name), inputs(name), mask(name)
    expected = run(model, x)
    keys = set(model.state_dict())
    assert replace_attention(model, train_beta=True) is model
    assert keys < set(model.state_dict())
    got = run(model, x)
    # Three layers, whose longest sum is over the 48 neurons of the feed-forward network.
    torch.testing.assert_close(got[tokens], expected[tokens], rtol=0, atol=rounding(expected, 3 * 48))


@every_architecture
def test_by_default_no_bit_differs_but_for_torchs_choices_of_a_kernel(name: str) -> None:
    """torch's encoders fuse; and without gradients a product is another one for weights that ask for a gradient."""
    model, x, tokens = tiny(name).requires_grad_(False), inputs(name), mask(name)
    fused = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        expected = run(model, x)
        assert torch.equal(run(replace_attention(model), x)[tokens], expected[tokens])
    finally:
        torch.backends.mha.set_fastpath_enabled(fused)


@every_architecture
def test_it_is_the_wrap_with_the_same_options(name: str) -> None:
    model, x, tokens = tiny(name, torch.float64), inputs(name, torch.float64), mask(name)
    layers = None if name == "ALBERT" else [0, 2]
    with wrap(model, layers, beta_factor=PER_HEAD, steps=2, step="rk4", horizon=1.5):
        expected = run(model, x)
    replace_attention(model, layers, beta_factor=PER_HEAD, steps=2, step="rk4", horizon=1.5)
    # The factor goes through its logarithm, which is one more rounding.
    torch.testing.assert_close(run(model, x)[tokens], expected[tokens], rtol=0, atol=rounding(expected, 8 * 3 * 48))


@pytest.mark.parametrize("name", [name for name in ZOO if not name.startswith("torch")])
def test_saved_and_loaded_it_is_the_same_and_a_plain_reload_is_told(name: str, tmp_path, caplog) -> None:
    model, x = tiny(name), inputs(name)
    layers = None if name == "ALBERT" else [0, 2]
    replace_attention(model, layers, steps=2, step="rk4", horizon=1.5, train_beta=True)
    for flow in flows(model).values():
        flow.beta_factor = PER_HEAD
    expected = run(model, x)
    model.save_pretrained(tmp_path)
    again = load(tmp_path)
    assert type(again) is type(model)
    assert torch.equal(run(again, x), expected)
    assert {n for n, _ in again.named_parameters()} == {n for n, _ in model.named_parameters()}
    saved = json.loads((tmp_path / "config.json").read_text())["attn_flow"]
    assert saved == again.config.attn_flow == model.config.attn_flow
    assert (saved[0]["steps"], saved[0]["step"], saved[0]["horizon"]) == (2, "rk4", 1.5)
    transformers.utils.logging.enable_propagation()
    try:
        with caplog.at_level(logging.WARNING):
            _, report = type(model).from_pretrained(tmp_path, output_loading_info=True)
    finally:
        transformers.utils.logging.disable_propagation()
    assert len(report["unexpected_keys"]) == len({id(flow) for flow in flows(model).values()})
    assert "attn_flow.log_beta_factor" in caplog.text


def test_heads_for_a_task_and_our_own_loader(tmp_path) -> None:
    config = tiny("BERT").config
    config.num_labels = 3
    model, x = transformers.BertForSequenceClassification(config).eval(), inputs("BERT")
    replace_attention(model, [0], steps=3)
    replace_attention(model, [2], steps=2, step="rk4", beta=1.5)
    with torch.no_grad():
        expected = model(**x).logits
    model.save_pretrained(tmp_path)
    tiny_bert()[1].save_pretrained(tmp_path)
    again = load(tmp_path)
    assert isinstance(again, transformers.BertForSequenceClassification)
    with torch.no_grad():
        assert torch.equal(again(**x).logits, expected)
    encoder, _ = load_encoder(tmp_path)
    assert list(flows(encoder)) == [0, 2]
    assert torch.equal(run(encoder, x), run(model.bert, x))


def test_a_plain_folder_is_refused(tmp_path) -> None:
    tiny("BERT").save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="no entry 'attn_flow'"):
        load(tmp_path)


def test_a_flow_that_is_missing_from_the_weights_is_named(tmp_path) -> None:
    model = tiny("BERT")
    model.config.attn_flow = [{"layers": [1], "horizon": 1.0, "steps": 2, "step": "euler", "train_beta": False}]
    model.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"lacks encoder\.layer\.1.*log_beta_factor"):
        load(tmp_path)


@pytest.mark.parametrize("name", ["BERT", "DeBERTa", "GPT-2", "ALBERT", "T5 encoder", "torch"])
def test_beta_learns(name: str) -> None:
    """The gradient of log_beta_factor against a difference quotient, a coarse one where float32 is used inside."""
    h, rel = (1e-2, 1e-2) if name in {"DeBERTa", "T5 encoder"} else (1e-6, 1e-4)
    model, x, tokens = tiny(name, torch.float64), inputs(name, torch.float64), mask(name)
    replace_attention(model, steps=2, step="rk4", beta_factor=1.3, train_beta=True)
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
    replace_attention(model, steps=3, beta_factor=2.0, train_beta=True)
    expected = run(model, x)
    copies = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()  # a copy that still leaned on its original would notice
    for each in copies:
        assert torch.equal(run(each, x), expected)


def test_it_is_seen_by_what_reads_models() -> None:
    model, x = tiny("BERT"), inputs("BERT")
    replace_attention(model, [1], steps=3, beta_factor=2.0)
    words = altered(model)
    assert words == ["layer 1: a flow of time 1 in 3 steps (euler)", "layer 1: beta_factor [2.0, 2.0, 2.0, 2.0]"]
    with pytest.raises(ValueError, match="wrapped already"), wrap(model, steps=2):
        pass
    with scale_beta(model, 0.5):
        halved = record(model, x).x
    flows(model)[1].beta_factor = 1.0
    with scale_beta(model, 0.5, layers=[0, 2]):
        assert torch.equal(record(model, x).x, halved)


def test_bad_arguments() -> None:
    cases = [
        ({"steps": 0}, "steps = 0"),
        ({"horizon": math.inf}, "horizon = inf"),
        ({"step": "adaptive"}, "step = 'adaptive'"),
        ({"layers": [3]}, "layer 3: the model has 3 layers"),
        ({"beta": 1.0, "beta_factor": 1.0}, "expected one of them"),
        ({"beta_factor": -1.0}, "from 0"),
        ({"beta_factor": 0.0, "train_beta": True}, "above 0"),
        ({"beta_factor": torch.ones(3)}, r"\(heads,\) = \(4,\)"),
    ]
    for options, message in cases:
        with pytest.raises(ValueError, match=message):
            replace_attention(tiny("BERT"), **options)
    with pytest.raises(ValueError, match="one flow for all"):
        replace_attention(tiny("ALBERT"), [1])
    model = replace_attention(tiny("BERT"), [1])
    with pytest.raises(ValueError, match="is a flow already"):
        replace_attention(model)
    assert blocks(model)[1].beta(8) == 8**-0.5


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
@pytest.mark.parametrize("name", ["BERT", "DistilBERT", "ModernBERT", "GPT-2", "Llama", "T5 encoder", "DeBERTa-v2"])
def test_gradient_checkpointing_also_after_the_with(name: str, reentrant: bool) -> None:
    """The gradient of the query weights without checkpointing, with it, and in a backward pass after the `with`."""
    options, grads = {"steps": 3, "beta_factor": 0.7}, []
    for kind in ("plain", "inside", "after", "replaced"):
        model, x = tiny(name, torch.float64), inputs(name, torch.float64)
        if kind != "plain":
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})
            model.enable_input_require_grads()
        without_dropout(model)
        layers = [0, 2]
        if kind == "replaced":
            replace_attention(model, layers, **options, train_beta=True)
            output(model, x).sin().sum().backward()
        elif kind == "after":
            with scale_beta(model, 0.7, layers), wrap(model, layers, steps=3):
                loss = output(model, x).sin().sum()
            loss.backward()
            module = blocks(model)[0].module
            assert type(module._gradient_checkpointing_func).__name__ == "partial"
            assert not module._forward_pre_hooks
        else:
            with wrap(model, layers, **options):
                output(model, x).sin().sum().backward()
        # Reentrant checkpointing cannot see what is used by its name only: the first block's own input is enough.
        grads.append(blocks(model)[1][blocks(model)[1].architecture.q].weight.grad)
    for grad in grads[1:]:
        torch.testing.assert_close(grad, grads[0], rtol=1e-9, atol=1e-12)
