"""Distances between clouds: time, memory and error of every solver, side by side."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor

from attn_flow.base.memory import available
from attn_flow.bench.measure import Ratio, interleaved
from attn_flow.geometry import Sphere
from attn_flow.transport.coupling import SIMPLEX_BYTES
from attn_flow.transport.distances import solve, wasserstein
from attn_flow.transport.entropic import divergence

BLUR, SCALING = 0.05, 0.5  # geomloss's own
TENSORIZED = 4000  # points a side up to which geomloss without KeOps is waited for


def transport_ratios(quick: bool) -> Iterator[Ratio]:
    """W2 of spread, clustered and collapsed clouds, every way against POT dense; our Sinkhorn against geomloss."""
    sizes = {500: 3} if quick else {2000: 3, 10_000: 1}
    for n, kinds in sizes.items():
        if SIMPLEX_BYTES * n**2 < (available() or math.inf):
            for name, (x, y) in list(clouds(n).items())[:kinds]:
                yield from side_by_side(f"W2 n={n} d=3 {name}", x, y, 1 if quick or n > TENSORIZED else 3)
    for d in (3, 64):
        yield schedule(500 if quick else TENSORIZED, d)


def clouds(n: int) -> dict[str, Tensor]:
    """Pairs of clouds (2, n, 3) on the sphere, from spread to collapsed."""
    generator = torch.Generator().manual_seed(0)
    spread = Sphere().uniform((2, n), 3, generator=generator, dtype=torch.float64)
    centres = Sphere().uniform(5, 3, generator=generator, dtype=torch.float64)
    pick = torch.randint(5, (2, n), generator=generator)
    noise = torch.randn(2, n, 3, generator=generator, dtype=torch.float64)
    return {"spread": spread, "clustered": centres[pick] + 1e-2 * noise, "collapsed": centres[pick]}


def side_by_side(case: str, x: Tensor, y: Tensor, rounds: int) -> Iterator[Ratio]:
    """Every way to W2 with its time against POT dense, the resident memory it adds, and its relative error."""
    import ot

    method = solve(x, y).method
    uniform = torch.full((len(x),), 1 / len(x), dtype=torch.float64)
    generator = torch.Generator().manual_seed(0)
    ways: dict[str, Callable[[], float]] = {
        "POT dense": lambda: float(ot.emd2(uniform, uniform, torch.cdist(x, y) ** 2, numItermax=10**7)) ** 0.5,
        f"ours ({method})": lambda: float(wasserstein(x, y)),
        "ours, Sinkhorn": lambda: math.sqrt(2 * max(sinkhorn(x.float(), y.float()), 0.0)),
        "sliced, another distance": lambda: float(wasserstein(x, y, method="sliced", generator=generator)),
    }
    if len(x) <= TENSORIZED:
        ways["geomloss tensorized"] = lambda: math.sqrt(2 * max(geomloss(x.float(), y.float()), 0.0))
    seconds = interleaved(ways, rounds)
    exact = ways["POT dense"]()
    for way, function in ways.items():
        yield {
            "case": f"{case}: {way}",
            "against": "POT dense",
            "ratio": seconds[way] / seconds["POT dense"],
            "seconds": seconds[way],
            "resident_mb": resident(function),
            "relative_error": abs(function() - exact) / exact,
        }


def schedule(n: int, d: int) -> Ratio:
    """The Sinkhorn divergence of Gaussian clouds in float32, blur 5% of the diameter: the same schedule as geomloss."""
    x, y = torch.randn(2, n, d, generator=torch.Generator().manual_seed(0))
    y = y + 0.5
    blur = BLUR * diameter(x, y)
    seconds = interleaved({"ours": lambda: sinkhorn(x, y, blur), "theirs": lambda: geomloss(x, y, blur)}, 1)
    known = geomloss(x, y, blur)
    return {
        "case": f"Sinkhorn schedule n={n} d={d} float32",
        "against": "geomloss tensorized",
        "ratio": seconds["ours"] / seconds["theirs"],
        "ours_s": seconds["ours"],
        "relative_difference": abs(sinkhorn(x, y, blur) - known) / known,
    }


def sinkhorn(x: Tensor, y: Tensor, blur: float = BLUR) -> float:
    """W2^2 / 2 as our schedule estimates it."""
    a, b = (torch.full((len(z),), 1 / len(z)) for z in (x, y))
    return divergence(x, a, y, b, blur, SCALING, diameter(x, y)).value


def geomloss(x: Tensor, y: Tensor, blur: float = BLUR) -> float:
    """W2^2 / 2 as geomloss estimates it, with dense matrices."""
    from geomloss import SamplesLoss

    options = {"blur": blur, "scaling": SCALING, "diameter": diameter(x, y), "backend": "tensorized"}
    return float(SamplesLoss("sinkhorn", p=2, **options)(x, y))


def diameter(x: Tensor, y: Tensor) -> float:
    both = torch.cat([x, y])
    return float((both.amax(0) - both.amin(0)).norm())


def resident(function: Callable[[], object]) -> float:
    """Megabytes of resident memory that a call adds at its worst: what no allocator of torch or numpy sees, too.

    NaN where the system keeps no high-water mark that can be set back (only Linux does).
    """
    status, reset = Path("/proc/self/status"), Path("/proc/self/clear_refs")
    if not reset.exists():
        return math.nan
    mark = lambda: int(status.read_text().split("VmHWM:")[1].split()[0]) / 1e3
    reset.write_text("5")
    before = mark()
    function()
    return mark() - before
