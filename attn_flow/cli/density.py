"""The command `density`: the mean-field density itself, without tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from attn_flow.cli import console

TIMES, DEGREES = 41, 6  # times that are saved if only the end is given; degrees of modes that are reported


def density(
    G: console.Matrix,
    V: console.Matrix,
    beta: console.Beta = "1,2",
    kappa: Annotated[float, typer.Option(help="Concentration of the initial von Mises-Fisher distribution.")] = 1.0,
    t: Annotated[str, typer.Option(help="The end T, or the times.")] = "2",
    diffusion: Annotated[float, typer.Option(help="Noise, as D times the Laplacian.")] = 0.0,
    bandwidth: Annotated[int | None, typer.Option(help="The largest degree of a mode; chosen by default.")] = None,
    out: Annotated[Path | None, typer.Option(help="Folder for density.json and density.png.")] = None,
    as_json: console.Json = False,
) -> None:
    """Solve the mean-field equation for the density (d = 2, 3).

    Tokens are on the circle or the sphere. They start with a von Mises-Fisher distribution around (1, ..., d), which is
    on no axis of symmetry of the matrices.

    Example: attn-flow density --G "1,0;0,1" --V "1,0;0,.5"
    """
    import torch

    from attn_flow.attention.attention import Attention
    from attn_flow.base.checks import require_positive
    from attn_flow.base.figures import save_figure
    from attn_flow.base.files import versions, write_json
    from attn_flow.cli.matrices import parse_numbers, parse_square
    from attn_flow.dynamics.densities import density_flow
    from attn_flow.measures.von_mises_fisher import VonMisesFisher
    from attn_flow.pages.figures import density_figure
    from attn_flow.prediction.limit_map import limit
    from attn_flow.transport.distances import wasserstein

    console.require_writable(out)
    matrices, times = (parse_square(G, "G"), parse_square(V, "V")), parse_numbers(t, "t")
    if len(times) == 1:
        require_positive(t=times[0])
        times = torch.linspace(0, times[0], TIMES, dtype=torch.float64).tolist()
    direction = torch.arange(1, len(matrices[0]) + 1, dtype=torch.float64)
    mu = VonMisesFisher(direction / direction.norm(), kappa)
    runs, paths, rows = [], [], []
    for each in parse_numbers(beta, "beta"):
        attention = Attention.from_matrices(*matrices, each)
        path = density_flow(attention, mu, times, diffusion=diffusion, bandwidth=bandwidth)
        modes, mean = path.amplitudes()[:, 1 : DEGREES + 1].tolist(), path.moments()[0].tolist()
        try:
            goal = limit(attention).push_forward(path.cloud(0))
            w2, reason = [float(wasserstein(path.cloud(i), goal)) for i in range(len(path))], ""
        except ValueError as error:  # the limit is not one point for every node
            w2, reason = None, str(error)
        runs.append({"beta": each, "t": times, **path.about, "mean": mean, "amplitudes": modes, "w2": w2})
        paths.append(path)
        rows.append([each, times[-1], w2 and w2[-1], ", ".join(f"{size:.2g}" for size in modes[-1])])
    caption = f"von Mises-Fisher distribution, kappa = {kappa:g}, d = {len(direction)}; D = {diffusion:g}; "
    caption += f"bandwidth {runs[0]['bandwidth']}."
    numbers = {"runs": runs, "kappa": kappa, "caption": caption}
    if out is not None:
        write_json({**numbers, "versions": versions()}, out / "density.json")
        save_figure(density_figure(paths, runs, caption), out / "density.png")
    if as_json:
        console.print_json(numbers)
        return
    columns = ["beta", "time", "W2 to the limit", "size of the modes of degree 1, 2, ..."]
    console.print_table(f"{caption} At the end:", columns, rows)
    if reason:
        console.paragraph(f"W2 is not measured: {reason}")
    if out is not None:
        console.echo(f"Written to {out}.")
