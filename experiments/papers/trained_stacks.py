"""Trained stacks stop the flow early: run on, tokens collapse onto V's leading directions and the answer is lost.

A stack with one head of full width (so that its limit map is the linear one of arXiv 2605.10931) learns the task
`clusters` at several depths, horizons and temperatures. Beside accuracy stand the number of clusters of the last
cloud and W2 to the limit predicted from the learned Q, K, V, as part of what it was at the layer's start; all of it
also for the untrained stack, and for the trained one run longer, colder or hotter than it was trained.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from attn_flow.base.progress import progress_bar
from attn_flow.experiments.claims import bound
from attn_flow.experiments.figures import COLOURS, caption, label, panels
from attn_flow.measures import Cloud
from attn_flow.nn.stack import DeepStack
from attn_flow.observe.quantities import alignment
from attn_flow.prediction import limit, resolution
from attn_flow.train.loop import evaluate, train_stack
from attn_flow.train.observation import count_clusters, distance_to_limit
from attn_flow.train.recipes import Recipe, recipe
from attn_flow.train.stacks import make_stack
from attn_flow.train.tasks import Task, generator_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure

BASE: dict[str, Any] = {"tokens": 12, "dim": 12, "lr": 1e-2, "batch": 32, "warmup": 20}
H = 1.0  # largest rk4 step
SWEEPS: dict[str, list[dict[str, float]]] = {
    "horizon": [{"depth": 1, "horizon": T, "beta": 4.0} for T in (0.5, 1.5, 3.0)],
    "depth": [{"depth": L, "horizon": 0.5, "beta": 4.0} for L in (1, 2, 4)],
    "beta": [{"depth": 1, "horizon": 0.5, "beta": b} for b in (1.0, 4.0, 16.0)],
}
LONGER = (0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0)
COLDER = (0.0625, 0.25, 1.0, 4.0, 16.0, 64.0)
CLOUDS = 16  # inputs on which W2 is measured
LEARNED = 0.75  # accuracy from which a stack counts as having learned; a guess has .61
WHEN, WHAT = ("start", "trained"), ("accuracy", "clusters", "w2", "along_V", "resolution")


def compute(quick: bool = False, seed: int = 0, progress: bool = False) -> dict[str, Any]:
    seeds = range(seed, seed + (2 if quick else 3))
    updates = 200 if quick else 250
    chosen = [options for sweep in SWEEPS.values() for options in sweep]
    chosen = [options for i, options in enumerate(chosen) if options not in chosen[:i]]  # the base is in all sweeps
    if quick:
        chosen = [{"depth": L, "horizon": T, "beta": 4.0} for L, T in ((2, 0.5), (1, 3.0))]
    runs = []
    with progress_bar("trained_stacks", len(chosen) * len(seeds), progress) as advance:
        for options in chosen:
            for s in seeds:
                runs.append(one(options, s, updates))
                advance(1, note=f"{options}: accuracy {runs[-1]['trained']['accuracy']:.3f}")
    return summarise(runs, list(seeds), updates)


def one(
    options: dict[str, float],
    seed: int,
    updates: int,
    longer_by: tuple[float, ...] = LONGER,
    beta_factors: tuple[float, ...] = COLDER,
    clouds: int = CLOUDS,
) -> dict[str, Any]:
    """Train one stack; measure it untrained, trained, and run otherwise."""
    changed = {**BASE, **options, "steps": _steps(options["horizon"]), "updates": updates, "seed": seed}
    r = replace(recipe("clusters"), **changed)
    task = r.make_task()
    start = measure(make_stack(r, task.stack_options).eval(), task, r, clouds)
    stack = train_stack(r).stack
    horizon = options["horizon"]
    longer = [measure(stack.rerun(horizon=horizon * c, steps=_steps(horizon * c)), task, r, clouds) for c in longer_by]
    colder = [measure(stack.rerun(beta_factor=c), task, r, clouds) for c in beta_factors]
    trained = longer[longer_by.index(1.0)]
    twin = measure(stack.discretised(), task, r, clouds)["accuracy"]
    return {
        **options,
        "seed": seed,
        "start": start,
        "trained": trained,
        "twin": twin,
        "longer": longer,
        "colder": colder,
    }


def _steps(horizon: float) -> int:
    return max(1, math.ceil(horizon / H))


@torch.no_grad()
def measure(stack: DeepStack, task: Task, r: Recipe, clouds: int = CLOUDS) -> dict[str, float]:
    """Accuracy on held-out inputs; clusters of the last cloud, and W2 to the limits over W2 at the layers' starts."""
    x = task.held_out(clouds, generator_of(r.seed, "learned")).x
    ratios = []
    for (path, _), attention in zip(stack.paths(x), stack.attentions()):
        ends = path[[0, -1]]
        curve, why = distance_to_limit(stack, attention, ends)
        if curve is None:
            raise ValueError(f"no limit to compare with: {why}")
        ratios.append(float((curve[1] / curve[0]).mean()))
    target = limit(attention)  # of the last layer, as is the cloud below
    assert target.spectrum is not None  # one head of full width
    assert target.terminal is not None
    return {
        "accuracy": evaluate(stack, task, r.seed, size=400)["held_out_accuracy"],
        "clusters": float(count_clusters(Cloud(path[-1])).double().mean()),
        "w2": float(np.mean(ratios)),
        "along_M": float(alignment(path[-1], target.spectrum.basis).mean()),
        "along_V": float(alignment(path[-1], target.terminal.basis).mean()),
        "dim_M": target.spectrum.basis.shape[1],
        "dim_V": target.terminal.basis.shape[1],
        "resolution": float(resolution(attention, path[0], warn=False).number.mean()),
    }


