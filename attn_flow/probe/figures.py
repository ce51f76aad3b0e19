"""The figures of a probe: one for each question, drawn small for the overview or with labels for its section."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from attn_flow.base.figures import BASELINE, COLOURS, PREDICTION, TRUTH, style
from attn_flow.base.imports import require_extra
from attn_flow.probe.measurements import Measurements
from attn_flow.probe.sampling import gaussian_exponent
from attn_flow.theory.random_energy import PHASES

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PIXELS_PER_INCH = 74.8  # where the style's font is 12 pixels high
HEAD_GROUPS = 6  # of heads from warm to cold, whose medians are drawn
CLUSTER_METHODS = {  # how the lines of the clusters' figure are labelled and drawn
    "foreign_queries": ("other texts' queries", TRUTH, "-"),
    "own_attention": ("own attention (reference)", PREDICTION, "--"),
    "keys": ("keys alone", COLOURS[2], "-"),
    "top_tokens": ("most attended tokens", COLOURS[3], "-"),
    "random_clusters": ("random clusters", COLOURS[4], ":"),
    "random_tokens": ("random tokens", BASELINE, ":"),
}
Points = Sequence[tuple[float, float]]


def draw(result: Measurements, name: str, width: int = 748, small: bool = False) -> Figure:
    """The figure of a question, or of "evolution", with text of 12 pixels at a width in pixels.

    Args:
        result: of a probe.
        name: averaging, clusters, temperature, limit or evolution.
        width: in pixels. Panels stand below each other if it is less than 600.
        small: without labels.
    """
    panels = PANELS[name][:1] if small else PANELS[name]
    rows, columns = (len(panels), 1) if width < 600 else (1, len(panels))
    height = 0.58 * width if small else 330 * rows
    size = width / PIXELS_PER_INCH, height / PIXELS_PER_INCH
    with style() as pyplot:
        figure, axes = pyplot.subplots(rows, columns, figsize=size, squeeze=False)
        for panel, drawn in zip(axes.flat, panels):
            drawn(panel, result, small)
            if small:
                panel.set(xlabel="", ylabel="", title="")
                panel.tick_params(labelsize=7.5)
    return figure


def comparison_figure(results: Mapping[str, Measurements]) -> Figure:
    """The exponent of every head of several models against the temperature of its logits, with the predicted curve."""
    with style() as pyplot:
        figure, axes = pyplot.subplots(figsize=(10, 5))
        for (name, result), colour in zip(results.items(), COLOURS * 3):
            rows = _rows(result, "averaging")
            axes.plot(*_columns(rows, "logit_sd", "b"), "o", markersize=4, color=colour, alpha=0.7, label=name)
        _finish_exponents(axes, next(iter(results.values())), small=False)
        axes.legend()
    return figure


# --- one function per panel: (axes, result, small) ---


def exponents_and_temperature(axes: Axes, result: Measurements, small: bool) -> None:
    """Every head's exponent b against the standard deviation of its logits."""
    rows = _rows(result, "averaging")
    axes.plot(*_columns(rows, "logit_sd", "b"), "o", markersize=3 if small else 4, color=TRUTH, alpha=0.7)
    _finish_exponents(axes, result, small)
    if not small:
        axes.set_title("One dot per head")


def exponents_from_logits(axes: Axes, result: Measurements, small: bool) -> None:
    """Every head's exponent b against the one that its logits alone give."""
    rows = _rows(result, "averaging")
    axes.axline((0, 0), slope=1, color=BASELINE, linewidth=1, linestyle="--", zorder=0)
    axes.plot(*_columns(rows, "logits_b", "b"), "o", markersize=4, color=TRUTH, alpha=0.7)
    axes.set(xlabel="exponent from the head's logits alone", ylabel="exponent b measured", title="Predicted, no fit")


