"""Bessel ratios and logarithms against mpmath, from orders below zero to a thousand and arguments from 1e-8 to 1e7."""

import mpmath
import pytest
import torch

from attn_flow.averages import bessel

ORDERS = (-0.5, 0.0, 0.5, 1.0, 3.25, 31.0, 59.5, 60.0, 191.0, 1000.0)
ARGUMENTS = (1e-8, 1e-4, 1e-2, 0.3, 1.0, 3.0, 7.7, 8.0, 20.0, 55.0, 123.0, 1e3, 1e4, 1e6, 1e7)


def exact(nu: float, z: float) -> tuple[mpmath.mpf, mpmath.mpf]:
    """I_{nu+1}/I_nu and log(Gamma(nu+1) (2/z)^nu I_nu(z)) in forty digits."""
    with mpmath.workdps(40):
        Z, half = mpmath.mpf(z), mpmath.mpf(1) / 2
        if z <= 1e4:
            log_of = lambda order: mpmath.log(mpmath.besseli(order, Z))
        else:  # Hankel's expansion; besseli itself takes minutes there
            tail = lambda order: mpmath.hyp2f0(order + half, half - order, 1 / (2 * Z))
            log_of = lambda order: Z - mpmath.log(2 * mpmath.pi * Z) / 2 + mpmath.log(tail(order))
        log_i = mpmath.loggamma(nu + 1) + nu * mpmath.log(2 / Z) + log_of(nu)
        return mpmath.exp(log_of(nu + 1) - log_of(nu)), log_i


@pytest.mark.parametrize("nu", ORDERS)
def test_ratio_and_logarithm_to_fourteen_digits(nu: float) -> None:
    for z in ARGUMENTS:
        if nu == 1000 and z > 1e4:
            continue  # Hankel's expansion needs z >> nu^2
        ratio, log_i = exact(nu, z)
        at = torch.tensor(z, dtype=torch.float64)
        assert abs(float(bessel.ratio(nu, at)) / ratio - 1) < 1e-14, z
        assert abs(float(bessel.log_i(nu, at)) / log_i - 1) < 1e-14, z


@pytest.mark.parametrize("nu", [-0.5, 0.5, 31.0, 191.0])
def test_zero_and_derivatives(nu: float) -> None:
    zero = torch.zeros(1, dtype=torch.float64)
    assert float(bessel.ratio(nu, zero)) == 0
    assert float(bessel.log_i(nu, zero)) == 0
    z = torch.tensor([0.0, 1e-3, 1.0, 7.0, 30.0, 400.0], dtype=torch.float64, requires_grad=True)
    (slope,) = torch.autograd.grad(bessel.log_i(nu, z).sum(), z)
    torch.testing.assert_close(slope, bessel.ratio(nu, z), rtol=1e-11, atol=1e-14)
    assert torch.autograd.gradcheck(lambda z: bessel.ratio(nu, z), (z,))


@pytest.mark.parametrize("nu", [-0.5, 0.5, 191.0])
def test_arguments_whose_square_overflows(nu: float) -> None:
    """I_{nu+1}/I_nu = 1 - (nu + 1/2)/z + ..., and log I ~ z."""
    z = torch.tensor([1e160, 1e300], dtype=torch.float64, requires_grad=True)
    assert bool((bessel.ratio(nu, z) == 1).all())
    torch.testing.assert_close(bessel.log_i(nu, z), z, rtol=4e-16, atol=0)
    (slope,) = torch.autograd.grad(bessel.log_i(nu, z).sum(), z)
    torch.testing.assert_close(slope, torch.ones_like(z), rtol=1e-12, atol=0)


@pytest.mark.parametrize("z", [0.0, 1e-8, 1.0, 55.0, 1e4])
def test_a_run_of_orders_is_the_ratios_one_by_one(z: float) -> None:
    """To the rounding of a fraction: each step is one division whose error the next one shrinks."""
    at = torch.tensor([z], dtype=torch.float64)
    count = 40
    one_by_one = torch.stack([bessel.ratio(float(k), at) for k in range(count)])
    numbers = torch.tensor(bessel.ratios(z, count), dtype=torch.float64)[:, None]
    for run in (numbers, torch.stack(bessel.ratios(at, count))):
        torch.testing.assert_close(run, one_by_one, rtol=1e-13, atol=0)


def test_float32_goes_through_float64() -> None:
    z = torch.tensor([1e-3, 2.0, 1e6])
    for function in (bessel.ratio, bessel.log_i):
        assert function(0.5, z).dtype == torch.float32
        torch.testing.assert_close(function(0.5, z), function(0.5, z.double()).float(), rtol=0, atol=0)
