"""Run an experiment: its numbers as JSON with seed and versions, its figure as PNG, its claims checked."""

from __future__ import annotations

import inspect
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from attn_flow.base.figures import save_figure
from attn_flow.base.files import plain, versions, write_json
from attn_flow.experiments import load
from attn_flow.hooks.loading import without_bars


def reproduce(
    name: str, out: str | Path | None = None, *, quick: bool = False, seed: int = 0, progress: bool = False
) -> dict[str, Any]:
    """The experiment's numbers, and with `out` the files out/NAME.json and out/NAME.png.

    Experiments of many minutes keep finished parts in out/NAME.parts: the same call goes on after a kill.
    """
    experiment = load(name)
    resumes = "parts" in inspect.signature(experiment.compute).parameters
    kept = {"parts": Path(out) / f"{name}.parts"} if out is not None and resumes else {}
    start = time.perf_counter()
    with nullcontext() if progress else without_bars():
        numbers = experiment.compute(quick=quick, seed=seed, progress=progress, **kept)
    run = {"name": name, "quick": quick, "seed": seed, "seconds": round(time.perf_counter() - start, 1)}
    if out is not None:
        save_figure(experiment.plot(numbers), Path(out) / f"{name}.png", tight=True)
        write_json({"run": {**run, "versions": versions()}, **numbers}, Path(out) / f"{name}.json")
    return {**plain(numbers), "run": run}


def failed(numbers: dict[str, Any]) -> list[dict[str, Any]]:
    """The claims that do not hold."""
    return [claim for claim in numbers["claims"] if not claim["holds"]]
