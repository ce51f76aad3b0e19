"""A simulation: the flow of a cloud at several betas, compared with the predicted limit, and its folder of files."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from attn_flow.attention.attention import Attention
from attn_flow.base import checks
from attn_flow.base.figures import save_figure
from attn_flow.base.files import versions, write_json
from attn_flow.drawing import clouds_figure
from attn_flow.dynamics.flow import flow
from attn_flow.dynamics.noise import independent
from attn_flow.dynamics.trajectory import Trajectory
from attn_flow.measures.cloud import Cloud, as_cloud
from attn_flow.pages.figures import beta_words, simulation_figure
from attn_flow.pages.simulation_page import page_clouds, write_page
from attn_flow.prediction.limit_map import LimitMap, limit
from attn_flow.prediction.phases import phases
from attn_flow.prediction.words import limit_sentences

MAX_TIMES = 200  # at which W2 is measured if only the end is given
FILES = ("simulate.json", "simulate.png", "simulate.html", "path_beta_*.safetensors", "clouds_beta_*.png")


def run_simulation(
    attention: Attention,
    betas: Sequence[float],
    cloud: Tensor | Cloud,
    t: Sequence[float],
    h: float = 0.1,
    step: str = "rk4",
    *,
    noise: float = 0.0,
    seed: int = 0,
    out: str | Path | None = None,
    progress: bool = False,
) -> dict[str, Any]:
    """Run a flow for every beta and measure its distance to the predicted limit.

    Args:
        attention: the attention, whose own beta is not used.
        cloud: the initial tokens (n, d).
        t: one end T, or at least three increasing times.
        noise, seed: independent noise of every token per unit of time, and its seed.
        out: a folder for the paths, figures, a page and simulate.json; files of an earlier run there are removed.

    Returns:
        "limit" (None where none is known), "sentences" about it, "caption", "n", "d", and "runs": for every beta t,
        mean_length (of the mean token), and where there is a limit w2, t_min, min_w2, phases, requires, doubts.

    Example:
        >>> numbers = run_simulation(Attention.identity(3), [5.0], torch.eye(3), [1.0])
        >>> len(numbers["runs"][0]["w2"])
        11
    """
    checks.require_nonnegative(noise=noise)
    times, cloud = _saved_times(t, h), as_cloud(cloud)
    if len(betas) == 0:
        raise ValueError("betas is empty, expected at least one inverse temperature.")
    target, sentences = _limit_for(attention, cloud)
    if noise and target is not None:
        sentences.append("This prediction is for the flow without noise.")
    attentions = [replace(attention, beta=beta) for beta in betas]  # a wrong beta is refused before the first run
    runs, paths = [], []
    for beta, one in zip(betas, attentions):
        random = independent(noise, torch.Generator().manual_seed(seed)) if noise else None
        path = flow(one, cloud, times, step=step, h=h, noise=random, progress=progress)
        runs.append(_run_numbers(beta, target, path, bool(noise)))
        if out is not None:
            paths.append(path)
    n, d = cloud.x.shape
    caption = f"{n} {'tokens' if cloud.weights is None else 'weighted nodes'} in d = {d}, {attention.kind}, {step}"
    caption += f", steps of {h:.3g}" + (f", noise {noise:g} with seed {seed}" if noise else "") + "."
    limit_numbers = None if target is None else target.as_dict()
    numbers = {"limit": limit_numbers, "sentences": sentences, "runs": runs, "n": n, "d": d, "caption": caption}
    if out is not None:
        _write(Path(out), numbers, paths, target)
    return numbers


def _limit_for(attention: Attention, cloud: Cloud) -> tuple[LimitMap | None, list[str]]:
    """The predicted limit of this cloud, if there is one, and sentences about it."""
    try:
        target = limit(attention)
        if not target.rotates:
            target.push_forward(cloud)
    except ValueError as error:
        return None, [f"No limit is predicted, so that no distance is measured: {error}"]
    return target, limit_sentences(target.as_dict())


def _run_numbers(beta: float, target: LimitMap | None, path: Trajectory, is_noisy: bool) -> dict[str, Any]:
    """The numbers of one run: distances, phases, and what is predicted at this beta."""
    length = Cloud(path.x, path.weights).mean.norm(dim=-1)
    run: dict[str, Any] = {"beta": beta, "t": path.t.tolist(), "mean_length": length.tolist(), "w2": None, "phases": []}
    run |= {"t_min_predicted": None, "doubts": [], "note": ""}
    if target is None:
        return run
    is_cold = 1 < beta < math.inf and not is_noisy
    return {
        **run,
        **phases(path, target).as_dict(),
        "t_min_predicted": target.t_min(beta) if is_cold else None,
        "min_w2_predicted": target.width(beta) if is_cold else None,
    }


def _write(out: Path, numbers: dict[str, Any], paths: list[Trajectory], target: LimitMap | None) -> None:
    """Write the paths, figures, page and numbers of a run, and remove those of an earlier one."""
    old = sorted(file for pattern in FILES for file in out.glob(pattern))
    if old:
        warnings.warn(f"{out} has an earlier run; removed: {', '.join(file.name for file in old)}.", stacklevel=3)
    for file in old:
        file.unlink()
    predicted = None if target is None or target.spectrum is None else target.spectrum.limit_basis
    final = None if target is None or target.terminal is None else target.terminal.basis
    for run, path in zip(numbers["runs"], paths):
        name = _file_name(run["beta"])
        path.save(out / f"path_beta_{name}.safetensors")
        if path.x.shape[-1] in (2, 3):
            title, least = beta_words(run["beta"], numbers["n"]), len(path) // 2
            if run["w2"] is not None:
                least = run["w2"].index(min(run["w2"]))
                title += f": nearest to the predicted limit at $t = {path.t[least]:.3g}$"
            shown = sorted({0, least // 3, least, (least + len(path) - 1) // 2, len(path) - 1})
            save_figure(clouds_figure(path.t, path.x, shown, predicted, final, title), out / f"clouds_beta_{name}.png")
    save_figure(simulation_figure(numbers), out / "simulate.png")
    write_page(out / "simulate.html", numbers, [page_clouds(path) for path in paths])
    write_json({**numbers, "versions": versions()}, out / "simulate.json")


def _file_name(beta: float) -> str:
    """beta in the name of a file: short if that is exact, otherwise with all its digits."""
    return f"{beta:g}" if float(f"{beta:g}") == beta else repr(beta)


def _saved_times(t: Sequence[float], h: float) -> Tensor:
    """The times themselves, or up to MAX_TIMES equal parts of [0, T], each of one step or more."""
    checks.require_positive(h=h)
    if len(t) in (0, 2):
        raise ValueError(f"t = {list(t)}: expected one end, or at least three times, which phases need.")
    if len(t) > 2:
        return torch.tensor(checks.time_grid(t), dtype=torch.float64)
    checks.require_positive(t=t[0])
    parts = min(MAX_TIMES, max(2, math.ceil(t[0] / h * (1 - 1e-12))))
    return torch.linspace(0, t[0], parts + 1, dtype=torch.float64)
