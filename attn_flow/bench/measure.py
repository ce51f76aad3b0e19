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
    functions: Mapping[str, Callable[[], Any]],
    rounds: int,
    before: Callable[[], None] = lambda: None,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, float]:
    """Median seconds of each function, all run once a round after one warm-up round; `before` each, not counted.

    clock: time.process_time counts the processor's time of all threads, whatever else the machine does.
    """
    times: dict[str, list[float]] = {name: [] for name in functions}
    for turn in range(rounds + 1):
        for name, function in functions.items():
            before()
            start = clock()
            function()
            if turn:
                times[name].append(clock() - start)
    return {name: statistics.median(values) for name, values in times.items()}


def plain_drift(x: Tensor, beta: float) -> Tensor:
    """The six-line loop of a researcher."""
    return torch.softmax(beta * x @ x.mT, dim=-1) @ x
