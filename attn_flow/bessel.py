"""Modified Bessel functions I_nu of real order, as torch needs them: ratios and logarithms that never overflow.

Everything is built from rho_nu(z) = I_{nu+1}(z) / (z I_nu(z)), which is smooth and positive at z = 0 and obeys
rho_nu = 1 / (2(nu+1) + z^2 rho_{nu+1}). The recurrence is stable downwards, so orders below ORDER are reached
from ORDER, where the uniform (Debye) expansion in 1/nu is exact to double precision.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

ORDER = 60.0
# Debye polynomials u_k(p), k = 1..5, as coefficients of p^k, p^{k+2}, ..., p^{3k} (DLMF 10.41.10).
DEBYE = (
    (3 / 24, -5 / 24),
    (81 / 1152, -462 / 1152, 385 / 1152),
    (30375 / 414720, -369603 / 414720, 765765 / 414720, -425425 / 414720),
    (4465125 / 39813120, -94121676 / 39813120, 349922430 / 39813120, -446185740 / 39813120, 185910725 / 39813120),
    (
        1519035525 / 6688604160,
        -49286948607 / 6688604160,
        284499769554 / 6688604160,
        -614135872350 / 6688604160,
        566098157625 / 6688604160,
        -188699385875 / 6688604160,
    ),
)


def _log_debye(nu: float, z: Tensor) -> Tensor:
    """log( Gamma(nu+1) (2/z)^nu I_nu(z) ) for nu >= ORDER by the uniform expansion in 1/nu."""
    root = torch.sqrt(1 + (z / nu) ** 2)
    p = 1 / root
    series = torch.ones_like(z)
    for k, u in enumerate(DEBYE, start=1):
        polynomial = torch.zeros_like(z)
        for c in reversed(u):
            polynomial = polynomial * p**2 + c
        series = series + polynomial * p**k / nu**k
    constant = math.lgamma(nu + 1) + nu * math.log(2 / nu) - 0.5 * math.log(2 * math.pi * nu)
    return constant + nu * (root - torch.log1p(root)) - 0.5 * torch.log(root) + torch.log(series)


def _rho_debye(nu: float, z: Tensor) -> Tensor:
    """rho_nu(z) for nu >= ORDER: the ratio of two uniform expansions."""
    return torch.exp(_log_debye(nu + 1, z) - _log_debye(nu, z)) / (2 * (nu + 1))


def _descend(nu: float, z: Tensor) -> tuple[Tensor, Tensor]:
    """rho_nu(z), and log( Gamma(nu+1) (2/z)^nu I_nu(z) ), from the first order above ORDER."""
    steps = max(0, math.ceil(ORDER - nu))
    rho, log_i = _rho_debye(nu + steps, z), _log_debye(nu + steps, z)
    for order in reversed(range(steps)):
        # At this line rho is rho_{nu+order+1}; I_{a} = I_{a+1} / (z rho_a) and Gamma(a+2) = (a+1) Gamma(a+1).
        rho = 1 / (2 * (nu + order + 1) + z**2 * rho)
        log_i = log_i - torch.log(2 * (nu + order + 1) * rho)
    return rho, log_i


def ratio(nu: float, z: Tensor) -> Tensor:
    """I_{nu+1}(z) / I_nu(z) in [0, 1), for nu >= 0 and z >= 0, elementwise."""
    return (z.double() * _descend(nu, z.double())[0]).to(z.dtype)


def log_i(nu: float, z: Tensor) -> Tensor:
    """log( Gamma(nu+1) (2/z)^nu I_nu(z) ), zero at z = 0; its derivative in z is `ratio(nu, z)`."""
    return _descend(nu, z.double())[1].to(z.dtype)
