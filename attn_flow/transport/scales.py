"""The size of two clouds: units in which powers of their distances stay finite, and what far points do to it.

Few points far from all others must not set what counts as coincident, or as rounding: extents are those of a part of
the mass.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

# Norms may differ by this much on what is called a sphere.
SPHERE_RTOL = 1e-4


def unit_of(x: Tensor, y: Tensor) -> float:
    """1, or for tiny and huge clouds a power of two of the order of their extent.

    Dividing by it is exact, and p-th powers of distances then neither overflow nor vanish.
    """
    both = torch.cat([x, y]).detach()
    top = float(both.abs().max())
    if top == 0:
        return 1.0
    scale = math.ldexp(1.0, math.frexp(top)[1] - 1)
    extent = float((both.amax(0) / scale - both.amin(0) / scale).max())
    scale *= math.ldexp(1.0, math.frexp(extent)[1] - 1) if extent > 0 else 1.0
    return 1.0 if 1e-20 < scale < 1e20 else scale


def extent_of(z: Tensor, w: Tensor, part: float) -> float:
    """The largest side of the box around the median that holds `part` of the mass, along each axis by itself."""
    columns = z.mT.contiguous()
    away = (columns - columns.median(-1, keepdim=True).values).abs()
    if part == 1:
        return 2 * float(away[:, w > 0].max())
    if float(w.max() - w.min()) <= 1e-12 * float(w.max()):  # equal masses need a k-th value, and no order
        return 2 * float(away.kthvalue(math.ceil(part * (1 - 1e-12) * len(z))).values.max())
    away, order = away.sort(-1)
    held = w[order].cumsum(-1) / w.sum()
    first = (held < part * (1 - 1e-12)).sum(-1, keepdim=True)
    return 2 * float(away.gather(-1, first).max())


def radius_of(x: Tensor, y: Tensor, unit: float) -> float:
    norm = torch.cat([x, y]).detach().norm(dim=-1)
    radius = float(norm.mean())
    if radius == 0 or float((norm - radius).abs().max()) > SPHERE_RTOL * radius:
        low, high = (float(bound) * unit for bound in (norm.min(), norm.max()))
        raise ValueError(
            f"the geodesic cost got points with norms from {low:.6g} to {high:.6g}, "
            "expected one sphere around the origin; use Sphere(radius).retract, or cost='euclidean'."
        )
    return radius


def without_hermits(
    x: Tensor, a: Tensor, y: Tensor, b: Tensor, p: float
) -> tuple[Tensor, Tensor, Tensor, Tensor, float]:
    """The clouds without far points that both have, and the share of mass that is left.

    A point z that holds the same mass in both clouds, at distances of at least D from all others, which are less than
    2^{1/p} D apart, stays where it is: sending mass out of z and other mass into it costs 2 D^p, more than sending that
    mass directly. Left in, it would set the scale of rounding.
    """
    both = torch.cat([x, y]).detach()
    if extent_of(both, torch.cat([a, b]).detach(), 1.0) <= 1e3 * extent_of(both, torch.cat([a, b]).detach(), 0.5):
        return x, a, y, b, 1.0
    share = 1.0
    while True:
        centre = torch.cat([x, y]).detach().median(0).values
        i = int((x.detach() - centre).norm(dim=-1).argmax())
        same_x, same_y = ((z.detach() == x.detach()[i]).all(-1) for z in (x, y))
        mass = float(a.detach()[same_x].sum())
        rest = torch.cat([x.detach()[~same_x], y.detach()[~same_y]])
        if not len(rest) or not (same_y.any() and abs(float(b.detach()[same_y].sum()) - mass) <= 1e-15):
            break
        far = float((rest - x.detach()[i]).norm(dim=-1).min())
        across = 2 * float((rest - rest.mean(0)).norm(dim=-1).max())  # at least their diameter
        if not across < 2 ** (1 / p) * far:
            break
        x, a, y, b = x[~same_x], a[~same_x], y[~same_y], b[~same_y]
        share *= float(a.detach().sum())
        a, b = a / a.sum(), b / b.sum()
    return x, a, y, b, share
