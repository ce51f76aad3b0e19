"""Is a state stable, and do clouds that start together stay together: Jacobians of the flow, Lyapunov exponents.

Both are derivatives taken forward (dual numbers) through the velocity P_x F(t, x), or through the very steps of a flow.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.autograd import forward_ad

from attn_flow.attention import Field
from attn_flow.attention.fields import as_field
from attn_flow.base import checks, memory
from attn_flow.base.words import introduce
from attn_flow.dynamics.distributed import ALONE, Shard
from attn_flow.dynamics.integrator import Integrator, Schedule
from attn_flow.dynamics.particles import MOST_STEPS, flow
from attn_flow.dynamics.placement import Placement, post
from attn_flow.dynamics.steppers import Adaptive, Step, named_step, rk4
from attn_flow.geometry import Geometry, known_geometry, placed
from attn_flow.measures import Cloud, Measure

ENTRIES = 2**20  # numbers in the clouds that are differentiated at once


@dataclass(frozen=True, eq=False, repr=False)
class Linearisation:
    """The flow near a cloud, dy/dt = J y in tangent coordinates y; made by `linearise`.

    jacobian: J (..., N, N), N = n dim of the geometry. basis: (..., n, d, dim), orthonormal at every token.
    eigenvalues: (..., N), complex, by falling real part. vectors: (..., N, n, d), complex, if asked for.
    speed: (...,), how fast the fastest token moves: 0 at an equilibrium. Elsewhere J is the covariant derivative of the
    velocity, and its eigenvalues say what happens within a moment only.
    """

    jacobian: Tensor
    basis: Tensor
    eigenvalues: Tensor
    vectors: Tensor | None
    speed: Tensor

    def __repr__(self) -> str:
        return introduce(self, "eigenvalues", "vectors", "speed")

    @property
    def growth(self) -> Tensor:
        """The largest real part, (...): below 0 a stable equilibrium, if `speed` is 0."""
        return self.eigenvalues.real[..., 0]


def linearise(
    attention: Field | Schedule,
    cloud: Cloud | Tensor,
    *,
    t: float = 0.0,
    geometry: Geometry | None = None,
    context: Measure | None = None,
    placement: Placement = post,
    vectors: bool = False,
) -> Linearisation:
    """Eigenvalues of the Jacobian of x' = P_x F(t, x) at a cloud, along the geometry: n (d - 1) of them on the sphere.

    Args:
        attention: an `Attention` or any field of `flow`.
        cloud: tokens (..., n, d), or a `Cloud` with weights and mask; padding is left out (of one cloud).
        t: the moment, for a field that changes in time; at a jump of `Layers` the layer that begins.
        geometry, context, placement: as in `flow`.
        vectors: also the eigenvectors, as displacements (n, d) of the tokens.

    Returns:
        A `Linearisation`. J is computed in the dtype of the tokens, its eigenvalues in float64.

    Example:
        >>> from attn_flow import Attention
        >>> consensus = torch.tensor([[1.0, 0.0, 0.0]]).repeat(4, 1)  # THEORY 2: distances decay at rate 1
        >>> found = linearise(Attention.identity(3, beta=2.0), consensus)
        >>> found.eigenvalues.real[2:].round(decimals=4)  # after two zeros: all tokens may turn together
        tensor([-1., -1., -1., -1., -1., -1.], dtype=torch.float64)
    """
    checks.number("t", t, "a time")
    checks.instance("placement", placement, Placement, "one of attn_flow.dynamics.placement")
    if not math.isfinite(t):
        raise ValueError(f"t = {t}, expected a finite time.")
    mu = cloud if isinstance(cloud, Cloud) else Cloud(cloud)
    if mu.mask is not None:
        if mu.x.ndim > 2:
            raise ValueError(f"cloud has shape {tuple(mu.x.shape)} and a mask, expected one cloud (n, d) with a mask.")
        mu = Cloud(mu.x[mu.mask], None if mu.weights is None else mu.weights.expand(mu.mask.shape)[mu.mask])
    field = as_field(attention)
    geometry = known_geometry(geometry, placement.flat)
    batch = field.frozen(t).admit(mu, context)
    x = placed("cloud", mu.x.detach(), None, geometry).expand(*batch, *mu.x.shape[-2:]).contiguous()
    n = x.shape[-2]
    shard = Shard(ALONE, n)
    run = Integrator(field, geometry, mu.weights, None, context, placement, None, None, None, shard)
    run.view.log_weights = mu.log_weights
    velocity = run.velocity(field.piece(t, t))
    with torch.no_grad():
        basis = tangent_basis(geometry, x)
        N = n * basis.shape[-1]
        memory.require(
            4 * math.prod(batch) * N**2 * 8, f"a Jacobian of {N} x {N} numbers", "take fewer tokens", x.device
        )
        columns = []
        for some in torch.arange(N, device=x.device).split(max(1, ENTRIES // x.numel())):
            token, axis = some // basis.shape[-1], some % basis.shape[-1]
            u = torch.zeros(len(some), *x.shape, dtype=x.dtype, device=x.device)
            u[torch.arange(len(some), device=x.device), ..., token, :] = basis[..., token, :, axis]
            _, dv = _forward(lambda y: velocity(t, y), x.expand(u.shape), u)
            columns.append(torch.einsum("...ida,c...id->...iac", basis, dv).flatten(-3, -2))
        J, speed = torch.cat(columns, dim=-1), velocity(t, x).norm(dim=-1).amax(-1)
        checks.in_range("the Jacobian", J)
        values, modes = torch.linalg.eig(J.double()) if vectors else (torch.linalg.eigvals(J.double()), None)
        order = values.real.argsort(dim=-1, descending=True)
        found = None
        if modes is not None:
            chosen = torch.take_along_dim(modes, order[..., None, :], dim=-1).mT.unflatten(-1, (n, -1))
            found = torch.einsum("...ida,...mia->...mid", basis.to(chosen.dtype), chosen)
    return Linearisation(J, basis, torch.take_along_dim(values, order, dim=-1), found, speed)


def tangent_basis(geometry: Geometry, x: Tensor) -> Tensor:
    """An orthonormal basis of the tangent space at every token of x (..., n, d), as columns: (..., n, d, dim)."""
    eye = torch.eye(x.shape[-1], dtype=x.dtype, device=x.device)
    P = torch.stack(
        [geometry.tangent(x, e.expand(x.shape)) for e in eye], dim=-1
    )  # a projection: its trace is its rank
    rank = round(float(P.diagonal(dim1=-2, dim2=-1).sum(-1).mean()))
    return torch.linalg.svd(P)[0][..., :rank]


def _forward(f: Callable[[Tensor], Tensor], x: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
    """f(x), and its derivative along u."""
    with forward_ad.dual_level():
        found = forward_ad.unpack_dual(f(forward_ad.make_dual(x.contiguous(), u)))
        tangent = torch.zeros_like(found.primal) if found.tangent is None else found.tangent
        return found.primal.clone(), tangent.clone()


@dataclass(frozen=True, eq=False, repr=False)
class Lyapunov:
    """The leading Lyapunov exponents of a path, per unit of t; made by `lyapunov`.

    exponents: (..., k), falling; growth per time from `transient` on. error: (..., k), half the difference between the
    first and the second half of that time: what more time may still change, not a bound.
    t: (T,), growth: (T, ..., k), logarithms of the growth of the k axes since t = 0. x: (..., n, d), where it ended.
    """

    exponents: Tensor
    error: Tensor
    t: Tensor
    growth: Tensor
    x: Tensor

    def __repr__(self) -> str:
        return introduce(self, "exponents", "error", "t", "x")


def lyapunov(
    attention: Field | Schedule,
    x0: Tensor,
    t: float,
    k: int = 1,
    *,
    transient: float | None = None,
    every: float | None = None,
    geometry: Geometry | None = None,
    step: str | Step | Adaptive = rk4,
    h: float = 0.05,
    weights: Tensor | None = None,
    mask: Tensor | None = None,
    context: Measure | None = None,
    placement: Placement = post,
    generator: torch.Generator | None = None,
) -> Lyapunov:
    """The k leading Lyapunov exponents along the path of x0: displacements carried by the flow, made orthonormal (QR).

    Displacements go through the steps themselves, so that they are exact for the discrete flow.

    Args:
        attention, x0, geometry, step, h, weights, mask, context, placement: as in `flow`; tokens are never merged.
        t: how long, from time 0.
        k: how many, at most n (d - 1) on the sphere.
        transient: time at the start that does not count, while displacements turn to their axes; t/2 unless given.
        every: time between two QR; 10 h unless given. Axes that grow apart by e^{36} within it are lost to rounding.
        generator: of the first displacements.

    Returns:
        A `Lyapunov`: exponents, what they may still change by, and the growth along the path.

    Example:
        >>> from attn_flow import Drift, Euclidean
        >>> A = torch.diag(torch.tensor([0.5, -1.0]))
        >>> found = lyapunov(Drift(lambda t, x: x @ A.T), torch.ones(1, 2), t=10.0, k=2, geometry=Euclidean())
        >>> found.exponents.round(decimals=4)  # the real parts of the spectrum
        tensor([ 0.5000, -1.0000])
    """
    if not isinstance(t, float | int) or not 0 < t < math.inf:
        raise ValueError(f"t = {t}, expected a positive, finite time.")
    checks.positive("h", h)
    checks.floating("x0", x0, "(..., n, d)")
    start, every = t / 2 if transient is None else transient, 10 * h if every is None else every
    checks.positive("every", every)
    checks.number("transient", start, "a time")
    checks.instance("placement", placement, Placement, "one of attn_flow.dynamics.placement")
    checks.made_with(None, None, generator)
    if not t / min(h, every) <= MOST_STEPS:
        raise ValueError(f"t = {t:g} in steps of {min(h, every):g} are more than {MOST_STEPS:.0e}; use longer ones.")
    if not 0 <= start < t:
        raise ValueError(f"transient = {start}, expected 0 <= transient < t = {t}.")
    stepper = named_step(step)
    stepper = replace(stepper, merge=False) if isinstance(stepper, Adaptive) else stepper
    geometry = known_geometry(geometry, placement.flat)

    def along(x: Tensor, a: float, b: float) -> Tensor:
        times = [a, b] if b > a else [a]
        return flow(
            attention,
            x,
            times,
            geometry=geometry,
            step=stepper,
            h=h,
            weights=weights,
            mask=mask,
            context=context,
            placement=placement,
        ).x[-1]

    with torch.no_grad():
        x = along(x0.detach(), 0.0, 0.0)
        shown = x.new_ones(x.shape[:-1]) if mask is None else mask.expand(x.shape[:-1]).to(x.dtype)
        most = int(shown.sum(-1).min()) * tangent_basis(geometry, x).shape[-1]
        checks.whole("k", k)
        if k > most:
            raise ValueError(f"k = {k}, expected a whole number, 1 to {most}: the dimension of all clouds.")
        u = torch.randn(int(k), *x.shape, generator=generator, dtype=x.dtype, device=x.device)
        u, _ = _orthonormal(geometry.tangent(x, u) * shown[..., None])
        # The window from `start` to t in two halves, which are compared.
        ends = [
            span
            for a, b in ((0.0, start), (start, (start + t) / 2), ((start + t) / 2, t))
            for span in _cut(a, b, every)
        ]
        clock, growth = [0.0], [x.new_zeros(*x.shape[:-2], k)]
        for end in ends:
            moved, u = _forward(lambda y, a=clock[-1], b=end: along(y, a, b), x.expand(u.shape), u)  # type: ignore[misc]
            x = moved[0]
            u, size = _orthonormal(u * shown[..., None])
            clock.append(end)
            growth.append(growth[-1] + size)
    path, times = torch.stack(growth), torch.tensor(clock, dtype=torch.float64)
    at = [int((times - moment).abs().argmin()) for moment in (start, (start + t) / 2, t)]
    first, second = (2 * (path[b] - path[a]) / (t - start) for a, b in itertools.pairwise(at))
    return Lyapunov((first + second) / 2, (second - first).abs() / 2, times, path, x)


def _cut(a: float, b: float, every: float) -> list[float]:
    """The ends of equal parts of at most `every` between a and b."""
    parts = math.ceil((b - a) / every - 1e-9) if b > a else 0
    return [a + (b - a) * (i + 1) / parts for i in range(parts - 1)] + [b] * (parts > 0)


def _orthonormal(u: Tensor) -> tuple[Tensor, Tensor]:
    """Displacements u (k, ..., n, d) made orthonormal, and the logarithms of their lengths on the way, (..., k)."""
    Q, R = torch.linalg.qr(u.flatten(-2).movedim(0, -1))
    return Q.movedim(-1, 0).unflatten(-1, u.shape[-2:]).contiguous(), R.diagonal(dim1=-2, dim2=-1).abs().log()
