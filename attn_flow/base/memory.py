"""How much memory a computation needs beyond what was there before it, and whether that is free."""

from __future__ import annotations

import gc
import math
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

# Controller in /proc/self/cgroup (none in version 2): its folder, and where the limit, the use and the cache are told.
CONTROL_GROUPS = {
    "": ("", "memory.max", "memory.current", "inactive_file"),
    "memory": ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
}
UNASKED = 2**26  # bytes below which no system is asked: that takes a millisecond


def require(needed: float, what: str, remedy: str, device: torch.device | str = "cpu") -> None:
    """Raise MemoryError if `what` needs more bytes than are free on the device: before it starts, not in its middle."""
    free = None if needed < UNASKED else available(device)
    if free is not None and needed > free:
        raise MemoryError(f"{what} needs about {_gigabytes(needed)}, {_gigabytes(free)} are free: {remedy}.")


def require_tensor(*shape: int, dtype: torch.dtype | None = None, device: torch.device | str | None = None) -> None:
    """Raise MemoryError if a new tensor of this shape is larger than what is free; None: torch's own."""
    size = math.prod(shape) * (dtype or torch.get_default_dtype()).itemsize
    place = torch.get_default_device() if device is None else device
    require(size, f"a tensor of {' x '.join(map(str, shape))} numbers", "ask for fewer of them", place)


def available(device: torch.device | str = "cpu") -> int | None:
    """Bytes this process can still allocate on the device, None where the system does not say.

    On CPU the least of what the machine and the control groups of this process have left, shared evenly by the
    processes that torchrun started on it.
    """
    device = torch.device(device)
    if device.type == "cuda":
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)  # held by torch's allocator
        return torch.cuda.mem_get_info(device)[0] + unused
    if device.type != "cpu":
        return None
    left = [*_machine(), *_control_groups()]
    return min(left) // int(os.environ.get("LOCAL_WORLD_SIZE", "1")) if left else None


def _machine(root: Path = Path("/")) -> Iterator[int]:
    meminfo = root / "proc/meminfo"
    if meminfo.is_file():
        yield _fields(meminfo)["MemAvailable:"] * 1024
    elif hasattr(os, "sysconf"):  # macOS has the second only: all of the memory, which is still a bound
        names = [name for name in ("SC_AVPHYS_PAGES", "SC_PHYS_PAGES") if name in os.sysconf_names]
        yield from (os.sysconf(name) * os.sysconf("SC_PAGE_SIZE") for name in names[:1])


def _control_groups(root: Path = Path("/")) -> Iterator[int]:
    """What every limited control group above this process has left; file pages it can drop count as free."""
    listing = root / "proc/self/cgroup"
    for line in listing.read_text().splitlines() if listing.is_file() else ():
        _, controllers, name = line.split(":", 2)
        for controller in CONTROL_GROUPS.keys() & controllers.split(","):
            mount, limit, used, cached = CONTROL_GROUPS[controller]
            top = root / "sys/fs/cgroup" / mount
            group = top / name.lstrip("/")
            for folder in (group, *group.parents):
                if (folder / limit).is_file() and (most := (folder / limit).read_text().strip()) != "max":
                    in_use = int((folder / used).read_text()) - _fields(folder / "memory.stat").get(cached, 0)
                    yield max(0, int(most) - in_use)
                if folder == top:
                    break


def _fields(file: Path) -> dict[str, int]:
    """Lines of a name and a number."""
    return {words[0]: int(words[1]) for words in map(str.split, file.read_text().splitlines())}


def _gigabytes(size: float) -> str:
    return f"{size / 1e9:.1f} GB" if size >= 1e8 else f"{size / 1e6:.3g} MB"


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
    gc.collect()  # cycles that an earlier run left would be given back in this one, and taken off its sum
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        function()
    kineto = profile.profiler.kineto_results  # type: ignore[union-attr]
    events = [(event.start_ns(), event.nbytes()) for event in kineto.events() if event.name() == "[memory]"]
    level = peak = 0
    for _, change in sorted(events, key=lambda event: event[0]):
        level += change
        peak = max(peak, level)
    return peak
