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

    names = {"checkpoint.safetensors", "log.jsonl", "run.json", "trajectory.safetensors"}
    assert {p.name for p in out.iterdir()} == names
    path = Trajectory.load(out / "trajectory.safetensors")
    assert path.x.shape == (4, 16, 6, 6)
    assert "accuracy on held-out inputs" in run("majority", *SMALL, "--learn-beta", "--out", str(out))
    assert json.loads((out / "run.json").read_text())["resumed_at"] == 6
    assert load(out).layers[0].learn_beta
