"""The figure of the concentration experiment: nine panels, drawn from its numbers alone."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from attn_flow.experiments.figures import COLOURS, THEORY, caption, label, panels, shades

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def plot(numbers: dict[str, Any]) -> Figure:
    figure, axes = panels(3, 3, "Low-temperature concentration of self-attention")
    _curves(axes[0], numbers["mean_field"])
    _times(axes[1], numbers["mean_field"])
    _depths(axes[2], numbers)
    _oblique(axes[3], numbers["oblique"])
    _cases(axes[4], numbers["cases"])
    _rates(axes[5], numbers)
    _exits(axes[6], numbers["stay"])
    _layer(axes[7], numbers["stay"][0])
    _sphere(axes[8], numbers["three"])
    field = numbers["mean_field"]
    caption(
        figure,
        f"(a-c) d = 2, G = diag(3,1), V = diag(1,2), density exp(cos(theta - 1)), {field['n']} weighted nodes, Euler "
        f"h = .04; tokens in (c) drawn with seed {numbers['seed']}. (d) V = I, G = [[2,.5],[0,1]], n = "
        f"{numbers['oblique']['n']}, beta = 50, t = 12. (e, f) beta = inf, exact flow; the Jordan "
        "block [[1,1],[0,1]] from the uniform density (even) and 1 + .9 cos(theta - .5) (uneven). (g, h) beta = 300, "
        f"300 nodes. (i) n = {numbers['three']['n']} tokens, G = diag(3,1,1), V = diag(1,2,1), h = .1. "
        "W2 is exact throughout.",
    )
    return figure


def _curves(axis: Any, field: dict[str, Any]) -> None:
    finite = [r for r in field["runs"] if r["beta"] != "inf"]
    t = np.array(field["t"])
    for colour, r in zip(shades(len(finite)), finite):
        axis.semilogy(r["t"], r["w2"], color=colour, linewidth=1.4, label=f"{r['beta']:g}")
        axis.plot(r["t_min"], r["min_w2"], "o", color=colour, markersize=3.5)
    cold = field["runs"][-1]
    axis.semilogy(cold["t"], cold["w2"], color=COLOURS[1], linewidth=1.6, label=r"$\infty$")
    c, beta = field["rate_w2"], finite[-1]["beta"]
    axis.semilogy(t, 1.5 * np.exp(-c * t), **THEORY, label=r"$e^{-c_2t}$")
    with np.errstate(over="ignore"):
        whole = np.sqrt(np.log(beta + 1) / beta) * np.exp(field["C"] * t) + np.exp(-c * t)
    axis.semilogy(t, 1.5 * whole, color="#888888", linestyle=":", linewidth=1.4, label="bound, 1000")
    axis.set_ylim(8e-4, 3)
    label(axis, r"$W_2(\mu_t,\,P_\#\mu_0)$, mean field", "time t", r"$W_2$", legend=False)
    axis.legend(fontsize=7, frameon=False, ncol=2, title=r"$\beta$", title_fontsize=8, loc="lower left")


def _times(axis: Any, field: dict[str, Any]) -> None:
    runs = [r for r in field["runs"] if r["beta"] not in (1.0, "inf")]
    beta = np.array([r["beta"] for r in runs])
    line = np.geomspace(6, 1500, 50)
    axis.semilogx(line, np.polyval(field["slope"], np.log(line)), color=COLOURS[0], linewidth=1, alpha=0.6)
    axis.semilogx(
        beta, [r["t_min"] for r in runs], "o", color=COLOURS[0], label=f"measured, slope {field['slope'][0]:.2f}"
    )
    axis.semilogx(line, np.log(line) / (2 * field["g"]), **THEORY, label=r"$\log\beta/(2g)$, slope 1.50")
    start, end = zip(*[_near(r) for r in runs])
    axis.fill_between(beta, start, end, color=COLOURS[0], alpha=0.13, linewidth=0, label=r"$W_2<2\min W_2$")
    axis.semilogx(beta, field["t_beta"], "s", color=COLOURS[6], markersize=4, label=r"balance of the bound, $t_\beta$")
    label(axis, r"time of smallest $W_2$", r"$\beta$", "time t")


def _near(r: dict[str, Any]) -> tuple[float, float]:
    """The times between which W2 is within a factor of two of its least value."""
    near = [t for t, w in zip(r["t"], r["w2"]) if w <= 2 * min(r["w2"])]
    return near[0], near[-1]


def _depths(axis: Any, numbers: dict[str, Any]) -> None:
    runs = [r for r in numbers["mean_field"]["runs"] if r["beta"] != "inf"]
    beta = np.array([r["beta"] for r in runs])
    axis.loglog(beta, [r["min_w2"] for r in runs], "o-", color=COLOURS[0], label="mean field")
    for colour, row in zip((COLOURS[4], COLOURS[1], COLOURS[2]), numbers["tokens"]):
        axis.loglog(
            row["betas"], row["min_w2"], "^--", color=colour, markersize=4, linewidth=1, label=f"n = {row['n']}"
        )
        axis.loglog([4000], [row["hardmax_min_w2"]], "^", color=colour, markersize=4)
    line = np.geomspace(10, 1000, 20)
    axis.loglog(line, runs[-1]["min_w2"] * np.sqrt(1000 / line), **THEORY, label=r"$\beta^{-1/2}$")
    axis.set_xticks([1, 10, 100, 1000, 4000], ["1", "10", "100", "1000", r"$\infty$"])
    axis.xaxis.minorticks_off()
    label(axis, r"smallest $W_2$ over time, d = 2", r"$\beta$", r"$\min_t W_2$")


def _oblique(axis: Any, row: dict[str, Any]) -> None:
    order = np.argsort(row["start"])
    start = np.array(row["start"])[order]
    axis.plot(start, np.array(row["limit"])[order], **THEORY | {"linewidth": 2.2}, label="oblique limit")
    axis.plot(
        start, np.array(row["orthogonal"])[order], color=COLOURS[6], linestyle=":", linewidth=1.6, label="orthogonal"
    )
    axis.plot(start, np.array(row["end"])[order], ".", color=COLOURS[1], markersize=2.5, label="tokens, t = 12")
    axis.set_xticks([-90, 0, 90, 180, 270])
    axis.set_yticks([-90, 0, 90, 180, 270])
    axis.set_ylim(-70, 300)
    label(axis, "where tokens go when M is not normal", "angle at t = 0", "angle at t = 12")


def _cases(axis: Any, cases: dict[str, Any]) -> None:
    rotating, jordan, plane = cases["rotating"], cases["jordan"], cases["plane"]
    t = np.array(jordan["t"][2:])
    for name, colour, power in (("even", COLOURS[1], 1.0), ("uneven", COLOURS[4], 0.5)):
        w2 = jordan[name]["w2"]
        axis.loglog(jordan["t"][1:], w2[1:], "o-", color=colour, markersize=3, label=f"Jordan, {name} density, $W_2$")
        words = r"$t^{-1}$, $t^{-1/2}$" if name == "uneven" else None
        axis.loglog(t, w2[-1] * (t[-1] / t) ** power, **THEORY, label=words)
    axis.loglog(rotating["t"][1:], rotating["moving"][1:], color=COLOURS[0], label="rotating, moving")
    axis.loglog(rotating["t"][1:], rotating["frozen"][1:], color=COLOURS[0], linestyle=":", label="rotating, frozen")
    axis.loglog(plane["t"][1:], plane["w2"][1:], color=COLOURS[2], label="dim E = 2")
    axis.set_ylim(1e-4, 4)
    label(axis, "spectral cases", "time t", "distance to the limit")


def _rates(axis: Any, numbers: dict[str, Any]) -> None:
    rows = [(r["measured"], r["predicted"]) for r in numbers["zero"]["rates"]]
    rows.append((numbers["cases"]["plane"]["measured"], numbers["cases"]["plane"]["predicted"]))
    rows.append((numbers["zero"]["tail"]["measured"], numbers["zero"]["tail"]["predicted"]))
    names = ("tail\nslow", "bulk\nslow", "dim E\n= 2", "lower\nlevel")
    place = np.arange(len(rows))
    for p, shift in ((0, -0.17), (1, 0.17)):
        axis.bar(
            place + shift, [r[0][p] for r in rows], 0.3, color=COLOURS[p], alpha=0.75, label=f"$W_{p + 1}$ measured"
        )
        for i, r in enumerate(rows):
            axis.plot([i + shift - 0.17, i + shift + 0.17], [r[1][p]] * 2, color="black", linewidth=1.6)
    wrong = numbers["zero"]["tail"]["two_levels"]
    axis.plot([3 - 0.17, 3 + 0.17], wrong, "x", color="black", markersize=6, label=r"$\min(g, k\kappa/p)$ alone")
    axis.plot([], [], color="black", linewidth=1.6, label=r"predicted $c_p$")
    axis.set_xticks(place, names)
    axis.set_ylim(0, 1.45)
    label(axis, r"rates at $\beta=\infty$", "matrices G and V", "rate", legend=False)
    axis.legend(fontsize=7, frameon=False, ncol=2, loc="upper left")


def _exits(axis: Any, rows: list[dict[str, Any]]) -> None:
    for colour, r in zip((COLOURS[0], COLOURS[1], COLOURS[2]), rows):
        name = f"V=({r['V'][0]:g},{r['V'][1]:g}), G=({r['G'][0]:g},{r['G'][1]:g})"
        axis.semilogy(r["t"], r["offset"], color=colour, linewidth=1.5, label=name)
        if r["exit_rate"]:
            t, y = np.array(r["t"]), np.array(r["offset"])
            i = int(np.argmin(np.abs(y - 3e-3) + 10 * (t < 2)))
            near = np.abs(t - t[i]) < 2.2
            axis.semilogy(t[near], 2.2 * y[i] * np.exp(r["exit_rate"] * (t[near] - t[i])), **THEORY)
            axis.text(t[i] - 0.9, 3.4 * y[i], f"{r['exit_rate']:g}", fontsize=8)
    axis.set_ylim(1e-8, 10)
    label(axis, "do clusters stay? (all have v$_1$ < 0)", "time t", "offset of the cluster")


def _layer(axis: Any, r: dict[str, Any]) -> None:
    y, w = np.array(r["y"]), np.array(r["mass"])
    s = r["predicted_width"]
    edges = np.linspace(-4 * s, 4 * s, 33)
    density, _ = np.histogram(y, edges, weights=w, density=True)
    axis.stairs(density, edges, fill=True, color=COLOURS[0], alpha=0.45, label=f"cluster, width {r['width'][-1]:.4f}")
    line = np.linspace(-4 * s, 4 * s, 200)
    axis.plot(line, np.exp(-((line / s) ** 2) / 2) / (s * math.sqrt(2 * math.pi)), **THEORY, label=f"Gaussian, {s:.4f}")
    axis.set_ylim(0, 23)
    label(axis, "the permanent layer, V = (-1,-3), G = (1,2)", "offset from $e_1$", "density")


def _sphere(axis: Any, three: dict[str, Any]) -> None:
    for colour, r in zip(shades(len(three["runs"])), three["runs"]):
        words = f"{r['beta']:g}   ({r['resolution']:.2g})"
        axis.plot(r["t"], r["w2"], color=colour, linewidth=1.4, label=words)
        axis.plot(r["t_min"], r["min_w2"], "o", color=colour, markersize=4)
    axis.set_ylim(0, 2.3)
    label(axis, "finite n, d = 3: colder is not better", "time t", r"$W_2$", legend=False)
    title = r"$\beta$ (resolution $\beta|Gx|n^{-2/(d-1)}$)"
    axis.legend(fontsize=7, frameon=False, title=title, title_fontsize=8, loc="upper left")
