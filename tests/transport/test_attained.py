"""Certificates of transport on problems that need every piece of them: a bound that lacks one is wrong here."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from attn_flow.transport import candidates, coupling, entropic, feasible, plans, solve
from attn_flow.transport.coupling import Ground, Plan

F64 = torch.float64
SQUARED = Ground(2.0, "euclidean")


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=F64)


def test_mass_that_a_plan_misses_is_part_of_its_gap(monkeypatch: pytest.MonkeyPatch) -> None:
    """One pair, so all that is missing would have gone the largest distance: the leak times it, exactly."""
    import ot

    missing = 1e-3
    short = lambda a, b, C, **_: (np.full((1, 1), 1 - missing), {"v": np.ones(1)})
    monkeypatch.setattr(ot, "emd", short)
    x, y, one = np.zeros((1, 2)), np.array([[3.0, 4.0]]), np.ones(1)
    plan = coupling.simplex(x, one, y, one, SQUARED)
    cost = float(plan.mass @ SQUARED.pairs(x[plan.i], y[plan.j]))
    assert plan.gap == pytest.approx(25 - cost)


def test_mass_that_a_sparse_plan_misses_is_part_of_its_gap(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same of the shortlist, on a cloud moved along the diagonal of its box."""
    sparse = candidates._sparse

    def short(*args: object) -> tuple[Plan, coupling.Array]:
        plan, u = sparse(*args)  # type: ignore[arg-type]
        return Plan(plan.i, plan.j, plan.mass * (1 - 1e-3), v=plan.v), u

    monkeypatch.setattr(candidates, "_sparse", short)
    monkeypatch.setattr(candidates, "DENSE", 4)
    x = normal(40, 2).numpy()
    a = np.full(40, 1 / 40)
    y = np.random.default_rng(0).permutation(x) + 10.0  # |s|^2 is common to all plans and left out of the solver's cost
    plan = candidates._solve(x, a, y, a, SQUARED, 1e-6, 0.0)
    cost = float(plan.mass @ SQUARED.pairs(x[plan.i], y[plan.j]))
    exact = float((a * SQUARED.pairs(x, x + 10.0)).sum())  # a translation is optimal
    assert exact - cost == pytest.approx(1e-3 * exact, rel=1e-6)
    assert plan.gap >= exact - cost


@pytest.mark.parametrize("d", [3, 9], ids=["tree", "rows"])
@pytest.mark.parametrize("k", [1, 4])
def test_a_search_that_rounds_is_still_below_every_reduced_cost(d: int, k: int) -> None:
    """Clouds far from zero, or one far point of high potential: neighbours are confused; the floor allows for it."""
    generator = np.random.default_rng(0)
    confused = 0
    for offset, far in ((1e7, 0.0), (0.0, 1e7)):
        x, y = (offset + generator.standard_normal((200, d)) for _ in range(2))
        v = generator.standard_normal(200)
        y[0, 0] += far
        v[0] += 0.9 * far**2
        costs = SQUARED.matrix(x, y) - v
        best = costs.argmin(1)
        exact = costs[np.arange(200), best]
        unit = 8 * np.finfo(float).eps * (np.abs(exact) + 2 * np.abs(v[best]))  # of the exact costs themselves
        reduced, _, floor = candidates.nearest(x, y, v, k, SQUARED)
        assert (floor <= exact + unit).all()
        confused += int((reduced.min(1) > exact + unit).sum())
    assert confused > 0 or k > 1  # else this proves nothing


def test_the_least_reduced_cost_of_the_interval_allows_for_rounding() -> None:
    """Far from zero the products lose digits, half of them upwards."""
    x, y, g = 1e6 + normal(100, 3), 1e6 + normal(100, 3, seed=1), normal(100, seed=2)
    exact = (torch.cdist(x, y, compute_mode="donot_use_mm_for_euclid_dist") ** 2 / 2 - g).amin(-1)
    assert bool(
        (
            feasible.least_reduced(x[None], y[None], g[None], torch.ones(1, 100, dtype=torch.bool), 1000)[0] <= exact
        ).all()
    )


