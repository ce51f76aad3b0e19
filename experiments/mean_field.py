"""The mean-field limit in a trained encoder: TabPFN's rows feel a law, err like n^{-1/2}, and how the error grows.

TabPFN v1 is an encoder without positions whose tokens are rows of a table: the theorem's exchangeable setting, with
trained weights, 12 layers and n up to thousands. Propagation of chaos (Sznitman): tokens in the field of an independent
sample of the same law, against n and depth, with three nulls. Then closures: how few numbers may stand for the rows.
Ours; needs `attn-flow encoders get tabpfn` (else an untrained encoder of its form is run, and said to be).
"""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path
from typing import Any

import torch

from attn_flow.base.progress import progress_bar
from attn_flow.experiments.claims import bound, claim
from attn_flow.experiments.encoders import fetched, load_fetched
from attn_flow.experiments.encoders.tables import TableEncoder
from attn_flow.experiments.mean_field_chaos import (
    LAWS,
    Law,
    cloud_words,
    exponent,
    growth,
    independent_sampling,
    passive_error,
    twin,
    two_samples,
)
from attn_flow.experiments.mean_field_closures import components, more_atoms, table_task
from attn_flow.experiments.mean_field_figure import plot as plot
from attn_flow.experiments.parts import kept_part
from attn_flow.hooks.fingerprints import fingerprint
from attn_flow.hooks.weights import attentions

NULLS = ("other law", "shuffled labels", "random weights")
SEEDS = {64: 6, 128: 6, 256: 6, 512: 4, 1024: 3, 2048: 2, 4096: 1}
QUICK = {32: 3, 128: 3}


def encoder() -> tuple[TableEncoder, bool]:
    """TabPFN and True, or where it was not fetched an untrained encoder of its form, small, and False."""
    if fetched("tabpfn") is not None:
        model: Any = load_fetched("tabpfn")[0]
        return model, True
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return TableEncoder(layers=3, dim=32, heads=2, hidden=64).eval(), False


def chaos(model: TableEncoder, law: Law, n: int, seeds: int, null: str = "") -> dict[str, Any]:
    """Errors of passive tokens by seed and layer."""
    acting = twin(model, 0) if null == "random weights" else model
    runs = []
    for seed in range(seeds):
        samples = two_samples(model, law, n, torch.Generator().manual_seed(1000 * n + seed), null)
        runs.append(passive_error(acting, *samples))
    return {name: [run[name] for run in runs] for name in runs[0]}


