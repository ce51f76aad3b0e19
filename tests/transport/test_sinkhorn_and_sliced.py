"""The Sinkhorn distance of geomloss with its proved bounds, and the sliced distance."""

from __future__ import annotations

import math
import re

import pytest
import torch
from geomloss import SamplesLoss
from inputs import F64, masses, normal
from torch import Tensor

from attn_flow.measures.cloud import Cloud
from attn_flow.transport import CertificateError, Sliced, solve, wasserstein


def clusters(n: int, shares: list[float], seed: int) -> Tensor:
    """Tight clusters around fixed centres in the given shares."""
    label = torch.multinomial(torch.tensor(shares), n, True, generator=torch.Generator().manual_seed(seed))
    return normal(len(shares), 3, seed=77)[label] + 1e-3 * normal(n, 3, seed=seed)


# Bounds.


@pytest.mark.parametrize("d", [3, 30])
def test_the_distance_is_within_its_error(d: int) -> None:
    x, y = normal(300, d), 1.5 + normal(300, d, seed=1)
    exact = float(wasserstein(x, y))
    result = solve(x, y, method="sinkhorn", rtol=0.02)
    assert abs(float(result.value) - exact) <= float(result.error) <= 0.02 * float(result.value)
    assert result.method == "sinkhorn"
    assert result.plan is None


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("rtol", [0.05, 0.3, 10.0])
def test_the_bounds_hold_at_any_blur(seed: int, rtol: float) -> None:
    """Weighted clouds of different sizes; a large blur leaves mass that the product plan has to move."""
    x, y = normal(8, 2, seed=seed) - 1.0, normal(6, 2, seed=100 + seed) + 1.0
    a, b = masses(8, seed=200 + seed), masses(6, seed=300 + seed)
    a, b = (torch.cat([z[:1] + z[-1:], z[1:-1], 0 * z[-1:]]) for z in (a, b))  # the last tokens have no mass
    exact = float(wasserstein(Cloud(x, a), Cloud(y, b)))
    result = solve(Cloud(x, a), Cloud(y, b), method="sinkhorn", rtol=rtol)
    value, error = float(result.value), float(result.error)
    assert value - error <= exact * (1 + 1e-12)
    assert exact <= (value + error) * (1 + 1e-12)
    u, v = result.potentials
    c = (x[:, None] - y).square().sum(-1)
    assert float((u[:, None] + v - c).max()) <= 1e-12
    assert (value - error) ** 2 - 1e-12 <= float(a @ u + b @ v) <= exact**2 * (1 + 1e-12)


def test_the_bounds_are_attained_where_there_is_one_plan() -> None:
    """One point to one point: both bounds are the distance, but for what the lower one allows for rounding."""
    x, y = normal(3, 1, 2), 3 + normal(3, 1, 2, seed=1)
    result = solve(x, y, method="sinkhorn")
    expected = (x - y).norm(dim=-1)[:, 0]
    assert torch.allclose(result.value, expected, rtol=1e-12)
    assert bool(((result.error / expected).log10() + 14 < 1).all())
    assert bool(((result.error / expected).log10() + 14 > -1).all())  # about 16 (d + 2) rounding errors


@pytest.mark.parametrize("shares", [[0.1, 0.1, 0.2, 0.2, 0.4], [0.5, 0.2, 0.1, 0.1, 0.1]])
def test_clusters_are_right_or_refused(shares: list[float]) -> None:
    """geomloss alone is far too low where masses of clusters differ. A refusal says what was proved."""
    x, y = clusters(300, [0.5, 0.2, 0.1, 0.1, 0.1], 3), clusters(300, shares, 4)
    exact = float(wasserstein(x, y))
    try:
        value = float(wasserstein(x, y, method="sinkhorn"))
    except CertificateError as error:
        value, bound = map(float, re.search(r"W_2 = ([\d.e-]+) of .* only up to ([\d.e-]+),", str(error)).groups())
        assert abs(value - exact) <= 1.01 * bound  # the message rounds
    else:
        assert value == pytest.approx(exact, rel=0.01)


def test_the_pair_that_is_not_proved_is_named() -> None:
    x = torch.stack([normal(20, 2), torch.cat([normal(10, 2), normal(10, 2) + 1e4])])
    y = torch.stack([normal(20, 2, seed=1) + 3, x[1] + 1e-3])
    message = r"'sinkhorn' proves W_2 = .* of pair 1 of 2 only up to .*, more than rtol = 0.1.* exact method \('auto'"
    with pytest.raises(CertificateError, match=message):
        solve(x, y, method="sinkhorn", rtol=0.1)


# The estimate of geomloss.


@pytest.mark.parametrize("dtype", [torch.float32, F64])
def test_value_and_gradients_are_those_of_geomloss(dtype: torch.dtype) -> None:
    """sqrt(2 S), where it lies between the bounds, as at a large blur."""
    clouds = normal(60, 2), 5 + normal(50, 2, seed=1), torch.ones(60, dtype=F64)
    x, y, a = (z.to(dtype).requires_grad_() for z in clouds)
    points = torch.cat([x, y]).detach()
    diameter = float((points.amax(0) - points.amin(0)).norm())
    loss = SamplesLoss("sinkhorn", p=2, blur=0.1 * diameter, scaling=0.9, diameter=diameter)
    expected = (2 * loss(a / a.sum(), x, torch.full((50,), 1 / 50, dtype=dtype), y)).sqrt()
    value = wasserstein(Cloud(x, a), y, method="sinkhorn", rtol=1.0)
    assert value.dtype == dtype
    assert float(value.detach()) == pytest.approx(float(expected.detach()), rel=1e-5 if dtype != F64 else 1e-12)
    for ours, theirs in zip(torch.autograd.grad(value, (x, y, a)), torch.autograd.grad(expected, (x, y, a))):
        assert torch.allclose(ours, theirs, atol=1e-6 if dtype != F64 else 1e-9)


