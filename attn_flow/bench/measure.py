"""Two ways side by side: interleaved runs in one process, and the loop a researcher would write."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

Ratio = dict[str, Any]


def interleaved(
    functions: Mapping[str, Callable[[], Any]], rounds: int, before: Callable[[], None] = lambda: None
) -> dict[str, float]:
    """Median seconds of each function, all run once a round after one warm-up round; `before` each, not counted."""
    times: dict[str, list[float]] = {name: [] for name in functions}
    for turn in range(rounds + 1):
        for name, function in functions.items():
            before()
            start = time.perf_counter()
            function()
            if turn:
                times[name].append(time.perf_counter() - start)
    return {name: statistics.median(values) for name, values in times.items()}


def plain_drift(x: Tensor, beta: float) -> Tensor:
    """The six-line loop of a researcher."""
    return torch.softmax(beta * x @ x.mT, dim=-1) @ x
