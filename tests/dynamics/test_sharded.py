"""Tokens of one cloud over processes: the path of one process, on all of them, whatever moves it; and their errors."""

import json
import math
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from attn_flow import Attention, Trajectory, UniformSphere, flow
from attn_flow.bench.shards import fit
from attn_flow.cli.entry import app
from attn_flow.dynamics.distributed import ALONE, Processes, RingAttention, Shard

F64 = torch.float64
WORKER = str(Path(__file__).with_name("worker.py"))


def launch(count: int, *words: str) -> subprocess.CompletedProcess:
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={count}"] if count > 1 else []
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, *torchrun, *words]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)


def found(folder: Path, count: int, *words: str) -> list[dict[str, Any]]:
    """What each process found."""
    folder.mkdir()
    done = launch(count, WORKER, "cases", str(folder), *words)
    assert done.returncode == 0, done.stderr
    return [torch.load(folder / f"{rank}.pt") for rank in range(count)]


@pytest.mark.parametrize("count", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_paths_and_errors_are_those_of_one_process(tmp_path: Path, count: int) -> None:
    """To the last bit the same on all, and to rounding those of one process.

    What rounding does to a path is measured: one process runs again from tokens moved by a rounding error. As each
    evaluation rounds again, the error may be as many times that.
    """
    several, (one,) = found(tmp_path / "several", count), found(tmp_path / "one", 1)
    nudged = [found(tmp_path / f"nudged {seed}", 1, str(seed))[0]["paths"] for seed in range(2)]
    for name, path in one["paths"].items():
        assert path["about"].pop("processes") == 1
        evaluations, stopped = path["about"]["evaluations"], path["about"].pop("stopped")

        def rounding(key: str, name=name, path=path, evaluations=evaluations) -> float:
            moved = max(float((other[name][key] - path[key]).abs().max()) for other in nudged)
            return evaluations * max(torch.finfo(F64).eps, moved)

        for each in (of_rank["paths"][name] for of_rank in several):
            first = several[0]["paths"][name]
            assert torch.equal(each["x"], first["x"]), name
            assert torch.equal(each["t"], first["t"]), name
            assert each["about"].pop("processes") == count
            assert (each["about"].pop("stopped") is None) == (stopped is None)
            assert each["about"] == path["about"], name  # as many evaluations, as many tokens left
            for key in ("t", "x"):
                torch.testing.assert_close(
                    each[key], path[key], rtol=0, atol=rounding(key), msg=lambda m, name=name: f"{name}: {m}"
                )
    for name in several[0]["errors"]:
        for got, says in (of_rank["errors"][name] for of_rank in several):
            assert says in got, (name, got)
    ranks = range(count)
    for rank, each in enumerate(several):
        assert each["said"] == {
            "gradient": [sum(r + 1.0 for r in ranks) / count, -sum(ranks) / count],
            "total": [sum(r + 1.0 for r in ranks), -float(sum(ranks))],
            "maxima": [float(count), 0.0],
            "largest": (float(count), math.inf),
            "gathered": [[r + 1.0, float(-r)] for r in ranks],
            "objects": [{"rank": r} for r in ranks],
            "first": rank == 0,
        }
    left = {name: path["about"].get("tokens_left") for name, path in one["paths"].items()}
    assert left["merging"] < count  # then moved by each
    assert count < left["a batch that merges"] < 20


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


def test_a_ring_of_one_is_the_attention() -> None:
    x = torch.randn(9, 3, generator=torch.Generator().manual_seed(0), dtype=F64)
    attention = Attention.random(3, 2, beta=3.0, generator=torch.Generator().manual_seed(1), dtype=F64)
    path, alone = (flow(field, x, [0.0, 0.5]) for field in (RingAttention(attention, ALONE), attention))
    torch.testing.assert_close(path.x, alone.x, rtol=0, atol=9 * 40 * torch.finfo(F64).eps)
    assert path.about["attention"]["ring"] == 1


@pytest.mark.parametrize(
    ("attention", "options", "says"),
    [
        (Attention.identity(3, kind="sinkhorn"), {}, "kind = 'sinkhorn', expected 'softmax' or 'unnormalised'"),
        (Attention.identity(3, kind="hardmax"), {}, "kind = 'hardmax', expected"),
        (torch.eye(3), {}, "attention is a Tensor, expected an Attention"),
        (Attention.identity(3), {"weights": torch.ones(4)}, "expected weights=None and mask=None"),
        (Attention.identity(3), {"context": UniformSphere(3)}, "expected context=None"),
        (Attention(torch.eye(3).requires_grad_()), {}, "gradients do not pass between processes"),
    ],
)
def test_what_a_ring_refuses(attention: Attention, options: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        flow(RingAttention(attention, ALONE), torch.ones(4, 3), [0.0, 1.0], **options)


def test_constants_of_a_cost_model_are_found() -> None:
    columns = torch.tensor([[1.0, n * d] for n in (1000, 8000) for d in (3, 64)], dtype=F64)
    seconds = columns @ torch.tensor([1e-3, 5e-9], dtype=F64)
    assert fit(columns, seconds.tolist()) == pytest.approx((1e-3, 5e-9))


# --- the command, and processes that are lost --------------------------------------------------------------------

SIMULATION = ["simulate", "--G", "3,0,0,0;0,2,0,0;0,0,1,0;0,0,0,1", "--V", "1,0,0,0;0,1,0,0;0,0,1,0;0,0,0,2"]
SIMULATION += ["--beta", "10,inf", "--tokens", "41", "--t", "4", "--h", "0.2"]


def test_the_command_gives_the_numbers_of_one_process(tmp_path: Path) -> None:
    done = launch(2, "-m", "attn_flow", *SIMULATION, "--json", "--out", str(tmp_path))
    assert done.returncode == 0, done.stderr
    one = CliRunner().invoke(app, [*SIMULATION, "--json"])
    assert one.exit_code == 0, one.output
    two, one = json.loads(done.stdout), json.loads(one.stdout)  # one JSON object: one process speaks
    assert len(one["runs"]) == 2
    for a, b in zip(one["runs"], two["runs"]):
        assert b["w2"] == pytest.approx(a["w2"], abs=1e-12)
        for mine, theirs in zip(a["phases"] + [a["resolution"]], b["phases"] + [b["resolution"]], strict=True):
            assert theirs.keys() == mine.keys()
            for name, value in mine.items():
                close = pytest.approx(value, rel=1e-9) if isinstance(value, float) else value
                assert theirs[name] == close, name
    path = Trajectory.load(tmp_path / "path_beta_10.safetensors")
    assert path.x.shape == (21, 41, 4)
    assert path.about["processes"] == 2


LOSSES = {
    "killed": "Signal 9",
    "raises": "ZeroDivisionError: division by zero",
    "hangs": "Timed out waiting 3000ms",
}


@pytest.mark.slow
@pytest.mark.parametrize("loss", LOSSES)
def test_a_lost_process_ends_all(loss: str) -> None:
    start = time.monotonic()
    done = launch(2, WORKER, "lose", loss)
    assert done.returncode != 0
    assert done.stdout.count("started") == 2
    assert "finished" not in done.stdout
    assert LOSSES[loss] in done.stderr
    assert time.monotonic() - start < 100  # the sleep is 1000
