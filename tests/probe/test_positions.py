"""The share of the logits that contents leave out, against logits computed by hand."""

import math

import pytest
import torch
from encoder_zoo import POSITIONAL, inputs, tiny

from attn_flow.probe.clouds import record_clouds
from attn_flow.probe.heads import sharpness
from attn_flow.probe.positions import omitted_shares


@pytest.mark.parametrize("name", ["BERT", "ViT", "GPT-2", *sorted(POSITIONAL)])
def test_nothing_is_left_out_where_contents_and_places_are_all_there_is(name):
    model = tiny(name, torch.float64)
    shares = omitted_shares(model, inputs(name, torch.float64))
    assert max(shares) < (16 * torch.finfo(torch.float32).eps) ** 2  # some take the softmax or angles in float32


@pytest.mark.parametrize("name", sorted(POSITIONAL))
def test_where_places_are_not_known_it_is_said_how_much_they_hide(name, monkeypatch):
    monkeypatch.setattr("attn_flow.probe.positions.read_positions", lambda found, n: [None] * len(found))
    model = tiny(name)
    before = model.config._attn_implementation
    shares = omitted_shares(model, inputs(name))
    assert model.config._attn_implementation == before
    assert all(math.isfinite(share) and share > 1e-4 for share in shares)


def test_the_share_is_that_of_the_bias_in_the_logits(monkeypatch):
    monkeypatch.setattr("attn_flow.probe.positions.read_positions", lambda found, n: [None] * len(found))
    model, x = tiny("T5 encoder", torch.float64), inputs("T5 encoder", torch.float64)
    first = model.encoder.block[0].layer[0]
    attention = first.SelfAttention
    bias = attention.compute_bias(7, 7)[0]
    z = first.layer_norm(model.shared(x["input_ids"][:1]))[0]
    heads = lambda y: y.reshape(7, 4, 8).transpose(0, 1)
    content = heads(attention.q(z)) @ heads(attention.k(z)).mT
    logits = content + bias
    left_out, total = (v - v.mean(-1, keepdim=True) for v in (bias, logits))
    expected = float((left_out.square().sum() / total.square().sum()).detach())
    assert omitted_shares(model, x)[0] == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("name", ["BERT", "MPNet", "Llama", "DeBERTa-v2", "ModernBERT"])
def test_heads_are_as_sharp_as_the_weights_that_the_model_shows(name, monkeypatch):
    """Places, causal masks and sliding windows included: entropy and largest weight of the model's own matrices."""
    monkeypatch.setattr("attn_flow.probe.clouds.SHORTEST", 2)
    model, x = tiny(name, torch.float64), inputs(name, torch.float64)
    clouds = record_clouds(model, x, None)
    model.set_attn_implementation("eager")
    with torch.no_grad():
        shown = model(**x, output_attentions=True).attentions
    for layer, P in enumerate(shown):
        for text in range(clouds.texts):
            n = len(clouds.special[text])
            own = P[text][:, :n, :n].tolist()  # padding is on the right
            found = sharpness(clouds.space(layer, text))
            for h, rows in enumerate(own):
                entropy = [-sum(p * math.log(p) for p in row if p > 0) / math.log(n) for row in rows]
                largest = [max(row) for row in rows]
                assert float(found["entropy"][h]) == pytest.approx(sum(entropy) / n, abs=1e-5)  # some are float32
                assert float(found["largest_weight"][h]) == pytest.approx(sum(largest) / n, abs=1e-5)