def summarise(runs: list[dict[str, Any]], seeds: list[int], updates: int) -> dict[str, Any]:
    """Means with ranges over seeds, rank correlations over runs, the finding in words, and the claims."""
    table = [
        {
            **dict(zip(("depth", "horizon", "beta"), key)),
            "twin": spread([r["twin"] for r in group]),
            **{f"{when}_{what}": spread([r[when][what] for r in group]) for when in WHEN for what in WHAT},
        }
        for key, group in _groups(runs).items()
    ]
    learned = [r for r in runs if r["trained"]["accuracy"] >= LEARNED]
    if not learned:
        raise ValueError(f"none of {len(runs)} stacks reached accuracy {LEARNED} in {updates} updates; train longer.")
    curves = {
        way: {what: [spread([r[way][i][what] for r in learned]) for i in range(len(factors))] for what in WHAT}
        for way, factors in (("longer", LONGER), ("colder", COLDER))
    }
    numbers = {
        "seeds": seeds,
        "updates": updates,
        "chance": replace(recipe("clusters"), **BASE).make_task().chance,
        "runs": runs,
        "table": table,
        "learned": len(learned),
        "curves": curves,
        "twin": spread([r["twin"] for r in learned]),
        "correlation": {
            what: correlation([r["trained"]["accuracy"] for r in runs], [r["trained"][what] for r in runs])
            for what in ("clusters", "w2")
        },
    }
    return {**numbers, "finding": finding(numbers), "claims": claims(numbers)}


def spread(values: list[float]) -> dict[str, float]:
    """Mean, and the range over runs."""
    return {"mean": float(np.mean(values)), "low": float(np.min(values)), "high": float(np.max(values))}


