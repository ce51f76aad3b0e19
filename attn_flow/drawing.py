"""Pictures of clouds of tokens and of distances over time; matplotlib is imported when something is drawn."""

from __future__ import annotations

import base64
import html
import io
import math
import os
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from attn_flow.base.checks import require_extra, require_positive
from attn_flow.base.figures import BASELINE, COLOURS, PREDICTION, TRUTH, caption, style
from attn_flow.base.files import write_atomically

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MAX_FRAMES = 120  # of an animation
SHADES = {"concentrating": "#0072b2", "metastable": "#009e73", "terminal": "#d55e00", "spreading": "#7f7f7f"}


def clouds_figure(
    t: Tensor,
    x: Tensor,
    indices: Sequence[int],
    predicted: Tensor | None = None,
    final: Tensor | None = None,
    title: str = "",
) -> Figure:
    """Clouds x (T, n, d) at the times t (T,) of these indices, a panel each.

    predicted and final are bases (d, k) of the subspace of the limits, and of V's leading directions. More than three
    dimensions are projected on three principal axes.
    """
    x, bases, is_projected = _in_view(x, predicted, final)
    start, d = x[0], x.shape[-1]
    radius = float(x.norm(dim=-1).max())
    with style() as pyplot:
        figure = pyplot.figure(figsize=(2.2 * len(indices), 3.1))
        for panel, index in enumerate(indices, start=1):
            axes: Any = figure.add_subplot(1, len(indices), panel, projection="3d" if d == 3 else None)
            _prepare(axes, radius, d, bases)
            _scatter(axes, x[index], start)
            axes.set_title(f"$t = {float(t[index]):.3g}$", loc="center", y=0.96 if d == 3 else None)
        figure.suptitle(title, fontsize=10, x=0.01, ha="left")
        handles, labels = axes.get_legend_handles_labels()
        if handles:
            figure.legend(handles, labels, loc="outside lower right", ncols=2)
        words = "" if d == 2 else " in the plane of the first two coordinates"
        words = f"Tokens keep the colour of their angle at $t = {float(t[0]):.3g}${words}."
        caption(figure, words + " Axes: three principal components." * is_projected)
    return figure


def animate_clouds(
    path: str | os.PathLike[str],
    t: Tensor,
    x: Tensor,
    predicted: Tensor | None = None,
    curve: Tensor | None = None,
    seconds: float = 8.0,
) -> None:
    """Write clouds x (T, n, d) as an animated GIF, with a curve (T,) of distances below them if one is given."""
    if not os.fspath(path).lower().endswith(".gif"):
        raise ValueError(f"{os.fspath(path)}: expected a name that ends in .gif.")
    require_positive(seconds=seconds)
    with style(width=9.0) as pyplot:
        from matplotlib.animation import FuncAnimation, PillowWriter

        x, bases, _ = _in_view(x, predicted, None)
        d, radius = x.shape[-1], float(x.norm(dim=-1).max())
        figure = pyplot.figure(figsize=(4.2, 4.2 if curve is None else 5.6))
        grid = figure.add_gridspec(1 if curve is None else 2, 1, height_ratios=[1] if curve is None else [3, 1])
        axes: Any = figure.add_subplot(grid[0], projection="3d" if d == 3 else None)
        _prepare(axes, radius, d, bases)
        if axes.get_legend_handles_labels()[0]:
            axes.legend(loc="upper left")
        dots, cursor = _scatter(axes, x[0], x[0]), None
        if curve is not None:
            below = figure.add_subplot(grid[1])
            below.plot(t, curve, color=TRUTH)
            below.set(xlabel="time $t$", ylabel="$W_2$ to the limit", ylim=(0, None))
            cursor = below.axvline(float(t[0]), color="0.4", lw=0.9)
        frames = torch.linspace(0, len(t) - 1, min(len(t), MAX_FRAMES)).round().long().tolist()

        def draw(index: int) -> list[Any]:
            points = x[index].numpy()
            if d == 3:
                dots._offsets3d = tuple(points.T)
            else:
                dots.set_offsets(points)
            axes.set_title(f"$t = {float(t[index]):.2f}$", loc="center")
            if cursor is not None:
                cursor.set_xdata([float(t[index])] * 2)
            return [dots]

        film = FuncAnimation(figure, draw, frames=frames)
        writer = PillowWriter(fps=max(1, round(len(frames) / seconds)))
        write_atomically(path, lambda name: film.save(name, writer=writer, dpi=100))
        pyplot.close(figure)


