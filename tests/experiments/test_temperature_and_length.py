"""The experiment on temperature and length: its attentions against literal loops, its chunks, and a quick run."""

import json
import math

import pytest
import torch

from attn_flow.base.files import to_plain
from attn_flow.experiments.encoders import temperature_and_length as experiment
from attn_flow.hooks.demo import minilm, topics
from attn_flow.probe.encoders import record_encoder
from attn_flow.probe.recording import Heads
from attn_flow.probe.replacement import run


def random_heads(n=9):
    generator = torch.Generator().manual_seed(0)
    draw = lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64)
    special = torch.tensor([i in (0, n - 1) for i in range(n)])
    return Heads(draw(2, n, 3), draw(2, n, 3), draw(2, n, 4), draw(2, 5, 4), None, special)


def test_weights_of_a_colder_and_of_a_local_attention():
    heads = random_heads()
    colder, local = experiment.colder(1.7)(heads), experiment.local(5)(heads)
    for h in range(2):
        for i in range(9):
            logits = [float(heads.queries[h, i] @ heads.keys[h, j]) for j in range(9)]
            total = sum(math.exp(1.7 * s) for s in logits)
            assert colder[h, i].tolist() == pytest.approx([math.exp(1.7 * s) / total for s in logits])
            near = [abs(i - j) <= 2 or i in (0, 8) or j in (0, 8) for j in range(9)]
            total = sum(math.exp(s) for s, is_near in zip(logits, near) if is_near)
            assert local[h, i].tolist() == pytest.approx(
                [math.exp(s) / total if is_near else 0.0 for s, is_near in zip(logits, near)]
            )
    added = experiment.replacing(experiment.colder(1.0))(heads, 0, 0)
    torch.testing.assert_close(added, heads.combine(heads.averages))


def test_the_best_factor_is_the_vertex_of_a_parabola():
    factors = torch.tensor(experiment.FACTORS)
    assert experiment.best_factor(-((factors - 1.234) ** 2)) == pytest.approx(1.234, abs=1e-5)
    assert experiment.best_factor(factors) == experiment.FACTORS[-1]


@pytest.fixture(scope="module")
def encoder():
    return minilm()


def test_chunks_are_whole_words_of_at_most_n0_tokens(encoder):
    tokenizer = encoder[1]
    text = next(text for text in topics() if len(text) > 3000)
    (chunks,) = experiment.cut_texts(["too short", text], tokenizer, 32, 4, 1)
    assert len(chunks) == 4
    assert " ".join(text.split()).startswith(" ".join(chunks))
    assert all(25 < len(tokenizer(chunk)["input_ids"]) <= 32 for chunk in chunks)


def test_embeddings_at_the_trained_beta_are_the_encoders_own(encoder):
    model, tokenizer = encoder
    texts = [text[:200] for text in topics() if len(text) > 900][:2]
    with pytest.warns(UserWarning, match="truncated"):
        recording = record_encoder(model, tokenizer, texts, max_length=32)
    embeddings = run(recording, experiment.replacing(experiment.colder(1.0))).embeddings
    for text, embedding in zip(texts, embeddings):
        inputs = tokenizer(text, return_tensors="pt", truncation=True, max_length=32)
        with torch.no_grad():
            expected = model(**inputs).last_hidden_state[0].mean(0)
        torch.testing.assert_close(embedding, expected / expected.norm(), atol=1e-5, rtol=0)
    distances = [experiment.attended_distance(recording, experiment.local(w)) for w in (4, 12, 64)]
    assert distances == sorted(distances)
    assert distances[0] <= 2
    assert distances[2] == experiment.attended_distance(recording, experiment.colder(1.0))
    assert 4 <= experiment.matching_window(recording, distances[1]) <= 13
    assert experiment.matching_window(recording, distances[2]) == 64


def test_a_quick_run_is_measured_and_drawn():
    numbers = experiment.compute(quick=True)
    (row,) = numbers["models"]["minilm"]
    assert row["logarithm"] == pytest.approx(math.log(64) / math.log(32))
    assert row["low"] <= row["best"] <= row["high"]
    assert max(row["cosine"]) == pytest.approx(row["best_cosine"], abs=1e-3)
    assert row["best_cosine"] >= row["trained_cosine"]
    assert row["chunk_window_cosine"] > row["trained_cosine"]
    assert len(numbers["claims"]) == 5
    figure = experiment.plot(json.loads(json.dumps(to_plain(numbers), allow_nan=False)))
    assert len(figure.axes) == 2
