"""A run as a picture: loss, accuracy, beta while it learned, and one input's tokens through depth."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from attn_flow.base.figures import NULL, PREDICTION, TRUTH, caption, style
from attn_flow.dynamics.trajectory import Trajectory

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FEW = 5  # evaluations to join by a line, layers to name


def read_log(path: str | Path) -> list[dict[str, Any]]:
    """The lines of a run's log.jsonl."""
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


def run_figure(log: list[dict[str, Any]], path: Trajectory, summary: dict[str, Any]) -> Figure:
    """Four panels of a run.

    log: its lines. path: tokens through depth, as `what_was_learned` gives. summary: the numbers of `train_stack`.
    """
    with style() as pyplot:
        figure, axes = pyplot.subplots(1, 4, figsize=(14, 3.4))
        for axis, name in zip(axes, ("loss", "accuracy")):
            trained = [(line["update"], line[name]) for line in log if name in line]
            held = [(line["update"], line[f"held_out_{name}"]) for line in log if f"held_out_{name}" in line]
            axis.plot(*zip(*trained), color=TRUTH, alpha=0.35, linewidth=0.8, label="training batch")
            joined = "-" if len(held) > FEW else "none"  # a line through two points would say what was not measured
            axis.plot(*zip(*held), color=PREDICTION, linestyle=joined, marker="o", markersize=4, label="held out")
            axis.set(title=name, xlabel="update")
        axes[1].axhline(summary["chance"], color=NULL, linestyle=":", label="a guess")
        axes[1].set_ylim(0, 1.03)
        axes[0].set_ylim(bottom=0)
        _betas(axes[2], log, summary["beta"])
        _cloud(axes[3], path)
        for axis in axes[:2]:
            axis.legend()
        words = f"task {summary['task']}, {summary['updates']} updates, {summary['parameters']} parameters, "
        caption(figure, words + f"seed {summary['recipe']['seed']}; held-out accuracy {summary['accuracy']:.3f}")
    return figure


def _betas(axis: Any, log: list[dict[str, Any]], last: list[list[float]]) -> None:
    """beta of every layer and head over the updates; a level where it does not move."""
    end = max(line["update"] for line in log)
    for l, heads in enumerate(last):
        for h, beta in enumerate(heads):
            line = [(entry["update"], entry[f"beta.{l}.{h}"]) for entry in log if f"beta.{l}.{h}" in entry]
            line = line or [(0, beta), (end, beta)]
            axis.plot(*zip(*line), color=f"C{l % 10}", alpha=1 - 0.6 * h / len(heads))
        axis.plot([], [], color=f"C{l % 10}", label=f"layer {l}")
    most = max(len(heads) for heads in last)
    axis.set(title="beta" if most == 1 else "beta, a line a head (the first darkest)", xlabel="update")
    low, high = axis.get_ylim()
    axis.set_ylim(0.9 * low, 1.1 * high)
    if len(last) <= FEW:
        axis.legend()


def _cloud(axis: Any, path: Trajectory) -> None:
    """One input's tokens in the plane of largest variance over all depths, from pale (embedding) to dark (the end)."""
    x = path.x[:, 0].double() if path.mask is None else path.x[:, 0][:, path.mask[0]].double()
    flat = plane(x)
    axis.plot(flat[..., 0], flat[..., 1], color="0.75", linewidth=0.7, zorder=1)
    times = path.t[:, None].expand(flat.shape[:-1])
    shown = axis.scatter(flat[..., 0], flat[..., 1], c=times, cmap="viridis_r", s=9, zorder=2)
    axis.figure.colorbar(shown, ax=axis, label="time through depth")
    places = int(torch.unique(x[0], dim=0).shape[0])
    which = "" if places == x.shape[1] else f", {places} of them different"
    axis.set(title=f"{x.shape[1]} tokens of one input{which}", xlabel="first axis", ylabel="second axis")
    axis.set_aspect("equal", adjustable="datalim")


def plane(x: Tensor) -> Tensor:
    """Clouds (T, n, d) in their two directions of largest variance, (T, n, 2)."""
    flat = x.flatten(0, 1)
    centred = flat - flat.mean(0)
    axes = torch.linalg.svd(centred, full_matrices=False).Vh[:2]
    return (
        torch.nn.functional.pad(x - flat.mean(0), (0, max(0, 2 - x.shape[-1])))
        @ torch.nn.functional.pad(axes, (0, max(0, 2 - x.shape[-1]), 0, 2 - axes.shape[0])).mT
    )
