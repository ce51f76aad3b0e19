"""The numbers behind trained_stacks, on made-up runs with known answers, and one tiny real one."""

from __future__ import annotations

import pytest

from attn_flow.experiments.papers import trained_stacks
from attn_flow.experiments.papers.trained_stacks import COLDER, LONGER, correlation, one, plot, spread, summarise


def made_up(accuracy: float, clusters: float, horizon: float, seed: int) -> dict[str, object]:
    def entry(a: float, c: float) -> dict[str, float]:
        return {"accuracy": a, "clusters": c, "w2": 1 - c / 100, "along_V": 0.7, "resolution": 3.0}

    return {
        "depth": 1,
        "horizon": horizon,
        "beta": 4.0,
        "seed": seed,
        "twin": accuracy - 0.1,
        "start": entry(0.5, 1.0 if horizon == 3 else 9.0),
        "trained": entry(accuracy, clusters),
        "longer": [entry(accuracy if c <= 1 else 0.6, clusters / max(1, c)) for c in LONGER],
        "colder": [entry(accuracy if c >= 1 else 0.6, clusters) for c in COLDER],
    }


def test_summary_of_known_runs() -> None:
    runs = [made_up(0.9, 8.0, 0.5, 0), made_up(0.8, 6.0, 0.5, 1), made_up(0.6, 1.0, 3.0, 0)]
    numbers = summarise(runs, [0, 1], 100)
    assert numbers["learned"] == 2
    assert numbers["curves"]["longer"]["accuracy"][LONGER.index(1.0)]["mean"] == pytest.approx(0.85)
    assert numbers["table"][0]["trained_clusters"] == {"mean": 7.0, "low": 6.0, "high": 8.0}
    assert numbers["correlation"]["clusters"]["value"] == pytest.approx(1.0)
    assert numbers["chance"] == pytest.approx(1 - (1 + 10 / 3) / 11)
    held = {c["claim"]: c["holds"] for c in numbers["claims"]}
    assert all(held.values())
    assert "accuracy falls from 0.85 to 0.60" in numbers["finding"]
    kept = [made_up(0.9, 8.0, 0.5, 0), made_up(0.8, 1.0, 3.0, 1)]
    for r in kept:
        r["longer"] = [r["trained"]] * len(LONGER)  # running longer changes nothing: the claim must fail
    lost = [c for c in summarise(kept, [0, 1], 100)["claims"] if not c["holds"]]
    assert any("times longer: accuracy lost" in c["claim"] for c in lost)
    assert len(plot(numbers).axes) == 6
    with pytest.raises(ValueError, match=r"none of 1 stacks reached accuracy 0.75 in 7 updates"):
        summarise([made_up(0.6, 1.0, 3.0, 0)], [0], 7)


def test_correlation_and_spread() -> None:
    found = correlation([1.0, 2, 3, 4, 5, 6], [1.0, 4, 9, 16, 25, 36])
    assert found["value"] == pytest.approx(1.0)
    assert found["low"] == pytest.approx(1.0)
    mixed = correlation([1.0, 2, 3, 4, 5, 6], [2.0, 6, 1, 5, 3, 4])
    assert mixed["value"] == pytest.approx(1 - 6 * (1 + 16 + 4 + 1 + 4 + 4) / (6 * 35))
    assert mixed["low"] < mixed["value"] < mixed["high"]
    assert spread([1.0, 3.0]) == {"mean": 2.0, "low": 1.0, "high": 3.0}


def test_one_tiny_run_measures_everything() -> None:
    options = {"depth": 2, "horizon": 0.5, "beta": 4.0}
    r = one(options, seed=0, updates=2, longer_by=(1.0, 8.0), beta_factors=(1.0,), clouds=4)
    assert r["trained"] == r["longer"][0] == r["colder"][0]
    assert r["longer"][1]["clusters"] < r["longer"][0]["clusters"]
    assert 0 < r["trained"]["w2"] < 2


@pytest.mark.slow
def test_quick_claims_hold() -> None:
    numbers = trained_stacks.compute(quick=True)
    assert [c["claim"] for c in numbers["claims"] if not c["holds"]] == []
