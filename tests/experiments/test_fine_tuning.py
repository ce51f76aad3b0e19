"""The recipe of fine_tuning: its sentences, its summary and figure on made-up runs, and a tiny real run."""

from importlib.util import find_spec

import pytest
from matplotlib.figure import Figure

from attn_flow.experiments.encoders import fine_tuning
from attn_flow.experiments.encoders.fine_tuning import (
    HELD_OUT,
    OPTIONS,
    PAGES,
    TRAINING,
    fine_tune,
    mean_over_seeds,
    plot,
    sentences,
)


def test_no_sentence_is_on_both_sides() -> None:
    texts, y, held, held_y = sentences(0)
    assert (len(texts), len(held)) == (len(y), len(held_y)) == (TRAINING, HELD_OUT)
    assert not set(texts) & set(held)
    assert [held_y.count(i) for i in range(len(PAGES))] == [HELD_OUT // len(PAGES)] * len(PAGES)
    assert sentences(0)[0] == texts != sentences(1)[0]


def made_up(accuracy: float, seed: int) -> dict:
    numbers = {"first_gradient": 2.0, "largest_gradient": 9.0, "last_loss": 0.2, "beta_factors": [[2.0, 0.5]]}
    return {**OPTIONS[0], "seed": seed, "accuracy": accuracy, **numbers}


def test_the_summary_and_the_figure() -> None:
    row = mean_over_seeds([made_up(0.6, 0), made_up(0.8, 1), {**made_up(0.0, 0), "steps": 9}], OPTIONS[0])
    assert row["accuracy"] == pytest.approx(0.7)
    assert row["spread"] == pytest.approx(0.1)
    assert row["beta_moved"] == pytest.approx(0.6931, abs=1e-4)
    assert isinstance(plot({"table": [row], "claims": [], "updates": 1, "seeds": 2}), Figure)


def test_claims_can_fail(monkeypatch) -> None:
    told = {1.0: (0.7, 9.0), 2.0: (0.68, 20.0), 4.0: (0.25, 3000.0)}  # accuracy and gradient by horizon

    def made(options: dict, seed: int, updates: int) -> dict:
        accuracy, gradient = told[options["horizon"]]
        accuracy -= 0.1 * (options["beta_factor"] < 1)
        return {**made_up(accuracy, seed), **options, "largest_gradient": gradient}

    monkeypatch.setattr(fine_tuning, "fine_tune", made)
    assert all(c["holds"] for c in fine_tuning.compute()["claims"])
    told.update({1.0: (0.3, 9.0), 2.0: (0.1, 200.0), 4.0: (0.25, 3.0)})
    assert [c["holds"] for c in fine_tuning.compute()["claims"]] == [False, False, False, True, False]


@pytest.mark.slow
@pytest.mark.skipif(find_spec("accelerate") is None, reason="no accelerate")
def test_one_tiny_run_learns_beta() -> None:
    run = fine_tune(OPTIONS[5], seed=0, updates=2)
    assert run["first_gradient"] > 0
    assert any(factor != 1.0 for heads in run["beta_factors"] for factor in heads)
    assert fine_tuning.words(run) == "2 euler, T=2, beta x 1"
