"""A simulation as a page one can move through: clouds of all betas side by side, their distances, their phases."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from attn_flow.base.files import to_plain, write_bytes
from attn_flow.dynamics.trajectory import Trajectory
from attn_flow.pages.playground import assembled
from attn_flow.prediction.words import phase_words, why_no_t_min

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


def write_page(path: str | Path, numbers: Mapping[str, Any], clouds: Sequence[dict[str, Any] | None]) -> None:
    """Write the page of a run of `attn-flow simulate`, with the `page_clouds` of every run, to the file `path`."""
    limit, d = numbers["limit"], numbers["d"]
    basis = []
    if limit is not None and limit["limit_basis"] is not None and len(limit["limit_basis"][0]) < d <= 3:
        basis = [[*column, 0.0][:3] for column in zip(*limit["limit_basis"])]
    page = {
        "d": d,
        "basis": basis,
        "lead": _lead(numbers, len(basis)),
        "sentences": " ".join(numbers["sentences"]),
        "about": f"{numbers['caption']} The paths are the .safetensors files beside this page; simulate.json has all "
        "numbers.",
        "runs": [_run(run, shown) for run, shown in zip(numbers["runs"], clouds)],
        "curve": "W2 to the predicted limit" if limit is not None else "length of the mean token",
        "columns": ["beta", "least W2", "at t", "predicted t", "W2 at the end", "its course"] * (limit is not None),
        "rows": [] if limit is None else [_row(run) for run in numbers["runs"]],
        "remarks": _remarks(numbers),
    }
    data = json.dumps(to_plain(page), allow_nan=False).replace("<", "\\u003c")
    write_bytes(assembled("simulation.html", "simulation.js").replace("/* data */", data).encode(), path)


def _run(run: Mapping[str, Any], clouds: dict[str, Any] | None) -> dict[str, Any]:
    """One beta: its curve, its phases and its clouds."""
    shown = {name: run[name] for name in ("phases", "t_min_predicted")}
    curve = {"t": run["t"], "y": run["mean_length"] if run["w2"] is None else run["w2"]}
    return {**shown, "name": f"β = {_beta(run['beta'])}", "w2": curve, "clouds": clouds}


def _row(run: Mapping[str, Any]) -> list[Any]:
    predicted = "none" if run["t_min_predicted"] is None else run["t_min_predicted"]
    return [_beta(run["beta"]), run["min_w2"], run["t_min"], predicted, run["w2"][-1], phase_words(run["phases"])]


def _lead(numbers: Mapping[str, Any], k: int) -> str:
    """The first sentences: what is seen, and how near the clouds came."""
    where = {2: "on the circle", 3: "on the sphere"}.get(numbers["d"], f"in dimension {numbers['d']}")
    words = f"{numbers['n']} tokens move {where} as attention moves them. "
    if numbers["limit"] is None:
        return words + "Colours say where a token started."
    if numbers["d"] > 3:
        words += "Clouds are drawn in two and three dimensions only. "
    if k:
        words += f"They should gather {'at the two points in red rings' if k == 1 else 'on the red circle'}. "
    least = min(numbers["runs"], key=lambda run: run["min_w2"])
    return words + (
        f"They come nearest for β = {_beta(least['beta'])}: the distance W2 to the prediction falls from "
        f"{least['w2'][0]:.2g} to {least['min_w2']:.2g} at t = {least['t_min']:.3g}."
    )


def _remarks(numbers: Mapping[str, Any]) -> list[str]:
    """Why nothing rests, which assumptions the cloud does not meet, and why no t_min is predicted."""
    limit, words = numbers["limit"], []
    for run in numbers["runs"]:
        words += [f"β = {_beta(run['beta'])}: {text}." for text in (run["note"], *run["doubts"]) if text]
    if limit is not None and not limit["exit_rate"]:
        words.append(f"No time of least W2 is predicted: {why_no_t_min(limit)}.")
    return words


def _beta(beta: float) -> str:
    return "∞ (hardmax of these tokens)" if math.isinf(beta) else f"{beta:g}"
