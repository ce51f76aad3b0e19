"""Every experiment of the papers: its quick run holds all its claims, its numbers are plain, its plot is a figure."""

import functools
import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from matplotlib.text import Text

from attn_flow.base.files import to_plain
from attn_flow.experiments import ENCODERS, NAMES, load
from attn_flow.experiments.claims import at_least, at_most, chance, claim

CHANCE = Path(__file__).parents[2] / "experiments" / "chance.md"
SLOW = {"hardmax", "gaussian"}
OWN_TESTS = {"trained_limit", *ENCODERS} - {"histograms", "energy_by_layer"}


@functools.cache
def quick_numbers(name):
    return load(name).compute(quick=True, seed=0)


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=[pytest.mark.slow] if n in SLOW else []) for n in NAMES if n not in OWN_TESTS],
)
def test_quick_run(name):
    experiment = load(name)
    numbers = quick_numbers(name)
    assert [c for c in numbers["claims"] if not c["holds"]] == []
    assert len(numbers["claims"]) >= 3
    weak = [c["claim"] for c in numbers["claims"] if (chance(c) or 0) > 0.05]
    assert not weak or f"| `{name}` |" in CHANCE.read_text(), weak
    figure = experiment.plot(numbers)
    assert all(axis.get_xlabel() for axis in figure.axes if axis.get_title())
    # Readable at the width of a page: at most two columns, no small print.
    assert len({axis.get_subplotspec().colspan.start for axis in figure.axes if axis.get_title()}) <= 2
    assert min(text.get_fontsize() for text in figure.findobj(Text) if text.get_text()) >= 9
    # The same figure can be drawn again from the numbers that were written to disk.
    again = experiment.plot(json.loads(json.dumps(to_plain(numbers), allow_nan=False)))
    for before, after in zip(figure.axes, again.axes, strict=True):
        for one, other in zip(before.lines, after.lines, strict=True):
            np.testing.assert_allclose(one.get_xydata().astype(float), other.get_xydata().astype(float), rtol=1e-12)


REGRESSIONS = {  # numbers of an earlier run, with the tolerance for other sizes of the quadrature
    "least W2": ([0.511, 0.182, 0.061], 0.004),
    "d = 3": ([0.34, 0.22, 0.28, 0.62], 0.015),
    "oblique": ([0.085, 0.763], 0.005),
    "beta = 1": (1.0, 0.02),
    "own argmax": (0.94, 0.02),
}


def test_numbers_of_concentration_do_not_change():
    numbers = quick_numbers("concentration")
    runs, three = {r["beta"]: r for r in numbers["mean_field"]["runs"]}, numbers["three"]
    values = {
        "least W2": [runs[beta]["min_w2"] for beta in (10.0, 100.0, 1000.0)],
        "d = 3": [row["min_w2"] for row in three["runs"]],
        "oblique": numbers["oblique"]["l2"],
        "beta = 1": runs[1.0]["min_w2"] / runs[1.0]["w2"][0],
        "own argmax": three["ten"]["self_argmax"],
    }
    for name, (expected, tolerance) in REGRESSIONS.items():
        np.testing.assert_allclose(values[name], expected, atol=tolerance, rtol=0, err_msg=name)
    few = numbers["tokens"][0]  # n tokens do no better with a colder softmax, the mean field does
    assert few["min_w2"][-1] > 1.05 * min(few["min_w2"])
    assert few["resolution"][-1] > few["resolution"][1]


def test_the_figure_of_a_quick_run_says_so(tmp_path, monkeypatch):
    from matplotlib.figure import Figure

    from attn_flow.experiments import reproduction

    figures = [Figure(), Figure()]
    drawn = iter(figures)
    experiment = SimpleNamespace(compute=lambda **_: {"claims": []}, plot=lambda numbers: next(drawn))
    monkeypatch.setattr(reproduction, "load", lambda name: experiment)
    for quick in (True, False):
        reproduction.run_experiment("some", tmp_path, quick=quick)
    assert [[text.get_text() for text in figure.texts] for figure in figures] == [["quick run"], []]


def test_claims_can_fail():
    assert claim("x", 1.0, 1.1, 0.2)["holds"]
    assert not claim("x", 1.0, 1.3, 0.2)["holds"]
    assert not claim("x", float("nan"), 1.3, 0.2)["holds"]
    assert chance(claim("x", 1.0, -2.0, 0.5)) == 0.25
    assert chance(claim("x", 1.0, 0.0, 0.5)) is None
    assert chance(at_most("x", 1.0, 1.0)) is None
    assert at_most("x", 1.0, 1.0)["holds"]
    assert not at_most("x", 1.1, 1.0)["holds"]
    assert not at_least("x", float("nan"), 1.0)["holds"]
    assert not at_most("x", float("nan"), 1.0)["holds"]
    assert at_least("x", 1.1, 1.0)["claim"] == "x (>= 1)"
    assert at_least("x", 1.0, 1.0, "theorem")["source"] == "theorem"
