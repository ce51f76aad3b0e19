"""A folder of results beside inputs that changed in one respect only: refused with what differs, nothing lost, or
computed anew, so that nothing of the other run is left in it."""

import json
from pathlib import Path

import pytest
import torch
from attack.runs import TEXTS, whole_files
from typer.testing import CliRunner

from attn_flow.cli.entry import app
from attn_flow.cli.training import CHANGEABLE
from attn_flow.hooks import corpus
from attn_flow.hooks.demo import tiny_bert
from attn_flow.probe import run as probing
from attn_flow.train import checkpoint


def said(*words: str) -> tuple[int, str]:
    done = CliRunner().invoke(app, list(words))
    return done.exit_code, " ".join((done.stderr + repr(done.exception) * (done.exit_code == 1)).split())


# --- record ----------------------------------------------------------------------------------------------------------


def recorded(folder: Path, field: str) -> tuple[int, str]:
    words = ["record", "minilm", "--texts", str(folder / "texts.jsonl"), "--field", field, "--batch", "2", "--quiet"]
    return said(*words, "--out", str(folder / "out"))


def written(folder: Path, first: list[str], second: list[str]) -> None:
    lines = [json.dumps({"first": a, "second": b}) for a, b in zip(first, second)]
    (folder / "texts.jsonl").write_text("\n".join(lines))


@pytest.mark.parametrize("change", ["field", "text", "source"])
def test_record_over_other_texts_or_by_other_code_is_refused(change, tmp_path, monkeypatch):
    """Only --field, only one word of one text, only the package's own code."""
    written(tmp_path, TEXTS[:6], TEXTS[6:12])
    assert recorded(tmp_path, "first")[0] == 0
    file = tmp_path / "out" / "statistics.safetensors"
    assert recorded(tmp_path, "first")[0] == 0  # nothing changed
    before = file.read_bytes()
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
    expected = "of this one's source ({'source'" if change == "source" else "holds a run over other texts (they differ"
    assert (code, expected in words) == (2, True), words
    assert "--again" in words
    assert file.read_bytes() == before


@pytest.fixture(scope="module")
def encoder(tmp_path_factory) -> Path:
    """A folder of a tiny encoder with its tokenizer, and a text file."""
    folder = tmp_path_factory.mktemp("encoder")
    for part in tiny_bert(seed=1):  # `@random` draws with seed 0
        part.save_pretrained(folder / "bert")
    (folder / "texts.txt").write_text("\n".join(["a b c d e f g h", "b c d a h g f e", "h h a b c", "e f g a"] * 2))
    return folder


RECORDS = {
    "--max-length=5": "max_length (None there, 5 now)",
    "--batch=3": "batch (2 there, 3 now)",
    "--dtype=float64": "the dtype ('float32' there",
    "--states": "states (False there, True now)",
    "@beta_factor=2": "what is wrapped or scaled",
    "@random": "the weights",
}


@pytest.mark.parametrize("change", RECORDS)
def test_record_with_another_option_is_refused(change, encoder, tmp_path):
    model, out = str(encoder / "bert"), tmp_path / "out"
    common = ["--texts", str(encoder / "texts.txt"), "--batch", "2", "--max-unknown", "1", "--quiet", "--out", str(out)]
    assert said("record", model, *common) == (0, "")
    before = {file.name: file.read_bytes() for file in out.iterdir()}
    code, words = said("record", model + change * change.startswith("@"), *common, *[change] * change.startswith("--"))
    assert code == 2
    assert "holds another run; what differs: " in words
    assert RECORDS[change] in words, words
    assert {file.name: file.read_bytes() for file in out.iterdir()} == before


def test_record_takes_no_texts_of_its_own_for_a_strangers_model(encoder, tmp_path):
    code, words = said("record", str(encoder / "bert"), "--out", str(tmp_path / "out"))
    assert (code, "which texts? Give --texts FILE" in words) == (2, True), words
    assert not (tmp_path / "out").exists()


# --- probe -----------------------------------------------------------------------------------------------------------


LONG = [" ".join(letters) for letters in ("abcdefgh" * 3 + "ab", "bcdahgfe" * 3 + "ef")]


def key(**changed: object) -> str:
    model, tokenizer = tiny_bert()
    asked: dict = {"texts": LONG, "nulls": ["rotated"], "max_length": 30} | changed
    if "dtype" in asked:
        model = model.to(asked.pop("dtype"))
    if "weight" in asked:
        with torch.no_grad():
            next(iter(model.parameters()))[-1, -1] += asked.pop("weight")
    return probing.inquire(model, tokenizer, **asked).key


