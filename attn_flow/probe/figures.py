"""Pictures of a probe."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from attn_flow.base.figures import NULL, PREDICTION, TRUTH, caption, style

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SUPPORT_COLOURS = {
    "closure": "#c44e52",
    "mixture": "#dd8452",
    "saturated": "#937860",
    "gaussian": "#ccb974",
    "mean": "#55a868",
    "hardmax": "#4c72b0",
    "ellipsoid": "#8172b3",
    "sphere": "#64b5cd",
}


def probe_figure(result: Any) -> Figure:
    """What attention computes against what the weights predict, and the approach to the limiting law."""
    with style() as pyplot:
        figure, ((a, b), (c, d)) = pyplot.subplots(2, 2, figsize=(9.5, 6.4))
        layers = range(result.about["encoder"]["layers"])
        for axes, quantity in ((a, "cosine"), (b, "explained")):
            for name in result.about["supports"]:
                _band(axes, layers, result.interval(f"{quantity}/{name}"), SUPPORT_COLOURS.get(name), name)
            if f"null_{quantity}/rotated" in result.numbers:
                _band(axes, layers, result.interval(f"null_{quantity}/rotated"), NULL, "null: G rotated", dashed=True)
        a.set(xlabel="layer", ylabel="mean cosine", title="attention output against prediction", ylim=(-0.3, 1.02))
        figure.legend(*a.get_legend_handles_labels(), loc="outside upper center", ncols=9, fontsize=7.5)
        b.set(xlabel="layer", ylabel="explained variance", title="and the variance it explains", ylim=(-2.1, 1.02))
        b.axhline(0, color="0.8", lw=0.8, zorder=0)
        _band(c, layers, result.approach("w2"), PREDICTION, "cloud before the layer")
        _band(c, layers, result.approach("input"), TRUTH, "input cloud")
        _band(c, layers, result.interval("limit/w2_null"), NULL, "null: G rotated", dashed=True)
        c.axhline(1, color="0.8", lw=0.8, zorder=0)
        c.set(xlabel="layer", ylabel=r"$W_2$ after / $W_2$ before", title="approach to the predicted limiting law")
        c.legend()
        _band(d, layers, result.interval("limit/E_before"), TRUTH, "E, before")
        _band(d, layers, result.interval("limit/E_after"), PREDICTION, "E, after")
        _band(d, layers, result.interval("limit/V_after"), "#8172b3", "V's leading space, after", dashed=True)
        d.set(
            xlabel="layer",
            ylabel="squared length inside",
            title="alignment with the predicted subspace E",
            ylim=(0, None),
        )
        d.legend()
        for axes in (a, b, c, d):
            axes.xaxis.get_major_locator().set_params(integer=True)
        about = result.about
        caption(
            figure,
            f"{about['encoder']['model']}, {about['texts']} texts, {about['tokens']} tokens, seed {about['seed']}; "
            "bands: 95% bootstrap intervals over texts.",
        )
    return figure


def _band(
    axes: Axes,
    layers: Sequence[int],
    interval: tuple[Any, Any, Any],
    colour: str | None,
    label: str,
    dashed: bool = False,
) -> None:
    mean, low, high = (z.numpy() for z in interval)
    axes.plot(layers, mean, "--" if dashed else "-o", ms=3, lw=1.4, color=colour, label=label)
    axes.fill_between(layers, low, high, color=colour, alpha=0.15, lw=0)


def heads_figure(result: Any) -> Figure:
    """Layers x heads maps."""
    maps = {
        "head/entropy": "attention entropy / log n",
        "head/logit_std": "standard deviation of logits",
        "head/largest": "largest attention weight",
        "head/closure": "cosine of the closure",
        "head/leading": "leading eigenvalue of V G",
        "head/self_argmax": "own argmax",
    }
    with style() as pyplot:
        layers, heads = result.numbers["head/entropy"].shape
        figure, panels = pyplot.subplots(2, 3, figsize=(10, 2.2 + 0.5 * layers))
        for axes, (name, title) in zip(panels.flat, maps.items()):
            value = result.numbers[name].numpy()
            image = axes.imshow(value, aspect="auto", origin="lower")
            axes.set(title=title, xlabel="head", ylabel="layer", xticks=range(0, heads, 2), yticks=range(layers))
            figure.colorbar(image, ax=axes, shrink=0.9)
        caption(figure, "Each cell: mean over texts. Rotating heads (complex leading pair): " + _rotating(result))
    return figure


def _rotating(result: Any) -> str:
    cases = [case for row in result.about["head_cases"] for case in row]
    return f"{cases.count('rotating')} of {len(cases)}."


def evolution_figure(result: Any) -> Figure:
    """Histograms of pairwise cosines, log energies, effective rank and clusters, through the layers."""
    with style() as pyplot:
        figure, ((a, b), (c, d)) = pyplot.subplots(2, 2, figsize=(9.5, 6))
        histogram, edges = result.numbers["evolution/histogram"], result.numbers["evolution/edges"]
        levels = histogram.shape[0]
        centres = ((edges[1:] + edges[:-1]) / 2).numpy()
        colours = pyplot.get_cmap("viridis")(torch.linspace(0, 0.95, levels).numpy())
        density = histogram / (edges[1] - edges[0])
        for level in range(levels):
            a.plot(centres, density[level].numpy(), color=colours[level], label=f"{level}", lw=1.2)
        a.set(
            xlabel="pairwise cosine (diagonal removed)",
            ylabel="density",
            title="pairwise cosines by level",
            xlim=(-0.5, 1),
        )
        a.legend(title="level", ncols=2)
        for i, beta in enumerate(result.about["betas"]):
            energy = result.numbers["evolution/log_energy"][i].mean(-1)
            b.plot(range(levels), (energy - energy[0]).numpy(), "-o", ms=3, label=rf"$\beta$ = {beta:g}")
        b.set(xlabel="level", ylabel=r"$\log E_\beta - \log E_\beta(0)$", title="energy")
        b.legend()
        _band(c, range(levels), result.interval("evolution/effective_rank"), TRUTH, "")
        c.set(xlabel="level", ylabel="effective rank", title="effective rank", ylim=(0, None))
        _band(d, range(levels), result.interval("evolution/clusters"), TRUTH, "")
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
    """Several models: the closure's cosine, the approach to the limiting law, pairwise cosine and effective rank."""
    with style() as pyplot:
        figure, panels = pyplot.subplots(2, 2, figsize=(9.5, 6))
        (a, b), (c, d) = panels
        for name, result in results.items():
            layers = range(result.about["encoder"]["layers"])
            levels = range(result.about["encoder"]["layers"] + 1)
            _band(a, layers, result.interval("cosine/closure"), None, name)
            _band(b, layers, result.approach(), None, name)
            _band(c, levels, result.interval("evolution/cosine"), None, name)
            _band(d, levels, result.interval("evolution/effective_rank"), None, name)
        b.axhline(1, color="0.8", lw=0.8, zorder=0)
        a.set(title="attention against the closure", xlabel="layer", ylabel="mean cosine")
        b.set(title="approach to the limiting law", xlabel="layer", ylabel=r"$W_2$ after / before")
        c.set(title="concentration", xlabel="level", ylabel="mean pairwise cosine")
        d.set(title="effective rank", xlabel="level", ylabel="effective rank")
        a.legend()
        caption(figure, "Bands: 95% bootstrap intervals over texts.")
    return figure
