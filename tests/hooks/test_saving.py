"""Models with flows that load anywhere: by `load`, by transformers' own classes, by sentence-transformers."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from encoder_zoo import ZOO, every_architecture, inputs, mask, output, tiny, tokenizer
from torch import Tensor, nn

from attn_flow.hooks import flows, load, load_encoder, register_attention, replace_attention, scale_beta, wrap
from attn_flow.hooks.safe_loading import pretrained, pretrained_model

pytestmark = pytest.mark.filterwarnings("ignore:a layer evaluates its attention several times")
V4 = transformers.__version__.startswith("4.")
PER_HEAD = torch.tensor([0.5, 1.0, 2.0, 3.0])


def run(model: nn.Module, name: str = "BERT") -> Tensor:
    with torch.no_grad():
        return output(model, inputs(name))


@pytest.fixture(autouse=True)
def code_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The copies that transformers makes of saved code go to a folder of the test, and nobody answers questions."""
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr("builtins.input", lambda *_: "n")


def save(folder: Path, name: str = "BERT", **options: Any) -> nn.Module:
    """A model with trained flows in a folder, with its tokenizer."""
    layers = None if name == "ALBERT" else [0, 2]
    model = replace_attention(tiny(name), layers, **{"steps": 2, "step": "rk4", "horizon": 1.5, **options})
    for flow in flows(model).values():
        flow.beta_factor = PER_HEAD
    model.save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return model


@pytest.mark.parametrize("name", [name for name in ZOO if not name.startswith("torch")])
def test_saved_and_loaded_to_the_bit_and_a_plain_load_refuses(name: str, tmp_path: Path) -> None:
    model = save(tmp_path, name, learn_beta=True)
    expected = run(model, name)
    again = load(tmp_path)
    assert type(again) is type(model)
    assert torch.equal(run(again, name), expected)
    assert {n for n, _ in again.named_parameters()} == {n for n, _ in model.named_parameters()}
    assert again.config.attn_flow == model.config.attn_flow
    with pytest.raises(ValueError, match="trust_remote_code"):
        transformers.AutoModel.from_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"a flow, use attn_flow\.hooks\.load"):
        type(model).from_pretrained(tmp_path)
    transformers.AutoTokenizer.from_pretrained(tmp_path, trust_remote_code=False)
    if name != "T5 encoder":  # for which AutoModel is the model with a decoder
        auto = transformers.AutoModel.from_pretrained(tmp_path, trust_remote_code=True).eval()
        torch.testing.assert_close(run(auto, name), expected, rtol=0, atol=1e-5)
        assert type(auto.config) is type(model.config)


def test_what_is_in_the_folder(tmp_path: Path) -> None:
    model = save(tmp_path, learn_beta=True)
    flows(model)[0].steps = 3  # options that are set later are saved too
    model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["model_type"] == "attn_flow_bert"
    assert config["hidden_size"] == 32
    assert config["auto_map"]["AutoModelForMaskedLM"] == "modeling_attn_flow.AutoModelForMaskedLM"
    assert [(entry["layers"], entry["steps"]) for entry in config["attn_flow"]] == [([0], 3), ([2], 2)]
    assert flows(load(tmp_path))[0].steps == 3
    card = (tmp_path / "README.md").read_text()
    assert card.count("## Attention as a flow") == 1
    assert json.loads(card.split("```json")[1].split("```")[0]) == config["attn_flow"]
    assert model.config.model_type == "bert"  # in memory the model is what it was
    with pytest.raises(ValueError, match=r"use model\.push_to_hub"):
        model.save_pretrained(tmp_path, push_to_hub=True)


