"""The probe over many encoders: one small model in full, what is missing is named, and a real one where fetched."""

import json
from pathlib import Path

import pytest
import torch
from matplotlib.figure import Figure

from attn_flow.base.files import to_plain
from attn_flow.experiments import zoo
from attn_flow.experiments.encoders import ZOO, fetched
from attn_flow.experiments.zoo_figure import COLUMNS, best_null, table_rows
from attn_flow.hooks.demo import tiny_bert
from attn_flow.probe.propagation import propagate


@pytest.fixture(scope="module")
def numbers() -> dict:
    model, tokenizer = tiny_bert()
    generator = torch.Generator().manual_seed(0)
    texts = [" ".join("abcdefghij"[i] for i in torch.randint(10, (26,), generator=generator)) for _ in range(3)]
    run = to_plain(zoo.one_model(model, tokenizer, texts, length=28, seed=0))
    carried = propagate(model, tokenizer, texts, max_length=28)
    assert run["depth"]["closure"]["embedding_cosine"] == pytest.approx(
        float(carried.embedding_cosine.mean()), abs=1e-6
    )
    models = {"minilm": run, "sre": run}
    asked = {"texts": 3, "length": 28, "deeper": 4, "seed": 0, "missing": ["mpnet"]}
    return {**asked, "models": models, "claims": zoo._claims(models)}


def test_the_last_level_is_the_embedding(numbers: dict) -> None:
    run = numbers["models"]["minilm"]
    for found in run["depth"].values():
        assert found["cosine"][-1] == pytest.approx(found["embedding_cosine"], abs=1e-5)
    assert len(run["regime"]["pairwise_cosine"]) == run["layers"] + 1 == 3
    assert len(run["explained"]["closure"]) == 2
    assert run["untrained"]["depth"].keys() == {"closure", "mean_output"}


def test_the_best_null_is_the_highest_that_is_no_closure(numbers: dict) -> None:
    run = numbers["models"]["minilm"]
    name, height = best_null(run)
    others = {n: v["embedding_cosine"] for n, v in run["depth"].items()}
    assert height == others[name]
    assert name not in ("closure", "gaussian", "cross_fitted_closure")
    assert height == max(v for n, v in others.items() if n not in ("closure", "gaussian", "cross_fitted_closure"))


def test_claims_can_fail(numbers: dict) -> None:
    """With the closure and a null exchanged nothing leads."""
    run = json.loads(json.dumps(numbers["models"]["minilm"]))
    run["explained"]["closure"], run["explained"]["rotated"] = run["explained"]["rotated"], [0.99, 0.99]
    run["depth"]["closure"]["embedding_cosine"] = -1.0
    held = {c["claim"]: c["holds"] for c in zoo._claims({"minilm": run})}
    assert not any(holds for words, holds in held.items() if words.startswith("all: the closure"))
    assert not any(holds for words, holds in held.items() if words.startswith("all: through depth"))


def test_table_and_figure(numbers: dict) -> None:
    rows = table_rows(numbers)
    assert [row[0] for row in rows] == ["minilm", "sre"]
    assert all(len(row) == len(COLUMNS) for row in rows)
    figure = zoo.plot(json.loads(json.dumps(to_plain(numbers), allow_nan=False)))
    assert isinstance(figure, Figure)
    assert "mpnet" in figure._supxlabel.get_text()


def test_encoders_that_are_not_there_are_named(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("ATTN_FLOW_CACHE", str(tmp_path))
    numbers = zoo.compute(quick=False)
    assert numbers["missing"] == list(ZOO)
    assert (numbers["models"], numbers["claims"]) == ({}, [])
    assert isinstance(zoo.plot(numbers), Figure)


@pytest.mark.slow
def test_real_encoders() -> None:
    for name in ("sapiens", "rxnmapper"):
        if fetched(name) is None:
            pytest.skip(f"{name} is not fetched: attn-flow encoders get {name}")
    numbers = zoo.compute(quick=True)
    held = {c["claim"]: c["holds"] for c in numbers["claims"]}
    assert all(holds for words, holds in held.items() if words.startswith(("all", "rxnmapper"))), held
