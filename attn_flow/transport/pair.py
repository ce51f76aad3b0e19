"""What every method takes and returns: a pair of clouds, and the distance between them with its proved error."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from attn_flow.transport.ground_cost import GroundCost, c_transform
from attn_flow.transport.plan import Array, Plan

SPHERE_RTOL = 1e-4  # the lengths of points may differ by this much, relative to their mean, on what is called a sphere


@dataclass(frozen=True, eq=False)
class Pair:
    """Points x (n, d), y (m, d) with probabilities a (n,), b (m,), in float64, and the ground cost."""

    x: Tensor
    a: Tensor
    y: Tensor
    b: Tensor
    cost: GroundCost

    @property
    def has_mass_gradient(self) -> bool:
        return self.a.requires_grad or self.b.requires_grad

    def cpu(self) -> Pair:
        return replace(self, x=self.x.cpu(), a=self.a.cpu(), y=self.y.cpu(), b=self.b.cpu())

    def arrays(self) -> tuple[Array, Array, Array, Array]:
        """x, a, y and b as numpy arrays."""
        x, a, y, b = (z.detach().numpy() for z in (self.x, self.a, self.y, self.b))
        return x, a, y, b

    def points(self) -> Tensor:
        """The points of both clouds that have mass, (k, d)."""
        return torch.cat([self.x[self.a > 0], self.y[self.b > 0]]).detach()

    def size(self) -> float:
        """The largest coordinate of nine tenths of the points, seen from their median.

        A few points far from all others do not change it, nor does a point that most of the mass lies on.
        """
        points = self.points()
        distance = (points - points.median(0).values).abs().amax(-1)
        distance = distance[distance > 0].sort().values
        return float(distance[int(0.9 * len(distance))]) if len(distance) else 0.0

    def scaled(self) -> tuple[Pair, float]:
        """The pair with coordinates of order one, and the unit that its distances were divided by.

        The powers of distances then neither overflow nor vanish, and solvers may stop at absolute tolerances. With
        cost "geodesic" the points become unit vectors, otherwise they are centred.
        """
        points = self.points()
        is_geodesic = self.cost.name == "geodesic"
        centre = torch.zeros_like(points[0]) if is_geodesic else points.median(0).values
        unit = float((points - centre).abs().max()) or 1.0
        x, y = (self.x - centre) / unit, (self.y - centre) / unit
        if is_geodesic:
            norms = (points / unit).norm(dim=-1)
            radius = float(norms.mean())
            if radius == 0 or float((norms - radius).abs().max()) > SPHERE_RTOL * radius:
                raise ValueError(
                    "cost 'geodesic' needs points on one sphere around the origin, but the longest point is "
                    f"{float(norms.max() / norms.min()):.6g} times as long as the shortest; use Sphere(radius).retract "
                    "on the points, or cost='euclidean'."
                )
            x, y = (z / z.norm(dim=-1, keepdim=True) for z in (x, y))
            unit = unit * radius
        return replace(self, x=x, y=y), unit

    def cost_of(self, plan: Plan) -> Tensor:
        """(sum_k mass_k c(x_i, y_j)^p)^{1/p} of a fixed plan, with its gradients in the points and the masses."""
        i, j, mass = (torch.from_numpy(z) for z in (plan.i, plan.j, plan.mass))
        p, c = self.cost.p, self.cost.distance(self.x[i], self.y[j])
        largest = c.detach().max()
        if largest == 0:  # the p-th root has no derivative at zero; this has the derivative zero
            return (mass * c).sum()
        total = (mass * (c / largest) ** p).sum()
        if self.has_mass_gradient:
            u, v = self.dual_potentials(plan)
            total = total + ((self.a - self.a.detach()) @ u + (self.b - self.b.detach()) @ v) / largest**p
        return largest * total ** (1 / p)

    def dual_potentials(self, plan: Plan) -> tuple[Tensor, Tensor]:
        """u (n,) and v (m,) with u_i + v_j <= c_ij^p for all points, with and without mass.

        They are the derivatives of W_p^p in the masses, up to a constant.
        """
        x, _, y, _ = self.arrays()
        is_known = np.isfinite(plan.potential)
        u = c_transform(x, y[is_known], plan.potential[is_known], self.cost)
        return torch.from_numpy(u), torch.from_numpy(c_transform(y, x, u, self.cost))


@dataclass(frozen=True, eq=False)
class Solution:
    """The distance of a pair, shape (), its error bound, the name of the method, the plan and the potentials."""

    value: Tensor
    error: float
    method: str
    plan: Plan | None = None
    potentials: tuple[Tensor, Tensor] | None = None