def test_models_with_a_head_and_heads_for_other_tasks(tmp_path: Path) -> None:
    config = tiny("BERT").config
    config.num_labels = 3
    model = transformers.BertForSequenceClassification(config).eval()
    replace_attention(model, [0], steps=3)
    replace_attention(model, [2], steps=2, step="rk4", beta=1.5)
    model.save_pretrained(tmp_path)
    tokenizer().save_pretrained(tmp_path)
    with torch.no_grad():
        expected = model(**inputs("BERT")).logits
        assert torch.equal(load(tmp_path)(**inputs("BERT")).logits, expected)
    encoder, _ = load_encoder(tmp_path)
    assert torch.equal(run(encoder), run(model.bert))
    masked = transformers.AutoModelForMaskedLM.from_pretrained(tmp_path, trust_remote_code=True)
    assert list(flows(masked)) == [0, 2]
    classify = transformers.pipeline("text-classification", model=str(tmp_path), trust_remote_code=True)
    with torch.no_grad():
        logits = model(**tokenizer()(["w1 w2"], return_tensors="pt", return_token_type_ids=False)).logits
    assert classify("w1 w2", top_k=None)[0]["score"] == pytest.approx(float(logits.softmax(-1).max()), rel=1e-5)
    with pytest.raises(ValueError, match="trust_remote_code"):
        transformers.pipeline("text-classification", model=str(tmp_path))


def test_another_process_loads_it(tmp_path: Path) -> None:
    expected = run(save(tmp_path / "model"))
    code = """
import sys, torch, transformers
model = transformers.AutoModel.from_pretrained(sys.argv[1], trust_remote_code=True).eval()
ids, mask = torch.load(sys.argv[2])
with torch.no_grad():
    torch.save(model(input_ids=ids, attention_mask=mask).last_hidden_state, sys.argv[3])
"""
    x = inputs("BERT")
    torch.save((x["input_ids"], x["attention_mask"]), tmp_path / "x.pt")
    arguments = [str(tmp_path / part) for part in ("model", "x.pt", "y.pt")]
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    torch.testing.assert_close(torch.load(tmp_path / "y.pt"), expected, rtol=0, atol=1e-5)


def test_sentence_transformers_keep_the_flow(tmp_path: Path) -> None:
    sentence = pytest.importorskip("sentence_transformers")
    tiny("BERT").save_pretrained(tmp_path / "plain")
    tokenizer().save_pretrained(tmp_path / "plain")
    model = sentence.SentenceTransformer(str(tmp_path / "plain"), device="cpu")
    before, texts = model.encode(["w1 w2 w3", "w4"]), ["w1 w2 w3", "w4"]
    assert replace_attention(model, [1], steps=4, beta_factor=3.0) is model
    expected = model.encode(texts)
    assert abs(expected - before).max() > 1e-3
    model.save(str(tmp_path / "flow"))
    again = sentence.SentenceTransformer(str(tmp_path / "flow"), device="cpu", trust_remote_code=True)
    assert abs(again.encode(texts) - expected).max() < 1e-5
    assert list(flows(again)) == [1]
    with pytest.raises(ValueError, match="trust_remote_code"):
        sentence.SentenceTransformer(str(tmp_path / "flow"), device="cpu")


def test_names_of_the_hub_dtypes_and_device_maps(tmp_path: Path) -> None:
    expected, commit = run(save(tmp_path / "model")), "0123456789" * 4
    cached = tmp_path / "cache" / "models--me--flow"
    shutil.copytree(tmp_path / "model", cached / "snapshots" / commit)
    (cached / "refs").mkdir()
    (cached / "refs" / "main").write_text(commit)
    assert torch.equal(run(load("me/flow", cache_dir=tmp_path / "cache")), expected)
    with pytest.raises(OSError, match="huggingface"):
        load("me/none", cache_dir=tmp_path / "cache")
    assert next(load(tmp_path / "model", dtype=torch.bfloat16).parameters()).dtype == torch.bfloat16
    for device_map in ("cpu", "auto", {"": "cpu"}):
        assert torch.equal(run(load(tmp_path / "model", device_map=device_map)), expected)


def test_weights_that_accelerate_offloads(tmp_path: Path) -> None:
    accelerate = pytest.importorskip("accelerate")
    expected = run(save(tmp_path, learn_beta=True))
    model = accelerate.cpu_offload(load(tmp_path), execution_device="cpu")
    assert flows(model)[0].log_beta_factor.is_meta
    assert torch.equal(run(model), expected)


