"""Averages on the circle by Fourier series: equal to the dense ones, and refused off the circle."""

from __future__ import annotations

from dataclasses import replace

import pytest
import scipy.special
import torch

from attn_flow import Attention, Sphere
from attn_flow.averages import costs, fourier

F64 = torch.float64


def circle(n, seed=0, dtype=F64):
    return Sphere().uniform(n, 2, generator=torch.Generator().manual_seed(seed), dtype=dtype)


@pytest.mark.parametrize("b", [1e-3, 1.0, 100.0, 1e4])
def test_coefficients_are_bessel_functions(b):
    K = fourier.terms(b)
    found = fourier._coefficients(torch.tensor([b], dtype=F64), K)[0, ::2]
    expected = torch.tensor([(1 if k == 0 else 2) * scipy.special.ive(k, b) for k in range(K + 1)], dtype=F64)
    assert torch.allclose(found, expected, rtol=1e-11, atol=1e-17)
    assert scipy.special.ive(K + 1, b) < 1e-16
    several = fourier._coefficients(torch.tensor([b, b / 2], dtype=F64), K)[0, ::2]
    assert torch.allclose(several, expected, rtol=1e-11, atol=1e-17)


@pytest.mark.parametrize("beta", [0.1, 10.0, 100.0])
def test_equals_the_dense_average(beta):
    """Queries of one length and of several (G no multiple of a rotation), weights and padding."""
    generator = torch.Generator().manual_seed(1)
    x = circle(1500)
    weights = torch.rand(1500, generator=generator, dtype=F64)
    mask = torch.rand(1500, generator=generator) > 0.3
    G = torch.tensor([[1.0, 0.4], [-0.3, 0.7]], dtype=F64)
    for attention in (Attention.identity(2, beta, dtype=F64), Attention.from_matrices(G, G.mT, beta=beta)):
        q = x @ attention.G[0].mT
        assert fourier.fits(q, x, beta, 1e-12, F64)
        dense = replace(attention, truncation=0.0).drift(x, weights=weights, mask=mask)
        assert float((attention.drift(x, weights=weights, mask=mask) - dense).abs().max()) < 1e-12
        assert attention.truncated_drift(x).pairs < 0.2


def test_float32_tokens_a_rounding_off_the_circle():
    x = circle(2000, dtype=torch.float32)
    exact = Attention.identity(2, 1000.0, dtype=F64, truncation=0.0).drift(x.double())
    assert fourier.fits(x, x, 100.0, 1e-6, torch.float32)
    found = fourier.softmax(x.double(), x.double(), x.double(), tolerance=1e-6, scale=1000.0)
    error = (found.average - exact).norm(dim=-1)
    assert float(error.max()) < 1e-6
    assert bool((error <= 2 * found.left_out).all())
    assert float(found.left_out.max()) < 1e-5


def test_a_query_far_from_all_keys_keeps_its_digits():
    """Its sum of weights is 1e-50 of the largest, far below the rounding of the series."""
    angle = torch.linspace(0, 0.5, 2000, dtype=F64)
    k = torch.stack([angle.cos(), angle.sin()], dim=-1)
    q = torch.cat([k[:1999], -k[:1]])
    found = fourier.softmax(q, k, k, tolerance=1e-12, scale=100.0)
    exact = torch.softmax(100.0 * q @ k.mT, dim=-1) @ k
    assert float((found.average - exact).abs().max()) < 1e-12
    assert float(found.left_out[-1]) == 0


def test_off_the_circle_it_does_not_fit():
    x = circle(1500)
    assert not fourier.fits(x, 1.001 ** torch.arange(1500, dtype=F64)[:, None] * x, 1.0, 1e-6, F64)
    known = costs.here()
    for n, beta in ((1500, 1e9), (100, 1.0)):  # where it does, but too many terms, or too few pairs
        terms = fourier.fits(x[:n], x[:n], beta, 1e-6, F64)
        assert known.series(n, n, terms) > known.dense(n, n, 4, double=True)
    shifted = x + torch.tensor([0.1, 0.0], dtype=F64)
    attention = Attention.identity(2, 5.0, dtype=F64)
    assert torch.equal(attention.drift(shifted), replace(attention, truncation=0.0).drift(shifted))


def test_masks_of_pairs_are_not_its_business():
    x = circle(1500)
    for options in ({"causal": True}, {"self_attention": False}, {"kind": "unnormalised"}):
        attention = Attention.identity(2, 5.0, dtype=F64, **options)
        assert torch.equal(attention.drift(x), replace(attention, truncation=0.0).drift(x))


@pytest.mark.parametrize("beta", [0.0, 1e-9])
def test_without_temperature_it_is_the_mean(beta):
    x = circle(1500)
    found = Attention.identity(2, beta, dtype=F64).truncated_drift(x)
    assert float((found.drift - x.mean(0)).abs().max()) < 1e-8
    assert float(found.error.max()) < 1e-12
