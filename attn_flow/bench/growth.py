"""How time and memory grow with tokens, heads, dimension, texts and levels: processor time and measured peak."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from attn_flow.attention import Attention
from attn_flow.base.memory import peak_memory
from attn_flow.bench.measure import Ratio
from attn_flow.dynamics.particles import flow
from attn_flow.geometry import Sphere

LONG = 0.5  # seconds: of a case that is not repeated, and of all repetitions of one that is
REPEATED = 7  # times at most


@dataclass(frozen=True)
class Axis:
    """What grows, the sizes it takes, and size -> the work that is measured."""

    name: str
    what: str
    sizes: tuple[int, ...]
    work: Callable[[int], Callable[[], Any]]


def growth_ratios(quick: bool) -> Iterator[Ratio]:
    """A row for each axis: time a unit of size at its largest over that at its smallest, with the fitted exponents."""
    for axis in axes(quick):
        seconds, peaks = [], []
        for size in axis.sizes:
            with torch.no_grad():
                taken, peak = measured(axis.work(size))
            seconds.append(taken)
            peaks.append(peak)
        grown = axis.sizes[-1] / axis.sizes[0]
        yield {
            "case": f"growth: {axis.what}",
            "against": f"linear in {axis.name}, {axis.sizes[0]:,} to {axis.sizes[-1]:,}",
            "ratio": seconds[-1] / seconds[0] / grown,
            "exponent": exponent(axis.sizes, seconds),
            "memory_exponent": exponent(axis.sizes, peaks),
            "axis": axis.name,
            "sizes": list(axis.sizes),
            "seconds": seconds,
            "bytes": peaks,
        }


def axes(quick: bool) -> list[Axis]:
    """The axes, each from where it is a call's overhead to where it is the work."""
    cold = (1_000, 4_000, 16_000) if quick else (1_000, 10_000, 100_000, 300_000, 1_000_000)
    dense = (500, 1_000, 2_000) if quick else (1_000, 3_000, 10_000, 30_000, 100_000)
    few = lambda *sizes: sizes[:3] if quick else sizes
    return [
        Axis("n", "a cold drift, d = 3, beta = 10,000", cold, lambda n: _drift(n, 3, 1e4)),
        Axis("n", "a dense drift, d = 3, beta = 1, all keys", dense, lambda n: _drift(n, 3, 1.0, truncation=0.0)),
        Axis("heads", "a drift of heads of width 16, n = 1,000, d = 64", few(1, 2, 4, 8, 16, 32, 64), _of_heads),
        Axis("d", "a drift, n = 1,000, beta = 1", few(2, 4, 8, 16, 32, 64, 128, 256, 512), _of_dimension),
        Axis("texts", "a drift of texts of 256 tokens, d = 64", few(1, 2, 4, 8, 16, 32, 64), _of_texts),
        Axis("levels", "a flow of so many levels, n = 256, d = 64, rk4", few(1, 2, 4, 8, 16, 32, 64), _of_levels),
    ]


def exponent(sizes: tuple[int, ...] | list[int], values: list[float] | list[int]) -> float:
    """The slope of log value over log size on the upper half of the sizes (two at least), by least squares."""
    upper = max(2, math.ceil(len(sizes) / 2))
    x, y = (torch.tensor(z[-upper:], dtype=torch.float64).log() for z in (sizes, values))
    x, y = x - x.mean(), y - y.mean()
    return float((x * y).sum() / x.square().sum())


def measured(work: Callable[[], Any]) -> tuple[float, int]:
    """The least processor time of a few runs, or of the one whose memory was watched where it was long; the peak."""
    taken: list[float] = []

    def once() -> None:
        start = time.process_time()
        work()
        taken.append(time.process_time() - start)

    peak = peak_memory(once)
    if taken[0] > LONG:
        return taken[0], peak
    taken.clear()  # what is made once was paid for
    while len(taken) < REPEATED and sum(taken) < LONG:
        once()
    return min(taken), peak


def _cloud(n: int, d: int, *batch: int) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.nn.functional.normalize(torch.randn(*batch, n, d, generator=generator), dim=-1)


def _drift(n: int, d: int, beta: float, truncation: float | None = None) -> Callable[[], Tensor]:
    return partial(Attention.identity(d, beta, truncation=truncation).drift, _cloud(n, d))


def _of_dimension(d: int) -> Callable[[], Tensor]:
    return _drift(1_000, d, 1.0)


def _of_heads(heads: int) -> Callable[[], Tensor]:
    attention = Attention.random(64, heads, 16, generator=torch.Generator().manual_seed(0))
    return partial(attention.drift, _cloud(1_000, 64))


def _of_texts(texts: int) -> Callable[[], Tensor]:
    return partial(Attention.identity(64).drift, _cloud(256, 64, texts))


def _of_levels(levels: int) -> Callable[[], Any]:
    t = 0.1 * torch.arange(levels + 1)
    return partial(flow, Attention.identity(64), _cloud(256, 64), t, h=0.1, geometry=Sphere())
