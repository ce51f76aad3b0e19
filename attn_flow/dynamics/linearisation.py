"""Jacobians of the flow at a cloud, and Lyapunov exponents along it.

Both are forward-mode derivatives (dual numbers) of the velocity P_x F(t, x), or of the steps of a flow themselves.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.autograd import forward_ad

from attn_flow.attention.fields import Field, require_field
from attn_flow.base import checks
from attn_flow.dynamics.integrator import Run, prepare
from attn_flow.dynamics.steppers import Adaptive, RungeKutta, as_method, rk4
from attn_flow.geometry import UNIT_SPHERE, Geometry
from attn_flow.measures.cloud import Cloud, as_cloud

ENTRIES = 2**20  # numbers in the clouds that are differentiated at once
MAX_MATRIX_ENTRIES = 2**28  # of the Jacobian


@dataclass(frozen=True, eq=False, repr=False)
class Linearisation:
    """The flow near a cloud, dy/dt = J y in tangent coordinates y; made by `linearise`.

    Args:
        jacobian: J (..., N, N), N = n times the dimension of the geometry.
        basis: (..., n, d, dim), an orthonormal basis of the tangent space at every token.
        eigenvalues: (..., N), complex, by decreasing real part.
        speed: (...), the speed of the fastest token, zero at an equilibrium. Elsewhere J is the covariant derivative of
            the velocity, and its eigenvalues describe short times only.
    """

    jacobian: Tensor
    basis: Tensor
    eigenvalues: Tensor
    speed: Tensor

    def __repr__(self) -> str:
        return f"Linearisation({self.eigenvalues.shape[-1]} eigenvalues, batch {tuple(self.speed.shape)})"

    @property
    def growth(self) -> Tensor:
        """The largest real part, (...): below 0 a stable equilibrium, if `speed` is 0."""
        return self.eigenvalues.real[..., 0]


def linearise(
    field: Field, cloud: Cloud | Tensor, *, t: float = 0.0, geometry: Geometry = UNIT_SPHERE
) -> Linearisation:
    """The Jacobian of x' = P_x F(t, x) at a cloud, along the geometry, and its eigenvalues.

    Args:
        field: an `Attention` or any field of `flow`.
        cloud: tokens (..., n, d), or a `Cloud` with weights and a mask; padding is left out (of one cloud).
        t: the time, for a field that changes in time; at a jump of `Layers` the layer that begins.
        geometry: as in `flow`.

    Returns:
        A `Linearisation`, in the dtype that a flow would compute in, but for the eigenvalues in float64.

    Example:
        >>> from attn_flow import Attention
        >>> consensus = torch.tensor([[1.0, 0.0, 0.0]]).repeat(4, 1)  # distances decay at rate 1
        >>> result = linearise(Attention.identity(3, beta=2.0), consensus)
        >>> result.eigenvalues.real[2:].round(decimals=4)  # after two zeros: all tokens may turn together
        tensor([-1., -1., -1., -1., -1., -1.], dtype=torch.float64)
    """
    cloud = as_cloud(cloud, "cloud")
    if cloud.mask is not None:
        if cloud.x.ndim > 2:
            raise ValueError(f"cloud has shape {tuple(cloud.x.shape)}, expected one cloud (n, d) where it has a mask.")
        cloud = Cloud(cloud.x[cloud.mask], cloud.probabilities[cloud.mask])
    require_field("field", field)
    with torch.no_grad():
        field, x = prepare(field, cloud, geometry)
        x, velocity = x.contiguous(), Run(field, geometry, cloud).velocity(field.piece(t, t))
        basis = tangent_basis(geometry, x)
        n, N = x.shape[-2], x.shape[-2] * basis.shape[-1]
        if x[..., 0, 0].numel() * N**2 > MAX_MATRIX_ENTRIES:
            raise ValueError(f"the Jacobian of {n} tokens has {N} x {N} entries; use fewer tokens.")
        columns = []
        for part in torch.arange(N, device=x.device).split(max(1, ENTRIES // x.numel())):
            token, axis = part // basis.shape[-1], part % basis.shape[-1]
            u = torch.zeros(len(part), *x.shape, dtype=x.dtype, device=x.device)
            u[torch.arange(len(part), device=x.device), ..., token, :] = basis[..., token, :, axis]
            _, dv = _derivative(lambda y: velocity(t, y), x.expand(u.shape), u)
            columns.append(torch.einsum("...ida,c...id->...iac", basis, dv).flatten(-3, -2))
        J, speed = torch.cat(columns, dim=-1), velocity(t, x).norm(dim=-1).amax(-1)
        checks.require_finite("the Jacobian", J)
        values = torch.linalg.eigvals(J.double())
        order = values.real.argsort(dim=-1, descending=True)
    return Linearisation(J, basis, torch.take_along_dim(values, order, dim=-1), speed)


def tangent_basis(geometry: Geometry, x: Tensor) -> Tensor:
    """An orthonormal basis of the tangent space at every token of x (..., n, d), as columns: (..., n, d, dim)."""
    checks.require_single_precision("x", x)
    eye = torch.eye(x.shape[-1], dtype=x.dtype, device=x.device)
    P = torch.stack([geometry.tangent(x, e.expand(x.shape)) for e in eye], dim=-1)  # a projection: trace = rank
    rank = round(float(P.diagonal(dim1=-2, dim2=-1).sum(-1).mean()))
    return torch.linalg.svd(P)[0][..., :rank]


def _derivative(f: Callable[[Tensor], Tensor], x: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
    """f(x), and its derivative along u."""
    with forward_ad.dual_level():
        value = forward_ad.unpack_dual(f(forward_ad.make_dual(x.contiguous(), u)))
        tangent = torch.zeros_like(value.primal) if value.tangent is None else value.tangent
        return value.primal.clone(), tangent.clone()


@dataclass(frozen=True, eq=False, repr=False)
class Lyapunov:
    """The leading Lyapunov exponents of a path, per unit of t; made by `lyapunov`.

    Args:
        exponents: (..., k), decreasing: the growth per time in the second half of the path.
        error: (..., k), half of the difference between the two halves of that time; not a bound.
        x: (..., n, d), the final tokens.
    """

    exponents: Tensor
    error: Tensor
    x: Tensor

    def __repr__(self) -> str:
        return f"Lyapunov({self.exponents.shape[-1]} exponents, x {tuple(self.x.shape)})"


def lyapunov(
    field: Field,
    x0: Tensor | Cloud,
    t: float,
    k: int = 1,
    *,
    geometry: Geometry = UNIT_SPHERE,
    step: str | RungeKutta | Adaptive = rk4,
    h: float = 0.05,
    generator: torch.Generator | None = None,
) -> Lyapunov:
    """The k leading Lyapunov exponents along the path of x0.

    Displacements are carried through the steps themselves, so that they are exact for the discrete flow, and made
    orthonormal at intervals of at most 10 h.

    Args:
        field, x0, geometry, step, h: as in `flow`; tokens are never merged.
        t: the length of the path. Its first half does not count: there displacements turn to their axes.
        k: the number of exponents, at most n (d - 1) on the sphere.
        generator: for the initial displacements.

    Example:
        >>> from attn_flow import Drift, Euclidean
        >>> A = torch.diag(torch.tensor([0.5, -1.0]))
        >>> result = lyapunov(Drift(lambda t, x: x @ A.T), torch.ones(1, 2), t=10.0, k=2, geometry=Euclidean())
        >>> result.exponents.round(decimals=4)  # the real parts of the spectrum
        tensor([ 0.5000, -1.0000])
    """
    checks.require_positive(t=t, h=h)
    checks.require_count(k=k)
    cloud, method = as_cloud(x0, "x0"), as_method(step)
    method = replace(method, merge=False) if isinstance(method, Adaptive) else method
    require_field("field", field)

    def advance(x: Tensor, a: float, b: float) -> Tensor:
        return next(run.steps(x, [a, b], method, h))[1]

    with torch.no_grad():
        field, x = prepare(field, cloud, geometry)
        run = Run(field, geometry, cloud)
        is_token = x.new_ones(x.shape[:-1]) if cloud.mask is None else cloud.mask.expand(x.shape[:-1]).to(x.dtype)
        most = int(is_token.sum(-1).min()) * tangent_basis(geometry, x).shape[-1]
        if k > most:
            raise ValueError(f"k = {k}, expected at most {most}, the dimension of the set of clouds.")
        u = torch.randn(k, *x.shape, generator=generator, dtype=x.dtype, device=x.device)
        u, _ = _orthonormal(geometry.tangent(x, u) * is_token[..., None])
        growth = []
        for first, last in ((0.0, t / 2), (t / 2, 3 * t / 4), (3 * t / 4, t)):
            total = x.new_zeros(*x.shape[:-2], k)  # logarithm of the growth of every axis
            parts = math.ceil((last - first) / (10 * h) - 1e-9)
            for a, b in itertools.pairwise(torch.linspace(first, last, parts + 1, dtype=torch.float64).tolist()):
                moved, u = _derivative(lambda y, a=a, b=b: advance(y, a, b), x.expand(u.shape), u)  # type: ignore[misc]
                x = moved[0]
                u, size = _orthonormal(u * is_token[..., None])
                total = total + size
            growth.append(total / (last - first))
    _, early, late = growth
    exponents, order = ((early + late) / 2).sort(dim=-1, descending=True)
    return Lyapunov(exponents, ((late - early).abs() / 2).gather(-1, order), x.to(cloud.x.dtype))


def _orthonormal(u: Tensor) -> tuple[Tensor, Tensor]:
    """Displacements u (k, ..., n, d) made orthonormal, and the logarithms of their lengths on the way, (..., k)."""
    Q, R = torch.linalg.qr(u.flatten(-2).movedim(0, -1))
    return Q.movedim(-1, 0).unflatten(-1, u.shape[-2:]).contiguous(), R.diagonal(dim1=-2, dim2=-1).abs().log()
