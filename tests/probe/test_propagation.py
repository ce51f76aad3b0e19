"""Attention replaced in every layer: the exact average in its place changes nothing, whatever the architecture."""

import math

import pytest
import torch
from encoder_zoo import every_architecture, fingerprint, inputs, tiny
from torch import Tensor

from attn_flow.probe import propagate
from attn_flow.probe.clouds import record_clouds
from attn_flow.probe.head_space import HeadSpace
from attn_flow.probe.nulls import agreement_of
from attn_flow.probe.propagation import Passes, compare_passes


def exact(space: HeadSpace, layer: int, text: int) -> Tensor:
    return space.assembled(space.logits.softmax(-1) @ space.y[..., space.k :])


@pytest.fixture
def any_length(monkeypatch):
    monkeypatch.setattr("attn_flow.probe.clouds.SHORTEST", 2)


@every_architecture
def test_exact_attention_in_its_place_is_the_encoder(name, any_length):
    model, x = tiny(name, torch.float64), inputs(name, torch.float64)
    before = fingerprint(model)
    found = propagate(model, x, closure=exact)
    assert fingerprint(model) == before
    assert float(found.w2.max()) < 1e-6  # distances of 1e-9 and between texts of order one
    assert float(found.embedding_cosine.min()) > 1 - 1e-9


@every_architecture
def test_exact_attention_is_what_a_colder_layer_computes(name, any_length):
    """Whether beta multiplies what places add (DeBERTa) or not (T5), it is in the scores as in the model's own."""
    clouds = record_clouds(tiny(name, torch.float64), inputs(name, torch.float64), None, beta_factor=2.0)
    found = agreement_of(clouds, exact)
    assert float(found.explained.min()) > 1 - 1e-9  # angles and softmax of some are float32


def test_attention_removed_is_not_the_encoder(any_length):
    found = propagate(tiny("BERT"), inputs("BERT"), closure="removed")
    assert float(found.w2.min()) > 1e-2


def test_shared_blocks_are_replaced_at_every_firing(any_length):
    """ALBERT fires one block three times; each firing asks for its own layer."""
    asked = []

    def listening(space: HeadSpace, layer: int, text: int) -> Tensor:
        asked.append((layer, text))
        return exact(space, layer, text)

    propagate(tiny("ALBERT"), inputs("ALBERT"), closure=listening)
    assert asked == [(layer, text) for layer in range(3) for text in range(2)]


def test_distances_and_neighbours_are_what_their_definitions_say(generator):
    """Two clouds of three tokens and a permutation: W2 by trying all pairings; neighbours by looking."""
    from itertools import permutations

    true = [[torch.randn(3, 2, generator=generator) for _ in range(2)] for _ in range(4)]
    found = [[x + 0.3 * torch.randn(3, 2, generator=generator) for x in states] for states in true]
    e, f = (torch.nn.functional.normalize(torch.randn(4, 5, generator=generator), dim=-1) for _ in range(2))
    between = torch.tensor([1.0, 2.0], dtype=torch.float64)
    scored = compare_passes(Passes(found, f), Passes(true, e), between)
    for t in range(4):
        a, b = found[t][1].double(), true[t][1].double()
        best = min(sum(float((a[i] - b[j]).square().sum()) for i, j in enumerate(p)) for p in permutations(range(3)))
        assert float(scored.w2[0, t]) == pytest.approx(math.sqrt(best / 3) / 2, rel=1e-6)
        others = [s for s in range(4) if s != t]
        same = max(others, key=lambda s: float(e[s] @ e[t])) == max(others, key=lambda s: float(f[s] @ f[t]))
        assert bool(scored.neighbour_agreement[t]) == same
        assert float(scored.embedding_cosine[t]) == pytest.approx(float(e[t] @ f[t]), rel=1e-6)
    pairs = [(i, j) for i in range(4) for j in range(i + 1, 4)]
    ranks = []
    for v in (e, f):
        values = [float(v[i] @ v[j]) for i, j in pairs]
        ranks.append(torch.tensor([sorted(values).index(x) for x in values], dtype=torch.float64))
    assert float(scored.rank_correlation) == pytest.approx(float(torch.corrcoef(torch.stack(ranks))[0, 1]), rel=1e-9)


def test_unknown_closures_are_named(any_length):
    with pytest.raises(ValueError, match="closure = 'magic', expected one of gaussian_closure"):
        propagate(tiny("BERT"), inputs("BERT"), closure="magic")


def test_the_corpus_mean_knows_nothing_of_the_text_itself(any_length):
    from attn_flow.probe.clouds import record_clouds
    from attn_flow.probe.nulls import by_null

    clouds = record_clouds(tiny("BERT"), inputs("BERT"), None)
    predict = by_null("mean_output", clouds, torch.Generator(), corpus_mean=True)
    for layer in range(clouds.layers):
        for text, other in ((0, 1), (1, 0)):  # two texts: the mean of the other one
            predicted = predict(clouds.space(layer, text), layer, text)
            assert torch.equal(predicted[0], clouds.out[layer][other].mean(0))
            assert predicted.shape == clouds.z[layer][text].shape
