"""Laws and closed forms of the Wasserstein distance; line, circle, assignment, simplex; gradients; bad input."""

from __future__ import annotations

import math

import numpy as np
import ot
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from scipy.special import ndtri
from torch import Tensor

from attn_flow.transport.coupling import Ground
from attn_flow.transport.distances import Transport, solve, wasserstein

F64 = torch.float64
LAWS = settings(max_examples=25, deadline=None)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=F64)


def unit(x: Tensor) -> Tensor:
    return x / x.norm(dim=-1, keepdim=True)


def masses(n: int, seed: int = 0) -> Tensor:
    w = torch.rand(n, generator=torch.Generator().manual_seed(seed), dtype=F64) + 0.01
    return w / w.sum()


def literal(x: Tensor, y: Tensor, a: Tensor, b: Tensor, p: float, cost: str) -> float:
    """The linear program on a cost matrix written as a double loop."""
    c = [[math.dist(s, t) for t in y.tolist()] for s in x.tolist()]
    if cost == "geodesic":
        c = [[math.acos(max(-1.0, min(1.0, sum(u * v for u, v in zip(s, t))))) for t in y.tolist()] for s in x.tolist()]
    return ot.emd2(a.numpy(), b.numpy(), np.array(c) ** p, numItermax=10**6) ** (1 / p)


# Every exact method is the linear program.


@LAWS
@given(
    n=st.integers(1, 9),
    m=st.integers(1, 9),
    d=st.integers(1, 4),
    p=st.sampled_from([1, 1.5, 2, 3]),
    seed=st.integers(0, 99),
)
def test_auto_is_the_linear_program(n: int, m: int, d: int, p: float, seed: int) -> None:
    x, y, a, b = normal(n, d, seed=seed), normal(m, d, seed=seed + 1), masses(n, seed), masses(m, seed + 2)
    found = solve(x, y, p, weights_x=a, weights_y=b)
    assert float(found.distance) == pytest.approx(literal(x, y, a, b, p, "euclidean"), abs=1e-9)
    assert found.method == ("line" if d == 1 else "simplex" if n > 1 or m > 1 else "assignment")
    assert float(found.error) < 1e-9


@LAWS
@example(n=1, m=1, p=1.5, seed=424)  # rounding kept the cutting planes of a single pair from closing
@given(n=st.integers(1, 12), m=st.integers(1, 12), p=st.sampled_from([1, 1.5, 2, 4]), seed=st.integers(0, 999))
def test_circle_is_the_linear_program(n: int, m: int, p: float, seed: int) -> None:
    x, y, a, b = unit(normal(n, 2, seed=seed)), unit(normal(m, 2, seed=seed + 1)), masses(n, seed), masses(m, seed + 2)
    found = solve(x, y, p, weights_x=a, weights_y=b, cost="geodesic")
    assert found.method == "circle"
    assert float(found.distance) == pytest.approx(literal(x, y, a, b, p, "geodesic"), abs=1e-7)
    assert float(found.error) < 1e-9


@pytest.mark.parametrize("cost", ["euclidean", "geodesic"])
@pytest.mark.parametrize("p", [1, 2])
def test_methods_agree(cost: str, p: int) -> None:
    x, y = unit(normal(60, 3)), unit(normal(60, 3, seed=1))
    found = {m: float(solve(x, y, p, cost=cost, method=m).distance) for m in ("assignment", "simplex", "shortlist")}
    assert found["simplex"] == pytest.approx(found["assignment"], rel=1e-10)
    assert found["shortlist"] == pytest.approx(found["assignment"], rel=1e-10)


# Closed forms.


def test_gaussian_quantile_grids() -> None:
    """W_2(N(m, s^2), N(m', s'^2))^2 = (m - m')^2 + (s - s')^2, times the grid's variance; W_1 of a shift."""
    z = torch.from_numpy(ndtri((np.arange(1000) + 0.5) / 1000))[:, None]
    variance = float(z.var(correction=0))
    assert float(wasserstein(1 + 2 * z, 4 + 0.5 * z)) == pytest.approx(math.sqrt(9 + 1.5**2 * variance), abs=1e-12)
    assert float(wasserstein(z, z + 0.7, 1)) == pytest.approx(0.7, abs=1e-12)


