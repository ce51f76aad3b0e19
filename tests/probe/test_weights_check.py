"""The weights and positions as read, against what the models compute."""

import math
from dataclasses import replace

import pytest
import torch
from encoder_zoo import POSITIONAL, inputs, tiny

from attn_flow.hooks import architectures
from attn_flow.probe.weights_check import check_weights, omitted_shares


def mpnet_with(**changes) -> list:
    """The table of architectures with another row of MPNet."""
    return [replace(a, **changes) if a.name == "MPNet" else a for a in architectures.ARCHITECTURES]


@pytest.mark.parametrize("name", ["BERT", "ViT", "GPT-2", *sorted(POSITIONAL)])
def test_contents_and_positions_explain_the_logits(name) -> None:
    shares = omitted_shares(tiny(name, torch.float64), inputs(name, torch.float64))
    assert max(shares) < (16 * torch.finfo(torch.float32).eps) ** 2  # some take the softmax or angles in float32


@pytest.mark.parametrize("name", sorted(POSITIONAL))
def test_positions_that_are_not_read_have_a_share(name, monkeypatch) -> None:
    monkeypatch.setattr("attn_flow.probe.weights_check.read_positions", lambda blocks, n: [None] * len(blocks))
    model = tiny(name)
    before = model.config._attn_implementation
    shares = omitted_shares(model, inputs(name))
    assert model.config._attn_implementation == before
    assert all(math.isfinite(share) and share > 1e-4 for share in shares)


def test_the_share_is_that_of_the_bias_in_the_logits(monkeypatch) -> None:
    monkeypatch.setattr("attn_flow.probe.weights_check.read_positions", lambda blocks, n: [None] * len(blocks))
    model, x = tiny("T5 encoder", torch.float64), inputs("T5 encoder", torch.float64)
    first = model.encoder.block[0].layer[0]
    attention = first.SelfAttention
    bias = attention.compute_bias(7, 7)[0]
    z = first.layer_norm(model.shared(x["input_ids"][:1]))[0]
    heads = lambda y: y.reshape(7, 4, 8).transpose(0, 1)
    logits = heads(attention.q(z)) @ heads(attention.k(z)).mT + bias
    omitted, total = (v - v.mean(-1, keepdim=True) for v in (bias, logits))
    expected = float((omitted.square().sum() / total.square().sum()).detach())
    assert omitted_shares(model, x)[0] == pytest.approx(expected, rel=1e-6)


def test_positions_that_the_probe_does_not_hold_are_named(monkeypatch) -> None:
    monkeypatch.setattr("attn_flow.hooks.layout.ARCHITECTURES", mpnet_with(score_table=None))
    checks = check_weights(tiny("MPNet"), inputs("MPNet"), None)
    assert all("relative position bias" in check.omits and check.omitted_share > 1e-4 for check in checks)


def test_positions_that_are_read_wrongly_are_refused(monkeypatch) -> None:
    wrong = lambda root, n: -root.encoder.compute_position_bias(torch.zeros(1, n, 1))[0]
    monkeypatch.setattr("attn_flow.hooks.layout.ARCHITECTURES", mpnet_with(score_table=wrong))
    with pytest.raises(ValueError, match="its weights and positions as read leave"):
        check_weights(tiny("MPNet"), inputs("MPNet"), None)


def test_a_model_whose_positions_are_read_omits_nothing() -> None:
    checks = check_weights(tiny("MPNet"), inputs("MPNet"), None)
    assert all(check.positions and not check.omits for check in checks)
