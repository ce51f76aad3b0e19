"""The batched Sinkhorn distances of an accelerator, here on the CPU: sums as written, pairs as alone, proved errors."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from attn_flow.transport import batched, entropic, feasible, solve

F64 = torch.float64
BLUR, SCALING = 0.3, 0.7


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=F64)


@pytest.fixture
def pairs() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Three pairs x (3, 7, 2), y (3, 5, 2) of diameter below 1; the last point of the second x and y has no mass."""
    x, y = 0.1 * normal(3, 7, 2), 0.1 * normal(3, 5, 2, seed=1) + 0.1
    a, b = torch.softmax(normal(3, 7, seed=2), -1), torch.softmax(normal(3, 5, seed=3), -1)
    a[1, -1] = b[1, -1] = 0.0
    return x, a / a.sum(-1, keepdim=True), y, b / b.sum(-1, keepdim=True)


@pytest.mark.parametrize("entries", [1, 40, 1 << 24])
def test_the_softmin_is_its_formula(pairs, monkeypatch, entries):
    """Whatever part of the matrix is held at once."""
    monkeypatch.setattr(batched, "ENTRIES", entries)
    x, _, y, b = pairs
    eps, h = 0.02, b.log() + normal(3, 5, seed=4)
    found, mean = batched.softmin(eps, x, y, h)
    for k in range(3):
        for i in range(7):
            weights = [
                math.exp(float(h[k, j]) - float((x[k, i] - y[k, j]).square().sum()) / (2 * eps)) for j in range(5)
            ]
            assert float(found[k, i]) == pytest.approx(-eps * math.log(sum(weights)), abs=1e-13)
            expected = sum(w * y[k, j] for j, w in enumerate(weights)) / sum(weights)
            assert torch.allclose(mean[k, i], expected, rtol=0, atol=1e-13)


def test_the_divergence_of_a_batch_is_that_of_each_pair(pairs):
    """Values, gradients and potentials of the pair alone, whose points without mass are left out."""
    S, (dx, dy, da, db), g = batched.divergence(*pairs, BLUR, SCALING)
    for k, (x, a, y, b) in enumerate(zip(*pairs)):
        i, j = a > 0, b > 0
        alone = entropic.divergence(x[i], a[i], y[j], b[j], BLUR, SCALING, 1.0)
        assert float(S[k]) == pytest.approx(alone.value, abs=1e-13)
        for found, expected in ((dx[k][i], alone.dx), (dy[k][j], alone.dy), (da[k][i], alone.da), (g[k][j], alone.g)):
            assert torch.allclose(found, expected, rtol=0, atol=1e-13)
        assert torch.allclose(db[k][j], alone.db, rtol=0, atol=1e-13)
        assert not dx[k][~i].any()


def interval(*given: Tensor, blur: float, goal: Tensor) -> tuple[Tensor, Tensor]:
    return feasible.interval(*given, blur, goal, batched.softmin, batched.ENTRIES)


def exact(x: Tensor, a: Tensor, y: Tensor, b: Tensor) -> Tensor:
    return solve(x, y, weights_x=a, weights_y=b, method="simplex").distance


@pytest.mark.parametrize("seed", range(4))
def test_the_interval_of_every_pair_holds_from_any_potential(pairs, monkeypatch, seed):
    """It is the one of the pair alone: columns with too much mass, a rest moved by the product plan, points unseen."""
    monkeypatch.setattr(feasible, "TIGHTEN", 1)  # the first interval, not a tightened one
    x, a, y, b = pairs
    truth = exact(*pairs).square()
    for size in (0.0, 0.01, 0.1):
        g = size * normal(3, 5, seed=10 + seed)
        low, high = interval(x, a, y, b, g, blur=BLUR, goal=torch.full((3,), 1e-9, dtype=F64))
        assert bool((low <= truth * (1 + 1e-12)).all())
        assert bool((high >= truth * (1 - 1e-12)).all())
        for k in range(3):
            i, j = a[k] > 0, b[k] > 0
            pair = [z[None] for z in (x[k][i], a[k][i], y[k][j], b[k][j], g[k][j])]
            alone = interval(*pair, blur=BLUR, goal=torch.full((1,), 1e9, dtype=F64))
            assert (float(low[k]), float(high[k])) == pytest.approx(tuple(map(float, alone)), abs=1e-13)


def test_the_interval_is_attained_where_one_point_goes_to_one(pairs):
    """One plan, one potential: both ends are the distance, but for the slack of rounding."""
    x, _, y, _ = pairs
    one = torch.ones(3, 1, dtype=F64)
    low, high = interval(x[:, :1], one, y[:, :1], one, 0 * one, blur=BLUR, goal=torch.full((3,), 1e-9, dtype=F64))
    truth = (x[:, 0] - y[:, 0]).square().sum(-1)
    slack = 2 * 2 * 4 * 4 * torch.finfo(F64).eps * 4  # both transforms, twice, of sizes below 4
    assert bool((low <= truth + 1e-15).all())
    assert bool((truth - low <= slack).all())
    assert torch.allclose(high, truth, rtol=0, atol=1e-15)


