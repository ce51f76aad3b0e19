"""Question 1: errors of attention over random keys against literal loops, controls, and the numbers of MiniLM."""

import math
from dataclasses import replace

import limit_systems
import numpy as np
import pytest
import torch

from attn_flow import Attention
from attn_flow.hooks.demo import topics
from attn_flow.probe.averaging import (
    Averaging,
    explained_by,
    has_mean_field_rate,
    measure_averaging,
    sampled_averages,
)
from attn_flow.probe.encoders import record_encoder
from attn_flow.probe.findings import Interval
from attn_flow.probe.recording import Heads
from attn_flow.probe.sampling import (
    decay_exponent,
    gaussian_exponent,
    logit_sd,
    permuted_keys,
    sample_sizes,
    weight_errors,
)


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def random_heads(n=11, heads=2, special=(0, 10), seed=0):
    draw = lambda *shape: torch.randn(*shape, generator=seeded(seed + len(shape)), dtype=torch.float64)
    mask = torch.zeros(n, dtype=torch.bool)
    mask[list(special)] = True
    return Heads(1.5 * draw(heads, n, 3), draw(heads, n, 3), draw(heads, n, 4), draw(heads, 5, 4), draw(5), mask)


def recording_of(attentions, clouds, special=None):
    """A recording whose tokens are the same at every level."""
    return limit_systems.recording_of(attentions, [clouds] * (len(attentions) + 1), special)


def loop_average(heads, h, i, kept):
    """Attention of query i over some keys, those that are not special with the weight N/m; with its weights."""
    regular = [j for j in range(heads.n) if not heads.special[j]]
    m = sum(1 for j in kept if not heads.special[j])
    weights = {}
    for j in kept:
        weight = math.exp(float(heads.queries[h, i] @ heads.keys[h, j]))
        weights[j] = weight if heads.special[j] else weight * len(regular) / m
    total = sum(weights.values())
    weights = {j: weight / total for j, weight in weights.items()}
    return sum(weight * heads.values[h, j] for j, weight in weights.items()), weights


def test_exponents_do_not_depend_on_the_size_of_the_output():
    x = torch.randn(48, 6, generator=seeded(), dtype=torch.float64)
    V = torch.randn(1, 6, 6, generator=seeded(1), dtype=torch.float64)
    exponents = []
    for scale in (1.0, 1e-6):
        recording = recording_of([Attention(V=scale * V, beta=0.7)], [x])
        averaging = measure_averaging(recording, seeded())
        exponents.append(averaging.exponents(averaging.layer_errors))
    assert exponents[0].isfinite().all()
    torch.testing.assert_close(exponents[0], exponents[1])


def test_attention_over_a_sample_is_the_literal_weighted_average():
    heads = random_heads()
    sample = torch.tensor([[3, 1, 7], [9, 2, 4]])
    averages = sampled_averages(heads, sample)
    for draw, kept in enumerate(sample.tolist()):
        for h in range(2):
            for i in range(heads.n):
                expected, _ = loop_average(heads, h, i, [0, 10, *kept])
                torch.testing.assert_close(averages[draw, h, i], expected)


def test_all_keys_are_attention_itself_and_samples_are_drawn_without_special_tokens():
    heads = random_heads()
    torch.testing.assert_close(sampled_averages(heads, torch.arange(1, 10)[None])[0], heads.averages)
    order = permuted_keys(heads.special, 500, seeded())
    assert torch.equal(order.sort(-1).values, torch.arange(1, 10).expand(500, -1))
    counts = torch.bincount(order[:, :3].flatten(), minlength=11)[1:10]  # every key in a third of the samples of 3 of 9
    assert ((counts - 500 / 3).abs() < 5 * math.sqrt(500 * 2 / 9)).all()


def test_weight_errors_are_sums_over_keys_of_squared_differences_of_weights():
    heads = random_heads()
    order, sizes = permuted_keys(heads.special, 3, seeded()), torch.tensor([2, 5])
    errors = weight_errors(heads.logits, heads.special, order, sizes)
    for h in range(2):
        for k, m in enumerate(sizes.tolist()):
            terms = []
            for kept in order[:, :m].tolist():
                for i in range(heads.n):
                    _, all_weights = loop_average(heads, h, i, range(heads.n))
                    _, weights = loop_average(heads, h, i, [0, 10, *kept])
                    terms.append(sum((weights.get(j, 0.0) - p) ** 2 for j, p in all_weights.items()))
            assert float(errors[h, k]) == pytest.approx(sum(terms) / len(terms), rel=1e-9)


