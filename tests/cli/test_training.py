"""attn-flow train as a user runs it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from attn_flow import Trajectory
from attn_flow.cli.app import app
from attn_flow.train import load

SMALL = ["--tokens", "6", "--dim", "6", "--steps", "3", "--batch", "8", "--updates", "6", "--quiet"]


def run(*words: str, code: int = 0) -> str:
    done = CliRunner().invoke(app, ["train", *words])
    assert done.exit_code == code, done.output + repr(done.exception)
    return done.stdout if code == 0 else " ".join(done.output.split())


def test_train_writes_what_was_learned_and_resumes(tmp_path: Path) -> None:
    out = tmp_path / "run"
    numbers = json.loads(run("majority", *SMALL, "--learn-beta", "--out", str(out), "--json"))
    assert numbers["updates"] == 6
    assert len(numbers["learned"]["layers"]) == 1
    layer = numbers["learned"]["layers"][0]
    assert layer["beta"] == pytest.approx(numbers["beta"][0])
    assert layer["beta"] != [4.0]
    assert layer["limit"]["case"] in ("fixed", "rotating", "jordan")
    assert len(layer["w2"]["curve"]) == 4

    names = {"checkpoint.safetensors", "log.jsonl", "run.json", "trajectory.safetensors", "training.png"}
    assert {p.name for p in out.iterdir()} == names
    path = Trajectory.load(out / "trajectory.safetensors")
    assert path.x.shape == (4, 16, 6, 6)
    assert "accuracy on held-out inputs" in run("majority", *SMALL, "--learn-beta", "--out", str(out))
    assert json.loads((out / "run.json").read_text())["resumed_at"] == 6
    assert "learn_beta" in run("majority", *SMALL, "--out", str(out), code=2)  # another recipe
    assert load(out).layers[0].learn_beta


def test_labelled_texts_from_a_file(tmp_path: Path) -> None:
    rows = [f"{('no', 'yes')[i % 2]}\tword{i % 5} {('bad', 'good')[i % 2]} word{i % 7} {i}" for i in range(60)]
    (tmp_path / "t.tsv").write_text("\n".join(rows))
    options = [*SMALL, "--file", str(tmp_path / "t.tsv"), "--out", str(tmp_path / "run"), "--json"]
    options[options.index("--updates") + 1] = "60"
    assert json.loads(run("text", *options, "--lr", "0.03", "--warmup", "5"))["accuracy"] == 1.0
    done = CliRunner().invoke(app, ["apply", str(tmp_path / "run"), "word1 good word2", "word3 bad", "--json"])
    assert [answer["label"] for answer in json.loads(done.stdout)] == ["yes", "no"]
    (tmp_path / "t.tsv").write_text("\n".join([*rows, "only a label"]))
    assert "row 61: got" in run("text", *options, code=2)
