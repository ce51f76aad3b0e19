"""Training: the same loss curve whatever happens to the process, and clear words when it cannot go on."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from attn_flow.dynamics.distributed import Processes
from attn_flow.train import checkpoint, load, loop, recipe, train_stack
from attn_flow.train.recipes import Recipe

SMALL = {"tokens": 6, "dim": 8, "steps": 1, "batch": 8, "updates": 24, "warmup": 4}


def small(task: str = "majority", **options: object) -> Recipe:
    return replace(recipe(task), **{**SMALL, **options})  # type: ignore[arg-type]


def run(out: Path | None, r: Recipe | None = None, **options: object) -> loop.Trained:
    quick = {"save_every": 5, "evaluate_every": 10, "tensorboard": False}
    return train_stack(r or small(), out, **{**quick, **options})  # type: ignore[arg-type]


def lines(out: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An uninterrupted run."""
    out = tmp_path_factory.mktemp("whole")
    run(out)
    return out


def test_the_log_has_one_line_per_update(whole: Path) -> None:
    log = lines(whole)
    assert [line["update"] for line in log] == list(range(25))
    assert {"loss", "accuracy", "gradient", "lr"} <= set(log[3])
    assert "held_out_accuracy" in log[10]
    assert "held_out_accuracy" in log[24]
    assert "held_out_accuracy" not in log[11]


def test_first_loss_and_step_are_those_of_plain_torch(whole: Path) -> None:
    """One update by hand: cross-entropy, clipping, AdamW."""
    r = small()
    task = r.make_task()
    stack = r.make_stack(**task.stack_options)
    log = lines(whole)
    optimiser = torch.optim.AdamW(stack.parameters(), lr=r.lr / 4, weight_decay=r.weight_decay)
    losses = []
    for update in range(2):
        batch = task.draw(8, loop.generator_of(0, "training", update))
        loss = torch.nn.functional.cross_entropy(stack(batch.x), batch.y)
        optimiser.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(stack.parameters(), r.clip)
        optimiser.step()
        losses.append(loss.item())
    assert [line["loss"] for line in log[:2]] == pytest.approx(losses, rel=1e-6)
    assert log[0]["lr"] == pytest.approx(r.lr / 4)


def test_same_seed_same_curve_other_seed_other_curve(whole: Path, tmp_path: Path) -> None:
    torch.manual_seed(99)  # what was drawn before does not matter
    run(tmp_path / "again")
    assert (tmp_path / "again/log.jsonl").read_bytes() == (whole / "log.jsonl").read_bytes()
    run(tmp_path / "other", small(seed=1))
    assert lines(tmp_path / "other")[0]["loss"] != lines(whole)[0]["loss"]


def test_training_leaves_the_global_generator_alone() -> None:
    torch.manual_seed(7)
    expected = torch.rand(3)
    torch.manual_seed(7)
    run(None, small(updates=3, noise=0.1))
    assert torch.equal(torch.rand(3), expected)
    assert not torch.are_deterministic_algorithms_enabled()


KILLED = """
import sys, torch
torch.set_num_threads(int(sys.argv[3]))  # the bytes are promised for as many threads
from dataclasses import replace
from attn_flow.train import train_stack, recipe
r = replace(recipe("majority"), **eval(sys.argv[2]))
train_stack(r, sys.argv[1], save_every=5, evaluate_every=10, tensorboard=False)
"""


def test_killed_and_resumed_gives_the_same_curve(tmp_path: Path) -> None:
    """SIGKILL in the middle of a run, noise and learned beta included: the log is the same to the byte."""
    options = {**SMALL, "updates": 120, "noise": 0.05, "beta_mode": "learned"}
    r = replace(recipe("majority"), **options)  # type: ignore[arg-type]
    run(tmp_path / "whole", r)
    out = tmp_path / "killed"
    process = subprocess.Popen([sys.executable, "-c", KILLED, str(out), repr(options), str(torch.get_num_threads())])
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        if (out / "log.jsonl").is_file() and len((out / "log.jsonl").read_text().splitlines()) > 40:
            break
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    reached = checkpoint.read(out).update
    assert 40 <= reached < 120
    resumed = run(out, r)
    assert resumed.summary["resumed_at"] == reached
    assert (out / "log.jsonl").read_bytes() == (tmp_path / "whole/log.jsonl").read_bytes()
    assert checkpoint.read(out).tensors.keys() == checkpoint.read(tmp_path / "whole").tensors.keys()
    for name, tensor in checkpoint.read(out).tensors.items():
        assert torch.equal(tensor, checkpoint.read(tmp_path / "whole").tensors[name]), name


@pytest.mark.parametrize("where", ["gradient", "step", "save"])
def test_stopped_at_any_place_it_resumes_to_the_same_curve(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    calls = 0
    original = getattr(loop._Run, where)

    def stop(self: loop._Run, *args: int) -> object:
        nonlocal calls
        calls += 1
        if calls == (3 if where == "save" else 13):
            raise KeyboardInterrupt
        return original(self, *args)

    monkeypatch.setattr(loop._Run, where, stop)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path)
    monkeypatch.undo()
    with (tmp_path / "log.jsonl").open("a") as file:
        file.write('{"update": 12, "lo')  # a line cut short
    assert run(tmp_path).summary["resumed_at"] == (5 if where == "save" else 10)
    assert (tmp_path / "log.jsonl").read_bytes() == (whole / "log.jsonl").read_bytes()


