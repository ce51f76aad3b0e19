"""The option `simulate --sweep`: the axes of a grid of runs, and its table."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from attn_flow.cli.console import echo, print_json, print_table

if TYPE_CHECKING:
    from attn_flow.prediction import Sweep

AXES = {"beta": "betas", "n": "n", "noise": "noise", "seed": "seeds"}  # a name of the option and its argument of sweep
COLUMNS = {
    "beta": "beta",
    "n": "tokens",
    "noise": "noise",
    "seed": "seed",
    "w2_min": "least W2",
    "t_min": "at time",
    "t_min_predicted": "predicted",
    "w2_end": "W2 at the end",
    "unmet": "assumptions not met",
}


def parse_axes(text: str, **defaults: list[Any]) -> dict[str, list[Any]]:
    """The axes of a grid such as "beta=10,100 seed=0,1"; those that are not named have their defaults."""
    from attn_flow.cli.matrices import parse_numbers

    axes = dict(defaults)
    for part in text.replace(";", " ").split():
        name, _, values = part.partition("=")
        if name not in AXES or not values:
            raise ValueError(f'--sweep {text!r}: expected {", ".join(AXES)}, such as "beta=10,100 seed=0,1".')
        numbers = parse_numbers(values, name)
        if name in ("n", "seed"):
            least = 1 if name == "n" else 0
            if not all(number.is_integer() and number >= least for number in numbers):
                raise ValueError(f"--sweep {part!r}: expected integers of at least {least}.")
            axes[AXES[name]] = [int(number) for number in numbers]
        else:
            axes[AXES[name]] = numbers
    return axes


def print_sweep(result: Sweep, out: Path | None, as_json: bool) -> None:
    """Print the table of a sweep; with a folder, also write sweep.csv and sweep.png beside its sweep.json."""
    from attn_flow.base.figures import save_figure

    if out is not None:
        result.to_csv(out / "sweep.csv")
        save_figure(result.plot(), out / "sweep.png")
    if as_json:
        print_json({"t": result.t, "rows": result.rows})
        return
    rows = [["none" if row[name] is None else row[name] for name in COLUMNS] for row in result.rows]
    print_table(f"{len(result)} runs up to t = {float(result.t[-1]):g}:", list(COLUMNS.values()), rows)
    if out is not None:
        echo(f"Written to {out}: sweep.json, sweep.csv, sweep.png. The same command continues a stopped sweep.")
