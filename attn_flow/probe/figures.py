"""Pictures of a probe."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from attn_flow.base.figures import BASELINE, PREDICTION, TRUTH, caption, style
from attn_flow.probe.evolution import BETAS
from attn_flow.probe.findings import Interval

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = {
    "gaussian_closure": "#ccb974",
    "special_closure": "#e0a458",
    "sinks_closure": "#dd8452",
    "window_closure": "#937860",
    "clusters_closure": "#55a868",
    "quantised_closure": "#c44e52",
    "quantised_window_closure": "#8172b3",
    "cross_fitted_closure": "#e377c2",
    "oracle": "#222222",
}
NULL_MARKS = {
    "mean_output": "o",
    "uniform": "s",
    "rotated": "^",
    "another_layer": "v",
    "another_text": "D",
    "random_tokens": "P",
    "text_mean_closure": "p",
    "random_clusters_closure": "X",
    "removed": "*",
    "untrained": "d",
}


def propagation_figure(result: Any) -> Figure:
    """Attention replaced in every layer: distance of the clouds level by level, and of the embeddings at the end."""
    with style() as pyplot:
        figure, (a, b) = pyplot.subplots(1, 2, figsize=(10, 4.6), width_ratios=(1.15, 1))
        names = list(result.propagation)
        for name in names:
            through = result.interval(result.propagation[name].w2)
            levels = range(1, len(through.mean) + 1)
            _line(a, levels, through, name, _title(result, name))
        a.set(
            xlabel="level (after so many layers)",
            ylabel=r"$W_2$(predicted, true) / $W_2$(text, another text)",
            title="clouds: 0 is the encoder itself, 1 another text",
            ylim=(0, None),
        )
        a.xaxis.get_major_locator().set_params(integer=True)
        cosine = {n: result.interval(result.propagation[n].embedding_cosine) for n in names}
        _dots(b, result, cosine)
        b.set(
            xlabel="cosine of the embeddings with the encoder's own", title="embeddings at the end", xlim=(None, 1.01)
        )
        about = result.about
        texts = len(next(iter(result.propagation.values())).embedding_cosine)
        caption(
            figure,
            f"{about['encoder']['model']}, {texts} texts, seed {about['seed']}; attention replaced in EVERY layer, all "
            "else as trained. Colour: closures; dashed: oracle; dashed grey: nulls, controls. Bands: 95% over texts.",
        )
    return figure


def ladder_figure(result: Any) -> Figure:
    """What each ingredient adds: explained variance by layer, and its mean over layers beside the nulls."""
    with style() as pyplot:
        figure, (a, b) = pyplot.subplots(1, 2, figsize=(10, 4.8), width_ratios=(1.15, 1))
        shown = [name for name in result.closures if name in COLOURS]
        controls = [name for name in result.closures if name in NULL_MARKS]
        layers = range(result.about["encoder"]["layers"])
        for name in shown:
            _line(a, layers, result.interval(result.closures[name].explained), name, _title(result, name))
        a.axhline(0, color="0.6", lw=0.8, zorder=0)
        lowest = min(float(result.closures[name].explained.mean(-1).min()) for name in shown)
        a.set(
            xlabel="layer",
            ylabel="explained variance of attention outputs",
            title="the ladder, layer by layer (0: the mean output)",
            ylim=(max(-1.0, lowest - 0.05), 1.02),
        )
        a.xaxis.get_major_locator().set_params(integer=True)
        found = {n: result.interval(result.closures[n].explained.mean(0)) for n in shown}
        found |= {n: result.interval(result.closures[n].explained.mean(0)) for n in controls}
        found |= {n: result.interval(agreement.explained.mean(0)) for n, agreement in result.nulls.items()}
        order = _dots(b, result, found, least=-1.0)
        for name, gain in result.gains().items():
            at = max(-1.0, float(found[name].low if found[name].known else found[name].mean))
            words = f"{float(gain.mean()):+.2f}"
            b.annotate(
                words, (at, order.index(name)), (-5, 0), textcoords="offset points", ha="right", va="center", fontsize=7
            )
        b.axvline(0, color="0.6", lw=0.8, zorder=0)
        b.set(xlabel="explained variance, mean over layers", title="steps and nulls", xlim=(-1.05, 1.02))
        caption(
            figure,
            "On the encoder's own states. In brackets: shared numbers a head + exact tokens of a query's own. Beside a "
            "step: its gain over the one it adds to.\nNulls left of -1 are drawn at the edge. The untrained twin is "
            "another model: easy, and no evidence.",
        )
    return figure


def limit_figure(result: Any) -> Figure:
    """The limiting law of each layer: how near the cloud comes, had theory held, and where attention pushes."""
    limits = result.limits
    with style() as pyplot:
        figure, (a, b, c) = pyplot.subplots(1, 3, figsize=(11, 3.9))
        layers = range(len(limits.real))
        _band(a, layers, result.interval(limits.real), TRUTH, "the layer")
        _band(a, layers, result.interval(limits.if_held), PREDICTION, "if theory held", dashed=True)
        _band(a, layers, result.interval(limits.real_rotated), BASELINE, "to the limit of a rotated G", dashed=True)
        a.axhline(1, color="0.7", lw=0.8, zorder=0)
        a.set(ylabel=r"$W_2$ to the limiting law, after / before", title="nearer to the limit?")
        way = result.fraction_of_the_way()
        _band(b, layers, way, TRUTH, "the layer")
        _band(b, layers, result.fraction_of_the_way(rotated=True), BASELINE, "to the limit of a rotated G", dashed=True)
        for y in (0, 1):
            b.axhline(y, color="0.7", lw=0.8, zorder=0)
        b.set(ylabel="fraction of the way", title="1: as theory says, 0: not at all", ylim=_robust(way.mean, (-1, 1.5)))
        _band(c, layers, result.interval(limits.cosine), PREDICTION, "attention with M x + c")
        _band(c, layers, result.interval(limits.cosine_without_c), "#dd8452", "attention with M x")
        _band(c, layers, result.interval(limits.block_cosine), TRUTH, "whole block with M x + c")
        c.plot(layers, limits.stability.numpy(), ":", color="0.3", label="E of two halves: overlap")
        c.set(ylabel="cosine, overlap", title="displacements, stability of E", ylim=(-0.1, 1.5))  # room for the legend
        c.set_yticks([0, 0.25, 0.5, 0.75, 1])
        for axes in (a, b, c):
            axes.set_xlabel("layer")
            axes.xaxis.get_major_locator().set_params(integer=True)
            axes.legend()
        caption(figure, "Clouds as directions, text by text. Bands: 95% over texts. Spectral cases: " + _cases(result))
    return figure


def _cases(result: Any) -> str:
    cases = result.limits.cases
    return ", ".join(f"{cases.count(case)} {case}" for case in dict.fromkeys(cases)) + "."


def _title(result: Any, name: str) -> str:
    for words in (result.about["nulls"], result.about["controls"]):
        if name in words:
            return words[name]
    title = result.about["closures"][name]
    cost = result.about["costs"].get(name)
    return title if cost is None else f"{title} ({cost['numbers']:.0f} + {cost['own_tokens']})"


def _line(axes: Axes, xs: Sequence[int], seen: Interval, name: str, label: str) -> None:
    if name in NULL_MARKS:
        _band(axes, xs, seen, BASELINE, label, dashed=True, mark=NULL_MARKS[name])
    else:
        _band(axes, xs, seen, COLOURS[name], label, dashed=name == "oracle")


def _dots(axes: Axes, result: Any, found: dict[str, Interval], least: float = -np.inf) -> list[str]:
    """One row a name, best on top, with its interval. Returns the names from below."""
    order = sorted(found, key=lambda name: float(found[name].mean))
    for row, name in enumerate(order):
        seen = found[name]
        colour, mark = COLOURS.get(name, BASELINE), NULL_MARKS.get(name, "o")
        low, mean, high = (max(least, float(v)) for v in (seen.low, seen.mean, seen.high))
        if seen.known:
            axes.plot([low, high], [row, row], "-", color=colour, lw=2, alpha=0.6)
        axes.plot([mean], [row], mark, color=colour, ms=5)
    axes.set_yticks(range(len(order)), [_title(result, name) for name in order], fontsize=7.5)
    axes.set_ylim(-0.6, len(order) - 0.4)
    return order


def _band(
    axes: Axes,
    layers: Sequence[int],
    seen: Interval,
    colour: str | None,
    label: str,
    dashed: bool = False,
    mark: str = "o",
) -> None:
    mean, low, high = (z.numpy() for z in (seen.mean, seen.low, seen.high))
    axes.plot(layers, mean, ("--" if dashed else "-") + mark, ms=3, lw=1.4, color=colour, label=label)
    if seen.known:
        axes.fill_between(layers, low, high, color=colour, alpha=0.15, lw=0)


def _robust(values: torch.Tensor, least: tuple[float, float]) -> tuple[float, float]:
    """Limits that hold all finite values, but no wilder than three times the usual range."""
    shown = values[torch.isfinite(values)]
    low, high = least
    if len(shown):
        low, high = min(low, float(shown.min()) - 0.1), max(high, float(shown.max()) + 0.1)
    return max(low, -3.0), min(high, 4.0)


HEAD_MAPS = {
    "entropy": ("attention entropy / log n", "1: a head looks everywhere alike, 0: at one token."),
    "largest_weight": ("largest attention weight", "mean over queries of the weight of the best key."),
    "logit_std": (
        "standard deviation of logits",
        "above about sqrt(2 log n) a few tokens win: no Gaussian can follow.",
    ),
    "effective_beta": ("effective beta", "beta |G x| |y|: the inverse temperature on the unit sphere."),
    "explained": ("variance the closure explains", "of the head's own average: low where the closure misses it."),
    "leading": ("leading eigenvalue of V G", "real part; where it is negative or 0 the theory's limit degenerates."),
}


def heads_figure(result: Any) -> Figure:
    """Layers x heads maps; colours span the middle 90% of the cells, so that one head does not bleach the rest."""
    with style() as pyplot:
        layers, heads = result.heads.entropy.shape
        figure, panels = pyplot.subplots(2, 3, figsize=(10, 2.4 + 0.46 * layers))
        for axes, (name, (title, _)) in zip(panels.flat, HEAD_MAPS.items()):
            value = getattr(result.heads, name).numpy()
            low, high = np.nanquantile(value, (0.05, 0.95))
            image = axes.imshow(
                value, aspect="auto", origin="lower", vmin=low, vmax=max(high, low + 1e-9), cmap="Blues"
            )
            axes.set(title=title, xlabel="head", ylabel="layer", xticks=range(0, heads, 2), yticks=range(layers))
            figure.colorbar(image, ax=axes, shrink=0.9, extend="both")
        caption(figure, "Each cell: mean over texts. Colours span the 5th to the 95th percentile.")
    return figure


def evolution_figure(result: Any) -> Figure:
    """Histograms of pairwise cosines, log energies, effective rank and clusters, through the layers."""
    seen = result.evolution
    with style() as pyplot:
        figure, ((a, b), (c, d)) = pyplot.subplots(2, 2, figsize=(9.5, 6))
        levels = seen.histogram.shape[0]
        centres = ((seen.edges[1:] + seen.edges[:-1]) / 2).numpy()
        colours = pyplot.get_cmap("viridis")(torch.linspace(0, 0.85, levels).numpy())
        density = seen.histogram / (seen.edges[1] - seen.edges[0])
        for level in range(levels):
            a.plot(centres, density[level].numpy(), color=colours[level], label=f"{level}", lw=1.2)
        a.set(
            xlabel="pairwise cosine (diagonal removed)",
            ylabel="density",
            title="pairwise cosines by level",
            xlim=(-0.5, 1),
        )
        a.legend(title="level", ncols=2)
        for beta, energy in zip(BETAS, seen.log_energy.mean(-1)):
            b.plot(range(levels), (energy - energy[0]).numpy(), "-o", ms=3, label=rf"$\beta$ = {beta:g}")
        b.set(xlabel="level", ylabel=r"$\log E_\beta - \log E_\beta(0)$", title="energy")
        b.legend()
        _band(c, range(levels), result.interval(seen.effective_rank), TRUTH, "")
        c.set(xlabel="level", ylabel="effective rank", title="effective rank", ylim=(0, None))
        _band(d, range(levels), result.interval(seen.clusters), TRUTH, "")
        d.set(xlabel="level", ylabel="clusters per text", title="clusters (tokens within distance .5)", ylim=(0, None))
        caption(figure, "Level 0 is the input of the first attention, the last level the encoder's output.")
    return figure


def spectra_figure(found: dict[str, Any], name: str) -> Figure:
    """Eigenvalues of M = V G of every head in the complex plane, a panel per layer."""
    layers = found["layers"]
    with style() as pyplot:
        columns = min(layers, 4)
        rows = -(-layers // columns)
        figure, panels = pyplot.subplots(rows, columns, figsize=(2.6 * columns, 2.5 * rows), squeeze=False)
        for axes in panels.flat[layers:]:
            axes.set_visible(False)
        for layer, axes in enumerate(panels.flat[:layers]):
            heads = [head for head in found["heads"] if head["layer"] == layer]
            for i, head in enumerate(heads):
                colour = pyplot.get_cmap("turbo")(i / max(1, len(heads) - 1))
                axes.plot(head["real"], head["imaginary"], ".", ms=3, color=colour)
            axes.axvline(0, color="0.85", lw=0.8, zorder=0)
            axes.set(title=f"layer {layer}", xlabel="Re", ylabel="Im" if layer % columns == 0 else "")
        figure.suptitle(f"{name}: spectrum of M = V G, one colour per head", x=0.01, ha="left", fontsize=10)
    return figure


def comparison_figure(results: dict[str, Any]) -> Figure:
    """Several models: through depth, layer by layer, pairwise cosine and effective rank."""
    with style() as pyplot:
        figure, panels = pyplot.subplots(2, 2, figsize=(9.5, 6))
        (a, b), (c, d) = panels
        for name, result in results.items():
            L = result.about["encoder"]["layers"]
            _band(a, range(1, L + 1), result.interval(result.propagation[result.main].w2), None, name)
            _band(b, range(L), result.interval(result.closures[result.main].explained), None, name)
            _band(c, range(L + 1), result.interval(result.evolution.pairwise_cosine), None, name)
            _band(d, range(L + 1), result.interval(result.evolution.effective_rank), None, name)
        a.set(title="the closure through depth", xlabel="level", ylabel=r"$W_2$ over $W_2$ between texts")
        b.set(title="the closure layer by layer", xlabel="layer", ylabel="explained variance", ylim=(-1, 1.02))
        c.set(title="concentration", xlabel="level", ylabel="mean pairwise cosine")
        d.set(title="effective rank", xlabel="level", ylabel="effective rank")
        a.legend()
        caption(figure, "Bands: 95% bootstrap intervals over texts.")
    return figure
