"""The pieces of transport against their definitions: atoms, blocks, scales, schedules, choices, both sides of each."""

from __future__ import annotations

import inspect
import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch
from scipy.optimize import linprog
from torch import Tensor

from attn_flow.transport import (
    accelerators,
    atoms,
    batched,
    candidates,
    coupling,
    distances,
    entropic,
    feasible,
    plans,
    scales,
    solve,
    wasserstein,
)
from attn_flow.transport.coupling import Ground, Plan
from attn_flow.transport.plans import Limits

F64 = torch.float64
SQUARED = Ground(2.0, "euclidean")


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=F64)


def masses(n: int, seed: int = 0) -> Tensor:
    return torch.softmax(normal(n, seed=seed), 0)


# --- atoms -----------------------------------------------------------------------------------------------------------


def one_by_one(z: Tensor, tol: float, leaders: int) -> list[int]:
    """Each free point in turn leads all free points within tol of it, or only itself once leaders gain too little."""
    label, alone = [-1] * len(z), False
    for i in range(len(z)):
        if label[i] < 0:
            new = max(label) + 1
            for j in range(len(z)):
                if label[j] < 0 and (i == j if alone else float((z[j] - z[i]).norm()) <= tol):
                    label[j] = new
            led = sum(one >= 0 for one in label)
            alone = alone or (new + 1 >= leaders and led < 4 * (new + 1))
    return label


@pytest.mark.parametrize("tol", [0.0, 0.1, 0.4, 9.0])
def test_atoms_are_led_one_by_one(tol: float) -> None:
    x = 0.3 * normal(50, 2)
    x[20:30] = x[:10]
    assert atoms._atoms(x, tol).tolist() == one_by_one(x, tol, 64)


