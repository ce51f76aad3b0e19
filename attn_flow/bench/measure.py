"""Two ways side by side: interleaved runs in one process, and the loop a researcher would write."""

from __future__ import annotations

import ctypes
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

Ratio = dict[str, Any]
# Of the wall, and of the processor for the first thread: what a call takes while nobody else wants the machine, for the
# other threads work meanwhile and those that wait sleep (OMP_WAIT_POLICY=PASSIVE; by default they spin a while).
CLOCKS = (time.perf_counter, time.thread_time)


def interleaved(
    functions: Mapping[str, Callable[[], Any]],
    rounds: int,
    before: Callable[[], None] = lambda: None,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, float]:
    """Median seconds of each function, all run once a round after one warm-up round; `before` each, not counted.

    clock: time.process_time counts the processor's time of all threads, whatever else the machine does.
    """
    return on_clocks(functions, rounds, (clock,), before)[0]


def on_clocks(
    functions: Mapping[str, Callable[[], Any]],
    rounds: int,
    clocks: Sequence[Callable[[], float]] = CLOCKS,
    before: Callable[[], None] = lambda: None,
) -> list[dict[str, float]]:
    """What `interleaved` returns, by each of several clocks in the same runs."""
    times: list[dict[str, list[float]]] = [{name: [] for name in functions} for _ in clocks]
    for turn in range(rounds + 1):
        for name, function in functions.items():
            before()
            start = [clock() for clock in clocks]
            function()
            end = [clock() for clock in clocks]
            if turn:
                for found, *ends in zip(times, start, end):
                    found[name].append(ends[1] - ends[0])
    return [{name: statistics.median(values) for name, values in found.items()} for found in times]


def keep_pages() -> None:
    """Let this process keep the memory that it frees (glibc alone can).

    By default large tensors go back to the system and come again page by page: 0 to 80,000 page faults of a
    microsecond in one forward pass of an encoder, which differ from process to process and not by what is measured.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None:
        trim_threshold, mmap_threshold = -1, -3  # as malloc.h numbers them; the second takes 32 MB at most
        mallopt(trim_threshold, 2**31 - 1)
        mallopt(mmap_threshold, 2**25)


def plain_drift(x: Tensor, beta: float) -> Tensor:
    """The six-line loop of a researcher."""
    return torch.softmax(beta * x @ x.mT, dim=-1) @ x
