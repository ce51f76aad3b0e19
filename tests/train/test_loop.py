"""Training: the same loss curve whatever happens to the process, and clear errors when it cannot go on."""

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

from attn_flow import rk4
from attn_flow.base.files import write_tensors
from attn_flow.train import Batch, Recipe, Trained, evaluate, load, recipe, tensor_task, train_stack
from attn_flow.train.stacks import make_stack
from attn_flow.train.tasks import generator_of

SMALL = {"tokens": 6, "dim": 8, "steps": 1, "batch": 8, "updates": 24, "warmup": 4}
SCRIPT = """
import sys, torch
torch.set_num_threads(int(sys.argv[3]))
from dataclasses import replace
from attn_flow.train import train_stack, recipe
r = replace(recipe("recall"), **eval(sys.argv[2]))
train_stack(r, sys.argv[1], save_every=5, evaluate_every=10)
"""


def small(task: str = "majority", **options: object) -> Recipe:
    return replace(recipe(task), **{**SMALL, **options})  # type: ignore[arg-type]


def run(out: Path | None, r: Recipe | None = None, **options: object) -> Trained:
    quick = {"save_every": 5, "evaluate_every": 10}
    return train_stack(r or small(), out, **{**quick, **options})  # type: ignore[arg-type]


def lines(out: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("finished")
    run(out)
    return out


def test_the_log_has_one_line_per_update_and_is_that_of_plain_torch(finished: Path) -> None:
    """The first two updates by hand: cross-entropy, clipping, AdamW."""
    log, r = lines(finished), small()
    assert [line["update"] for line in log] == list(range(25))
    assert [k for k, line in enumerate(log) if "held_out_accuracy" in line] == [0, 10, 20, 24]
    task = r.make_task()
    stack = make_stack(r, task.stack_options)
    optimiser = torch.optim.AdamW(stack.parameters(), weight_decay=r.weight_decay)
    for update in range(2):
        batch = task.draw(8, generator_of(0, "training", update))
        loss = torch.nn.functional.cross_entropy(stack(batch.x), batch.y)
        assert log[update]["loss"] == pytest.approx(loss.item(), rel=1e-6)
        optimiser.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(stack.parameters(), r.clip)
        optimiser.param_groups[0]["lr"] = r.lr_at(update)
        optimiser.step()


def test_the_seed_decides_the_curve_and_nothing_else(finished: Path, tmp_path: Path) -> None:
    torch.manual_seed(99)
    expected = torch.rand(3)
    torch.manual_seed(99)
    run(tmp_path / "again")
    assert torch.equal(torch.rand(3), expected)  # the global generator is left alone
    assert not torch.are_deterministic_algorithms_enabled()
    assert (tmp_path / "again/log.jsonl").read_bytes() == (finished / "log.jsonl").read_bytes()
    run(tmp_path / "other", small(seed=1))
    assert lines(tmp_path / "other")[0]["loss"] != lines(finished)[0]["loss"]


def test_a_killed_run_resumes_to_the_same_curve(tmp_path: Path) -> None:
    """SIGKILL in the middle of a run, with a learned beta: log and weights are the same to the byte."""
    options = {**SMALL, "updates": 120, "learn_beta": True}
    r = replace(recipe("recall"), **options)  # type: ignore[arg-type]
    run(tmp_path / "whole", r)
    out = tmp_path / "killed"
    process = subprocess.Popen([sys.executable, "-c", SCRIPT, str(out), repr(options), str(torch.get_num_threads())])
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and process.poll() is None:
        if (out / "log.jsonl").is_file() and len((out / "log.jsonl").read_text().splitlines()) > 40:
            break
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    with (out / "log.jsonl").open("a") as file:
        file.write('{"update": 12, "lo')  # a line cut short
    (out / ".checkpoint.safetensors.abc").write_bytes(b"left by a kill during a write")
    assert 40 <= run(out, r).summary["resumed_at"] < 120
    assert not (out / ".checkpoint.safetensors.abc").exists()
    assert (out / "log.jsonl").read_bytes() == (tmp_path / "whole/log.jsonl").read_bytes()
    for name, weight in load(out).state_dict().items():
        assert torch.equal(weight, load(tmp_path / "whole").state_dict()[name]), name


def test_an_interrupted_run_keeps_every_completed_update(finished: Path, tmp_path: Path) -> None:
    """Ctrl-C in update 13, three after the last regular checkpoint."""
    r = small()
    task = r.make_task()

    def draw(size: int, generator: torch.Generator) -> Batch:
        if generator.initial_seed() == generator_of(0, "training", 13).initial_seed() and not resumed:
            raise KeyboardInterrupt
        return task.draw(size, generator)

    own, resumed = replace(task, draw=draw), False
    r = replace(r, task="own")
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, r, task=own)
    resumed = True
    assert run(tmp_path, r, task=own).summary["resumed_at"] == 13
    assert lines(tmp_path) == lines(finished)