def test_a_hook_that_accelerate_adds_meanwhile_stays() -> None:
    accelerate = pytest.importorskip("accelerate.hooks")
    model, x = tiny("BERT"), inputs("BERT")
    with torch.no_grad():
        expected = output(model, x)
        with wrap(model, steps=2):
            for module in model.encoder.layer[0].modules():
                accelerate.add_hook_to_module(module, accelerate.ModelHook())
        assert torch.equal(output(model, x), expected)
        accelerate.remove_hook_from_module(model, recurse=True)
        assert torch.equal(output(model, x), expected)


def test_a_quantisation_config(tmp_path: Path) -> None:
    """A quantiser of transformers that rounds the weights of Linear modules, since bitsandbytes needs a GPU."""
    quantizers = pytest.importorskip("transformers.quantizers")
    from transformers.quantizers.auto import register_quantization_config, register_quantizer
    from transformers.utils.quantization_config import QuantizationConfigMixin

    @register_quantization_config("rounded")
    class RoundedConfig(QuantizationConfigMixin):
        def __init__(self) -> None:
            self.quant_method = "rounded"

    @register_quantizer("rounded")
    class RoundedQuantizer(quantizers.base.HfQuantizer):
        requires_calibration = False
        is_serializable = is_trainable = property(lambda self: False)

        def _process_model_after_weight_loading(self, model: nn.Module, **_: Any) -> None:
            pass

        def _process_model_before_weight_loading(self, model: nn.Module, **_: Any) -> None:
            for module in list(model.modules()):
                for name, child in module.named_children():
                    if type(child) is nn.Linear:
                        setattr(module, name, Rounded(child.in_features, child.out_features, device="meta"))

    class Rounded(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return nn.functional.linear(x, (8 * self.weight).round() / 8, self.bias)

    model = save(tmp_path)
    quantised = load(tmp_path, quantization_config=RoundedConfig())
    assert isinstance(quantised.encoder.layer[0].attention.self.query, Rounded)
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, nn.Linear):
                module.weight.copy_((8 * module.weight).round() / 8)
    torch.testing.assert_close(run(quantised), run(model), rtol=0, atol=1e-5)


def test_folders_that_load_refuses(tmp_path: Path) -> None:
    tiny("BERT").save_pretrained(tmp_path / "plain")
    (tmp_path / "empty").mkdir()
    for folder in ("plain", "empty"):
        with pytest.raises(ValueError, match="no config with an entry 'attn_flow'"):
            load(tmp_path / folder)
    changes: list[tuple[dict[str, Any], str]] = [
        ({"attn_flow": [{"layers": [7]}]}, r"layers = \[7\]"),
        ({"architectures": ["os"]}, "a os with a BertConfig, which transformers does not know"),
        ({"architectures": ["GPT2Model"]}, "a GPT2Model with a BertConfig, which transformers does not know"),
        ({"model_type": "attn_flow_nothing"}, "type 'nothing', which this transformers does not know"),
    ]
    save(tmp_path / "flow")
    whole = json.loads((tmp_path / "flow" / "config.json").read_text())
    for change, message in changes:
        (tmp_path / "flow" / "config.json").write_text(json.dumps({**whole, **change}))
        with pytest.raises(ValueError, match=message):
            load(tmp_path / "flow")
    plain = {"attn_flow": [{"layers": [0, 1]}]}  # one more flow than there are weights
    (tmp_path / "flow" / "config.json").write_text(json.dumps({**whole, **plain}))
    with pytest.raises(ValueError, match=r"lacks encoder\.layer\.1\.attention\.self\.attn_flow\.log_beta_factor"):
        load(tmp_path / "flow")


def test_pickled_weights_that_hold_more_than_tensors_are_refused(tmp_path: Path) -> None:
    tiny("BERT").config.save_pretrained(tmp_path)
    torch.save({"weights": Path(tmp_path)}, tmp_path / "pytorch_model.bin")
    words = "Unable to load weights" if V4 else r"weights are damaged or may run code; expected \.safetensors\.$"
    with pytest.raises(OSError if V4 else ValueError, match=words):
        pretrained_model(transformers.BertModel, tmp_path)


