"""The figure of a run: loss and accuracy during training, and the tokens of one input through depth."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from attn_flow.base.figures import BASELINE, PREDICTION, TRUTH, caption, style
from attn_flow.dynamics.trajectory import Trajectory

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def run_figure(log: list[dict[str, Any]], path: Trajectory, summary: dict[str, Any]) -> Figure:
    """Three panels of a run.

    Args:
        log: the lines of its log.
        path: tokens through depth, as `what_was_learned` returns them.
        summary: the numbers of `train_stack`.
    """
    with style() as pyplot:
        figure, axes = pyplot.subplots(1, 3, figsize=(11, 3.4))
        for axis, name in zip(axes, ("loss", "accuracy")):
            for key, colour, words in ((name, TRUTH, "training batch"), (f"held_out_{name}", PREDICTION, "held out")):
                line = [(entry["update"], entry[key]) for entry in log if key in entry]
                axis.plot(*zip(*line), color=colour, marker="o" if "held" in words else "", linewidth=0.8, label=words)
            axis.set(title=name, xlabel="update", ylim=(0, None if name == "loss" else 1.03))
        axes[1].axhline(summary["chance"], color=BASELINE, linestyle=":", label="a guess")
        axes[1].legend()
        _cloud(axes[2], path)
        betas = ", ".join(f"{beta:.3g}" for heads in summary["beta"] for beta in heads)
        text = f"task {summary['task']}, {summary['updates']} updates, {summary['parameters']} parameters, "
        caption(
            figure,
            text + f"seed {summary['recipe']['seed']}; held-out accuracy {summary['accuracy']:.3f}; beta {betas}",
        )
    return figure


def _cloud(axis: Any, path: Trajectory) -> None:
    """The tokens of one input in the plane of largest variance over all depths, coloured by time."""
    x = path.x[:, 0].double() if path.mask is None else path.x[:, 0][:, path.mask[0]].double()
    x = torch.nn.functional.pad(x - x.mean((0, 1)), (0, max(0, 2 - x.shape[-1])))
    flat = x @ torch.linalg.eigh(x.flatten(0, 1).T.cov()).eigenvectors[:, -2:].flip(-1)
    axis.plot(flat[..., 0], flat[..., 1], color="0.75", linewidth=0.7, zorder=1)
    times = path.t[:, None].expand(flat.shape[:-1])
    points = axis.scatter(flat[..., 0], flat[..., 1], c=times, cmap="viridis_r", s=9, zorder=2)
    axis.figure.colorbar(points, ax=axis, label="time through depth")
    axis.set(title=f"{x.shape[1]} tokens of one input", xlabel="first axis", ylabel="second axis")
    axis.set_aspect("equal", adjustable="datalim")
