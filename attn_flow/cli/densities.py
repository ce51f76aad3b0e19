"""A simulation of the density itself: the mean-field run of `simulate --density`, its modes and its distance."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from attn_flow.attention import Attention
from attn_flow.base.figures import caption, save_figure, style
from attn_flow.base.files import plain, versions, write_json
from attn_flow.dynamics.continuity import DensityPath, density_flow
from attn_flow.measures import VonMisesFisher
from attn_flow.prediction.limit_map import limit
from attn_flow.transport.distances import wasserstein

if TYPE_CHECKING:
    from matplotlib.figure import Figure

TIMES, MODES = 41, 6  # kept, where an end is given; degrees shown


def simulate_density(
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
    """For every beta: t, sizes of the modes of degree 1 to MODES, mean, least density, and W2 to the predicted limit.

    The initial law is von Mises-Fisher around (1, ..., d)/|(1, ..., d)|, which no reflection of the axes keeps.
    W2 is None where no limit is established, or where E rotates.
    """
    d = G.shape[0]
    direction = torch.arange(1, d + 1, dtype=torch.float64)
    mu = VonMisesFisher(direction / direction.norm(), kappa)
    times = torch.linspace(0, t[0], TIMES, dtype=torch.float64) if len(t) == 1 else torch.tensor(t, dtype=torch.float64)
    runs, paths = [], []
    for beta in betas:
        attention = Attention.from_matrices(G, V, beta=beta).to(torch.float64)
        path = density_flow(attention, mu, times, diffusion=diffusion, bandwidth=bandwidth)
        runs.append({"beta": beta, "t": path.t.tolist(), "amplitudes": path.amplitudes()[:, 1 : MODES + 1].tolist()})
        runs[-1] |= {"mean": path.moments()[0].tolist(), "w2": _distances(path, attention), **path.about}
        paths.append(path)
    words = (
        f"von Mises-Fisher law, kappa = {kappa:g}, d = {d}; D = {diffusion:g}; bandwidth {paths[0].about['bandwidth']}."
    )
    numbers = {"runs": runs, "kappa": kappa, "caption": words}
    if out is not None:
        write_json({**numbers, "versions": versions()}, Path(out) / "density.json")
        save_figure(density_figure(paths, runs, words), Path(out) / "density.png")
    return plain(numbers)


def _distances(path: DensityPath, attention: Attention) -> list[float] | None:
    """W2(mu_t, P_# mu_0) on the nodes, where P exists and is linear."""
    found = limit(attention)
    if found.case not in ("fixed", "jordan", "stationary") or found.frequencies:
        return None
    first = path.cloud(0)
    target = found.push_forward(first.x)
    return [
        float(wasserstein(first.x, target, weights_x=path.cloud(i).weights, weights_y=first.weights))
        for i in range(len(path))
    ]


def density_figure(paths: list[DensityPath], runs: list[dict[str, Any]], words: str) -> Figure:
    """For every beta the density at some times (along the circle, or the first meridian) and the sizes of its modes."""
    with style() as pyplot:
        figure, grid = pyplot.subplots(len(paths), 2, figsize=(9, 2.8 * len(paths)), squeeze=False)
        turn = torch.linspace(-math.pi, math.pi, 361, dtype=torch.float64)
        for path, run, (left, right) in zip(paths, runs, grid):
            d = path.harmonics.x.shape[-1]
            x = torch.zeros(len(turn), d, dtype=torch.float64)
            x[:, 0], x[:, -1] = turn.cos(), turn.sin()
            rho = path.density(x)
            for i in sorted({0, len(path) // 3, 2 * len(path) // 3, len(path) - 1}):
                colour = pyplot.get_cmap("viridis")(0.9 * i / max(1, len(path) - 1))
                left.plot(turn, rho[i], color=colour, label=f"$t = {float(path.t[i]):.3g}$")
            plane = "circle" if d == 2 else "great circle through the first and third axes"
            left.set(xlabel=rf"angle on the {plane}", title=rf"$\beta = {run['beta']:g}$: density $\rho_t$")
            left.set_xticks([-math.pi, 0, math.pi], [r"$-\pi$", "$0$", r"$\pi$"])
            left.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0))
            sizes = torch.tensor(run["amplitudes"])
            for k in range(sizes.shape[1]):
                right.plot(path.t, sizes[:, k].clamp_min(1e-16), label=f"$k = {k + 1}$")
            right.set(xlabel="time $t$", yscale="log", title="size of the modes of degree $k$")
            right.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0))
        caption(figure, words)
    return figure
