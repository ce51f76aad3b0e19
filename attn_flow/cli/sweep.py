"""The option `simulate --sweep`: a grid of runs, and its table."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from attn_flow.base.figures import save_figure
from attn_flow.cli import console
from attn_flow.cli.matrices import parse_numbers
from attn_flow.prediction.sweep import Sweep

OPTION_AXES = {"beta": "betas", "n": "n", "noise": "noise", "seed": "seeds"}  # by option: the argument of sweep
SHOWN = ("beta", "n", "noise", "seed", "w2_min", "t_min", "t_min_predicted", "w2_end", "unmet")
COLUMNS = ("beta", "tokens", "noise", "seed", "least W2", "at time", "predicted", "W2 at the end", "not met")


def parse_axes(grid: str, **axes: list[Any]) -> dict[str, list[Any]]:
    """The axes of a grid such as "beta=10,100 seed=0,1"; those that it does not name are as given."""
    parts = [part.partition("=") for part in grid.replace(";", " ").split()]
    names = [name for name, _, _ in parts]
    for name, _, values in parts:
        if name not in OPTION_AXES or not values or names.count(name) > 1:
            expected = f'{", ".join(OPTION_AXES)}, each at most once, such as "beta=10,100 seed=0,1"'
            raise ValueError(f"--sweep {grid!r}: expected {expected}.")
        axes[OPTION_AXES[name]] = parse_numbers(values, name)
    for name, least in (("n", 1), ("seeds", 0)):
        if not all(float(number).is_integer() and number >= least for number in axes[name]):
            raise ValueError(f"--sweep {grid!r}: expected integers of at least {least} for {name}.")
        axes[name] = [int(number) for number in axes[name]]
    return axes


def show_sweep(result: Sweep, out: Path | None, figure: Path | None, as_json: bool) -> None:
    """Write the files of a sweep beside its sweep.json, and print its table."""
    if figure is not None:
        save_figure(result.plot(), figure, transparent=True)
    if out is not None:
        result.to_csv(out / "sweep.csv")
        save_figure(result.plot(), out / "sweep.png")
    if as_json:
        console.print_json({"t": result.t, "rows": result.rows})
        return
    rows = [[row[name] for name in SHOWN] for row in result.rows]
    console.print_table(f"{len(rows)} runs up to t = {float(result.t[-1]):g}:", COLUMNS, rows)
    if out is not None:
        console.echo(f"Written to {out}: sweep.json, sweep.csv, sweep.png. The same command continues a stopped sweep.")
