"""What a probe returns: findings, tables, JSON and files."""

import json
import math

import pytest
import torch

from attn_flow.probe import ProbeResult
from attn_flow.probe.clusters import BASELINES
from attn_flow.probe.findings import QUESTIONS, bootstrap, span
from attn_flow.probe.tokens import Evolution

VERDICTS = {"supported", "partly", "not supported", None}
METHODS = {"foreign_queries", "own_attention", "keys", "top_tokens", "random_clusters", "random_tokens"}


def numbers(value) -> list[float]:
    if isinstance(value, dict):
        return [x for entry in value.values() for x in numbers(entry)]
    if isinstance(value, list):
        return [x for entry in value for x in numbers(entry)]
    return [value] if isinstance(value, float) else []


def test_json_has_the_promised_names(result) -> None:
    content = json.loads(json.dumps(result.as_json(), allow_nan=False))
    assert list(content["questions"]) == ["averaging", "clusters", "temperature", "limit"]
    for question in content["questions"].values():
        assert question["verdict"] in VERDICTS
        assert question["text"].endswith(".")
        assert len(question["text"].split()) <= 40
    averaging, clusters, _, limit = (question["numbers"] for question in content["questions"].values())
    assert len(averaging["exponent"]) == 6
    assert len(averaging["heads"]) == 72
    assert {"layer", "head", "b", "logit_sd", "predicted_b", "logits_b"} <= averaging["heads"][0].keys()
    assert clusters["curve"].keys() >= METHODS
    for by_size in clusters["curve"].values():
        for row in by_size.values():
            assert {"embedding_cosine", "w2", "explained"} <= row.keys()
            assert len(row["explained"]) == 6
    assert len(limit["p_value"]) == len(limit["fraction"]) == 6
    assert all(math.isfinite(x) for x in numbers(content))


def test_a_table_has_one_row_per_head(result) -> None:
    heads = result.to_frame()
    assert len(heads) == 72
    assert {"layer", "head", "b", "logit_sd", "predicted_b", "logits_b", "entropy", "phase"} <= set(heads.columns)
    assert heads[["layer", "head"]].drop_duplicates().shape == (72, 2)


def test_a_result_is_read_as_it_was_saved(result, tmp_path) -> None:
    result.save(tmp_path)
    again = ProbeResult.load(tmp_path)
    assert again.as_json() == result.as_json()
    assert again.tokens == result.tokens
    name = "reading.weights"
    assert torch.equal(again.measurements[name], result.measurements[name])
    assert len(repr(result)) < 300


def test_damaged_files_are_refused_in_a_sentence(result, tmp_path) -> None:
    with pytest.raises(ValueError, match="no finished probe"):
        ProbeResult.load(tmp_path)
    result.save(tmp_path)
    path = tmp_path / "probe.safetensors"
    content = bytearray(path.read_bytes())
    content[-5] ^= 1
    path.write_bytes(content)
    with pytest.raises(ValueError, match="is damaged"):
        ProbeResult.load(tmp_path)
    (tmp_path / "probe.json").write_text("{")
    with pytest.raises(ValueError, match=r"probe.json"):
        ProbeResult.load(tmp_path)
    result.save(tmp_path)
    (tmp_path / "probe.json").write_text(json.dumps({"about": {}, "tokens": []}))
    with pytest.raises(ValueError, match="of another version"):
        ProbeResult.load(tmp_path)


def test_every_question_has_its_answer(result) -> None:
    assert result.findings.keys() == QUESTIONS.keys()
    assert result.findings["temperature"].verdict is None
    assert all(result.findings[name].verdict for name in ("averaging", "clusters", "limit"))  # eight texts are enough


