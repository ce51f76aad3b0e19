"""Question 2 on the real MiniLM with short texts, and its verdict on numbers made by hand."""

from dataclasses import replace

import pytest
import torch
from encoder_zoo import long_inputs, tiny

from attn_flow.base.files import to_plain
from attn_flow.hooks.demo import minilm, topics
from attn_flow.probe.clusters import (
    BASELINES,
    CURVES,
    METHODS,
    SINGLE,
    Clusters,
    default_sizes,
    measure_clusters,
    size_for_w2,
)
from attn_flow.probe.encoders import record_encoder
from attn_flow.probe.recording import exact


def prepare(texts: int, max_length: int):
    model, tokenizer = minilm()
    pages = [text for text in topics() if len(text) > 900][:texts]
    with pytest.warns(UserWarning, match="truncated"):
        return record_encoder(model, tokenizer, pages, max_length=max_length)


@pytest.fixture(scope="module")
def measured() -> Clusters:
    return measure_clusters(prepare(4, 64), torch.Generator().manual_seed(0), sizes=[8, 32], texts=3)


def test_shapes_and_order(measured):
    assert measured.w2.shape == measured.embedding_cosine.shape == (len(METHODS), 2, 3)
    assert measured.explained.shape == (len(METHODS), 2, 6, 3)
    assert measured.short_w2.shape == (2, 3, 3)
    assert measured.lengths.tolist() == [64] * 3
    assert measured.short_lengths.tolist() == [[32] * 3, [16] * 3]
    row = lambda name: measured.w2[list(METHODS).index(name)].mean(-1)
    for name in CURVES:  # more clusters are better, and those found by queries beat chance
        assert float(row(name)[1]) < float(row(name)[0])
    for name in ("foreign_queries", "own_attention"):
        assert bool((row(name) < row("random_clusters")).all())
        assert bool((row(name) < row("random_tokens")).all())
    for name in SINGLE:  # the second size only
        assert row(name).isnan().tolist() == [True, False]
    assert float(row("foreign_queries_fitted")[1]) < float(row("foreign_queries")[1])


def test_numbers_are_plain_and_complete(measured):
    finding = measured.finding()
    assert finding.verdict is None
    assert "3 of 8 texts" in finding.text
    curve = finding.numbers["curve"]
    assert set(curve) == set(METHODS)
    entry = curve["foreign_queries"]["8"]
    m = list(METHODS).index("foreign_queries")
    assert entry["w2"] == pytest.approx(float(measured.w2[m, 0].mean()))
    assert entry["embedding_cosine"] == pytest.approx(float(measured.embedding_cosine[m, 0].mean()))
    assert entry["explained"] == pytest.approx(measured.explained[m, 0].mean(-1).tolist())
    assert finding.numbers["cost_over_attention"]["8"] > 1
    to_plain(finding.numbers)


