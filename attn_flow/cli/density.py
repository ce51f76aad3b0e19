"""The command `density`: the mean-field density itself, without tokens."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from attn_flow.cli.console import Json, echo, print_json, print_table, require_writable
from attn_flow.cli.simulation import Beta, Matrix

if TYPE_CHECKING:
    from torch import Tensor

    from attn_flow import Attention, DensityPath

TIMES, DEGREES = 41, 6  # times that are saved if only the end is given; degrees of modes that are reported


def density(
    G: Matrix,
    V: Matrix,
    beta: Beta = "1,10",
    kappa: Annotated[float, typer.Option(help="Concentration of the initial von Mises-Fisher distribution.")] = 1.0,
    t: Annotated[str, typer.Option(help="The end T, or the times.")] = "5",
    diffusion: Annotated[float, typer.Option(help="Noise, as D times the Laplacian.")] = 0.0,
    bandwidth: Annotated[int | None, typer.Option(help="The largest degree of a mode; chosen by default.")] = None,
    out: Annotated[Path | None, typer.Option(help="Folder for density.json and density.png.")] = None,
    as_json: Json = False,
) -> None:
    """Solve the mean-field equation for the density of tokens on the circle or the sphere (d = 2, 3).

    Example: attn-flow density --G "1,0;0,1" --V "1,0;0,.5" --beta 1,2 --kappa 1 --t 4
    """
    from attn_flow.cli.matrices import parse_numbers, parse_square

    if out is not None:
        require_writable(out)
    matrices, betas = (parse_square(G, "G"), parse_square(V, "V")), parse_numbers(beta, "beta")
    times = parse_numbers(t, "t")
    numbers = run_density(*matrices, betas, kappa, times, diffusion=diffusion, bandwidth=bandwidth, out=out)
    if as_json:
        print_json(numbers)
        return
    rows = []
    for run in numbers["runs"]:
        modes = ", ".join(f"{a:.3g}" for a in run["amplitudes"][-1])
        w2 = "not predicted" if run["w2"] is None else run["w2"][-1]
        rows.append([run["beta"], run["t"][-1], modes, w2, run["steps"]])
    columns = ["beta", "time", "size of the modes of degree 1, 2, ...", "W2 to the limit", "steps"]
    print_table(numbers["caption"], columns, rows)
    if out is not None:
        echo(f"Written to {out}.")


def run_density(
    G: Tensor,
    V: Tensor,
    betas: list[float],
    kappa: float,
    t: Sequence[float],
    *,
    diffusion: float = 0.0,
    bandwidth: int | None = None,
    out: str | Path | None = None,
) -> dict[str, Any]:
    """Solve for the density at every beta.

    The initial distribution is von Mises-Fisher around (1, ..., d), which is on no axis of symmetry of the matrices.

    Returns:
        "caption", "kappa", and "runs": for every beta t, amplitudes of the modes of degree 1 to 6, mean, and w2, the
        distance to the predicted limit (None where no limit is established or E rotates).
    """
    import torch

    from attn_flow import Attention, VonMisesFisher, density_flow
    from attn_flow.base.figures import save_figure
    from attn_flow.base.files import to_plain, versions, write_json

    d = G.shape[0]
    direction = torch.arange(1, d + 1, dtype=torch.float64)
    mu = VonMisesFisher(direction / direction.norm(), kappa)
    times = torch.tensor(t, dtype=torch.float64) if len(t) > 1 else torch.linspace(0, t[0], TIMES, dtype=torch.float64)
    runs, paths = [], []
    for beta in betas:
        attention = Attention.from_matrices(G, V, beta)
        path = density_flow(attention, mu, times, diffusion=diffusion, bandwidth=bandwidth)
        amplitudes = path.amplitudes()[:, 1 : DEGREES + 1].tolist()
        run = {"beta": beta, "t": path.t.tolist(), "amplitudes": amplitudes, "mean": path.moments()[0].tolist()}
        runs.append({**run, "w2": _distances(path, attention), **path.about})
        paths.append(path)
    caption = (
        f"von Mises-Fisher distribution, kappa = {kappa:g}, d = {d}; D = {diffusion:g}; "
        f"bandwidth {paths[0].about['bandwidth']}."
    )
    numbers = {"runs": runs, "kappa": kappa, "caption": caption}
    if out is not None:
        from attn_flow.pages.figures import density_figure

        write_json({**numbers, "versions": versions()}, Path(out) / "density.json")
        save_figure(density_figure(paths, runs, caption), Path(out) / "density.png")
    return dict(to_plain(numbers))


def _distances(path: DensityPath, attention: Attention) -> list[float] | None:
    """W2(mu_t, P_# mu_0) on the nodes, if P exists and does not rotate."""
    from attn_flow import limit, wasserstein

    target = limit(attention)
    if target.case not in ("fixed", "jordan", "stationary") or target.rotates:
        return None
    goal = target.push_forward(path.cloud(0))
    return [float(wasserstein(path.cloud(i), goal)) for i in range(len(path))]
