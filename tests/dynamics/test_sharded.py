"""Tokens of one cloud over processes: the path of one process, on all of them, whatever moves it; and their errors.

This file is also what torchrun starts: each process then runs all cases and writes what it found.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner

from attn_flow import (
    Adaptive,
    Attention,
    Cloud,
    Ellipsoid,
    Euclidean,
    Sphere,
    Trajectory,
    UniformSphere,
    consensus,
    dopri5,
    euler,
    flow,
)
from attn_flow.bench.shards import fit
from attn_flow.cli.entry import app
from attn_flow.dynamics import kicks, placement
from attn_flow.dynamics.distributed import ALONE, Processes, processes
from attn_flow.dynamics.sharded import Shard
from attn_flow.dynamics.steppers import Step

F64 = torch.float64


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def tokens(n: int | tuple[int, ...], d: int = 3) -> Tensor:
    return Sphere().uniform(n, d, generator=seeded(), dtype=F64)


def random(heads: int = 2, **options) -> Attention:
    return Attention.random(3, heads, generator=seeded(1), dtype=F64, **options)


def identity(beta: float | Tensor, **options) -> Attention:
    return Attention.identity(3, beta, dtype=F64, **options)


MASK = torch.tensor([[True] * 7, [True] * 4 + [False] * 3])
WEIGHTS = torch.linspace(0.1, 1, 7, dtype=F64)
AXES = torch.tensor([1.0, 2.0, 0.5], dtype=F64)
T = [0.0, 0.3, 1.0]
CASES: dict[str, Callable[[Processes], Trajectory]] = {
    "a long run": lambda w: flow(identity(20.0), tokens(300), torch.linspace(0, 10, 5), h=0.1, world=w),
    "euler, three tokens": lambda w: flow(random(), tokens(3), T, step=euler, world=w),
    "fewer tokens than processes": lambda w: flow(random(), tokens(1), T, world=w),
    "dopri5, weights": lambda w: flow(random(), tokens(7), T, step=dopri5, weights=WEIGHTS, world=w),
    "padding": lambda w: flow(random(), tokens((2, 7)), T, mask=MASK, weights=WEIGHTS, world=w),
    "a sweep": lambda w: flow(random(beta=torch.tensor([[[1.0]], [[9.0]]], dtype=F64)), tokens((3, 7)), T, world=w),
    "hardmax": lambda w: flow(random(kind="hardmax"), tokens(7), T, world=w),
    "unnormalised": lambda w: flow(random(kind="unnormalised"), tokens(7), T, weights=WEIGHTS, world=w),
    "sinkhorn": lambda w: flow(random(kind="sinkhorn"), tokens(7), T, world=w),
    "causal": lambda w: flow(random(causal=True), tokens((2, 7)), T, mask=MASK, world=w),
    "without self": lambda w: flow(random(self_attention=False), tokens(7), T, weights=WEIGHTS, world=w),
    "causal without self": lambda w: flow(random(causal=True, self_attention=False), tokens(7), T, world=w),
    "causal hardmax": lambda w: flow(random(causal=True, kind="hardmax"), tokens(7), T, world=w),
    "scheduled": lambda w: flow(lambda t: random(beta=1 + t), tokens(7), T, world=w),
    "ellipsoid": lambda w: flow(random(), tokens(7), T, geometry=Ellipsoid(0 * AXES, AXES), world=w),
    "pre": lambda w: flow(random(), tokens(7), T, geometry=Euclidean(), placement=placement.pre, world=w),
    "context": lambda w: flow(random(), tokens(7), T, context=UniformSphere(3), world=w),
    "adaptive": lambda w: flow(random(beta=5.0), tokens(50), T, step=Adaptive(merge=False), world=w),
    "merging": lambda w: flow(identity(4.0), tokens(50), [0, 3, 60], step=Adaptive(), world=w),
    "a batch that merges": lambda w: flow(identity(9.0), tokens((2, 20)), [0, 9, 60], step=Adaptive(1e-4), world=w),
    "stopped": lambda w: flow(identity(1.0), tokens(7), [0, 50], stop=consensus(0.1), world=w),
    "merged and stopped": lambda w: flow(
        identity(1.0), tokens(7), [0, 50], step=Adaptive(1e-2), stop=consensus(1e-4), world=w
    ),
    "a stop that the last process wants": lambda w: flow(
        identity(1.0), tokens(7), [0, 50], stop=lambda t, cloud: t > 0.9 and w.rank == w.count - 1, world=w
    ),
    "independent kicks": lambda w: flow(
        random(), tokens((2, 7)), T, mask=MASK, noise=kicks.independent(0.3), generator=seeded(), world=w
    ),
    "a field of kicks": lambda w: flow(
        random(), tokens(7), T, noise=kicks.field(torch.exp, 0.3), generator=seeded(), world=w
    ),
}


def lost_on_the_last(w: Processes) -> Step:
    """A step that sends the tokens of the last process to infinity, and moves no others."""
    return lambda velocity, t, x, h, geometry: x / (0.0 if w.rank == w.count - 1 else 1.0)


ERRORS: dict[str, tuple[Callable[[Processes], Trajectory], str]] = {
    "another cloud": (lambda w: flow(random(), tokens(7) + w.rank, T, world=w), "x0 is not the same in all processes"),
    "other times": (lambda w: flow(random(), tokens(7), [0, 1 + w.rank], world=w), "t is not the same in all"),
    "other weights": (lambda w: flow(random(value_bias=AXES + w.rank), tokens(7), T, world=w), "value_bias is not"),
    "other kicks": (
        lambda w: flow(random(), tokens(7), T, noise=kicks.common(1.0), generator=seeded(w.rank), world=w),
        "the state of the generator is not the same",
    ),
    "gradients": (lambda w: flow(random(), tokens(7).requires_grad_(), T, world=w), "gradients do not pass between"),
    "a token that leaves": (
        lambda w: flow(random(), tokens(7), T, step=lost_on_the_last(w), world=w),
        "tokens left the range of torch.float64",
    ),
}


def message(case: Callable[[], Trajectory]) -> str:
    with pytest.raises((ValueError, FloatingPointError)) as caught:
        case()
    return str(caught.value)


def found_by(w: Processes) -> dict[str, Any]:
    paths = {name: case(w) for name, case in CASES.items()}
    return {name: {"t": path.t, "x": path.x, "about": path.about} for name, path in paths.items()}


def launch(count: int, *words: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={count}", *words]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)


@pytest.mark.parametrize("count", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_paths_and_errors_are_those_of_one_process(tmp_path: Path, count: int) -> None:
    """To rounding those of one process, and to the last bit the same on all."""
    done = launch(count, __file__, "cases", str(tmp_path))
    assert done.returncode == 0, done.stderr
    found = [torch.load(tmp_path / f"{rank}.pt") for rank in range(count)]
    for name, one in found_by(ALONE).items():
        assert one["about"].pop("processes") == 1
        for each in (of_rank[name] for of_rank in found):
            assert each["about"].pop("processes") == count
            assert each["about"] == one["about"], name  # as many evaluations, the same stop, as many tokens left
            assert torch.equal(each["t"], one["t"]), name
            assert torch.equal(each["x"], found[0][name]["x"]), name
            torch.testing.assert_close(each["x"], one["x"], rtol=0, atol=1e-13, msg=lambda m, name=name: f"{name}: {m}")
    for name, (_, says) in ERRORS.items():
        assert all(says in of_rank[name] for of_rank in found), (name, [of_rank[name] for of_rank in found])
    merged = {name: found[0][name]["about"]["tokens_left"] for name in ("merging", "a batch that merges")}
    assert merged["merging"] < count  # then moved by each
    assert count < merged["a batch that merges"] < 20


@pytest.mark.parametrize("count", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("n", [1, 2, 3, 7, 8, 100])
def test_parts_are_even_and_cover_the_cloud(n: int, count: int) -> None:
    x = torch.arange(2 * n * 3).reshape(2, n, 3)
    shards = [Shard(Processes(rank, count, ALONE.device), n) for rank in range(count)]
    parts = [shard.own(x) for shard in shards]
    if n < count:
        assert all(torch.equal(part, x) for part in parts)
        return
    assert torch.equal(torch.cat(parts, dim=-2), x)
    assert max(part.shape[-2] for part in parts) - min(part.shape[-2] for part in parts) <= 1
    for shard, part in zip(shards, parts):
        assert torch.equal(part[:, 0], x[:, shard.first])
        assert torch.equal(shard.own(x[..., 0], -1), part[..., 0])


def test_constants_of_a_cost_model_are_found() -> None:
    columns = torch.tensor([[1.0, n * d] for n in (1000, 8000) for d in (3, 64)], dtype=F64)
    seconds = columns @ torch.tensor([1e-3, 5e-9], dtype=F64)
    assert fit(columns, seconds.tolist()) == pytest.approx((1e-3, 5e-9))


# --- the command, and processes that are lost --------------------------------------------------------------------

SIMULATION = ["simulate", "--G", "3,0,0,0;0,2,0,0;0,0,1,0;0,0,0,1", "--V", "1,0,0,0;0,1,0,0;0,0,1,0;0,0,0,2"]
SIMULATION += ["--beta", "10,inf", "--tokens", "41", "--time", "4", "--steps", "20"]


def test_the_command_gives_the_numbers_of_one_process(tmp_path: Path) -> None:
    done = launch(2, "-m", "attn_flow", *SIMULATION, "--json", "--out", str(tmp_path))
    assert done.returncode == 0, done.stderr
    one = CliRunner().invoke(app, [*SIMULATION, "--json"])
    assert one.exit_code == 0, one.output
    two, one = json.loads(done.stdout), json.loads(one.stdout)  # one JSON object: one process speaks
    assert len(one["runs"]) == 2
    for a, b in zip(one["runs"], two["runs"]):
        assert b["w2"] == pytest.approx(a["w2"], abs=1e-12)
        assert b["phases"] == a["phases"]
        assert b["resolution"] == a["resolution"]
    path = Trajectory.load(tmp_path / "path_beta_10.safetensors")
    assert path.x.shape == (21, 41, 4)
    assert path.about["processes"] == 2


LOSSES: dict[str, tuple[Callable[[], Any], str]] = {
    "killed": (lambda: os.kill(os.getpid(), signal.SIGKILL), "Signal 9"),
    "raises": (lambda: 1 / 0, "ZeroDivisionError: division by zero"),
    "hangs": (lambda: time.sleep(1000), "Timed out waiting 3000ms"),
}


@pytest.mark.slow
@pytest.mark.parametrize("loss", LOSSES)
def test_a_lost_process_ends_all(loss: str) -> None:
    start = time.monotonic()
    done = launch(2, __file__, "lose", loss)
    assert done.returncode != 0
    assert done.stdout.count("started") == 2
    assert "finished" not in done.stdout
    assert LOSSES[loss][1] in done.stderr
    assert time.monotonic() - start < 100  # the sleep is 1000


def lose(w: Processes, loss: str) -> None:
    def stop(t: float, cloud: Cloud) -> bool:
        if t > 1 and w.rank == 1:
            LOSSES[loss][0]()
        return False

    print("started", flush=True)
    flow(identity(1.0), tokens(10), [0, 1e4], stop=stop, world=w)
    print("finished", flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    word, argument = sys.argv[1:]
    if word == "lose":
        lose(processes(patience=timedelta(seconds=3)), argument)
    else:
        world = processes()
        errors = {name: message(lambda case=case: case(world)) for name, (case, _) in ERRORS.items()}
        torch.save({**found_by(world), **errors}, Path(argument) / f"{world.rank}.pt")
