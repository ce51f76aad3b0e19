"""The look all experiments share: panels with letters, dashed black theory, a caption with sizes and seeds."""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING, Any

from attn_flow.base.figures import typeset

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

THEORY: dict[str, Any] = {"color": "black", "linestyle": "--", "linewidth": 1.1, "zorder": 5}
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#7f7f7f")


def panels(columns: int, rows: int = 1, title: str = "") -> tuple[Figure, list[Axes]]:
    """A figure of rows x columns panels, lettered (a), (b), ..."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4.3 * columns, 3.5 * rows + 0.5), layout="constrained")
    grid = figure.subplots(rows, columns, squeeze=False)
    axes = [axis for row in grid for axis in row]
    for letter, axis in zip("abcdefghijklmnopqrstuvwxyz", axes):
        axis.set_title(f"({letter})", loc="left", fontsize=10, fontweight="bold")
        axis.spines[["top", "right"]].set_visible(False)
        axis.tick_params(labelsize=8)
        axis.tick_params(which="minor", labelsize=6)  # of a logarithmic axis that spans less than a decade
    if title:
        figure.suptitle(typeset(title), fontsize=12)
    return figure, axes


def shades(count: int) -> list[Any]:
    """Ordered colours for an ordered parameter (beta, d, n), dark to light but never too light to read."""
    from matplotlib import colormaps

    return [colormaps["viridis"](0.85 * i / max(count - 1, 1)) for i in range(count)]


def label(axis: Axes, title: str, x: str, y: str, legend: bool = True) -> None:
    """Title, axes and legend of a panel, their mathematics typeset; a long title is smaller, beside the letter."""
    axis.set_title(typeset(title), fontsize=10 if len(title) < 42 else 8.5)
    axis.set_xlabel(typeset(x), fontsize=9)
    axis.set_ylabel(typeset(y), fontsize=9)
    if legend:
        handles, words = axis.get_legend_handles_labels()
        words = [typeset(word) for word in words]
        axis.legend(handles, words, fontsize=7.5, borderpad=0.2, framealpha=0.85, edgecolor="none")


def not_installed(axis: Axes) -> None:
    """Says why a panel is empty."""
    axis.text(0.5, 0.5, "MiniLM is not installed", ha="center", transform=axis.transAxes)


def caption(figure: Figure, text: str) -> None:
    """Sizes, seeds, and what differs, under the panels."""
    width = int(figure.get_figwidth() * 17)
    figure.supxlabel(typeset(textwrap.fill(text, width)), fontsize=8, color="#444444", x=0.01, ha="left")
