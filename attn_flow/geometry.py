"""Where tokens live: the sphere, flat space, and the ellipsoids that layer norms produce.

A geometry is two functions of tokens x (..., n, d): the tangent projection of a drift, and the retraction onto the set.
Integrators call them and never ask which set it is.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import ClassVar, Protocol, TypedDict, Unpack

import torch
from torch import Tensor

from attn_flow.base import checks

Velocity = Callable[[float, Tensor], Tensor]  # (t, x) -> one vector per token, x (..., n, d)


class Factory(TypedDict, total=False):
    """How random tokens are drawn, as in `torch.randn`."""

    generator: torch.Generator | None
    dtype: torch.dtype | None
    device: torch.device | str | None


class Geometry(Protocol):
    """The set of possible tokens. A class of your own with these methods is a geometry too."""

    @property
    def max_norm(self) -> float | None:
        """The length of the longest point of the set; None if the set is unbounded."""

    def tangent(self, x: Tensor, u: Tensor) -> Tensor:
        """The projection of vectors u (..., n, d) onto the tangent spaces at points x (..., n, d)."""
        ...

    def retract(self, x: Tensor) -> Tensor:
        """A point of the set near each row of x (..., n, d)."""
        ...


def angle(x: Tensor, y: Tensor) -> Tensor:
    """The angle (...) between unit vectors x and y (..., d).

    It is 2 atan2(|x - y|, |x + y|), which is exact near 0 and pi, where acos loses half of the digits.
    """
    return 2 * torch.atan2((x - y).norm(dim=-1), (x + y).norm(dim=-1))


@dataclass(frozen=True)
class Sphere:
    """The sphere of vectors of length `radius`.

    Example:
        >>> sphere = Sphere()
        >>> x = sphere.retract(torch.tensor([[3.0, 4.0], [-8.0, 6.0]]))
        >>> x
        tensor([[ 0.6000,  0.8000],
                [-0.8000,  0.6000]])
        >>> sphere.uniform(100, 3).shape
        torch.Size([100, 3])
    """

    radius: float = 1.0

    def __post_init__(self) -> None:
        checks.require_positive(radius=self.radius)

    @property
    def max_norm(self) -> float:
        """The radius."""
        return self.radius

    def tangent(self, x: Tensor, u: Tensor) -> Tensor:
        """u - <x, u> x / radius^2."""
        return torch.addcmul(u, (x * u).sum(-1, keepdim=True), x, value=-1 / self.radius**2)

    def retract(self, x: Tensor) -> Tensor:
        """radius x / |x|."""
        return x * (self.radius / torch.linalg.vector_norm(x, dim=-1, keepdim=True))

    def uniform(self, n: int | tuple[int, ...], d: int, **factory: Unpack[Factory]) -> Tensor:
        """n independent points of the uniform distribution, (n, d); n = (batch, n) gives (batch, n, d)."""
        sizes = (*n, d) if isinstance(n, tuple | list) else (n, d)
        if any(size < 1 for size in sizes):
            raise ValueError(f"n = {n}, d = {d}; expected at least one token of dimension at least one.")
        return self.retract(torch.randn(*sizes, **factory))


UNIT_SPHERE = Sphere()


@dataclass(frozen=True)
class Euclidean:
    """Flat space: every vector is tangent and every point belongs to it.

    Example:
        >>> from attn_flow import Attention, flow
        >>> flow(Attention.identity(1, beta=0.0), torch.ones(2, 1), 1.0, geometry=Euclidean()).x[-1]  # x' = x
        tensor([[2.7183],
                [2.7183]])
    """

    max_norm: ClassVar[None] = None

    def tangent(self, x: Tensor, u: Tensor) -> Tensor:
        """u itself."""
        return u

    def retract(self, x: Tensor) -> Tensor:
        """x itself."""
        return x


@dataclass(frozen=True, eq=False, repr=False)
class Ellipsoid:
    """{centre + A z : |z| = 1} with A = axes (d, k) of full column rank: an affine image of the unit sphere of R^k.

    Its geometry is the sphere's, transported by A. With z = A^+ (x - centre), the tangent projection is A P_z A^+ u
    and the retraction centre + A z / |z|. A layer norm with gain and bias puts tokens on such a set, of dimension
    d - 2.

    Args:
        centre: (d,).
        axes: A, (d, k), or the d semi-axes of an axis-aligned ellipsoid.

    Example:
        >>> ellipsoid = Ellipsoid(centre=torch.zeros(2), axes=torch.tensor([2.0, 1.0]))
        >>> ellipsoid.retract(torch.tensor([[10.0, 0.0]]))
        tensor([[2., 0.]])
        >>> Ellipsoid.from_layer_norm(gain=torch.ones(4)).axes.shape  # inside the hyperplane orthogonal to 1
        torch.Size([4, 3])
    """

    centre: Tensor
    axes: Tensor
    inverse: Tensor = field(init=False)  # A^+, (k, d)

    def __post_init__(self) -> None:
        for name, z in (("centre", self.centre), ("axes", self.axes)):
            checks.require_floating(name, z)
            checks.require_finite(name, z)
        axes = torch.diag(self.axes) if self.axes.ndim == 1 else self.axes
        if axes.ndim != 2 or self.centre.shape != axes.shape[:1] or not 1 <= axes.shape[1] <= axes.shape[0]:
            raise ValueError(
                f"axes have shape {tuple(self.axes.shape)} and centre {tuple(self.centre.shape)}, "
                "expected axes (d,) or (d, k) with k <= d, and centre (d,)."
            )
        checks.require_same_device("centre", self.centre, "axes", axes)
        object.__setattr__(self, "axes", axes)
        object.__setattr__(self, "inverse", torch.linalg.pinv(axes))
        if checks.can_read(axes) and int(torch.linalg.matrix_rank(axes)) < axes.shape[1]:
            raise ValueError("axes are linearly dependent (a semi-axis is zero); drop the flat directions.")

    def __repr__(self) -> str:
        return f"Ellipsoid(d={self.axes.shape[0]}, k={self.axes.shape[1]}, {self.axes.dtype})"

    @classmethod
    def from_layer_norm(cls, gain: Tensor, bias: Tensor | None = None, *, centred: bool = True) -> Ellipsoid:
        """The image of the layer norm x -> gain * (x - mean) / std + bias.

        Args:
            gain, bias: (d,).
            centred: False for RMSNorm, which does not subtract the mean.
        """
        checks.require_floating("gain", gain)
        if gain.ndim != 1 or gain.shape[0] == 0:
            raise ValueError(f"gain has shape {tuple(gain.shape)}, expected (d,).")
        checks.require_single_precision("gain", gain)
        d = gain.shape[0]
        basis = torch.eye(d, dtype=gain.dtype, device=gain.device)
        if centred:
            # An orthonormal basis of the hyperplane orthogonal to 1: [1, e_1, ..., e_{d-1}] = QR without Q's column 0.
            basis = torch.linalg.qr(torch.cat([torch.ones_like(basis[:, :1]), basis[:, :-1]], dim=1))[0][:, 1:]
        return cls(torch.zeros_like(gain) if bias is None else bias, gain[:, None] * basis * d**0.5)

    @cached_property
    def max_norm(self) -> float:
        """An upper bound on the length of a point, |centre| + |A|."""
        return float(self.centre.norm() + torch.linalg.matrix_norm(self.axes, ord=2))

    def sphere_coordinates(self, x: Tensor) -> Tensor:
        """z = A^+ (x - centre), (..., n, k)."""
        return (x - self.centre.to(x)) @ self.inverse.to(x).T

    def tangent(self, x: Tensor, u: Tensor) -> Tensor:
        """A P_z A^+ u, (..., n, d)."""
        z = self.sphere_coordinates(x)
        return UNIT_SPHERE.tangent(z, u @ self.inverse.to(u).T) @ self.axes.to(u).T

    def retract(self, x: Tensor) -> Tensor:
        """centre + A z / |z|, (..., n, d)."""
        return self.centre.to(x) + UNIT_SPHERE.retract(self.sphere_coordinates(x)) @ self.axes.to(x).T


def require_geometry(geometry: Geometry) -> None:
    """Raise TypeError unless this is a geometry; the class Sphere in place of Sphere() is none."""
    if isinstance(geometry, type) or not hasattr(geometry, "retract"):
        kind = type(geometry).__name__
        raise TypeError(f"geometry is a {kind}, expected a Geometry such as Sphere() or Euclidean().")


def place(name: str, x: Tensor, geometry: Geometry) -> Tensor:
    """The retraction of tokens x (..., n, d) to the geometry; ValueError with this name if it does not exist."""
    require_geometry(geometry)
    if isinstance(geometry, Ellipsoid):
        checks.require_shape(name, x, geometry.centre.shape)
    y = geometry.retract(x)
    has_image = y.detach().isfinite().all(-1)
    if isinstance(geometry, Sphere):  # a token whose square overflows is retracted to zero
        has_image = has_image & (y.detach() != 0).any(-1)
    checks.require(
        has_image,
        f"{name} has a token without a direction (zero, or too long to square in {x.dtype}); remove it, hide it with a "
        "mask, rescale the tokens, or use geometry=Euclidean().",
    )
    return y