@LAWS
@given(n=st.integers(1, 20), d=st.integers(1, 5), p=st.sampled_from([1, 2, 3]), seed=st.integers(0, 99))
def test_translation(n: int, d: int, p: int, seed: int) -> None:
    x, s, a = normal(n, d, seed=seed), normal(d, seed=seed + 1), masses(n, seed)
    assert float(wasserstein(x, x + s, p, weights_x=a, weights_y=a)) == pytest.approx(float(s.norm()), rel=1e-9)


@LAWS
@given(n=st.integers(1, 30), d=st.integers(1, 5), seed=st.integers(0, 999))
def test_gradient_of_a_convex_function_is_optimal(n: int, d: int, seed: int) -> None:
    """Brenier: x -> S x + s + tanh(x), S positive, is the gradient of a convex function: W_2 = L^2 norm of the move."""
    x, root, a = normal(n, d, seed=seed), normal(d, d, seed=seed + 1), masses(n, seed)
    y = x @ (root @ root.T) + normal(d, seed=seed + 2) + x.tanh()
    order = torch.randperm(n, generator=torch.Generator().manual_seed(seed))
    known = float((a * (x - y).square().sum(-1)).sum().sqrt())
    assert float(wasserstein(x, y[order], weights_x=a, weights_y=a[order])) == pytest.approx(known, rel=1e-9)


def test_circle_rotations() -> None:
    """A lattice rotated by less than half a step moves by that angle; a point to its antipode by pi radius."""
    theta = torch.arange(50, dtype=F64) * 2 * math.pi / 50
    lattice = lambda s: torch.stack([(theta + s).cos(), (theta + s).sin()], -1)
    for p in (1, 2, 3):
        assert float(wasserstein(lattice(0), lattice(0.04), p, cost="geodesic")) == pytest.approx(0.04, abs=1e-12)
    point = torch.tensor([[3.0, 0.0]], dtype=F64)
    assert float(wasserstein(point, -point, cost="geodesic")) == pytest.approx(3 * math.pi, rel=1e-12)


def test_concentration_on_the_circle_in_closed_form() -> None:
    """THEORY 1: G = I, V = diag(2, 1), beta = inf: W_2 = sqrt(2 - (4/pi) asin(s)/s), s^2 = 1 - e^{-2t}."""
    n = 4000
    theta = (torch.arange(n, dtype=F64) + 0.5) * 2 * math.pi / n
    x0 = torch.stack([theta.cos(), theta.sin()], -1)
    target = torch.stack([x0[:, 0].sign(), torch.zeros(n, dtype=F64)], -1)
    for t, known in ((1.0, 0.604159), (2.0, 0.394814)):
        found = solve(unit(x0 * torch.tensor([math.exp(t), 1.0], dtype=F64)), target)
        assert float(found.distance) == pytest.approx(known, abs=2e-6)
        assert found.method == "merged simplex"


@pytest.mark.parametrize(("d", "k"), [(3, 1), (3, 2), (5, 2)])
@pytest.mark.parametrize("p", [1, 2])
@pytest.mark.parametrize("cost", ["euclidean", "geodesic"])
def test_lp_identity_of_the_zero_temperature_flow(d: int, k: int, p: int, cost: str) -> None:
    """THEORY 1: normal M, x_t = e^{tau M} x_0 normalised: W_p(mu_t, P_# mu_0) = || dist(x_t, S cap E) ||_{L^p}."""
    x0 = unit(normal(300, d, seed=3))
    rotation = torch.linalg.qr(normal(d, d, seed=4))[0]
    leading = torch.tensor([1.0] * k + [0.0] * (d - k), dtype=F64)
    inside = lambda z: unit((z @ rotation) * leading) @ rotation.T
    tau = torch.rand(300, 1, generator=torch.Generator().manual_seed(5), dtype=F64) + 1
    x_t = unit((x0 @ rotation) * (tau * leading).exp() @ rotation.T)
    known = Ground(p, cost).distance(x_t, inside(x_t)).pow(p).mean().pow(1 / p)
    assert float(wasserstein(x_t, inside(x0), p, cost=cost)) == pytest.approx(float(known), abs=1e-8)


