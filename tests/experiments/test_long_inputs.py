"""Long inputs: what a length gives, on a small encoder of tables, and its claims and figure."""

import pytest
import torch

from attn_flow.experiments.encoders import long_inputs
from attn_flow.experiments.encoders.tables import TableEncoder


@pytest.fixture(scope="module")
def rows() -> list[dict]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = TableEncoder(layers=2, dim=16, heads=2, hidden=32).eval()
    with torch.no_grad():
        for layer in model.layers:
            layer.self_attn.in_proj_weight[:16] *= 0.1  # the queries: warm heads
    return [long_inputs.one_length(model, None, "tabpfn", n, 3, 0) for n in (64, 128)]


def test_warm_attention_over_exchangeable_rows_is_an_average(rows: list[dict]) -> None:
    for row in rows:
        assert torch.tensor(row["b"]).shape == (2, 3)
        assert long_inputs.mean_exponent(row) == pytest.approx(0.5, abs=0.1)  # three tables
        assert row["share_of_heads"] == 1
        assert row["logit_sd"] < 0.5


def test_clusters_are_doubled_until_the_goal(rows: list[dict]) -> None:
    for row in rows:
        assert row["sizes"] == [2 ** (i + 1) for i in range(len(row["sizes"]))]
        assert row["w2"] == sorted(row["w2"], reverse=True)
        assert row["w2"][-1] <= long_inputs.GOAL or row["sizes"][-1] == row["n"] // 2


def test_a_goal_that_is_not_reached_gives_no_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(long_inputs, "GOAL", -1.0)
    model = TableEncoder(layers=1, dim=16, heads=2, hidden=32).eval()
    assert long_inputs.one_length(model, None, "tabpfn", 32, 2, 0)["clusters"] is None


def test_claims_and_figure() -> None:
    row = {"b": [[0.2, 0.4], [0.3, 0.3]], "share_of_heads": 0.0, "logit_sd": 1.0, "sizes": [2, 4], "w2": [0.4, 0.2]}
    encoders = {"a": [row | {"n": 64, "clusters": 4.0}, row | {"n": 256, "clusters": 8.0}]}
    claims = long_inputs.claims(encoders)
    assert [c["value"] for c in claims] == pytest.approx([0.0, 0.5])
    figure = long_inputs.plot({"seed": 0, "inputs": 2, "encoders": encoders, "missing": []})
    assert figure.axes[1].lines[0].get_ydata().tolist() == [4 / 64, 8 / 256]
