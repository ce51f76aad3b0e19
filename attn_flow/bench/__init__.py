"""Speed and memory as ratios: each alternative runs beside ours, interleaved in one process, and its peak is measured.

A ratio is ours / theirs, the median over rounds: below 1 we are faster. Wall times of a shared machine mean little;
`ratio_of_processor` is by the processor's time of the first thread, in the same runs.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from attn_flow.base.progress import progress_bar
from attn_flow.bench.choices import choice_ratios
from attn_flow.bench.cold_drifts import circle_ratios, cold_ratios, kernel_ratios, precision_ratios
from attn_flow.bench.compiling import compile_ratios
from attn_flow.bench.dense_drifts import drift_ratios, memory_ratios
from attn_flow.bench.distances import transport_ratios
from attn_flow.bench.encoders import encoder_ratios
from attn_flow.bench.flows import plateau_ratios, sweep_ratios
from attn_flow.bench.growth import growth_ratios
from attn_flow.bench.layers import layer_ratios
from attn_flow.bench.measure import Ratio
from attn_flow.bench.reads import read_ratios
from attn_flow.bench.shards import sharding_ratios
from attn_flow.bench.whole_job import job_ratios

CASES: dict[str, Callable[[bool], Iterator[Ratio]]] = {
    "drift": drift_ratios,
    "cold": cold_ratios,
    "circle": circle_ratios,
    "kernel": kernel_ratios,
    "choice": choice_ratios,
    "precision": precision_ratios,
    "memory": memory_ratios,
    "growth": growth_ratios,
    "sweep": sweep_ratios,
    "plateau": plateau_ratios,
    "transport": transport_ratios,
    "job": job_ratios,
    "encoder": encoder_ratios,
    "sharding": sharding_ratios,
    "layer": layer_ratios,
    "compile": compile_ratios,
    "reads": read_ratios,
}


def ratios(
    names: Sequence[str] | None = None,
    *,
    quick: bool = False,
    threads: int | None = None,
    progress: bool = False,
    cases: Mapping[str, Callable[[bool], Iterator[Ratio]]] = CASES,
) -> dict[str, Any]:
    """Rows of all asked cases, with the threads they ran on; denormals are flushed, so that no ratio flatters us.

    Args:
        names: keys of `cases`; all of them if None.
        quick: small sizes.
        threads: torch's threads from now on; None leaves them.
        progress: a bar on standard error.
        cases: name -> function of `quick` that yields rows {"case", "against", "ratio", ...}.

    Returns:
        {"processor": its name and torch's instruction set, "threads": int, "rows": [...]}. Unless it is
        asked for by name, a case that lacks a package or a compiler is a row that says so.

    >>> ratios(cases={"ours": lambda quick: iter([{"case": "a", "against": "b", "ratio": 0.5}])})["rows"][0]["ratio"]
    0.5
    """
    unknown = [name for name in names or [] if name not in cases]
    if unknown:
        raise ValueError(f"no bench {unknown}; expected some of {', '.join(cases)}.")
    if threads is not None and threads < 1:
        raise ValueError(f"threads = {threads}, expected at least 1.")
    if threads is not None:
        torch.set_num_threads(threads)
    rows: list[Ratio] = []
    with _flushed_denormals(), progress_bar("bench", len(names or cases), progress) as advance:
        for name in names or list(cases):
            try:
                rows += cases[name](quick)
            except (ModuleNotFoundError, OSError) as error:
                if names:
                    raise
                rows.append({"case": name, "against": f"not run: {error}", "ratio": None})
            advance(1, note=name)
    return {"processor": _processor(), "threads": torch.get_num_threads(), "rows": rows}


def _processor() -> str:
    """Which processor it was, and the instructions that torch uses of it (ATEN_CPU_CAPABILITY chooses others)."""
    known = Path("/proc/cpuinfo")
    lines = known.read_text().splitlines() if known.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{(names or [platform.machine()])[0]}, {torch.backends.cpu.get_cpu_capability()}"


@contextmanager
def _flushed_denormals() -> Iterator[None]:
    """Denormal numbers are 0 while it runs: they slow a plain softmax, and would flatter ours."""
    flushed = float(torch.tensor([1e-310], dtype=torch.float64).mul(1.0)) == 0  # torch does not tell
    torch.set_flush_denormal(True)
    try:
        yield
    finally:
        torch.set_flush_denormal(flushed)
