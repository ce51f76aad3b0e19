"""Progress on standard error: a bar on a terminal, a line every ten seconds in a file."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

from attn_flow.base.terminal import visible

Advance = Callable[..., None]  # advance(amount=1, note="")
FILE_INTERVAL = 10.0  # seconds between lines in a file


@contextmanager
def progress_bar(description: str, total: float, show: bool = True) -> Iterator[Advance]:
    """Show the progress of a computation; the value of the context is a function advance(amount=1, note="").

    On a terminal this is rich's bar, or without rich one line that is rewritten. In a file it is a line every ten
    seconds with the share done and the time left, and a last line with the time taken.

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
    is_terminal = sys.stderr.isatty()
    if is_terminal:
        try:
            bar = _rich_bar()
        except ImportError:
            bar = None
        if bar is not None:
            with bar:
                task = bar.add_task(visible(description), total=total, note="")
                yield lambda amount=1, note="": bar.update(task, advance=amount, note=visible(note))
            return
    lines = _Lines(description, total, is_terminal)
    yield lines.advance
    lines.finish()


class _Lines:
    """Lines such as "flow: 40% done, 0:01:30 left", rewritten on a terminal and rare in a file."""

    def __init__(self, description: str, total: float, is_terminal: bool) -> None:
        self.description, self.total, self.is_terminal = description, total, is_terminal
        self.done, self.note = 0.0, ""
        self.start = self.last = time.monotonic()

    def advance(self, amount: float = 1, note: str = "") -> None:
        self.done, self.note = self.done + amount, note
        now = time.monotonic()
        if self.done > 0 and now - self.last >= (0.2 if self.is_terminal else FILE_INTERVAL):
            self.last = now
            left = (now - self.start) * max(0.0, self.total / self.done - 1)
            self._write(f"{self.done / self.total:.0%} done, {timedelta(seconds=round(left))} left")

    def finish(self) -> None:
        self._write(f"done in {timedelta(seconds=round(time.monotonic() - self.start))}")
        if self.is_terminal:
            sys.stderr.write("\n")

    def _write(self, status: str) -> None:
        text = visible(f"{self.description}: {status} {self.note}".rstrip())
        sys.stderr.write(f"\r{text:<78}" if self.is_terminal else f"{text}\n")
        sys.stderr.flush()


def _rich_bar() -> Any:
    from rich import progress
    from rich.console import Console

    columns = (
        progress.TextColumn("{task.description}", markup=False),
        progress.BarColumn(),
        progress.TaskProgressColumn(),
        progress.TimeElapsedColumn(),
        progress.TextColumn("left"),
        progress.TimeRemainingColumn(),
        progress.TextColumn("{task.fields[note]}", markup=False),
    )
    return progress.Progress(*columns, console=Console(stderr=True))