def distance_figure(t: Tensor, w2: Tensor, spans: Sequence[tuple[str, float, float]] = ()) -> Figure:
    """Distances W2 (T,) or (T, batch) over time; spans are shaded: the name of a phase, its start and its end."""
    with style(width=6.0) as pyplot:
        figure, axes = pyplot.subplots(figsize=(6, 3))
        lines = w2.reshape(len(t), -1)
        axes.plot(t, torch.where(lines > 0, lines, math.nan), color=TRUTH, lw=1.5 if lines.shape[1] == 1 else 0.7)
        for name, start, end in spans:
            axes.axvspan(start, end, color=SHADES.get(name, BASELINE), alpha=0.12, lw=0, label=name)
        if spans:
            axes.legend(loc="upper right")
        axes.set(xlabel="time $t$", ylabel=r"$W_2(\mu_t, P_\#\mu_0)$", yscale="log")
    return figure


def html_text(lines: Sequence[str], draw: Callable[[], Figure] | None = None) -> str:
    """Lines as paragraphs of a notebook, and below them the figure that `draw` makes, if matplotlib is installed."""
    content = "".join(f"<p>{html.escape(line)}</p>" for line in lines)
    if draw is not None and find_spec("matplotlib") is not None:
        figure, buffer = draw(), io.BytesIO()
        figure.savefig(buffer, format="png", dpi=80)
        require_extra("matplotlib.pyplot").close(figure)  # pyplot would keep it in memory
        content += f'<img alt="figure" src="data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}">'
    return f"<div>{content}</div>"


