"""The command `attn-flow reproduce`: the numbers, figure and claims of an experiment."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any

import typer

from attn_flow.cli import console


def _complete(incomplete: str) -> list[str]:
    from attn_flow.experiments import NAMES

    return [name for name in (*NAMES, "all") if name.startswith(incomplete)]


def reproduce(
    name: Annotated[str | None, typer.Argument(help="An experiment, or 'all'.", autocompletion=_complete)] = None,
    list_them: Annotated[bool, typer.Option("--list", help="List the experiments and their results.")] = False,
    quick: Annotated[bool, typer.Option("--quick", help="Small sizes: seconds instead of minutes.")] = False,
    out: Annotated[Path, typer.Option(help="Folder for NAME.json and NAME.png.")] = Path("runs/reproduce"),
    strict: Annotated[bool, typer.Option("--strict", help="Exit code 1 if a claim does not hold.")] = False,
    seed: console.Seed = 0,
    as_json: console.Json = False,
    quiet: console.Quiet = False,
) -> None:
    """Reproduce a paper's result: numbers, figure and claims.

    Example: attn-flow reproduce concentration --quick
    """
    from attn_flow.base.files import lock_for_writing
    from attn_flow.experiments import NAMES, title
    from attn_flow.experiments.reproduction import run_experiment

    if list_them:
        titles = {each: title(each) for each in NAMES}
        if as_json:
            console.print_json(titles)
        else:
            console.print_table("Experiments:", ["name", "result"], list(titles.items()))
        return
    if name is None:
        raise ValueError("which experiment? Name one, or 'all'; --list shows them.")
    chosen = {each: title(each) for each in (NAMES if name == "all" else (name,))}  # an unknown name is refused here
    console.require_writable(out)
    results, refuted = {}, 0
    for each, words in chosen.items():
        try:
            with lock_for_writing(out / f"{each}.json"):
                results[each] = run_experiment(each, out, quick=quick, seed=seed, progress=not (quiet or as_json))
        except ImportError as error:
            if name != "all":
                raise
            console.complain(f"{each} is left out: {error}")
            continue
        claims = results[each]["claims"]
        refuted += sum(not claim["holds"] for claim in claims)
        if not as_json:
            columns = ["holds", "claim", "measured", "expected"]
            console.print_table(f"{each}: {words}", columns, [_row(claim) for claim in claims])
            console.echo(f"{results[each]['run']['seconds']} s. Written to {out / each}.json and {out / each}.png.")
    if as_json:
        console.print_json(results if name == "all" else results[name])
    if refuted:
        console.complain(f"{refuted} {'claim does' if refuted == 1 else 'claims do'} not hold.")
    if refuted and strict:
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