@pytest.mark.parametrize("equal", [2, 14, 15, 16, 30])
def test_a_spread_cloud_is_not_led_to_its_end(equal: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """After five leaders, that lead fewer than four each, the others are atoms of their own; equal ones too."""
    monkeypatch.setattr(atoms, "LEADERS", 5)
    x = normal(60, 2)
    x[1 : 1 + equal] = x[0]
    x[38:] = x[38 - 22 : 38]
    assert atoms._atoms(x, 0.0).tolist() == one_by_one(x, 0.0, 5)


@pytest.mark.parametrize("p", [1.0, 2.0, 3.5])
def test_what_merging_keeps_and_what_it_moves(p: float) -> None:
    x, a = normal(12, 2), masses(12)
    owner = atoms._atoms(x, 1.0)
    X, A, moved = atoms._merge(x, a, owner, Ground(p))
    leaders = [int(np.flatnonzero(owner == k)[0]) for k in range(owner.max() + 1)]
    assert torch.equal(X, x[leaders])
    assert A.tolist() == pytest.approx([float(a[torch.from_numpy(owner == k)].sum()) for k in range(owner.max() + 1)])
    far = sum(float(a[i]) * float((x[i] - x[leaders[k]]).norm()) ** p for i, k in enumerate(owner))
    assert moved == pytest.approx(far ** (1 / p))
    assert atoms._merge(x, a, np.arange(12), Ground(p))[2] == 0


@pytest.mark.parametrize(
    ("dense", "kept", "merges"), [(40, 20, True), (40, 21, False), (39, 38, True), (39, 39, False)]
)
def test_merging_pays_by_how_many_atoms_are_left(dense: int, kept: int, merges: bool) -> None:
    """40 points a side: a quarter of the pairs for the dense solvers, 95% beyond them (38^2 = .90, 39^2 = .951)."""
    x = normal(40, 2)
    x[kept:] = x[0]
    found = atoms.merged_clouds(x, masses(40), x + 9, masses(40), SQUARED, 0.0, dense)
    assert (found is not None) is merges
    assert found is None or len(found[0]) == len(found[2]) == kept


# --- the shortlist ---------------------------------------------------------------------------------------------------


def halved(x: np.ndarray, order: list[int], k: int, level: int, levels: int) -> list[list[int]]:
    """The k-th of 2^level blocks, from place n k / 2^level on, halved along the longest side of its box."""
    if level == levels:
        return [order]
    side = int(np.ptp(x[order], axis=0).argmax())
    order = sorted(order, key=lambda i: x[i, side])
    cut = len(x) * (2 * k + 1) // 2 ** (level + 1) - len(x) * k // 2**level
    parts = order[:cut], order[cut:]
    return [block for h in (0, 1) for block in halved(x, parts[h], 2 * k + h, level + 1, levels)]


@pytest.mark.parametrize("n", [6, 40, 77, 200])
def test_blocks_are_halved_along_their_longest_side(n: int) -> None:
    x = (normal(n, 3, seed=n) * torch.tensor([1.0, 4.0, 2.0], dtype=F64)).numpy()
    label = candidates._blocks(x)
    levels = math.ceil(math.log2(n / candidates.BLOCK))
    found = [sorted(np.flatnonzero(label == k).tolist()) for k in range(2**levels)]
    assert found == [sorted(part) for part in halved(x, list(range(n)), 0, 0, levels)]
    assert max(map(len, found)) <= candidates.BLOCK


def test_a_block_is_its_mass_at_the_point_nearest_its_mean() -> None:
    x, a, label = normal(30, 2).numpy(), masses(30).numpy(), np.random.default_rng(0).permutation(np.arange(30) % 4)
    points, mass = candidates._represent(x, a, label)
    for k in range(4):
        own = np.flatnonzero(label == k)
        assert mass[k] == pytest.approx(a[own].sum())
        mean = (a[own, None] * x[own]).sum(0) / a[own].sum()
        assert points[k].tolist() == x[own[np.linalg.norm(x[own] - mean, axis=1).argmin()]].tolist()


def test_pairs_of_points_that_move_every_block_as_the_coarse_plan_does() -> None:
    """A plan on these pairs alone has the right masses, and moves as much from block to block."""
    rng = np.random.default_rng(0)
    n, m = 12, 9
    a, b = rng.dirichlet(np.ones(n)), rng.dirichlet(np.ones(m))
    bx, by = rng.permutation(np.arange(n) % 3), rng.permutation(np.arange(m) % 2)
    A, B = np.bincount(bx, a), np.bincount(by, b)
    i, j, mass = coupling.staircase(A, B)
    order = rng.permutation(len(i))
    pairs = candidates._refined(Plan(i[order], j[order], mass[order]), a, bx, b, by, m)
    rows, columns = np.divmod(pairs, m)
    equations = [rows == k for k in range(n)] + [columns == k for k in range(m)]
    equations += [(bx[rows] == s) & (by[columns] == t) for s, t in zip(i, j)]
    right = np.concatenate([a, b, mass])
    found = linprog(np.zeros(len(pairs)), A_eq=np.array(equations, dtype=float), b_eq=right)
    assert found.status == 0
    assert len(pairs) < n + m + len(i)


def test_keys_of_pairs() -> None:
    columns = np.array([[3, 1], [0, 2]])
    assert candidates._key(columns, 7).tolist() == [3, 1, 7, 9]
    assert candidates._key(columns, 4, 2).tolist() == [6, 2, 1, 5]  # neighbours of two y among four x
    assert candidates._distinct(np.array([5, 1, 5]), np.array([2, 1])).tolist() == [1, 2, 5]


@pytest.mark.parametrize(("cost", "p"), [("euclidean", 1.0), ("euclidean", 3.0), ("geodesic", 2.0)])
def test_no_cost_is_larger(cost: str, p: float) -> None:
    """Attained by opposite corners of the box, and by antipodes."""
    x, y = np.array([[0.0, -1.0], [0.3, 0.2]]), np.array([[2.0, 1.0]])
    largest = math.pi if cost == "geodesic" else math.hypot(2, 2)
    assert candidates._largest(x, y, Ground(p, cost)) == pytest.approx(largest**p)


@pytest.mark.parametrize(("moved", "close"), [(0.018, True), (0.022, False)])
def test_a_plan_is_close_within_a_hundredth_of_its_cost(moved: float, close: bool) -> None:
    """One point to two at distance 1; a potential lowered by `moved` at one of them leaves a gap of half that."""
    x, y, half = np.zeros((1, 1)), np.array([[1.0], [-1.0]]), np.full(2, 0.5)
    start = Plan(np.array([0, 0]), np.array([0, 1]), half, v=np.array([0.0, -moved]))
    assert candidates._close(start, x, np.ones(1), y, half, SQUARED) is close
    away = Plan(start.i, start.j, half, v=np.array([0.0, 0.0]))
    assert candidates._close(away, 3 * x, np.ones(1), 3 * y, half, SQUARED)  # relative to the cost


def test_annealed_potentials_are_feasible_and_nearly_optimal_on_their_pairs() -> None:
    n = 60
    x, y, a, b = normal(n, 2).numpy(), normal(n, 2, seed=1).numpy(), masses(n).numpy(), masses(n, 1).numpy()
    i, j = (z.ravel() for z in np.indices((n, n)))
    c = SQUARED.pairs(x[i], y[j])
    u = np.zeros(n)
    v = (c.reshape(n, n) - u[:, None]).min(0)
    known = float(solve(*map(torch.from_numpy, (x, y)), weights_x=torch.from_numpy(a), weights_y=torch.from_numpy(b),
                        method="simplex").distance) ** 2  # fmt: skip
    U, V = candidates._annealed(x, a, y, b, SQUARED, i * n + j, u, v)
    assert (U[i] + V[j] <= c + 1e-12).all()
    before, after = known - (a @ u + b @ v), known - (a @ U + b @ V)
    assert -1e-12 <= after < 0.01 * before
    exact = candidates._annealed(x, a, x, a, SQUARED, np.arange(n) * (n + 1), np.zeros(n), np.zeros(n))
    assert not np.any(exact)  # no slack at all: as they were


@pytest.mark.parametrize("d", [2, 9])
def test_neighbours_in_any_portions(d: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(candidates, "ENTRIES", 50)
    x, y, v = normal(31, d).numpy(), normal(20, d, seed=1).numpy(), normal(20, seed=2).numpy()
    for ground in (SQUARED, Ground(1.0)):
        costs = ground.matrix(x, y) - v
        reduced, j, floor = candidates.nearest(x, y, v, 4, ground)
        assert np.allclose(np.sort(reduced, 1), np.sort(costs, 1)[:, :4])
        assert np.allclose(np.take_along_axis(costs, j, 1), reduced)
        assert np.allclose(floor, costs.min(1))
        js, last = candidates._nearest_by_rows(x, y, v, 4, ground)
        assert np.allclose(last, np.sort(costs, 1)[:, 3])
        assert np.allclose(np.take_along_axis(costs, js, 1), np.sort(costs, 1)[:, :4])


# --- exact solvers ---------------------------------------------------------------------------------------------------


def test_mass_that_is_missed_is_counted_once() -> None:
    a, b = np.array([0.5, 0.5]), np.array([0.25, 0.75])
    assert coupling.leak(Plan(np.array([0, 1]), np.array([0, 1]), np.array([0.25, 0.75])), a, b) == 0.25
    assert coupling.leak(Plan(np.array([0]), np.array([1]), np.array([0.5])), a, b) == 0.5


@pytest.mark.parametrize(("sliver", "steps"), [(4e-16, 3), (4e-15, 5)])
def test_steps_of_rounding_size_are_left_out(sliver: float, steps: int) -> None:
    i, j, mass = coupling.staircase(np.array([0.5, 0.25, 0.25]), np.array([0.5 + sliver, 0.25, 0.25 - sliver]))
    assert len(mass) == steps
    assert mass.sum() == pytest.approx(1)
    assert i.max() == j.max() == 2


@pytest.mark.parametrize("side", [0, 1])
def test_totals_that_differ_by_rounding_end_together(side: int) -> None:
    w = [np.array([0.5, 0.25, 0.25]), np.array([0.25, 0.75])]
    w[side] = w[side] * (1 + 1e-12)
    i, j, mass = coupling.staircase(*w)
    assert (i.tolist(), j.tolist()) == ([0, 0, 1, 2], [0, 1, 1, 1])
    assert abs(mass.sum() - 1) < 1e-15


@pytest.mark.parametrize("p", [1.0, 2.0, 3.0])
def test_potentials_on_the_line_prove_its_plan(p: float) -> None:
    ground = Ground(p)
    for seed in range(5):
        x, y, a, b = (
            normal(9, 1, seed=seed).numpy(),
            normal(6, 1, seed=9 + seed).numpy(),
            masses(9).numpy(),
            masses(6).numpy(),
        )
        plan = coupling.line(x, a, y, b, ground)
        C = np.abs(x - y.T) ** p
        assert plan.v is not None
        assert a @ (C - plan.v).min(1) + b @ plan.v == pytest.approx(plan.mass @ C[plan.i, plan.j])


@pytest.mark.parametrize(("uneven", "refused"), [(0.9e-12, False), (1.1e-12, True)])
@pytest.mark.parametrize("side", [0, 1])
def test_equal_weights_up_to_rounding(uneven: float, refused: bool, side: int) -> None:
    x, w = normal(4, 2).numpy(), [np.full(4, 0.25), np.full(4, 0.25)]
    w[side] = w[side] + np.array([0.0, 0.0, 0.0, uneven / 4])
    name = plans._choose(*(torch.from_numpy(z) for z in (x, w[0], x, w[1])), SQUARED, Limits())
    assert name == ("simplex" if refused else "assignment")
    if refused:
        with pytest.raises(ValueError, match="expected equal numbers of equal weights"):
            coupling.assignment(x, w[0], x, w[1], SQUARED)
    else:
        assert coupling.assignment(x, w[0], x, w[1], SQUARED).mass.tolist() == [0.25] * 4


@pytest.mark.parametrize(("method", "size"), [("assignment", 24), ("simplex", 50), ("geomloss", 56)])
def test_the_memory_of_dense_solvers(method: str, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[float] = []
    for module in (coupling, entropic):
        monkeypatch.setattr(module, "require", lambda needed, *_: asked.append(needed))
    monkeypatch.setattr(entropic, "_keops", lambda: False)
    m = 30 if method == "assignment" else 20
    solve(normal(30, 2), normal(m, 2, seed=1) + 2, method=method, rtol=0.5)
    assert asked == [size * 30 * (30 if method == "geomloss" else m)]


# --- the choice ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("n", "m", "d", "cost", "learned", "name"), [
    (9, 9, 1, "euclidean", True, "line"),
    (9, 9, 1, "geodesic", False, "assignment"),
    (9, 9, 2, "geodesic", False, "circle"),
    (9, 9, 2, "geodesic", True, "simplex"),
    (9, 9, 2, "euclidean", False, "assignment"),
    (9, 9, 2, "euclidean", True, "simplex"),
    (9, 8, 2, "euclidean", False, "simplex"),
    (10, 10, 6, "euclidean", False, "assignment"),
    (10, 11, 6, "euclidean", False, "shortlist"),
    (10, 11, 7, "euclidean", False, "simplex"),
    (20, 20, 7, "euclidean", False, "assignment"),
    (20, 21, 7, "euclidean", False, "shortlist"),
    (30, 30, 3, "euclidean", False, "shortlist"),
    (31, 5, 3, "euclidean", False, "shortlist"),
    (5, 41, 3, "euclidean", False, "beyond"),
    (41, 5, 3, "euclidean", False, "beyond"),
])  # fmt: skip
def test_the_cheapest_solver(n: int, m: int, d: int, cost: str, learned: bool, name: str) -> None:
    a, b = (torch.full((z,), 1 / z, dtype=F64) for z in (n, m))
    limits = Limits(dense=10, dense_high_dimension=20, shortlist=40)
    assert plans._choose(normal(n, d), a.requires_grad_(learned), normal(m, d), b, Ground(2.0, cost), limits) == name


@pytest.mark.parametrize("side", ["weights_x", "weights_y"])
def test_gradients_in_the_masses_of_one_cloud_alone(side: str, monkeypatch: pytest.MonkeyPatch) -> None:
    x, y = normal(5, 2), 1 + normal(5, 2, seed=1)
    x[1] = x[0]  # which would be one atom, and have no gradients of its own
    uniform = torch.full((5,), 0.2, dtype=F64)
    learned = uniform.clone().requires_grad_()
    assert solve(x, y, **{side: learned}).method == "simplex"
    asked: list[int] = []
    kept = distances.without_hermits
    monkeypatch.setattr(distances, "without_hermits", lambda *z: asked.append(1) or kept(*z))
    solve(x, y, **{side: learned})
    assert not asked  # a point that both have is left out only where its mass has no gradient
    solve(x, y, **{side: uniform})
    assert len(asked) == 1
    other = masses(5)
    name = "weights_y" if side == "weights_x" else "weights_x"
    f = lambda w: solve(x, y, **{side: w, name: other}).distance
    assert torch.autograd.gradcheck(f, (masses(5, 1).requires_grad_(),))


@pytest.mark.parametrize(("p", "share"), [(1.0, 1e-6), (2.0, 1e-6), (4.0, 1e-13**0.25)])
def test_an_error_of_rounding_is_good_enough(p: float, share: float) -> None:
    good = lambda error: plans.good_enough(torch.tensor(0.0), error, 0.01, 3.0, p)
    assert good(0.99 * share * 3)
    assert not good(1.01 * share * 3)


def test_a_plan_of_the_pair_before() -> None:
    i, j, mass = coupling.staircase(np.array([0.5, 0.5]), np.array([0.2, 0.8]))
    plan = Plan(i, j, mass, v=np.array([1.0, 2.0]))
    A, B = np.array([0.5, 0.5]), np.array([0.2, 0.8])
    assert plans.in_units(None, 1.0, 2.0) is None
    moved = plans.in_units((plan, 6.0), 2.0, 3.0)
    assert moved is not None
    assert moved.v is not None
    assert moved.v.tolist() == [27.0, 54.0]
    bare = Plan(i, j, mass)
    assert plans.in_units((bare, 6.0), 2.0, 3.0) is bare
    fits = plans._feasible(plan, A, B, 4.0)
    assert fits is not None
    assert fits.v is not None
    assert fits.v.tolist() == [0.25, 0.5]
    off = lambda size: plans._feasible(plan, A + [size, -size], B, 4.0)
    assert off(0.9e-12) is not None  # a leak of .9e-12
    assert off(1.1e-12) is None
    none: list[tuple[Any, ...]] = [(None, A, B), (bare, A, B), (plan, A[:1], B), (plan, A, np.array([0.2, 0.8, 0.0]))]
    none += [(plan, np.array([0.5, 0.5, 0.0]), B)]
    assert all(plans._feasible(*given, 4.0) is None for given in none)


def test_beyond_the_shortlist_rtol_says_how_far_points_are_merged(monkeypatch: pytest.MonkeyPatch) -> None:
    """An eighth of rtol of the extent, and where that is too far, of the distance."""
    tried: list[float] = []
    whole = plans.merged_clouds

    def merged(x, a, y, b, ground, tol, dense):
        tried.append(tol)
        return whole(x, a, y, b, ground, tol, dense)

    monkeypatch.setattr(plans, "merged_clouds", merged)
    limits = Limits(dense=3, shortlist=4)
    tight = lambda centre, n, width, seed: centre + width * normal(n, 2, seed=seed)
    x = torch.cat([tight(0.0, 20, 1e-6, 1), tight(10.0, 20, 1e-6, 2)])
    found = solve(x, x + 0.5, rtol=0.08, limits=limits)
    assert found.method == "merged assignment"
    extent = scales.extent_of(torch.cat([x, x + 0.5]), torch.ones(80, dtype=F64), 0.9)
    assert tried == [pytest.approx(plans.COINCIDENT * extent), pytest.approx(0.01 * extent)]
    tried.clear()
    y = torch.cat([tight(0.0, 20, 0.01, 3), tight(10.0, 20, 0.01, 4)]) + torch.tensor([0.2, 0.0], dtype=F64)
    x = torch.cat([tight(0.0, 20, 0.01, 1), tight(10.0, 20, 0.01, 2)])
    found = solve(x, y, rtol=0.08, limits=limits)
    assert abs(float(found.distance - solve(x, y, method="assignment").distance)) <= float(found.error)
    assert len(tried) == 3
    assert 0.2 * 0.01 * 0.8 < tried[2] < 0.2 * 0.01 * 1.2


# --- scales ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("size", "unit"), [
    (1.0, 1.0), (2.0**66, 1.0), (2.0**67, 2.0**67), (1.9 * 2.0**67, 2.0**67), (2.0**-66, 1.0), (2.0**-67, 2.0**-67),
    (1e300, 2.0**996), (0.0, 1.0),
])  # fmt: skip
def test_units_are_powers_of_two_of_the_extent(size: float, unit: float) -> None:
    x, y = torch.tensor([[0.0, 0.0], [0.5, 0.0]], dtype=F64) * size, torch.tensor([[-0.5, 0.1]], dtype=F64) * size
    assert scales.unit_of(x, y) == unit
    assert scales.unit_of(y, x) == unit