# Laws.

clouds = st.tuples(st.integers(1, 8), st.integers(1, 8), st.integers(1, 8), st.integers(1, 3), st.integers(0, 999))


@LAWS
@example((6, 1, 1, 1, 220), 3, "euclidean")  # identical weighted clouds: the proved gap is rounding, its cube root 1e-5
@given(clouds, st.sampled_from([1, 2, 3]), st.sampled_from(["euclidean", "geodesic"]))
def test_a_metric(sizes: tuple[int, ...], p: int, cost: str) -> None:
    n, m, k, d, seed = sizes
    x, y, z = (unit(normal(s, d + 1, seed=seed + s)) for s in (n, m, k))
    a, b, c = masses(n, seed), masses(m, seed + 1), masses(k, seed + 2)
    w = lambda s, u, t, v: float(wasserstein(s, t, p, weights_x=u, weights_y=v, cost=cost))
    assert w(x, a, y, b) == pytest.approx(w(y, b, x, a), abs=1e-9)
    assert w(x, a, z, c) <= w(x, a, y, b) + w(y, b, z, c) + 1e-9
    assert w(x, a, x, a) == 0.0


@LAWS
@given(n=st.integers(2, 12), m=st.integers(1, 12), d=st.integers(1, 4), seed=st.integers(0, 999))
def test_order_duplicates_masks_and_units(n: int, m: int, d: int, seed: int) -> None:
    x, y, a = normal(n, d, seed=seed), normal(m, d, seed=seed + 1), masses(n, seed)
    w = float(wasserstein(x, y, weights_x=a))
    order = torch.randperm(n, generator=torch.Generator().manual_seed(seed))
    assert float(wasserstein(x[order], y, weights_x=a[order])) == pytest.approx(w, rel=1e-9)
    assert float(wasserstein(x, y, weights_x=17 * a)) == pytest.approx(w, rel=1e-9)
    assert float(wasserstein(1e-6 * x, 1e-6 * y, weights_x=a)) == pytest.approx(1e-6 * w, rel=1e-9)
    twice = torch.ones(n, dtype=F64)
    twice[0] = 2
    assert float(wasserstein(torch.cat([x, x[:1]]), y)) == pytest.approx(
        float(wasserstein(x, y, weights_x=twice)), rel=1e-9
    )
    padded = torch.cat([x, torch.full((2, d), math.nan, dtype=F64)])
    mask = torch.arange(n + 2) < n
    weights = torch.cat([a, torch.full((2,), math.nan, dtype=F64)])
    assert float(wasserstein(padded, y, mask_x=mask, weights_x=weights)) == pytest.approx(w, rel=1e-12)
    nothing = torch.cat([a, torch.zeros(1, dtype=F64)])
    assert float(wasserstein(torch.cat([x, 9 + x[:1]]), y, weights_x=nothing)) == pytest.approx(w, rel=1e-12)


def test_batch_is_a_loop() -> None:
    x, y = normal(2, 3, 7, 2), normal(3, 5, 2, seed=1)
    a = torch.rand(2, 1, 7, generator=torch.Generator().manual_seed(2), dtype=F64)
    mask = torch.rand(3, 5, generator=torch.Generator().manual_seed(3)) < 0.7
    mask[:, 0] = True
    found = solve(x, y, 1, weights_x=a, mask_y=mask)
    assert found.distance.shape == found.error.shape == (2, 3)
    for i in range(2):
        for j in range(3):
            alone = wasserstein(x[i, j], y[j][mask[j]], 1, weights_x=a[i, 0])
            assert float(found.distance[i, j]) == pytest.approx(float(alone), rel=1e-12)


def test_a_batch_names_every_method() -> None:
    x = torch.stack([normal(40, 2), torch.zeros(40, 2, dtype=F64)])
    found = solve(x, normal(40, 2, seed=1))
    assert isinstance(found, Transport)
    assert (found.method, found.p, found.cost) == ("assignment+merged simplex", 2.0, "euclidean")


