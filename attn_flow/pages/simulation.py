"""A simulation as a page one can move through: clouds of all betas side by side, their distances, their phases."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from attn_flow.base.files import to_plain, write_bytes
from attn_flow.dynamics import Trajectory
from attn_flow.pages.playground import assembled

TOKENS, TIMES = 500, 100  # shown at most; the numbers are of all of them


def page_clouds(path: Trajectory) -> dict[str, Any] | None:
    """Times t and clouds x of a path, few enough for a page; None in dimensions that are not drawn."""
    if path.x.shape[-1] not in (2, 3):
        return None
    times = torch.linspace(0, len(path) - 1, min(len(path), TIMES)).round().long()
    n = path.x.shape[-2]
    tokens = torch.linspace(0, n - 1, min(n, TOKENS)).round().long()
    x = path.x[times][:, tokens].double().cpu()
    return {"t": path.t[times].tolist(), "x": [[[round(v, 4) for v in y] for y in z] for z in x.tolist()]}


def write_simulation(path: str | Path, numbers: Mapping[str, Any], clouds: Sequence[dict[str, Any] | None]) -> Path:
    """Write the page of what `attn-flow simulate` found, with the `page_clouds` of every run, to the file `path`."""
    limit = numbers["limit"]
    d = len(limit["terminal_basis"])
    runs = [_run(run, shown) for run, shown in zip(numbers["runs"], clouds)]
    basis = limit["basis"] if limit["basis"] is not None and limit["dimension"] <= 2 and d <= 3 else []
    page = {
        "d": d,
        "basis": [[*column, 0.0][:3] for column in zip(*basis)],
        "told": _told(limit, numbers["n"], d),
        "about": "The paths themselves lie beside this page as .safetensors files, all numbers in simulate.json.",
        "runs": runs,
        "columns": ["beta", "least W2", "at t", "predicted t_min", "W2 at the end", "tokens resolve it", "phases"],
        "rows": [_row(run) for run in numbers["runs"]],
        "doubts": sorted({doubt for run in numbers["runs"] for doubt in _doubts(run, limit)}),
    }
    data = json.dumps(to_plain(page), allow_nan=False).replace("<", "\\u003c")
    path = Path(path)
    write_bytes(assembled("simulation.html", "simulation.js").replace("/* data */", data).encode(), path)
    return path


def _run(run: Mapping[str, Any], clouds: dict[str, Any] | None) -> dict[str, Any]:
    """One beta: its distances, its phases and its clouds."""
    shown = {name: run[name] for name in ("phases", "t_min_predicted")}
    return {**shown, "name": f"β = {_beta(run['beta'])}", "w2": {"t": run["t"], "y": run["w2"]}, "clouds": clouds}


def _row(run: Mapping[str, Any]) -> list[Any]:
    phases = ", ".join(f"{p['phase']} {p['start']:.3g} to {p['end']:.3g}" for p in run["phases"])
    predicted = "none" if run["t_min_predicted"] is None else run["t_min_predicted"]
    verdict = run["resolution"]["verdict"]
    return [_beta(run["beta"]), run["min_w2"], run["t_min"], predicted, run["w2"][-1], verdict, phases]


def _doubts(run: Mapping[str, Any], limit: Mapping[str, Any]) -> list[str]:
    """What the cloud does not meet, why nothing rests, and why no t_min is predicted."""
    words = [*run["doubts"], f"β = {_beta(run['beta'])}: {run['note']}"]
    if run["t_min_predicted"] is None and 1 < run["beta"] < math.inf:
        words += [f"No t_min is predicted. {need['text']}" for need in limit["requires"] if need["met"] is False]
    return words


def _beta(beta: float) -> str:
    return "∞ (hardmax of these tokens)" if math.isinf(beta) else f"{beta:g}"


def _told(limit: Mapping[str, Any], n: int, d: int) -> str:
    """What was predicted, in words."""
    known = f"{n} tokens in d = {d}; the limit is {limit['case']}: {limit['reason']}."
    if d > 3:
        return f"{known} Clouds are drawn in two and three dimensions only."
    where = {1: " The red rings are the two points of the predicted limit.", 2: " The red circle is the set E."}
    return f"{known}{where.get(limit['dimension'] or 0, '')} A token keeps the colour of the place where it started."
