"""Question 3: temperature and descriptions of heads against literal loops, controls, and the numbers of MiniLM."""

import math

import limit_systems
import numpy as np
import pytest
import torch
from scipy.stats import spearmanr

from attn_flow import Attention
from attn_flow.hooks.demo import topics
from attn_flow.probe.encoders import record_encoder
from attn_flow.probe.findings import correlation, rank_correlation
from attn_flow.probe.recording import Heads
from attn_flow.probe.temperature import (
    best_description,
    describe_by_keys,
    describe_by_moments,
    explained,
    measure_temperature,
)


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def recording_of(attention, clouds, special=()):
    mask = [torch.tensor([i in special for i in range(len(x))]) for x in clouds]
    return limit_systems.recording_of([attention], [clouds, clouds], mask)


def test_statistics_of_a_head_are_means_over_queries_of_sums_over_keys():
    A = Attention.identity(3, beta=1.3)
    x = torch.randn(18, 3, generator=seeded(), dtype=torch.float64)
    measured = measure_temperature(recording_of(A, [x], special=(0, 17)))
    entropy, largest, variance = [], [], []
    centred = x - x.mean(0)
    for i in range(18):
        logits = [1.3 * float(x[i] @ x[j]) for j in range(18)]
        p = [math.exp(s) / sum(math.exp(t) for t in logits) for s in logits]
        entropy.append(-sum(q * math.log(q) for q in p) / math.log(18))
        largest.append(max(p))
        variance.append(np.var(logits[1:17]))
    assert float(measured.entropy) == pytest.approx(np.mean(entropy))
    assert float(measured.largest_weight) == pytest.approx(np.mean(largest))
    assert float(measured.logit_sd) == pytest.approx(math.sqrt(np.mean(variance)))
    assert float(measured.logit_bound) == pytest.approx(
        max(1.3 * float(a.norm() * b.norm()) for a in x for b in centred)
    )
    assert measured.tokens.tolist() == [16]


def random_heads(n=14, special=(0, 13), scale=0.4):
    draw = lambda *shape, seed: torch.randn(*shape, generator=seeded(seed), dtype=torch.float64)
    mask = torch.tensor([i in special for i in range(n)])
    keys, values = draw(2, n, 3, seed=1), draw(2, n, 4, seed=2)
    return Heads(scale * draw(2, n, 3, seed=0), keys, values, draw(2, 5, 4, seed=3), None, mask)


