"""Which way a drift takes: every way's time beside that of the one that is chosen by itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from attn_flow.attention import Attention, truncated
from attn_flow.averages import fourier, near
from attn_flow.bench.measure import Ratio, interleaved
from attn_flow.geometry import Sphere

WRONG = 1.25  # times the fastest way beyond which the choice counts as wrong: less is the noise of a shared machine


def choice_ratios(quick: bool) -> Iterator[Ratio]:
    """The chosen way against the fastest of all, small to large, hot to cold; last, how many were wrong."""
    sizes = (1024, 4096) if quick else (1024, 2048, 4096, 8192, 16384)
    wrong = cases = 0
    for d in (2, 3):
        for n in sizes:
            for beta in (1.0, 1e2, 1e4):
                row = _row(n, d, beta, quick)
                wrong, cases = wrong + (row["ratio"] > WRONG), cases + 1
                yield row
    yield {"case": f"wrong choices of {cases}", "against": f"{WRONG} x the fastest way", "ratio": wrong / cases}


def _row(n: int, d: int, beta: float, quick: bool) -> Ratio:
    x = Sphere().uniform(n, d, generator=torch.Generator().manual_seed(0))
    attention = Attention.identity(d, beta)
    with torch.no_grad():
        ways = ways_of(attention, x)
        seconds = interleaved({"chosen": partial(attention.drift, x), **ways}, 3 if quick else 7)
    chosen = seconds.pop("chosen")
    fastest = min(seconds, key=lambda way: seconds[way])
    return {
        "case": f"choice n={n} d={d} beta={beta:g}",
        "against": f"{fastest}, the fastest way",
        "ratio": chosen / seconds[fastest],
        "ours_s": chosen,
        **{f"{way}_s": time for way, time in seconds.items()},
    }


def ways_of(attention: Attention, x: Tensor) -> dict[str, Callable[[], Tensor]]:
    """Name -> the drift of tokens x (n, d) that are queries and keys, by every way that can give it."""
    tolerance, beta = truncated.TRUNCATION[x.dtype], float(attention.beta)

    def near_keys() -> Tensor:
        x64 = x.double()
        found = near.softmax(x64, x64, x, tolerance=tolerance, scale=beta)
        assert found is not None  # every share of pairs is taken
        return found.average

    ways: dict[str, Callable[[], Tensor]] = {
        "dense": partial(replace(attention, truncation=0.0).drift, x),
        "near": near_keys,
    }
    if x.shape[-1] == 2:
        ways["fourier"] = lambda: fourier.softmax(*(x.double(),) * 2, x, tolerance=tolerance, scale=beta).average
    return ways
