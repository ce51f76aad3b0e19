"""The figure of the experiment `mean_field`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from attn_flow.experiments.figures import COLOURS, THEORY, caption, label, panels, shades

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def plot(numbers: dict[str, Any]) -> Figure:
    figure, axes = panels(
        4, 2, title="The mean-field limit in TabPFN" if numbers["trained"] else "An untrained encoder"
    )
    a, b, c, d, e, f, g, h = axes
    first, law = next(iter(numbers["laws"].items()))
    sizes = [int(n) for n in law["error"]]
    layers = len(law["exponent"])
    depths = sorted({1, 4, layers - 1} & set(range(layers)))
    for depth, colour in zip(depths, shades(len(depths))):
        curve = [law["error"][str(n)][depth] for n in sizes]
        a.loglog(sizes, curve, "o-", color=colour, markersize=3, label=f"after {depth + 1} layers")
        a.loglog(sizes, [curve[0] * (sizes[0] / n) ** 0.5 for n in sizes], **THEORY)
    label(a, f"{first}: in another sample's field", "n", "error / spread")
    for (name, run), colour in zip(numbers["laws"].items(), COLOURS):
        x = range(1, layers + 1)
        b.errorbar(
            x, [s[0] for s in run["exponent"]], [s[1] for s in run["exponent"]], color=colour, label=name, capsize=2
        )
        d.plot(x, run["added"], "-", color=colour, label=f"{name}: added")
        d.plot(x, run["carried"], ":", color=colour, label="carried")
        e.plot(
            x, _cumulated(run["growth"]["passive"]), color=colour, label=f"{name}: {run['lyapunov']['passive']:+.3f}"
        )
        h.plot(range(layers + 1), run["words"]["clusters"], color=colour, label=name)
    b.axhline(-0.5, **THEORY)
    label(b, "exponent of the error in n", "layer", "slope")
    for (null, run), colour in zip(law["nulls"].items(), COLOURS[3:]):
        c.loglog([int(n) for n in run["error"]], [v[-1] for v in run["error"].values()], "s-", color=colour, label=null)
    c.loglog(sizes, [law["error"][str(n)][-1] for n in sizes], "o-", color=COLOURS[0], label="same law")
    c.set_ylim(top=3 * c.get_ylim()[1])  # room for the legend
    label(c, f"{first}: nulls, after the last layer", "n", "error / spread")
    label(d, f"what a layer adds, n = {sizes[-1]}", "layer", "error / spread")
    e.axhline(1, **THEORY)
    label(e, "growth of a small displacement (exponent)", "layer", "over the spread's")
    task = law["tasks"][0]
    for (name, run), colour in zip(task["closures"].items(), COLOURS):
        words = f"{name} ({run['numbers'] / task['rows_numbers']:.0%}): {run['accuracy']:.2f}"
        f.semilogy(range(1, layers + 1), run["held_out"], color=colour, label=words)
    f.axhline(0.3, color="#aaaaaa", linewidth=0.8)
    label(f, "closures (numbers): accuracy, held out", "layer", "error / spread")
    for (name, run), colour in zip(numbers["laws"].items(), COLOURS):
        explained = run["components"]["explained"]
        count = [int(k) for k in explained]
        g.plot(
            count, [sorted(v)[len(v) // 2] for v in explained.values()], "o-", color=colour, markersize=3, label=name
        )
        g.plot(count, [max(min(v), -3.0) for v in explained.values()], ":", color=colour)
    g.set_xscale("log")
    label(g, "mixtures: median layer, worst (from -3) dotted", "components", "explained variance")
    label(h, "clusters of a hundredth of tokens", "level", "number")
    held = sum(c["holds"] for c in numbers["claims"])
    caption(
        figure,
        f"Samples at n = {', '.join(numbers['sizes'])}: {', '.join(map(str, numbers['sizes'].values()))}. Closures on "
        f"{numbers['rows']} training rows, {numbers['held_out']} held out; exact accuracy {task['accuracy']:.2f}. "
        f"Dashed: n^(-1/2), exponent 0. {held} of {len(numbers['claims'])} claims hold.",
    )
    return figure


def _cumulated(factors: list[float]) -> list[float]:
    total, found = 1.0, []
    for factor in factors:
        total *= factor
        found.append(total)
    return found
