"""Run an experiment and write its numbers, with seed and versions, as JSON and its figure as PNG."""

from __future__ import annotations

import inspect
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from attn_flow.base.figures import save_figure
from attn_flow.base.files import to_plain, versions, write_json
from attn_flow.experiments import load


def run_experiment(
    name: str, out: str | Path | None = None, *, quick: bool = False, seed: int = 0, progress: bool = False
) -> dict[str, Any]:
    """Compute an experiment.

    Args:
        name: one of `attn_flow.experiments.NAMES`.
        out: a folder for NAME.json and NAME.png. Experiments of many minutes keep finished parts in NAME.parts there,
            so that the same call continues after a kill.
        quick: small sizes.
        seed: of all random numbers.
        progress: show progress bars.

    Returns:
        Its numbers, with "claims" (each with "value", "expected", "source", "holds") and "run". The figure of a quick
        run says so on itself.
    """
    from attn_flow.hooks.safe_loading import without_bars  # of models that an experiment loads

    experiment = load(name)
    keeps_parts = "parts" in inspect.signature(experiment.compute).parameters
    options = {"parts": Path(out) / f"{name}.parts"} if out is not None and keeps_parts else {}
    start = time.perf_counter()
    with nullcontext() if progress else without_bars():
        numbers = experiment.compute(quick=quick, seed=seed, progress=progress, **options)
    run = {"name": name, "quick": quick, "seed": seed, "seconds": round(time.perf_counter() - start, 1)}
    if out is not None:
        figure = experiment.plot(numbers)
        if quick:
            figure.text(0.995, 0.995, "quick run", ha="right", va="top", fontsize=11, color="#d55e00")
        save_figure(figure, Path(out) / f"{name}.png", tight=True)
        write_json({"run": {**run, "versions": versions()}, **numbers}, Path(out) / f"{name}.json")
    return {**to_plain(numbers), "run": run}
