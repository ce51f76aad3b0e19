"""One law suite for every geometry, then what is special to each."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attn_flow import Ellipsoid, Euclidean, Sphere
from attn_flow.geometry import Geometry

F64 = torch.float64
D = 4


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=F64)


LAYER_NORM = Ellipsoid.from_layer_norm(1 + 0.3 * drawn(D, seed=1), drawn(D, seed=2))
GEOMETRIES = {
    "sphere": Sphere(),
    "sphere of radius 2": Sphere(2.0),
    "flat": Euclidean(),
    "ellipsoid": Ellipsoid(drawn(D, seed=3), torch.tensor([1.0, 2.0, 0.5, 3.0], dtype=F64)),
    "skew ellipsoid": Ellipsoid(drawn(D, seed=3), drawn(D, 3, seed=4)),
    "layer norm": LAYER_NORM,
    "rms norm": Ellipsoid.from_layer_norm(1 + 0.3 * drawn(D, seed=1), centred=False),
}
every_geometry = pytest.mark.parametrize("geometry", GEOMETRIES.values(), ids=GEOMETRIES)


@every_geometry
@given(seed=st.integers(0, 2**32), n=st.integers(1, 5))
@settings(max_examples=20, deadline=None)
def test_laws_of_a_geometry(geometry: Geometry, seed: int, n: int) -> None:
    g = torch.Generator().manual_seed(seed)
    x, y, z = geometry.uniform((3, n), D, generator=g, dtype=F64)
    u = torch.randn(n, D, generator=g, dtype=F64)
    close = lambda a, b: torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)
    close(geometry.retract(x), x)  # the uniform law lies on the set
    close(geometry.retract(geometry.retract(x + u)), geometry.retract(x + u))
    v = geometry.tangent(x, u)
    close(geometry.tangent(x, v), v)  # a projection
    # A tangent vector moves along the set to second order: retraction changes nothing at first.
    h = 1e-4
    moved = x + h * v
    assert float((geometry.retract(moved) - moved).norm()) <= 100 * h**2 * (1 + float(v.square().sum()))
    d = geometry.distance
    close(d(x, x), torch.zeros(n, dtype=F64))
    close(d(x, y), d(y, x))
    assert bool((d(x, z) <= d(x, y) + d(y, z) + 1e-9).all())
    # The distance of two close points is the length of the step between them, in the geometry's own metric.
    close(d(x, geometry.retract(x + h * v)) / h, d(x, geometry.retract(x - h * v)) / h)


@every_geometry
def test_uniform_is_reproducible_batched_and_typed(geometry: Geometry) -> None:
    a, b = (geometry.uniform((2, 3), D, generator=torch.Generator().manual_seed(5), dtype=F64) for _ in range(2))
    assert a.shape == (2, 3, D)
    assert torch.equal(a, b)
    assert geometry.uniform(3, D, dtype=torch.float32).dtype == torch.float32
    with pytest.raises(ValueError, match=r"n = 0, d = \d: expected at least one token"):
        geometry.uniform(0, D)


@pytest.mark.parametrize("geometry", [Sphere(), Sphere(2.0)])
def test_uniform_on_the_sphere_has_the_moments_of_the_uniform_law(geometry: Sphere) -> None:
    x = geometry.uniform(20_000, D, generator=torch.Generator().manual_seed(0), dtype=F64) / geometry.radius
    assert float(x.mean(0).norm()) < 4 / math.sqrt(20_000)
    torch.testing.assert_close(x.T @ x / 20_000, torch.eye(D, dtype=F64) / D, rtol=0, atol=0.01)


def test_geodesic_distance_keeps_its_digits_where_acos_loses_them() -> None:
    """2 atan2(|x-y|, |x+y|) at angles from 1e-12 to pi; acos(<x,y>) is wrong by 1e-8 near both ends."""
    theta = torch.tensor([0.0, 1e-12, 1e-8, 1e-4, 1.0, math.pi - 1e-7, math.pi], dtype=F64)
    x = torch.tensor([1.0, 0.0, 0.0], dtype=F64).expand(len(theta), 3)
    y = torch.stack([theta.cos(), theta.sin(), 0 * theta], dim=-1)
    torch.testing.assert_close(Sphere().distance(x, y), theta, rtol=1e-12, atol=0)
    torch.testing.assert_close(Sphere(3.0).distance(3 * x, 3 * y), 3 * theta, rtol=1e-12, atol=0)
    same = Sphere().uniform(1000, 64)
    assert float(Sphere().distance(same, same).max()) == 0  # clamped acos gives 0.014 in float32


def test_layer_norm_lands_on_its_ellipsoid() -> None:
    gain, bias = 1 + 0.3 * drawn(D, seed=1), drawn(D, seed=2)
    out = torch.nn.functional.layer_norm(drawn(50, D, seed=7), (D,), gain, bias, eps=0.0)
    torch.testing.assert_close(LAYER_NORM.retract(out), out)
    assert LAYER_NORM.axes.shape == (D, D - 1)
    normed = torch.nn.functional.rms_norm(drawn(50, D, seed=7), (D,), gain, eps=0.0)
    torch.testing.assert_close(Ellipsoid.from_layer_norm(gain, centred=False).retract(normed), normed)


def test_an_ellipsoid_of_equal_axes_is_the_sphere() -> None:
    ball = Ellipsoid(torch.zeros(D, dtype=F64), torch.full((D,), 2.0, dtype=F64))
    x, y, u = Sphere(2.0).uniform(5, D, dtype=F64), Sphere(2.0).uniform(5, D, dtype=F64), drawn(5, D)
    torch.testing.assert_close(ball.tangent(x, u), Sphere(2.0).tangent(x, u))
    torch.testing.assert_close(ball.retract(u), Sphere(2.0).retract(u))
    torch.testing.assert_close(2 * ball.distance(x, y), Sphere(2.0).distance(x, y))


def test_an_ellipsoid_follows_the_dtype_of_the_tokens() -> None:
    x = LAYER_NORM.uniform(3, D)
    for call in (LAYER_NORM.retract(x.float()), LAYER_NORM.tangent(x.float(), x.float())):
        assert call.dtype == torch.float32


@pytest.mark.parametrize("radius", [1.0, 2.0])
def test_the_retraction_onto_a_sphere_has_its_derivatives(radius: float) -> None:
    """First and second, backward, and forward as an ordinary formula; only the result is kept for them."""
    sphere, x = Sphere(radius), drawn(2, 3, D).requires_grad_()
    assert torch.autograd.gradcheck(sphere.retract, x)
    assert torch.autograd.gradgradcheck(sphere.retract, x)
    u = drawn(2, 3, D, seed=1)
    moved = torch.func.jvp(sphere.retract, (x.detach(),), (u,))[1]
    (back,) = torch.autograd.grad((sphere.retract(x) * u).sum(), x)
    assert float((moved * u).sum()) == pytest.approx(float((back * u).sum()), rel=1e-12)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda z: kept.append(z.data_ptr()) or z, lambda z: z):
        y = sphere.retract(x)
    assert y.data_ptr() in kept
    assert x.data_ptr() not in kept
