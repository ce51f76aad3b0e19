"""Every experiment of the papers: its quick run holds all its claims, its numbers are plain, its plot is a figure."""

import json
from pathlib import Path

import numpy as np
import pytest

from attn_flow.base.files import to_plain
from attn_flow.experiments import NAMES, load
from attn_flow.experiments.claims import bound, chance, claim

README = Path(__file__).parents[2] / "experiments" / "README.md"
SLOW = {"layer_jacobians", "gap_counting", "hardmax", "gaussian"}
OWN_TESTS = {"wrapped_layer", "trained_stacks", "mean_field", "zoo", "cold_heads", "fine_tuning"}


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=[pytest.mark.slow] if n in SLOW else []) for n in NAMES if n not in OWN_TESTS],
)
def test_quick_run(name):
    experiment = load(name)
    numbers = experiment.compute(quick=True, seed=0)
    assert [c for c in numbers["claims"] if not c["holds"]] == []
    assert len(numbers["claims"]) >= 3
    weak = [c["claim"] for c in numbers["claims"] if (chance(c) or 0) > 0.05]
    listed = README.read_text().partition("## What chance would give")[2]
    assert not weak or f"| `{name}` |" in listed, weak
    figure = experiment.plot(numbers)
    assert all(axis.get_xlabel() for axis in figure.axes if axis.get_title())
    # The same figure can be drawn again from the numbers that were written to disk.
    again = experiment.plot(json.loads(json.dumps(to_plain(numbers), allow_nan=False)))
    for before, after in zip(figure.axes, again.axes, strict=True):
        for one, other in zip(before.lines, after.lines, strict=True):
            np.testing.assert_allclose(one.get_xydata().astype(float), other.get_xydata().astype(float), rtol=1e-12)


def test_finite_n_loses_the_cold_betas():
    """n tokens do no better with a colder softmax, the mean field does."""
    concentration = load("concentration")
    row = concentration.token_runs(100, {}, 0)
    assert row["min_w2"][-1] > 1.05 * min(row["min_w2"])
    assert row["resolution"][-1] > row["resolution"][1]


def test_claims_can_fail():
    assert claim("x", 1.0, 1.1, 0.2)["holds"]
    assert not claim("x", 1.0, 1.3, 0.2)["holds"]
    assert not claim("x", float("nan"), 1.3, 0.2)["holds"]
    assert chance(claim("x", 1.0, -2.0, 0.5)) == 0.25
    assert chance(claim("x", 1.0, 0.0, 0.5)) is None
    assert chance(bound("x", 1.0, at_most=1.0)) is None
    assert bound("x", 1.0, at_most=1.0)["holds"]
    assert not bound("x", 1.1, at_most=1.0)["holds"]
    assert not bound("x", float("nan"), at_least=1.0)["holds"]
    assert bound("x", 1.1, at_least=1.0, at_most=2.0)["claim"] == "x (>= 1, <= 2)"