def test_units_of_clouds_far_from_zero_and_of_one_point() -> None:
    x = torch.full((3, 1), 2.0**100, dtype=F64)
    assert scales.unit_of(x, x) == 2.0**100
    assert scales.unit_of(1.5 * x, 1.5 * x) == 2.0**100
    x[0] += 2.0**60
    assert scales.unit_of(x, x) == 1.0
    x[0] += 2.0**70
    assert scales.unit_of(x, x) == 2.0**70


@pytest.mark.parametrize("part", [0.5, 0.9, 1.0])
@pytest.mark.parametrize("kind", ["equal", "unequal", "with zeros"])
def test_the_extent_of_a_part_of_the_mass(part: float, kind: str) -> None:
    z, w = normal(21, 3), torch.ones(21, dtype=F64)
    z[4] = 1e3
    if kind != "equal":
        w = masses(21)
    if kind == "with zeros":
        w[4] = 0.0
        w = w / w.sum()
    extent = 0.0
    for column in z.T:
        middle = float(column.median())
        far = sorted((abs(float(t) - middle), float(m)) for t, m in zip(column, w / w.sum()))
        held = list(itertools.accumulate(m for _, m in far))
        extent = max(extent, 2 * next(far[i][0] for i in range(21) if held[i] >= part * (1 - 1e-12)))
    assert scales.extent_of(z, w, part) == pytest.approx(extent)


