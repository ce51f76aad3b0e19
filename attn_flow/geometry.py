"""Where tokens live: the sphere, flat space, and the ellipsoids that layer norms make.

A geometry is four functions of tokens x (..., n, d): the tangent projection of a drift, the retraction back
onto the set, the geodesic distance, and the uniform law. Integrators call them and never ask which set it is.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from numbers import Integral
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from attn_flow.base import checks, memory
from attn_flow.base.words import introduce


class Geometry(Protocol):
    """What an integrator asks of the set that tokens live on; your own class with these methods is one too."""

    @property
    def longest(self) -> float | None:
        """No token of the set is longer; None if there is no such bound."""
        ...

    def tangent(self, x: Tensor, u: Tensor) -> Tensor:
        """The part of the drift u that moves along the set at x."""
        ...

    def retract(self, x: Tensor) -> Tensor:
        """The point of the set that x stands for."""
        ...

    def distance(self, x: Tensor, y: Tensor) -> Tensor:
        """Geodesic distance, (..., n, d) x (..., n, d) -> (..., n)."""
        ...

    def uniform(
        self,
        n: int | tuple[int, ...],
        d: int,
        *,
        generator: torch.Generator | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> Tensor:
        """n tokens of the uniform law, (n, d); a tuple n = (batch, n) gives (batch, n, d)."""
        ...


def _shape(
    n: int | tuple[int, ...], d: int, dtype: torch.dtype | None, device: torch.device | str | None
) -> tuple[int, ...]:
    """(n, d), having raised where it is none or does not fit into memory."""
    shape = n if isinstance(n, tuple | list) else (n,)
    if not shape or any(isinstance(k, bool) or not isinstance(k, Integral) or k < 1 for k in (*shape, d)):
        raise ValueError(f"n = {n}, d = {d}: expected at least one token of dimension at least one.")
    memory.require_tensor(*shape, d, dtype=dtype, device=device)
    return (*shape, d)


def angle(x: Tensor, y: Tensor) -> Tensor:
    """2 atan2(|x - y|, |x + y|) of unit vectors: exact near 0 and pi, where acos loses half the digits."""
    return 2 * torch.atan2((x - y).norm(dim=-1), (x + y).norm(dim=-1))


class _Retraction(torch.autograd.Function):
    """y = radius x / |x| and |x|, which alone are kept for the backward pass: what comes next keeps y, nobody x."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, radius: float) -> tuple[Tensor, Tensor]:
        length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        y = x * (radius / length)
        ctx.radius = radius
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(y, length)
        return y, length

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, None]:
        """Of y: radius/|x| P_y. Of |x|, which second derivatives ask for: y / radius."""
        (y, length), (of_y, of_length), radius = ctx.saved_tensors, grads, ctx.radius
        found = None if of_y is None else Sphere(radius).tangent(y, of_y) * (radius / length)
        if of_length is not None:
            found = y * (of_length / radius) + (0.0 if found is None else found)
        return found, None


