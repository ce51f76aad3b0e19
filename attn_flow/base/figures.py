"""The style all figures share."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.figure import Figure

STYLE: Any = {
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlesize": 10,
    "axes.titlelocation": "left",
    "legend.frameon": False,
    "legend.fontsize": 8,
    "figure.constrained_layout.use": True,
    "image.cmap": "viridis",
}
PREDICTION, TRUTH, NULL = "#c44e52", "#4c72b0", "#8c8c8c"


@contextmanager
def style() -> Iterator[Any]:
    """matplotlib's pyplot with the project's look, for the figures of this module and of the experiments."""
    import matplotlib
    from matplotlib import pyplot

    with matplotlib.rc_context(STYLE):
        yield pyplot


def caption(figure: Figure, text: str) -> None:
    """Sizes, seeds and what differs, below the panels."""
    figure.supxlabel(text, fontsize=7.5, color="0.35", x=0.01, ha="left")
