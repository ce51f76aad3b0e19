"""Figures of simulations: distances to the predicted limit, and densities."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from attn_flow.base.figures import PREDICTION, TRUTH, caption, style

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from attn_flow.dynamics.densities import DensityPath


def beta_words(beta: float, n: int) -> str:
    """beta, typeset; inf on n tokens is the hardmax of that cloud, not the mean-field limit of large beta."""
    if math.isinf(beta):
        return rf"$\beta = \infty$ (hardmax of {n} points)"
    mantissa, _, power = f"{beta:.4g}".partition("e")
    return rf"$\beta = {mantissa}$" if not power else rf"$\beta = {mantissa} \times 10^{{{int(power)}}}$"


def simulation_figure(numbers: dict[str, Any]) -> Figure:
    """W2 to the predicted limit against time, with predicted slopes and t_min; least W2 and its time against beta."""
    runs, limit = numbers["runs"], numbers["limit"]
    if limit is None:
        return _mean_figure(numbers)
    finite = [run for run in runs if math.isfinite(run["beta"]) and run["beta"] > 0]
    panels = 3 if len(finite) > 1 else 1
    with style() as pyplot:
        figure, grid = pyplot.subplots(
            1, panels, figsize=(10 if panels == 3 else 6, 3.6), width_ratios=(2, 1, 1)[:panels], squeeze=False
        )
        left = grid[0][0]
        colours = pyplot.get_cmap("viridis")(torch.linspace(0.05, 0.9, max(len(runs), 2)).numpy())
        for run, colour in zip(runs, colours):
            w2 = [w if w > 0 else math.nan for w in run["w2"]]
            left.plot(run["t"], w2, color=colour, label=beta_words(run["beta"], numbers["n"]))
            left.plot(run["t_min"], run["min_w2"] or math.nan, "o", ms=4, color=colour)
            when = run["t_min_predicted"]
            if when is not None and when <= run["t"][-1]:
                left.axvline(when, color=colour, ls=":", lw=0.9)
        left.plot([], [], "o", ms=4, color="0.4", label="smallest distance")
        if any(run["t_min_predicted"] is not None for run in runs):
            left.plot([], [], ls=":", color="0.4", lw=0.9, label=r"$t_{\min}$, predicted")
        _slopes(left, (finite or runs)[-1], limit)
        title = "distance to the predicted limit" + (" (moving)" if limit["frequencies"] else "")
        left.set(xlabel="time $t$", ylabel=r"$W_2(\mu_t, P_\#\mu_0)$", yscale="log", title=title)
        figure.legend(*left.get_legend_handles_labels(), loc="outside right upper")
        if panels == 3:
            _against_beta(grid[0][1], grid[0][2], finite)
        caption(figure, numbers["caption"])
    return figure


def _mean_figure(numbers: dict[str, Any]) -> Figure:
    """The length of the mean token over time, where no limit is predicted."""
    with style(width=6.0) as pyplot:
        figure, axes = pyplot.subplots(figsize=(6, 3.6))
        for run in numbers["runs"]:
            axes.plot(run["t"], run["mean_length"], label=beta_words(run["beta"], numbers["n"]))
        axes.set(xlabel="time $t$", ylabel="length of the mean token", ylim=(0, 1.05))
        axes.legend()
        caption(figure, numbers["caption"])
    return figure


def _slopes(axes: Any, run: dict[str, Any], limit: dict[str, Any]) -> None:
    """The predicted fall and exit beside the coldest finite run, as lines of the predicted slope."""
    t, w2 = torch.tensor(run["t"]), torch.tensor(run["w2"])
    least = int(w2.argmin())
    fall, power = limit["rate_w2"], limit["power"]
    if fall and least > 2:
        here = int((w2[: least + 1] - (w2[0] * w2[least]).sqrt()).abs().argmin())
        reach = t[: least + 1]
        line = 1.25 * w2[here] * torch.exp(-fall * (reach - t[here]))
        _line(axes, reach, line, w2, rf"$e^{{-c_2 t}}$, $c_2 = {fall:.3g}$, predicted")
    if power and len(t) > 4:
        reach = t[len(t) // 8 + 1 :]
        line = 1.25 * w2[len(t) // 8 + 1] * (reach / reach[0]) ** -power
        _line(axes, reach, line, w2, rf"$t^{{-{power:.3g}}}$, predicted (even laws: $t^{{-1}}$)")
    leaves = limit["exit_rate"]
    if leaves and leaves != "inf" and least < len(t) - 3 and float(w2[least:].max()) > 2 * float(w2[least]):
        here = least + int((w2[least:] >= 2 * w2[least]).int().argmax())
        reach = t[least:]
        line = 0.8 * w2[here] * torch.exp(leaves * (reach - t[here]))
        _line(axes, reach, line, w2, rf"$e^{{xt}}$, exit $x = {leaves:.3g}$, predicted", ls="-.")


def _line(axes: Any, t: Tensor, line: Tensor, w2: Tensor, label: str, ls: str = "--") -> None:
    """The part of a line that lies within the range of the distances."""
    shown = (line >= 0.7 * w2[w2 > 0].min()) & (line <= 1.3 * w2.max())
    axes.plot(t[shown], line[shown], color=PREDICTION, ls=ls, lw=1.2, label=label)


def _against_beta(distances: Any, times: Any, runs: list[dict[str, Any]]) -> None:
    """The smallest distance and its time; dashed, what is predicted of them."""
    beta, least = (torch.tensor([run[name] for run in runs]) for name in ("beta", "min_w2"))
    distances.plot(beta, least, "o-", color=TRUTH)
    layer = [run["min_w2_predicted"] for run in runs]
    title = "smallest $W_2$\ndashed: " + (r"slope $\beta^{-1/2}$" if None in layer else "predicted layer")
    middle = len(runs) // 2
    expected = least[middle] * (beta / beta[middle]) ** -0.5 if None in layer else layer
    distances.plot(beta, expected, "--", color=PREDICTION)
    distances.set(yscale="log" if bool((least > 0).all()) else "linear", title=title)
    times.plot(beta, [run["t_min"] for run in runs], "o-", color=TRUTH)
    known = [(run["beta"], run["t_min_predicted"]) for run in runs if run["t_min_predicted"] is not None]
    if known:
        times.plot(*zip(*known), "--", color=PREDICTION)
    times.set(title="its time\ndashed: predicted" if known else "its time\n(no $t_{\\min}$ is predicted)")
    for axes in (distances, times):
        axes.set(xlabel=r"$\beta$", xscale="log")
        if len(runs) <= 4:
            axes.set_xticks(beta.tolist(), [f"{b:g}" for b in beta.tolist()])
            axes.tick_params(axis="x", which="minor", bottom=False)


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
