"""A grid of flows: its rows are those of single runs, it continues after a kill, and it is a table and a figure."""

import json
import math
import sys
from dataclasses import replace

import pytest
import torch

from attn_flow import Attention, Cloud, UniformSphere, flow, limit, phases, sweep
from attn_flow.prediction import starting_cloud

G, V = torch.diag(torch.tensor([3.0, 1.0])).double(), torch.diag(torch.tensor([1.0, 2.0])).double()
ATTENTION = Attention.from_matrices(G, V)


def test_every_row_is_a_run_of_its_own() -> None:
    others = {"exit": ATTENTION, "identity": Attention.identity(2)}
    result = sweep(others, 4.0, betas=[5.0, math.inf], n=[20, 30], seeds=[0, 1], h=0.2, clouds=random_cloud)
    assert len(result.rows) == 16
    assert repr(result) == "Sweep(16 runs: 2 beta x 2 n x 2 attention x 2 seed, 101 times to 4)"
    for row in (result.rows[2], result.rows[-1]):
        attention = others[row["attention"]]
        attention = replace(attention, beta=row["beta"]).to(torch.float64)
        path = flow(attention, random_cloud(row["n"], row["seed"]), result.t, h=0.2)
        expected = phases(path, limit(attention))
        torch.testing.assert_close(torch.tensor(row["w2"], dtype=torch.float64), expected.w2, atol=1e-9, rtol=1e-9)
        assert row["t_min"] == pytest.approx(float(expected.t_min))


def random_cloud(n: int, seed: int):
    return starting_cloud(2, n, seed, random=True)


def test_noise_depends_on_the_seed_alone() -> None:
    options = {"betas": [5.0], "noise": [0.3], "n": [20], "h": 0.2}
    both, second = sweep(ATTENTION, 1.0, seeds=[1, 2], **options), sweep(ATTENTION, 1.0, seeds=[2], **options)
    assert both.rows[1]["w2"] == pytest.approx(second.rows[0]["w2"], abs=1e-12)
    assert both.rows[0]["w2"] != both.rows[1]["w2"]
    assert both.rows[0]["t_min_predicted"] is None  # predictions are for the flow without noise


def test_a_sweep_continues_after_a_kill(tmp_path, monkeypatch) -> None:
    def interrupted(n: int, seed: int):
        if n == 12:
            raise KeyboardInterrupt
        return starting_cloud(2, n)

    options = {"betas": [5.0, 50.0, math.inf], "h": 0.2}
    whole = sweep(ATTENTION, 2.0, n=[10, 12], **options)
    with pytest.raises(KeyboardInterrupt):
        sweep(ATTENTION, 2.0, n=[10, 12], clouds=interrupted, folder=tmp_path, **options)
    stored = json.loads((tmp_path / "sweep.json").read_text())
    assert [[row["n"] for row in rows] for rows in stored.values()] == [[10, 10], [10]]
    result = sweep(ATTENTION, 2.0, n=[10, 12], folder=tmp_path, **options)
    assert result.rows == whole.rows
    for rows in stored.values():
        rows[0]["clusters"] = 99
    (tmp_path / "sweep.json").write_text(json.dumps(stored))
    again = sweep(ATTENTION, 2.0, n=[10], folder=tmp_path, **options)
    assert [row["clusters"] for row in again.rows][::2] == [99, 99]  # finished batches are not run again
    equal = lambda n, seed: starting_cloud(2, n, random=True)
    weighted = lambda n, seed: Cloud(equal(n, seed).x, torch.ones(n))  # quadrature nodes have no sampling noise
    context = ATTENTION.with_context(UniformSphere(2, 5.0))
    plain = [(ATTENTION, t, clouds) for clouds in (None, equal, weighted) for t in (2.0, 3.0)]
    for attention, t, clouds in (*plain, (context, 3.0, weighted)):  # each is another run
        grid = {"betas": [300.0], "n": [10], "clouds": clouds, "h": 0.2}
        assert sweep(attention, t, folder=tmp_path, **grid).rows == sweep(attention, t, **grid).rows
    monkeypatch.setattr(sys.modules["attn_flow.prediction.sweep"], "source_digest", lambda: "newer code")
    assert sweep(ATTENTION, 2.0, n=[10], folder=tmp_path, **options).rows == whole.rows[:3]


