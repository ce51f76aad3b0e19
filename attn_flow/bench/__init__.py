"""Speed and memory as ratios: each alternative runs beside ours, interleaved in one process, and its peak is measured.

A ratio is ours / theirs, the median over rounds: below 1 we are faster. Wall times of a shared machine mean little.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from attn_flow.base.progress import progress_bar
from attn_flow.bench.cold_drifts import circle, cold, kernel, precision
from attn_flow.bench.compiling import torch_compile
from attn_flow.bench.dense_drifts import drift, memory
from attn_flow.bench.distances import transport
from attn_flow.bench.encoders import encoder
from attn_flow.bench.flows import plateau, sweep
from attn_flow.bench.measure import Row
from attn_flow.bench.shards import sharding
from attn_flow.bench.whole_job import job

CASES: dict[str, Callable[[bool], Iterator[Row]]] = {
    "drift": drift,
    "cold": cold,
    "circle": circle,
    "kernel": kernel,
    "precision": precision,
    "memory": memory,
    "sweep": sweep,
    "plateau": plateau,
    "transport": transport,
    "job": job,
    "encoder": encoder,
    "sharding": sharding,
    "compile": torch_compile,
}


def bench(
    names: list[str] | None = None, *, quick: bool = False, threads: int | None = None, progress: bool = False
) -> dict[str, Any]:
    """Rows of all asked cases, with the threads they ran on; denormals are flushed, so that no ratio flatters us.

    Unless it is asked for by name, a case that lacks a package or a compiler is a row that says so.
    """
    unknown = [name for name in names or [] if name not in CASES]
    if unknown:
        raise ValueError(f"no bench {unknown}; expected some of {', '.join(CASES)}.")
    torch.set_flush_denormal(True)
    if threads is not None:
        torch.set_num_threads(threads)
    rows: list[Row] = []
    with progress_bar("bench", len(names or CASES), progress) as advance:
        for name in names or list(CASES):
            try:
                rows += CASES[name](quick)
            except (ModuleNotFoundError, OSError) as error:
                if names:
                    raise
                rows.append({"case": name, "against": f"not run: {error}", "ratio": None})
            advance(1, note=name)
    return {"threads": torch.get_num_threads(), "rows": rows}