def test_ctrl_c_ends_the_command_at_once(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "attn_flow", "train", "majority", "--updates", "100000", "--quiet", "--out"]
    process = subprocess.Popen([*command, str(tmp_path)], stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and not (tmp_path / "log.jsonl").is_file():
        time.sleep(0.05)
    time.sleep(0.5)
    process.send_signal(signal.SIGINT)
    _, words = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "the same command continues" in words
    assert "Traceback" not in words
    assert load(tmp_path).layers[0].beta.tolist() == [4.0]


def test_a_finished_run_is_not_repeated_and_goes_on_with_more_updates(tmp_path: Path) -> None:
    run(tmp_path)
    before = (tmp_path / "log.jsonl").read_bytes()
    assert run(tmp_path).summary["resumed_at"] == 24
    assert (tmp_path / "log.jsonl").read_bytes() == before
    weights = load(tmp_path).state_dict()
    assert run(tmp_path, small(updates=30)).summary["resumed_at"] == 24
    assert len(lines(tmp_path)) == 31
    assert any(not torch.equal(p, weights[name]) for name, p in load(tmp_path).state_dict().items())
    with pytest.raises(ValueError, match=r"updates 30 \(there\) and 28 \(now\)"):
        run(tmp_path, small(updates=28))


def test_load_gives_the_trained_stack(tmp_path: Path) -> None:
    trained = run(tmp_path, small("recall", learn_beta=True, heads=2, step=rk4))
    x = trained.task.held_out(4, torch.Generator().manual_seed(0)).x
    again = load(tmp_path)
    assert torch.equal(again(x), trained.stack(x))
    assert not again.training
    assert trained.summary["beta"] == [layer.beta.tolist() for layer in again.layers] != [[8.0, 8.0]]


def test_a_learned_beta_is_not_decayed() -> None:
    """With a tiny learning rate and a large weight decay beta stays."""
    summary = run(None, small(learn_beta=True, beta=9.0, weight_decay=100.0, lr=1e-4)).summary
    assert summary["beta"][0] == pytest.approx([9.0], rel=0.01)


def test_evaluation_is_a_mean_over_the_answers() -> None:
    r = small("recall", updates=1)
    task = r.make_task()
    stack = make_stack(r, task.stack_options).eval()
    batch = task.held_out(300, generator_of(0, "held out"))
    answers = [
        answer == expected
        for logits, y in zip(stack(batch.x), batch.y)
        for answer, expected in zip(logits.argmax(-1).tolist(), y.tolist())
        if expected >= 0
    ]
    numbers = evaluate(stack, task, 0, size=300)
    assert numbers["held_out_accuracy"] == pytest.approx(sum(answers) / len(answers))


# --- what can go wrong ------------------------------------------------------------------------------------------


def test_other_options_and_other_data_are_refused(finished: Path, tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match=r"other options: beta 4.0 \(there\) and 5.0 \(now\); lr 0.01 \(there\) and 0.02"
    ):
        run(finished, small(lr=0.02, beta=5.0))
    r, x = replace(Recipe("own"), **(SMALL | {"updates": 2})), torch.arange(60).reshape(10, 6) % 5
    task = tensor_task(x, x[:, 0] % 2, inputs=5, outputs=2)
    run(tmp_path, r, task=task)
    assert run(tmp_path, r, task=task).summary["resumed_at"] == 2
    with pytest.raises(ValueError, match="have changed since"):
        run(tmp_path, r, task=tensor_task(x, x[:, 1] % 2, inputs=5, outputs=2))


def test_foreign_and_missing_checkpoints(tmp_path: Path) -> None:
    write_tensors({"x": torch.zeros(1)}, tmp_path / "checkpoint.safetensors", {"format": "another"})
    with pytest.raises(ValueError, match="is not a checkpoint"):
        load(tmp_path)
    with pytest.raises(ValueError, match=r"no checkpoint .*gone"):
        load(tmp_path / "gone")


def test_divergence_names_the_update_and_a_remedy_and_keeps_a_good_checkpoint(tmp_path: Path) -> None:
    r = small(lr=30.0, horizon=3.0, updates=300, warmup=200)
    with pytest.raises(FloatingPointError, match=r"diverged at update \d+: .* lower lr \(now 30, try 6\)"):
        run(tmp_path, r)
    update = max(line["update"] for line in lines(tmp_path)) // 5 * 5
    batch = r.make_task().draw(r.batch, generator_of(0, "training", update))
    assert bool(torch.nn.functional.cross_entropy(load(tmp_path)(batch.x), batch.y).isfinite())


def test_two_processes_give_the_losses_of_one(tmp_path: Path) -> None:
    (tmp_path / "two.py").write_text(SCRIPT)
    options = {**SMALL, "updates": 12}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    result = subprocess.run(
        [*command, str(tmp_path / "two.py"), str(tmp_path / "two"), repr(options), "1"],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr
    run(tmp_path / "one", replace(recipe("recall"), **options))
    for one, two in zip(lines(tmp_path / "one"), lines(tmp_path / "two"), strict=True):
        assert two == pytest.approx(one, rel=1e-4, abs=1e-6)


# --- a user's own data ---------------------------------------------------------------------------------


def test_a_task_of_your_own_goes_with_its_recipe() -> None:
    with pytest.raises(ValueError, match="expected task="):
        run(None, Recipe("own"))
    with pytest.raises(ValueError, match="only there"):
        run(None, recipe("majority"), task=recipe("recall").make_task())


TINY = {
    "majority": {"tokens": 7, "dim": 8, "updates": 200},
    "recall": {"tokens": 4, "dim": 24, "updates": 250},
    "side": {"tokens": 40, "dim": 3, "beta": 10.0, "horizon": 4.0, "steps": 8, "step": "euler", "updates": 300},
}


@pytest.mark.parametrize("task", TINY)
def test_a_small_version_of_each_task_is_learned(task: str) -> None:
    common = {"step": "euler", "steps": 1, "batch": 32, "lr": 0.02, "warmup": 10}
    trained = run(None, replace(recipe(task), **{**common, **TINY[task]}))
    assert trained.summary["accuracy"] > 0.9 > trained.task.chance


@pytest.mark.parametrize("symmetric", ["none", "GV", "positive", "V alone"])
def test_symmetric_matrices_stay_symmetric_and_are_loaded(symmetric: str, tmp_path: Path) -> None:
    r = small("side", tokens=20, dim=3, steps=2, symmetric=symmetric, updates=8)
    trained = run(tmp_path, r)
    attention = trained.stack.attentions()[0]
    for name, matrix in (("G", attention.G), ("V", attention.V)):
        is_symmetric = bool(torch.allclose(matrix, matrix.mT, atol=1e-6))
        assert is_symmetric == (name in symmetric or symmetric in ("positive", "V alone")), name
    if symmetric == "positive":
        assert float(torch.linalg.eigvalsh(attention.G[0]).min()) >= 0
    if symmetric == "V alone":
        assert torch.equal(attention.G[0], torch.eye(3))
    x = trained.task.held_out(4, torch.Generator().manual_seed(0)).x
    assert torch.equal(load(tmp_path)(x), trained.stack(x))
    torch.testing.assert_close(trained.stack.rerun(horizon=2.0).trajectory(x).x[0], x)  # the embedding is the identity


@pytest.mark.slow
@pytest.mark.parametrize(("task", "accuracy"), [("majority", 0.98), ("recall", 0.98), ("side", 0.95)])
def test_recipes_reach_their_accuracy(task: str, accuracy: float) -> None:
    assert train_stack(recipe(task)).summary["accuracy"] >= accuracy


@pytest.mark.cuda
def test_cuda_learns() -> None:
    assert run(None, replace(recipe("majority"), updates=200), device="cuda").summary["accuracy"] > 0.5