def distances_and_clusters(axes: Axes, result: Measurements, small: bool) -> None:
    """W2 after the last layer against the number of clusters per head."""
    ends = []
    for name, points in cluster_curves(result).items():
        label, colour, dashes = CLUSTER_METHODS[name]
        thick = 2.2 if name == "foreign_queries" else 1.4
        axes.plot(*zip(*points), dashes, marker="o", markersize=2.5, linewidth=thick, color=colour)
        ends.append((*points[-1], label, colour))
    axes.set_xscale("log", base=2)
    axes.set(xlabel="K, clusters per head", ylabel="W2 at the output / W2 between texts", ylim=(0, None))
    axes.xaxis.set_major_formatter("{x:.0f}")
    if ends and not small:
        _label_ends(axes, ends)


def descriptions_and_temperature(axes: Axes, result: Measurements, small: bool) -> None:
    """What explains a head's output, against the temperature of its logits; lines are medians of groups of heads."""
    rows, ends = _rows(result, "temperature"), []
    for key, label, colour in (
        ("two_moments", "two moments", TRUTH),
        ("four_keys", "four largest logits", PREDICTION),
    ):
        points = np.array(sorted((s, max(-1.0, y)) for s, y in _pairs(rows, "logit_sd", key))).reshape(-1, 2)
        axes.plot(*points.T, "o", markersize=3, color=colour, alpha=0.4)
        medians = [np.median(group, axis=0) for group in np.array_split(points, HEAD_GROUPS) if len(points) > 12]
        if medians:
            axes.plot(*np.array(medians).T, "-", color=colour, linewidth=2)
            ends.append((points[-1, 0], medians[-1][1], label, colour))
    _temperature_axis(axes)
    axes.set(ylabel="explained share of its output", ylim=(-1.1, 1.25))
    thresholds = result.findings["temperature"].numbers.get("thresholds") or []
    for threshold in thresholds:
        axes.axvline(threshold, color=BASELINE, linewidth=1, linestyle="--", zorder=0)
    if not small and ends:
        low, high = axes.get_xlim()
        bounds = [low, *thresholds, high]
        for name, left, right in zip(PHASES, bounds, bounds[1:]):
            if low < right and left < high:
                axes.text((max(left, low) * min(right, high)) ** 0.5, 1.13, name, ha="center", color=BASELINE)
        _label_ends(axes, ends)


def agreement_by_layer(axes: Axes, result: Measurements, small: bool) -> None:
    """How well the tokens follow the flow to the limit of their layer, and what rotated weights give."""
    own, rotated = result.limit.agreement.mean(-1).tolist(), result.limit.rotated
    layers = range(len(own))
    if result.limit.applies:
        low, middle, high = (rotated.nanquantile(q, dim=-1).tolist() for q in (0.05, 0.5, 0.95))
        axes.fill_between(layers, low, high, color=BASELINE, alpha=0.3, linewidth=0)
        axes.plot(layers, middle, "--", color=BASELINE)
        axes.plot(layers, own, "o-", markersize=4, color=TRUTH)
        if not small:
            last = layers[-1]
            ends = [(last, own[-1], "its own weights", TRUTH), (last, middle[-1], "rotated weights", BASELINE)]
            _label_ends(axes, ends)
    axes.set(xlabel="layer", ylabel="agreement with the flow to the limit")
    axes.xaxis.set_major_locator(require_extra("matplotlib.ticker").MaxNLocator(integer=True))


def cosines_by_level(axes: Axes, result: Measurements, small: bool) -> None:
    """Mean cosine of different tokens, plain and centred, through depth."""
    evolution = result.evolution
    ends = []
    for value, label, colour in (
        (evolution.cosine, "cosine of two tokens", TRUTH),
        (evolution.centred_cosine, "without the common direction", PREDICTION),
    ):
        means = value.mean(-1).tolist()
        axes.plot(means, "o-", markersize=3, color=colour)
        ends.append((len(means) - 1, means[-1], label, colour))
    axes.set(xlabel="after so many layers", ylabel="mean cosine")
    axes.xaxis.set_major_locator(require_extra("matplotlib.ticker").MaxNLocator(integer=True))
    if not small:
        _label_ends(axes, ends)


