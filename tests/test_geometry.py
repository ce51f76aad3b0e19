"""Tangent projections and retractions of the three geometries, and angles."""

import math

import pytest
import torch

from attn_flow import Ellipsoid, Euclidean, Sphere
from attn_flow.geometry import angle, place

f64 = torch.float64


def ellipsoid() -> Ellipsoid:
    A = torch.randn(4, 3, generator=torch.Generator().manual_seed(1), dtype=f64)
    return Ellipsoid(torch.tensor([0.1, 0.2, -0.3, 0.0], dtype=f64), A)


@pytest.mark.parametrize("geometry", [Sphere(), Sphere(2.5), Euclidean(), ellipsoid()])
def test_laws_of_a_geometry(generator, geometry):
    x = geometry.retract(torch.randn(20, 4, generator=generator, dtype=f64))
    u = torch.randn(20, 4, generator=generator, dtype=f64)
    torch.testing.assert_close(geometry.retract(x), x)
    tangent = geometry.tangent(x, u)
    torch.testing.assert_close(geometry.tangent(x, tangent), tangent)  # a projection
    step = 1e-4
    moved = geometry.retract(x + step * tangent)  # of second order from x + step u
    assert float((moved - x - step * tangent).norm(dim=-1).max()) < 100 * step**2 * float(u.norm(dim=-1).max()) ** 2
    if geometry.max_norm is not None:
        assert float(x.norm(dim=-1).max()) <= geometry.max_norm + 1e-12


def test_random_points_are_a_batch_on_the_sphere():
    x = Sphere(2.5).uniform((2, 5), 4, dtype=f64)
    torch.testing.assert_close(x.norm(dim=-1), torch.full((2, 5), 2.5, dtype=f64))


def test_angles_keep_their_digits():
    theta = torch.tensor([1e-9, math.pi - 1e-9], dtype=f64)
    x, y = torch.tensor([[1.0, 0.0]], dtype=f64), torch.stack([theta.cos(), theta.sin()], dim=-1)
    torch.testing.assert_close(angle(x, y), theta, rtol=1e-7, atol=0)


def test_layer_norm_puts_tokens_on_its_ellipsoid(generator):
    gain, bias = torch.rand(6, generator=generator, dtype=f64) + 0.5, torch.randn(6, generator=generator, dtype=f64)
    x = torch.randn(30, 6, generator=generator, dtype=f64)
    y = torch.nn.functional.layer_norm(x, (6,), gain, bias, eps=0.0)
    torch.testing.assert_close(Ellipsoid.from_layer_norm(gain, bias).retract(y), y)
    rms = x / x.square().mean(-1, keepdim=True).sqrt() * gain
    torch.testing.assert_close(Ellipsoid.from_layer_norm(gain, centred=False).retract(rms), rms)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: Sphere(0.0), "radius"),
        (lambda: Sphere().uniform(0, 3), "at least one token"),
        (lambda: Ellipsoid(torch.zeros(2), torch.tensor([1.0, 0.0])), "linearly dependent"),
        (lambda: Ellipsoid(torch.zeros(3), torch.ones(2)), "expected axes"),
        (lambda: Ellipsoid([0.0], torch.ones(1)), "centre is a list"),
        (lambda: Ellipsoid.from_layer_norm(torch.ones(4).half()), "gain has dtype torch.float16, expected float32"),
        (lambda: place("x", torch.zeros(1, 2), Sphere()), "without a direction"),
        (lambda: place("x", torch.ones(1, 2), Sphere), r"geometry is a type, expected a Geometry such as Sphere\(\)"),
        (lambda: place("x", torch.zeros(1, 2), ellipsoid()), r"x has shape \(1, 2\), expected \(\.\.\., 4\)"),
        (lambda: place("x", torch.full((1, 2), 1e30), Sphere()), "too long"),
    ],
)
def test_errors(call, words):
    with pytest.raises((ValueError, TypeError), match=words):
        call()
