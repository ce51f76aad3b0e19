"""Every experiment of the papers: its quick run holds all its claims, its numbers are plain, its plot is a figure."""

import json
from pathlib import Path

import numpy as np
import pytest
from matplotlib.figure import Figure

from attn_flow.base.files import plain
from attn_flow.experiments import NAMES, load, title
from attn_flow.experiments.claims import bound, chance, claim

ELSEWHERE = {
    "concentration",
    "wrapped_layer",
    "trained_stacks",
    "mean_field",
    "zoo",
    "cold_heads",
    "fine_tuning",
}  # their own tests


SLOW = {"layer_jacobians", "gap_counting"}
README = Path(__file__).parents[2] / "experiments" / "README.md"


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=[pytest.mark.slow] if n in SLOW else []) for n in NAMES if n not in ELSEWHERE],
)
def test_quick_run(name):
    experiment = load(name)
    numbers = experiment.compute(quick=True, seed=0)
    failed = [c for c in numbers["claims"] if not c["holds"]]
    assert failed == []
    assert len(numbers["claims"]) >= 3
    for c in numbers["claims"]:
        assert set(c) == {"claim", "value", "expected", "tolerance", "holds"}
    weak = [c["claim"] for c in numbers["claims"] if (chance(c) or 0) > 0.05]
    listed = README.read_text().partition("## What chance would give")[2]
    assert not weak or f"| `{name}` |" in listed, weak
    text = json.dumps(plain(numbers), allow_nan=False)
    figure = experiment.plot(numbers)
    assert isinstance(figure, Figure)
    assert all(axis.get_xlabel() for axis in figure.axes if axis.get_title())
    # the same figure can be drawn again from the numbers that were written to disk
    again = experiment.plot(json.loads(text))
    for before, after in zip(figure.axes, again.axes, strict=True):
        for one, other in zip(before.lines, after.lines, strict=True):
            np.testing.assert_allclose(one.get_xydata().astype(float), other.get_xydata().astype(float), rtol=1e-12)
    assert 20 < len(title(name)) <= 117


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