def test_saved_code_is_only_run_when_asked(tmp_path: Path) -> None:
    save(tmp_path)
    mark = tmp_path / "it-ran"
    (tmp_path / "modeling_attn_flow.py").write_text(f"open({str(mark)!r}, 'w').close()\n")
    load(tmp_path)
    load_encoder(tmp_path)
    with pytest.raises(ValueError, match="brings Python code of its own, which was not run"):
        pretrained(transformers.AutoModel, tmp_path)
    assert not mark.exists()


# --- transformers' attention interface ---

needs_transformers_5 = pytest.mark.skipif(V4, reason="transformers 4 does not pass arguments to its attention")
OWN_ATTENTION = {"DeBERTa", "DeBERTa-v2", "DeBERTa-v3", "MPNet", "torch", "torch pre-norm"}


@pytest.mark.skipif(not V4, reason="transformers 5 has the interface")
def test_the_attention_interface_needs_transformers_5() -> None:
    with pytest.raises(RuntimeError, match="install transformers 5, or use scale_beta"):
        register_attention()


@needs_transformers_5
@every_architecture
def test_the_attention_interface(name: str, tmp_path: Path) -> None:
    if name in OWN_ATTENTION:
        pytest.skip(f"{name} does not use transformers' attention interface")
    register_attention()
    tiny(name).save_pretrained(tmp_path)
    plain = tiny(name)
    model = type(plain).from_pretrained(tmp_path, attn_implementation="attn_flow").eval()
    x, tokens = inputs(name), mask(name)
    with torch.no_grad():
        torch.testing.assert_close(output(model, x)[tokens], output(plain, x)[tokens], rtol=0, atol=1e-5)
        for factor in (2.0, PER_HEAD):
            with scale_beta(plain, factor):
                expected = output(plain, x)
            torch.testing.assert_close(
                output(model, x, beta_factor=factor)[tokens], expected[tokens], rtol=0, atol=1e-5
            )


@needs_transformers_5
def test_the_attention_interface_by_layer_and_with_a_surrogate() -> None:
    register_attention()
    plain, model, x = tiny("Llama"), tiny("Llama"), inputs("Llama")
    model.set_attn_implementation("attn_flow")
    table = torch.stack([PER_HEAD, torch.ones(4), 2 * PER_HEAD])
    with torch.no_grad(), scale_beta(plain, PER_HEAD, 0), scale_beta(plain, 2 * PER_HEAD, 2):
        torch.testing.assert_close(output(model, x, beta_factor=table), output(plain, x), rtol=0, atol=1e-5)
    with pytest.raises(ValueError, match=r"beta_factor has \(3,\) numbers for 4 heads"):
        model(**x, beta_factor=torch.ones(3))

    def softmax(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, beta: float) -> Tensor:
        assert q.shape[1:] == k.shape[1:] == v.shape[1:] == (4, 7, 8)
        scores = beta * q @ k.mT
        return (scores if mask is None else scores.masked_fill(~mask, -torch.inf)).softmax(-1) @ v

    one = {"input_ids": x["input_ids"][:1]}  # transformers makes no mask where there is no padding
    for name in ("Llama", "BERT"):
        plain, model = tiny(name), tiny(name)
        model.set_attn_implementation("attn_flow")
        for batch in (x, one):
            tokens = x["attention_mask"][: len(batch["input_ids"])].bool()
            with torch.no_grad(), scale_beta(plain, 2.0):
                got, expected = output(model, batch, beta_factor=2.0, surrogate=softmax), output(plain, batch)
            torch.testing.assert_close(got[tokens], expected[tokens], rtol=0, atol=1e-5)
    t5 = tiny("T5 encoder")
    t5.set_attn_implementation("attn_flow")
    with pytest.raises(ValueError, match="T5Attention attends with position_bias, not computed here"):
        t5(**one, surrogate=softmax)
