"""How much memory a computation needs beyond what was there before it."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch


def peak_memory(function: Callable[[], Any]) -> int:
    """Bytes of tensor memory that `function` holds at its worst moment, its result included, above what it found.

    On CUDA the allocator's own high-water mark. On CPU torch's profiler reports every allocation and release, those
    inside kernels too, and this is the largest running sum: exact and repeatable, where resident memory depends on
    what the C library keeps. What is not torch's (BLAS's packing buffers, Python) is not in it.
    """
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        function()
        torch.cuda.synchronize()
        on_device = torch.cuda.max_memory_allocated() - before
        if on_device > 0:
            return on_device
    os.environ.setdefault("KINETO_LOG_LEVEL", "5")
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        function()
    kineto = profile.profiler.kineto_results  # type: ignore[union-attr]
    events = [(event.start_ns(), event.nbytes()) for event in kineto.events() if event.name() == "[memory]"]
    level = peak = 0
    for _, change in sorted(events, key=lambda event: event[0]):
        level += change
        peak = max(peak, level)
    return peak
