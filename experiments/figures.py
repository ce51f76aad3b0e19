"""The look of the figures: at most two panels in a row, readable at the width of a page, theory dashed in black."""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING, Any

import numpy as np

from attn_flow.base.figures import COLOURS, PAGE_WIDTH, typeset

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["COLOURS", "FONT", "THEORY", "caption", "label", "name_lines", "not_installed", "panels", "shades"]

THEORY: dict[str, Any] = {"color": "black", "linestyle": "--", "linewidth": 1.3, "zorder": 5}
FONT = 9.5  # points, when a figure is shown PAGE_WIDTH pixels wide, 96 pixels to the inch
ROWS = {1: "a", 2: "ab", 3: "aa;bc", 4: "ab;cd"}  # of two columns; the first of three panels is wide


def panels(count: int, title: str = "", height: float = 3.1) -> tuple[Figure, list[Axes]]:
    """A figure of one to four panels, lettered (a), (b), ...; height is that of a row in inches."""
    from matplotlib.figure import Figure

    rows = 2 if count > 2 else 1
    figure = Figure(figsize=(PAGE_WIDTH / 96, height * rows), layout="constrained")
    axes = figure.subplot_mosaic(ROWS[count])
    for letter, axis in axes.items():
        axis.set_title(f"({letter})", loc="left", fontsize=FONT, fontweight="bold")
        axis.spines[["top", "right"]].set_visible(False)
        axis.tick_params(which="both", labelsize=FONT - 0.5)
    if title:
        figure.suptitle(typeset(title), fontsize=FONT + 1.5)
    return figure, [axes[letter] for letter in sorted(axes)]


def shades(count: int) -> list[Any]:
    """Ordered colours for an ordered parameter (beta, d, n), dark to light but never too light to read."""
    from matplotlib import colormaps

    return [colormaps["viridis"](0.8 * i / max(count - 1, 1)) for i in range(count)]


def label(axis: Axes, title: str, x: str, y: str, legend: bool = True) -> None:
    """Title, axes and legend of a panel, their mathematics typeset."""
    axis.set_title(typeset(title), fontsize=FONT)
    axis.set_xlabel(typeset(x), fontsize=FONT)
    axis.set_ylabel(typeset(y), fontsize=FONT)
    if legend:
        handles, words = axis.get_legend_handles_labels()
        words = [typeset(word) for word in words]
        axis.legend(handles, words, fontsize=FONT - 0.5, borderpad=0.2, framealpha=0.85, edgecolor="none")


def name_lines(axis: Axes, gap: float = 0.08) -> None:
    """Write the label of every line at its right end, in its colour, instead of a legend; at least `gap` apart."""
    low, high = sorted(axis.get_xlim())
    ends = []
    for line in axis.lines:
        if not str(line.get_label()).startswith("_"):
            points = np.asarray(line.get_xydata(), dtype=float)
            end = points[(low <= points[:, 0]) & (points[:, 0] <= high)][-1]
            height = axis.transAxes.inverted().transform(axis.transData.transform(end))[1]
            ends.append((min(max(float(height), 0.0), 1.0), line))
    bottom = -1.0
    for height, line in sorted(ends, key=lambda end: end[0]):
        bottom = max(height, bottom + gap)
        words, colour = typeset(str(line.get_label())), line.get_color()
        axis.text(1.02, bottom, words, color=colour, fontsize=FONT - 0.5, va="center", transform=axis.transAxes)


def not_installed(axis: Axes) -> None:
    """Says why a panel is empty."""
    axis.text(0.5, 0.5, "MiniLM is not installed", ha="center", fontsize=FONT, transform=axis.transAxes)


def caption(figure: Figure, text: str) -> None:
    """Sizes, seeds, and what differs, under the panels."""
    width = int(figure.get_figwidth() * 15)
    figure.supxlabel(typeset(textwrap.fill(text, width)), fontsize=FONT - 1, color="#444444", x=0.01, ha="left")
