"""How often the host waits for a value on an accelerator, counted on a simulated one.

The bench starts a process for it: torch counts devices once, at the first backward pass.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from attn_flow.attention import Attention
from attn_flow.bench.measure import Ratio
from attn_flow.bench.simulated_device import accelerator, device_reads, forget_reads, on
from attn_flow.dynamics.particles import flow
from attn_flow.dynamics.steppers import Adaptive
from attn_flow.geometry import Sphere
from attn_flow.nn import ContinuousAttentionLayer
from attn_flow.transport import wasserstein

SWEEPS = 16  # of Sinkhorn's attention, at most, for the cloud here


def read_ratios(quick: bool) -> Iterator[Ratio]:
    """Reads of flows, layers and distances against the most that are allowed."""
    script = "import json; from attn_flow.bench.reads import counted; print(json.dumps(list(counted())))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    if done.returncode:
        raise OSError(f"counting reads ended with {done.returncode}: {done.stderr[-500:]}")
    yield from json.loads(done.stdout)


def counted(n: int = 64, d: int = 3) -> Iterator[Ratio]:
    """The rows, in a process that has had no backward pass; {"case", "against", "ratio", "reads"}."""
    x = Sphere().uniform(n, d, generator=torch.Generator().manual_seed(0))
    with accelerator() as device:
        there = on(x)
        attention = Attention.identity(d, beta=4.0, device=device)
        attention.prepared(1.0)  # the norm of the weights, read once in their life

        def row(case: str, most: str, run: Callable[[], int]) -> Ratio:
            """run does the work and returns how many reads it may take."""
            forget_reads()
            allowed = run()
            reads = sum(device_reads().values())
            return {"case": f"reads: {case}", "against": most, "ratio": reads / max(1, allowed), "reads": reads}

        def fixed() -> int:
            return len(flow(attention, there, [0.0, 0.25, 0.5]))

        def unseen() -> int:
            flow(attention, there, [0.0, 0.25, 0.5], validate=False)
            return 0

        def adaptive() -> int:
            path = flow(attention, there, [0.0, 4.0], step=Adaptive(tol=1e-4))
            return 1 + path.about["evaluations"] // 6  # a step of dopri5

        yield row("rk4 flow, 3 times", "1 + 1 a kept time", fixed)
        yield row("rk4 flow, validate=False", "none", unseen)
        yield row("adaptive flow with mergers", "1 + 1 a step", adaptive)
        balanced = Attention.identity(d, beta=4.0, kind="sinkhorn", device=device)

        def sinkhorn() -> int:
            balanced.drift(there)
            return 2 + SWEEPS

        yield row("Sinkhorn's drift, beta = 4", f"2 + 1 a sweep or Newton step, at most {SWEEPS} here", sinkhorn)
        layers, next_layers = there[None].expand(4, n, d), on((x + 1).expand(4, n, d))

        def distances(method: str, most: int) -> Callable[[], int]:
            def run() -> int:
                wasserstein(layers, next_layers, method=method, rtol=0.1)
                return most

            return run

        yield row("W2 of 4 pairs, assignment", "1", distances("assignment", 1))
        yield row("W2 of 4 pairs, sinkhorn", "2 + 6 a blur", distances("sinkhorn", 2 + 6 * 5))
        for validate in (True, False):
            yield from _of_a_layer(there, validate, row)


def _of_a_layer(x: Tensor, validate: bool, row: Callable[[str, str, Callable[[], int]], Ratio]) -> Iterator[Ratio]:
    layer = ContinuousAttentionLayer(x.shape[-1], 1, beta=4.0, steps=8, validate=validate, device=x.device)
    kept: list[Tensor] = []

    def forward() -> int:
        kept.append(layer(x).sum())
        return int(validate)

    def backward() -> int:
        kept[0].backward()
        return 0

    flag = "" if validate else ", validate=False"
    yield row(f"layer of 8 steps{flag}", "1" if validate else "none", forward)
    yield row(f"its backward pass{flag}", "none", backward)
