"""The experiment on stacks that reach the limit of their own weights: its measure, its baselines and its summary."""

import pytest
import torch

from attn_flow import Attention, Sphere
from attn_flow.experiments.papers import trained_limit
from attn_flow.experiments.papers.trained_limit import distances, rotated
from attn_flow.prediction import zero_temperature_flow

ATTENTION = Attention.from_matrices(
    torch.eye(3).double(), torch.diag(torch.tensor([3.0, 1.0, 0.5])).double(), beta=20.0
)


def test_tokens_at_the_limit_of_their_weights_are_told_from_others() -> None:
    x = Sphere().uniform((2, 60), 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    t = torch.tensor([0.0, 1.0, 6.0], dtype=torch.float64)
    path = torch.stack([x, *zero_temperature_flow(ATTENTION, x, t).x[1:]])
    assert distances(ATTENTION, t, path)["w2"] < 0.01
    generator = torch.Generator().manual_seed(0)
    assert distances(rotated(ATTENTION, generator), t, path)["w2"] > 0.5


@pytest.mark.slow
def test_a_quick_run_is_measured_and_drawn() -> None:
    numbers = trained_limit.compute(quick=True)
    assert len(numbers["claims"]) == 5
    assert {claim["source"] for claim in numbers["claims"]} == {"observed"}
    assert len(trained_limit.plot(numbers).axes) == 3
    run = numbers["runs"][0]
    assert run["trained"]["w2"] > 0
    assert run["trained"]["accuracy"] > run["untrained"]["accuracy"] - 0.1