def test_an_interrupted_write_keeps_the_old_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from attn_flow.base import files

    original, calls = files.save_file, 0

    def half(tensors: dict, path: str, metadata: dict) -> None:
        nonlocal calls
        calls += 1
        original(tensors, path, metadata=metadata)
        if calls == 3:
            os.truncate(path, 100)
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(files, "save_file", half)
    with pytest.raises(OSError, match="No space left"):
        run(tmp_path)
    assert checkpoint.read(tmp_path).update == 5
    assert sorted(p.name for p in tmp_path.iterdir()) == ["checkpoint.safetensors", "log.jsonl"]
    (tmp_path / ".checkpoint.safetensors.abc").write_bytes(b"what a kill leaves")
    monkeypatch.undo()
    run(tmp_path)
    assert not (tmp_path / ".checkpoint.safetensors.abc").exists()


def test_a_finished_run_is_not_repeated(whole: Path) -> None:
    before = (whole / "log.jsonl").read_bytes()
    again = run(whole)
    assert again.summary["resumed_at"] == 24
    assert (whole / "log.jsonl").read_bytes() == before


def test_load_gives_the_trained_stack(tmp_path: Path) -> None:
    trained = run(tmp_path, small("recall", beta_mode="learned", heads=2))
    x = trained.task.held_out(4, torch.Generator().manual_seed(0)).x
    again = load(tmp_path)
    assert torch.equal(again(x), trained.stack(x))
    assert not again.training
    assert trained.summary["beta"] == [layer.beta.tolist() for layer in again.layers]
    assert trained.summary["beta"][0] != [8.0, 8.0]


def test_annealed_beta_ends_at_beta_and_changes_the_curve(tmp_path: Path) -> None:
    r = small(beta=6.0, beta_mode="annealed", beta_start=0.5)
    trained = run(tmp_path, r)
    assert trained.summary["beta"] == [pytest.approx([6.0])]
    assert float(load(tmp_path).layers[0].beta) == pytest.approx(6.0)


def test_evaluation_is_a_mean_over_what_is_asked() -> None:
    r = small("clusters", updates=1)
    task = r.make_task()
    stack = r.make_stack(**task.stack_options).eval()
    found = loop.evaluate(stack, task, 0, size=300)
    batch = task.held_out(300, loop.generator_of(0, "held out"))
    right = asked = 0
    for logits, y in zip(stack(batch.x), batch.y):
        for answer, expected in zip(logits.argmax(-1).tolist(), y.tolist()):
            if expected >= 0:
                asked, right = asked + 1, right + (answer == expected)
    assert found["held_out_accuracy"] == pytest.approx(right / asked)


# --- what can go wrong ------------------------------------------------------------------------------------------


def test_other_options_are_refused(whole: Path, tmp_path: Path) -> None:
    before = {p.name: p.read_bytes() for p in whole.iterdir()}
    with pytest.raises(
        ValueError, match=r"other options: beta 4.0 \(there\) and 5.0 \(now\); lr 0.\d+ \(there\) and 0.02"
    ):
        run(whole, small(lr=0.02, beta=5.0))
    assert {p.name: p.read_bytes() for p in whole.iterdir()} == before


def test_a_changed_text_is_refused_a_moved_one_is_not(tmp_path: Path) -> None:
    text = tmp_path / "a.txt"
    text.write_text("to be or not to be that is the question " * 20)
    r = small("masked", file=str(text), updates=2, depth=1, heads=1)
    run(tmp_path / "run", r)
    text.rename(tmp_path / "b.txt")
    moved = small("masked", file=str(tmp_path / "b.txt"), updates=2, depth=1, heads=1)
    assert run(tmp_path / "run", moved).summary["resumed_at"] == 2
    (tmp_path / "b.txt").write_text("something else entirely, but long enough for it " * 20)
    with pytest.raises(ValueError, match="has changed since"):
        run(tmp_path / "run", moved)


