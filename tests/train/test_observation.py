"""What a stack has learned, as the core tells it."""

from dataclasses import replace

import pytest
import torch

from attn_flow.prediction.limit_map import limit
from attn_flow.train import recipe
from attn_flow.train.observation import count_clusters, to_limit, what_was_learned
from attn_flow.transport.distances import wasserstein


def test_limits_and_clusters_are_the_cores_own() -> None:
    """W2 of a layer's path to its limit, one cloud and one token at a time."""
    r = replace(recipe("clusters"), tokens=5, dim=3, steps=4, horizon=2.0)
    task = r.make_task()
    stack = r.make_stack(**task.stack_options).eval()
    batch = task.held_out(3, torch.Generator().manual_seed(0))
    path = stack.paths(batch.x)[0][0]
    curve, _ = to_limit(stack, stack.attentions()[0], path)
    found = limit(stack.attentions()[0].to(torch.float64))
    for i in range(5):
        for b in range(3):
            t = i * 0.5 if found.frequencies else None
            expected = wasserstein(path[i, b].double(), found.push_forward(path[0, b].double(), t))
            assert float(curve[i, b]) == pytest.approx(float(expected), abs=1e-9)
    x = torch.tensor([[[1.0, 0.0], [0.99, 0.1], [-1.0, 0.0]], [[1.0, 0.0], [2.0, 0.0], [3.0, 0.1]]])
    assert count_clusters(x).tolist() == [2, 1]


def test_it_says_where_no_limit_is_established() -> None:
    r = replace(recipe("majority"), tokens=6, dim=6, placement="pre", geometry="euclidean")
    task = r.make_task()
    found = what_was_learned(r.make_stack(**task.stack_options), task)
    assert found.numbers["layers"][0]["w2"] is None
    assert "for tokens on the sphere" in found.numbers["layers"][0]["w2_missing"]
