"""How often the host waits for a value on an accelerator, counted on a simulated one; `python -m` prints the rows.

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


def read_ratios(quick: bool) -> Iterator[Ratio]:
    """Reads of flows, layers and distances against the most that are allowed."""
    done = subprocess.run([sys.executable, "-m", __name__], capture_output=True, text=True)
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


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.stdout.write(json.dumps(list(counted())))
