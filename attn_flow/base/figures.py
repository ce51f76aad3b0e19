"""The style of all figures: readable at the width of a README page, with colours for colour-blind readers."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from attn_flow.base.files import write_atomically
from attn_flow.base.imports import require_extra

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Okabe and Ito's colours, which differ for colour-blind readers and are visible on white and on black.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#7f7f7f")
TRUTH, PREDICTION, BASELINE = COLOURS[0], COLOURS[1], COLOURS[6]
FORMATS = ("png", "svg", "pdf")
PAGE_WIDTH = 748  # pixels of an image on a README page
FONT_PIXELS = 12  # height of the font there
LIGHT, DARK = ("#ffffff", "#222222"), ("#0d1117", "#e6edf3")  # background and foreground
# Mathematics in plain text and as it is typeset, applied one after another; "a" and "I" alone are words.
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
UNCHANGED = re.compile(r"(\$[^$]*\$|\([a-i](?:[,-] ?[a-i])*\))")  # typeset parts, and panels: (a), (b, c), (d-f)


@contextmanager
def style(width: float = 10.0, dark: bool = False) -> Iterator[Any]:
    """matplotlib's pyplot with the style of the project.

    Args:
        width: the width of the figure in inches. Fonts are FONT_PIXELS high when it is shown PAGE_WIDTH pixels wide.
        dark: light lines on a dark background.

    Returns:
        A context whose value is pyplot.

    Example:
        >>> with style(width=5) as pyplot:
        ...     figure, axes = pyplot.subplots(figsize=(5, 3))
        >>> axes.title.get_fontsize() < 8
        True
    """
    matplotlib = require_extra("matplotlib")
    background, foreground = DARK if dark else LIGHT
    size = FONT_PIXELS * 72 * width / PAGE_WIDTH
    parameters = {
        "font.size": size,
        "axes.titlesize": size,
        "axes.labelsize": size,
        "xtick.labelsize": 0.9 * size,
        "ytick.labelsize": 0.9 * size,
        "legend.fontsize": 0.85 * size,
        "axes.titlelocation": "left",
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.prop_cycle": matplotlib.cycler(color=COLOURS),
        "legend.frameon": False,
        "figure.constrained_layout.use": True,
        "image.cmap": "viridis",
    }
    surfaces = ("figure.facecolor", "axes.facecolor", "savefig.facecolor")
    inks = ("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color")
    with matplotlib.rc_context(parameters | dict.fromkeys(surfaces, background) | dict.fromkeys(inks, foreground)):
        yield require_extra("matplotlib.pyplot")


def save_figure(
    figure: Figure, path: str | os.PathLike[str], dpi: int = 150, tight: bool = False, transparent: bool = False
) -> None:
    """Save a figure atomically, as PNG, SVG or PDF by the end of its name, and close it.

    Args:
        figure: the figure.
        path: the file; an unknown ending is a ValueError.
        dpi: pixels per inch of a PNG.
        tight: cut the margins.
        transparent: no background; otherwise that with which the figure was drawn.
    """
    kind = os.path.splitext(path)[1].lower().removeprefix(".")
    if kind not in FORMATS:
        raise ValueError(
            f"{os.fspath(path)}: expected a name that ends in {', '.join('.' + kind for kind in FORMATS)}."
        )
    options = {"transparent": True} if transparent else {"facecolor": figure.get_facecolor()}
    box = "tight" if tight else None
    write_atomically(path, lambda name: figure.savefig(name, format=kind, dpi=dpi, bbox_inches=box, **options))
    require_extra("matplotlib.pyplot").close(figure)  # pyplot would keep it in memory


def typeset(text: str) -> str:
    """Text with its mathematics typeset: beta, W2, R^d, n = 3. Parts in dollars and names of panels do not change.

    >>> typeset("(b) n=3 tokens in R^d, W2 and $x_1$ on a line")
    '(b) $n$=3 tokens in $R^{d}$, $W_2$ and $x_1$ on a line'
    """
    for plain, mathematics in MATHEMATICS:
        parts = UNCHANGED.split(text)
        text = "".join(part if i % 2 else re.sub(plain, mathematics, part) for i, part in enumerate(parts))
    return text.replace("_{}", "")


def caption(figure: Figure, text: str) -> None:
    """Write sizes, seeds and other remarks below the panels of a figure, in small type."""
    size = 0.8 * FONT_PIXELS * 72 * figure.get_figwidth() / PAGE_WIDTH
    figure.supxlabel(typeset(text), fontsize=size, alpha=0.75, x=0.01, ha="left")
