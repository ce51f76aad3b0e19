"""The mean-field limit in an encoder of tables: its parts against other ways to compute them, and the real one."""

import json
import math
from pathlib import Path

import pytest
import torch
from matplotlib.figure import Figure
from torch import Tensor

from attn_flow.base.files import to_plain
from attn_flow.experiments.encoders import fetched, mean_field
from attn_flow.experiments.encoders.chaos import (
    DISTRIBUTIONS,
    exponent,
    growth,
    moved,
    passive_error,
    size,
    spread_of,
    two_samples,
)
from attn_flow.experiments.encoders.tables import TableEncoder
from attn_flow.experiments.parts import kept_part


@pytest.fixture
def model() -> TableEncoder:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        found = TableEncoder(layers=3, dim=32, heads=2, hidden=64).double().eval()
        for p in found.parameters():  # biases are zero at first, and attention nearly uniform
            torch.nn.init.normal_(p, std=0.3)
    return found.requires_grad_(False)


def rows(model: TableEncoder, n: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    return two_samples(model, DISTRIBUTIONS[0], n, generator)


def test_tokens_in_their_own_field_are_the_encoder(model: TableEncoder, generator: torch.Generator) -> None:
    A, _ = rows(model, 40, generator)
    x = A
    for layer in model.layers:
        x = moved(layer, x, x)
    torch.testing.assert_close(x, model(A[None])[0], rtol=0, atol=1e-12)
    errors = passive_error(model, A, A)
    assert max(map(max, errors.values())) < 1e-13


def test_the_error_is_what_was_carried_and_what_the_field_adds(model: TableEncoder, generator: torch.Generator) -> None:
    errors = passive_error(model, *rows(model, 40, generator))
    assert errors["carried"][0] == 0
    for whole, carried_on, added in zip(*errors.values()):
        assert abs(carried_on - added) - 1e-12 <= whole <= carried_on + added + 1e-12
        assert added > 1e-3


def test_a_field_of_more_rows_errs_less_and_another_distribution_does_not(model: TableEncoder) -> None:
    def last(n: int, baseline: str) -> float:
        runs = [two_samples(model, DISTRIBUTIONS[1], n, torch.Generator().manual_seed(s), baseline) for s in range(4)]
        return sum(passive_error(model, *run)["error"][-1] for run in runs)

    assert last(512, "") < 0.5 * last(32, "")  # theory: 1/4
    assert last(512, "other distribution") > 0.5 * last(32, "other distribution")


def test_exponent_of_a_power_law_and_its_error() -> None:
    sizes = [64, 256, 1024]
    slope, error = exponent(sizes, [[3 / math.sqrt(n)] * 4 for n in sizes])
    assert slope == pytest.approx(-0.5, abs=1e-12)
    assert error == pytest.approx(0, abs=1e-12)
    # seeds +-10%: a mean of two is off by sqrt(2) .1 / sqrt(2) = .1, the slope by that over |log n - mean|
    slope, error = exponent(sizes, [[0.9 / n, 1.1 / n] for n in sizes])
    assert slope == pytest.approx(-1, abs=1e-6)
    assert error == pytest.approx(0.1 / (math.log(4) * math.sqrt(2)), rel=1e-6)


def test_growth_is_the_derivative_of_the_layers(model: TableEncoder, generator: torch.Generator) -> None:
    """The product over layers against one forward-mode derivative through all of them, in float64."""
    A = torch.randn(12, 32, generator=generator).double()
    start = torch.randn(A.shape, generator=torch.Generator().manual_seed(5)).to(A)
    start = start / size(start)
    found = growth(model, A, torch.Generator().manual_seed(5))

    def through(x: Tensor) -> Tensor:
        for layer in model.layers:
            x = moved(layer, x, x)
        return x

    h = 1e-5 * spread_of(A)  # central: error h^2, beside the STEP of `growth`
    tangent = (through(A + h * start) - through(A - h * start)) / (2 * h)
    expected = size(tangent) * spread_of(A) / spread_of(through(A))
    assert math.prod(found["collective"]) == pytest.approx(expected, rel=1e-2)
    assert found["passive"] != found["collective"]


def test_a_part_is_computed_once_for_the_same_options(tmp_path: Path) -> None:
    calls = []
    run = lambda: calls.append(1) or {"x": torch.tensor([1.0, math.inf])}
    for options in ({"n": 1}, {"n": 1}, {"n": 2}):
        assert kept_part(tmp_path, "a", options, run) == {"x": [1.0, math.inf]}
    assert len(calls) == 2
    assert kept_part(None, "a", {"n": 2}, run) == {"x": [1.0, math.inf]}
    assert len(calls) == 3


def test_without_the_weights_an_untrained_encoder_is_run_and_said_to_be(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("ATTN_FLOW_CACHE", str(tmp_path / "empty"))
    numbers = mean_field.compute(quick=True, parts=tmp_path / "parts")
    assert numbers["trained"] is False
    assert numbers["claims"]
    assert all(c["holds"] for c in numbers["claims"])
    figure = mean_field.plot(json.loads(json.dumps(to_plain(numbers), allow_nan=False)))
    assert isinstance(figure, Figure)
    assert all(axis.get_xlabel() for axis in figure.axes)


@pytest.mark.slow
def test_tabpfn() -> None:
    """The real one, quick: errors fall with n, and not in the field of another distribution."""
    if fetched("tabpfn") is None:
        pytest.skip("tabpfn is not fetched: python -m attn_flow.experiments.encoders tabpfn")
    numbers = mean_field.compute(quick=True)
    for run in numbers["distributions"].values():
        assert run["exponent"][1][0] < -0.3
        assert run["baselines"]["other distribution"]["exponent"][-1][0] > -0.15
