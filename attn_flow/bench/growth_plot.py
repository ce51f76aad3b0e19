"""The figure of `attn-flow bench growth`: processor time and peak memory against size, with their exponents."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from attn_flow.base.figures import PREDICTION, TRUTH, caption, style, typeset
from attn_flow.bench.measure import Ratio

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def growth_figure(rows: Sequence[Ratio], processor: str) -> Figure:
    """One panel for every row of `growth_ratios`."""
    from matplotlib.ticker import NullFormatter

    with style() as pyplot:
        figure, panels = pyplot.subplots(2, -(-len(rows) // 2), figsize=(11, 6), squeeze=False)
        for panel, row in zip(panels.flat, rows):
            beside = panel.twinx()
            beside.spines["right"].set_visible(True)
            size = row["axis"] if len(row["axis"]) == 1 else rf"\mathrm{{{row['axis']}}}"
            time, memory = (
                rf"{name} $\sim {size}^{{{row[exponent]:.2f}}}$"
                for name, exponent in (("time", "exponent"), ("memory", "memory_exponent"))
            )
            lines = panel.loglog(row["sizes"], row["seconds"], "o-", color=TRUTH, markersize=3, label=time)
            megabytes = [max(held, 1) / 1e6 for held in row["bytes"]]
            lines += beside.loglog(row["sizes"], megabytes, "s--", color=PREDICTION, markersize=3, label=memory)
            panel.set_title(typeset(row["case"].removeprefix("growth: ")), fontsize=8)
            panel.set_xlabel(f"${size}$")
            panel.set_ylabel("processor time, s", color=TRUTH)
            beside.set_ylabel("peak memory, MB", color=PREDICTION)
            for axis in (panel, beside):
                axis.yaxis.set_minor_formatter(NullFormatter())
                low, high = axis.get_ylim()
                axis.set_ylim(low, high * (high / low) ** 0.3)  # room for the legend
            panel.legend(handles=lines, loc="upper left")
        for panel in panels.flat[len(rows) :]:
            panel.set_axis_off()
        words = "exponents: least squares on the upper half of the sizes; memory: tensors beyond what was there before"
        caption(figure, f"{processor}, one thread, a machine in use; {words}")
    return figure
