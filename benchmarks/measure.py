"""Two implementations, timed in turns in one process, and the peak memory of one in a process of its own."""

from __future__ import annotations

import multiprocessing
import platform
import statistics
import time
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch


def seconds_in_turns(ours: Callable[[], Any], theirs: Callable[[], Any], rounds: int = 7) -> tuple[float, float]:
    """Median seconds of two functions, called in turns after one call each that is not counted.

    A load of the machine that changes slowly affects both alike, so that their ratio is more stable than either.
    """
    times: tuple[list[float], list[float]] = ([], [])
    for turn in range(rounds + 1):
        for function, seconds in zip((ours, theirs), times):
            start = time.perf_counter()
            function()
            if turn > 0:
                seconds.append(time.perf_counter() - start)
    return statistics.median(times[0]), statistics.median(times[1])


def peak_megabytes(function: Callable[..., Any], *args: Any) -> float:
    """How much the resident memory of a new process grows at most while it calls function(*args)."""
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_send_peak, args=(sender, function, args))
    process.start()
    sender.close()
    try:
        return float(receiver.recv())
    finally:
        process.join()


def _send_peak(sender: Any, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    function(*(args[:-1] + (64,)))  # a small problem first: imports and buffers of the libraries are not counted
    Path("/proc/self/clear_refs").write_text("5")  # Linux: the largest resident memory is counted from here
    before = _megabytes("VmRSS")
    function(*args)
    sender.send(_megabytes("VmHWM") - before)


def _megabytes(name: str) -> float:
    """A line of the memory of this process: VmRSS now, VmHWM the largest since the last reset."""
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(lines[name].split()[0]) / 1024


def machine() -> dict[str, str]:
    """The processor, its instruction set as torch uses it, the number of threads, and versions."""
    information = Path("/proc/cpuinfo")
    lines = information.read_text().splitlines() if information.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    facts = {
        "processor": f"{(names or [platform.machine()])[0]}, {torch.backends.cpu.get_cpu_capability()}",
        "threads": str(torch.get_num_threads()),
        "python": platform.python_version(),
    }
    for package in ("attn-flow", "torch", "transformers", "POT", "torchdiffeq"):
        try:
            facts[package] = version(package)
        except PackageNotFoundError:
            facts[package] = "not installed"
    return facts
