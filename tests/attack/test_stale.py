"""A folder of results and inputs that changed in one respect: the run is refused with what differs and nothing is lost,
or it is computed anew and nothing of the earlier run is left."""

import json
from pathlib import Path

import pytest
from attack.runs import TEXTS, whole_files
from typer.testing import CliRunner

from attn_flow.cli.app import app
from attn_flow.hooks import corpus
from attn_flow.hooks.demo import tiny_bert


def invoke(*words: str) -> tuple[int, str]:
    done = CliRunner().invoke(app, list(words))
    return done.exit_code, " ".join((done.stderr + repr(done.exception) * (done.exit_code == 1)).split())


# --- record ----------------------------------------------------------------------------------------------------------


def recorded(folder: Path, field: str) -> tuple[int, str]:
    words = ["record", "minilm", "--texts", str(folder / "texts.jsonl"), "--field", field, "--batch", "2", "--quiet"]
    return invoke(*words, "--out", str(folder / "out"))


def written(folder: Path, first: list[str], second: list[str]) -> None:
    lines = [json.dumps({"first": a, "second": b}) for a, b in zip(first, second)]
    (folder / "texts.jsonl").write_text("\n".join(lines))


@pytest.mark.parametrize("change", ["field", "text", "source"])
def test_record_over_other_texts_or_by_other_code_is_refused(change, tmp_path, monkeypatch):
    """Only --field, only one word of one text, only the package's own code."""
    written(tmp_path, TEXTS[:6], TEXTS[6:12])
    assert recorded(tmp_path, "first")[0] == 0
    assert recorded(tmp_path, "first")[0] == 0  # nothing changed
    before = {file.name: file.read_bytes() for file in (tmp_path / "out").iterdir()}
    with monkeypatch.context() as changed:
        if change == "field":
            code, words = recorded(tmp_path, "second")
        elif change == "text":
            written(tmp_path, [*TEXTS[:5], TEXTS[5].replace("nearest", "farthest")], TEXTS[6:12])
            code, words = recorded(tmp_path, "first")
        else:
            there = corpus.versions()
            changed.setattr(corpus, "versions", lambda: there | {"source": "another"})
            code, words = recorded(tmp_path, "first")
    expected = "with other versions; use another" if change == "source" else "holds other texts"
    assert (code, expected in words) == (2, True), words
    assert {file.name: file.read_bytes() for file in (tmp_path / "out").iterdir()} == before


@pytest.fixture(scope="module")
def encoder(tmp_path_factory) -> Path:
    """A folder of a tiny encoder with its tokenizer, and a text file."""
    folder = tmp_path_factory.mktemp("encoder")
    for part in tiny_bert(seed=1):  # `@random` draws with seed 0
        part.save_pretrained(folder / "bert")
    (folder / "texts.txt").write_text("\n".join(["a b c d e f g h", "b c d a h g f e", "h h a b c", "e f g a"] * 2))
    return folder


RECORDS = {
    "--max-length=5": "max_length",
    "--batch=3": "batch",
    "--dtype=float64": "dtype, weights",
    "@beta_factor=2": "changes",
    "@random": "weights",
}


@pytest.mark.parametrize("change", RECORDS)
def test_record_with_another_option_is_refused(change, encoder, tmp_path):
    model, out = str(encoder / "bert"), tmp_path / "out"
    common = ["--texts", str(encoder / "texts.txt"), "--batch", "2", "--max-unknown", "1", "--quiet", "--out", str(out)]
    assert invoke("record", model, *common) == (0, "")
    before = {file.name: file.read_bytes() for file in out.iterdir()}
    code, words = invoke(
        "record", model + change * change.startswith("@"), *common, *[change] * change.startswith("--")
    )
    assert code == 2
    assert f"holds a recording with other {RECORDS[change]}; use another folder" in words, words
    assert {file.name: file.read_bytes() for file in out.iterdir()} == before


# --- train -----------------------------------------------------------------------------------------------------------

TRAIN = ["train", "majority", "--quiet", "--updates", "3", "--dim", "4"]
TRAIN += ["--batch", "4", "--tokens", "4", "--out"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("trained") / "out"
    assert invoke(*TRAIN, str(out)) == (0, "")
    return out


@pytest.mark.parametrize("option", ["--depth=2", "--beta=3", "--learn-beta", "--lr=0.5", "--seed=1"])
def test_train_with_another_option_is_refused(option, trained):
    before = {file.name: file.read_bytes() for file in trained.iterdir()}
    code, message = invoke(*TRAIN, str(trained), option)
    name = option.strip("-").partition("=")[0].replace("-", "_")
    assert (code, "was trained with other options: " in message, f"{name} " in message) == (2, True, True), message
    assert {file.name: file.read_bytes() for file in trained.iterdir()} == before


# --- simulate --------------------------------------------------------------------------------------------------------


def test_simulate_leaves_nothing_of_an_earlier_run(tmp_path):
    """Other betas and matrices: the folder is that of a fresh run, file by file."""
    words = ["simulate", "--tokens", "6", "--t", "1", "--quiet", "--beta"]
    first, second = ["--G", "3,0;0,1", "--V", "1,0;0,2"], ["--G", "2,0;0,1", "--V", "1,0;0,1"]
    assert invoke(*words, "5,20", *first, "--out", str(tmp_path / "used"))[0] == 0
    mine = tmp_path / "used" / "simulate.sh"
    mine.write_text("whose?")
    code, told = invoke(*words, "7,9", *second, "--out", str(tmp_path / "used"))
    assert code == 0
    assert "has an earlier run; removed: clouds_beta_20.png, clouds_beta_5.png, path_beta_20" in " ".join(told.split())
    assert mine.read_text() == "whose?"
    mine.unlink()
    assert invoke(*words, "7,9", *second, "--out", str(tmp_path / "fresh"))[0] == 0
    assert whole_files(tmp_path / "used") == whole_files(tmp_path / "fresh")
    one, other = (json.loads((tmp_path / name / "simulate.json").read_text()) for name in ("used", "fresh"))
    assert one == other


def test_a_simulation_that_is_refused_leaves_the_earlier_one(tmp_path):
    words = ["simulate", "--G", "3,0;0,1", "--V", "1,0;0,2", "--tokens", "6", "--t", "1", "--quiet", "--out"]
    assert invoke(*words, str(tmp_path / "out"), "--beta", "5")[0] == 0
    before = {file.name: file.read_bytes() for file in (tmp_path / "out").iterdir()}
    for wrong in (["--h", "nan"], ["--t", "-1"], ["--step", "rk5"], ["--beta", "5,-1"]):
        assert invoke(*words, str(tmp_path / "out"), *wrong)[0] == 2
    assert {file.name: file.read_bytes() for file in (tmp_path / "out").iterdir()} == before