@pytest.mark.parametrize(("places", "weights", "extent"), [
    ([0, 1, -1, 2, -2, 3, -3], [4, 4, 4, 4, 2, 1, 1], 4),  # nine tenths end with the points at 2
    ([t**2 for t in range(20)], [1] * 20, 2 * (17**2 - 9**2)),  # eighteen of twenty, of which the median is 9^2
])  # fmt: skip
def test_a_part_of_the_mass_that_ends_with_a_point(places, weights, extent) -> None:
    z, w = (torch.tensor([float(t) for t in some], dtype=F64) for some in (places, weights))
    assert scales.extent_of(z[:, None], w, 0.9) == pytest.approx(extent)


@pytest.mark.parametrize(("off", "sphere"), [(0.9e-4, True), (1.2e-4, False)])
def test_what_is_a_sphere(off: float, sphere: bool) -> None:
    x = normal(1000, 3)
    x = 3 * x / x.norm(dim=-1, keepdim=True)
    x[0] *= 1 + off
    if sphere:
        assert scales.radius_of(x[:500], x[500:], 1.0) == pytest.approx(3, rel=1e-6)
    else:
        with pytest.raises(ValueError, match=r"norms from 6 to 6\.0007"):
            scales.radius_of(x[:500], x[500:], 2.0)


