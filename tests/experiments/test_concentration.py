"""The headline experiment, quick: every claim holds, the numbers are plain JSON, the figure is drawn."""

import json

import pytest
import torch

from attn_flow.attention import Attention
from attn_flow.dynamics.trajectory import Trajectory
from attn_flow.experiments import concentration
from attn_flow.prediction.limit_map import limit
from attn_flow.prediction.timeline import w2_curve
from attn_flow.transport.distances import wasserstein


@pytest.fixture(scope="module")
def numbers() -> dict:
    return concentration.compute(quick=True, seed=0)


def test_every_claim_holds(numbers: dict) -> None:
    missed = [f"{c['claim']}: {c['value']} instead of {c['expected']}" for c in numbers["claims"] if not c["holds"]]
    assert not missed
    assert len(numbers["claims"]) >= 35


def test_numbers_are_json(numbers: dict) -> None:
    json.dumps(numbers, allow_nan=False)


def test_figure(numbers: dict) -> None:
    figure = concentration.plot(numbers)
    assert len(figure.axes) == 9
    assert all(axis.get_title() for axis in figure.axes)


def test_phases_of_the_runs(numbers: dict) -> None:
    for run in numbers["mean_field"]["runs"]:
        names = [p["phase"] for p in run["phases"]]
        if run["beta"] == 1.0:
            assert names == ["spreading"]
        elif run["beta"] == "inf":
            assert names == ["concentrating", "metastable"]
        else:
            assert names[-2:] == ["metastable", "terminal"]


def test_finite_n_loses_the_cold_betas(numbers: dict) -> None:
    """n tokens do no better with a colder softmax, the mean field does."""
    for row in numbers["tokens"]:
        assert row["min_w2"][-1] > 1.05 * min(row["min_w2"])
        assert row["resolution"][-1] > row["resolution"][1]


def test_quadrature_nodes_integrate_the_density() -> None:
    cloud = concentration.nodes(400, 1.5)
    theta = torch.atan2(cloud.x[:, 1], cloud.x[:, 0])
    first = torch.special.i1(torch.tensor(1.0, dtype=torch.float64)) / torch.special.i0(torch.tensor(1.0).double())
    assert float((cloud.weights * torch.cos(theta - 1)).sum()) == pytest.approx(float(first), abs=1e-4)
    away = (cloud.x - torch.tensor([0.0707372, 0.997495], dtype=torch.float64)).norm(dim=-1)
    assert float(away.min()) < 1e-5  # refined towards the axis at 1.5


def test_two_atom_route_is_the_general_one() -> None:
    A = Attention.from_matrices(*(torch.diag(torch.tensor(m, dtype=torch.float64)) for m in ([3.0, 1.0], [1.0, 2.0])))
    x = torch.randn(2, 2, 30, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    x = x / x.norm(dim=-1, keepdim=True)
    weights = torch.rand(2, 30, dtype=torch.float64) + 0.1
    path = Trajectory(torch.arange(2.0), x, weights)
    target = limit(A).push_forward(x[0])
    slow = torch.stack([wasserstein(y, target, weights_x=weights, weights_y=weights) for y in x])
    assert torch.allclose(w2_curve(path, limit(A)), slow, atol=1e-9)
