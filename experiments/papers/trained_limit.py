"""Trained tokens end at the points predicted from their own weights if G = I, and mostly far from them otherwise.

A cold stack with one head (arXiv 2605.10931) learns the task `side`: on which side of an unknown plane do most of 200
tokens on the sphere lie? The distance W2 of its last cloud to the limit P_# mu_0 predicted from the learned Q, K, V
(the start distribution moved by the eigenprojection P of the weights) is compared with that of the untrained stack, and
with the limit of the same weights turned by a random rotation (a). Then every stack is run longer than it was trained
(b, c); the dotted line is the accuracy of the sign of the mean token. Five seeds for each parametrisation.

With G = I and beta = 60 all five stacks learn the task (accuracy 1.00), end at 0.08 to 0.22 of their distance to the
limit, and keep it when they are run eight times longer. At beta = 20 two of five do not learn the task, so the first
claim fails. With a general G trained stacks stop far from the limit, and lose accuracy when they are run longer. G = I
became the first parametrisation after stacks with a symmetric and with a positive G had missed their limits at seed 0.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from attn_flow.attention import Attention
from attn_flow.base.progress import progress_bar
from attn_flow.dynamics.trajectory import Trajectory
from attn_flow.experiments.claims import at_least, at_most
from attn_flow.experiments.figures import COLOURS, label, name_lines, panels
from attn_flow.experiments.parts import kept_part
from attn_flow.nn.stack import DeepStack
from attn_flow.prediction import limit, resolution, w2_curve
from attn_flow.train.loop import evaluate, train_stack
from attn_flow.train.recipes import Recipe, recipe
from attn_flow.train.stacks import make_stack
from attn_flow.train.tasks import PLANE_NORMAL, Task, generator_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure

VARIANTS: dict[str, dict[str, Any]] = {
    "G = I, V symmetric": {},
    "G = I, beta 60": {"beta": 60.0},
    "G positive": {"symmetric": "positive"},
    "G, V symmetric": {"symmetric": "GV"},
    "free": {"symmetric": "none"},
    "G = I, beta learned": {"learn_beta": True},
    "G = I, 400 tokens": {"tokens": 400},
}
LONGER = (1, 2, 4, 8)  # times the trained horizon
CLOUDS, HELD_OUT = 8, 200  # inputs on which W2 and accuracy are measured
ROTATIONS = 4


def compute(quick: bool = False, seed: int = 0, progress: bool = False, parts: Path | None = None) -> dict[str, Any]:
    seeds, names = range(seed, seed + (2 if quick else 5)), list(VARIANTS)[:1] if quick else list(VARIANTS)
    runs = []
    with progress_bar("trained_limit", len(seeds) * len(names), progress) as advance:
        for s in seeds:
            for name in names:
                options = {"variant": VARIANTS[name], "seed": s, "quick": quick}
                runs.append(kept_part(parts, f"{name}, seed {s}", options, partial(one, name, s, quick)))
                advance(1, note=f"{name}, seed {s}: accuracy {runs[-1]['trained']['accuracy']:.3f}")
    return summarise(runs)


def one(name: str, seed: int, quick: bool = False) -> dict[str, Any]:
    """Train one stack; measure it untrained, trained, and run longer."""
    chosen = replace(recipe("side"), seed=seed, **VARIANTS[name])
    if quick:
        chosen = replace(chosen, tokens=40, updates=60, warmup=10, steps=8)
    task = chosen.make_task()
    untrained = measure(make_stack(chosen, task.stack_options).eval(), task, chosen)
    stack = train_stack(chosen, evaluate_every=chosen.updates).stack
    factors = LONGER[:2] if quick else LONGER
    longer = [
        measure(stack.rerun(horizon=chosen.horizon * c, steps=chosen.steps * c), task, chosen, rotations=(c == 1))
        for c in factors
    ]
    return {
        "variant": name,
        "seed": seed,
        "untrained": untrained,
        "trained": longer[0],
        "longer": longer,
        "mean_sign": mean_sign(task, seed),
    }


@torch.no_grad()
def measure(stack: DeepStack, task: Task, chosen: Recipe, rotations: bool = True) -> dict[str, Any]:
    """Accuracy on held-out inputs, and W2 to the limit of the weights as parts of W2 at the start."""
    x = task.held_out(CLOUDS, generator_of(chosen.seed, "learned")).x
    ((path, _),), (attention,) = stack.paths(x), stack.attentions()
    t = torch.linspace(0, stack.options.horizon, path.shape[0], dtype=torch.float64)
    attention, path = attention.to(torch.float64), path.double()
    target = limit(attention)
    numbers: dict[str, Any] = {
        "accuracy": evaluate(stack, task, chosen.seed, size=HELD_OUT)["held_out_accuracy"],
        "case": target.case,
        "dimension": target.dimension,
        "beta": float(torch.as_tensor(attention.beta).flatten()[0]),
        "resolution": float(resolution(attention, path[0]).number.mean()),
        "normal": None,
        **distances(attention, t, path),
    }
    if target.spectrum is not None and target.dimension == 1:  # the plane that the limit separates, against the task's
        left = target.spectrum.projector[target.spectrum.projector.abs().sum(1).argmax()]
        numbers["normal"] = float((left / left.norm() @ torch.tensor(PLANE_NORMAL, dtype=torch.float64)).abs())
    if rotations:
        generator = torch.Generator().manual_seed(chosen.seed)
        each = [distances(rotated(attention, generator), t[[0, -1]], path[[0, -1]])["w2"] for _ in range(ROTATIONS)]
        numbers["rotated"] = float(np.mean(each))
    return numbers


def distances(attention: Attention, t: Tensor, path: Tensor) -> dict[str, Any]:
    """W2 to the limit of these weights at the end and its least value, over W2 at the start, and the curve."""
    curve = w2_curve(Trajectory(t, path), limit(attention))  # (T, clouds)
    share = (curve / curve[0]).mean(-1)
    least = int(share.argmin())
    return {"w2": float(share[-1]), "least": float(share[least]), "t_least": float(t[least]), "curve": share.tolist()}


def rotated(attention: Attention, generator: torch.Generator) -> Attention:
    """The same attention in coordinates that are turned at random: its limit has nothing to do with these tokens."""
    R = torch.linalg.qr(torch.randn(attention.dim, attention.dim, generator=generator, dtype=torch.float64))[0]
    return Attention.from_matrices(R @ attention.G @ R.mT, R @ attention.OV @ R.mT, attention.beta)


def mean_sign(task: Task, seed: int) -> float:
    """The accuracy of the side on which the mean token lies, which knows the plane."""
    batch = task.held_out(HELD_OUT, generator_of(seed, "held out"))
    side = (batch.x.mean(1) @ torch.tensor(PLANE_NORMAL) > 0).long()
    return float((side == batch.y).double().mean())


def summarise(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Means over seeds by variant, and the claims."""
    table = []
    for name in dict.fromkeys(run["variant"] for run in runs):
        group = [run for run in runs if run["variant"] == name]
        row: dict[str, Any] = {"variant": name, "seeds": len(group)}
        row["cases"] = sorted({run["trained"]["case"] for run in group})
        row["mean_sign"] = float(np.mean([run["mean_sign"] for run in group]))
        for when, what in (("untrained", "w2"), ("untrained", "accuracy"), ("trained", "w2"), ("trained", "accuracy")):
            row[f"{when}_{what}"] = [run[when][what] for run in group]
        for what in ("least", "rotated", "normal", "beta", "resolution"):
            row[what] = [run["trained"][what] for run in group]
        for what in ("accuracy", "w2"):
            row[f"longer_{what}"] = [[entry[what] for entry in run["longer"]] for run in group]
        table.append(row)
    numbers = {"runs": runs, "table": table, "longer": list(LONGER[: len(runs[0]["longer"])])}
    return {**numbers, "claims": claims(numbers)}