@pytest.mark.parametrize("p", [1.5, 2.0, 3.0])
@pytest.mark.parametrize("part", [0.99, 1.01])
def test_a_common_far_point_stays_where_others_are_nearer_to_each_other(p: float, part: float) -> None:
    """At distance D = 100; from their mean the others, one of which is s away from the rest, have to be less than
    2^{1/p} D / 2 away."""
    x, y = 1e-4 * normal(30, 2), 1e-4 * normal(30, 2, seed=1)
    s = part * 2 ** (1 / p) * 100 / 2 * 29 / 28  # the mean is s / 29 nearer
    x[1] = y[1] = torch.tensor([0.0, 100.0], dtype=F64)
    x[2] = y[2] = torch.tensor([s, 0.0], dtype=F64)
    w = torch.full((30,), 1 / 30, dtype=F64)
    v = w.clone()
    v[2], v[3] = v[2] / 2, v[3] + v[2] / 2  # what is at s is not common, and stays
    X, A, Y, B, share = scales.without_hermits(x, w, y, v, p)
    removed = part < 1
    assert len(X) == len(Y) == (29 if removed else 30)
    assert share == pytest.approx(29 / 30 if removed else 1.0)
    assert float(A.sum()) == pytest.approx(1)
    assert float(B.sum()) == pytest.approx(1)


# --- Sinkhorn and slices ---------------------------------------------------------------------------------------------


def test_the_schedule_falls_from_the_diameter_to_the_blur() -> None:
    assert entropic.anneal(4.0, 1.0, 0.5) == [16.0, 16.0, 4.0, 1.0]
    assert entropic.anneal(4.0, 0.9, 0.5) == [16.0, 16.0, 4.0, 1.0, pytest.approx(0.81)]
    assert entropic.anneal(1.0, 2.0, 0.5) == [1.0, 4.0]


@pytest.mark.parametrize(("part", "sweeps"), [(1.01, 1), (0.99, 10)])
def test_an_interval_is_narrow_enough_at_its_goal(part: float, sweeps: int) -> None:
    """Asked after the first sweep and every tenth; two softmins a sweep, and one more where it is asked."""
    x, y, a, b = normal(1, 8, 2), 1 + normal(1, 6, 2, seed=1), masses(8)[None], masses(6, 1)[None]
    calls: list[int] = []

    def softmin(*given: Any) -> tuple[Tensor, Tensor]:
        calls.append(1)
        return entropic.softmin(*given)

    def found(goal: float) -> tuple[Tensor, Tensor]:
        calls.clear()
        g = 0.3 * normal(1, 6, seed=2)
        return feasible.interval(x, a, y, b, g, 0.5, torch.tensor([goal], dtype=F64), softmin, 1 << 20)

    low, high = found(math.inf)
    found(part * float(high - low))
    assert len(calls) == 2 * sweeps + (1 if sweeps == 1 else 2)


def test_far_points_are_not_lifted_to_a_floor() -> None:
    """All but 1e-14 of the mass is 2^-80 of the kernel away, 8e-25, and counts for nothing beside it."""
    eps = 0.5
    far = math.sqrt(2 * eps * 80 * math.log(2))
    x, y = torch.zeros(1, 1, dtype=F64), torch.tensor([[0.0], [far]], dtype=F64)
    b = torch.tensor([1e-14, 1 - 1e-14], dtype=F64)
    zero = torch.zeros(1, dtype=F64), torch.zeros(2, dtype=F64)
    found = entropic.softmins(eps, x, y, torch.ones(1, dtype=F64), b, *zero)[0]
    assert float(found) == pytest.approx(-eps * math.log(1e-14), rel=1e-9)


@pytest.mark.parametrize("p", [1.0, 2.0, 3.0])
def test_a_sliced_distance_is_the_mean_over_its_directions(p: float) -> None:
    x, y, a, b, k = normal(7, 3), 5 * normal(6, 3, seed=1) + 2, masses(7), masses(6), 9
    seeded = lambda: torch.Generator().manual_seed(3)
    found = solve(x, y, p, weights_x=a, weights_y=b, method="sliced", n_projections=k, generator=seeded())
    costs = []
    for theta in torch.randn(k, 3, generator=seeded(), dtype=F64):
        theta = theta / theta.norm()
        one = solve((x @ theta)[:, None], (y @ theta)[:, None], p, weights_x=a, weights_y=b, method="line")
        costs.append(float(one.distance) ** p)
    mean = sum(costs) / k
    assert float(found.distance) == pytest.approx(mean ** (1 / p))
    deviation = math.sqrt(sum((c - mean) ** 2 for c in costs) / (k - 1) / k)
    assert float(found.error) == pytest.approx(deviation * mean ** (1 / p - 1) / p)


