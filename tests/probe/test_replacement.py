"""Attention replaced in every layer: exact averages change nothing, whatever the architecture."""

import math
from dataclasses import replace
from itertools import permutations

import pytest
import torch
from encoder_zoo import every_architecture, fingerprint, tiny
from encoder_zoo import long_inputs as inputs
from torch import Tensor

from attn_flow.probe.encoders import record_encoder
from attn_flow.probe.recording import Heads, Recording, exact
from attn_flow.probe.replacement import prepare_replacement, run, w2


def without(recording: Recording, text: int) -> Recording:
    """The recording without one of its texts."""
    keep = lambda rows: rows[:text] + rows[text + 1 :]
    return replace(
        recording,
        states=[keep(level) for level in recording.states],
        outputs=[keep(level) for level in recording.outputs],
        special=keep(recording.special),
        tokens=keep(recording.tokens),
        indices=keep(recording.indices),
    )


@every_architecture
def test_exact_attention_in_its_place_is_the_encoder(name):
    model, x = tiny(name, torch.float64), inputs(name, torch.float64)
    recorded = without(record_encoder(model, x, None), 1)
    before = fingerprint(model)
    encoder = prepare_replacement(recorded)
    distances, cosines = encoder.compare(exact)
    assert fingerprint(model) == before
    assert distances.shape == (2,)
    assert float(distances.max()) < 1e-6  # in units of the distance between texts
    assert float(cosines.min()) > 1 - 1e-9


@every_architecture
def test_exact_attention_of_a_colder_encoder(name):
    model, x = tiny(name, torch.float64), inputs(name, torch.float64)
    recorded = record_encoder(model, x, None, beta_factor=2.0)
    encoder = prepare_replacement(recorded)
    assert float(encoder.compare(exact)[0].max()) < 1e-6
    warm = record_encoder(model, x, None)
    assert float(prepare_replacement(warm).compare(exact)[0].max()) < 1e-6
    at_trained_beta = lambda heads, layer, text: exact(warm.heads(layer, text), layer, text)
    assert float(encoder.compare(at_trained_beta)[0].min()) > 1e-3


def test_attention_removed_is_not_the_encoder():
    model, x = tiny("BERT"), inputs("BERT")
    query = model.encoder.layer[0].attention.self.query
    query.forward = own = query.forward  # as accelerate does
    encoder = prepare_replacement(record_encoder(model, x, None))
    removed = encoder.compare(lambda heads, layer, text: torch.zeros(heads.n, 32))
    assert float(removed[0].min()) > 1e-2
    assert vars(query)["forward"] is own


def test_shared_blocks_are_replaced_each_time_they_run():
    """ALBERT runs one block three times; every run asks for its own layer, every text in its turn."""
    model, x, calls = tiny("ALBERT"), inputs("ALBERT"), []

    def listening(heads: Heads, layer: int, text: int) -> Tensor:
        calls.append((layer, text, heads.n))
        return exact(heads, layer, text)

    run(record_encoder(model, x, None, batch=2), listening)
    lengths = [20, 17, 18]
    batches = ([0, 1], [2])
    assert calls == [(layer, t, lengths[t]) for texts in batches for layer in range(3) for t in texts]


def test_distances_are_what_their_definitions_say(generator):
    """W2 of three tokens by trying all pairings; units and embeddings by hand."""
    model, x = tiny("BERT", torch.float64), inputs("BERT", torch.float64)
    x = {name: t[:, :17] for name, t in x.items()}
    encoder = prepare_replacement(record_encoder(model, x, None))
    noise = torch.randn(17, 32, generator=generator, dtype=torch.float64)
    predict = lambda heads, layer, text: exact(heads, layer, text) + (0.5 + text) * noise
    passes, (distances, cosines) = run(encoder.recording, predict), encoder.compare(predict)
    pairs = [(0, 1), (1, 2), (2, 0)]
    unit = sum(w2(encoder.outputs[i], encoder.outputs[j]) for i, j in pairs) / 3
    for t in range(3):
        distance = w2(passes.outputs[t], encoder.outputs[t])
        assert float(distances[t]) == pytest.approx(distance / unit, rel=1e-9)
        a, b = passes.outputs[t].mean(0), encoder.outputs[t].mean(0)
        assert float(cosines[t]) == pytest.approx(float(a @ b / a.norm() / b.norm()), rel=1e-6)
    a, b = (torch.randn(3, 2, generator=generator) for _ in range(2))
    best = min(sum(float((a[i] - b[j]).square().sum()) for i, j in enumerate(p)) for p in permutations(range(3)))
    assert w2(a, b) == pytest.approx(math.sqrt(best / 3), rel=1e-6)


def test_a_model_in_half_precision_is_replaced():
    recorded = record_encoder(tiny("BERT", torch.float16), inputs("BERT"), None)
    distances, cosines = prepare_replacement(recorded).compare(exact)
    assert float(distances.max()) < 0.01
    assert float(cosines.min()) > 0.9999


def test_one_text_has_no_unit():
    model = tiny("BERT")
    x = {name: t[:1] for name, t in inputs("BERT").items()}
    distances, cosines = prepare_replacement(record_encoder(model, x, None)).compare(exact)
    assert bool(distances.isnan().all())
    assert float(cosines) > 0.999
