"""Pictures of a simulation: the clouds, and their distance to the predicted limit."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from attn_flow.base.figures import TRUTH, caption, style
from attn_flow.dynamics.trajectory import Trajectory

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def clouds_figure(path: Trajectory, times: Sequence[int], title: str = "") -> Figure:
    """A path of clouds in d = 2 or 3 at some of its times, tokens coloured by where they started."""
    d = path.x.shape[-1]
    if path.x.ndim != 3 or d not in (2, 3):
        raise ValueError(f"x has shape {tuple(path.x.shape)}, expected (T, n, d) with d = 2 or 3.")
    with style() as pyplot:
        figure = pyplot.figure(figsize=(2.2 * len(times), 2.6))
        start = path.x[0].detach().cpu()
        colour = torch.atan2(start[:, 1], start[:, 0]).numpy()
        for panel, index in enumerate(times, start=1):
            axes: Any = figure.add_subplot(1, len(times), panel, projection="3d" if d == 3 else None)
            x = path.x[index].detach().cpu().numpy()
            axes.scatter(*x.T, c=colour, cmap="twilight", s=6, alpha=0.8, linewidths=0)
            axes.set_title(f"t = {float(path.t[index]):.3g}", loc="center", y=0.96 if d == 3 else None)
            bound = 1.05 * float(start.norm(dim=-1).max())
            axes.set(xlim=(-bound, bound), ylim=(-bound, bound), xticks=[], yticks=[])
            axes.set_axis_off()
            if d == 3:
                axes.set(zlim=(-bound, bound))
                axes.set_box_aspect((1, 1, 1), zoom=1.35)
                _wire_sphere(axes, float(start.norm(dim=-1).max()))
            else:
                axes.set_aspect("equal")
        figure.suptitle(title, fontsize=10, x=0.01, ha="left")
    return figure


def _wire_sphere(axes: Any, radius: float) -> None:
    """Meridians and parallels in light grey, to see where tokens are on the sphere."""
    turn = torch.linspace(0, 2 * math.pi, 60)
    for angle in torch.linspace(0, math.pi, 7)[:-1].tolist():
        x, y, z = turn.cos() * math.cos(angle), turn.cos() * math.sin(angle), turn.sin()
        axes.plot(radius * x, radius * y, radius * z, color="0.85", lw=0.4, zorder=0)
    for height in (-0.5, 0.0, 0.5):
        ring = math.sqrt(1 - height**2)
        axes.plot(
            radius * ring * turn.cos(), radius * ring * turn.sin(), radius * height, color="0.85", lw=0.4, zorder=0
        )


def simulation_figure(numbers: dict[str, Any]) -> Figure:
    """W2 to the predicted limit against time for every beta, and the smallest W2 against beta."""
    runs = numbers["runs"]
    with style() as pyplot:
        figure, (left, right) = pyplot.subplots(1, 2, figsize=(8, 3.2), width_ratios=(2, 1))
        colours = pyplot.get_cmap("viridis")(torch.linspace(0.05, 0.9, max(len(runs), 2)).numpy())
        for run, colour in zip(runs, colours):
            left.plot(run["t"], run["w2"], color=colour, label=rf"$\beta$ = {run['beta']:g}")
            left.plot(run["t_min"], run["min_w2"], "o", ms=4, color=colour)
        left.set(
            xlabel="time t", ylabel=r"$W_2(\mu_t, P_\#\mu_0)$", yscale="log", title="distance to the predicted limit"
        )
        left.legend()
        finite = [run for run in runs if math.isfinite(run["beta"]) and run["beta"] > 0]
        right.plot([r["beta"] for r in finite], [r["min_w2"] for r in finite], "o-", color=TRUTH)
        right.set(xlabel=r"$\beta$", xscale="log", yscale="log", title="smallest distance")
        caption(figure, numbers["caption"])
    return figure