# --- as an accelerator would have it ---------------------------------------------------------------------------------


@pytest.mark.parametrize(("method", "p", "cost", "n", "m", "stays"), [
    ("sinkhorn", 1.0, "geodesic", 3, 3, True), ("geomloss", 1.0, "geodesic", 3, 3, True),
    ("auto", 2.0, "euclidean", 11, 3, True), ("auto", 2.0, "euclidean", 3, 11, True),
    ("auto", 2.0, "euclidean", 10, 10, False), ("auto", 1.0, "euclidean", 11, 11, False),
    ("auto", 2.0, "geodesic", 11, 11, False), ("simplex", 2.0, "euclidean", 11, 11, False),
])  # fmt: skip
def test_which_clouds_are_compared_where_they_are(method, p, cost, n, m, stays) -> None:
    limits = Limits(shortlist=10)
    assert accelerators.stays_on_device(normal(n, 2), normal(m, 2), p, cost, method, limits) is stays
    assert accelerators.stays_on_device(normal(n), normal(m, 2), 2.0, "euclidean", "auto", limits) is False


def test_one_copy_of_all_tensors() -> None:
    given = {"x": normal(2, 3).float(), "y": normal(5), "mask_x": normal(3, 1) > 0, "weights_x": None}
    given |= {"weights_y": torch.zeros(2, device="meta"), "x2": normal(2, 3).float().requires_grad_()}
    found = accelerators.on_host(given)
    assert list(found) == list(given)
    for name, z in given.items():
        if isinstance(z, Tensor) and z.device.type == "cpu":
            assert found[name].dtype == z.dtype
            assert torch.equal(found[name], z)
        else:
            assert found[name] is z
    assert found["x2"].requires_grad


def test_a_batch_with_masks_and_masses_of_any_size() -> None:
    x, y = normal(2, 20, 2), 1.5 + normal(2, 15, 2, seed=1)
    a, b = 1e300 * torch.stack([masses(20), masses(20, 1)]), 3 * torch.stack([masses(15, 2), masses(15, 3)])
    there_x, there_y = normal(2, 20, seed=4) > -1, normal(2, 15, seed=5) > -1
    options: tuple[Any, ...] = (SQUARED, 0.3, None, 0.7, "sinkhorn", F64)
    distance, error = accelerators.batch_on_device(x, y, a, b, there_x, there_y, *options)
    for k in range(2):
        i, j = there_x[k], there_y[k]
        exact = solve(x[k][i], y[k][j], weights_x=a[k][i], weights_y=b[k][j], method="simplex").distance
        assert abs(float(distance[k] - exact)) <= float(error[k]) <= 0.3 * float(distance[k])
    with pytest.raises(ValueError, match="expected p = 2, euclidean"):
        accelerators.batch_on_device(x, y, a, b, there_x, there_y, Ground(1.0), *options[1:])


def test_geomloss_in_portions_of_a_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("geomloss")
    asked: list[float] = []
    monkeypatch.setattr(batched, "require", lambda needed, *_: asked.append(needed))
    x, y = 0.2 * normal(5, 6, 2), 0.2 * normal(5, 8, 2, seed=1) + 0.3
    a, b = torch.stack([masses(6, s) for s in range(5)]), torch.stack([masses(8, s) for s in range(5)])
    found = []
    for entries in (1, 64 * 2, 1 << 24):
        monkeypatch.setattr(batched, "ENTRIES", entries)
        found.append(batched._geomloss(x, a, y, b, 0.2, 0.7))
    assert asked == [56 * 64] * 3
    for S, slope, g in found[:2]:
        torch.testing.assert_close(S, found[2][0])
        torch.testing.assert_close(g, found[2][2])
        assert not slope.any()


# --- rounding that is allowed for, to the last piece -----------------------------------------------------------------

EPS = float(np.finfo(float).eps)


def whole(*shape: int, most: int, seed: int) -> Tensor:
    """Whole numbers, whose sums and products do not round."""
    return torch.randint(-most, most + 1, shape, generator=torch.Generator().manual_seed(seed)).to(F64)


def test_the_least_reduced_cost_is_lowered_by_what_may_round() -> None:
    """4 (d + 2) roundings of the largest |x|^2 + |y|^2 + |g| of its pair, of points that are there."""
    x, y, g = whole(2, 9, 3, most=5, seed=0), whole(2, 7, 3, most=3, seed=1), whole(2, 7, most=90, seed=2)
    x[1], y[1], g[1] = 4 * x[1], 8 * y[1], 16 * g[1]
    there = torch.ones(2, 7, dtype=torch.bool)
    there[0, g[0].abs().argmax()] = False
    found = feasible.least_reduced(x, y, g, there, 10)
    for k in range(2):
        seen = there[k].nonzero()[:, 0].tolist()
        size = float(x[k].square().sum(-1).max() + y[k].square().sum(-1).max()) + max(abs(float(g[k, j])) for j in seen)
        for i in range(9):
            least = min(float((x[k, i] - y[k, j]).square().sum()) / 2 - float(g[k, j]) for j in seen)
            assert least - float(found[k, i]) == pytest.approx(4 * 5 * EPS * size, rel=1e-2)


