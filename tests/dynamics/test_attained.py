"""The numbers by which steps and mergers decide: each case is at the edge, where another number decides otherwise."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from attn_flow import Adaptive, Attention, Euclidean, Sphere, flow
from attn_flow.dynamics.distributed import ALONE
from attn_flow.dynamics.merging import Merged

F64 = torch.float64


def resting_pair(distance: float) -> tuple[Attention, Tensor]:
    """Two tokens of R that do not move: at beta = 0 both follow their mean, which is 0."""
    return Attention.identity(1, 0.0, dtype=F64), torch.tensor([[-distance / 2], [distance / 2]], dtype=F64)


@pytest.mark.parametrize(("distance", "left"), [(5.0, 1), (9.0, 1), (11.0, 2), (60.0, 2)])
def test_tokens_merge_within_ten_tolerances_and_not_beyond(distance: float, left: int) -> None:
    """Over 200 sweeps, whose grids are shifted: any pair closer than a cell shares one of them at some time."""
    attention, x0 = resting_pair(distance * 1e-3)
    step = Adaptive(tol=1e-3, largest=0.1)
    assert flow(attention, x0, [0, 20.0], step=step, geometry=Euclidean()).about["tokens_left"] == left


def test_tokens_that_differ_by_rounding_merge_though_they_seem_to_part() -> None:
    x = torch.tensor([[1.0], [1.0 + 4 * torch.finfo(F64).eps], [2.0]], dtype=F64)
    held = Merged.start(x, torch.full((3,), 1 / 3, dtype=F64))
    assert held.merge(x, x, 0.1, Euclidean(), 0).x.shape == (2, 1)


def test_tokens_that_part_stay_two() -> None:
    x = torch.tensor([[1.0], [1.001]], dtype=F64)
    held = Merged.start(x, torch.full((2,), 0.5, dtype=F64))
    assert held.merge(x, 5 * x, 0.1, Euclidean(), 0) is held
    assert held.merge(x, -5 * x, 0.1, Euclidean(), 0).x.shape == (1, 1)


@pytest.mark.parametrize(("h", "largest", "first"), [(0.02, math.inf, 0.02), (0.5, 0.1, 0.1)])
def test_the_first_adaptive_step_is_h_or_the_largest(h: float, largest: float, first: float) -> None:
    """The second stage of dopri5 is asked a fifth of a step later."""
    asked = []

    def schedule(t: float) -> Attention:
        asked.append(t)
        return Attention.identity(3, 1.0, dtype=F64)

    x0 = Sphere().uniform(4, 3, generator=torch.Generator().manual_seed(0), dtype=F64)
    flow(schedule, x0, [0, 1.0], step=Adaptive(tol=1e-2, largest=largest), h=h)
    assert min(t for t in asked if t > 0) == pytest.approx(first / 5)


def test_a_time_just_after_another_costs_one_step() -> None:
    """The step cut short to hit it is no reason to start again from small ones."""
    attention, x0 = resting_pair(1.0)
    evaluations = [
        flow(attention, x0, times, step=Adaptive(merge=False), geometry=Euclidean()).about["evaluations"]
        for times in ([0, 1e4, 2e4], [0, 1e4, 1e4 + 1e-6, 2e4])
    ]
    assert evaluations[1] == evaluations[0] + 6


def test_the_scaled_error_is_the_worst_tokens() -> None:
    step = Adaptive(tol=1e-3)
    error = torch.tensor([[3e-3, 4e-3], [0.0, 0.0], [0.0, 0.0]], dtype=F64)
    assert step.scaled_error(error, 0.01 * torch.ones(3, 2, dtype=F64)) == pytest.approx(5.0)  # below 1 it is absolute
    assert step.scaled_error(error, torch.tensor([[6.0, 8.0]], dtype=F64)) == pytest.approx(0.5)


def test_the_next_step_is_gustafssons() -> None:
    step = Adaptive()
    assert step.next_step(0.1, 0.5) == pytest.approx(0.09 * 0.5**-0.2)
    # 0.9 h (h/h') (error'/error^2)^(1/5), less than the plain rule: errors grow.
    expected = 0.9 * 0.1 * (0.1 / 0.2) * (0.3 / 0.5**2) ** 0.2
    assert step.next_step(0.1, 0.5, (0.2, 0.3)) == pytest.approx(expected)
    assert step.next_step(0.1, 0.5, (0.01, 0.3)) == pytest.approx(0.09 * 0.5**-0.2)  # never more than the plain rule
    assert step.next_step(0.1, 0.0) == pytest.approx(0.5)
    assert step.next_step(0.1, 1e9) == pytest.approx(0.02)
    assert Adaptive(largest=0.3).next_step(0.1, 0.0) == pytest.approx(0.3)


def test_a_process_alone_gathers_what_it_has() -> None:
    x = torch.ones(2, 3)
    assert ALONE.gathered_objects("mine") == ["mine"]
    assert torch.equal(ALONE.gathered(x), x[None])
    assert ALONE.total(x) is x
    assert ALONE.maxima(x) is x
    assert ALONE.largest(3.0) == 3.0
