"""A simulation against its predicted limit: W2 to P_# mu_0 along the path, phases and resolution, for several betas."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from attn_flow.attention import Attention
from attn_flow.base import memory
from attn_flow.base.figures import save_figure
from attn_flow.base.files import plain, versions, write_json
from attn_flow.cli.console import complain, number_name
from attn_flow.dynamics.distributed import ALONE, Processes
from attn_flow.dynamics.particles import MOST_STEPS, flow
from attn_flow.dynamics.steppers import STEPS
from attn_flow.dynamics.trajectory import Trajectory
from attn_flow.geometry import Sphere
from attn_flow.measures import Cloud, quadrature
from attn_flow.pages.simulation import clouds_shown, write_simulation
from attn_flow.prediction.finite_n import resolution
from attn_flow.prediction.limit_map import LimitMap, limit
from attn_flow.prediction.timeline import phases, w2_curve

MEASURED = 200  # times at most at which W2 is measured, unless they are given


def start(d: int, n: int, x: Tensor | None = None, nodes: bool = False, seed: int = 0) -> Cloud:
    """The initial law: your tokens x, weighted nodes of the uniform law (d = 2, 3), or n uniform random tokens."""
    if x is not None:
        if x.shape[-1] != d:
            raise ValueError(f"x0 has shape {tuple(x.shape)}, expected (n, {d}) to match G.")
        return Cloud(x)
    memory.require(4 * 8 * n * d, f"a cloud of {n} tokens in d = {d}", "ask for fewer --tokens")
    if nodes:
        if d not in (2, 3):
            raise ValueError(f"d = {d}: quadrature nodes exist for d = 2 and 3; leave --quadrature out.")
        return quadrature.circle(n) if d == 2 else quadrature.fibonacci(n)
    return Cloud(Sphere().uniform(n, d, generator=torch.Generator().manual_seed(seed), dtype=torch.float64))


def simulate(
    G: Tensor,
    V: Tensor,
    betas: list[float],
    cloud: Cloud,
    t: Sequence[float],
    h: float,
    step: str = "rk4",
    *,
    out: str | Path | None = None,
    progress: bool = False,
    world: Processes = ALONE,
) -> dict[str, Any] | None:
    """For every beta: t, w2 (the distance to the predicted limit), t_min, min_w2, phases, resolution.

    t: the times at which W2 is measured, or one number, the end; h: the step in time.
    Several processes share the tokens; only the first measures, writes, and returns something.
    """
    if step not in STEPS:
        raise ValueError(f"step = {step!r}, expected one of {', '.join(STEPS)}.")
    prediction = limit(Attention.from_matrices(G, V))
    times = _times(t, h)
    attentions = [Attention.from_matrices(G, V, beta=beta) for beta in betas]  # all, before the first is run
    if progress and world.first:
        seconds = len(betas) * estimate(attentions[0], prediction, cloud, times, h, step)
        complain(f"about {seconds:.2g} s of processor time: {len(betas)} betas, {len(times)} distances each", "cyan")
    runs, clouds = [], []
    for beta, attention in zip(betas, attentions):
        path = flow(
            attention, cloud.x, times, step=STEPS[step], h=h, weights=cloud.weights, progress=progress, world=world
        )
        if not world.first:
            continue
        seen = resolution(attention, path.x[0], weights=cloud.weights, warn=False)
        numbers_of_argmax = {"self_argmax": seen.self_argmax.tolist(), "number": seen.number.tolist()}
        found = phases(path, prediction, warn=False).as_dict()
        found |= _predicted(prediction, beta)
        runs.append({"beta": beta, **found, "resolution": {"verdict": seen.verdict, **numbers_of_argmax}})
        if out is not None:
            file = Path(out) / f"path_beta_{number_name(beta)}.safetensors"
            path.save(file)
            if len(runs) == 1:
                _forget_all_but(file)
            clouds.append(clouds_shown(path))
            if path.x.shape[-1] in (2, 3):
                from attn_flow.cli.figures import beta_words, clouds_figure

                least = int(torch.tensor(found["w2"]).argmin())
                shown = sorted({0, least // 3, least, (least + len(path) - 1) // 2, len(path) - 1})
                words = beta_words(beta, len(cloud.x))
                title = f"{words}: nearest to the predicted limit at $t = {float(path.t[least]):.3g}$"
                picture = clouds_figure(path, shown, prediction, title)
                save_figure(picture, Path(out) / f"clouds_beta_{number_name(beta)}.png")
    if not world.first:
        return None
    law = f"{len(cloud.x)} {'weighted nodes' if cloud.weights is not None else 'tokens'} in d = {cloud.x.shape[-1]}"
    unmet = {need["name"]: None for run in runs for need in run["requires"] if need["met"] is False}
    coarse = ", ".join(number_name(r["beta"]) for r in runs if r["resolution"]["verdict"] == "unresolved")
    numbers = {
        "limit": prediction.as_dict(),
        "runs": runs,
        "n": len(cloud.x),
        "caption": f"{law}, {step}, $h = {h:.3g}$; limit case: {prediction.case}."
        + rf" Too few points for the prediction at $\beta$ = {coarse}." * bool(coarse)
        + f" What it requires is not met: {', '.join(unmet)}." * bool(unmet),
    }
    if out is not None:
        from attn_flow.cli.figures import simulation_figure

        write_json({**numbers, "versions": versions()}, Path(out) / "simulate.json")
        save_figure(simulation_figure(numbers), Path(out) / "simulate.png")
        write_simulation(Path(out) / "simulate.html", numbers, clouds)
    return plain(numbers)


def _forget_all_but(first: Path) -> None:
    """Of an earlier run in the folder: it had other betas, or matrices, and would look like a part of this one."""
    kinds = ("simulate.json", "simulate.png", "simulate.html", "path_beta_*.safetensors", "clouds_beta_*.png")
    old = sorted(file for kind in kinds for file in first.parent.glob(kind) if file != first)
    if old:
        complain(f"{first.parent} held an earlier run; removed: {', '.join(file.name for file in old)}", "cyan")
    for file in old:
        file.unlink()


def _predicted(prediction: LimitMap, beta: float) -> dict[str, float | None]:
    """t_min where clusters leave again, W2 of their layer where they stay; both for low, finite temperatures."""
    found: dict[str, float | None] = {"t_min_predicted": None, "min_w2_predicted": None}
    if not 1 < beta < math.inf:
        return found
    if prediction.exit_rate == 0:
        found["min_w2_predicted"] = None if prediction.layer is None else prediction.width(beta)
    elif prediction.g is not None and prediction.rate_w2:
        found["t_min_predicted"] = prediction.t_min(beta)
    return found


def estimate(attention: Attention, prediction: LimitMap, cloud: Cloud, times: Tensor, h: float, step: str) -> float:
    """Processor seconds of one beta, from one drift and one distance, each measured here and now."""
    drifts = sum(math.ceil(float(span) / h - 1e-9) for span in times.diff()) * (len(STEPS[step].a) + 1)
    still = Trajectory(torch.zeros(1), cloud.x[None], cloud.weights)
    work = (lambda: attention.drift(cloud.x, weights=cloud.weights), lambda: w2_curve(still, prediction))
    seconds = 0.0
    for each, times_done in zip(work, (drifts, len(times))):
        each()  # what is loaded once is no part of it
        begun = time.process_time()
        each()
        seconds += times_done * (time.process_time() - begun)
    return seconds


def _times(t: Sequence[float], h: float) -> Tensor:
    """The times themselves, or up to MEASURED equal parts of [0, T], each of one step or more, but at least two."""
    if not 0 < h < math.inf:
        raise ValueError(f"h = {h}, expected a positive, finite step.")
    times = torch.tensor(t, dtype=torch.float64)
    if not bool(torch.isfinite(times).all()) or float(times[-1]) <= 0 or bool((times.diff() <= 0).any()):
        raise ValueError(f"t = {', '.join(map(str, t))}: expected one positive, finite end, or times that increase.")
    if float(times[-1]) / h > MOST_STEPS:
        raise ValueError(f"t = {t[-1]:g} in steps of h = {h:g} are more than {MOST_STEPS:.0e} steps; use a larger h.")
    if len(t) == 2:
        raise ValueError(
            f"t = {t[0]:g}, {t[1]:g}: expected one end, or three times or more, between which phases are told."
        )
    if len(t) > 2:
        return times
    parts = min(MEASURED, max(2, math.ceil(t[0] / h * (1 - 1e-12))))
    return torch.linspace(0, t[0], parts + 1, dtype=torch.float64)