def test_the_floor_of_a_search_is_lowered_by_what_may_round() -> None:
    """16 (d + 2) roundings of |x|^2 + |y|^2, and 16 of the range of the potentials."""
    x, y, v = (
        z.numpy() for z in (whole(9, 8, most=5, seed=0), whole(7, 8, most=9, seed=1), whole(7, most=900, seed=2))
    )
    exact = ((x[:, None] - y) ** 2).sum(-1) - v
    rounding = 16 * EPS * (10 * ((x**2).sum(1).max() + (y**2).sum(1).max()) + v.max() - v.min())
    assert exact.min(1) - candidates.nearest(x, y, v, 1, SQUARED)[2] == pytest.approx(rounding, rel=1e-2)
    floor = candidates.nearest(x, y, v, 3, SQUARED)[2]
    assert floor == pytest.approx(np.minimum(exact.min(1), np.sort(exact, 1)[:, 2] - rounding), rel=0, abs=rounding / 9)
    none_left = candidates.nearest(x, y, v, 7, SQUARED)[2]
    assert none_left == pytest.approx(exact.min(1), rel=0, abs=rounding / 9)


def test_the_pair_that_misses_by_most_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """By error - rtol W, and not by its error alone; with its interval in the units of the clouds."""
    found, error = (torch.tensor(z, dtype=F64) for z in ([100.0, 1.0], [10.5, 0.9]))
    monkeypatch.setattr(batched, "_at_blur", lambda *_: (found, error, (found - error, found + error)))
    x = torch.tensor([[[0.0, 0.0], [3.0, 4.0]], [[0.0, 0.0], [6.0, 8.0]]], dtype=F64)
    half = torch.full((2, 2), 0.5, dtype=F64)
    with pytest.raises(entropic.Unproved, match=r"proves only 1 <= W_2 <= 19 for pair 1 of 2, more than rtol = 0\.1"):
        batched.certified(x, half, x, half, 0.1, None, 0.5, "sinkhorn", F64)


# --- what is tried, in which units -----------------------------------------------------------------------------------


