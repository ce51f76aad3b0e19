"""What attention adds, an encoder with attention replaced, merging clusters: by hand, on a tiny BERT."""

import math
from dataclasses import replace

import numpy as np
import pytest
import scipy.optimize
import torch
from encoder_zoo import inputs, tiny
from torch import Tensor

from attn_flow.hooks.demo import tiny_bert
from attn_flow.probe.clouds import Clouds, record_clouds
from attn_flow.probe.evolution import cloud_evolution
from attn_flow.probe.nulls import by_null
from attn_flow.probe.propagation import Bench, bench

TEXTS = [
    "a b c d e f g h i j a c e g i b d f h j a d g j",
    "j i h g f e d c b a j h f d b i g e c a j g d a",
    "a a b b c c d d e e f f g g h h i i j j a b c d",
]


@pytest.fixture(scope="module")
def model():
    """With biases and norms drawn anew: at initialisation they are 0 and 1, and nothing would be seen of them."""
    found, tokenizer = tiny_bert()
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, p in found.named_parameters():
            if p.ndim == 1:
                p.add_(0.3 * torch.randn(p.shape, generator=generator))
            elif "attention" in name:
                p.mul_(6)
    return found.double(), tokenizer


@pytest.fixture(scope="module")
def clouds(model) -> Clouds:
    return record_clouds(*model, TEXTS)


@pytest.fixture(scope="module")
def laid(model, clouds) -> Bench:
    return bench(*model, TEXTS, clouds)


def weights_of(clouds: Clouds, layer: int, text: int) -> np.ndarray:
    """Attention weights (heads, n, n), entry by entry."""
    A, x = clouds.attentions[layer], clouds.z[layer][text]
    P = np.zeros((A.heads, len(x), len(x)))
    for h in range(A.heads):
        for i in range(len(x)):
            q = A.Q[h] @ x[i] + A.query_bias[h]
            e = [math.exp(float(A.beta * (q @ (A.K[h] @ x[j])))) for j in range(len(x))]
            P[h, i] = np.array(e) / sum(e)
    return P


def apart(x: np.ndarray, y: np.ndarray) -> float:
    """W2 of two clouds of as many tokens: the best of all pairings."""
    cost = ((x[:, None] - y[None]) ** 2).sum(-1)
    return math.sqrt(cost[scipy.optimize.linear_sum_assignment(cost)].mean())


def test_what_attention_adds_is_a_loop_over_tokens_and_heads(clouds):
    """The truth that everything is compared with; with it the recorded inputs and outputs."""
    A, x, P = clouds.attentions[1], clouds.z[1][0], weights_of(clouds, 1, 0)
    for i in (0, 7):
        out = A.value_bias.clone()
        for h in range(A.heads):
            out = out + A.O[h] @ sum(P[h, i, j] * (A.V[h] @ x[j]) for j in range(len(x)))
        assert torch.allclose(out, clouds.out[1][0][i], atol=1e-9)


def test_merges_and_splits_are_counted_at_the_level_where_they_happen(clouds):
    """Two pairs of tokens, apart, then one cluster, then apart again; a token alone is no cluster."""
    turn = lambda *angles: torch.tensor([[math.cos(a), math.sin(a)] for a in angles], dtype=torch.float64)
    levels = [turn(0, 0.1, 1.5, 1.6, 4), turn(0, 0.3, 0.6, 0.9, 4), turn(0, 0.1, 2.5, 2.6, 4)]
    made = replace(clouds, z=[[x] for x in levels], special=[torch.zeros(5, dtype=torch.bool)])
    found = cloud_evolution(made)
    assert found.merges[:, 0].tolist() == [0, 1, 0]
    assert found.splits[:, 0].tolist() == [0, 0, 1]
    assert found.clusters[:, 0].tolist() == [3, 2, 3]


def uniform_by_hand(model, ids: Tensor) -> list[Tensor]:
    """BERT with uniform attention in every layer, part by part: the states before every block and after the last."""
    x = model.embeddings(ids[None])[0]
    states = [x]
    for block in model.encoder.layer:
        value = torch.stack([block.attention.self.value(y) for y in x]).mean(0)
        x = block.attention.output.LayerNorm(x + block.attention.output.dense(value))
        x = block.output.LayerNorm(x + block.output.dense(block.intermediate(x)))
        states.append(x)
    return states


def test_a_null_through_depth_is_the_encoder_computed_by_hand(model, clouds, laid):
    bert, tokenizer = model
    with torch.no_grad():
        scored = laid.score(by_null("uniform", clouds, torch.Generator()))
        by_hand = [uniform_by_hand(bert, torch.tensor(tokenizer(text)["input_ids"])) for text in TEXTS]
        true = [
            [h[0] for h in bert(torch.tensor([tokenizer(text)["input_ids"]]), output_hidden_states=True).hidden_states]
            for text in TEXTS
        ]
    between = [np.mean([apart(true[i][l].numpy(), true[(i + 1) % 3][l].numpy()) for i in range(3)]) for l in range(3)]
    assert laid.between.tolist() == pytest.approx(between, rel=1e-9)
    for t in range(3):
        for level in (1, 2):
            w2 = apart(by_hand[t][level].numpy(), true[t][level].numpy()) / between[level]
            assert float(scored.w2[level - 1, t]) == pytest.approx(w2, rel=1e-6)
        a, b = (sum(states[t][-1]) / len(states[t][-1]) for states in (by_hand, true))
        assert float(scored.embedding_cosine[t]) == pytest.approx(float(a @ b / (a.norm() * b.norm())), rel=1e-9)


@pytest.mark.parametrize("batch", [1, 2, 16])
def test_other_tokens_at_the_start_are_carried_from_the_first_block_on(model, clouds, batch):
    """Each text its own, however many texts are in a pass."""
    bert = model[0]
    laid = bench(*model, TEXTS, clouds, batch=batch)
    start = lambda t: laid.true.states[t][0].roll(t + 1, 0) + 0.1 * t
    with torch.no_grad():
        found = laid.run(None, start)
        for t in range(3):
            torch.testing.assert_close(found.states[t][0], start(t))
            after = bert.encoder.layer[0](start(t)[None])
            after = (after[0] if isinstance(after, tuple) else after).reshape(start(t).shape)
            torch.testing.assert_close(found.states[t][1], after)
            mean = found.states[t][-1].mean(0)
            torch.testing.assert_close(found.embeddings[t], mean / mean.norm())


def test_a_block_that_fires_again_is_not_started_again(monkeypatch):
    monkeypatch.setattr("attn_flow.probe.clouds.SHORTEST", 2)
    albert, x = tiny("ALBERT", torch.float64), inputs("ALBERT", torch.float64)
    laid = bench(albert, x, None, record_clouds(albert, x, None))
    with torch.no_grad():
        found = laid.run(None, lambda t: 2 * laid.true.states[t][0])
        same = laid.run(None, lambda t: laid.true.states[t][0])
    for t, states in enumerate(found.states):
        torch.testing.assert_close(states[0], 2 * laid.true.states[t][0])
        assert not torch.allclose(states[2], states[1])
        for a, b in zip(same.states[t], laid.true.states[t]):
            torch.testing.assert_close(a, b)