def one_cloud(model: TableEncoder, law: Law, n: int, seed: int) -> dict[str, Any]:
    """Growth of displacements, sampling errors, and the cloud in the theory's words, for one sample of n rows."""
    generator = torch.Generator().manual_seed(seed)
    x, y = law.draw(n, generator)
    tokens = model.rows(x, y)
    return {
        "growth": growth(model, tokens, generator),
        "sampling": independent_sampling(model, tokens, n // 2, generator),
        "words": cloud_words(model, attentions(model), tokens, y),
    }


def compute(
    quick: bool = False, seed: int = 0, progress: bool = False, parts: Path | None = None, largest: int = 4096
) -> dict[str, Any]:
    """seed: of the first table; sizes, up to `largest`, and their seeds are SEEDS, or QUICK. parts: see `kept_part`."""
    model, trained = encoder()
    laws, sizes = (LAWS[:2], QUICK) if quick else (LAWS, {n: s for n, s in SEEDS.items() if n <= largest})
    null_sizes, null_seeds = (tuple(QUICK), 2) if quick else (tuple(n for n in (64, 256, 1024) if n <= largest), 3)
    rows, held_out, cloud = (96, 48, 128) if quick else (256, 128, 512)
    numbers, repeats = ((1, 4), 1) if quick else ((1, 2, 4, 8, 16), 1)
    many = {rows: (4.0, 8.0)} if quick else {rows: (2.0, 4.0, 6.0, 8.0), 4 * rows: (2.0, 4.0)}
    found: dict[str, Any] = {}
    todo: dict[str, tuple[dict[str, Any], Any]] = {}

    def part(group: str, law: Law, key: str, options: dict[str, Any], run: Any) -> None:
        todo[f"{group}-{law.name}{key}".replace(" ", "_")] = ({"law": repr(law), **options}, run)

    for n, seeds in sizes.items():
        for law in laws:
            options = {"n": n, "seeds": seeds, "null": ""}
            part("chaos", law, f"-{n}", options, partial(chaos, model, law, n, seeds))
    for law in laws:
        for null in NULLS:
            for n in null_sizes:
                options = {"n": n, "seeds": null_seeds, "null": null}
                part("chaos", law, f"-{null}-{n}", options, partial(chaos, model, law, n, null_seeds, null))
    for law in laws:
        part("cloud", law, "", {"n": cloud, "seed": seed}, partial(one_cloud, model, law, cloud, seed))
        options = {"n": rows, "numbers": numbers, "seed": seed}
        part("components", law, "", options, partial(components, model, law, rows, numbers, seed))
        for n, mosts in many.items():
            options = {"n": n, "mosts": mosts, "seed": seed}
            part("atoms", law, f"-{n}", options, partial(more_atoms, model, law, n, mosts, seed))
        for s in range(seed, seed + repeats):
            options = {"n": rows, "m": held_out, "seed": s}
            part("task", law, f"-{s}", options, partial(table_task, model, law, rows, held_out, s))
    weights = fingerprint(model)
    with progress_bar("mean field", len(todo), progress) as advance, torch.no_grad():
        for name, (options, run) in todo.items():
            advance(0, note=name)
            found[name] = kept_part(parts, name, {"weights": weights, **options}, run)
            advance(note=name)
    summary = {law.name: _summary(law, found, sizes, null_sizes, repeats, seed) for law in laws}
    for law in laws:
        summary[law.name]["atoms"] = {str(n): found[f"atoms-{law.name}-{n}".replace(" ", "_")] for n in many}
    return {
        "seed": seed,
        "trained": trained,
        "sizes": {str(n): s for n, s in sizes.items()},
        "null_sizes": list(null_sizes),
        "rows": rows,
        "held_out": held_out,
        "cloud": cloud,
        "laws": summary,
        "claims": _claims(summary, trained),
    }


def _summary(
    law: Law, found: dict[str, Any], sizes: dict[int, int], null_sizes: tuple[int, ...], repeats: int, seed: int
) -> dict[str, Any]:
    """Errors by size and layer, their exponents by layer, the nulls', and the parts of one cloud and of the tasks."""
    at = lambda key: found[f"{key}".replace(" ", "_")]
    runs = {n: at(f"chaos-{law.name}-{n}") for n in sizes}
    layers = range(len(runs[min(sizes)]["error"][0]))
    by_layer = lambda runs, name, layer: [[seed[layer] for seed in run[name]] for run in runs.values()]
    slopes = [exponent(list(sizes), by_layer(runs, "error", layer)) for layer in layers]
    large = {n: run for n, run in runs.items() if n >= max(sizes) / 8}
    late = [exponent(list(large), by_layer(large, "error", layer)) for layer in layers]
    nulls = {}
    for null in NULLS if f"chaos-{law.name}-{NULLS[0]}-{null_sizes[0]}".replace(" ", "_") in found else ():
        these = {n: at(f"chaos-{law.name}-{null}-{n}") for n in null_sizes}
        nulls[null] = {
            "error": {str(n): _means(run["error"]) for n, run in these.items()},
            "exponent": [exponent(list(null_sizes), by_layer(these, "error", layer)) for layer in layers],
        }
    cloud = at(f"cloud-{law.name}")
    tasks = [at(f"task-{law.name}-{s}") for s in range(seed, seed + repeats)]
    largest = runs[max(sizes)]
    return {
        "error": {str(n): _means(run["error"]) for n, run in runs.items()},
        "carried": _means(largest["carried"]),
        "added": _means(largest["added"]),
        "added_exponent": [exponent(list(sizes), by_layer(runs, "added", layer)) for layer in layers],
        "exponent": slopes,
        "late_exponent": late,
        "nulls": nulls,
        **cloud,
        "resolution": _resolution(cloud["words"]),
        "lyapunov": {kind: _log_mean(factors) for kind, factors in cloud["growth"].items()},
        "components": at(f"components-{law.name}"),
        "tasks": tasks,
    }


def _resolution(words: dict[str, list[float]], n: int = 4096) -> list[float]:
    """beta n^{-2/(r-1)} by layer, with the effective beta and the effective rank r of the cloud as its dimension.

    Below 1, n tokens resolve the argmax that the zero-temperature limit takes (THEORY 1, finite n).
    """
    return [beta * n ** (-2 / (rank - 1)) for beta, rank in zip(words["beta"], words["rank"])]


def _means(runs: list[list[float]]) -> list[float]:
    return [sum(column) / len(column) for column in zip(*runs)]


def _log_mean(factors: list[float]) -> float:
    """The exponent of a layer: mean logarithm of the growth factors."""
    return sum(math.log(f) for f in factors) / len(factors)


def last_error(task: dict[str, Any], closure: str, rows: str = "error") -> float:
    """Error after the last layer of a closure, "error" of training rows or "held_out"."""
    return task["closures"][closure][rows][-1]


def _claims(laws: dict[str, Any], trained: bool) -> list[dict[str, Any]]:
    claims = []
    for name, law in laws.items():
        sizes = list(law["error"])
        first, last = law["error"][sizes[0]], law["error"][sizes[-1]]
        claims.append(
            bound(
                f"{name}: error at the largest n over that at the smallest, worst layer",
                max(b / a for a, b in zip(first, last)),
                at_most=0.8 if trained else 0.9,
            )
        )
        for null in ("other law", "shuffled labels"):
            if null in law["nulls"] and trained:
                slope = law["nulls"][null]["exponent"][-1][0]
                claims.append(bound(f"{name}: exponent after the last layer, null of {null}", slope, at_least=-0.15))
        if not trained:
            continue
        claims.append(
            claim(f"{name}: exponent of what the field adds, layer 1", law["added_exponent"][1][0], -0.5, 0.1)
        )
        claims.append(claim(f"{name}: exponent of the error after 2 layers", law["exponent"][1][0], -0.5, 0.1))
        claims.append(claim(f"{name}: exponent of the error after 12 layers", law["exponent"][-1][0], -0.5, 0.1))
        claims.append(
            bound(f"{name}: |Lyapunov exponent| a layer, passive", abs(law["lyapunov"]["passive"]), at_most=0.05)
        )
        claims.append(
            bound(f"{name}: 4,096 rows do not resolve the cold limit, least", min(law["resolution"]), at_least=1)
        )
        worst = {c: max(last_error(task, c) for task in law["tasks"]) for c in law["tasks"][0]["closures"]}
        claims.append(bound(f"{name}: error after 12 layers, refitted atoms", worst["refitted atoms"], at_most=0.3))
        first_size = next(iter(law["atoms"].values()))
        claims.append(bound(f"{name}: the same with twice the atoms", first_size["error"][-1], at_most=0.3))
        unseen = max(last_error(task, "refitted atoms", "held_out") for task in law["tasks"])
        claims.append(bound(f"{name}: the same for rows held out", unseen, at_most=0.3))
        rest = min(last_error(task, c) for task in law["tasks"] for c in task["closures"] if c.startswith("random"))
        claims.append(
            bound(f"{name}: error after 12 layers, better of the controls", rest, at_least=worst["refitted atoms"])
        )
        lost = max(task["accuracy"] - task["closures"]["refitted atoms"]["accuracy"] for task in law["tasks"])
        claims.append(bound(f"{name}: accuracy lost on rows held out, refitted atoms", lost, at_most=0.03))
    return claims
