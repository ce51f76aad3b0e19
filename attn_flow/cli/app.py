"""The commands of `attn-flow`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from attn_flow.cli.console import echo, reporting
from attn_flow.cli.density import density
from attn_flow.cli.encoders import inspect, record
from attn_flow.cli.probe import probe
from attn_flow.cli.reproduce import reproduce
from attn_flow.cli.simulation import limit, simulate
from attn_flow.cli.training import train

OLD_COMMANDS = {
    "encoder": "`attn-flow encoder` is now `attn-flow inspect`.",
    "encoders": "`attn-flow encoders` is now `python -m attn_flow.experiments.encoders`.",
    "predict": "stacks of texts are not trained here any more; `attn-flow limit` predicts where tokens go.",
    "bench": "benchmarks are not part of the package; run `make bench` in the repository.",
}


class Commands(TyperGroup):
    """The commands; an old or mistyped name is refused with the right one."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args and args[0] in OLD_COMMANDS:
            ctx.fail(OLD_COMMANDS[args[0]])
        return super().resolve_command(ctx, args)


app = typer.Typer(
    cls=Commands,
    no_args_is_help=True,
    rich_markup_mode=None,  # rich takes half of the time of --help
    pretty_exceptions_enable=False,
    help="Self-attention as a flow of particles: simulate it, predict where it goes, see whether encoders go there.",
)


@app.callback(invoke_without_command=True)
def version(show: Annotated[bool, typer.Option("--version", help="Print the version.")] = False) -> None:
    if show:
        from attn_flow import __version__

        echo(__version__)
        raise typer.Exit


def play(
    out: Annotated[Path, typer.Option(help="The page to write; it needs no other file.")] = Path("runs/play.html"),
    open_it: Annotated[bool, typer.Option("--open/--no-open", help="Show it in the browser.")] = True,
) -> None:
    """Open a playground in the browser.

    Tokens move on the circle or the sphere, next to what is predicted for them.

    Example: attn-flow play
    """
    import webbrowser

    from attn_flow.pages.playground import write_playground

    if out.suffix not in (".html", ".htm"):
        raise ValueError(f"--out {out}: expected the name of a page, such as {out}/play.html.")
    path = write_playground(out).resolve()
    echo(f"Written to {out}.")
    if open_it and not webbrowser.open(path.as_uri()):
        echo("No browser was found here; open the file in one.")


for command in (limit, simulate, density, play, probe, inspect, record, reproduce, train):
    app.command()(reporting(command))
