"""Exact distances: the linear program, duality, closed forms, laws, batches and gradients."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from inputs import F64, masses, normal, unit
from scipy.optimize import linprog
from torch import Tensor

from attn_flow.geometry import angle
from attn_flow.measures.cloud import Cloud
from attn_flow.transport import Transport, solve, wasserstein

LAWS = settings(max_examples=25, deadline=None)
SIZES = st.integers(1, 9)
SEEDS = st.integers(0, 999)


def cost_matrix(x: Tensor, y: Tensor, p: float, cost: str) -> np.ndarray:
    """The cost matrix written as a double loop."""
    distance = math.dist
    if cost == "geodesic":
        distance = lambda s, t: math.acos(max(-1.0, min(1.0, sum(u * v for u, v in zip(s, t)))))
    return np.array([[distance(s, t) ** p for t in y.tolist()] for s in x.tolist()])


def linear_program(x: Tensor, y: Tensor, a: Tensor, b: Tensor, p: float, cost: str) -> float:
    """W_p by the literal linear program: min <P, C>, row sums a, column sums b."""
    n, m = len(x), len(y)
    C = cost_matrix(x, y, p, cost)
    rows = [np.repeat(np.arange(n) == i, m) for i in range(n)]
    columns = [np.tile(np.arange(m) == j, n) for j in range(m)]
    result = linprog(C.ravel(), A_eq=np.array(rows + columns, dtype=float), b_eq=np.r_[a, b])
    return max(result.fun, 0.0) ** (1 / p)


def check_duality(result: Transport, x: Tensor, y: Tensor, a: Tensor, b: Tensor) -> None:
    """The plan has its marginals and the value as its cost, and the potentials prove that no plan is cheaper."""
    C = torch.from_numpy(cost_matrix(x, y, result.p, result.cost))
    assert result.plan is not None
    plan = result.plan.to_dense()
    assert plan.shape == (len(x), len(y))
    assert float((plan.sum(1) - a).abs().max()) < 1e-12
    assert float((plan.sum(0) - b).abs().max()) < 1e-12
    assert float((plan * C).sum()) == pytest.approx(float(result.value) ** result.p, abs=1e-9)
    if result.potentials is not None:
        u, v = result.potentials
        assert float((u[:, None] + v - C).max()) <= (1e-7 if result.cost == "geodesic" else 1e-12)  # acos rounds
        assert float(a @ u + b @ v) == pytest.approx(float(result.value) ** result.p, abs=1e-9)


# The linear program and its dual.


@LAWS
@given(n=SIZES, m=SIZES, d=st.integers(1, 4), p=st.sampled_from([1, 1.5, 2, 3]), seed=SEEDS)
def test_auto_solves_the_linear_program(n: int, m: int, d: int, p: float, seed: int) -> None:
    x, y, a, b = normal(n, d, seed=seed), normal(m, d, seed=seed + 1), masses(n, seed=seed), masses(m, seed=seed + 2)
    result = solve(Cloud(x, a), Cloud(y, b), p)
    assert float(result.value) == pytest.approx(linear_program(x, y, a, b, p, "euclidean"), abs=1e-7)
    assert result.method == ("line" if d == 1 else "simplex")
    assert float(result.error) < 1e-9
    check_duality(result, x, y, a, b)


@LAWS
@given(n=SIZES, m=SIZES, p=st.sampled_from([1, 1.5, 2, 4]), seed=SEEDS)
def test_the_circle_solves_the_linear_program(n: int, m: int, p: float, seed: int) -> None:
    x, y, a, b = (
        unit(normal(n, 2, seed=seed)),
        unit(normal(m, 2, seed=seed + 1)),
        masses(n, seed=seed),
        masses(m, seed=seed + 2),
    )
    result = solve(Cloud(x, a), Cloud(y, b), p, cost="geodesic")
    assert result.method == "circle"
    assert float(result.value) == pytest.approx(linear_program(x, y, a, b, p, "geodesic"), abs=1e-7)
    assert float(result.error) < 1e-9
    assert float(result.plan.to_dense().sum(1).sub(a).abs().max()) < 1e-12
    assert result.potentials is None


@pytest.mark.parametrize("cost", ["euclidean", "geodesic"])
@pytest.mark.parametrize("p", [1, 2, 3])
@pytest.mark.parametrize("method", ["assignment", "simplex", "shortlist"])
def test_every_method_solves_the_linear_program(cost: str, p: int, method: str) -> None:
    x, y, a = unit(normal(12, 3)), unit(normal(12, 3, seed=1)), torch.full((12,), 1 / 12, dtype=F64)
    result = solve(x, y, p, cost=cost, method=method)
    assert result.method == method
    assert float(result.value) == pytest.approx(linear_program(x, y, a, a, p, cost), abs=1e-7)
    check_duality(result, x, y, a, a)


@pytest.mark.parametrize("offset", [0.0, 1e6])
@pytest.mark.parametrize(("d", "p"), [(3, 2), (9, 2), (3, 1)])
def test_potentials_hold_for_every_pair_in_spite_of_rounding(offset: float, d: int, p: int) -> None:
    """Far from zero the searches for the smallest reduced cost lose digits; their result is lowered by as much."""
    x, y = normal(150, d) + offset, normal(120, d, seed=1) + offset
    u, v = solve(x, y, p).potentials
    c = (x[:, None] - y).square().sum(-1) ** (p / 2)
    rounding = 8 * torch.finfo(F64).eps * (u.abs().max() + v.abs().max() + c.max())
    assert float((u[:, None] + v - c).max()) <= float(rounding)


# Closed forms.


@LAWS
@given(n=SIZES, d=st.integers(1, 5), p=st.sampled_from([1, 2, 3]), seed=SEEDS)
def test_a_translation_costs_its_length(n: int, d: int, p: int, seed: int) -> None:
    x, s, a = normal(n, d, seed=seed), normal(d, seed=seed + 1), masses(n, seed=seed)
    assert float(wasserstein(Cloud(x, a), Cloud(x + s, a), p)) == pytest.approx(float(s.norm()), rel=1e-9)


@LAWS
@given(n=st.integers(1, 30), d=st.integers(1, 5), seed=SEEDS)
def test_the_gradient_of_a_convex_function_is_optimal(n: int, d: int, seed: int) -> None:
    """Brenier: x -> S x + s + tanh(x), S positive, is such a map: W_2 is the L^2 norm of the displacement."""
    x, root, a = normal(n, d, seed=seed), normal(d, d, seed=seed + 1), masses(n, seed=seed)
    y = x @ (root @ root.T) + normal(d, seed=seed + 2) + x.tanh()
    order = torch.randperm(n, generator=torch.Generator().manual_seed(seed))
    expected = float((a * (x - y).square().sum(-1)).sum().sqrt())
    assert float(wasserstein(Cloud(x, a), Cloud(y[order], a[order]))) == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("p", [1, 2, 3, 20])
def test_rotations_of_the_circle(p: int) -> None:
    """A lattice rotated by less than half a step moves by that angle; a point to its antipode by pi radii."""
    theta = torch.arange(50, dtype=F64) * 2 * math.pi / 50
    lattice = lambda s: 3 * torch.stack([(theta + s).cos(), (theta + s).sin()], -1)
    assert float(wasserstein(lattice(0), lattice(0.04), p, cost="geodesic")) == pytest.approx(0.12, abs=1e-11)
    point = torch.tensor([[3.0, 0.0]], dtype=F64)
    assert float(wasserstein(point, -point, p, cost="geodesic")) == pytest.approx(3 * math.pi, rel=1e-12)


def test_the_circle_at_many_points() -> None:
    """W_1 on the circle is the mean of |F - G - median(F - G)| over the angles."""
    theta, phi = (
        (2 * math.pi * torch.rand(2, 3000, generator=torch.Generator().manual_seed(0), dtype=F64)).sort().values
    )
    points = lambda s: torch.stack([s.cos(), s.sin()], -1)
    grid, owner = torch.cat([theta, phi]).sort()
    level = torch.where(owner < 3000, 1.0, -1.0).double().cumsum(0) / 3000  # F - G after each point of the grid
    length = torch.diff(grid, append=grid[:1] + 2 * math.pi)
    order = level.argsort()
    middle = level[order][int((length[order].cumsum(0) < math.pi).sum())]
    expected = float((length * (level - middle).abs()).sum())
    result = solve(points(theta), points(phi), 1, cost="geodesic")
    assert float(result.value) == pytest.approx(expected, rel=1e-10)
    assert float(result.error) < 1e-12


@pytest.mark.parametrize(("d", "k"), [(3, 1), (3, 2), (5, 2)])
@pytest.mark.parametrize("p", [1, 2])
@pytest.mark.parametrize("cost", ["euclidean", "geodesic"])
def test_the_zero_temperature_flow_of_a_normal_matrix(d: int, k: int, p: int, cost: str) -> None:
    """THEORY 1: x_t = e^{tau M} x_0 normalised: W_p(mu_t, P_# mu_0) is the L^p norm of dist(x_t, S cap E)."""
    x0 = unit(normal(300, d, seed=3))
    rotation = torch.linalg.qr(normal(d, d, seed=4))[0]
    leading = torch.tensor([1.0] * k + [0.0] * (d - k), dtype=F64)
    project = lambda z: unit((z @ rotation) * leading) @ rotation.T
    tau = torch.rand(300, 1, generator=torch.Generator().manual_seed(5), dtype=F64) + 1
    x_t = unit((x0 @ rotation) * (tau * leading).exp() @ rotation.T)
    distance = angle(x_t, project(x_t)) if cost == "geodesic" else (x_t - project(x_t)).norm(dim=-1)
    expected = distance.pow(p).mean().pow(1 / p)
    assert float(wasserstein(x_t, project(x0), p, cost=cost)) == pytest.approx(float(expected), abs=1e-8)


# Laws.


@LAWS
@example((6, 1, 1), 1, 220, 3, "euclidean")  # identical weighted clouds: the gap is rounding, its cube root 1e-5
@given(st.tuples(SIZES, SIZES, SIZES), st.integers(1, 3), SEEDS, st.sampled_from([1, 2, 3]),
       st.sampled_from(["euclidean", "geodesic"]))  # fmt: skip
def test_a_metric(sizes: tuple[int, ...], d: int, seed: int, p: int, cost: str) -> None:
    x, y, z = (Cloud(unit(normal(n, d + 1, seed=seed + k)), masses(n, seed=seed + k)) for k, n in enumerate(sizes))
    w = lambda a, b: float(wasserstein(a, b, p, cost=cost))
    assert w(x, y) == pytest.approx(w(y, x), abs=1e-9)
    assert w(x, z) <= w(x, y) + w(y, z) + 1e-9
    assert w(x, x) == 0.0


@LAWS
@given(n=st.integers(2, 12), m=SIZES, d=st.integers(1, 4), seed=SEEDS)
def test_order_duplicates_padding_and_units(n: int, m: int, d: int, seed: int) -> None:
    x, y, a = normal(n, d, seed=seed), normal(m, d, seed=seed + 1), masses(n, seed=seed)
    w = float(wasserstein(Cloud(x, a), y))
    order = torch.randperm(n, generator=torch.Generator().manual_seed(seed))
    assert float(wasserstein(Cloud(x[order], a[order]), y)) == pytest.approx(w, rel=1e-9)
    assert float(wasserstein(Cloud(x, 17 * a), y)) == pytest.approx(w, rel=1e-9)
    assert float(wasserstein(Cloud(1e-6 * x, a), 1e-6 * y)) == pytest.approx(1e-6 * w, rel=1e-9)
    rotation, shift = torch.linalg.qr(normal(d, d, seed=seed + 2))[0], normal(d, seed=seed + 3)
    assert float(wasserstein(Cloud(x @ rotation + shift, a), y @ rotation + shift)) == pytest.approx(w, rel=1e-8)
    twice = torch.ones(n, dtype=F64)
    twice[0] = 2
    repeated = wasserstein(torch.cat([x, x[:1]]), y)
    assert float(repeated) == pytest.approx(float(wasserstein(Cloud(x, twice), y)), rel=1e-9)
    padded, mask = torch.cat([x, torch.full((2, d), 1e9, dtype=F64)]), torch.arange(n + 2) < n
    assert float(wasserstein(Cloud(padded, torch.cat([a, a[:2]]), mask), y)) == pytest.approx(w, rel=1e-12)
    weightless = Cloud(torch.cat([x, 9 + x[:1]]), torch.cat([a, torch.zeros(1, dtype=F64)]))
    assert float(wasserstein(weightless, y)) == pytest.approx(w, rel=1e-12)


def test_a_batch_is_a_loop() -> None:
    x, y = normal(2, 3, 7, 2), normal(3, 5, 2, seed=1)
    a = torch.rand(2, 1, 7, generator=torch.Generator().manual_seed(2), dtype=F64)
    mask = torch.rand(3, 5, generator=torch.Generator().manual_seed(3)) < 0.7
    mask[:, 0] = True
    result = solve(Cloud(x, a), Cloud(y, mask=mask), 1)
    u, v = result.potentials
    assert result.value.shape == result.error.shape == (2, 3)
    assert result.plan.shape == (2, 3, 7, 5)
    assert (u.shape, v.shape) == ((2, 3, 7), (2, 3, 5))
    plan = result.plan.to_dense()
    for i in range(2):
        for j in range(3):
            alone = solve(Cloud(x[i, j], a[i, 0]), y[j][mask[j]], 1)
            assert float(result.value[i, j]) == pytest.approx(float(alone.value), rel=1e-12)
            assert torch.allclose(plan[i, j][:, mask[j]], alone.plan.to_dense())
            assert torch.allclose(v[i, j][mask[j]], alone.potentials[1])
            assert not plan[i, j][:, ~mask[j]].any()
            assert not v[i, j][~mask[j]].any()


def test_a_batch_names_every_method() -> None:
    x = torch.stack([normal(40, 2), torch.zeros(40, 2, dtype=F64)])
    result = solve(x, normal(40, 2, seed=1), with_plan=False)
    assert (result.method, result.p, result.cost) == ("assignment+simplex", 2.0, "euclidean")
    assert repr(result).startswith("Transport(value of shape (2,), error up to ")


def test_float32_is_solved_in_float64() -> None:
    x, y = normal(50, 3).float(), normal(50, 3, seed=1).float()
    result = solve(x, y)
    expected = wasserstein(x.double(), y.double())
    assert {result.value.dtype, result.error.dtype, result.plan.dtype, result.potentials[0].dtype} == {torch.float32}
    assert float(result.value) == pytest.approx(float(expected), rel=torch.finfo(torch.float32).eps)


# Gradients.


@pytest.mark.parametrize(("d", "cost"), [(1, "euclidean"), (3, "euclidean"), (2, "geodesic"), (3, "geodesic")])
@pytest.mark.parametrize("p", [1, 2, 3])
def test_gradients_in_the_tokens(d: int, cost: str, p: int) -> None:
    x, y = normal(5, d).requires_grad_(), normal(4, d, seed=1).requires_grad_()
    project = unit if cost == "geodesic" else lambda z: z
    assert torch.autograd.gradcheck(lambda s, t: wasserstein(project(s), project(t), p, cost=cost), (x, y))


@pytest.mark.parametrize(
    ("method", "d", "cost"),
    [
        ("line", 1, "euclidean"),
        ("auto", 2, "euclidean"),
        ("shortlist", 3, "euclidean"),
        ("simplex", 3, "geodesic"),
        ("auto", 2, "geodesic"),
    ],
)
@pytest.mark.parametrize("has_weightless_token", [False, True])
def test_gradients_in_the_weights(method: str, d: int, cost: str, has_weightless_token: bool) -> None:
    """Also of a token whose weight is zero, from one side, where the distance has a derivative."""
    x, y = (unit(z) if cost == "geodesic" else z for z in (normal(5, d), normal(4, d, seed=1)))
    f = lambda a, b: wasserstein(Cloud(x, a), Cloud(y, b), cost=cost, method=method)
    a, b = masses(5), masses(4, seed=1)
    if not has_weightless_token:
        assert torch.autograd.gradcheck(f, (a.requires_grad_(), b.requires_grad_()))
        return
    a[0], h = 0.0, 1e-7
    (slope,) = torch.autograd.grad(f(a.requires_grad_(), b), a)
    a, step = a.detach(), torch.zeros_like(a)
    step[0] = h
    assert float(slope[0]) == pytest.approx(float(f(a + step, b) - f(a, b)) / h, rel=1e-4)


@pytest.mark.parametrize("method", ["auto", "assignment", "simplex", "shortlist"])
@pytest.mark.parametrize("p", [1, 2, 3.5])
@pytest.mark.parametrize("cost", ["euclidean", "geodesic"])
def test_identical_clouds_are_at_zero_with_zero_gradients(method: str, p: float, cost: str) -> None:
    x = unit(normal(30, 3)).requires_grad_()
    value = wasserstein(x, x.detach().clone(), p, cost=cost, method=method)
    value.backward()
    assert float(value.detach()) == 0.0
    assert torch.equal(x.grad, torch.zeros_like(x))
