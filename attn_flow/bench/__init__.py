"""Speed and memory as ratios: each alternative runs beside ours, interleaved in one process, and its peak is measured.

A ratio is ours / theirs, the median over rounds: below 1 we are faster. Wall times of a shared machine mean little.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from attn_flow.bench.cold import circle, cold, kernel, precision
from attn_flow.bench.compiled import compiled
from attn_flow.bench.drift import drift, memory
from attn_flow.bench.encoder import encoder
from attn_flow.bench.flow import plateau, sweep
from attn_flow.bench.job import job
from attn_flow.bench.measure import Row
from attn_flow.bench.sharding import sharding
from attn_flow.bench.transport import transport

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
    "compile": compiled,
}


def bench(names: list[str] | None = None, *, quick: bool = False, threads: int | None = None) -> dict[str, Any]:
    """Rows of all asked cases, with the threads they ran on; denormals are flushed, so that no ratio flatters us."""
    unknown = [name for name in names or [] if name not in CASES]
    if unknown:
        raise ValueError(f"no bench {unknown}; expected some of {', '.join(CASES)}.")
    torch.set_flush_denormal(True)
    if threads is not None:
        torch.set_num_threads(threads)
    rows = [row for name in names or list(CASES) for row in CASES[name](quick)]
    return {"threads": torch.get_num_threads(), "rows": rows}
