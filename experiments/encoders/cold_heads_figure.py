"""The figure of the experiment `cold_heads`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from attn_flow.experiments.figures import COLOURS, THEORY, caption, label, panels

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def plot(numbers: dict[str, Any]) -> Figure:
    figure, (a, b, c, d) = panels(2, 2, title="Trained heads at low temperature")
    for (name, found), colour in zip(numbers["heads"].items(), (*COLOURS, "#000000")):
        a.plot(
            [head["dimension"] for head in found],
            [max([0.0, *(s["cold"] for s in head["seen"] if s["shared"] >= 10)]) for head in found],
            ".",
            color=colour,
            markersize=4,
            label=name,
        )
        run = [head for head in found if head["fraction"] is not None]
        b.plot([head["baseline"] for head in run], [head["fraction"] for head in run], ".", color=colour, markersize=4)
        b.plot(
            [head["baseline"] for head in run],
            [head["if_theory"] for head in run],
            "_",
            color=colour,
            markersize=3,
            alpha=0.4,
        )
    a.axhline(0.8, **THEORY)
    a.set_xscale("log")
    found = bool(numbers["heads"])
    label(a, "every head", "dimensions of keys that queries tell apart", "coldest while ten tokens share", legend=found)
    b.axline((0, 0), slope=1, color="#aaaaaa", linewidth=0.8)
    label(b, "at the coldest beta resolved", "best baseline: fraction of the way", "own projection", legend=False)
    for case, colour in zip(numbers["colder"], COLOURS):
        factors = [run["factor"] for run in case["runs"]]
        where = f"{case['encoder']} {case['layer']}.{case['head']}, n = {case['n']}"
        c.plot(factors, [run["fraction"] for run in case["runs"]], "o-", color=colour, markersize=3, label=where)
        c.plot(factors, [run["baseline"] for run in case["runs"]], "-", color=colour, alpha=0.3)
        c.plot([case["coldest"]], [case["frozen"]["fraction"]], "s", color=colour, markersize=5, fillstyle="none")
        c.axhline(case["if_theory"]["fraction"], color=colour, linestyle=":", linewidth=0.8)
        c.plot([case["coldest"]], [case["common"]["fraction"]], "^", color=colour, markersize=5, fillstyle="none")
        d.plot(factors, [2 * case["rate"] * run["t"] for run in case["runs"]], "o-", color=colour, markersize=3)
    for axis in (c, d):
        axis.set_xscale("log", base=2)
    label(c, "best heads", "beta / trained", "fraction", legend=bool(c.lines))
    label(d, "time of the best fraction", "beta / trained", "2 g t", legend=False)
    held = sum(x["holds"] for x in numbers["claims"])
    missing = f" Not run: {', '.join(numbers['missing'])}." if numbers["missing"] else ""
    caption(
        figure,
        f"n = {numbers['n']} tokens, {numbers['steps']} steps. (a) dashed: cold. (b) dashes: if theory held; grey: no "
        "better than the best baseline. (c) dotted: if theory held; pale: best baseline; square: in the field of mu_0; "
        "triangle: with the mean value. "
        f"{held} of {len(numbers['claims'])} claims hold.{missing}",
    )
    return figure