def test_the_interval_is_tightened_until_every_pair_is_narrow_enough(pairs, monkeypatch):
    reads = []
    read = batched.checks.read
    monkeypatch.setattr(batched.checks, "read", lambda *z: reads.append(z) or read(*z))
    x, a, y, b = pairs
    g = 0.1 * normal(3, 5, seed=10)
    widths = [
        (high - low).clone()
        for low, high in (interval(x, a, y, b, g, blur=0.1, goal=torch.full((3,), goal)) for goal in (1e9, 1e-9))
    ]
    assert len(reads) == 1 + 1 + feasible.TIGHTEN // 10
    assert bool((widths[1] < widths[0]).all())
    goal = torch.tensor([1e9, 1e9, float(widths[0][2]) / 2])  # one pair that is not narrow enough is enough
    low, high = interval(x, a, y, b, g, blur=0.1, goal=goal)
    assert len(reads) > 7
    assert float(high[2] - low[2]) < float(widths[0][2])


@pytest.mark.parametrize("entries", [1, 1 << 24])
def test_the_least_reduced_cost_is_below_every_one_of_them(entries):
    """Far from zero products lose digits, half of them upwards; points that are not there do not count."""
    x, y, g = 1e6 + normal(2, 60, 3), 1e6 + normal(2, 40, 3, seed=1), normal(2, 40, seed=2)
    there = normal(2, 40, seed=3) > -1
    costs = torch.cdist(x, y, compute_mode="donot_use_mm_for_euclid_dist").square() / 2 - g[:, None]
    least = costs.masked_fill(~there[:, None], math.inf).amin(-1)
    found = feasible.least_reduced(x, y, torch.where(there, g, 1e300), there, entries)
    assert bool((found <= least).all())
    rounding = 2 * 4 * 5 * torch.finfo(F64).eps * 2 * 3 * 1.1e12
    assert bool((least - found <= rounding).all())


@pytest.mark.parametrize("blur", [None, 0.05])
@pytest.mark.parametrize("method", ["sinkhorn", "geomloss"])
def test_distances_of_a_batch_are_within_their_error(method, blur):
    """Pairs of very different sizes, one of them a single place; units are given back."""
    if method == "geomloss":
        pytest.importorskip("geomloss")
    x, y = normal(4, 30, 2), 0.7 * normal(4, 30, 2, seed=1) + 0.5
    if blur is None:
        x[1], y[1] = 100 * x[1], 100 * y[1]
        x[2] = y[2] = torch.tensor([3.0, 4.0], dtype=F64)
    a = torch.full((4, 30), 1 / 30, dtype=F64)
    distance, error = batched.certified(x, a, y, a, 0.2, blur, 0.7, method, F64)
    truth = exact(x, a, y, a)
    assert bool(((distance - truth).abs() <= error).all())
    assert bool((error <= 0.2 * distance).all())
    if blur is None:
        assert float(distance[2]) == float(error[2]) == 0


def test_a_batch_of_equal_places_has_no_distance():
    x = torch.ones(2, 3, 2, dtype=F64, requires_grad=True)
    a = torch.full((2, 3), 1 / 3, dtype=F64)
    distance, error = batched.certified(x, a, x.detach(), a, 0.1, None, 0.7, "sinkhorn", F64)
    assert not distance.any()
    assert not error.any()
    distance.sum().backward()
    assert x.grad is not None


def test_the_pair_that_is_not_proved_is_named():
    x = torch.stack([normal(20, 2), torch.cat([normal(10, 2), normal(10, 2) + 1e4])])
    y = torch.stack([normal(20, 2, seed=1) + 3, x[1] + 1e-3])
    a = torch.full((2, 20), 1 / 20, dtype=F64)
    with pytest.raises(ValueError, match=r"proves only .* <= W_2 <= .* for pair 1 of 2, more than rtol = 0.1"):
        batched.certified(x, a, y, a, 0.1, None, 0.7, "sinkhorn", F64)


def test_the_gradient_of_a_batch_is_that_of_its_divergence():
    x, y = 0.3 * normal(2, 12, 2), 0.3 * normal(2, 12, 2, seed=1) + 1.0
    weights = torch.softmax(normal(2, 12, seed=2), -1)
    given = [z.clone().requires_grad_() for z in (x, weights, y, weights)]
    batched.certified(*given, 0.5, 0.2, 0.9, "sinkhorn", F64)[0].sum().backward()
    for k in range(2):
        alone = [z.detach()[k].clone().requires_grad_() for z in given]
        entropic.certified(*alone, entropic.Ground(2.0, "euclidean"), 0.5, 0.2, 0.9, "sinkhorn", F64)[0].backward()
        for z, w in zip(given, alone):
            size = float(w.grad.abs().max())
            assert torch.allclose(z.grad[k], w.grad, rtol=0, atol=0.05 * size)  # schedules from other diameters