def claims(numbers: dict[str, Any]) -> list[dict[str, Any]]:
    """What would refute that trained tokens go to the limit of their weights."""
    base = numbers["table"][0]
    w2, untrained, rotated = (float(np.mean(base[name])) for name in ("trained_w2", "untrained_w2", "rotated"))
    return [
        at_least("G = I, V symmetric: mean accuracy", float(np.mean(base["trained_accuracy"])), 0.9),
        at_most("accuracy of the sign of the mean token", base["mean_sign"], 0.75),
        at_most("G = I, V symmetric: W2 to the limit over W2 at the start, worst seed", max(base["trained_w2"]), 0.5),
        at_most("the same over that of untrained stacks", w2 / untrained, 0.8),
        at_most("the same over that to limits of rotated weights", w2 / rotated, 0.5),
    ]


def plot(numbers: dict[str, Any]) -> Figure:
    """W2 by parametrisation, and what happens to accuracy and W2 when a stack is run longer."""
    figure, (a, b, c) = panels(3, height=3.4)
    table = numbers["table"]
    names = {"untrained_w2": "before training", "rotated": "limit of rotated weights", "trained_w2": "trained"}
    for j, (key, words) in enumerate(names.items()):
        for i, row in enumerate(table):
            place = [i + 0.2 * (j - 1)] * len(row[key])
            a.plot(place, row[key], "o", markersize=5, color=COLOURS[(6, 4, 0)[j]], label=None if i else words)
    a.set_xticks(range(len(table)), [row["variant"].replace(", ", ",\n") for row in table])
    a.axhline(1.0, color="0.8", linewidth=0.8, zorder=0)
    a.set_ylim(0, None)
    label(a, "every dot a seed", "parametrisation", r"$W_2$ to the limit / at the start")
    for colour, row in zip(COLOURS, table):
        for axis, key in ((b, "longer_accuracy"), (c, "longer_w2")):
            mean = np.mean(row[key], axis=0)
            axis.plot(numbers["longer"], mean, "o-", markersize=4, color=colour, label=row["variant"])
    for axis, y in ((b, "accuracy"), (c, r"$W_2$ to the limit / at the start")):
        axis.set_xscale("log", base=2)
        axis.xaxis.set_major_formatter("{x:g}")
        label(axis, "stacks run longer than trained", "time / trained time", y, legend=False)
    b.axhline(table[0]["mean_sign"], color="0.5", linestyle=":", linewidth=1.3)
    name_lines(c)
    return figure
