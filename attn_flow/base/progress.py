"""Progress on standard error: one line that is rewritten on a terminal, a line every ten seconds in a file."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta

from attn_flow.base.texts import visible

Advance = Callable[..., None]  # advance(amount=1, note="")
TERMINAL_INTERVAL, FILE_INTERVAL = 0.2, 10.0  # seconds between two updates
BAR_WIDTH = 20  # characters


@contextmanager
def progress_bar(description: str, total: float | None, show: bool = True) -> Iterator[Advance]:
    """Show the progress of a computation; the value of the context is a function advance(amount=1, note="").

    Args:
        description: what is being done.
        total: the amount of work; None if it is not known.
        show: whether to show anything.

    Example:
        >>> with progress_bar("flow", total=2, show=False) as advance:
        ...     advance()
        ...     advance(note="last step")
    """
    if not show:
        yield lambda amount=1, note="": None
        return
    progress = _Progress(description, total)
    try:
        yield progress.advance
        progress.note = ""
        if progress.is_terminal or progress.seconds >= FILE_INTERVAL:
            progress.write(f"done in {_duration(progress.seconds)}")
    finally:
        if progress.is_terminal:
            sys.stderr.write("\n")


class _Progress:
    """Lines such as "flow: 40% done, 0:01:30 left"."""

    def __init__(self, description: str, total: float | None) -> None:
        self.description, self.total = description, total
        self.is_terminal = sys.stderr.isatty()
        self.done, self.note = 0.0, ""
        self.start = self.last = time.monotonic()

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.start

    def advance(self, amount: float = 1, note: str = "") -> None:
        self.done, self.note = self.done + amount, note
        now = time.monotonic()
        if self.done > 0 and now - self.last >= (TERMINAL_INTERVAL if self.is_terminal else FILE_INTERVAL):
            self.last = now
            if self.total is None:
                return self.write(f"{self.done:g} done")
            share = min(1.0, self.done / self.total)
            self.write(f"{share:.0%} done, {_duration(self.seconds * (1 / share - 1))} left", share)

    def write(self, status: str, share: float = 1.0) -> None:
        text = visible(f"{self.description}: {status}{f' ({self.note})' * bool(self.note)}")
        if self.is_terminal:
            bar = "#" * round(BAR_WIDTH * share)
            sys.stderr.write(f"\r[{bar:<{BAR_WIDTH}}] {text[: 76 - BAR_WIDTH]:<{76 - BAR_WIDTH}}")
        else:
            sys.stderr.write(f"{text}\n")
        sys.stderr.flush()


def _duration(seconds: float) -> timedelta:
    return timedelta(seconds=round(seconds))
