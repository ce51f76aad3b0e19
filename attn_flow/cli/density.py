"""The command `density`: the mean-field density itself, without tokens."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from attn_flow.cli.console import Json, echo, print_json, print_table, require_writable
from attn_flow.cli.simulation import Beta, Matrix

if TYPE_CHECKING:
    from attn_flow import Attention, DensityPath

TIMES, DEGREES = 41, 6  # times that are saved if only the end is given; degrees of modes that are reported


def density(
    G: Matrix,
    V: Matrix,
    beta: Beta = "1,2",
    kappa: Annotated[float, typer.Option(help="Concentration of the initial von Mises-Fisher distribution.")] = 1.0,
    t: Annotated[str, typer.Option(help="The end T, or the times.")] = "2",
    diffusion: Annotated[float, typer.Option(help="Noise, as D times the Laplacian.")] = 0.0,
    bandwidth: Annotated[int | None, typer.Option(help="The largest degree of a mode; chosen by default.")] = None,
    out: Annotated[Path | None, typer.Option(help="Folder for density.json and density.png.")] = None,
    as_json: Json = False,
) -> None:
    """Solve the mean-field equation for the density (d = 2, 3).

    Tokens are on the circle or the sphere. They start with a von Mises-Fisher distribution around (1, ..., d), which is
    on no axis of symmetry of the matrices.

    Example: attn-flow density --G "1,0;0,1" --V "1,0;0,.5"
    """
    import torch

    from attn_flow import Attention, VonMisesFisher, density_flow
    from attn_flow.base.checks import require_positive
    from attn_flow.base.figures import save_figure
    from attn_flow.base.files import versions, write_json
    from attn_flow.cli.matrices import parse_numbers, parse_square
    from attn_flow.pages.figures import density_figure

    if out is not None:
        require_writable(out)
    matrices, times = (parse_square(G, "G"), parse_square(V, "V")), parse_numbers(t, "t")
    if len(times) == 1:
        require_positive(t=times[0])
        times = torch.linspace(0, times[0], TIMES, dtype=torch.float64).tolist()
    direction = torch.arange(1, len(matrices[0]) + 1, dtype=torch.float64)
    mu = VonMisesFisher(direction / direction.norm(), kappa)
    runs, paths = [], []
    for each in parse_numbers(beta, "beta"):
        attention = Attention.from_matrices(*matrices, each)
        path = density_flow(attention, mu, times, diffusion=diffusion, bandwidth=bandwidth)
        run: dict[str, Any] = {"beta": each, "t": path.t.tolist(), **path.about, "mean": path.moments()[0].tolist()}
        run |= {"amplitudes": path.amplitudes()[:, 1 : DEGREES + 1].tolist(), "w2": _distances(path, attention)}
        runs.append(run)
        paths.append(path)
    caption = f"von Mises-Fisher distribution, kappa = {kappa:g}, d = {len(direction)}; D = {diffusion:g}; "
    caption += f"bandwidth {runs[0]['bandwidth']}."
    numbers = {"runs": runs, "kappa": kappa, "caption": caption}
    if out is not None:
        write_json({**numbers, "versions": versions()}, out / "density.json")
        save_figure(density_figure(paths, runs, caption), out / "density.png")
    if as_json:
        print_json(numbers)
        return
    rows = []
    for run in runs:
        modes = ", ".join(f"{a:.2g}" for a in run["amplitudes"][-1])
        rows.append([run["beta"], run["t"][-1], "not predicted" if run["w2"] is None else run["w2"][-1], modes])
    columns = ["beta", "time", "W2 to the limit", "size of the modes of degree 1, 2, ..."]
    print_table(f"{caption} At the end:", columns, rows)
    if out is not None:
        echo(f"Written to {out}.")


def _distances(path: DensityPath, attention: Attention) -> list[float] | None:
    """W2(mu_t, P_# mu_0) on the nodes, if the limit map P exists and does not rotate."""
    from attn_flow import limit, wasserstein

    target = limit(attention)
    if target.case not in ("fixed", "jordan", "stationary") or target.rotates:
        return None
    goal = target.push_forward(path.cloud(0))
    return [float(wasserstein(path.cloud(i), goal)) for i in range(len(path))]