def finding(numbers: dict[str, Any]) -> str:
    long, cold, at = numbers["curves"]["longer"], numbers["curves"]["colder"], LONGER.index(1.0)
    c = numbers["correlation"]
    return (
        f"Of {len(numbers['runs'])} stacks {numbers['learned']} learned the task (accuracy >= {LEARNED}). They stop "
        f"while {long['clusters'][at]['mean']:.1f} of {BASE['tokens']} tokens are still apart and W2 to the limit "
        f"predicted from their own weights is {long['w2'][at]['mean']:.2f} of what it was at the start: training does "
        f"not move tokens to that limit, whose law these few tokens cannot resolve (resolution "
        f"{long['resolution'][at]['mean']:.0f} > 1). Run {LONGER[-1]:g} times longer they collapse to "
        f"{long['clusters'][-1]['mean']:.1f} clusters, with {long['along_V'][-1]['mean']:.0%} of their length in the "
        f"leading subspace of V, the predicted terminal phase, and accuracy falls from "
        f"{long['accuracy'][at]['mean']:.2f} to {long['accuracy'][-1]['mean']:.2f}. {COLDER[-1]:g} times colder it is "
        f"{cold['accuracy'][-1]['mean']:.2f}, {1 / COLDER[0]:g} times hotter {cold['accuracy'][0]['mean']:.2f} "
        f"(a guess: {numbers['chance']:.2f}); the discrete twin with the same weights {numbers['twin']['mean']:.2f}. "
        f"Over all stacks accuracy goes with clusters by a rank correlation of "
        f"{_interval(c['clusters'])}, with W2 of {_interval(c['w2'])}."
    )


def _interval(c: dict[str, float]) -> str:
    return f"{c['value']:.2f} [{c['low']:.2f}, {c['high']:.2f}]"


def claims(numbers: dict[str, Any]) -> list[dict[str, Any]]:
    long, cold, at = numbers["curves"]["longer"], numbers["curves"]["colder"], LONGER.index(1.0)
    collapsed = [row for row in numbers["table"] if row["horizon"] >= 3]
    best = max(row["trained_accuracy"]["mean"] for row in numbers["table"])
    trained = long["accuracy"][at]["mean"]
    return [
        bound("best setting: mean accuracy over seeds", best, at_least=LEARNED),
        bound(
            "untrained: mean accuracy", float(np.mean([r["start"]["accuracy"] for r in numbers["runs"]])), at_most=0.65
        ),
        bound("learned stacks: W2 to the predicted limit over W2 at the start", long["w2"][at]["mean"], at_least=0.7),
        bound("learned stacks: clusters where they stop", long["clusters"][at]["mean"], at_least=4),
        bound(f"{LONGER[-1]:g} times longer: clusters", long["clusters"][-1]["mean"], at_most=3),
        bound(f"{LONGER[-1]:g} times longer: share in V's leading subspace", long["along_V"][-1]["mean"], at_least=0.6),
        bound(f"{LONGER[-1]:g} times longer: accuracy lost", trained - long["accuracy"][-1]["mean"], at_least=0.05),
        bound(f"{COLDER[-1]:g} times colder: accuracy lost", trained - cold["accuracy"][-1]["mean"], at_most=0.1),
        bound(f"{1 / COLDER[0]:g} times hotter: accuracy lost", trained - cold["accuracy"][0]["mean"], at_least=0.15),
        bound(
            "horizon 3: clusters before training",
            float(np.mean([row["start_clusters"]["mean"] for row in collapsed])),
            at_most=2,
        ),
    ]


def _groups(runs: list[dict[str, Any]]) -> dict[tuple[float, float, float], list[dict[str, Any]]]:
    groups: dict[tuple[float, float, float], list[dict[str, Any]]] = {}
    for r in runs:
        groups.setdefault((r["depth"], r["horizon"], r["beta"]), []).append(r)
    return groups


