"""Growth of time and memory: the exponent that is fitted, and what is drawn of it."""

import json

import pytest
from typer.testing import CliRunner

from attn_flow.bench.growth import axes, exponent
from attn_flow.bench.growth_plot import growth_figure
from attn_flow.cli.entry import app


def test_the_exponent_is_that_of_the_larger_sizes() -> None:
    sizes = [1, 2, 4, 8, 16, 32]
    assert exponent(sizes, [3.0 * n**1.5 for n in sizes]) == pytest.approx(1.5)
    assert exponent(sizes, [1000 + n**2 if n < 8 else n**2 for n in sizes]) == pytest.approx(2)  # overhead below


def test_every_axis_grows_and_is_drawn() -> None:
    rows = [
        {
            "case": f"growth: {axis.what}",
            "axis": axis.name,
            "sizes": list(axis.sizes),
            "seconds": [1e-3 * size for size in axis.sizes],
            "bytes": [100 * size**2 for size in axis.sizes],
            "exponent": 1.0,
            "memory_exponent": 2.0,
        }
        for axis in axes(quick=True)
    ]
    assert {row["axis"] for row in rows} == {"n", "heads", "d", "texts", "levels"}
    figure = growth_figure(rows, "a processor")
    drawn = [axes for axes in figure.axes if axes.get_legend() is not None]
    assert len(drawn) == len(rows)
    words = [text.get_text() for text in drawn[0].get_legend().get_texts()]
    assert words == [r"time $\sim n^{1.00}$", r"memory $\sim n^{2.00}$"]


@pytest.mark.slow
def test_bench_growth_writes_numbers_and_a_figure(tmp_path) -> None:
    done = CliRunner().invoke(app, ["bench", "growth", "--quick", "--out", str(tmp_path)])
    assert done.exit_code == 0, done.output
    rows = json.loads((tmp_path / "bench.json").read_text())["rows"]
    assert all(len(row["seconds"]) == len(row["sizes"]) == len(row["bytes"]) for row in rows)
    assert (tmp_path / "growth.png").stat().st_size > 10_000