@pytest.mark.parametrize(("special", "scale"), [((0, 13), 0.4), ((), 0.4), ((0, 13), 6.0)])
def test_two_moments_are_the_gaussian_formula_beside_the_special_tokens(special, scale):
    heads = random_heads(special=special, scale=scale)
    described = describe_by_moments(heads)
    regular = [j for j in range(14) if j not in special]
    cap = math.sqrt(2 * math.log(len(regular)))
    for h in range(2):
        k, v = heads.keys[h].numpy(), heads.values[h].numpy()
        mean_k, mean_v = k[regular].mean(0), v[regular].mean(0)
        covariance = (k[regular] - mean_k).T @ (k[regular] - mean_k) / len(regular)
        cross = (v[regular] - mean_v).T @ (k[regular] - mean_k) / len(regular)
        for i in range(14):
            q = heads.queries[h, i].numpy()
            sd = math.sqrt(q @ covariance @ q)
            log_mass = math.log(len(regular)) + q @ mean_k + (sd**2 / 2 if sd < cap else sd * cap - cap**2 / 2)
            total, output = math.exp(log_mass), math.exp(log_mass) * (mean_v + min(1, cap / sd) * cross @ q)
            for j in special:
                weight = math.exp(q @ k[j])
                total, output = total + weight, output + weight * v[j]
            np.testing.assert_allclose(described[h, i].numpy(), output / total, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("count", [1, 4])
def test_few_keys_are_attention_over_the_largest_logits(count):
    heads = random_heads()
    described = describe_by_keys(heads, count)
    for h in range(2):
        for i in range(14):
            logits = {j: float(heads.queries[h, i] @ heads.keys[h, j]) for j in range(14)}
            top = sorted(logits, key=logits.get)[-count:]
            total = sum(math.exp(logits[j]) for j in top)
            expected = sum(math.exp(logits[j]) / total * heads.values[h, j] for j in top)
            torch.testing.assert_close(described[h, i], expected)
    torch.testing.assert_close(describe_by_keys(heads, 99), heads.averages)


def test_explained_variance():
    true = torch.randn(3, 6, 2, generator=seeded(), dtype=torch.float64)
    assert explained(true, true).tolist() == [1, 1, 1]
    torch.testing.assert_close(explained(true.mean(1, keepdim=True), true), torch.zeros(3, dtype=torch.float64))
    assert explained(true, torch.ones(3, 6, 2)).isnan().all()


def test_warm_gaussian_tokens_are_two_moments_and_frozen_ones_their_largest_logit():
    clouds = list(torch.randn(2, 400, 6, generator=seeded(4)))
    warm = measure_temperature(recording_of(Attention.identity(6, beta=0.1), clouds)).finding()
    assert warm.verdict is None
    assert warm.numbers["phases"] == {"warm": 1, "middle": 0, "frozen": 0}
    assert warm.numbers["explained"]["warm"]["two_moments"] > 0.95
    assert warm.numbers["best_description"] == {"warm": "two_moments", "middle": None, "frozen": None}
    assert "1 is warm" in warm.text
    assert "by two moments" in warm.text
    frozen = measure_temperature(recording_of(Attention.identity(6, beta=50.0), clouds)).finding()
    assert frozen.numbers["phases"]["frozen"] == 1
    assert frozen.numbers["heads"][0]["argmax"] > 0.95
    assert frozen.numbers["heads"][0]["largest_weight"] > 0.9
    assert frozen.numbers["explained"]["frozen"]["two_moments"] < 0.9


def test_the_best_description():
    unknown = torch.tensor(torch.nan)
    assert (
        best_description({"two_moments": torch.tensor(0.2), "four_keys": torch.tensor(0.3), "argmax": unknown})
        == "four_keys"
    )
    assert (
        best_description({"two_moments": torch.tensor(-0.2), "four_keys": unknown, "argmax": torch.tensor(-3.0)})
        is None
    )


def test_rank_correlation_leaves_unknown_numbers_out():
    x, y = (torch.randn(12, generator=seeded(i), dtype=torch.float64) for i in range(2))
    assert rank_correlation(x, y) == pytest.approx(spearmanr(x, y)[0])
    y[3] = torch.nan
    rest = [i for i in range(12) if i != 3]
    assert rank_correlation(x, y) == pytest.approx(spearmanr(x[rest], y[rest])[0])
    assert correlation(x, y) == correlation(y, x) == pytest.approx(np.corrcoef(x[rest], y[rest])[0, 1])
    assert rank_correlation(x, torch.full_like(y, torch.nan)) is None
    assert rank_correlation(x, torch.ones(12)) is None
    ties = x.round()
    assert rank_correlation(ties, x) == pytest.approx(spearmanr(ties, x)[0])


def test_causal_attention_has_a_temperature_over_the_keys_it_sees():
    A = Attention.identity(3, beta=1.3, causal=True)
    x = torch.randn(18, 3, generator=seeded(), dtype=torch.float64)
    measured = measure_temperature(recording_of(A, [x]))
    variance = [np.var([1.3 * float(x[i] @ x[j]) for j in range(i + 1)]) for i in range(18)]
    assert float(measured.logit_sd) == pytest.approx(math.sqrt(np.mean(variance)))
    assert measured.tokens.tolist() == [9.5]
    row = measured.finding().numbers["heads"][0]
    assert row["two_moments"] is None
    assert 0 < row["entropy"] < 1
    assert row["four_keys"] <= 1


def test_heads_of_minilm(encoder):
    with pytest.warns(UserWarning, match="truncated"):
        recording = record_encoder(*encoder, [t for t in topics() if len(t) > 900][:4], max_length=128)
    finding = measure_temperature(recording).finding()
    correlations = finding.numbers["rank_correlation_with_logit_sd"]
    assert correlations["four_keys"] > 0.85
    assert correlations["entropy"] < -0.85
    assert finding.numbers["best_description"] == {"warm": "two_moments", "middle": "four_keys", "frozen": "four_keys"}
    assert sum(finding.numbers["phases"].values()) == 72
    assert len(finding.text.split()) <= 40
    rows = finding.numbers["heads"]
    warm = [row["two_moments"] for row in rows if row["phase"] == "warm"]
    assert finding.numbers["explained"]["warm"]["two_moments"] == pytest.approx(np.median(warm))


@pytest.mark.slow
def test_six_groups_of_minilm_heads_by_temperature(encoder):
    """Medians of twelve heads each, as measured independently."""
    texts = [t for t in topics() if len(t) > 2048][:16]
    with pytest.warns(UserWarning, match="truncated"):
        recording = record_encoder(*encoder, texts, max_length=512)
    rows = measure_temperature(recording).finding().numbers["heads"]
    rows = sorted(rows, key=lambda row: row["logit_sd"])
    medians = lambda name: [float(np.median([row[name] for row in rows[12 * i : 12 * i + 12]])) for i in range(6)]
    assert medians("logit_sd") == pytest.approx([0.96, 1.2, 1.4, 2.0, 3.2, 3.8], abs=0.05)
    assert medians("two_moments") == pytest.approx([0.75, 0.21, 0.20, 0.41, 0.09, 0.06], abs=0.05)
    assert medians("four_keys")[4:] == pytest.approx([0.42, 0.84], abs=0.05)
    assert medians("four_keys")[:4] == pytest.approx([-13.7, -8.6, -5.0, -0.9], rel=0.2)
