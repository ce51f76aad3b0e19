"""What all commands share: options, JSON and tables on standard output, errors as one line and an exit code."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import wraps
from typing import Annotated, Any

import typer

from attn_flow.base.files import plain

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No progress bars.")]
Seed = Annotated[int, typer.Option(help="Seed of every random number.")]


def reporting(function: Callable[..., Any]) -> Callable[..., Any]:
    """A command whose bad input ends in one clear line and exit code 2, whose numerical failures in exit code 3."""

    @wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except FloatingPointError as error:
            typer.secho(f"numerical failure: {error}", fg="red", err=True)
            raise typer.Exit(3) from None
        except (ValueError, OSError, ModuleNotFoundError, MemoryError) as error:
            typer.secho(f"error: {error}", fg="red", err=True)
            raise typer.Exit(2) from None

    return run


def say(content: Any) -> None:
    """One JSON object on standard output."""
    typer.echo(json.dumps(plain(content)))


def table(title: str, columns: list[str], rows: list[list[Any]]) -> None:
    from rich.console import Console
    from rich.table import Table

    shown = Table(title=title, title_justify="left")
    for column in columns:
        shown.add_column(column, justify="left" if column == columns[0] else "right", overflow="fold")
    for row in rows:
        shown.add_row(*[f"{v:.4g}" if isinstance(v, float) else str(v) for v in row])
    Console().print(shown)
