"""attn-flow train as a user runs it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from attn_flow import Trajectory
from attn_flow.cli.training import train
from attn_flow.train import load, recipe

SMALL = ["--tokens", "6", "--dim", "6", "--steps", "3", "--batch", "8", "--updates", "6", "--no-tensorboard", "--quiet"]


def invoke(*arguments: str) -> tuple[int, str, BaseException | None]:
    app = typer.Typer()
    app.command()(train)
    result = CliRunner().invoke(app, list(arguments))
    return result.exit_code, result.output, result.exception


def test_train_writes_what_was_learned_and_resumes(tmp_path: Path) -> None:
    out = tmp_path / "run"
    code, said, error = invoke("majority", *SMALL, "--beta-mode", "learned", "--out", str(out), "--json")
    assert code == 0, error
    numbers = json.loads(said)
    assert numbers["updates"] == 6
    assert len(numbers["learned"]["layers"]) == 1
    layer = numbers["learned"]["layers"][0]
    assert layer["beta"] == pytest.approx(numbers["beta"][0])
    assert layer["beta"] != [4.0]
    assert layer["limit"]["case"] in ("fixed", "rotating", "jordan")
    assert len(layer["w2"]["curve"]) == 4
    assert layer["phases"][0]["start"] == 0.0
    names = {"checkpoint.safetensors", "log.jsonl", "run.json", "trajectory.safetensors", "training.png"}
    assert {p.name for p in out.iterdir()} == names
    path = Trajectory.load(out / "trajectory.safetensors")
    assert path.x.shape == (4, 16, 6, 6)
    code, said, _ = invoke("majority", *SMALL, "--beta-mode", "learned", "--out", str(out))
    assert code == 0
    assert "accuracy on held-out inputs" in said
    assert json.loads((out / "run.json").read_text())["resumed_at"] == 6
    code, _, error = invoke("majority", *SMALL, "--out", str(out))
    assert code == 1
    assert "beta_mode learned (there) and fixed (now)" in str(error)
    assert load(out).layers[0].learn_beta


def test_every_option_reaches_the_recipe(monkeypatch: pytest.MonkeyPatch) -> None:
    from attn_flow.cli import training

    seen: dict[str, object] = {}
    monkeypatch.setattr(training, "run", lambda recipe, out, **rest: seen.update(recipe.as_dict(), out=out, **rest))
    given = {
        "tokens": 11, "dim": 10, "heads": 5, "head_dim": 3, "depth": 3, "horizon": 0.7, "steps": 9, "step": "euler",
        "geometry": "euclidean", "placement": "pre", "ffn": 7, "noise": 0.2, "beta": 5.5, "beta_mode": "annealed",
        "beta_start": 0.3, "updates": 13, "batch": 14, "lr": 0.4, "weight_decay": 0.6, "warmup": 15, "clip": 0.9,
        "seed": 8,
    }  # fmt: skip
    options = [word for name, value in given.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    code, _, error = invoke("majority", *options, "--shared", "--checkpointing", "--no-amp", "--device", "cpu")
    assert code == 0, error
    assert {name: seen[name] for name in given} == given
    assert seen["shared"] is True
    assert seen["checkpointing"] is True
    assert seen["amp"] is False
    assert seen["out"] == Path("runs/train/majority")
    assert set(recipe("majority").as_dict()) - set(given) == {"task", "file", "shared", "checkpointing", "amp"}


def test_labelled_texts_from_a_file(tmp_path: Path) -> None:
    rows = [f"{('no', 'yes')[i % 2]}\tword{i % 5} {('bad', 'good')[i % 2]} word{i % 7} {i}" for i in range(60)]
    (tmp_path / "t.tsv").write_text("\n".join(rows))
    options = [*SMALL, "--file", str(tmp_path / "t.tsv"), "--out", str(tmp_path / "run"), "--json"]
    options[options.index("--updates") + 1] = "60"
    code, said, error = invoke("text", *options, "--lr", "0.03", "--warmup", "5")
    assert code == 0, error
    assert json.loads(said)["accuracy"] == 1.0
    (tmp_path / "t.tsv").write_text("\n".join([*rows, "only a label"]))
    code, _, error = invoke("text", *options)
    assert isinstance(error, ValueError)
    assert "line 61 has 1 field(s)" in str(error)