def test_damaged_and_foreign_checkpoints_are_named(tmp_path: Path) -> None:
    run(tmp_path, small(updates=1))
    path = tmp_path / "checkpoint.safetensors"
    os.truncate(path, path.stat().st_size // 2)
    with pytest.raises(ValueError, match=r"checkpoint.safetensors is damaged .* move it away"):
        run(tmp_path, small(updates=1))
    from safetensors.torch import save_file

    save_file({"x": torch.zeros(1)}, path)
    with pytest.raises(ValueError, match="is no checkpoint of attn-flow train"):
        load(tmp_path)
    with pytest.raises(ValueError, match=r"no checkpoint .*gone"):
        load(tmp_path / "gone")


def test_divergence_stops_with_step_and_remedy_and_keeps_the_last_good_checkpoint(tmp_path: Path) -> None:
    r = small(geometry="euclidean", lr=3.0, horizon=3.0, updates=300, warmup=200)
    with pytest.raises(FloatingPointError, match=r"diverged at update \d+: .* lower --lr \(now 3, try 0.6\)") as error:
        run(tmp_path, r)
    assert "The last good checkpoint is kept" in str(error.value)
    stopped = int(str(error.value).split("update ")[1].split(":")[0])
    saved = checkpoint.read(tmp_path)
    assert 0 <= saved.update <= stopped
    assert stopped - saved.update <= 5
    # Good: finite weights which give a finite loss on the very batch they were saved before.
    stack = load(tmp_path)
    batch = r.make_task().draw(r.batch, loop.generator_of(0, "training", saved.update))
    assert torch.isfinite(torch.nn.functional.cross_entropy(stack(batch.x), batch.y))
    assert lines(tmp_path)[-1]["update"] == stopped - 1


def test_bad_arguments() -> None:
    with pytest.raises(ValueError, match="save_every = 0, expected at least 1"):
        run(None, save_every=0)
    if not torch.cuda.is_available():
        with pytest.raises(ValueError, match="torch sees no CUDA device; use --device cpu"):
            run(None, device="cuda")


# --- several processes, other devices ---------------------------------------------------------------------------

TWO = """
import sys, torch
torch.set_num_threads(1)
from dataclasses import replace
from attn_flow.train import train_stack, recipe
for task in ("majority", "clusters"):
    r = replace(recipe(task), **eval(sys.argv[2]))
    train_stack(r, f"{sys.argv[1]}/{task}", save_every=5, evaluate_every=10, tensorboard=False)
"""


def test_two_processes_give_the_losses_of_one(tmp_path: Path) -> None:
    (tmp_path / "two.py").write_text(TWO)
    options = {**SMALL, "updates": 12}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    found = subprocess.run(
        [*command, str(tmp_path / "two.py"), str(tmp_path / "two"), repr(options)],
        env=environment,
        capture_output=True,
        text=True,
    )
    assert found.returncode == 0, found.stderr
    for task in ("majority", "clusters"):
        run(tmp_path / "one" / task, replace(recipe(task), **options))
        one, two = lines(tmp_path / "one" / task), lines(tmp_path / "two" / task)
        assert len(two) == 13
        for a, b in zip(one, two):
            assert b == pytest.approx(a, rel=1e-4, abs=1e-6)


def test_a_batch_is_shared_evenly_or_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "processes", lambda device: Processes(0, 3, torch.device("cpu")))
    with pytest.raises(ValueError, match="batch = 8, expected a multiple of the 3 processes"):
        run(None)


def test_tensorboard_is_written_where_installed(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    run(tmp_path, small(updates=2), tensorboard=True)
    assert list((tmp_path / "tensorboard").glob("events.*"))


@pytest.mark.cuda
def test_mixed_precision_learns_on_cuda_and_is_deterministic(tmp_path: Path) -> None:
    curves = []
    for name in ("a", "b"):
        trained = run(tmp_path / name, replace(recipe("majority"), updates=200), device="cuda")
        curves.append((tmp_path / name / "log.jsonl").read_bytes())
    assert curves[0] == curves[1]
    assert trained.summary["accuracy"] > 0.5


# --- it learns --------------------------------------------------------------------------------------------------


TINY = {
    "majority": {"tokens": 7, "dim": 8, "updates": 200},
    "recall": {"tokens": 4, "dim": 24, "updates": 250},
    "clusters": {"tokens": 8, "dim": 12, "depth": 2, "horizon": 0.5, "updates": 500},
    "parity": {"tokens": 4, "dim": 16, "depth": 1, "ffn": 32, "updates": 300},
    "masked": {"tokens": 8, "dim": 32, "depth": 1, "heads": 4, "ffn": 32, "updates": 300},
}


@pytest.mark.parametrize("task", TINY)
def test_a_small_version_of_each_task_is_learned(task: str, tmp_path: Path) -> None:
    """A second or two each; the stated accuracies of the full recipes are for the slow test below.

    Least of ten seeds, 10 of 10 above .9: majority .920, recall .999, clusters .928, parity 1, masked .984.
    """
    (tmp_path / "a.txt").write_text("abcdefghij" * 200)
    common = {"step": "euler", "steps": 1, "batch": 32, "lr": 0.02, "warmup": 10}
    file = str(tmp_path / "a.txt") if task == "masked" else None
    trained = run(None, replace(recipe(task), **{**common, **TINY[task]}, file=file))
    assert trained.summary["accuracy"] > 0.9 > trained.task.chance


@pytest.mark.slow
@pytest.mark.parametrize("task", ["majority", "recall", "clusters", "parity", "masked"])
def test_stated_accuracies(task: str) -> None:
    summary = train_stack(recipe(task)).summary
    assert summary["accuracy"] >= summary["stated_accuracy"] > summary["chance"]