@dataclass(frozen=True)
class Sphere:
    """{|x| = radius}: P_x u = u - <x,u> x / radius^2, retraction radius x / |x|.

    radius: in the units of the tokens. Distances are arc lengths, radius times an angle.

    >>> import torch
    >>> sphere = Sphere()
    >>> x = sphere.retract(torch.tensor([[3.0, 0.0], [0.0, 0.1]]))
    >>> sphere.distance(x[:1], x[1:])  # a quarter turn
    tensor([1.5708])
    >>> sphere.tangent(x, torch.ones(2, 2))
    tensor([[0., 1.],
            [1., 0.]])
    >>> sphere.uniform(100, 3).shape
    torch.Size([100, 3])
    """

    radius: float = 1.0

    def __post_init__(self) -> None:
        checks.positive_finite("radius", self.radius, 1e150)  # its square is in the range of float64 too

    @property
    def longest(self) -> float:
        return self.radius

    def tangent(self, x: Tensor, u: Tensor) -> Tensor:
        """The part of the drift u (..., n, d) that moves along the set at x (..., n, d)."""
        return torch.addcmul(u, (x * u).sum(-1, keepdim=True), x, value=-1 / self.radius**2)

    def retract(self, x: Tensor) -> Tensor:
        """The point of the set that each token of x (..., n, d) stands for."""
        if x.requires_grad and torch.is_grad_enabled() and checks.is_plain(x) and not checks.forward_mode():
            return _Retraction.apply(x, self.radius)[0]  # type: ignore[no-untyped-call,no-any-return]
        return x * (self.radius / torch.linalg.vector_norm(x, dim=-1, keepdim=True))

    def distance(self, x: Tensor, y: Tensor) -> Tensor:
        """Distance of x_i and y_i, (..., n, d) x (..., n, d) -> (..., n)."""
        return self.radius * angle(x / self.radius, y / self.radius)

    def uniform(
        self,
        n: int | tuple[int, ...],
        d: int,
        *,
        generator: torch.Generator | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> Tensor:
        """n random tokens, (n, d); a tuple n = (batch, n) gives (batch, n, d)."""
        checks.made_with(dtype, device, generator)
        return self.retract(torch.randn(_shape(n, d, dtype, device), generator=generator, dtype=dtype, device=device))


@dataclass(frozen=True)
class Euclidean:
    """R^d: every direction is tangent. It has no uniform law; `uniform` draws from the cube [-1, 1]^d.

    >>> import torch
    >>> Euclidean().distance(torch.zeros(1, 2), torch.tensor([[3.0, 4.0]]))
    tensor([5.])
    """

    longest: ClassVar[None] = None

    def tangent(self, x: Tensor, u: Tensor) -> Tensor:
        """The part of the drift u (..., n, d) that moves along the set at x (..., n, d)."""
        return u

    def retract(self, x: Tensor) -> Tensor:
        """The point of the set that each token of x (..., n, d) stands for."""
        return x

    def distance(self, x: Tensor, y: Tensor) -> Tensor:
        """Distance of x_i and y_i, (..., n, d) x (..., n, d) -> (..., n)."""
        return (x - y).norm(dim=-1)

    def uniform(
        self,
        n: int | tuple[int, ...],
        d: int,
        *,
        generator: torch.Generator | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> Tensor:
        """n random tokens, (n, d); a tuple n = (batch, n) gives (batch, n, d)."""
        checks.made_with(dtype, device, generator)
        return 2 * torch.rand(_shape(n, d, dtype, device), generator=generator, dtype=dtype, device=device) - 1


@dataclass(frozen=True, eq=False, repr=False)
class Ellipsoid:
    """{centre + A z : |z| = 1}, A = axes (d, k) of full column rank: the affine image of the unit sphere of R^k.

    Its geometry is the sphere's, carried along by A: with z = A^+ (x - centre), the tangent projection is
    A P_z A^+ u, the retraction centre + A z/|z|, the distance the angle between the z. A layer norm with gain
    and bias puts tokens on such a set, of dimension d - 2 inside the hyperplane image of 1^perp.

    centre: (d,). axes: A, (d, k), or the d semi-axes of an axis-aligned ellipsoid. inverse: A^+, computed.

    >>> import torch
    >>> ellipsoid = Ellipsoid(centre=torch.zeros(2), axes=torch.tensor([2.0, 1.0]))
    >>> ellipsoid
    Ellipsoid(centre=float32 (2,), axes=float32 (2, 2))
    >>> ellipsoid.retract(torch.tensor([[10.0, 0.0]]))
    tensor([[2., 0.]])
    >>> Ellipsoid.from_layer_norm(gain=torch.ones(4)).axes.shape  # inside the hyperplane orthogonal to 1
    torch.Size([4, 3])
    """

    centre: Tensor
    axes: Tensor
    inverse: Tensor = field(init=False)  # A^+

    def __repr__(self) -> str:
        return introduce(self, "centre", "axes")

    def __post_init__(self) -> None:
        for name in ("centre", "axes"):
            checks.floating(name, getattr(self, name), "(d,)" if name == "centre" else "(d,) or (d, k)")
            checks.precise(name, getattr(self, name))
        axes = torch.diag(self.axes) if self.axes.ndim == 1 else self.axes
        if axes.ndim != 2 or self.centre.shape != axes.shape[:1] or not 1 <= axes.shape[1] <= axes.shape[0]:
            raise ValueError(
                f"axes have shape {tuple(self.axes.shape)} and centre {tuple(self.centre.shape)}, "
                "expected axes (d,) or (d, k) with k <= d, and centre (d,)."
            )
        checks.finite("centre", self.centre)
        checks.finite("axes", axes)
        checks.same_device("centre", self.centre, "axes", axes)
        object.__setattr__(self, "axes", axes)
        object.__setattr__(self, "inverse", torch.linalg.pinv(axes))
        if checks.can_look(axes) and not checks.all_finite(self.inverse):
            raise ValueError(f"axes of size {float(axes.abs().max()):.1e} have no inverse in {axes.dtype}; use others.")
        if checks.can_look(axes) and int(torch.linalg.matrix_rank(axes)) < axes.shape[1]:
            raise ValueError("axes are linearly dependent (a semi-axis is zero); drop the flat directions.")

    @classmethod
    def from_layer_norm(cls, gain: Tensor, bias: Tensor | None = None, *, centred: bool = True) -> Ellipsoid:
        """The image of x -> gain * (x - mean) / std + bias; `centred=False` is RMSNorm, which keeps the mean."""
        checks.floating("gain", gain, "(d,)")
        checks.precise("gain", gain)
        checks.flags(centred=centred)
        if gain.ndim != 1 or gain.shape[0] == 0:
            raise ValueError(f"gain has shape {tuple(gain.shape)}, expected (d,).")
        d = gain.shape[0]
        basis = torch.eye(d, dtype=gain.dtype, device=gain.device)
        if centred:
            # An orthonormal basis of 1^perp: the Q factor of [1, e_1, ..., e_{d-1}] without its first column.
            basis = torch.linalg.qr(torch.cat([torch.ones_like(basis[:, :1]), basis[:, :-1]], dim=1))[0][:, 1:]
        return cls(torch.zeros_like(gain) if bias is None else bias, gain[:, None] * basis * d**0.5)

    @cached_property
    def longest(self) -> float:
        return float(self.centre.norm() + torch.linalg.matrix_norm(self.axes, ord=2))

    def sphere_coordinates(self, x: Tensor) -> Tensor:
        """z = A^+ (x - centre), (..., n, k)."""
        return (x - self.centre.to(x)) @ self.inverse.to(x).T

    def tangent(self, x: Tensor, u: Tensor) -> Tensor:
        """The part of the drift u (..., n, d) that moves along the set at x (..., n, d)."""
        z = self.sphere_coordinates(x)
        return Sphere().tangent(z, u @ self.inverse.to(u).T) @ self.axes.to(u).T

    def retract(self, x: Tensor) -> Tensor:
        """The point of the set that each token of x (..., n, d) stands for."""
        return self.centre.to(x) + Sphere().retract(self.sphere_coordinates(x)) @ self.axes.to(x).T

    def distance(self, x: Tensor, y: Tensor) -> Tensor:
        """Distance of x_i and y_i, (..., n, d) x (..., n, d) -> (..., n)."""
        return angle(self.sphere_coordinates(x), self.sphere_coordinates(y))

    def uniform(
        self,
        n: int | tuple[int, ...],
        d: int,
        *,
        generator: torch.Generator | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> Tensor:
        """n random tokens, (n, d); a tuple n = (batch, n) gives (batch, n, d)."""
        if d != self.centre.shape[0]:
            raise ValueError(f"d = {d}, expected {self.centre.shape[0]}, the dimension of this ellipsoid.")
        dtype = self.axes.dtype if dtype is None else dtype
        device = self.axes.device if device is None else device
        z = Sphere().uniform(n, self.axes.shape[1], generator=generator, dtype=dtype, device=device)
        return self.centre.to(z) + z @ self.axes.to(z).T


def known_geometry(geometry: Geometry | None, flat: bool = False) -> Geometry:
    """The geometry that was given; by default the unit sphere, or R^d where tokens change their length (`flat`)."""
    if geometry is None:
        return Euclidean() if flat else Sphere()
    if not hasattr(geometry, "retract") or isinstance(geometry, type):
        raise ValueError(f"geometry is a {type(geometry).__name__}, expected Sphere(), Euclidean() or an Ellipsoid.")
    return geometry


def placed(name: str, x: Tensor, mask: Tensor | None, geometry: Geometry, look: bool = True) -> Tensor:
    """x retracted. Padding goes to the first token of its cloud: a point of the geometry, and nobody sees it there."""
    if mask is not None:
        shape = torch.broadcast_shapes(mask.shape, x.shape[:-1])
        first = mask.expand(shape).to(torch.uint8).argmax(-1)[..., None, None].expand(*shape[:-1], 1, x.shape[-1])
        x = torch.where(mask[..., None], x, torch.gather(x.expand(*shape, x.shape[-1]), -2, first))
    if look and isinstance(geometry, Sphere):
        _check_squares(name, x)
    x = geometry.retract(x)
    if look:
        check_placed(name, x, geometry)
    return x


def _check_squares(name: str, x: Tensor) -> None:
    """Raise ValueError for tokens so long that |x| overflows: the sphere would take them for 0."""

    def look() -> None:
        raise ValueError(
            f"{name} reaches {float(x.abs().max()):.1e}, whose square leaves the range of {x.dtype}; scale it, Sphere "
            "takes the directions of tokens alone."
        )

    if checks.can_look(x) and x.dtype.itemsize > 2:
        most = (torch.finfo(x.dtype).max / x.shape[-1]) ** 0.5
        checks.look_if(x.detach().abs().amax() > most, look)


def check_placed(name: str, x: Tensor, geometry: Geometry) -> None:
    """Raise ValueError if the retraction x of finite tokens is not finite."""

    def look() -> None:
        if not checks.all_finite(x):
            raise ValueError(
                f"{name} has a row that {type(geometry).__name__} cannot place (a zero row has no direction); remove "
                "it, hide it with mask, or use geometry=Euclidean()."
            )

    if checks.can_look(x):
        checks.look_if(~torch.isfinite(x.detach().sum()), look)
