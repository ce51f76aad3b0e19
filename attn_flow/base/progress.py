"""What a terminal shows: text without control codes, and progress on standard error."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

TERMINAL_INTERVAL, FILE_INTERVAL = 0.2, 10.0  # seconds before the first update, and between two of them
LAYOUT = "{desc}: {percentage:3.0f}% |{bar:20}| {elapsed}, {remaining} left{postfix}"


def visible(text: object) -> str:
    """The text on one line, with what cannot be printed as escapes, which a terminal shows and does not obey.

    >>> visible("model\\x1b[2J")
    'model\\\\x1b[2J'
    """
    escape = lambda character: character.encode("unicode_escape", "surrogatepass").decode("ascii")
    return "".join(c if c.isprintable() else escape(c) for c in str(text))


@contextmanager
def progress_bar(description: str, total: float, show: bool = True) -> Iterator[Callable[..., None]]:
    """Show the progress of a computation; the value of the context is a function advance(amount=1, note="")."""
    from tqdm import tqdm

    seconds = TERMINAL_INTERVAL if sys.stderr.isatty() else FILE_INTERVAL
    often = {"miniters": 0, "mininterval": seconds, "delay": seconds}
    with tqdm(desc=visible(description), total=total, disable=not show, bar_format=LAYOUT, **often) as bar:

        def advance(amount: float = 1, note: str = "") -> None:
            bar.set_postfix_str(visible(note), refresh=False)
            bar.update(min(amount, total - bar.n))  # sums of shares round

        yield advance
