"""The memory of tensors that a call holds at its worst moment."""

import gc
import os
from collections.abc import Callable
from typing import Any

import torch


def peak_memory(function: Callable[[], Any]) -> int:
    """Bytes of tensor memory that `function` holds at its worst moment, its result included, beyond what was there.

    On CUDA this is the allocator's high-water mark. On CPU torch's profiler reports every allocation and release,
    also inside kernels, and this is the largest running sum, which does not depend on what the C library keeps.
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
    gc.collect()  # cycles that an earlier call left would be released during this one
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        function()
    events = profile.profiler.kineto_results.events()  # type: ignore[union-attr]
    changes = [(event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]"]
    level = peak = 0
    for _, change in sorted(changes, key=lambda entry: entry[0]):
        level += change
        peak = max(peak, level)
    return peak