@pytest.mark.parametrize("seed", range(8))
def test_the_interval_holds_from_any_potential(seed: int) -> None:
    """Potentials far from optimal: columns with too much mass, and a rest to be moved by the product plan."""
    x, y = normal(6, 2, seed=seed) - 1.0, normal(6, 2, seed=100 + seed) + 1.0
    a = torch.softmax(normal(6, seed=200 + seed), 0)
    b = torch.softmax(normal(6, seed=300 + seed), 0)
    exact = float(solve(x, y, weights_x=a, weights_y=b, method="simplex").distance) ** 2
    goal = torch.full((1,), 1e9, dtype=F64)  # the first interval, not a tightened one
    for size in (0.3, 1.0, 3.0):
        pair = (z[None] for z in (x, a, y, b, size * normal(6, seed=400 + seed)))
        low, high = feasible.interval(*pair, 0.5, goal, entropic.softmin, entropic.ENTRIES)
        assert low <= exact * (1 + 1e-12)
        assert high >= exact * (1 - 1e-12)


@pytest.mark.parametrize("blur", [0.05, 0.3, 1.0])
def test_the_error_of_the_estimate_covers_both_ends(blur: float) -> None:
    x, y = normal(60, 2), normal(60, 2, seed=1) * 0.7 + 0.5
    exact = solve(x, y, method="assignment").distance
    found = solve(x, y, method="sinkhorn", blur=blur, rtol=2.0)
    assert float((found.distance - exact).abs()) <= float(found.error)
    low, high = float(found.distance - found.error), float(found.distance + found.error)
    assert low <= float(exact) <= high


def test_what_merging_moved_is_counted_on_both_sides() -> None:
    """Pairs whose second point lies farther out: merging onto the first brings all of them in by the same length."""
    far, moved = 10.0, 0.5
    pair = torch.tensor([[far, 0.0], [far + moved, 0.0]], dtype=F64)
    origin = torch.zeros(2, 2, dtype=F64)
    weights = torch.tensor([1e-12, 1.0], dtype=F64)  # the second carries the mass
    for x, y, options in ((pair, origin, {"weights_x": weights}), (origin, pair, {"weights_y": weights})):
        found = solve(x, y, merge_tol=0.6, rtol=0.5, method="simplex", **options)
        assert found.method == "merged simplex"
        assert float(found.distance) == pytest.approx(far)
        assert float(found.error) == pytest.approx(moved)


@pytest.mark.parametrize("p", [1.0, 2.0, 3.0])
def test_a_gap_of_the_cost_as_an_error_of_the_distance(p: float) -> None:
    for distance, gap in ((2.0, 0.5), (2.0, 1.9), (1.0, 1.0), (0.0, 1e-6), (0.1, 7.0)):
        expected = distance - max(distance**p - gap, 0.0) ** (1 / p) if distance**p > gap else gap ** (1 / p)
        assert plans.gap_in_distance(distance, gap, p) == pytest.approx(expected)
    tiny = plans.gap_in_distance(1.0, 1e-20, p)
    assert tiny == pytest.approx(1e-20 / p, rel=1e-9)  # where the difference would be zero


def test_an_error_beyond_rtol_is_refused() -> None:
    """Certified by the shortlist's gap, made large."""
    good = lambda error: plans.good_enough(torch.tensor(2.0), error, 0.01, 4.0, 2.0)
    assert good(0.019)
    assert not good(0.021)
    assert plans.good_enough(torch.tensor(0.0), 3e-6, 0.01, 4.0, 1.0)  # rounding: 1e-6 of the extent
    assert not plans.good_enough(torch.tensor(0.0), 5e-6, 0.01, 4.0, 1.0)