def test_float32_is_solved_in_float64() -> None:
    x, y = normal(50, 3).float(), normal(50, 3, seed=1).float()
    found = wasserstein(x, y)
    assert found.dtype == torch.float32
    assert float(found) == pytest.approx(float(wasserstein(x.double(), y.double())), rel=torch.finfo(torch.float32).eps)


# Clouds the theory produces.


@pytest.mark.parametrize("method", ["auto", "assignment", "simplex", "shortlist"])
@pytest.mark.parametrize("p", [1, 2, 3.5])
@pytest.mark.parametrize("cost", ["euclidean", "geodesic"])
def test_identical_clouds_are_at_zero_with_zero_gradients(method: str, p: float, cost: str) -> None:
    x = unit(normal(30, 3)).requires_grad_()
    found = solve(x, x.detach().clone(), p, cost=cost, method=method)
    found.distance.backward()
    assert float(found.distance.detach()) == 0.0
    assert torch.equal(x.grad, torch.zeros_like(x))


@pytest.mark.parametrize(("x", "y", "known"), [
    (torch.zeros(1, 3), torch.zeros(1, 3), 0.0),
    (torch.zeros(1, 3), torch.ones(1, 3), math.sqrt(3)),
    (torch.zeros(50, 3), torch.zeros(20, 3), 0.0),
    (torch.zeros(50, 3), torch.ones(20, 3), math.sqrt(3)),
    (torch.ones(3000, 2), torch.ones(2000, 2), 0.0),
    (torch.ones(40, 1), torch.ones(1, 1), 0.0),
])  # fmt: skip
def test_single_and_collapsed_points(x: Tensor, y: Tensor, known: float) -> None:
    x = x.double().requires_grad_()
    found = solve(x, y.double())
    found.distance.backward()
    assert float(found.distance.detach()) == pytest.approx(known, abs=1e-14)
    assert float(found.error) <= 1e-14
    assert bool(torch.isfinite(x.grad).all())


# Gradients.


@pytest.mark.parametrize(("d", "cost"), [(1, "euclidean"), (3, "euclidean"), (2, "geodesic"), (3, "geodesic")])
@pytest.mark.parametrize("p", [1, 2, 3])
def test_gradcheck_in_points(d: int, cost: str, p: int) -> None:
    x, y = normal(5, d).requires_grad_(), normal(4, d, seed=1).requires_grad_()
    project = unit if cost == "geodesic" else lambda z: z
    f = lambda s, t: wasserstein(project(s), project(t), p, cost=cost)
    assert torch.autograd.gradcheck(f, (x, y))


GEODESIC = [("simplex", 3, "geodesic"), ("shortlist", 3, "geodesic"), ("auto", 2, "geodesic")]


@pytest.mark.parametrize(
    ("method", "d", "cost"), [("line", 1, "euclidean"), *((m, d, "euclidean") for m, d, _ in GEODESIC), *GEODESIC]
)
def test_gradcheck_in_weights(method: str, d: int, cost: str) -> None:
    x, y = (unit(z) if cost == "geodesic" else z for z in (normal(5, d), normal(4, d, seed=1)))
    f = lambda a, b: wasserstein(x, y, weights_x=a, weights_y=b, cost=cost, method=method)
    assert torch.autograd.gradcheck(f, (masses(5).requires_grad_(), masses(4, 1).requires_grad_()))


def test_merged_points_share_the_gradient() -> None:
    """40 tokens on 2 atoms against one point: d W_1 / d x_i = (unit vector) / 40 for every one of them."""
    x = torch.tensor([[0.0, 0.0], [2.0, 0.0]], dtype=F64).repeat(20, 1).requires_grad_()
    y = torch.tensor([[5.0, 0.0]], dtype=F64)
    found = solve(x, y, 1)
    found.distance.backward()
    assert found.method == "merged simplex"
    assert float(found.distance.detach()) == pytest.approx(4.0, rel=1e-14)
    assert torch.allclose(x.grad, torch.tensor([-1 / 40, 0.0], dtype=F64).expand(40, 2), atol=1e-15)


# Bad input.

GOOD = normal(4, 3)