def test_padding_and_the_weights_of_later_clouds_count() -> None:
    def padded(n: int, seed: int) -> Cloud:
        x = torch.cat([random_cloud(n, seed).x, torch.zeros(3, 2)])
        return Cloud(x, mask=torch.arange(n + 3) < n)

    def weighted(n: int, seed: int) -> Cloud:  # of unequal weights from the second seed on
        x = random_cloud(n, seed).x
        return Cloud(x, 1.0 + torch.arange(n) * seed if seed else None)

    options = {"betas": [5.0], "n": [20], "h": 0.2}
    plain = sweep(ATTENTION, 1.0, clouds=random_cloud, seeds=[0, 1], **options)
    masked = sweep(ATTENTION, 1.0, clouds=padded, seeds=[0, 1], **options)
    for one, other in zip(masked.rows, plain.rows):
        assert one["w2"] == pytest.approx(other["w2"], abs=1e-9)
        assert (one["unmet"], one["clusters"]) == (other["unmet"], other["clusters"])
    alone = sweep(ATTENTION, 1.0, clouds=weighted, seeds=[1], **options)
    assert alone.rows[0]["w2"] != plain.rows[1]["w2"]
    both = sweep(ATTENTION, 1.0, clouds=weighted, seeds=[0, 1], **options)
    assert both.rows[1]["w2"] == pytest.approx(alone.rows[0]["w2"], abs=1e-9)


def test_table_and_figure(tmp_path) -> None:
    result = sweep(ATTENTION, 8.0, betas=[10.0, 100.0], n=[100], seeds=[0, 1], h=0.2)
    assert [row["beta"] for row in result.rows] == [10, 10, 100, 100]
    assert max(row["w2_min"] for row in result.rows[2:]) < min(row["w2_min"] for row in result.rows[:2])
    result.to_csv(tmp_path / "rows.csv")
    assert (tmp_path / "rows.csv").read_text().count("\n") == 5
    least, times = result.plot().axes
    assert [line.get_ydata()[0] for line in times.lines if line.get_label() == "predicted"] == pytest.approx(
        [limit(ATTENTION).t_min(10.0)]
    )
    assert least.get_xscale() == "log"


def test_attention_without_a_limit_has_clusters_only() -> None:
    (row,) = sweep(Attention.identity(2, kind="unnormalised"), 3.0, betas=[1.0], n=[20], h=0.1).rows
    assert row["w2_min"] is None
    assert row["clusters"] >= 1


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"betas": []}, "the grid is empty"),
        ({"seeds": []}, "the grid is empty"),
        ({"noise": [-1.0]}, "noise"),
        ({"n": [0]}, "n = 0, expected an integer"),
        ({"attentions": Attention.identity(2, torch.tensor([1.0, 2.0]))}, "attention '0' has several .* use betas="),
        ({"attentions": Attention.from_matrices(torch.stack([G, V])[:, None], V)}, "attention '0' has several weights"),
        ({"attentions": {}}, "the grid is empty"),
    ],
)
def test_wrong_grids_are_refused(options, words) -> None:
    with pytest.raises(ValueError, match=words):
        sweep(**({"attentions": ATTENTION, "t": 1.0, "n": [5]} | options))


@pytest.mark.parametrize(("d", "random", "has_weights"), [(2, False, True), (3, False, True), (5, False, False)])
def test_starting_clouds_have_the_mean_of_their_distribution(d, random, has_weights) -> None:
    cloud = starting_cloud(d, 4000, random=random)
    assert (cloud.weights is not None) == has_weights
    direction = torch.arange(1, d + 1).double()
    mean = cloud.mean
    assert torch.cosine_similarity(mean, direction, dim=0) > 0.99
    assert starting_cloud(d, 400, random=True, seed=1).weights is None
