"""The option `simulate --sweep`: a grid of runs, its table and its figure."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from attn_flow.cli.console import echo, print_json, print_table

if TYPE_CHECKING:
    from attn_flow import Attention

AXES = ("beta", "n", "noise", "seed")
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


def run_sweep(
    attention: Attention,
    axes: dict[str, list[float]],
    times: list[float],
    *,
    h: float,
    random: bool,
    out: Path | None,
    figure: Path | None,
    as_json: bool,
    progress: bool,
) -> None:
    """Run the grid `axes` and print its table; with a folder, also write sweep.json, sweep.csv and sweep.png."""
    from attn_flow import sweep
    from attn_flow.base.figures import save_figure
    from attn_flow.prediction import starting_cloud

    result = sweep(
        attention,
        times[0] if len(times) == 1 else times,
        betas=axes["beta"],
        noise=axes["noise"],
        n=[int(value) for value in axes["n"]],
        seeds=[int(value) for value in axes["seed"]],
        clouds=lambda n, seed: starting_cloud(attention.dim, n, seed, random=random or None),
        h=h,
        folder=out,
        progress=progress,
    )
    if out is not None:
        result.to_csv(out / "sweep.csv")
        save_figure(result.plot(), out / "sweep.png")
    if figure is not None:
        save_figure(result.plot(), figure, transparent=True)
    if as_json:
        print_json({"t": result.t, "rows": result.rows})
        return
    rows = [["none" if row[name] is None else row[name] for name in COLUMNS] for row in result.rows]
    print_table(f"{len(result)} runs up to t = {float(result.t[-1]):g}", list(COLUMNS.values()), rows)
    if out is not None:
        echo(f"Written to {out}: sweep.json, sweep.csv, sweep.png. The same command continues a stopped sweep.")


def parse_axes(text: str, **defaults: list[float]) -> dict[str, list[float]]:
    """The axes of a grid such as "beta=10,100 seed=0,1"; those that are not named have their defaults."""
    from attn_flow.cli.matrices import parse_numbers

    axes = dict(defaults)
    for part in text.replace(";", " ").split():
        name, _, values = part.partition("=")
        if name not in AXES or not values:
            raise ValueError(f'--sweep {text!r}: expected {", ".join(AXES)}, such as "beta=10,100 seed=0,1".')
        axes[name] = parse_numbers(values, name)
    return axes
