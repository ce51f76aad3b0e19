"""Attention replaced in every layer: exact averages change nothing, whatever the architecture."""

import math
from dataclasses import replace
from itertools import permutations

import pytest
import torch
from encoder_zoo import every_architecture, fingerprint, tiny
from encoder_zoo import long_inputs as inputs
from torch import Tensor

from attn_flow.nn import DeepStack
from attn_flow.probe.recording import Heads, Recording, record_encoder
from attn_flow.probe.replacement import prepare_replacement, w2


def exact(heads: Heads, layer: int, text: int) -> Tensor:
    return heads.combine(heads.averages)


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
    encoder = prepare_replacement(model, x, None, recorded)
    comparison = encoder.compare(exact)
    assert fingerprint(model) == before
    assert comparison.w2.shape == (3, 2)
    assert float(comparison.w2.max()) < 1e-6  # in units of the distance between texts
    assert float(comparison.embedding_cosine.min()) > 1 - 1e-9


@every_architecture
def test_exact_attention_of_a_colder_encoder(name):
    model, x = tiny(name, torch.float64), inputs(name, torch.float64)
    recorded = record_encoder(model, x, None, beta_factor=2.0)
    encoder = prepare_replacement(model, x, None, recorded, beta_factor=2.0)
    assert float(encoder.compare(exact).w2.max()) < 1e-6
    warm = record_encoder(model, x, None)
    assert float(prepare_replacement(model, x, None, warm).compare(exact).w2.max()) < 1e-6
    at_trained_beta = lambda heads, layer, text: exact(warm.heads(layer, text), layer, text)
    assert float(encoder.compare(at_trained_beta).w2.min()) > 1e-3


def test_attention_removed_is_not_the_encoder():
    model, x = tiny("BERT"), inputs("BERT")
    encoder = prepare_replacement(model, x, None, record_encoder(model, x, None))
    removed = encoder.compare(lambda heads, layer, text: torch.zeros(heads.n, 32))
    assert float(removed.w2.min()) > 1e-2


def test_shared_blocks_are_replaced_each_time_they_run():
    """ALBERT runs one block three times; every run asks for its own layer, every text in its turn."""
    model, x, calls = tiny("ALBERT"), inputs("ALBERT"), []

    def listening(heads: Heads, layer: int, text: int) -> Tensor:
        calls.append((layer, text, heads.n))
        return exact(heads, layer, text)

    recorded = record_encoder(model, x, None)
    prepare_replacement(model, x, None, recorded, batch=2).run(listening)
    lengths = [20, 17, 18]
    batches = ([0, 1], [2])
    assert calls == [(layer, t, lengths[t]) for texts in batches for layer in range(3) for t in texts]


@pytest.mark.parametrize("options", [{}, {"shared": True, "ffn": 0}, {"norm": "pre", "step": "euler"}])
def test_stack(options):
    """A prediction is the drift at every step of every layer of a stack."""
    torch.manual_seed(0)
    stack = DeepStack(12, 3, **{"depth": 2, "dim": 8, "heads": 2, "length": 24, "ffn": 16, "beta": 2.0, **options})
    ids = torch.randint(12, (3, 24), generator=torch.Generator().manual_seed(1))
    special = [torch.zeros(24, dtype=torch.bool)] * 2
    recorded = Recording(stack.attentions(), [None] * 2, [None] * 2, [], [], special, [], [0, 2])
    encoder = prepare_replacement(stack, ids, None, recorded)
    for states, text in zip(encoder.true.states, (0, 2)):
        own = [after[0] for _, after in stack.paths(ids[text : text + 1])]
        torch.testing.assert_close(states[1:], own, rtol=1e-4, atol=1e-5)
    comparison = encoder.compare(exact)
    assert comparison.w2.shape == (2, 2)
    assert float(comparison.w2.max()) < 1e-3
    removed = encoder.compare(lambda heads, layer, text: torch.zeros(heads.n, 8))
    assert float(removed.w2.min()) > 1e-2


def test_distances_are_what_their_definitions_say(generator):
    """W2 of three tokens by trying all pairings; units, levels and embeddings by hand."""
    model, x = tiny("BERT", torch.float64), inputs("BERT", torch.float64)
    x = {name: t[:, :17] for name, t in x.items()}
    encoder = prepare_replacement(model, x, None, record_encoder(model, x, None))
    noise = torch.randn(17, 32, generator=generator, dtype=torch.float64)
    predict = lambda heads, layer, text: exact(heads, layer, text) + (0.5 + text) * noise
    passes, comparison = encoder.run(predict), encoder.compare(predict)
    for level in range(1, 4):
        pairs = [(0, 1), (1, 2), (2, 0)]
        unit = sum(w2(encoder.true.states[i][level], encoder.true.states[j][level]) for i, j in pairs) / 3
        for t in range(3):
            distance = w2(passes.states[t][level], encoder.true.states[t][level])
            assert float(comparison.w2[level - 1, t]) == pytest.approx(distance / unit, rel=1e-9)
    torch.testing.assert_close(encoder.compare(predict, levels=[3]).w2, comparison.w2[-1:])
    for t in range(3):
        a, b = passes.states[t][-1].mean(0), encoder.true.states[t][-1].mean(0)
        assert float(comparison.embedding_cosine[t]) == pytest.approx(float(a @ b / a.norm() / b.norm()), rel=1e-6)
    a, b = (torch.randn(3, 2, generator=generator) for _ in range(2))
    best = min(sum(float((a[i] - b[j]).square().sum()) for i, j in enumerate(p)) for p in permutations(range(3)))
    assert w2(a, b) == pytest.approx(math.sqrt(best / 3), rel=1e-6)


def test_one_text_has_no_unit():
    model = tiny("BERT")
    x = {name: t[:1] for name, t in inputs("BERT").items()}
    comparison = prepare_replacement(model, x, None, record_encoder(model, x, None)).compare(exact)
    assert bool(comparison.w2.isnan().all())
    assert float(comparison.embedding_cosine) > 0.999