def test_the_table_has_values_with_intervals_and_the_best_baseline(result) -> None:
    averaging, clusters, temperature, limit = (finding.numbers for finding in result.findings.values())
    b = sorted(zip(*(averaging[key] for key in ("exponent", "exponent_low", "exponent_high"))))
    least, most = (f"{mean:.2f} ({low:.2f} to {high:.2f})" for mean, low, high in (b[0], b[-1]))
    phases = temperature["phases"]
    needed = {name: size for name, size in clusters["clusters_for_w2_goal"].items() if size is not None}
    best = min((name for name in BASELINES if name in needed), key=needed.get)
    agreement, rotated = (sum(limit[key]) / 6 for key in ("agreement", "rotated"))
    others = {"rotated weights": rotated, **{key.replace("_", " "): z for key, z in limit["rivals"].items()}}
    rival = max(others, key=others.get)
    value = {name: finding.value for name, finding in result.findings.items()}
    baseline = {name: finding.baseline for name, finding in result.findings.items()}
    assert value["averaging"] == f"b = {least} to {most} by layer"
    assert value["clusters"].startswith(f"{needed['foreign_queries']:.0f} (")
    assert value["temperature"] == f"{phases['warm']} warm, {phases['middle']} middle, {phases['frozen']} frozen"
    assert value["limit"] == f"p = {limit['global_p']:.2g}; agreement {agreement:.2f}"
    assert baseline["clusters"].startswith(best.replace("_", " "))
    assert baseline["limit"] == f"{rival}: {others[rival]:.2f}"


def test_sentences_follow_the_numbers(result) -> None:
    averaging, clusters, temperature, limit = result.findings.values()
    b = averaging.numbers["exponent"]
    assert f"b = {min(b):.2f} to {max(b):.2f} by layer" in averaging.text
    assert f"{averaging.numbers['share_of_heads']:.0%} of heads" in averaging.text
    needed = clusters.numbers["clusters_for_w2_goal"]["foreign_queries"]
    assert f"{needed:.0f} clusters a head ({needed / 32:.0%} of 32 tokens)" in clusters.text
    for phase, count in temperature.numbers["phases"].items():
        assert (f"{count} are {phase}" in temperature.text) or (f"{count} is {phase}" in temperature.text) or not count
    percent = sum(limit.numbers["percent_of_distance"]) / 6
    assert f"{'shrinks' if percent >= 0 else 'grows'} by {abs(percent):.1f}% a layer" in limit.text


def test_the_interval_covers_the_mean_as_often_as_it_says() -> None:
    """500 samples of 30 normal numbers: the 95% interval covers 0 in 90% to 99% of them."""
    values = torch.randn(500, 30, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    interval = bootstrap(values)
    share = float(((interval.low < 0) & (interval.high > 0)).double().mean())
    assert 0.9 < share < 0.99
    assert bootstrap(values[:, :1]).low.isnan().all()
    one_is_known = torch.tensor([0.5] + 9 * [math.nan])
    assert (bootstrap(one_is_known).mean, bootstrap(one_is_known).low.isnan()) == (0.5, True)
    assert span(torch.tensor([math.nan])) == "not defined"


@pytest.mark.parametrize(
    ("centred", "rank", "words"),
    [(0.0, 70.0, "gain a common direction and do not gather"), (0.5, 70.0, "gather"), (0.0, 10.0, "loses dimensions")],
)
def test_a_common_direction_is_not_called_gathering(centred, rank, words) -> None:
    path = lambda first, last: torch.tensor([[first, first + 0.001], [last, last + 0.001]], dtype=torch.float64)
    evolution = Evolution(path(0.1, 0.35), path(0.0, centred), path(72.0, rank))
    assert words in evolution.finding().text
    alone = Evolution(*(values[:, :1] for values in vars(evolution).values()))
    assert alone.finding().text.startswith("One text does not say")


def test_the_mean_cosine_of_a_text_leaves_the_diagonal_out(result, encoder, texts) -> None:
    from attn_flow.probe.encoders import record_encoder

    x = record_encoder(*encoder, texts[:1], max_length=32).states[2][0].double()
    x = torch.nn.functional.normalize(x, dim=-1)
    pairs = [float(x[i] @ x[j]) for i in range(len(x)) for j in range(len(x)) if i != j]
    assert float(result.measurements["evolution.cosine"][2, 0]) == pytest.approx(sum(pairs) / len(pairs), abs=1e-5)
    centred = torch.nn.functional.normalize(x - x.mean(0), dim=-1)
    cosine = (centred @ centred.mT).fill_diagonal_(0.0).sum() / (len(x) * (len(x) - 1))
    assert float(result.measurements["evolution.centred_cosine"][2, 0]) == pytest.approx(float(cosine), abs=1e-5)
