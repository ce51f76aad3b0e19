"""The style all figures share."""

from __future__ import annotations

import os
import re
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
# Plain words of mathematics and how they are typeset, one after another; "a" and "I" alone are words.
MATHEMATICS = (
    ("!=", "\u2260"),
    ("<=", "\u2264"),
    (">=", "\u2265"),
    ("<<", "\u226a"),
    ("->", "\u2192"),
    (r"\binf\b", "\u221e"),
    (r"=( ?-?)I\b", r"=\1$I$"),
    (r"\bW([12])\b", r"$W_\1$"),
    (r"(?<!\w)(\w)_(crit|max|min)\b", r"$\1_{\\rm \2}$"),
    (r"\)\^(\w)", r")$^{\1}$"),
    (r"(?<!\w)([A-Za-z])(\^|_)\(?([-\w/]+)\)?", r"$\1\2{\3}$"),
    (r"(?<!\w)(alpha|beta|gamma|kappa|lambda|mu|rho|sigma|theta)(?:_(\w+))?(?!\w)", r"$\\\1_{\2}$"),
    (r"(?<![\w'^.])([b-zB-HJ-Z])(?![\w']|\.\w)", r"$\1$"),
)
STAYS = re.compile(r"(\$[^$]*\$|\([a-i](?:[,-] ?[a-i])*\))")  # what is typeset, and names of panels: (a), (b, c), (d-f)


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


def typeset(text: str) -> str:
    """Plain words of mathematics as mathematics: beta, W2, R^d, n = 3. What stands in dollars, or names a panel, stays.

    Example:
        >>> typeset("(b) n=3 tokens in R^d, W2 and $x_1$ on a line")
        '(b) $n$=3 tokens in $R^{d}$, $W_2$ and $x_1$ on a line'
    """
    for plain, shown in MATHEMATICS:
        parts = STAYS.split(text)
        text = "".join(part if i % 2 else re.sub(plain, shown, part) for i, part in enumerate(parts))
    return text.replace("_{}", "")


def caption(figure: Figure, text: str) -> None:
    """Sizes, seeds and what differs, below the panels."""
    figure.supxlabel(typeset(text), fontsize=7.5, color="0.35", x=0.01, ha="left")
