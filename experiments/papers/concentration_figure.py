"""The figure of the concentration experiment, drawn from its numbers alone."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from attn_flow.experiments.figures import COLOURS, FONT, THEORY, label, name_lines, panels, shades

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def plot(numbers: dict[str, Any]) -> Figure:
    figure, (a, b, c, d) = panels(4)
    _curves(a, numbers["mean_field"])
    _times(b, numbers["mean_field"])
    _depths(c, numbers)
    _oblique(d, numbers["oblique"])
    return figure


def _curves(axis: Any, field: dict[str, Any]) -> None:
    finite = [r for r in field["runs"] if r["beta"] not in (1.0, "inf")]
    for colour, r in zip(shades(len(finite)), finite):
        axis.semilogy(r["t"], r["w2"], color=colour, linewidth=1.4, label=f"{r['beta']:g}")
        axis.plot(r["t_min"], r["min_w2"], "o", color=colour, markersize=4)
    cold = field["runs"][-1]
    axis.semilogy(cold["t"], cold["w2"], color=COLOURS[1], linewidth=1.6, label=r"$\infty$")
    t = np.array(field["t"])
    axis.semilogy(t, 1.5 * np.exp(-field["rate_w2"] * t), **THEORY)
    axis.text(17.0, 9e-3, r"$e^{-c_2t}$")
    axis.set_ylim(8e-4, 3)
    label(axis, r"distance to the limit", "time t", r"$W_2(\mu_t,\,P_\#\mu_0)$", legend=False)
    axis.legend(title=r"$\beta$", fontsize=FONT - 0.5, loc="lower left", handlelength=1.0, frameon=False)


def _times(axis: Any, field: dict[str, Any]) -> None:
    runs = [r for r in field["runs"] if r["beta"] not in (1.0, "inf")]
    beta = np.array([r["beta"] for r in runs])
    start, end = zip(*[_near(r) for r in runs])
    axis.fill_between(beta, start, end, color=COLOURS[0], alpha=0.15, linewidth=0, label=r"$W_2<2\min W_2$")
    axis.semilogx(beta, [r["t_min"] for r in runs], "o", color=COLOURS[0], label="measured")
    line = np.geomspace(8, 1200, 50)
    axis.semilogx(line, np.log(line) / (2 * field["g"]), **THEORY, label=r"$\log\beta/(2g)$")
    label(axis, r"time of the least $W_2$", r"$\beta$", "time t")


def _near(r: dict[str, Any]) -> tuple[float, float]:
    """The times between which W2 is within a factor of two of its least value."""
    near = [t for t, w in zip(r["t"], r["w2"]) if w <= 2 * min(r["w2"])]
    return near[0], near[-1]


def _depths(axis: Any, numbers: dict[str, Any]) -> None:
    runs = [r for r in numbers["mean_field"]["runs"] if r["beta"] != "inf"]
    beta = np.array([r["beta"] for r in runs])
    for colour, row in zip((COLOURS[4], COLOURS[1], COLOURS[2]), numbers["tokens"]):
        axis.loglog(row["betas"], row["min_w2"], "^-", color=colour, markersize=4, label=f"n = {row['n']}")
    axis.loglog(beta, [r["min_w2"] for r in runs], "o-", color=COLOURS[0], label=r"$n=\infty$")
    line = np.geomspace(10, 1000, 20)
    axis.loglog(line, 0.8 * runs[-1]["min_w2"] * np.sqrt(1000 / line), **THEORY)
    axis.text(30, 0.14, r"$\beta^{-1/2}$")
    label(axis, r"least $W_2$ with n tokens", r"$\beta$", r"$\min_t W_2$", legend=False)
    name_lines(axis)


def _oblique(axis: Any, row: dict[str, Any]) -> None:
    order = np.argsort(row["start"])
    start = np.array(row["start"])[order]
    axis.plot(start, np.array(row["end"])[order], ".", color=COLOURS[1], markersize=3, label="tokens")
    axis.plot(start, np.array(row["limit"])[order], **THEORY, label="predicted")
    axis.plot(start, np.array(row["orthogonal"])[order], color=COLOURS[6], linestyle=":", label="orthogonal projection")
    axis.set_xticks([-90, 0, 90, 180, 270])
    axis.set_yticks([0, 90, 180])
    axis.set_ylim(-40, 320)
    label(axis, "where tokens go, M not normal", "angle at t = 0 (degrees)", "angle at t = 12")
