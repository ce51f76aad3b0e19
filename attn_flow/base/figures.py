"""The style of all figures: readable at the width of a README page, with colours for colour-blind readers."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from attn_flow.base.checks import require_extra
from attn_flow.base.files import write_atomically

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Okabe and Ito's colours, which differ for colour-blind readers and are visible on white and on black.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#7f7f7f")
TRUTH, PREDICTION, BASELINE = COLOURS[0], COLOURS[1], COLOURS[6]
INK = "#222222"  # of text and axes; the report replaces it by the colour of the reader's text
PAGE_WIDTH = 748  # pixels of an image on a README page
FONT_PIXELS = 12  # height of the font there
# Mathematics in plain text and as it is typeset, applied one after another; "a" and "I" alone are words.
SYMBOLS = {"!=": "\u2260", "<=": "\u2264", ">=": "\u2265", "->": "\u2192", r"\binf\b": "\u221e"}
MATHEMATICS = {
    r"=( ?-?)I\b": r"=\1$I$",
    r"\bW([12])\b": r"$W_\1$",
    r"(?<!\w)(\w)_(crit|max|min)\b": r"$\1_{\\rm \2}$",
    r"(?<!\w)([A-Za-z])(\^|_)\(?([-\w/]+)\)?": r"$\1\2{\3}$",
    r"(?<!\w)(alpha|beta|gamma|kappa|lambda|mu|rho|sigma|theta)(?:_(\w+))?(?!\w)": r"$\\\1_{\2}$",
    r"(?<![\w'^.])([b-zB-HJ-Z])(?![\w']|\.\w)": r"$\1$",
}
UNCHANGED = re.compile(r"(\$[^$]*\$|\([a-i](?:[,-] ?[a-i])*\))")  # typeset parts, and panels: (a), (b, c), (d-f)


@contextmanager
def style(width: float = 10.0) -> Iterator[Any]:
    """The style of the project for a figure of this width in inches; the value of the context is pyplot.

    Fonts are FONT_PIXELS high when the figure is shown PAGE_WIDTH pixels wide.
    """
    parameters = {
        "font.size": FONT_PIXELS * 72 * width / PAGE_WIDTH,
        "axes.titlesize": "medium",
        "legend.fontsize": "small",
        "axes.titlelocation": "left",
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.prop_cycle": require_extra("matplotlib").cycler(color=COLOURS),
        "legend.frameon": False,
        "figure.constrained_layout.use": True,
    }
    inks = ("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color")
    with require_extra("matplotlib").rc_context(parameters | dict.fromkeys(inks, INK)):
        yield require_extra("matplotlib.pyplot")


def save_figure(figure: Figure, path: str | os.PathLike[str], tight: bool = False, transparent: bool = False) -> None:
    """Save a figure as .png, .svg or .pdf and close it; `tight` cuts its margins, `transparent` its background."""
    kind = os.path.splitext(path)[1].lower().removeprefix(".")
    if kind not in ("png", "svg", "pdf"):
        raise ValueError(f"{os.fspath(path)}: expected a name that ends in .png, .svg or .pdf.")
    options = {"transparent": True} if transparent else {"facecolor": figure.get_facecolor()}
    box = "tight" if tight else None
    write_atomically(path, lambda name: figure.savefig(name, format=kind, dpi=150, bbox_inches=box, **options))
    require_extra("matplotlib.pyplot").close(figure)  # pyplot would keep it in memory


def typeset(text: str) -> str:
    """Text with its mathematics typeset: beta, W2, R^d, n = 3. Parts in dollars and names of panels do not change.

    >>> typeset("(b) n=3 tokens in R^d, W2 and $x_1$ on a line")
    '(b) $n$=3 tokens in $R^{d}$, $W_2$ and $x_1$ on a line'
    """
    for plain, mathematics in (SYMBOLS | MATHEMATICS).items():
        parts = UNCHANGED.split(text)
        text = "".join(part if i % 2 else re.sub(plain, mathematics, part) for i, part in enumerate(parts))
    return text.replace("_{}", "")


def caption(figure: Figure, text: str) -> None:
    """Write sizes, seeds and other remarks below the panels of a figure, in small type."""
    size = 0.8 * FONT_PIXELS * 72 * figure.get_figwidth() / PAGE_WIDTH
    figure.supxlabel(typeset(text), fontsize=size, alpha=0.75, x=0.01, ha="left")
