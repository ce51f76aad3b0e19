"""The figures of a probe: one for each question, drawn small for the overview or with labels for its section."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from attn_flow.base.figures import BASELINE, COLOURS, PREDICTION, TRUTH, style
from attn_flow.probe.findings import Finding
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
Findings = Mapping[str, Finding]
Ends = list[tuple[float, float, str, str]]  # of lines: x, y, label, colour


def draw(findings: Findings, name: str, width: int = 748, small: bool = False) -> Figure:
    """The figure of a question at a width in pixels; small figures have one panel without labels.

    Panels stand below each other if the width is less than 600.
    """
    panels = PANELS[name][:1] if small else PANELS[name]
    rows, columns = (len(panels), 1) if width < 600 else (1, len(panels))
    height = 0.58 * width if small else 330 * rows
    size = width / PIXELS_PER_INCH, height / PIXELS_PER_INCH
    with style() as pyplot:
        figure, axes = pyplot.subplots(rows, columns, figsize=size, squeeze=False)
        for panel, draw_panel in zip(axes.flat, panels):
            ends = draw_panel(panel, findings)
            if small:
                panel.set(xlabel="", ylabel="", title="")
                panel.tick_params(labelsize=7.5)
                for text in list(panel.texts):
                    text.remove()
            elif ends:
                _label_ends(panel, ends)
    return figure


# --- one function per panel; it returns the ends of the lines that are labelled ---


def exponents_and_temperature(axes: Axes, findings: Findings) -> Ends:
    """Every head's exponent b against the standard deviation of its logits, and the curve b(s) of normal logits."""
    axes.plot(*_columns(findings["averaging"], "logit_sd", "b"), "o", markersize=3.5, color=TRUTH, alpha=0.7)
    low, high = _temperature_axis(axes)
    s = torch.logspace(math.log10(low), math.log10(high), 60, dtype=torch.float64)
    b = gaussian_exponent(s, findings["temperature"].numbers["tokens"])
    axes.plot(s, b, "-", color=PREDICTION, linewidth=1.8)
    axes.axhline(0.5, color=BASELINE, linewidth=1, linestyle="--", zorder=0)
    axes.set(ylabel="exponent b of the error", xlim=(low, high), ylim=(-0.05, 0.62), title="One dot per head")
    end = float(b[-1])
    axes.text(high, end + (0.1 if end < 0.3 else -0.06), "theory b(s)", ha="right", color=PREDICTION)
    axes.text(high, 0.51, "mean-field rate 1/2", ha="right", color=BASELINE)
    return []


def exponents_from_logits(axes: Axes, findings: Findings) -> Ends:
    """Every head's exponent b against the one that its logits alone give."""
    axes.axline((0, 0), slope=1, color=BASELINE, linewidth=1, linestyle="--", zorder=0)
    axes.plot(*_columns(findings["averaging"], "logits_b", "b"), "o", markersize=4, color=TRUTH, alpha=0.7)
    axes.set(xlabel="exponent from the head's logits alone", ylabel="exponent b measured", title="Predicted, no fit")
    return []


def distances_and_clusters(axes: Axes, findings: Findings) -> Ends:
    """W2 after the last layer against the number of clusters per head."""
    ends: Ends = []
    curves = findings["clusters"].numbers["curve"]
    for name, (label, colour, dashes) in CLUSTER_METHODS.items():
        points = [(int(K), row["w2"]) for K, row in curves[name].items() if row["w2"] is not None]
        if points:
            thick = 2.2 if name == "foreign_queries" else 1.4
            axes.plot(*zip(*points), dashes, marker="o", markersize=2.5, linewidth=thick, color=colour)
            ends.append((*points[-1], label, colour))
    axes.set_xscale("log", base=2)
    axes.set(xlabel="K, clusters per head", ylabel="W2 at the output / W2 between texts", ylim=(0, None))
    axes.xaxis.set_major_formatter("{x:.0f}")
    return ends


