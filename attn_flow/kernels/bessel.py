"""Modified Bessel functions I_nu of real order, as torch needs them: ratios and logarithms that never overflow.

Everything is built from r_nu(z) = I_{nu+1}(z) / I_nu(z) = z / (2(nu+1) + z r_{nu+1}). The recurrence is stable
downwards, so orders below ORDER are reached from ORDER, where the uniform (Debye) expansion in 1/nu is exact to double
precision (DLMF 10.41); where a run of integer orders is wanted, from any order far above it (Miller's algorithm).
"""

from __future__ import annotations

import math
from typing import TypeVar

import torch
from numpy.polynomial import Polynomial
from torch import Tensor

ORDER = 60.0
TERMS = 7  # Debye polynomials kept: the first dropped one is below 1e-14 at ORDER

Number = TypeVar("Number", float, Tensor)


def lower(z: Number, above: Number, nu: float) -> Number:
    """r_nu(z) from r_{nu+1}(z) = above; numbers or tensors."""
    return z / (2 * (nu + 1) + z * above)


def _debye_polynomials() -> list[Polynomial]:
    """u_0, ..., u_TERMS, with u_{k+1} = p^2 (1 - p^2) u_k' / 2 + int_0^p (1 - 5 s^2) u_k(s) ds / 8."""
    square, u = Polynomial([0, 0, 1]), [Polynomial([1.0])]
    for _ in range(TERMS):
        u.append(square * (1 - square) * u[-1].deriv() / 2 + ((1 - 5 * square) * u[-1]).integ() / 8)
    return u


DEBYE = [u.coef.tolist() for u in _debye_polynomials()]


def _evaluate(coefficients: list[float], p: Number) -> Number:
    value = p * 0
    for c in reversed(coefficients):
        value = value * p + c
    return value


def _top(nu: float, z: Tensor) -> tuple[Tensor, Tensor]:
    """r_nu(z) and log( Gamma(nu+1) (2/z)^nu I_nu(z) ) for nu >= ORDER, by the uniform expansion.

    With w = z/nu, root = sqrt(1 + w^2), p = 1/root and S the Debye series, the logarithm is
    nu (root - 1 - log((1 + root)/2)) - log(root)/2 + log(S(p)/S(1)), and r its derivative. No large terms cancel, and
    a logarithm near zero has the absolute accuracy of the dtype.
    """
    w = z / nu
    root = torch.hypot(torch.ones_like(w), w)  # w^2 may overflow
    rise = w * (w / (1 + root))  # root - 1
    p = 1 / root
    debye = [sum([u[i] / nu**k for k, u in enumerate(DEBYE) if i < len(u)]) for i in range(len(DEBYE[-1]))]
    derivative = [i * c for i, c in enumerate(debye)][1:]
    series, slope, at_zero = _evaluate(debye, p), _evaluate(derivative, p), _evaluate(debye, 1.0)
    ratio = w / (1 + root) - (w * p) * p * (0.5 + p * slope / series) / nu
    log_i = nu * (rise - torch.log1p(rise / 2)) - torch.log1p(rise) / 2 + torch.log1p(series / at_zero - 1)
    return ratio, log_i


def _descend(nu: float, z: Tensor) -> tuple[Tensor, Tensor]:
    """r_nu(z), and log( Gamma(nu+1) (2/z)^nu I_nu(z) ), from the first order above ORDER."""
    steps = max(0, math.ceil(ORDER - nu))
    ratio, log_i = _top(nu + steps, z)
    for order in reversed(range(steps)):
        # Here ratio is r_{a+1} with a = nu + order; I_a Gamma(a+1) (2/z)^a gains the factor 1 + z r_{a+1} / 2(a+1).
        a = nu + order
        log_i = log_i + torch.log1p(z * ratio / (2 * (a + 1)))
        ratio = lower(z, ratio, a)
    return ratio, log_i


def ratio(nu: float, z: Tensor) -> Tensor:
    """I_{nu+1}(z) / I_nu(z) in [0, 1), for nu > -1 and z >= 0, elementwise.

    >>> ratio(0.5, torch.tensor([0.0, 1.0, 1e300], dtype=torch.float64))  # coth(z) - 1/z
    tensor([0.0000, 0.3130, 1.0000], dtype=torch.float64)
    """
    return _descend(nu, z.double())[0].to(z.dtype)


def log_i(nu: float, z: Tensor) -> Tensor:
    """log( Gamma(nu+1) (2/z)^nu I_nu(z) ), zero at z = 0; its derivative in z is `ratio(nu, z)`.

    >>> log_i(0.5, torch.tensor(1.0, dtype=torch.float64))  # log(sinh(1)/1)
    tensor(0.1614, dtype=torch.float64)
    """
    return _descend(nu, z.double())[1].to(z.dtype)


def ratios(z: Number, count: int) -> list[Number]:
    """I_k(z) / I_{k-1}(z) for k = 1, ..., count, a number or a tensor each, as z is.

    >>> [round(r, 6) for r in ratios(1.0, 3)]
    [0.44639, 0.240194, 0.163306]
    """
    # An error at order nu reaches the one below times r_nu^2 < e^{-2 nu/(nu + z)}: from here, less than e^{-40}.
    start = 20 + math.sqrt(400 + count**2 + 40 * float(z.max() if isinstance(z, Tensor) else z))
    ratios = [z * 0.0]
    for nu in range(math.ceil(start), -1, -1):
        ratios.append(lower(z, ratios[-1], nu))
    return ratios[: -count - 1 : -1]