@pytest.mark.parametrize(("call", "message"), [
    (lambda: solve(GOOD * math.nan, GOOD), "cloud x: x has 12 NaN or infinite entries"),
    (lambda: solve(GOOD, GOOD[:0]), "cloud y: y has shape (0, 3): an empty cloud"),
    (lambda: solve(GOOD[0], GOOD), "cloud x: x has shape (3,), expected (..., n, d)"),
    (lambda: solve(GOOD.long(), GOOD), "expected a floating dtype"),
    (lambda: solve(GOOD, GOOD[:, :2]), "x has shape (4, 3) and y (4, 2), expected the same dimension"),
    (lambda: solve(GOOD.expand(2, 4, 3), GOOD.expand(3, 4, 3)), "batch shape (2,) and y (3,), expected"),
    (lambda: solve(GOOD.expand(0, 4, 3), GOOD), "no cloud at all"),
    (lambda: solve(GOOD, GOOD, weights_x=-torch.ones(4)), "cloud x: weights reach -1, expected nonnegative"),
    (lambda: solve(GOOD, GOOD, weights_y=torch.zeros(4)), "cloud y: weights of a cloud are all zero"),
    (lambda: solve(GOOD, GOOD, weights_y=torch.ones(5)), "cloud y: weights have shape (5,)"),
    (lambda: solve(GOOD, GOOD, mask_x=torch.zeros(4, dtype=torch.bool)), "cloud x: mask hides every token"),
    (lambda: solve(GOOD, GOOD, 0.5), "p = 0.5, expected a number with 1 <= p < inf"),
    (lambda: solve(GOOD, GOOD, math.inf), "p = inf"),
    (lambda: solve(GOOD, GOOD, cost="cosine"), "cost = 'cosine', expected one of 'euclidean', 'geodesic'"),
    (lambda: solve(GOOD, GOOD, method="magic"), "method = 'magic', expected one of 'auto'"),
    (lambda: solve(GOOD, GOOD, rtol=0), "rtol = 0, expected a positive number"),
    (lambda: solve(GOOD, GOOD, scaling=1.5), "scaling = 1.5, expected a number between 0 and 1"),
    (lambda: solve(GOOD, GOOD, scaling="slow"), "scaling is a str, expected a positive number"),  # type: ignore[arg-type]
    (lambda: solve(GOOD, GOOD, merge_tol="near"), "merge_tol is a str, expected a finite distance"),  # type: ignore[arg-type]
    (lambda: solve(GOOD, GOOD, blur=-1.0), "blur = -1.0, expected a positive number"),
    (lambda: solve(GOOD, GOOD, merge_tol=-1.0), "merge_tol = -1.0, expected a finite distance of at least 0"),
    (lambda: solve(GOOD, GOOD, method="sliced", n_projections=1), "n_projections = 1, expected a whole number"),
    (lambda: solve(GOOD, GOOD, cost="geodesic"), "expected one sphere around the origin; use Sphere(radius).retract"),
    (lambda: solve(GOOD, GOOD, method="line"), "method 'line' got d = 3, euclidean cost; expected d = 1"),
    (lambda: solve(GOOD, GOOD, method="circle"), "method 'circle' got d = 3"),
    (lambda: solve(GOOD[:, :2], GOOD[:, :2], method="circle"), "method 'circle' got d = 2, euclidean cost"),
    (lambda: solve(GOOD, GOOD[:3], method="assignment"), "Use method='simplex'"),
    (lambda: solve(GOOD, GOOD, 1, method="sinkhorn"), "method 'sinkhorn' got p = 1, euclidean cost; expected p = 2"),
    (lambda: solve(unit(GOOD), unit(GOOD), cost="geodesic", method="sliced"), "it needs cost='euclidean'"),
    (lambda: solve(GOOD, 9 + GOOD, weights_x=torch.ones(4).requires_grad_(), method="assignment"), "no potentials"),
    (lambda: solve(torch.cat([GOOD] * 9), 0.1 + GOOD, merge_tol=3.0), "lower merge_tol"),
])  # fmt: skip
def test_bad_input(call: object, message: str) -> None:
    with pytest.raises(ValueError) as error:
        call()  # type: ignore[operator]
    assert message in str(error.value)
