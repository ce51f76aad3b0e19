"""What all commands share: options, output, and errors as one line with an exit code.

Names and texts of other people may hold control codes; all output goes through functions that print them visibly.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import textwrap
import warnings
from collections.abc import Callable, Sequence
from functools import wraps
from pathlib import Path
from typing import Annotated, Any

import typer

from attn_flow.base.progress import visible

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No progress bars.")]
Seed = Annotated[int, typer.Option(min=0, help="Seed of every random number.")]
Device = Annotated[str, typer.Option(help="cpu, cuda or cuda:1; auto takes CUDA.")]
Matrix = Annotated[str, typer.Option(help='"3,0;0,1" (rows ; entries ,) or a .npy or .pt file.')]
Beta = Annotated[str, typer.Option(help="Inverse temperatures, such as 10,100,inf.")]

RESUMED = ("probe", "record", "train")  # commands that continue a run that was stopped
MIN_WRAPPED = 16  # characters of a table's widest column, however narrow the terminal is


def reporting(function: Callable[..., Any]) -> Callable[..., Any]:
    """Turn errors of a command into one line: exit code 2 for bad input, 3 for numbers out of range."""

    @wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        with warnings.catch_warnings():
            warnings.showwarning = lambda message, *_, **__: complain(f"warning: {message}", "yellow")
            try:
                return function(*args, **kwargs)
            except KeyboardInterrupt:
                is_kept = function.__name__ in RESUMED or bool(kwargs.get("sweep"))
                complain("Stopped." + " What is finished is kept; the same command continues." * is_kept, "yellow")
                raise
            except BrokenPipeError:  # the reader, such as `head`, has seen enough: typer ends quietly
                raise
            except FloatingPointError as error:
                complain(f"numerical failure: {error}")
                raise typer.Exit(3) from None
            except (ValueError, OSError, ImportError, MemoryError) as error:
                complain(f"error: {error}")
            except RuntimeError as error:  # torch has no error class of its own for memory on the CPU
                if not any(words in str(error) for words in ("allocate", "out of memory", "Storage size")):
                    raise
                complain("error: not enough memory; ask for fewer tokens, a smaller batch or a smaller width.")
            raise typer.Exit(2)

    return run


def complain(words: object, colour: str = "red") -> None:
    """One line on standard error."""
    typer.secho(visible(words), fg=colour, err=True)


def echo(words: object) -> None:
    """One line on standard output."""
    typer.echo(visible(words))


def paragraph(words: object) -> None:
    """Sentences on standard output, in lines that a terminal shows whole."""
    typer.echo(textwrap.fill(visible(words), _line_width(), break_on_hyphens=False))


def print_json(content: Any) -> None:
    """One JSON object on standard output; JSON escapes control characters itself."""
    from attn_flow.base.files import to_plain

    typer.echo(json.dumps(to_plain(content)))


def print_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    """A table on standard output, of which the widest column is wrapped to fit the terminal. None is "none"."""
    paragraph(title)
    words = lambda value: f"{value:.4g}" if isinstance(value, float) else "none" if value is None else visible(value)
    cells = [list(columns), *([words(value) for value in row] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells)]
    widest = widths.index(max(widths))
    spare = _line_width() - sum(widths) + widths[widest] - 2 * (len(widths) - 1)
    widths[widest] = min(widths[widest], max(spare, MIN_WRAPPED))
    cells.insert(1, ["-" * width for width in widths])
    align = [str.rjust if isinstance(value, (int, float)) else str.ljust for value in (rows or [columns])[0]]
    for row in cells:
        for number, part in enumerate(textwrap.wrap(row[widest], widths[widest]) or [""]):
            line = [part if i == widest else text * (number == 0) for i, text in enumerate(row)]
            typer.echo("  ".join(pad(text, width) for pad, text, width in zip(align, line, widths)).rstrip())


def _line_width() -> int:
    return min(100, shutil.get_terminal_size().columns)


def require_writable(out: Path | None) -> None:
    """ValueError unless the folder exists or can be made. Asked before the work, and without making it."""
    if out is None:
        return
    try:
        existing = next(folder for folder in (out, *out.parents) if folder.exists())
        with tempfile.TemporaryFile(dir=existing):
            pass
    except (OSError, ValueError) as error:  # ValueError: a NUL in its name
        reason = getattr(error, "strerror", None) or error
        raise ValueError(f"--out {out} cannot be written ({reason}); give another folder.") from None


def refuse_options(context: typer.Context, reason: str, *names: str) -> None:
    """ValueError if one of these options was given, which would have no effect."""
    useless = [name for name in names if getattr(context.get_parameter_source(name), "name", "") == "COMMANDLINE"]
    if useless:
        raise ValueError(f"{reason}; leave out {', '.join('--' + name.replace('_', '-') for name in useless)}.")


def require_device(name: str) -> str:
    """The name of a device of this machine; under torchrun each process has a GPU of its own."""
    import torch

    if name == "auto":
        return f"cuda:{os.environ.get('LOCAL_RANK', '0')}" if torch.cuda.is_available() else "cpu"
    try:
        torch.ones(1, device=name).item()
    except (RuntimeError, NotImplementedError, AssertionError):
        devices = f"{torch.cuda.device_count() or 'no'} CUDA devices"
        raise ValueError(f"device = {name!r} cannot be used: this machine has cpu and {devices}.") from None
    return name