def test_weight_errors_are_the_squared_errors_with_normal_values():
    heads = random_heads(n=40, heads=1, special=(0,))
    order, sizes = permuted_keys(heads.special, 20, seeded()), torch.tensor([5, 15])
    values = torch.randn(1, 40, 20_000, generator=seeded(5), dtype=torch.float64)
    wide = Heads(heads.queries, heads.keys, values, heads.output, None, heads.special)
    expected = weight_errors(heads.logits, heads.special, order, sizes)
    for k, m in enumerate(sizes.tolist()):
        error = (sampled_averages(wide, order[:, :m]) - wide.averages).square().mean()
        assert float(error) == pytest.approx(float(expected[0, k]), rel=0.02)


@pytest.mark.parametrize("b", [0.5, 0.2, 0.0])
def test_decay_exponent_of_a_power_law_with_texts_of_two_lengths(b):
    n = torch.tensor([64, 200])
    sizes = torch.stack([sample_sizes(int(k)) for k in n])
    errors = 3 * (1 - sizes / n[:, None]) * sizes.double() ** (-2 * b)
    torch.testing.assert_close(decay_exponent(errors, sizes, n[:, None]), torch.full((2,), b, dtype=torch.float64))
    rows = [[math.log(e) / 2 - math.log(1 - m / 64) / 2, -math.log(m)] for e, m in zip(errors[0] + 0.1, sizes[0])]
    slope = np.polyfit([x for _, x in rows], [y for y, _ in rows], 1)[0]
    assert float(decay_exponent(errors[0] + 0.1, sizes[0], 64)) == pytest.approx(slope)


