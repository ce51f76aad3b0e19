"""The style all figures share."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from attn_flow.base.files import in_one_step

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


def save_figure(figure: Figure, path: str | os.PathLike[str], dpi: int = 150, tight: bool = False) -> None:
    """The figure as a PNG, in one step: a kill leaves the old picture or the new one."""
    box = "tight" if tight else None
    in_one_step(path, lambda beside: figure.savefig(beside, format="png", dpi=dpi, bbox_inches=box))


def caption(figure: Figure, text: str) -> None:
    """Sizes, seeds and what differs, below the panels."""
    figure.supxlabel(text, fontsize=7.5, color="0.35", x=0.01, ha="left")