CHANGES: dict[str, dict[str, object]] = {
    "one word": {"texts": [LONG[0], LONG[1][:-1] + "a"]},
    "the order of texts": {"texts": LONG[::-1]},
    "max_length": {"max_length": 26},
    "batch": {"batch": 1},
    "nulls": {"nulls": []},
    "beta_factor": {"beta_factor": 1.0 + 1e-9},
    "seed": {"seed": 1},
    "transport": {"transport": "geomloss"},
    "dtype": {"dtype": torch.float64},
    "the last weight of a matrix": {"weight": 1e-3},
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_probe_is_another_when_one_thing_changed(change):
    assert key(**CHANGES[change]) != key()


def test_a_probe_is_the_same_when_nothing_changed():
    assert key() == key()


def test_a_probe_of_ready_inputs_looks_at_all_of_them():
    """The same ids with other token types, or with other marks of special tokens."""
    model, tokenizer = tiny_bert()
    inputs = dict(tokenizer(LONG, return_tensors="pt"))
    keys = [probing.inquire(model, inputs, nulls=[]).key]
    inputs["token_type_ids"] = torch.zeros_like(inputs["input_ids"])
    inputs["token_type_ids"][:, -3:] = 1
    keys.append(probing.inquire(model, inputs, nulls=[]).key)
    marks = torch.zeros_like(inputs["input_ids"])
    marks[:, 0] = 1
    keys.append(probing.inquire(model, inputs | {"special_tokens_mask": marks}, nulls=[]).key)
    assert len(set(keys)) == 3


# --- train -----------------------------------------------------------------------------------------------------------

OTHER = {
    "tokens": "5",
    "dim": "6",
    "heads": "2",
    "head_dim": "3",
    "depth": "2",
    "horizon": "2",
    "steps": "3",
    "step": "euler",
    "geometry": "euclidean",
    "placement": "pre",
    "ffn": "3",
    "noise": "0.1",
    "beta": "3",
    "beta_mode": "learned",
    "beta_start": "2",
    "batch": "6",
    "lr": "0.5",
    "weight_decay": "0.5",
    "warmup": "1",
    "clip": "2",
    "seed": "1",
}
FLAGS = {"shared": "--shared", "checkpointing": "--checkpointing", "amp": "--no-amp"}
TRAIN = ["train", "majority", "--no-learned", "--no-tensorboard", "--quiet", "--updates", "3", "--dim", "4"]
TRAIN += ["--batch", "4", "--tokens", "4", "--out"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("trained") / "out"
    assert said(*TRAIN, str(out)) == (0, "")
    return out


def test_every_option_of_train_is_changed_here():
    assert {field.name for field in CHANGEABLE} == {*OTHER, *FLAGS, "file", "updates"}


@pytest.mark.parametrize("name", [*OTHER, *FLAGS])
def test_train_with_another_option_is_refused(name, trained):
    before = {file.name: file.read_bytes() for file in trained.iterdir()}
    extra = [FLAGS[name]] if name in FLAGS else [f"--{name.replace('_', '-')}", OTHER[name]]
    extra += ["--geometry", "euclidean"] * (name == "placement")
    code, words = said(*TRAIN, str(trained), *extra)
    assert (code, "was trained with other options: " in words, f"{name} " in words) == (2, True, True), words
    assert {file.name: file.read_bytes() for file in trained.iterdir()} == before


def test_train_by_other_code_is_refused(trained, monkeypatch):
    there = checkpoint.versions()
    monkeypatch.setattr(checkpoint, "versions", lambda: there | {"source": "another", "torch": "3.0"})
    code, words = said(*TRAIN, str(trained), "--updates", "4")
    assert code == 2
    assert f"was written by other code: source {there['source']} (there) and another (now); torch" in words
    assert "Use another --out, or move it away." in words


# --- simulate --------------------------------------------------------------------------------------------------------


def test_simulate_leaves_nothing_of_an_earlier_run(tmp_path):
    """Other betas and matrices: the folder is that of a fresh run, file by file."""
    words = ["simulate", "--tokens", "6", "--t", "1", "--quiet", "--beta"]
    first, second = ["--G", "3,0;0,1", "--V", "1,0;0,2"], ["--G", "2,0;0,1", "--V", "1,0;0,1"]
    assert said(*words, "5,20", *first, "--out", str(tmp_path / "used"))[0] == 0
    mine = tmp_path / "used" / "simulate.sh"
    mine.write_text("whose?")
    code, told = said(*words, "7,9", *second, "--out", str(tmp_path / "used"))
    assert code == 0
    assert "held an earlier run; removed: clouds_beta_20.png, clouds_beta_5.png, path_beta_20" in " ".join(told.split())
    assert mine.read_text() == "whose?"
    mine.unlink()
    assert said(*words, "7,9", *second, "--out", str(tmp_path / "fresh"))[0] == 0
    assert whole_files(tmp_path / "used") == whole_files(tmp_path / "fresh")
    one, other = (json.loads((tmp_path / name / "simulate.json").read_text()) for name in ("used", "fresh"))
    assert one == other


def test_a_simulation_that_is_refused_leaves_the_earlier_one(tmp_path):
    words = ["simulate", "--G", "3,0;0,1", "--V", "1,0;0,2", "--tokens", "6", "--t", "1", "--quiet", "--out"]
    assert said(*words, str(tmp_path / "out"), "--beta", "5")[0] == 0
    before = {file.name: file.read_bytes() for file in (tmp_path / "out").iterdir()}
    for wrong in (["--h", "nan"], ["--t", "-1"], ["--step", "rk5"], ["--beta", "5,-1"], ["--dim", "4"]):
        assert said(*words, str(tmp_path / "out"), *wrong)[0] == 2
    assert {file.name: file.read_bytes() for file in (tmp_path / "out").iterdir()} == before