def test_it_depends_on_the_generator_alone():
    recording = prepare(3, 24)
    shares: list[float] = []
    run = lambda: measure_clusters(recording, torch.Generator().manual_seed(3), sizes=[4], progress=shares.append)
    first, second = run(), run()
    torch.testing.assert_close(vars(first), vars(second), rtol=1e-4, atol=1e-5, equal_nan=True)
    assert shares[-1] == 1.0
    assert shares == sorted(shares[: len(shares) // 2]) * 2
    assert len(first.short_sizes) == 0  # too short to be cut in four
    assert first.finding().numbers["growth_exponent"] is None


def test_explained_is_against_the_mean_output():
    recording = prepare(2, 24)
    mean = recording.explained_by_layer(
        lambda heads, layer, text: recording.outputs[layer][text].mean(0).expand(heads.n, -1)
    )
    torch.testing.assert_close(mean, torch.zeros(6, 2, dtype=torch.float64), rtol=0, atol=1e-6)
    torch.testing.assert_close(
        recording.explained_by_layer(exact), torch.ones(6, 2, dtype=torch.float64), rtol=0, atol=1e-6
    )


@pytest.mark.parametrize("name", ["DeBERTa", "T5 encoder", "ViT", "torch pre-norm"])
def test_as_many_clusters_as_tokens_are_the_encoder(name):
    """Also where positions enter the scores, and in texts of several lengths."""
    model, x = tiny(name), long_inputs(name)
    recording = record_encoder(model, x, None)
    measured = measure_clusters(recording, torch.Generator().manual_seed(0), sizes=[4, 20])
    for method in ("foreign_queries", "own_attention", "keys", "top_tokens", "random_tokens"):
        few, all_tokens = measured.w2[list(METHODS).index(method)].mean(-1).tolist()
        assert all_tokens < 1e-2 < few


# --- the verdict, from numbers made by hand ---


def by_hand(differences: dict[tuple[str, int], float], texts: int = 8, noise: float = 0.01) -> Clusters:
    """Foreign queries at W2 0.4 and 0.2, every baseline 0.1 above them, or as `differences` say."""
    noise_of = lambda seed: noise * torch.randn(texts, generator=torch.Generator().manual_seed(seed)).double()
    base = torch.tensor([0.4, 0.2], dtype=torch.float64)
    w2 = torch.zeros(len(METHODS), 2, texts, dtype=torch.float64)
    for m, name in enumerate(METHODS):
        for s in range(2):
            above = 0.1 if name in BASELINES else 0.0
            w2[m, s] = base[s] + differences.get((name, s), above) + noise_of(m * 2 + s)
    empty = torch.zeros(0, dtype=torch.float64)
    cosine = torch.rand(w2.shape, generator=torch.Generator().manual_seed(1)).double()
    r2 = torch.rand(len(METHODS), 2, 3, texts, generator=torch.Generator().manual_seed(2)).double()
    lengths, sizes = torch.full((texts,), 128), torch.tensor([16, 64])
    return Clusters(sizes, lengths, w2, cosine, r2, empty, empty, empty, empty)


@pytest.mark.parametrize(
    ("differences", "verdict", "sizes"),
    [
        ({}, "supported", [16, 64]),
        ({("keys", 1): 0.0}, "partly", [16]),
        ({("keys", 0): -0.05, ("random_tokens", 1): 0.0}, "not supported", []),
        ({("own_attention", 0): -0.3, ("top_k_oracle", 1): -0.2, ("low_rank", 0): -0.2}, "supported", [16, 64]),
        ({("foreign_queries_fitted", 0): -0.2}, "supported", [16, 64]),
    ],
)
def test_rule(differences, verdict, sizes):
    finding = by_hand(differences).finding()
    assert finding.verdict == verdict
    assert finding.numbers["sizes_that_beat_every_baseline"] == sizes
    assert finding.numbers["clusters_for_w2_goal"]["foreign_queries"] == pytest.approx(32, rel=0.1)
    assert finding.numbers["share_of_tokens"] == pytest.approx(0.25, rel=0.1)
    rivals = {name: finding.numbers["clusters_for_w2_goal"][name] for name in BASELINES}
    best = min((K, name) for name, K in rivals.items() if K is not None)
    assert finding.baseline == f"{best[1].replace('_', ' ')}: {best[0]:.0f}"
    low, high = finding.numbers["share_of_tokens_interval"]
    assert low < finding.numbers["share_of_tokens"] < high
    assert len(finding.text.split()) <= 40


def test_fewer_than_eight_texts_have_no_verdict():
    finding = by_hand({}, texts=7).finding()
    assert finding.verdict is None
    assert len(finding.text.split()) <= 40


def test_methods_that_were_not_run_do_not_decide():
    measured = by_hand({})
    row = list(METHODS).index("pivoted_cholesky")
    w2, cosine = measured.w2.clone(), measured.embedding_cosine.clone()
    w2[row, 0] = cosine[row, 0] = torch.nan
    finding = replace(measured, w2=w2, embedding_cosine=cosine).finding()
    assert finding.verdict == "supported"
    assert list(finding.numbers["curve"]["pivoted_cholesky"]) == ["64"]
    assert finding.numbers["clusters_for_w2_goal"]["pivoted_cholesky"] is None


def test_growth_is_the_slope_of_logarithms():
    """K for W2 0.3 is 32, 8 and 2 for 128, 64 and 32 tokens: an exponent of 2."""
    measured = by_hand({}, noise=0.0)
    curve = torch.tensor([0.4, 0.2], dtype=torch.float64)[:, None].expand(2, 8)
    grown = replace(
        measured,
        short_lengths=torch.tensor([[64] * 8, [32] * 8]),
        short_sizes=torch.tensor([[4, 16], [1, 4]]),
        short_w2=torch.stack([curve, curve]),
    ).finding()
    assert grown.numbers["growth_exponent"] == pytest.approx(2.0)
    assert grown.numbers["growth_exponent_interval"] == pytest.approx([2.0, 2.0])
    assert "n^2.0" in grown.text
    assert len(grown.text.split()) <= 40


def test_unknown_numbers_are_none():
    """Curves that stay far from the goal have no K."""
    measured = by_hand({})
    far = replace(measured, w2=measured.w2 + 1.0).finding()
    assert far.numbers["clusters_for_w2_goal"]["foreign_queries"] is None
    assert far.numbers["share_of_tokens_interval"] is None
    assert "W2 1.2" in far.text


def test_sizes_for_a_distance():
    sizes = torch.tensor([8, 16, 32])
    curves = torch.tensor([[0.5, 0.4, 0.2], [0.28, 0.2, 0.1], [0.9, 0.8, 0.7], [0.2, 0.3, 0.4]])
    expected = [22.63, 8 * 2 ** (-0.02 / 0.08), float("nan"), float("nan")]
    torch.testing.assert_close(
        size_for_w2(sizes, curves), torch.tensor(expected).double(), rtol=1e-3, atol=0, equal_nan=True
    )
    assert default_sizes(16) == [2, 4, 8]
    assert default_sizes(160) == [16, 32, 64]


@pytest.mark.slow
def test_published_table():
    """16 texts of 128 tokens: embedding cosine and last-level W2 with 32 clusters a head in every layer of MiniLM."""
    measured = measure_clusters(prepare(24, 128), torch.Generator().manual_seed(0), sizes=[32], texts=16)
    expected = {
        "own_attention": (0.986, 0.21),
        "foreign_queries": (0.970, 0.27),
        "keys": (0.958, 0.33),
        "top_tokens_and_rest": (0.926, 0.42),
        "top_tokens": (0.890, 0.51),
        "random_clusters": (0.857, 0.54),
        "foreign_queries_fitted": (0.988, 0.18),
    }
    for name, (cosine, w2) in expected.items():
        m = list(METHODS).index(name)
        assert float(measured.embedding_cosine[m, 0].mean()) == pytest.approx(cosine, abs=0.02)
        assert float(measured.w2[m, 0].mean()) == pytest.approx(w2, abs=0.03)
    assert measured.finding().verdict == "supported"
