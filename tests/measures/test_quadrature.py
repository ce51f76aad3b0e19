"""Quadrature clouds integrate: exact trigonometric moments, a density's moments, mass beside an axis."""

import math

import mpmath
import pytest
import torch

from attn_flow import UniformSphere
from attn_flow.measures.quadrature import TAIL, circle, fibonacci

F64 = torch.float64


def angles(x: torch.Tensor) -> torch.Tensor:
    return torch.atan2(x[:, 1], x[:, 0])


def von_mises(theta: torch.Tensor) -> torch.Tensor:
    return torch.exp(2 * torch.cos(theta - 1.0))


@pytest.mark.parametrize("towards", [None, 0.7])
def test_circle_moments(towards: float | None) -> None:
    """E e^{ik theta} = 0 for the uniform law and I_k(2)/I_0(2) e^{ik} for the von Mises law exp(2 cos(theta - 1))."""
    tolerance = 1e-12 if towards is None else 8 * math.exp(-TAIL)  # an arc of 4 e^-TAIL at each end has no node
    uniform, dense = circle(400, towards=towards), circle(400, von_mises, towards=towards)
    for k in range(1, 6):
        wave = lambda cloud, k=k: (cloud.weights * torch.exp(1j * k * angles(cloud.x))).sum()
        assert abs(complex(wave(uniform))) < tolerance
        exact = complex(mpmath.besseli(k, 2) / mpmath.besseli(0, 2)) * complex(math.cos(k), math.sin(k))
        assert abs(complex(wave(dense)) - exact) < tolerance


def test_log_tan_spacing_resolves_both_ends_of_an_axis() -> None:
    cloud = circle(400, towards=0.3)
    axis = torch.tensor([math.cos(0.3), math.sin(0.3)], dtype=F64)
    across = (cloud.x - (cloud.x @ axis)[:, None] * axis).norm(dim=-1)
    for end in (cloud.x @ axis > 0, cloud.x @ axis < 0):
        assert float(across[end].min()) < 1e-7
        # Nodes per factor e of the distance to the axis are the same at every scale.
        counts = [int(((across > r) & (across < math.e * r) & end).sum()) for r in (1e-6, 1e-4, 1e-2)]
        assert max(counts) - min(counts) <= 2, counts
        assert min(counts) >= 4
    assert torch.allclose(cloud.weights.sum(), torch.ones((), dtype=F64))
    near = cloud.weights[(across < 1e-3) & (cloud.x @ axis > 0)].sum()
    assert float(near) == pytest.approx(1e-3 / math.pi, rel=0.1)


def test_fibonacci_against_the_closed_form_of_the_uniform_law() -> None:
    """Its log-partition and tilted mean are those of UniformSphere(3), to the error of 2000 nodes."""
    cloud, law = fibonacci(2000), UniformSphere(3)
    g = torch.tensor([[0.3, -1.0, 2.0], [1.0, 0.0, 0.0]], dtype=F64)
    for beta in (0.5, 3.0, 20.0):
        torch.testing.assert_close(cloud.log_partition(g, beta), law.log_partition(g, beta), rtol=0, atol=2e-4)
        torch.testing.assert_close(cloud.tilted_mean(g, beta), law.tilted_mean(g, beta), rtol=0, atol=2e-3)
    tilted = fibonacci(2000, lambda x: torch.exp(3 * x[:, 2]))
    exact = law.tilted_mean(torch.tensor([[0.0, 0.0, 1.0]], dtype=F64), 3.0)[0]
    torch.testing.assert_close(tilted.mean, exact, rtol=0, atol=1e-3)


def test_bad_densities_and_sizes() -> None:
    for build in (circle, fibonacci):
        with pytest.raises(ValueError, match=r"n = 1, expected a whole number of at least 2"):
            build(1)
        with pytest.raises(ValueError, match=r"density must be finite and nonnegative, with some mass"):
            build(10, lambda x: -torch.ones(10, dtype=F64))
        with pytest.raises(ValueError, match=r"density returned shape \(3,\), expected \(10,\)"):
            build(10, lambda x: torch.ones(3, dtype=F64))
    with pytest.raises(ValueError, match=r"n = 11, towards = .*: expected an angle and an even number of nodes"):
        circle(11, towards=0.0)
