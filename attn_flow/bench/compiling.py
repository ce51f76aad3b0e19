"""torch.compile of one step of the flow."""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from attn_flow.attention import Attention
from attn_flow.bench.measure import Ratio, interleaved
from attn_flow.dynamics.steppers import rk4
from attn_flow.geometry import Sphere


def compile_ratios(quick: bool) -> Iterator[Ratio]:
    """One rk4 step of the flow on the sphere, compiled against eager, and how long compiling it took."""
    sphere = Sphere()
    for n, d in [(64, 3)] if quick else [(n, d) for d in (3, 64) for n in (64, 256, 1000)]:
        attention = Attention.identity(d, 4.0)

        def step(x: Tensor, attention: Attention = attention) -> Tensor:
            return rk4(lambda t, y: sphere.tangent(y, attention.drift(y)), 0.0, x, 0.1, sphere)

        x = sphere.uniform(n, d, generator=torch.Generator().manual_seed(0))
        with torch.no_grad():
            torch.compiler.reset()
            fused, start = torch.compile(step, dynamic=False), time.perf_counter()
            fused(x)
            compiling = time.perf_counter() - start
            difference = float((fused(x) - step(x)).abs().max())
            seconds = interleaved({"compiled": partial(fused, x), "eager": partial(step, x)}, 5 if quick else 50)
        yield {
            "case": f"compiled rk4 step n={n} d={d}",
            "against": "eager",
            "ratio": seconds["compiled"] / seconds["eager"],
            "eager_s": seconds["eager"],
            "compiling_s": compiling,
            "difference": difference,
        }
