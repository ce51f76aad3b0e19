"""Large, clustered, collapsed and badly scaled clouds: shortlist, merged points, outliers, and their error bounds."""

from __future__ import annotations

import math
import subprocess
import sys

import numpy as np
import pytest
import torch
from inputs import F64, normal, unit
from torch import Tensor

from attn_flow.geometry import Sphere
from attn_flow.measures.cloud import Cloud
from attn_flow.transport import CertificateError, solve, wasserstein

FEW, MANY = [0.5, 0.2, 0.1, 0.1, 0.1], [0.1, 0.1, 0.2, 0.2, 0.4]


def clustered(n: int, shares: list[float], width: float, seed: int) -> Tensor:
    """Tokens around fixed centres of the sphere, in the given shares: what a metastable phase leaves."""
    label = torch.multinomial(torch.tensor(shares), n, True, generator=torch.Generator().manual_seed(seed))
    return unit(unit(normal(len(shares), 3, seed=77))[label] + width * normal(n, 3, seed=seed))


def clouds_of_the_theory(n: int) -> dict[str, tuple[Tensor, Tensor]]:
    """Pairs of clouds of n tokens on the sphere, from spread to collapsed."""
    x0 = unit(normal(n, 3, seed=1))
    stretched = lambda t, k: unit(x0 * torch.tensor([math.exp(t)] * k + [1.0] * (3 - k), dtype=F64))
    limit = lambda k: unit(x0 * torch.tensor([1.0] * k + [0.0] * (3 - k), dtype=F64))
    return {
        "spread": (x0, unit(normal(n, 3, seed=2))),
        "spread, moved": (x0, unit(normal(n, 3, seed=2) + 1)),
        "clusters, unequal masses": (clustered(n, FEW, 1e-3, 3), clustered(n, MANY, 1e-3, 4)),
        "clusters, equal masses": (clustered(n, [0.2] * 5, 1e-3, 3), clustered(n, [0.2] * 5, 1e-3, 4)),
        "atoms": (clustered(n, FEW, 0.0, 3), clustered(n, MANY, 0.0, 4)),
        "atoms up to rounding": (clustered(n, FEW, 1e-13, 3), clustered(n, MANY, 1e-13, 4)),
        "half an atom": (torch.cat([x0[: n // 2], x0[:1].expand(n - n // 2, 3)]), unit(normal(n, 3, seed=2))),
        "concentrating on two points": (stretched(3.0, 1), limit(1)),
        "concentrating on a circle": (stretched(3.0, 2), limit(2)),
        "collapsed": (x0[:1].expand(n, 3), x0[1:2].expand(n, 3)),
        "the same, shuffled": (x0, x0[torch.randperm(n, generator=torch.Generator().manual_seed(5))]),
    }


CLOUDS = clouds_of_the_theory(1200)


@pytest.mark.parametrize("name", CLOUDS)
def test_clouds_of_the_theory_are_within_their_error(name: str) -> None:
    x, y = CLOUDS[name]
    exact = wasserstein(x, y, method="simplex" if "cluster" in name or "atom" in name else "assignment")
    for method in ("auto", "shortlist"):
        result = solve(x, y, method=method)
        assert float((result.value - exact).abs()) <= float(result.error) + 1e-12  # the rounding of the reference
        assert float(result.error) <= max(1e-6 * float(result.value), 1e-6)
        plan = result.plan
        assert float((torch.sparse.sum(plan, 1).to_dense() - 1 / len(x)).abs().max()) < 1e-12
        assert float((torch.sparse.sum(plan, 0).to_dense() - 1 / len(y)).abs().max()) < 1e-12
        i, j = plan.indices()
        squared = float(result.value) ** 2
        assert float(plan.values() @ (x[i] - y[j]).square().sum(-1)) == pytest.approx(squared, abs=1e-9)
        u, v = result.potentials
        slack = torch.cdist(x, y, compute_mode="donot_use_mm_for_euclid_dist").square() - u[:, None] - v
        assert float(slack.min()) >= -1e-13
        assert squared - float(u.mean() + v.mean()) <= max(2e-6 * squared, 1e-11)  # duality


@pytest.mark.parametrize("name", ["spread", "clusters, unequal masses", "concentrating on a circle"])
@pytest.mark.parametrize(("cost", "p"), [("euclidean", 1), ("geodesic", 2)])
def test_shortlist_of_other_costs(name: str, cost: str, p: int) -> None:
    x, y = (z[:900] for z in CLOUDS[name])
    result = solve(x, y, p, cost=cost, method="shortlist")
    assert float(result.value) == pytest.approx(float(wasserstein(x, y, p, cost=cost, method="simplex")), rel=1e-6)
    assert float(result.error) <= 1e-6 * float(result.value)


@pytest.mark.parametrize("d", [2, 20])
def test_shortlist_of_weighted_clouds_of_different_sizes(d: int) -> None:
    x, y = normal(1500, d, seed=1), 0.5 + normal(700, d, seed=2)
    cloud = Cloud(x, torch.rand(1500, generator=torch.Generator().manual_seed(3), dtype=F64))
    result = solve(cloud, y, method="shortlist")
    assert float(result.value) == pytest.approx(float(wasserstein(cloud, y, method="simplex")), rel=1e-6)
    assert float(result.error) <= 1e-6 * float(result.value)


@pytest.mark.parametrize(
    ("x", "y", "expected"),
    [
        (torch.zeros(1, 3), torch.ones(1, 3), math.sqrt(3)),
        (torch.zeros(50, 3), torch.zeros(20, 3), 0.0),
        (torch.zeros(50, 3), torch.ones(20, 3), math.sqrt(3)),
        (torch.ones(3000, 2), torch.ones(2000, 2), 0.0),
        (torch.ones(40, 1), torch.ones(1, 1), 0.0),
    ],
)
def test_single_and_collapsed_points(x: Tensor, y: Tensor, expected: float) -> None:
    x = x.double().requires_grad_()
    result = solve(x, y.double())
    result.value.backward()
    assert float(result.value.detach()) == pytest.approx(expected, abs=1e-14)
    assert float(result.error) <= 1e-14
    assert bool(torch.isfinite(x.grad).all())


# Merged points.


def test_merged_points_share_the_gradient() -> None:
    """40 tokens on 2 places against one point: the derivative of W_1 in each of them is a unit vector / 40."""
    x = torch.tensor([[0.0, 0.0], [2.0, 0.0]], dtype=F64).repeat(20, 1).requires_grad_()
    result = solve(x, torch.tensor([[5.0, 0.0]], dtype=F64), 1)
    result.value.backward()
    assert result.method == "simplex"
    assert float(result.value.detach()) == pytest.approx(4.0, rel=1e-14)
    assert torch.allclose(x.grad, torch.tensor([-1 / 40, 0.0], dtype=F64).expand(40, 2), atol=1e-15)


def test_merged_points_have_the_gradient_of_their_weights() -> None:
    x, y = normal(4, 2).repeat(15, 1), normal(3, 2, seed=1).repeat(20, 1)
    slopes = []
    for method in ("auto", "simplex"):
        a = torch.linspace(1, 2, 60, dtype=F64).requires_grad_()
        result = solve(Cloud(x, a), y, method=method)
        slopes += torch.autograd.grad(result.value, a)
    assert result.method == "simplex"
    assert torch.allclose(*slopes, atol=1e-12)


# Certificates.


def test_a_solver_that_stops_early_is_not_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan that is not optimal, or misses a part of the mass, has an error bound that covers the difference."""
    ot = pytest.importorskip("ot")
    x, y = normal(6, 2), 3 + normal(7, 2, seed=1)
    exact = float(wasserstein(x, y, method="simplex"))
    product = np.full((6, 7), 1 / 42)
    monkeypatch.setattr(ot, "emd", lambda a, b, C, **_: (product, {"v": np.zeros(7)}))
    result = solve(x, y, method="simplex", rtol=10.0)
    assert exact < float(result.value) <= exact + float(result.error)
    with pytest.raises(CertificateError, match=r"method 'simplex' proves W_2 = .* only up to"):
        solve(x, y, method="simplex")

    one, other = torch.zeros(1, 2, dtype=F64), torch.tensor([[3.0, 4.0]], dtype=F64)
    monkeypatch.setattr(ot, "emd", lambda a, b, C, **_: (np.full((1, 1), 1 - 1e-3), {"v": np.ones(1)}))
    result = solve(one, other, method="simplex")  # one pair, so the missing mass would have moved by 5
    missing = 5 - 5 * math.sqrt(1 - 1e-3)
    assert missing <= float(result.error) <= 1.01 * missing
    assert float(result.value) == pytest.approx(5 - missing)


def test_a_sparse_solver_that_misses_mass_is_not_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A translation by (10, 10), of which a thousandth of the mass is left out."""
    solver = pytest.importorskip("ot.lp.emd_wrap")
    sparse = solver.emd_c_sparse

    def incomplete(*arguments: object) -> tuple[object, ...]:
        i, j, mass, *rest = sparse(*arguments)
        return i, j, mass * (1 - 1e-3), *rest

    monkeypatch.setattr(solver, "emd_c_sparse", incomplete)
    x = normal(900, 2)
    result = solve(x, x.flip(0) + 10, method="shortlist", rtol=1.0)
    exact = math.sqrt(200)
    assert exact - float(result.value) > 1e-4 * exact
    assert exact - float(result.value) <= float(result.error) < 0.01 * exact


@pytest.mark.parametrize("p", [1, 2, 3])
def test_the_error_of_the_distance_from_that_of_the_cost(monkeypatch: pytest.MonkeyPatch, p: int) -> None:
    """Potentials that are too low by q of the cost W^p leave the error W - (W^p - q W^p)^{1/p}."""
    ot = pytest.importorskip("ot")
    x, y = torch.zeros(1, 2, dtype=F64), torch.tensor([[3.0, 4.0], [5.0, 0.0]], dtype=F64)
    for q in (0.3, 1e-6, 1e-14):
        # One point to two at distance 5: lowering the potential of one by 2 q lowers the dual value by q.
        monkeypatch.setattr(ot, "emd", lambda a, b, C, q=q, **_: (np.full((1, 2), 0.5), {"v": np.array([0.0, -2 * q])}))
        result = solve(x, y, p, method="simplex", rtol=1.0)
        assert float(result.error) == pytest.approx(5 * -math.expm1(math.log1p(-q) / p), rel=0.02)


# Scales, outliers and masses of any size.


@pytest.mark.parametrize("scale", [1e-300, 1e-30, 1e30, 1e300])
@pytest.mark.parametrize("p", [1, 2, 3.5])
def test_a_distance_scales_with_its_clouds(scale: float, p: float) -> None:
    x, y = normal(30, 3), normal(20, 3, seed=1)
    plain, scaled = solve(x, y, p), solve(x * scale, y * scale, p)
    assert float(scaled.value) == pytest.approx(float(plain.value) * scale, rel=1e-9)
    assert float(scaled.error) <= 1e-6 * float(scaled.value)
    u, v = (Sphere().retract(z[:10]) for z in (x, y))
    arc = float(wasserstein(u, v, p, cost="geodesic"))
    assert float(wasserstein(u * scale, v * scale, p, cost="geodesic")) == pytest.approx(arc * scale, rel=1e-9)


@pytest.mark.parametrize("method", ["auto", "simplex", "shortlist"])
def test_a_distance_does_not_depend_on_the_origin(method: str) -> None:
    """Small clouds far from zero, as binary fractions that the shift does not round."""
    x, y = ((normal(n, 3, seed=n) * 2**20).round() / 2**30 for n in (1000, 900))
    near, far = (solve(x + shift, y + shift, method=method) for shift in (0.0, 2.0**20))
    assert float(far.value) == pytest.approx(float(near.value), rel=1e-6)
    assert float(far.error) <= 1e-6 * float(far.value)


def test_gradients_at_tiny_scales() -> None:
    x, y = normal(5, 3), normal(5, 3, seed=1)
    slopes = []
    for scale in (1.0, 1e-200):
        z = (x * scale).requires_grad_()
        slopes += torch.autograd.grad(wasserstein(z, y * scale), z)
    assert torch.allclose(*slopes, rtol=1e-9)


def test_an_outlier_of_unequal_mass_travels() -> None:
    x, y, outlier = normal(30, 3), normal(30, 3, seed=1), torch.full((1, 3), 1e8, dtype=F64)
    weights = torch.ones(31, dtype=F64)
    weights[-1] = 2.0
    result = solve(Cloud(torch.cat([x, outlier]), weights), torch.cat([y, outlier]), 1)
    assert float(result.value) == pytest.approx((2 / 32 - 1 / 31) * 1e8 * math.sqrt(3), rel=1e-6)


@pytest.mark.parametrize("shift", [0.0, 1.0])
def test_outliers_set_the_scale_of_rounding_and_that_is_said(shift: float) -> None:
    x, y, outlier = normal(30, 3), normal(30, 3, seed=1), torch.full((1, 3), 1e10, dtype=F64)
    weights = torch.linspace(1, 2, 31, dtype=F64)
    with pytest.raises(CertificateError, match="remove points far from all others"):
        solve(Cloud(torch.cat([x, outlier]), weights), Cloud(torch.cat([y, outlier + shift]), weights))


@pytest.mark.parametrize("scale", [1e-300, 1e300])
def test_weights_of_any_size(scale: float) -> None:
    x, y, a = normal(30, 3), normal(30, 3, seed=1), torch.linspace(1, 2, 30, dtype=F64)
    expected = float(wasserstein(Cloud(x, a), y))
    assert float(wasserstein(Cloud(x, a * scale), y)) == pytest.approx(expected)
    assert float(wasserstein(Cloud(x.float(), a * scale), y.float())) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("method", ["auto", "simplex", "shortlist", "sinkhorn", "sliced"])
def test_arguments_are_not_written_into(method: str) -> None:
    x, y, a = normal(30, 3), normal(30, 3, seed=1), torch.linspace(1, 2, 30, dtype=F64)
    before = x.clone(), y.clone(), a.clone()
    solve(Cloud(x, a, torch.arange(30) < 25), Cloud(y, a), method=method, rtol=2.0)
    assert all(torch.equal(*pair) for pair in zip((x, y, a), before))


@pytest.mark.slow
@pytest.mark.parametrize("width", [None, 1e-2])  # spread, and around five points
def test_certified_at_a_hundred_thousand_below_a_gigabyte(width: float | None) -> None:
    """In a process of its own, whose resident memory nothing else has raised before.

    The error is 1e-6 of the distance, or the rounding of the potentials: the network simplex starts them at n times
    the largest cost. A gap g of the cost is g / 2 W of the distance.
    """
    code = f"""
import resource, torch
from attn_flow.transport import solve
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
x, y, noise, more = torch.randn(4, 100_000, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
if {width} is not None:
    centres = x[:5].clone()
    x, y = (centres[z[:, 0].argsort() % 5] + {width} * w for z, w in ((x, noise), (y, more)))
x, y = (z / z.norm(dim=-1, keepdim=True) for z in (x, y))
solve(x[:2000], y[:2000])
before = peak()
result = solve(x, y)
print(result.method, float(result.value), float(result.error), (peak() - before) * 1024)
"""
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert out[0] == "shortlist"
    value, error, peak = map(float, out[1:])
    rounding = 10 * torch.finfo(torch.float64).eps * 100_000 * 2**2
    assert 0 < error <= max(1e-6 * value, rounding / (2 * value))
    assert peak < 1e9
