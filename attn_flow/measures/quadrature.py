"""Weighted clouds that stand for a density on a circle or sphere: mean-field runs without sampling noise."""

from __future__ import annotations

import math
import operator
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
    """n nodes on the unit circle with weights proportional to a density.

    Args:
        density: of the angles theta (n,), nonnegative; uniform by default.
        towards: None: the nodes are the lattice 2 pi (i + 1/2) / n, exact for trigonometric polynomials below degree n.
            An angle a: log tan((theta - a)/2) is spaced evenly, so that nodes crowd geometrically at a and a + pi. The
            mass that leaves a repelling direction last is then resolved after times of order log(1/distance).

    Example:
        >>> cloud = circle(400, lambda theta: torch.exp(torch.cos(theta)))
        >>> round(float(cloud.mean[0]), 12)  # I_1(1)/I_0(1)
        0.446389965897
    """
    _require_nodes(n)
    if towards is not None and (n % 2 or not math.isfinite(towards)):
        raise ValueError(f"n = {n}, towards = {towards}: expected an angle and an even number of nodes.")
    if towards is None:
        theta = 2 * math.pi * (torch.arange(n, dtype=dtype, device=device) + 0.5) / n
        weights = torch.full_like(theta, 1 / n)
    else:
        half, axis = n // 2, math.remainder(towards, 2 * math.pi)
        u = TAIL * (2 * (torch.arange(half, dtype=dtype, device=device) + 0.5) / half - 1)
        phi = 2 * torch.atan(u.exp())
        theta = torch.cat([axis + phi, axis - phi])
        weights = (1 / u.cosh()).repeat(2)  # dphi = sin(phi) du, and sin(phi) = 1/cosh(u)
    weights = weights if density is None else weights * density_values(density, theta)
    return Cloud(torch.stack([theta.cos(), theta.sin()], dim=-1), weights / weights.sum())


def fibonacci(
    n: int,
    density: Callable[[Tensor], Tensor] | None = None,
    *,
    dtype: torch.dtype = torch.float64,
    device: torch.device | str | None = None,
) -> Cloud:
    """n nodes of the Fibonacci lattice on the sphere of R^3 with weights proportional to a density.

    Args:
        density: of the nodes x (n, 3), nonnegative; uniform by default.

    Example:
        >>> fibonacci(100)
        Cloud(x (100, 3) float64, weights)
    """
    _require_nodes(n)
    i = torch.arange(n, dtype=dtype, device=device) + 0.5
    z = 1 - 2 * i / n
    phi = math.pi * (3 - math.sqrt(5)) * i
    r = (1 - z**2).sqrt()
    x = torch.stack([r * phi.cos(), r * phi.sin(), z], dim=-1)
    weights = torch.ones_like(z) if density is None else density_values(density, x)
    return Cloud(x, weights / weights.sum())


def _require_nodes(n: int) -> None:
    if operator.index(n) < 2:
        raise ValueError(f"n = {n}, expected at least 2 nodes.")


def density_values(density: Callable[[Tensor], Tensor], nodes: Tensor) -> Tensor:
    """The density at n nodes over its maximum, (n,); an error unless it is finite and nonnegative, with some mass."""
    rho = density(nodes)
    checks.require_tensor("density(x)", rho)
    if rho.shape != nodes.shape[:1]:
        raise ValueError(f"density(x) has shape {tuple(rho.shape)}, expected {tuple(nodes.shape[:1])}: one per node.")
    if not bool(torch.isfinite(rho).all() & (rho >= 0).all() & (rho.max() > 0)):
        values = f"values from {float(rho.min()):.3g} to {float(rho.max()):.3g}"
        raise ValueError(f"density(x) has {values}, expected finite numbers >= 0, not all of them 0.")
    return rho / rho.max()
