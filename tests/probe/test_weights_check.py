"""The weights and positions as read, against what the models compute."""

from dataclasses import replace

import pytest
import torch
from encoder_zoo import POSITIONAL, long_inputs, tiny

from attn_flow.hooks import architectures
from attn_flow.probe import prepare
from attn_flow.probe.encoders import record_encoder
from attn_flow.probe.recording import exact


def mpnet_with(**changes) -> list:
    """The table of architectures with another row of MPNet."""
    return [replace(a, **changes) if a.name == "MPNet" else a for a in architectures.ARCHITECTURES]


@pytest.mark.parametrize("name", ["BERT", "ViT", "GPT-2", *sorted(POSITIONAL)])
def test_contents_and_positions_explain_what_attention_adds(name) -> None:
    recording = record_encoder(tiny(name, torch.float64), long_inputs(name, torch.float64), None)
    assert float((1 - recording.explained_by_layer(exact)).max()) < 1e-9  # some take the softmax or angles in float32


@pytest.mark.parametrize("name", sorted(POSITIONAL))
def test_positions_that_are_not_read_leave_a_part_unexplained(name) -> None:
    recording = record_encoder(tiny(name), long_inputs(name), None)
    blind = replace(recording, positions=[None] * recording.layers)
    assert float((1 - blind.explained_by_layer(exact)).min()) > 1e-4


def test_positions_that_cannot_be_read_are_allowed_and_counted(monkeypatch) -> None:
    monkeypatch.setattr("attn_flow.hooks.layout.ARCHITECTURES", mpnet_with(score_table=None))
    assert max(prepare(tiny("MPNet"), long_inputs("MPNet")).about.unexplained) > 1e-4


def test_positions_that_are_read_wrongly_are_refused(monkeypatch) -> None:
    def wrong(block, n):  # beyond the 16 tokens of the self-check
        table = block.root.encoder.compute_position_bias(torch.zeros(1, n, 1))[0]
        return table.where(torch.arange(n) < 16, -table)

    monkeypatch.setattr("attn_flow.hooks.layout.ARCHITECTURES", mpnet_with(score_table=wrong))
    with pytest.raises(ValueError, match="its weights and positions as read leave"):
        prepare(tiny("MPNet"), long_inputs("MPNet"))