def _in_view(x: Tensor, *bases: Tensor | None) -> tuple[Tensor, list[Tensor | None], bool]:
    """Clouds and subspaces in two or three coordinates, and whether they were projected."""
    x = x.detach().cpu().double()
    if x.ndim != 3 or x.shape[-1] < 2:
        raise ValueError(
            f"x has shape {tuple(x.shape)}, expected one path (T, n, d) with d >= 2; take x[:, i] of a batch."
        )
    known = [None if basis is None else basis.detach().cpu().double() for basis in bases]
    for basis in known:
        if basis is not None and (basis.ndim != 2 or len(basis) != x.shape[-1]):
            raise ValueError(f"predicted has shape {tuple(basis.shape)}, expected a basis ({x.shape[-1]}, k).")
    if x.shape[-1] <= 3:
        return x, known, False
    axes = torch.linalg.svd(x[[0, len(x) // 2, -1]].flatten(0, 1), full_matrices=False)[2][:3].mT
    return x @ axes, [None for _ in known], True  # the shadow of a sphere is not a curve


def _prepare(axes: Any, radius: float, d: int, bases: Sequence[Tensor | None]) -> None:
    """An empty sphere or circle with the predicted subspaces."""
    predicted, final = bases
    _subspace(axes, final, radius, color=BASELINE, marker="s", label="leading directions of $V$")
    _subspace(axes, predicted, radius, color=PREDICTION, marker="o", label=r"predicted limits")
    bound = 1.12 * radius
    axes.set(xlim=(-bound, bound), ylim=(-bound, bound), xticks=[], yticks=[])
    axes.set_axis_off()
    if d == 3:
        axes.set(zlim=(-bound, bound))
        axes.set_box_aspect((1, 1, 1), zoom=1.35)
        _wire_sphere(axes, radius)
    else:
        axes.set_aspect("equal")
        turn = torch.linspace(0, 2 * math.pi, 200)
        axes.plot(radius * turn.cos(), radius * turn.sin(), color="0.85", lw=0.4, zorder=0)


def _scatter(axes: Any, x: Tensor, start: Tensor) -> Any:
    colour = torch.atan2(start[:, 1], start[:, 0]).numpy()
    limits = {"vmin": -math.pi, "vmax": math.pi}
    return axes.scatter(*x.numpy().T, c=colour, cmap="twilight", s=6, alpha=0.8, linewidths=0, **limits)


def _subspace(axes: Any, basis: Tensor | None, radius: float, color: str, marker: str, label: str) -> None:
    """The sphere of a subspace of dimension 1 or 2: two points or a great circle; nothing where it is everything."""
    if basis is None or basis.shape[1] > 2 or basis.shape[1] == basis.shape[0]:
        return
    if basis.shape[1] == 1:
        ends = radius * torch.cat([basis, -basis], dim=1).numpy()
        axes.plot(*ends, marker, ms=9, mfc="none", mec=color, mew=1.3, label=label, zorder=3)
        return
    turn = torch.linspace(0, 2 * math.pi, 120, dtype=basis.dtype)
    ring = radius * (basis @ torch.stack([turn.cos(), turn.sin()])).numpy()
    axes.plot(*ring, color=color, lw=1.2 if marker == "o" else 0.8, ls="-" if marker == "o" else ":", label=label)


def _wire_sphere(axes: Any, radius: float) -> None:
    """Meridians and parallels in light grey, to see where tokens are on the sphere."""
    turn = torch.linspace(0, 2 * math.pi, 60)
    grey: dict[str, Any] = {"color": "0.85", "lw": 0.4, "zorder": 0}
    for angle in torch.linspace(0, math.pi, 7)[:-1].tolist():
        x, y, z = turn.cos() * math.cos(angle), turn.cos() * math.sin(angle), turn.sin()
        axes.plot(radius * x, radius * y, radius * z, **grey)
    for height in (-0.5, 0.0, 0.5):
        ring = math.sqrt(1 - height**2)
        axes.plot(radius * ring * turn.cos(), radius * ring * turn.sin(), radius * height, **grey)


def lines_figure(
    axis: str, values: Sequence[Any], lines: Sequence[tuple[str, Sequence[Sequence[Mapping[str, Any]]]]]
) -> Figure:
    """The least W2 and its time against the values of an axis of a sweep; lines are (label, rows at every value)."""
    is_number = all(isinstance(value, (int, float)) for value in values)
    is_log = is_number and min(values) > 0 and max(values) < math.inf and max(values) > 5 * min(values)
    with style() as pyplot:
        figure, panels = pyplot.subplots(1, 2, figsize=(10, 3.6))
        places = list(values) if is_log else list(range(len(values)))
        for k, (label, points) in enumerate(lines):
            colour = COLOURS[k % len(COLOURS)]
            for axes, name in zip(panels, ("w2_min", "t_min")):
                known = [[float(row[name]) for row in rows if row[name] is not None] for rows in points]
                mean = [sum(z) / len(z) if z else math.nan for z in known]
                spread = [float(torch.tensor(z).std()) if len(z) > 1 else 0.0 for z in known]
                axes.errorbar(
                    places, mean, spread, marker="o", ms=4, capsize=2, color=colour, label=label or "measured"
                )
            predicted = [rows[0]["t_min_predicted"] if rows else None for rows in points]
            if any(time is not None for time in predicted):
                times = [math.nan if time is None else time for time in predicted]
                panels[1].plot(places, times, "--", color=colour, label="predicted" if k == 0 else None)
        for axes, title in zip(panels, ("least $W_2$ to the predicted limit", "time of the least $W_2$")):
            axes.set(xlabel=rf"$\{axis}$" if axis == "beta" else axis, title=title)
            if is_log:
                axes.set_xscale("log")
            else:
                axes.set_xticks(places, [f"{value:g}" if is_number else str(value) for value in values])
        if is_log and all((row["w2_min"] or 0) > 0 for _, points in lines for rows in points for row in rows):
            panels[0].set_yscale("log")
        panels[1].legend()
    return figure