def ranks_by_level(axes: Axes, result: Measurements, small: bool) -> None:
    """Effective rank through depth."""
    axes.plot(result.evolution.effective_rank.mean(-1).tolist(), "o-", markersize=3, color=TRUTH)
    axes.set(xlabel="after so many layers", ylabel="effective rank", ylim=(0, None))
    axes.xaxis.set_major_locator(require_extra("matplotlib.ticker").MaxNLocator(integer=True))


PANELS: dict[str, tuple[Callable[[Any, Any, bool], None], ...]] = {
    "averaging": (exponents_and_temperature, exponents_from_logits),
    "clusters": (distances_and_clusters,),
    "temperature": (descriptions_and_temperature,),
    "limit": (agreement_by_layer,),
    "evolution": (cosines_by_level, ranks_by_level),
}


# --- numbers ---


def cluster_curves(result: Measurements) -> dict[str, Points]:
    """Method -> (K, W2 at the output) where it is known."""
    curves: dict[str, Points] = {}
    for name in CLUSTER_METHODS:
        rows = (result.findings["clusters"].numbers.get("curve") or {}).get(name) or {}
        points = sorted((int(K), row["w2"]) for K, row in rows.items() if row["w2"] is not None)
        if points:
            curves[name] = points
    return curves


def _rows(result: Measurements, question: str) -> list[dict[str, Any]]:
    return result.findings[question].numbers.get("heads") or []


def _pairs(rows: list[dict[str, Any]], x: str, y: str) -> list[tuple[float, float]]:
    return [(row[x], row[y]) for row in rows if row.get(x) is not None and row.get(y) is not None]


def _columns(rows: list[dict[str, Any]], x: str, y: str) -> tuple[list[float], list[float]]:
    pairs = _pairs(rows, x, y)
    return [a for a, _ in pairs], [b for _, b in pairs]


# --- drawing ---


def _finish_exponents(axes: Axes, result: Measurements, small: bool) -> None:
    """The curve b(s) of normal logits, the rate of mean-field theory, and the axes."""
    _temperature_axis(axes)
    axes.set(ylabel="exponent b of the error", ylim=(-0.05, 0.62))
    axes.axhline(0.5, color=BASELINE, linewidth=1, linestyle="--", zorder=0)
    if not result.averaging.applies:
        return
    low, high = axes.get_xlim()
    s = torch.logspace(math.log10(low), math.log10(high), 60, dtype=torch.float64)
    b = gaussian_exponent(s, round(float(result.averaging.tokens.double().mean())))
    axes.plot(s, b, "-", color=PREDICTION, linewidth=1.8)
    axes.set_xlim(low, high)
    if not small:
        place = int((b < 0.4).double().argmax())
        axes.annotate("theory b(s)", (float(s[place]), float(b[place])), (10, 6), textcoords="offset points",
                      color=PREDICTION)  # fmt: skip
        axes.annotate("mean-field rate 1/2", (1, 0.5), (0, 3), ha="right", xycoords=("axes fraction", "data"),
                      textcoords="offset points", color=BASELINE)  # fmt: skip


def _temperature_axis(axes: Axes) -> None:
    """The standard deviation of logits, from warm to cold."""
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter("{x:g}")
    axes.set_xlabel("standard deviation of a head's logits, s")


def _label_ends(axes: Axes, ends: Sequence[tuple[float, float, str, str]]) -> None:
    """Labels to the right of the ends of lines, moved apart so that they do not overlap."""
    figure: Any = axes.figure
    figure.draw_without_rendering()
    low, high = axes.get_ylim()
    gap = 15 / (axes.get_window_extent().height / figure.dpi * 72) * (high - low)  # 15 points
    ends = sorted(ends, key=lambda end: end[1])
    heights = [end[1] for end in ends]
    for i in range(1, len(heights)):
        heights[i] = max(heights[i], heights[i - 1] + gap)
    excess = heights[-1] - (high - 0.02 * (high - low))
    if excess > 0:
        heights = [height - excess for height in heights]
    right = max(end[0] for end in ends)
    for (_, _, label, colour), height in zip(ends, heights):
        axes.annotate(label, (right, height), (7, 0), textcoords="offset points", va="center", color=colour,
                      annotation_clip=False)  # fmt: skip
