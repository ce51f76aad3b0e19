"""The mean-field limit in a trained encoder: the rows of a table in the field of another sample of the same rows.

TabPFN v1 is an encoder without positions whose tokens are rows of a table: exchangeable, as in the theorems, with
trained weights, 12 layers and thousands of tokens. Propagation of chaos (Sznitman) says that tokens in the field of an
independent sample err like n^{-1/2}. Measured against n and depth, with three baselines. Ours; it needs
`python -m attn_flow.experiments.encoders tabpfn` (otherwise a small untrained encoder of its form is run, and
the figure says so).
"""

from __future__ import annotations

import math
from functools import partial
from itertools import accumulate
from operator import mul
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from attn_flow.base.progress import progress_bar
from attn_flow.experiments.claims import at_least, at_most, claim
from attn_flow.experiments.encoders import fetched, load_fetched
from attn_flow.experiments.encoders.chaos import (
    DISTRIBUTIONS,
    TableDistribution,
    exponent,
    growth,
    passive_error,
    two_samples,
    untrained_layers,
)
from attn_flow.experiments.encoders.tables import TableEncoder
from attn_flow.experiments.figures import COLOURS, THEORY, caption, label, panels, shades
from attn_flow.experiments.parts import kept_part
from attn_flow.hooks.corpus import fingerprint

if TYPE_CHECKING:
    from matplotlib.figure import Figure

BASELINES = ("other distribution", "shuffled labels", "untrained layers")
SEEDS = {64: 6, 128: 6, 256: 6, 512: 4, 1024: 3, 2048: 2, 4096: 1}  # repetitions by number of rows
QUICK = {32: 3, 128: 3}


def encoder() -> tuple[TableEncoder, bool]:
    """TabPFN and True; if it was not fetched, a small untrained encoder of its form and False."""
    if fetched("tabpfn") is not None:
        model: Any = load_fetched("tabpfn")[0]
        return model, True
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return TableEncoder(layers=3, dim=32, heads=2, hidden=64).eval(), False


def errors_by_seed(
    model: TableEncoder, rows: TableDistribution, n: int, seeds: int, baseline: str = ""
) -> dict[str, Any]:
    """Errors of passive tokens, [seed][layer]."""
    acting = untrained_layers(model, 0) if baseline == "untrained layers" else model
    runs = []
    for seed in range(seeds):
        samples = two_samples(model, rows, n, torch.Generator().manual_seed(1000 * n + seed), baseline)
        runs.append(passive_error(acting, *samples))
    return {name: [run[name] for run in runs] for name in runs[0]}


def growth_of_sample(model: TableEncoder, rows: TableDistribution, n: int, seed: int) -> dict[str, Any]:
    """Growth of displacements by layer, for one sample of n rows."""
    generator = torch.Generator().manual_seed(seed)
    return growth(model, model.rows(*rows.draw(n, generator)), generator)


def compute(quick: bool = False, seed: int = 0, progress: bool = False, parts: Path | None = None) -> dict[str, Any]:
    """Errors against n and depth (parts: `kept_part`). The seed is that of the clouds; errors have their own."""
    model, is_trained = encoder()
    chosen, sizes = (DISTRIBUTIONS[:2], QUICK) if quick else (DISTRIBUTIONS, SEEDS)
    few = dict.fromkeys(QUICK, 2) if quick else dict.fromkeys((64, 256, 1024), 3)
    cloud_size = 128 if quick else 512
    jobs: dict[str, tuple[dict[str, Any], Any]] = {}
    for rows in chosen:
        for baseline in ("", *BASELINES):
            for n, seeds in (few if baseline else sizes).items():
                options = {"rows": repr(rows), "n": n, "seeds": seeds, "baseline": baseline}
                jobs[_part_name(rows, baseline, n)] = options, partial(errors_by_seed, model, rows, n, seeds, baseline)
        options = {"rows": repr(rows), "n": cloud_size, "seed": seed}
        jobs[_part_name(rows, "growth", cloud_size)] = options, partial(growth_of_sample, model, rows, cloud_size, seed)
    results, weights = {}, fingerprint(model)
    with progress_bar("mean field", len(jobs), progress) as advance, torch.no_grad():
        for name, (options, run) in jobs.items():
            advance(0, note=name)
            results[name] = kept_part(parts, name, {"weights": weights, **options}, run)
            advance(note=name)
    summary = {rows.name: _summary(rows, results, sizes, few, cloud_size) for rows in chosen}
    return {
        "seed": seed,
        "trained": is_trained,
        "sizes": {str(n): seeds for n, seeds in sizes.items()},
        "cloud": cloud_size,
        "distributions": summary,
        "claims": _claims(summary, is_trained),
    }


def _part_name(rows: TableDistribution, kind: str, n: int) -> str:
    return "-".join(word for word in (rows.name, kind, str(n)) if word).replace(" ", "_")


