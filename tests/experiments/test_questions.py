"""The four questions over many encoders: table, figure, what is missing, and a real encoder where it was fetched."""

import json
import statistics
from pathlib import Path

import pytest
from matplotlib.figure import Figure

from attn_flow.experiments.encoders import ZOO, fetched, questions
from attn_flow.hooks.demo import tiny_bert
from attn_flow.probe import probe


@pytest.fixture(scope="module")
def numbers() -> dict:
    texts = ["a b c d e f g h i j " * 2, "j i h g f e d c b a " * 2, "a c e g i b d f h j " * 2]
    result = json.loads(json.dumps(probe(*tiny_bert(), texts).as_json(), allow_nan=False))
    encoders = {"minilm": result, "sre": result}
    about = {"texts": 3, "length": 32, "seed": 0, "missing": ["mpnet"]}
    return {**about, "encoders": encoders, "claims": questions.claims(encoders)}


def test_table_and_figure(numbers: dict) -> None:
    rows = questions.table_rows(numbers["encoders"])
    assert [row[0] for row in rows] == ["minilm", "sre"]
    assert {len(row) for row in rows} == {len(questions.COLUMNS)} == {8}
    figure = questions.plot(numbers)
    assert isinstance(figure, Figure)
    assert "mpnet" in figure._supxlabel.get_text()


def test_claims_can_fail(numbers: dict) -> None:
    result = json.loads(json.dumps(numbers["encoders"]["minilm"]))
    for head in result["questions"]["averaging"]["numbers"]["heads"]:
        head["logits_b"] = 1 - head["b"]
    result["questions"]["limit"]["verdict"] = "supported"
    claims = questions.claims({"a": result})
    assert not any(claim["holds"] for claim in claims if "mean-field rate" not in claim["claim"])


def test_errors_of_heads_are_those_of_the_definitions(numbers: dict) -> None:
    rows = questions.heads_of(numbers["encoders"]["minilm"])
    b, predicted = [row["b"] for row in rows], [row["logits_b"] for row in rows]
    mean = sum(b) / len(b)
    correlation, error, of_mean = questions.head_errors(numbers["encoders"]["minilm"])
    assert correlation == pytest.approx(statistics.correlation(b, predicted))
    assert error == pytest.approx((sum((x - y) ** 2 for x, y in zip(b, predicted)) / len(b)) ** 0.5)
    assert of_mean == pytest.approx((sum((x - mean) ** 2 for x in b) / len(b)) ** 0.5)


def test_clusters_beyond_the_measured_sizes_are_said_so(numbers: dict) -> None:
    result = json.loads(json.dumps(numbers["encoders"]["minilm"]))
    curve = lambda *w2: {"curve": {"foreign_queries": {str(8 * 2**i): {"w2": w} for i, w in enumerate(w2)}}}
    goal = {"clusters_for_w2_goal": {"foreign_queries": 11.6}}
    for found, cell in ((goal, "12"), (curve(0.2, 0.1), "below 8"), (curve(0.9, 0.4), "above 16"), ({}, "not defined")):
        result["questions"]["clusters"]["numbers"] = found
        assert questions.table_rows({"a": result})[0][5].partition(",")[0] == cell


def test_encoders_that_were_not_fetched_are_named(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("ATTN_FLOW_CACHE", str(tmp_path))
    numbers = questions.compute()
    assert numbers["missing"] == list(ZOO)
    assert (numbers["encoders"], numbers["claims"]) == ({}, [])
    assert isinstance(questions.plot(numbers), Figure)


@pytest.mark.slow
def test_a_real_encoder(tmp_path: Path) -> None:
    if fetched("sapiens") is None:
        pytest.skip("sapiens is not fetched: python -m attn_flow.experiments.encoders sapiens")
    numbers = questions.compute(quick=True, parts=tmp_path)
    assert numbers == questions.compute(quick=True, parts=tmp_path)  # from its part
    assert len(questions.heads_of(numbers["encoders"]["sapiens"])) == 32