@pytest.mark.parametrize("n", [14, 24, 31, 32, 513])
def test_sample_sizes_rise_from_eight_to_half(n):
    sizes = sample_sizes(n).tolist()
    assert sizes == sorted(set(sizes))
    assert sizes[0] == min(8, n // 4)
    assert sizes[-1] == n // 2


def test_the_curve_of_gaussian_logits():
    """Known values at n = 512, and an independent simulation with values and subsets at n = 100."""
    s = torch.tensor([0.0, 0.5, 1.0, 2.0, 3.3, 5.0, 8.0])
    expected = torch.tensor([0.5, 0.5, 0.45, 0.26, 0.12, 0.08, 0.05], dtype=torch.float64)
    torch.testing.assert_close(gaussian_exponent(s, 512), expected, atol=0.02, rtol=0)
    rng = np.random.default_rng(0)
    for sd in (1.0, 2.2, 6.0):
        errors = np.zeros(5)
        for _ in range(3000):
            w, v = np.exp(sd * rng.normal(size=100)), rng.normal(size=(100, 8))
            order = rng.permutation(100)
            full = (w @ v) / w.sum()
            for k, m in enumerate(sample_sizes(100).tolist()):
                kept = order[:m]
                errors[k] += (((w[kept] @ v[kept]) / w[kept].sum() - full) ** 2).sum()
        b = float(decay_exponent(torch.tensor(errors), sample_sizes(100), 100))
        assert float(gaussian_exponent(torch.tensor(sd), 100)) == pytest.approx(b, abs=0.02)
    assert gaussian_exponent(torch.tensor([1e3]), 10) < 0.05


def test_logit_sd_is_over_keys_that_are_not_special():
    heads = random_heads()
    for h in range(2):
        rows = [[float(heads.logits[h, i, j]) for j in range(1, 10)] for i in range(11)]
        assert float(logit_sd(heads.logits, heads.special)[h]) == pytest.approx(math.sqrt(np.var(rows, axis=1).mean()))


def exchangeable(beta, texts=10, n=96, dim=12):
    generator = seeded(3)
    A = Attention(
        Q=torch.randn(3, 8, dim, generator=generator) / dim**0.5,
        K=torch.randn(3, 8, dim, generator=generator) / dim**0.5,
        V=torch.randn(3, 4, dim, generator=generator) / dim**0.5,
        O=torch.randn(3, dim, 4, generator=generator),
        beta=beta,
    )
    return recording_of([A, A], [torch.randn(n, dim, generator=generator) for _ in range(texts)])


def test_exchangeable_tokens_give_the_mean_field_exponent():
    for seed in range(3):
        averaging = measure_averaging(exchangeable(0.05), seeded(seed))
        finding = averaging.finding()
        assert finding.verdict == "supported"
        assert finding.numbers["exponent"] == pytest.approx([0.5, 0.5], abs=0.05)
        for row in finding.numbers["heads"]:
            assert row["b"] == pytest.approx(0.5, abs=0.05)
            assert row["logits_b"] == pytest.approx(0.5, abs=0.02)
            assert row["predicted_b"] == pytest.approx(0.5, abs=0.02)
        assert "every layer" in finding.text


def test_a_head_that_selects_one_token_has_an_exponent_near_zero():
    """Every token selects itself by half of its coordinates; its value is the other half."""
    first, second = torch.eye(16)[None, :8], torch.eye(16)[None, 8:]
    A = Attention(Q=first, K=first, V=second, O=second.mT, beta=20.0)
    x = torch.randn(10, 64, 16, generator=seeded(1))
    finding = measure_averaging(recording_of([A], list(x)), seeded()).finding()
    assert finding.verdict == "not supported"
    row = finding.numbers["heads"][0]
    for b in (finding.numbers["exponent"][0], row["b"], row["logits_b"], row["predicted_b"]):
        assert abs(b) < 0.1


def test_the_continuation_of_a_text_that_repeats_itself_explains_all():
    x = torch.randn(20, 6, generator=seeded(2), dtype=torch.float64)
    A = Attention.identity(6, beta=0.7)
    special = torch.tensor([True] + 40 * [False] + [True])
    ends = torch.randn(2, 6, generator=seeded(4), dtype=torch.float64)
    repeated = torch.cat([ends[:1], x, x, ends[1:]])
    short = torch.tensor([True] + 15 * [False] + [True])
    clouds = [repeated, torch.cat([ends[:1], x[:15], ends[1:]])]
    recording = recording_of([A], clouds, [special, short])
    heads, shorter = recording.heads(0, 0), recording.heads(0, 1)
    assert float(explained_by(heads, heads)) == pytest.approx(1.0)
    predicted, true = [], []
    for i in range(1, 21):
        weight = lambda y, i=i: math.exp(0.7 * float(repeated[i] @ y))
        cloud = [(weight(y), y) for y in ends] + [(weight(y), y) for y in x]
        true.append(sum(w * y for w, y in cloud) / sum(w for w, _ in cloud))
        cloud = [(weight(y), y) for y in ends] + [(weight(y) * 20 / 15, y) for y in x[:15]]
        predicted.append(sum(w * y for w, y in cloud) / sum(w for w, _ in cloud))
    true, predicted = torch.stack(true), torch.stack(predicted)
    expected = 1 - (predicted - true).square().sum() / (true - true.mean(0)).square().sum()
    assert float(explained_by(heads, shorter)) == pytest.approx(float(expected))


def test_the_rule_of_the_verdict():
    low = torch.tensor([0.30, 0.42, 0.30, 0.55, torch.nan])
    high = torch.tensor([0.49, 0.45, 0.52, 0.60, torch.nan])
    assert has_mean_field_rate(Interval(low, low, high)).tolist() == [False, True, True, True, False]


@pytest.mark.parametrize(
    ("exponents", "verdict", "where"),
    [
        ([0.5, 0.5, 0.5], "supported", "in every layer and 0% of heads"),
        ([0.2, 0.5, 0.2, 0.5], "partly", "in layers 1, 3 and 0% of heads"),
        ([0.5, 0.5, 0.5, 0.2], "partly", "in 3 of 4 layers and 0% of heads"),
        ([0.2, 0.3], "not supported", "in no layer and 0% of heads"),
    ],
)
def test_layers_are_named_if_they_are_few(exponents, verdict, where):
    """Errors made by hand, (1 - m/n) m^(-2b) with the exponent b of the layer; every head has b = 0.1."""
    m, b = sample_sizes(64)[:, None].expand(-1, 8), torch.tensor(exponents, dtype=torch.float64)
    errors = lambda b: (1 - m / 64) * m ** (-2 * b[..., None, None])
    heads, rest = errors(torch.full((len(b), 1), 0.1)), torch.ones(len(b), 8, dtype=torch.float64)
    tokens = torch.full((8,), 64)
    finding = Averaging(tokens, m, errors(b), heads, heads, rest[:, None], rest, rest).finding()
    assert finding.verdict == verdict
    assert finding.text.startswith(f"Attention averages over many tokens {where}")


def test_few_texts_have_no_verdict():
    few = measure_averaging(exchangeable(0.05, texts=1), seeded()).finding()
    assert few.verdict is None
    assert "No verdict (1 of 8 texts)" in few.text
    assert few.numbers["exponent"][0] == pytest.approx(0.5, abs=0.15)
    assert few.numbers["exponent_low"] == [None, None]
    assert few.numbers["other_text"] == [None, None]


def test_a_head_without_error_has_no_exponent():
    """All values of the first head are equal, so that every sample gives its output."""
    recording = exchangeable(0.5)
    V = recording.attentions[0].V.clone()
    V[0] = 0
    recording = replace(recording, attentions=2 * [replace(recording.attentions[0], V=V)])
    rows = measure_averaging(recording, seeded()).finding().numbers["heads"]
    assert rows[0]["b"] is None
    assert rows[1]["b"] > 0.3


def test_equal_outputs_of_all_tokens_have_no_verdict():
    """Queries are 0, so that every token gets the mean value, and its variance is no unit for errors."""
    A = Attention(Q=torch.zeros(1, 6, 6, dtype=torch.float64), beta=1.0)
    clouds = list(torch.randn(8, 32, 6, generator=seeded(), dtype=torch.float64))
    finding = measure_averaging(recording_of([A], clouds), seeded()).finding()
    assert finding.verdict is None
    assert finding.text.startswith("Not measured")


@pytest.fixture(scope="module")
def minilm_averaging(encoder):
    with pytest.warns(UserWarning, match="truncated"):
        recording = record_encoder(*encoder, [t for t in topics() if len(t) > 900][:16], max_length=128)
    steps = []
    averaging = measure_averaging(recording, seeded(), progress=steps.append)
    assert steps == sorted(steps)
    assert steps[-1] == 1
    return averaging


def test_layers_and_heads_of_minilm(minilm_averaging):
    """b by layer, and the agreement of both predictions with the heads' b, as measured independently."""
    finding = minilm_averaging.finding()
    numbers = finding.numbers
    assert numbers["exponent"] == pytest.approx([0.25, 0.18, 0.20, 0.29, 0.32, 0.30], abs=0.04)
    assert numbers["logits_b"]["correlation"] > 0.93
    assert numbers["logits_b"]["rms_error"] < 0.045
    assert numbers["predicted_b"]["correlation"] > 0.85
    assert numbers["predicted_b"]["rms_error"] < 0.07
    assert numbers["rank_correlation_with_logit_sd"] < -0.85
    for baseline in ("mean_b", "layer_mean_b", "permuted_heads"):
        assert numbers[baseline]["rms_error"] > 2 * numbers["logits_b"]["rms_error"]
    assert numbers["permuted_heads"]["correlation"] < 0.3
    assert all(own > other for own, other in zip(numbers["continuation"], numbers["other_text"]))
    assert max(numbers["continuation"]) < 0
    assert finding.verdict == "partly"
    assert "no layer" in finding.text
    assert len(finding.text.split()) <= 40


def test_agreement_is_that_of_the_rows(minilm_averaging):
    numbers = minilm_averaging.finding().numbers
    rows = numbers["heads"]
    b, layer = (np.array([row[name] for row in rows]) for name in ("b", "layer"))
    for name in ("predicted_b", "logits_b"):
        predicted = np.array([row[name] for row in rows])
        assert numbers[name]["correlation"] == pytest.approx(np.corrcoef(b, predicted)[0, 1])
        assert numbers[name]["rms_error"] == pytest.approx(np.sqrt(np.mean((b - predicted) ** 2)))
    assert numbers["mean_b"] == {"correlation": None, "rms_error": pytest.approx(b.std())}
    means = np.array([b[layer == i].mean() for i in layer])
    assert numbers["layer_mean_b"]["rms_error"] == pytest.approx(np.sqrt(np.mean((b - means) ** 2)))


def test_it_is_repeatable_under_any_default_dtype():
    recording, findings = exchangeable(0.05, texts=2), []
    try:
        for dtype in (torch.float32, torch.float64, torch.float16):
            torch.set_default_dtype(dtype)
            findings.append(measure_averaging(recording, seeded(7)).finding())
    finally:
        torch.set_default_dtype(torch.float32)
    assert findings[0] == findings[1] == findings[2]


@pytest.mark.slow
def test_long_texts_of_minilm(encoder):
    texts = [t for t in topics() if len(t) > 2048][:16]
    with pytest.warns(UserWarning, match="truncated"):
        recording = record_encoder(*encoder, texts, max_length=512)
    numbers = measure_averaging(recording, seeded()).finding().numbers
    assert numbers["exponent"] == pytest.approx([0.18, 0.17, 0.20, 0.28, 0.27, 0.29], abs=0.045)
    assert numbers["logits_b"]["correlation"] > 0.95
    assert numbers["logits_b"]["rms_error"] < 0.035