def _summary(
    rows: TableDistribution, results: dict[str, Any], sizes: dict[int, int], few: dict[int, int], cloud_size: int
) -> dict[str, Any]:
    """Errors by n and layer, their exponents by layer, the same of the baselines, and the growth in one cloud."""
    runs = {n: results[_part_name(rows, "", n)] for n in sizes}
    layers = range(len(runs[min(sizes)]["error"][0]))

    def exponents(runs: dict[int, Any], name: str) -> list[tuple[float, float]]:
        by_layer = lambda layer: [[seed[layer] for seed in run[name]] for run in runs.values()]
        return [exponent(list(runs), by_layer(layer)) for layer in layers]

    baselines = {}
    for baseline in BASELINES:
        these = {n: results[_part_name(rows, baseline, n)] for n in few}
        baselines[baseline] = {
            "error": {str(n): _means(run["error"]) for n, run in these.items()},
            "exponent": exponents(these, "error"),
        }
    growth, largest = results[_part_name(rows, "growth", cloud_size)], runs[max(sizes)]
    return {
        "error": {str(n): _means(run["error"]) for n, run in runs.items()},
        "carried": _means(largest["carried"]),
        "added": _means(largest["added"]),
        "added_exponent": exponents(runs, "added"),
        "exponent": exponents(runs, "error"),
        "baselines": baselines,
        "growth": growth,
        "lyapunov": {kind: sum(map(math.log, f)) / len(f) for kind, f in growth.items()},
    }


def _means(runs: list[list[float]]) -> list[float]:
    return [sum(column) / len(column) for column in zip(*runs)]


def _claims(summary: dict[str, Any], is_trained: bool) -> list[dict[str, Any]]:
    claims = []
    for name, numbers in summary.items():
        first, *_, last = numbers["error"].values()
        ratio = max(b / a for a, b in zip(first, last))
        what = f"{name}: error at the largest n over that at the smallest, worst layer"
        claims.append(at_most(what, ratio, 0.8 if is_trained else 0.9))
        if not is_trained:
            continue
        for baseline in BASELINES[:2]:
            slope = numbers["baselines"][baseline]["exponent"][-1][0]
            claims.append(at_least(f"{name}: exponent after the last layer, {baseline}", slope, -0.15))
        slopes = {
            "what the field adds, layer 1": numbers["added_exponent"][1],
            "the error after 2 layers": numbers["exponent"][1],
            "the error after 12 layers": numbers["exponent"][-1],
        }
        for what, (slope, _) in slopes.items():
            claims.append(claim(f"{name}: exponent of {what}", slope, -0.5, 0.1, "theorem"))
        rate = abs(numbers["lyapunov"]["passive"])
        claims.append(at_most(f"{name}: growth rate of a displacement by layer, size", rate, 0.05))
    return claims


def plot(numbers: dict[str, Any]) -> Figure:
    """Errors against n, exponents by layer, baselines, and what a layer carries on and adds."""
    title = "The mean-field limit in TabPFN" if numbers["trained"] else "An untrained encoder of tables"
    figure, (a, b, c, d) = panels(4, title=title)
    first, one = next(iter(numbers["distributions"].items()))
    sizes, layers = [int(n) for n in one["error"]], len(one["exponent"])
    depths = sorted({1, 4, layers - 1} & set(range(layers)))
    for depth, colour in zip(depths, shades(len(depths))):
        errors = [one["error"][str(n)][depth] for n in sizes]
        a.loglog(sizes, errors, "o-", color=colour, markersize=3, label=f"after {depth + 1} layers")
        a.loglog(sizes, [errors[0] * (sizes[0] / n) ** 0.5 for n in sizes], **THEORY)
    label(a, f"{first}: in another sample's field", "rows n", "error / spread")
    x = range(1, layers + 1)
    for (name, run), colour in zip(numbers["distributions"].items(), COLOURS):
        slopes, bars = zip(*run["exponent"])
        b.errorbar(x, slopes, bars, color=colour, label=name, capsize=2)
        d.plot(x, list(accumulate(run["growth"]["passive"], mul)), color=colour, label=name)
    b.axhline(-0.5, **THEORY)
    label(b, "exponent of the error in n", "layer", "slope")
    c.loglog(sizes, [one["error"][str(n)][-1] for n in sizes], "o-", color=COLOURS[0], label="same distribution")
    for (name, run), colour in zip(one["baselines"].items(), COLOURS[3:]):
        c.loglog([int(n) for n in run["error"]], [v[-1] for v in run["error"].values()], "s-", color=colour, label=name)
    c.set_ylim(top=3 * c.get_ylim()[1])  # room for the legend
    label(c, f"{first}: baselines, after the last layer", "rows n", "error / spread")
    d.axhline(1, **THEORY)
    label(d, "growth of a small displacement", "layer", "over the spread's")
    count = sum(c["holds"] for c in numbers["claims"])
    repetitions = ", ".join(f"{n}: {seeds}" for n, seeds in numbers["sizes"].items())
    caption(
        figure,
        f"Repetitions by n: {repetitions}. Dashed: n^(-1/2), and no growth. "
        f"{count} of {len(numbers['claims'])} claims hold.",
    )
    return figure
