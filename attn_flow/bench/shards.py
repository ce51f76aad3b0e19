"""One cloud over two processes of one thread each: what a drift evaluation costs, in computing and in communicating."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator

import torch

from attn_flow.attention import Attention, drift
from attn_flow.bench.measure import Ratio, interleaved
from attn_flow.dynamics.distributed import Processes, Shard, processes
from attn_flow.geometry import Sphere

COUNT = 2


def sharding_ratios(quick: bool) -> Iterator[Ratio]:
    """A drift of two processes against that of one, and the constants of the cost model in docs/scale.md."""
    sizes = [(n, d) for d in (3, 64) for n in ((500, 1000) if quick else (1000, 2000, 4000, 8000))]
    call = f"from attn_flow.bench.shards import measure; measure({sizes}, {3 if quick else 7})"
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={COUNT}", "--no-python"]
        + [sys.executable, "-c", call],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    if done.returncode != 0:
        raise OSError(f"torchrun ended with code {done.returncode}: {done.stderr}")
    measured = json.loads(done.stdout)
    for (n, d), seconds in zip(sizes, measured):
        yield {
            "case": f"drift n={n} d={d} over {COUNT} processes",
            "against": "one process",
            "ratio": seconds["sharded"] / seconds["alone"],
            "alone_s": seconds["alone"],
            "compute_s": seconds["own"],
            "gather_s": seconds["gather"],
        }
    pairs = torch.tensor([[n**2 / COUNT, 4 * n**2 * d / COUNT] for n, d in sizes], dtype=torch.float64)
    numbers = torch.tensor([[1.0, n * d] for n, d in sizes], dtype=torch.float64)
    c_pair, c_flop = fit(pairs, [seconds["own"] for seconds in measured])
    latency, c_gather = fit(numbers, [seconds["gather"] for seconds in measured])
    predicted = pairs @ pairs.new_tensor([c_pair, c_flop]) + numbers @ numbers.new_tensor([latency, c_gather])
    yield {
        "case": f"cost model, float32, {COUNT} processes",
        "against": "measured (median)",
        "ratio": float((predicted / torch.tensor([seconds["sharded"] for seconds in measured])).median()),
        "c_pair_s": c_pair,
        "c_flop_s": c_flop,
        "c_gather_s": c_gather,
        "latency_s": latency,
    }


def fit(columns: torch.Tensor, seconds: list[float]) -> tuple[float, float]:
    """The two constants of least relative error."""
    y = torch.tensor(seconds, dtype=torch.float64)
    a, b = torch.linalg.lstsq(columns / y[:, None], torch.ones_like(y)[:, None]).solution[:, 0].tolist()
    return a, b


def measure(sizes: list[tuple[int, int]], rounds: int) -> None:
    """What each of torchrun's processes runs; the first prints the seconds of the slowest."""
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    world = processes()
    found = [_seconds(world, n, d, rounds) for n, d in sizes]
    if world.first:
        sys.stdout.write(json.dumps(found))


def _seconds(world: Processes, n: int, d: int, rounds: int) -> dict[str, float]:
    x = Sphere().uniform(n, d, generator=torch.Generator().manual_seed(0))
    attention, shard = Attention.identity(d, 1.0), Shard(world, n)
    own = shard.own(x)
    seconds = interleaved(
        {
            "alone": lambda: drift.against_cloud(attention.prepared(), x, x, None) if world.first else None,
            "own": lambda: drift.against_cloud(attention.prepared(), own, x, None),
            "gather": lambda: shard.everyone(own),
            "sharded": lambda: drift.against_cloud(attention.prepared(), own, shard.everyone(own), None),
        },
        rounds,
        before=world.wait,
    )
    return {name: world.largest(value) for name, value in seconds.items()}
