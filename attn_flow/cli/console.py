"""What all commands share: options, output, and errors as one line with an exit code.

Names and texts of other people may hold control codes or markup; all output goes through functions that show them as
plain characters.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import textwrap
import warnings
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import quote

import typer

from attn_flow.base.texts import visible

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No progress bars.")]
Seed = Annotated[int, typer.Option(min=0, max=2**63 - 1, help="Seed of every random number.")]
Device = Annotated[str, typer.Option(help="cpu, cuda, cuda:1, ...")]


def reporting(function: Callable[..., Any]) -> Callable[..., Any]:
    """Turn errors of a command into one line: exit code 2 for bad input, 3 for numbers out of range."""

    @wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        with warnings.catch_warnings():
            warnings.showwarning = _warn
            try:
                return function(*args, **kwargs)
            except FloatingPointError as error:
                complain(f"numerical failure: {error}")
                raise typer.Exit(3) from None
            except (ValueError, OSError, ImportError, MemoryError) as error:
                complain(f"error: {error}")
                raise typer.Exit(2) from None
            except RecursionError:
                complain("error: the input is nested too deeply to be read.")
                raise typer.Exit(2) from None
            except RuntimeError as error:  # torch has no error class of its own for memory on the CPU
                if not any(words in str(error) for words in ("allocate", "out of memory", "Storage size")):
                    raise
                complain("error: not enough memory; ask for fewer tokens, a smaller batch or a smaller width.")
                raise typer.Exit(2) from None

    return run


def _warn(
    message: Warning | str, category: Any, filename: str, lineno: int, file: Any = None, line: Any = None
) -> None:
    complain(f"warning: {message}", "yellow")


def complain(words: object, colour: str = "red") -> None:
    """One line on standard error."""
    typer.secho(visible(words), fg=colour, err=True)


def echo(words: object) -> None:
    """One line on standard output."""
    typer.echo(visible(words))


def paragraph(words: object) -> None:
    """Sentences on standard output, in lines that a terminal shows whole."""
    width = min(100, shutil.get_terminal_size().columns)
    typer.echo(textwrap.fill(visible(words), width, subsequent_indent="  " if str(words).startswith("- ") else ""))


def print_json(content: Any) -> None:
    """One JSON object on standard output; JSON escapes control characters itself."""
    from attn_flow.base.files import to_plain

    typer.echo(json.dumps(to_plain(content)))


def print_table(title: str, columns: list[str], rows: list[list[Any]]) -> None:
    """A table on standard output; numbers have four digits."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    shown = Table(title=Text(visible(title)), title_justify="left")
    for column in columns:
        is_number = bool(rows) and isinstance(rows[0][columns.index(column)], (int, float)) and column != columns[0]
        shown.add_column(column, justify="right" if is_number else "left", overflow="fold")
    for row in rows:
        shown.add_row(*[Text(f"{v:.4g}" if isinstance(v, float) else visible(v)) for v in row])
    Console().print(shown)


def folder_name(model: str) -> str:
    """The name of a folder for a model: different for every model, and never outside its parent.

    >>> folder_name("c/x"), folder_name("c_x"), folder_name("..")
    ('c%2Fx', 'c_x', '%2E%2E')
    """
    return quote(model, safe=" @=+,") if model.strip(".") else "%2E" * len(model)


def number_name(value: float) -> str:
    """A number in the name of a file: short if that is exact, otherwise with all its digits.

    >>> number_name(10.0), number_name(1000000.0), number_name(1000001.0)
    ('10', '1e+06', '1000001.0')
    """
    short = f"{value:g}"
    return short if float(short) == value else repr(value)


def require_writable(out: Path) -> Path:
    """The folder, if it exists or can be made. Asked before the work, and without making it."""
    try:
        with tempfile.TemporaryFile(dir=_existing(out)):
            pass
    except (OSError, ValueError) as error:  # ValueError: a NUL in its name
        reason = getattr(error, "strerror", None) or error
        raise ValueError(f"--out {out} cannot be written ({reason}); give another folder.") from None
    return out


def _existing(folder: Path) -> Path:
    """The folder, or the first one above it that exists."""
    try:
        os.stat(folder)
    except (FileNotFoundError, NotADirectoryError):
        return _existing(folder.parent)
    return folder


def refuse_options(context: typer.Context, reason: str, *names: str) -> None:
    """ValueError if one of these options was given, which would have no effect."""
    useless = [name for name in names if getattr(context.get_parameter_source(name), "name", "") == "COMMANDLINE"]
    if useless:
        raise ValueError(f"{reason}; leave out {', '.join('--' + name.replace('_', '-') for name in useless)}.")


def require_device(name: str) -> str:
    """The name of a device of this machine."""
    import torch

    try:
        device = torch.device(name)
    except RuntimeError:
        raise ValueError(f"device = {name!r}, expected cpu, cuda or cuda:1, ...") from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device = {name!r}, but this machine has no CUDA device; use cpu.")
    try:
        torch.ones(1, device=device).item()
    except (RuntimeError, NotImplementedError, AssertionError):
        raise ValueError(f"device = {name!r} cannot be used here; expected cpu, cuda or cuda:1, ...") from None
    return name