@pytest.mark.parametrize("blur", [None, 0.3])
def test_blurs_are_parts_of_the_diameter_until_one_proves(blur: float | None, monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[tuple[float, float]] = []
    whole = entropic.divergence

    def divergence(x, a, y, b, blur, scaling, diameter):
        tried.append((blur, diameter))
        torch.testing.assert_close(torch.cat([x, y]).mean(0), torch.zeros(2, dtype=F64), rtol=0, atol=1e-12)
        return whole(x, a, y, b, blur, scaling, diameter)

    monkeypatch.setattr(entropic, "divergence", divergence)
    x, y, a = 3 + normal(7, 2), 4 + normal(7, 2, seed=1), masses(7)
    both = torch.cat([x, y])
    sides = [float(z.max() - z.min()) for z in both.T]
    diameter = math.hypot(*sides)
    given = (x, a, y, a, SQUARED)
    with pytest.raises(entropic.Unproved, match="more than rtol = 1e-09"):
        entropic.certified(*given, 1e-9, blur, 0.5, "sinkhorn", F64)
    sizes = [part * diameter for part in entropic.BLURS] if blur is None else [blur]
    assert tried == [(pytest.approx(size), pytest.approx(diameter)) for size in sizes]
    tried.clear()
    empty = torch.cat([a, torch.zeros(1, dtype=F64)])  # a far point without mass is not there
    far = torch.cat([x, torch.full((1, 2), 1e6, dtype=F64)])
    with pytest.raises(entropic.Unproved):
        entropic.certified(far, empty, y, a, SQUARED, 1e-9, blur, 0.5, "sinkhorn", F64)
    assert tried[0][1] == pytest.approx(diameter)


@pytest.mark.parametrize("blur", [None, 0.3])
def test_only_pairs_that_are_not_proved_are_tried_again(blur: float | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each pair in units of its own box, whose middle is 0; or all of the widest, where the blur is a length."""
    tried: list[tuple[int, float]] = []

    def at_blur(x, a, y, b, size, *_):
        tried.append((len(x), size))
        if len(tried) == 1:
            seen = torch.cat([x, y], 1)
            torch.testing.assert_close(seen.amin(1) + seen.amax(1), torch.zeros(3, 2, dtype=F64), rtol=0, atol=1e-12)
            sides = (seen.amax(1) - seen.amin(1)).norm(dim=-1)
            expected = torch.ones(3, dtype=F64) if blur is None else boxes / boxes.max()
            torch.testing.assert_close(sides, expected)
        found = 10.0 * len(tried) + torch.arange(len(x), dtype=F64)
        error = 0.05 * found if len(tried) == 2 or blur else torch.tensor([0.05, 0.2, 0.05], dtype=F64) * found
        return found, error, (found, found)

    monkeypatch.setattr(batched, "_at_blur", at_blur)
    x, y = normal(3, 6, 2), 2 + normal(3, 5, 2, seed=1)
    x[1], y[1] = 4 * x[1], 4 * y[1]
    both = torch.cat([x, y], 1)
    boxes = (both.amax(1) - both.amin(1)).norm(dim=-1)
    a, b = (torch.full((3, n), 1 / n, dtype=F64) for n in (6, 5))
    distance, error = batched.certified(x, a, y, b, 0.1, blur, 0.5, "sinkhorn", F64)
    if blur is None:
        assert tried == [(3, entropic.BLURS[0]), (1, entropic.BLURS[1])]
        expected, unit = torch.tensor([10.0, 20.0, 12.0], dtype=F64), boxes
    else:
        assert tried == [(3, pytest.approx(0.3 / float(boxes.max())))]
        expected, unit = torch.tensor([10.0, 11.0, 12.0], dtype=F64), boxes.max()
    torch.testing.assert_close(distance, expected * unit)
    torch.testing.assert_close(error, 0.05 * expected * unit)


@pytest.mark.parametrize(("low", "high", "distance", "error"), [
    (1.0, 100.0, math.sqrt(6), 10 - math.sqrt(6)), (4.0, 6.25, math.sqrt(6), math.sqrt(6) - 2), (9.0, 16.0, 3.0, 1.0),
    (1.0, 4.0, 2.0, 1.0), (5.0, 4.0, math.sqrt(5), 0.0),
])  # fmt: skip
def test_the_estimate_is_taken_within_what_is_proved(low, high, distance, error, monkeypatch) -> None:
    """W = sqrt(2 S), S = 3 here, and the error is the farther end of the interval."""
    none = torch.zeros(3, 2, dtype=F64)
    S = entropic.Divergence(3.0, none, none, none[:, 0], none[:, 0], none[:, 0])
    goals: list[float] = []
    monkeypatch.setattr(entropic, "divergence", lambda *_: S)
    monkeypatch.setattr(
        entropic, "interval", lambda *z: goals.append(float(z[6])) or (torch.tensor(low), torch.tensor(high))
    )
    x, a = normal(3, 2), masses(3)
    found = entropic.certified(x, a, 1 + x, a, SQUARED, 10.0, 0.3, 0.7, "sinkhorn", F64)
    assert (float(found[0]), found[1]) == pytest.approx((distance, error))
    assert goals == [30.0]  # rtol S
    share = error / distance  # of the distance: what rtol has to allow
    entropic.certified(x, a, 1 + x, a, SQUARED, 1.01 * share + 1e-9, 0.3, 0.7, "sinkhorn", F64)
    if share > 0:
        with pytest.raises(
            entropic.Unproved, match=f"proves only {math.sqrt(low):.6g} <= W_2 <= {math.sqrt(high):.6g}"
        ):
            entropic.certified(x, a, 1 + x, a, SQUARED, 0.99 * share, 0.3, 0.7, "sinkhorn", F64)


def test_the_estimates_of_a_batch_are_taken_within_what_is_proved(monkeypatch: pytest.MonkeyPatch) -> None:
    S = torch.tensor([3.0, 3.0, 3.0, -1.0], dtype=F64)
    low, high = (torch.tensor(z, dtype=F64) for z in ([1.0, 9.0, 1.0, 0.0], [100.0, 16.0, 4.0, 4.0]))
    x, a = normal(4, 3, 2).requires_grad_(), torch.full((4, 3), 1 / 3, dtype=F64)
    slopes = tuple(torch.ones_like(z) for z in (x, x, a, a))
    goals: list[Tensor] = []
    monkeypatch.setattr(batched, "divergence", lambda *_: (S, slopes, a))
    monkeypatch.setattr(batched, "interval", lambda *z: goals.append(z[6]) or (low, high))
    distance, error, bounds = batched._at_blur(x, a, x, a, 0.3, 0.5, 0.7, "sinkhorn", F64)
    root = math.sqrt(6)
    assert distance.tolist() == pytest.approx([root, 3.0, 2.0, 0.0])
    assert error.tolist() == pytest.approx([10 - root, 1.0, 1.0, 2.0])
    assert [z.tolist() for z in bounds] == [pytest.approx([1.0, 3.0, 1.0, 0.0]), pytest.approx([10.0, 4.0, 2.0, 2.0])]
    assert goals[0].tolist() == [1.5, 1.5, 1.5, 0.0]  # rtol S
    (slope,) = torch.autograd.grad(distance.sum(), x)  # of both clouds, over W where there is a distance
    expected = 2 / torch.tensor([root, 3.0, 2.0, 1.0], dtype=F64)
    torch.testing.assert_close(slope, expected[:, None, None].expand(4, 3, 2))


@pytest.mark.parametrize("scale", [1.0, 1e30])
def test_lengths_that_are_given_have_the_units_of_the_clouds(scale: float) -> None:
    x, y = normal(20, 2), 1.5 + normal(20, 2, seed=1)
    plain = solve(x, y, method="sinkhorn", blur=0.2, rtol=0.5)
    found = solve(scale * x, scale * y, method="sinkhorn", blur=0.2 * scale, rtol=0.5)
    assert float(found.distance) == pytest.approx(scale * float(plain.distance), rel=1e-9)
    turn = 2 * math.pi * torch.arange(5, dtype=F64) / 5  # five points at an arc of .3 from one, of a sphere of radius 3
    ring = torch.stack([math.sin(0.1) * turn.cos(), math.sin(0.1) * turn.sin(), math.cos(0.1) * torch.ones(5)], -1)
    points = 3 * scale * torch.cat([torch.tensor([[0.0, 0.0, 1.0]], dtype=F64), ring])
    other = 3 * scale * torch.tensor([[1.0, 0.0, 0.0]], dtype=F64)
    merged = lambda tol: solve(points, other, cost="geodesic", merge_tol=tol * scale, rtol=0.9).method
    assert merged(0.31).startswith("merged")
    assert not merged(0.29).startswith("merged")


def test_defaults_are_what_is_written() -> None:
    """Of `solve` and of `wasserstein` the same."""
    plain, short = (
        {name: z.default for name, z in inspect.signature(function).parameters.items()}
        for function in (solve, wasserstein)
    )
    assert {name: plain[name] for name in short} == short
    assert (short["p"], short["rtol"], short["scaling"], short["n_projections"]) == (2, 0.01, 0.9, 200)
    assert Ground() == Ground(2.0, "euclidean")
    assert Limits() == Limits(1_000, 3_000, 100_000, 1e-6, 900.0)
    for name in vars(Limits()):
        assert getattr(Limits(**{name: 0}), name) == 0
        with pytest.raises(ValueError, match=f"{name} = -1, expected a number of at least 0"):
            Limits(**{name: -1})