# Batches and units.


def test_a_batch_is_a_loop() -> None:
    """Pairs with weights and padding, of very different sizes, all at once."""
    sizes = torch.tensor([1.0, 1.0, 5.0], dtype=F64)[:, None, None]
    x, y = sizes * normal(3, 30, 2), sizes * (1.5 + 0.7 * normal(3, 25, 2, seed=1))
    a, b = 1e300 * masses(3, 30, seed=2), 3 * masses(3, 25, seed=3)
    mask_x, mask_y = normal(3, 30, seed=4) > -1, normal(3, 25, seed=5) > -1
    first, second = Cloud(x, a, mask_x), Cloud(y, b, mask_y)
    result = solve(first, second, method="sinkhorn", rtol=0.3)
    exact = wasserstein(first, second)
    assert bool(((result.value - exact).abs() <= result.error).all())
    assert bool((result.error <= 0.3 * result.value).all())
    u, v = result.potentials
    assert not u[~mask_x].any()
    assert not v[~mask_y].any()
    for k in range(3):
        alone = solve(
            Cloud(x[k][mask_x[k]], a[k][mask_x[k]]),
            Cloud(y[k][mask_y[k]], b[k][mask_y[k]]),
            method="sinkhorn",
            rtol=0.3,
        )
        assert float(result.value[k]) == pytest.approx(float(alone.value), rel=1e-9)
        assert float(result.error[k]) == pytest.approx(float(alone.error), rel=1e-6)


def test_collapsed_clouds() -> None:
    """geomloss itself raises on two identical collapsed clouds."""
    x = torch.ones(2, 5, 3, dtype=F64)
    x[1] += normal(5, 3)
    x.requires_grad_()
    y = torch.ones(2, 4, 3, dtype=F64)
    y[1] += 5
    result = solve(x, y, method="sinkhorn", rtol=0.1)
    result.value.sum().backward()
    assert float(result.value[0].detach()) == float(result.error[0]) == 0.0
    assert not x.grad[0].any()
    assert bool(torch.isfinite(x.grad).all())
    assert x.grad[1].any()


@pytest.mark.parametrize("scale", [1e-100, 1e-30, 1e30, 1e200])
def test_the_value_scales_with_the_clouds(scale: float) -> None:
    x, y = normal(20, 2), 1.5 + normal(20, 2, seed=1)
    plain = solve(x, y, method="sinkhorn", rtol=0.5)
    scaled = solve(scale * x, scale * y, method="sinkhorn", rtol=0.5)
    assert float(scaled.value) == pytest.approx(scale * float(plain.value), rel=1e-9)
    assert float(scaled.error) == pytest.approx(scale * float(plain.error), rel=1e-6)


def test_a_far_token_without_weight_changes_nothing() -> None:
    x, y = normal(20, 2), 1.5 + normal(20, 2, seed=1)
    padded = Cloud(torch.cat([x, torch.full((1, 2), 1e6, dtype=F64)]), torch.cat([torch.ones(20), torch.zeros(1)]))
    value = wasserstein(padded, y, method="sinkhorn", rtol=0.2)
    assert float(value) == pytest.approx(float(wasserstein(x, y, method="sinkhorn", rtol=0.2)), rel=1e-9)


# The sliced distance.


@pytest.mark.parametrize("p", [1, 2, 3])
def test_sliced_is_the_mean_over_its_directions(p: int) -> None:
    x, y = Cloud(normal(7, 3), masses(7)), Cloud(5 * normal(6, 3, seed=1) + 2, masses(6))
    seeded = lambda: torch.Generator().manual_seed(3)
    result = solve(x, y, p, method=Sliced(9, seeded()))
    powers = []
    for direction in torch.randn(9, 3, generator=seeded(), dtype=F64):
        direction = direction / direction.norm()
        project = lambda cloud, t=direction: Cloud((cloud.x @ t)[:, None], cloud.weights)
        powers.append(float(wasserstein(project(x), project(y), p, method="line")) ** p)
    mean = sum(powers) / 9
    assert float(result.value) == pytest.approx(mean ** (1 / p))
    deviation = math.sqrt(sum((power - mean) ** 2 for power in powers) / 8 / 9)
    assert float(result.error) == pytest.approx(deviation * mean ** (1 / p - 1) / p)
    assert float(result.value) <= float(wasserstein(x, y, p))
    assert (result.method, result.plan, result.potentials) == ("sliced", None, None)


def test_sliced_gradients() -> None:
    x, y = normal(6, 3).requires_grad_(), 0.3 + normal(5, 3, seed=1)
    f = lambda z: wasserstein(z, y, method=Sliced(5, torch.Generator().manual_seed(1)))
    assert torch.autograd.gradcheck(f, (x,))
    same = wasserstein(x, x.detach().clone(), method=Sliced(5))
    same.backward()
    assert float(same.detach()) == 0.0
    assert torch.equal(x.grad, torch.zeros_like(x))


@pytest.mark.cuda
@pytest.mark.parametrize("method", ["auto", "sinkhorn", "sliced"])
def test_on_cuda(method: str) -> None:
    x, y = normal(300, 3), 1.5 + normal(300, 3, seed=1)
    result = solve(x.cuda(), y.cuda(), method=method, rtol=0.02)
    assert result.value.is_cuda
    if method != "sliced":
        assert float(result.value) == pytest.approx(float(wasserstein(x, y)), rel=0.02)
