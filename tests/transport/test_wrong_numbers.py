"""Distances of clouds at the ends of the range, with outliers and with masses of any size: proved or refused."""

import math

import pytest
import torch
from torch import Tensor

from attn_flow.geometry import Sphere
from attn_flow.transport import Limits, Transport, solve, wasserstein

F64 = torch.float64


def clouds(n: int = 30, m: int = 30, d: int = 3) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return (torch.randn(k, d, generator=generator, dtype=F64) for k in (n, m))  # type: ignore[return-value]


@pytest.mark.parametrize("scale", [1e-300, 1e-200, 1e-30, 1e30, 1e200, 1e300])
@pytest.mark.parametrize("p", [1.0, 2.0, 3.5])
def test_a_distance_scales_with_its_clouds(scale: float, p: float) -> None:
    x, y = clouds(30, 20)  # unequal numbers: the simplex
    plain, found = solve(x, y, p), solve(x * scale, y * scale, p)
    assert float(found.distance) == pytest.approx(float(plain.distance) * scale, rel=1e-9)
    assert float(found.error) <= 1e-6 * float(found.distance)
    u, v = (Sphere().retract(z) for z in clouds(10, 10))
    arc = solve(u, v, p, cost="geodesic")
    assert float(solve(u * scale, v * scale, p, cost="geodesic").distance) == pytest.approx(
        float(arc.distance) * scale, rel=1e-9
    )


def test_gradients_at_tiny_scales() -> None:
    x, y = clouds(5, 5)
    small = (x * 1e-200).requires_grad_()
    (slope,) = torch.autograd.grad(wasserstein(small, y * 1e-200), small)
    plain = x.clone().requires_grad_()
    (expected,) = torch.autograd.grad(wasserstein(plain, y), plain)
    assert torch.allclose(slope, expected, rtol=1e-9)


@pytest.mark.parametrize("far", [1e5, 1e10, 1e15])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("mass", [1.0, 10.0])
def test_a_common_far_point_changes_nothing_but_the_share(far: float, weighted: bool, mass: float) -> None:
    """Once returned 32 for 1.08 by rounding at the scale of the outlier; it may hold a quarter of the mass."""
    x, y = clouds()
    z = torch.full((1, 3), far, dtype=F64)
    a = torch.linspace(1, 2, 30, dtype=F64) if weighted else torch.ones(30, dtype=F64)
    one = torch.tensor([mass], dtype=F64)
    rest = float(wasserstein(x, y, weights_x=a, weights_y=a))
    w = torch.cat([a, one])
    found = solve(torch.cat([x, z]), torch.cat([y, z]), weights_x=w, weights_y=w)
    assert float(found.distance) == pytest.approx(rest * math.sqrt(float(a.sum() / w.sum())), rel=1e-6)
    assert float(found.error) <= 0.01 * float(found.distance)


def test_a_far_point_of_unequal_mass_travels() -> None:
    x, y = clouds()
    z = torch.full((1, 3), 1e8, dtype=F64)
    w = torch.ones(31, dtype=F64)
    w[-1] = 2.0
    found = solve(torch.cat([x, z]), torch.cat([y, z]), weights_x=w, p=1)
    moved = (2 / 32 - 1 / 31) * 1e8 * math.sqrt(3)
    assert float(found.distance) == pytest.approx(moved, rel=1e-6)


def test_a_neighbour_of_a_far_point_is_not_taken_for_it() -> None:
    """Far points that are near each other, but not equal, stay in: their scale proves nothing, and that is said."""
    x, y = clouds()
    z = torch.full((1, 3), 1e10, dtype=F64)
    w = torch.linspace(1, 2, 31, dtype=F64)
    with pytest.raises(ValueError, match="leave out points far from all others"):
        solve(torch.cat([x, z]), torch.cat([y, z + 1]), weights_x=w, weights_y=w)


@pytest.mark.parametrize("scale", [1e-300, 1e300])
def test_masses_of_any_size(scale: float) -> None:
    x, y = clouds()
    a = torch.linspace(1, 2, 30, dtype=F64)
    assert float(wasserstein(x, y, weights_x=a * scale)) == pytest.approx(float(wasserstein(x, y, weights_x=a)))
    single = wasserstein(x.float(), y.float(), weights_x=a * scale)
    assert float(single) == pytest.approx(float(wasserstein(x, y, weights_x=a)), rel=1e-5)


def test_equal_clouds_are_at_distance_zero() -> None:
    x, _ = clouds()
    w = torch.linspace(1, 2, 30, dtype=F64)
    for cloud in (x, torch.cat([x, torch.full((1, 3), 1e10, dtype=F64)])[1:]):
        found = solve(cloud, cloud, weights_x=w, weights_y=w)
        assert float(found.distance) <= 1e-6 * 4


def test_arguments_are_not_written_into() -> None:
    x, y = clouds()
    w = torch.linspace(1, 2, 30, dtype=F64)
    mask = torch.arange(30) < 25
    before = x.clone(), y.clone(), w.clone()
    for method in ("auto", "simplex", "shortlist", "sinkhorn", "sliced"):
        solve(x, y, weights_x=w, weights_y=w, mask_x=mask, mask_y=mask, method=method, rtol=0.2)
    assert all(torch.equal(*pair) for pair in zip((x, y, w), before))


def test_results_introduce_themselves() -> None:
    x, y = clouds()
    found = solve(x, y)
    assert isinstance(found, Transport)
    assert repr(found).startswith("Transport(")
    assert len(repr(solve(x.expand(4, 30, 3), y))) < 200
    assert "distance=float64 (4,)" in repr(solve(x.expand(4, 30, 3), y))
    assert Limits().shortlist == 100_000
