"""What a terminal shows: text without control codes, and progress on standard error.

Progress is one line that is rewritten on a terminal, and a line every ten seconds in a file.
"""

from __future__ import annotations

import sys
import time
import unicodedata
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta

Advance = Callable[..., None]  # advance(amount=1, note="")
TERMINAL_INTERVAL, FILE_INTERVAL = 0.2, 10.0  # seconds between two updates
BAR_WIDTH, TEXT_WIDTH = 20, 56  # characters
# Controls, formats (such as bidirectional overrides), surrogates, private use, line and paragraph separators.
HIDDEN_CATEGORIES = {"Cc", "Cf", "Cs", "Co", "Zl", "Zp"}


def visible(text: object) -> str:
    """The text on one line, with control characters as escapes, which a terminal shows and does not obey.

    >>> visible("model\\x1b[2J")
    'model\\\\x1b[2J'
    """
    escape = lambda character: character.encode("unicode_escape", "surrogatepass").decode("ascii")
    return "".join(escape(c) if unicodedata.category(c) in HIDDEN_CATEGORIES else c for c in str(text))


@contextmanager
def progress_bar(description: str, total: float, show: bool = True) -> Iterator[Advance]:
    """Show the progress of a computation; the value of the context is a function advance(amount=1, note="").

    Args:
        description: what is being done.
        total: the amount of work.
        show: whether to show anything.

    Example:
        >>> with progress_bar("flow", total=2, show=False) as advance:
        ...     advance()
        ...     advance(note="last step")
    """
    if not show:
        yield lambda amount=1, note="": None
        return
    is_terminal, start = sys.stderr.isatty(), time.monotonic()
    done, last = 0.0, start

    def write(status: str, share: float = 1.0) -> None:
        text = visible(f"{description}: {status}")
        bar = "#" * round(BAR_WIDTH * share)
        line = f"\r[{bar:<{BAR_WIDTH}}] {text[:TEXT_WIDTH]:<{TEXT_WIDTH}}" if is_terminal else f"{text}\n"
        sys.stderr.write(line)
        sys.stderr.flush()

    def advance(amount: float = 1, note: str = "") -> None:
        nonlocal done, last
        done, now = done + amount, time.monotonic()
        if done > 0 and now - last >= (TERMINAL_INTERVAL if is_terminal else FILE_INTERVAL):
            last, share = now, min(1.0, done / total)
            left = timedelta(seconds=round((now - start) * (1 / share - 1)))
            write(f"{share:.0%} done, {left} left{f' ({note})' * bool(note)}", share)

    try:
        yield advance
        seconds = time.monotonic() - start
        if is_terminal or seconds >= FILE_INTERVAL:
            write(f"done in {timedelta(seconds=round(seconds))}")
    finally:
        if is_terminal:
            sys.stderr.write("\n")
