"""Processes of torchrun, by two real ones over gloo, and this process alone."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from attn_flow.base.processes import ALONE, processes

WORKER = """
import json, sys, torch
from attn_flow.base.processes import processes
world = processes()
own = torch.tensor([world.rank + 1.0, -world.rank])
module = torch.nn.Linear(2, 1, bias=False)
module(own).sum().backward()
world.sum_gradients(module)
world.wait()
result = {
    "rank": world.rank,
    "count": world.count,
    "is_first": world.is_first,
    "sum": world.sum(own.clone()).tolist(),
    "objects": world.gather_objects({"rank": world.rank}),
    "gradient": module.weight.grad[0].tolist(),
}
with open(f"{sys.argv[1]}/{world.rank}.json", "w") as file:
    json.dump(result, file)
"""


def test_two_processes(tmp_path: Path) -> None:
    script = tmp_path / "worker.py"
    script.write_text(WORKER)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(script)]
    done = subprocess.run([*command, str(tmp_path)], capture_output=True, text=True, env={**os.environ})
    assert done.returncode == 0, done.stderr
    for rank in range(2):
        result = json.loads((tmp_path / f"{rank}.json").read_text())
        assert (result["rank"], result["count"], result["is_first"]) == (rank, 2, rank == 0)
        assert result["sum"] == [3.0, -1.0]
        assert result["objects"] == [{"rank": 0}, {"rank": 1}]
        assert result["gradient"] == [3.0, -1.0]  # the sum over both


def test_one_process_does_nothing_special() -> None:
    module, x = torch.nn.Linear(2, 1), torch.ones(2)
    assert processes() == ALONE
    assert ALONE.is_first
    module(x).sum().backward()
    ALONE.sum_gradients(module)
    assert module.weight.grad.tolist() == [[1.0, 1.0]]
    assert ALONE.sum(x) is x
    assert ALONE.gather_objects("mine") == ["mine"]
    ALONE.wait()
    if not torch.cuda.is_available():
        with pytest.raises(ValueError, match="torch sees no CUDA device; use cpu"):
            processes("cuda")