def correlation(a: list[float], b: list[float], draws: int = 2000) -> dict[str, float]:
    """Spearman's rank correlation over runs, with a 95% bootstrap interval."""
    from scipy.stats import rankdata

    def spearman(i: np.ndarray) -> np.ndarray:
        x, y = (rankdata(np.array(z)[i], axis=-1) for z in (a, b))
        x, y = x - x.mean(-1, keepdims=True), y - y.mean(-1, keepdims=True)
        size = np.sqrt((x**2).sum(-1) * (y**2).sum(-1))
        return (x * y).sum(-1)[size > 0] / size[size > 0]  # a draw of one run only has no correlation

    low, high = np.percentile(spearman(np.random.default_rng(0).integers(len(a), size=(draws, len(a)))), [2.5, 97.5])
    return {"value": float(spearman(np.arange(len(a))[None])[0]), "low": float(low), "high": float(high)}


def plot(numbers: dict[str, Any]) -> Figure:
    figure, axes = panels(3, 2, "What training does to the flow, and what the flow does to the trained")
    rows = sorted(numbers["table"], key=lambda row: (row["depth"], row["horizon"], row["beta"]))
    names = [f"L={row['depth']:g}\nT={row['horizon']:g}\n\u03b2={row['beta']:g}" for row in rows]
    tall = {
        "accuracy": "accuracy",
        "clusters": "clusters of the last cloud",
        "w2": r"$W_2$ to the limit / $W_2$ at the start",
    }
    for axis, (what, words) in zip(axes, tall.items()):
        for j, (when, shift) in enumerate((("start", -0.12), ("trained", 0.12))):
            place = np.arange(len(rows)) + shift
            _ranges(axis, place, [row[f"{when}_{what}"] for row in rows], COLOURS[6 if j == 0 else 0], when, "none")
        axis.set_xticks(range(len(rows)), names)
        label(axis, words, "depth L, horizon T per layer, beta", "")
    axes[0].axhline(numbers["chance"], color="black", linewidth=0.8, linestyle=":", label="guess")
    axes[0].set_ylim(0.35, 1.2)
    axes[0].legend(fontsize=7.5, frameon=False)
    axes[2].axhline(1, color="black", linewidth=0.8, linestyle=":")
    for axis, way, factors in ((axes[3], "longer", LONGER), (axes[4], "colder", COLDER)):
        curve = numbers["curves"][way]
        _ranges(axis, factors, curve["accuracy"], COLOURS[0], "accuracy")
        share = [{k: v / BASE["tokens"] for k, v in entry.items()} for entry in curve["clusters"]]
        _ranges(axis, factors, share, COLOURS[1], "clusters / tokens")
        if way == "longer":
            _ranges(axis, factors, curve["along_V"], COLOURS[2], "share in V's leading subspace")
        axis.axvline(1, color="black", linewidth=0.8, linestyle=":")
        axis.set_xscale("log", base=2)
        axis.set_ylim(0, 1.35)  # room for the legend
        label(axis, f"learned stacks run {way}", "horizon / trained" if way == "longer" else "beta / trained", "")
    for j, when in enumerate(WHEN):
        x, y = ([r[when][what] for r in numbers["runs"]] for what in ("clusters", "accuracy"))
        axes[5].scatter(x, y, s=16, color=COLOURS[6 if j == 0 else 0], label=when)
    label(axes[5], "every stack", "clusters of the last cloud", "accuracy")
    caption(
        figure,
        f"Task clusters, n = {BASE['tokens']}, d = {BASE['dim']}, {numbers['updates']} updates, seeds "
        f"{numbers['seeds']}; bars and bands are ranges over runs. {numbers['finding']}",
    )
    return figure


def _ranges(axis: Any, x: Any, entries: list[dict[str, float]], colour: str, name: str, line: str = "-") -> None:
    """Means with their ranges."""
    mean, low, high = (np.array([entry[k] for entry in entries]) for k in ("mean", "low", "high"))
    style = {"color": colour, "linestyle": line, "marker": "o", "markersize": 4, "linewidth": 1.2, "capsize": 2}
    axis.errorbar(x, mean, yerr=[mean - low, high - mean], elinewidth=0.8, label=name, **style)
