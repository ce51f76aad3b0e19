"""The command `attn-flow reproduce`: the numbers, figure and claims of an experiment."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any

import typer

from attn_flow.cli.console import Json, Quiet, Seed, complain, echo, print_json, print_table, require_writable


def _complete(incomplete: str) -> list[str]:
    from attn_flow.experiments import NAMES

    return [name for name in (*NAMES, "all") if name.startswith(incomplete)]


def reproduce(
    name: Annotated[str | None, typer.Argument(help="An experiment, or 'all'.", autocompletion=_complete)] = None,
    list_them: Annotated[bool, typer.Option("--list", help="List the experiments and their results.")] = False,
    quick: Annotated[bool, typer.Option("--quick", help="Small sizes: seconds instead of minutes.")] = False,
    out: Annotated[Path, typer.Option(help="Folder for NAME.json and NAME.png.")] = Path("runs/reproduce"),
    strict: Annotated[bool, typer.Option("--strict", help="Exit code 1 if a claim does not hold.")] = False,
    seed: Seed = 0,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Reproduce a paper's result: numbers, figure and claims.

    Example: attn-flow reproduce concentration --quick
    """
    from attn_flow.base.files import lock_for_writing
    from attn_flow.experiments import NAMES, title

    if list_them:
        titles = {each: title(each) for each in NAMES}
        if as_json:
            print_json(titles)
        else:
            print_table("Experiments:", ["name", "result"], [[each, words] for each, words in titles.items()])
        return
    if name is None:
        raise ValueError("which experiment? Name one, or 'all'; --list shows them.")
    chosen = NAMES if name == "all" else (name,)
    for each in chosen:
        title(each)  # refuse an unknown name before a folder is made
    require_writable(out)
    from attn_flow.experiments.reproduction import run_experiment

    results = {}
    for each in chosen:
        with lock_for_writing(out / f"{each}.json"):
            numbers = run_experiment(each, out, quick=quick, seed=seed, progress=not (quiet or as_json))
        results[each] = numbers
        if not as_json:
            columns = ["holds", "claim", "measured", "expected"]
            print_table(f"{each}: {title(each)}", columns, list(map(_row, numbers["claims"])))
            echo(f"{numbers['run']['seconds']} seconds. Written to {out / each}.json and {out / each}.png.")
    if as_json:
        print_json(results if name == "all" else results[name])
    count = sum(not claim["holds"] for numbers in results.values() for claim in numbers["claims"])
    if count:
        complain(f"{count} {'claim does' if count == 1 else 'claims do'} not hold.")
    if count and strict:
        raise typer.Exit(1)


def _row(claim: dict[str, Any]) -> list[Any]:
    """A claim with its expected number, and the chance to pass by accident if that is more than 5%."""
    from attn_flow.experiments.claims import chance

    bound = re.search(r"\(([<>]= [^()]*)\)$", claim["claim"])
    expected = bound[1] if bound else "see claim"
    if claim["expected"] is not None:
        accident = chance(claim) or 0.0
        expected = f"{claim['expected']:.4g} +- {claim['tolerance']:.2g}"
        expected += f" ({accident:.0%})" * (accident > 0.05)
    return ["yes" if claim["holds"] else "NO", claim["claim"], claim["value"], expected]
