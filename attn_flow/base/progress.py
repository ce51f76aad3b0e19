"""A progress bar with rate and remaining time, on standard error; nothing when not asked for."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from attn_flow.base.terminal import visible


@contextmanager
def progress_bar(what: str, total: float, show: bool = True) -> Iterator[Callable[..., None]]:
    """Yield advance(amount=1, note=""), which moves the bar."""
    if not show:
        yield lambda amount=1, note="": None
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        Progress,
        TaskProgressColumn,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        TaskProgressColumn(),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
        TextColumn("{task.fields[note]}", markup=False),
    )
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task(visible(what), total=total, note="")
        yield lambda amount=1, note="": bar.update(task, advance=amount, note=visible(note))