def descriptions_and_temperature(axes: Axes, findings: Findings) -> Ends:
    """What explains a head's output, against the temperature of its logits; lines are medians of groups of heads."""
    ends: Ends = []
    lines = (("two_moments", "two moments", TRUTH), ("four_keys", "four largest logits", PREDICTION))
    for key, label, colour in lines:
        sd, explained = _columns(findings["temperature"], "logit_sd", key)
        points = np.array(sorted(zip(sd, np.maximum(explained, -1.0)))).reshape(-1, 2)
        axes.plot(*points.T, "o", markersize=3, color=colour, alpha=0.4)
        line = points
        if len(points) > 2 * HEAD_GROUPS:
            line = np.array([np.median(group, axis=0) for group in np.array_split(points, HEAD_GROUPS)])
            axes.plot(*line.T, "-", color=colour, linewidth=2)
        if len(points):
            ends.append((points[-1, 0], line[-1, 1], label, colour))
    thresholds = findings["temperature"].numbers["thresholds"]
    for threshold in thresholds:
        axes.axvline(threshold, color=BASELINE, linewidth=1, linestyle="--", zorder=0)
    low, high = _temperature_axis(axes)
    high = max(high, 1.6 * thresholds[-1])  # room for the name of the last phase
    axes.set(ylabel="explained share of its output", xlim=(low, high), ylim=(-1.1, 1.25))
    bounds = [low, *thresholds, high]
    for name, left, right in zip(PHASES, bounds, bounds[1:]):
        axes.text(math.sqrt(left * right), 1.13, name, ha="center", color=BASELINE)
    return ends


def agreement_by_layer(axes: Axes, findings: Findings) -> Ends:
    """How well the tokens follow the flow to the limit of their layer, and what rotated weights give."""
    numbers = findings["limit"].numbers
    own, rotated = numbers["agreement"], numbers["rotated"]
    last = len(own) - 1
    axes.fill_between(range(last + 1), numbers["rotated_low"], numbers["rotated_high"], color=BASELINE, alpha=0.3, lw=0)
    axes.plot(rotated, "--", color=BASELINE)
    axes.plot(own, "o-", markersize=4, color=TRUTH)
    axes.set(xlabel="layer", ylabel="agreement with the flow to the limit")
    axes.locator_params(axis="x", integer=True)
    return [(last, own[-1], "its own weights", TRUTH), (last, rotated[-1], "rotated weights", BASELINE)]


PANELS: dict[str, tuple[Callable[[Any, Any], Ends], ...]] = {
    "averaging": (exponents_and_temperature, exponents_from_logits),
    "clusters": (distances_and_clusters,),
    "temperature": (descriptions_and_temperature,),
    "limit": (agreement_by_layer,),
}


# --- shared by the panels ---


def _columns(finding: Finding, x: str, y: str) -> tuple[list[float], list[float]]:
    """Two numbers of the heads, where both are known."""
    known = [row for row in finding.numbers["heads"] if row[x] is not None and row[y] is not None]
    return [row[x] for row in known], [row[y] for row in known]


def _temperature_axis(axes: Axes) -> tuple[float, float]:
    """The standard deviation of logits on the x axis, from warm to cold; returns its ends."""
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter("{x:g}")
    low, high = axes.get_xlim()
    widening = math.sqrt(max(1.0, 4 * low / high))  # two powers of two at least, where the ticks are
    axes.set(xlabel="standard deviation of a head's logits, s", xlim=(low / widening, high * widening))
    return axes.get_xlim()


def _label_ends(axes: Axes, ends: Ends) -> None:
    """Labels to the right of the ends of lines, moved apart so that they do not overlap."""
    figure: Any = axes.figure
    figure.draw_without_rendering()
    low, high = axes.get_ylim()
    gap = 15 / (axes.get_window_extent().height / figure.dpi * 72) * (high - low)  # 15 points
    ends = sorted(ends, key=lambda end: end[1])
    heights = [end[1] for end in ends]
    for i in range(1, len(heights)):
        heights[i] = max(heights[i], heights[i - 1] + gap)
    excess = max(0.0, heights[-1] - (high - 0.02 * (high - low)))
    place: dict[str, Any] = {"xytext": (7, 0), "textcoords": "offset points", "va": "center", "annotation_clip": False}
    right = max(end[0] for end in ends)
    for (_, _, label, colour), height in zip(ends, heights):
        axes.annotate(label, (right, height - excess), color=colour, **place)
