"""Adapters of PEFT and flows: in both orders, merged and unmerged, with a trained beta."""

from typing import Any

import pytest
import torch
from encoder_zoo import inputs, mask, output, tiny
from tolerances import rounding
from torch import Tensor, nn

from attn_flow.hooks import attentions, flows, replace_attention, restore_attention, scale_beta, self_check, wrap

peft = pytest.importorskip("peft")

# Queries, values and the output projection: each is read or exchanged when attention runs.
TARGETS = {
    "BERT": ["query", "value", "dense"],
    "DistilBERT": ["q_lin", "v_lin", "out_lin"],
    "ALBERT": ["query", "value", "dense"],
    "DeBERTa": ["in_proj", "dense"],
    "DeBERTa-v3": ["query_proj", "value_proj", "dense"],
    "MPNet": ["q", "v", "o"],
    "ModernBERT": ["Wqkv", "Wo"],
    "DINOv2": ["q_proj", "v_proj", "query", "value"],  # the names of transformers 5 and 4
    "GPT-2": ["c_attn", "c_proj"],
    "GPT-NeoX": ["query_key_value", "dense"],
    "Llama": ["q_proj", "v_proj", "o_proj"],
    "T5 encoder": ["q", "v", "o"],
}
FACTOR = torch.tensor([0.5, 1.0, 2.0, 3.0])
OPTIONS: dict[str, Any] = {"steps": 2, "horizon": 1.3, "beta_factor": FACTOR}


def adapt(model: nn.Module, name: str = "BERT", **options: Any) -> Any:
    """The model with random LoRA adapters, the same in every call."""
    torch.manual_seed(5)
    config = peft.LoraConfig(r=4, target_modules=TARGETS[name], init_lora_weights=False, **options)
    return peft.get_peft_model(model, config).eval()


def run(model: nn.Module, name: str) -> Tensor:
    with torch.no_grad():
        return output(model, inputs(name))[mask(name)]


@pytest.mark.filterwarnings("ignore:a layer evaluates its attention several times")
@pytest.mark.parametrize("name", list(TARGETS))
def test_adapters_before_and_after_replacing_merged_and_unmerged(name: str) -> None:
    merged = adapt(tiny(name, torch.float64), name).merge_and_unload()
    plain = run(merged, name)
    with wrap(merged, **OPTIONS):
        expected = run(merged, name)
    tolerance = rounding(expected, 8 * 48, torch.float32 if name in {"DeBERTa", "Llama", "T5 encoder"} else None)
    assert float((expected - plain).abs().max()) > 0.1  # the flow matters
    after = adapt(replace_attention(tiny(name, torch.float64), **OPTIONS), name)
    before = replace_attention(adapt(tiny(name, torch.float64), name), **OPTIONS)
    without = run(replace_attention(tiny(name, torch.float64), **OPTIONS), name)
    for model in (after, before):
        torch.testing.assert_close(run(model, name), expected, rtol=0, atol=tolerance)
        model.merge_adapter()
        torch.testing.assert_close(run(model, name), expected, rtol=0, atol=tolerance)
        model.unmerge_adapter()
        torch.testing.assert_close(run(model, name), expected, rtol=0, atol=tolerance)
        with model.disable_adapter():
            torch.testing.assert_close(run(model, name), without, rtol=0, atol=tolerance)
        unloaded = model.merge_and_unload()
        torch.testing.assert_close(run(unloaded, name), expected, rtol=0, atol=tolerance)
        torch.testing.assert_close(run(restore_attention(unloaded), name), plain, rtol=0, atol=tolerance)


@pytest.mark.parametrize("options", [{}, {"use_dora": True}, {"lora_bias": True}], ids=["LoRA", "DoRA", "with bias"])
def test_adapters_are_scaled_and_read(options: dict[str, Any]) -> None:
    model = adapt(tiny("BERT", torch.float64), **options)
    merged = adapt(tiny("BERT", torch.float64), **options).merge_and_unload()
    for a, b in zip(attentions(model), attentions(merged)):
        torch.testing.assert_close(a.Q, b.Q)
        torch.testing.assert_close(a.query_bias, b.query_bias)
    assert all(check.exact for check in self_check(model, inputs("BERT")))
    with scale_beta(model, FACTOR), scale_beta(merged, FACTOR):
        torch.testing.assert_close(run(model, "BERT"), run(merged, "BERT"))


def test_an_exchanged_projection_is_scaled() -> None:
    model = replace_attention(tiny("BERT"), beta_factor=FACTOR)
    expected = run(model, "BERT")
    core = model.encoder.layer[1].attention.self
    linear = nn.Linear(32, 32)
    linear.load_state_dict(core.query.state_dict())
    core.query = linear
    torch.testing.assert_close(run(model, "BERT"), expected, rtol=0, atol=0)


def test_beta_is_trained_and_saved_under_peft(tmp_path) -> None:
    model = adapt(replace_attention(tiny("BERT"), [0, 2], learn_beta=True), modules_to_save=["attn_flow"])
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad and "log_beta_factor" in name}
    assert len(trained) == 2
    optimiser = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.5)
    output(model, inputs("BERT")).sin().sum().backward()
    assert all(float(p.grad.abs().sum()) > 0 for p in trained.values())
    optimiser.step()
    expected = run(model, "BERT")
    model.save_pretrained(tmp_path)
    again = peft.PeftModel.from_pretrained(replace_attention(tiny("BERT"), [0, 2], learn_beta=True), tmp_path).eval()
    torch.testing.assert_close(run(again, "BERT"), expected, rtol=0, atol=0)
    unloaded = again.merge_and_unload()
    torch.testing.assert_close(run(unloaded, "BERT"), expected, rtol=0, atol=rounding(expected, 8 * 48))
    assert all(float(flow.log_beta_factor.detach().abs().sum()) > 0 for flow in flows(unloaded).values())
