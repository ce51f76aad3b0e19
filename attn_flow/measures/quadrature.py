"""Weighted clouds that stand for a density on a circle or sphere: mean-field runs without sampling noise."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from attn_flow.base import checks
from attn_flow.measures.cloud import Cloud

TAIL = 18.0  # log-tan nodes run over |log tan(phi/2)| <= TAIL: angles down to 3e-8 from the axis


def circle(
    n: int,
    density: Callable[[Tensor], Tensor] | None = None,
    *,
    towards: float | None = None,
    dtype: torch.dtype = torch.float64,
    device: torch.device | str | None = None,
) -> Cloud:
    """n nodes on the unit circle with weights proportional to density(theta) dtheta (uniform by default).

    Without `towards` the nodes are the lattice 2 pi (i + 1/2) / n, exact for trigonometric polynomials below
    degree n. `towards` = an angle a spaces log tan((theta - a)/2) evenly instead: nodes crowd geometrically at
    both ends a and a + pi of an axis, so that the mass that leaves a repelling direction last is still resolved
    after times of order log(1/distance), where a lattice has run out of tokens.

    >>> cloud = circle(400, lambda theta: torch.exp(torch.cos(theta)))
    >>> round(float(cloud.mean[0]), 12)  # I_1(1)/I_0(1)
    0.446389965897
    """
    _require_two(n=n)
    if towards is not None and (n % 2 or not math.isfinite(towards)):
        raise ValueError(f"n = {n}, towards = {towards}: expected an angle and an even number of nodes.")
    towards = None if towards is None else math.remainder(towards, 2 * math.pi)
    if towards is None:
        theta = 2 * math.pi * (torch.arange(n, dtype=dtype, device=device) + 0.5) / n
        weights = torch.full_like(theta, 1 / n)
    else:
        half = n // 2
        u = TAIL * (2 * (torch.arange(half, dtype=dtype, device=device) + 0.5) / half - 1)
        phi = 2 * torch.atan(u.exp())
        theta = torch.cat([towards + phi, towards - phi])
        weights = (1 / u.cosh()).repeat(2)  # dphi = sin(phi) du, and sin(phi) = 1/cosh(u)
    return _cloud(torch.stack([theta.cos(), theta.sin()], dim=-1), weights, density and density(theta))


def fibonacci(
    n: int,
    density: Callable[[Tensor], Tensor] | None = None,
    *,
    dtype: torch.dtype = torch.float64,
    device: torch.device | str | None = None,
) -> Cloud:
    """n nodes of the Fibonacci lattice on S^2, weights proportional to density(x), x (n, 3) (uniform by default).

    >>> fibonacci(100)
    Cloud(x (100, 3) float64, weights)
    """
    _require_two(n=n)
    i = torch.arange(n, dtype=dtype, device=device) + 0.5
    z = 1 - 2 * i / n
    phi = math.pi * (3 - math.sqrt(5)) * i
    r = (1 - z**2).sqrt()
    x = torch.stack([r * phi.cos(), r * phi.sin(), z], dim=-1)
    return _cloud(x, torch.full_like(z, 1 / n), density and density(x))


def graded(
    n: int,
    across: int,
    axis: Tensor,
    density: Callable[[Tensor], Tensor] | None = None,
) -> Cloud:
    """n x across nodes on the sphere of R^d, d >= 3, that crowd geometrically at both ends of an axis.

    The angle phi to the axis has log tan(phi/2) spaced evenly over |log tan(phi/2)| <= TAIL, as in `circle(towards=)`:
    mass that leaves a repelling direction last is still resolved after times of order log(1/distance). Around the axis
    stand `across` nodes of the sphere of R^{d-1}: a lattice (d = 3), Fibonacci's (d = 4), Sobol's (d >= 5), turned from
    ring to ring. n: rings. axis: (d,), any length. density: of x (n across, d), relative to the uniform law.

    >>> cloud = graded(200, 10, torch.tensor([0.0, 0.0, 1.0], dtype=torch.float64), lambda x: torch.exp(x[:, 2]))
    >>> round(float(cloud.mean[2]), 10)  # coth(1) - 1
    0.3130352855
    """
    checks.require_floating("axis", axis)
    if axis.ndim != 1 or axis.shape[0] < 3 or not 0 < float(axis.norm()) < math.inf:
        raise ValueError(f"axis has shape {tuple(axis.shape)}, expected a direction (d,) with d >= 3.")
    d = axis.shape[0]
    _require_two(n=n, across=across)
    u = TAIL * (2 * (torch.arange(n, dtype=axis.dtype, device=axis.device) + 0.5) / n - 1)
    side = _around(across, d - 1).to(axis)  # (across, d - 1)
    golden = 2 * math.pi * (math.sqrt(5) - 1) / 2 * torch.arange(n, dtype=axis.dtype, device=axis.device)
    first, second = side[:, 0], side[:, 1]  # turned in the plane of the first two
    turned = side.expand(n, *side.shape).clone()
    turned[..., 0] = golden.cos()[:, None] * first - golden.sin()[:, None] * second
    turned[..., 1] = golden.sin()[:, None] * first + golden.cos()[:, None] * second
    sin = (1 / u.cosh())[:, None, None]
    x = torch.cat([-u.tanh()[:, None, None].expand(n, across, 1), sin * turned], dim=-1).reshape(-1, d)
    # A reflection takes the first coordinate to the axis.
    e = axis / axis.norm()
    w = torch.cat([e[:1] + torch.where(e[:1] < 0, -1.0, 1.0), e[1:]])
    x = torch.where(e[0] < 0, 1.0, -1.0) * (x - 2 * (x @ w)[:, None] * w / w.square().sum())
    weights = u.cosh().log().mul(-(d - 1)).exp().repeat_interleave(across)  # sin^{d-2} dphi = cosh^{-(d-1)} du
    return _cloud(x, weights, density and density(x))


def _require_two(**counts: int) -> None:
    for name, count in counts.items():
        if count < 2:
            raise ValueError(f"{name} = {count}, expected at least 2 nodes.")


def _around(n: int, d: int) -> Tensor:
    """n nodes of equal weight on the sphere of R^d, d >= 2, float64."""
    if d == 2:
        return circle(n).x
    if d == 3:
        return fibonacci(n).x
    engine = torch.quasirandom.SobolEngine(d)
    engine.fast_forward(2)  # a corner and the centre have no direction
    normal = torch.erfinv(2 * engine.draw((n + 1) // 2, dtype=torch.float64) - 1)
    x = normal / normal.norm(dim=-1, keepdim=True)
    return torch.cat([x, -x])[:n]


def _cloud(x: Tensor, weights: Tensor, density: Tensor | None) -> Cloud:
    if density is not None:
        if density.shape != weights.shape:
            raise ValueError(f"density returned shape {tuple(density.shape)}, expected {tuple(weights.shape)}.")
        top = density.max()
        if not bool(torch.isfinite(density).all() & (density >= 0).all() & (top > 0)):
            raise ValueError("density must be finite and nonnegative, with some mass.")
        weights = weights * (density / top)
    return Cloud(x, weights / weights.sum())
