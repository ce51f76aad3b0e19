"""Distances between clouds: time, memory and error of every solver."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from attn_flow.bench.measure import Row, interleaved
from attn_flow.geometry import Sphere
from attn_flow.transport import solve


def transport(quick: bool) -> Iterator[Row]:
    """W2 of spread, clustered and collapsed clouds: ours against POT's dense network simplex, with the error found."""
    import ot

    n = 500 if quick else 2000
    generator = torch.Generator().manual_seed(0)
    spread = Sphere().uniform((2, n), 3, generator=generator, dtype=torch.float64)
    centres = Sphere().uniform(5, 3, generator=generator, dtype=torch.float64)
    pick = torch.randint(5, (2, n), generator=generator)
    noise = torch.randn(2, n, 3, generator=generator, dtype=torch.float64)
    clouds = {"spread": spread, "clustered": centres[pick] + 1e-2 * noise, "collapsed": centres[pick]}
    uniform = torch.full((n,), 1 / n, dtype=torch.float64)
    for name, (x, y) in clouds.items():

        def dense(x: Tensor = x, y: Tensor = y) -> float:
            return float(ot.emd2(uniform, uniform, torch.cdist(x, y) ** 2)) ** 0.5

        seconds = interleaved({"ours": partial(solve, x, y), "dense": dense}, 1 if quick else 3)
        found = solve(x, y)
        yield {
            "case": f"W2 n={n} d=3 {name} ({found.method})",
            "against": "POT dense",
            "ratio": seconds["ours"] / seconds["dense"],
            "ours_s": seconds["ours"],
            "relative_error": abs(float(found.distance) - dense()) / dense(),
        }
