"""The four questions over many encoders: table, figure, what is missing, and a real encoder where it was fetched."""

import json
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
    return {**about, "encoders": encoders, "claims": questions._claims(encoders)}


def test_table_and_figure(numbers: dict) -> None:
    rows = questions.table_rows(numbers)
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
    assert not any(claim["holds"] for claim in questions._claims({"a": result}) if "averag" not in claim["claim"])


def test_encoders_that_were_not_fetched_are_named(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("ATTN_FLOW_CACHE", str(tmp_path))
    numbers = questions.compute()
    assert numbers["missing"] == list(ZOO)
    assert (numbers["encoders"], numbers["claims"]) == ({}, [])
    assert isinstance(questions.plot(numbers), Figure)


@pytest.mark.slow
def test_a_real_encoder(tmp_path: Path) -> None:
    if fetched("sapiens") is None:
        pytest.skip("sapiens is not fetched: attn-flow encoders get sapiens")
    numbers = questions.compute(quick=True, parts=tmp_path)
    assert numbers == questions.compute(quick=True, parts=tmp_path)  # from its part
    assert len(questions.heads_of(numbers["encoders"]["sapiens"])) == 32
