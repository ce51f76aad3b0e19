"""Shared outliers and coincident points, which a solver does not see, and the plan between all points after it."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from attn_flow.transport.ground_cost import GroundCost
from attn_flow.transport.plan import Array, Index, Plan, north_west_corner

# Groups that are searched for before the remaining points count as distinct.
MIN_GROUPS = 64


def extent(x: Tensor, mass: Tensor, part: float) -> float:
    """The largest side of the box around the median of x (n, d) that holds a part of the mass along each axis.

    With part = 0.9, a few points far from all others do not change it.
    """
    distance, order = (x - x.median(0).values).abs().sort(0)  # (n, d) both
    below = mass[order].cumsum(0) < part * (1 - 1e-12) * mass.sum()
    last = below.sum(0, keepdim=True).clamp(max=len(x) - 1)
    return 2 * float(distance.gather(0, last).max())


def shared_outliers(x: Tensor, a: Tensor, y: Tensor, b: Tensor, p: float) -> list[tuple[Index, Index]]:
    """Isolated points that carry equal mass in both clouds: the indices in x and in y, for every such place.

    They do not move. If a place is at least D away from all other points, which are less than 2^{1/p} D apart, then
    sending mass away from it and other mass to it costs 2 D^p or more, and sending that mass directly costs less.
    Left in, an outlier would set the scale of rounding errors.
    """
    points, mass = torch.cat([x, y]), torch.cat([a, b])
    outliers: list[tuple[Index, Index]] = []
    if extent(points, mass, 1.0) <= 1e3 * extent(points, mass, 0.5):
        return outliers
    rows, columns = np.flatnonzero(a), np.flatnonzero(b)
    while len(rows) and len(columns):
        centre = torch.cat([x[rows], y[columns]]).median(0).values
        outlier = x[rows][int((x[rows] - centre).norm(dim=-1).argmax())]
        is_x, is_y = ((z == outlier).all(-1).numpy() for z in (x[rows], y[columns]))
        others = torch.cat([x[rows[~is_x]], y[columns[~is_y]]])
        if not len(others) or abs(float(a[rows[is_x]].sum() - b[columns[is_y]].sum())) > 1e-15:
            break
        away = float((others - outlier).norm(dim=-1).min())
        diameter = 2 * float((others - others.mean(0)).norm(dim=-1).max())  # or more
        if not diameter < 2 ** (1 / p) * away:
            break
        outliers.append((rows[is_x], columns[is_y]))
        rows, columns = rows[~is_x], columns[~is_y]
    return outliers


def coincident_groups(x: Tensor, tol: float) -> Index:
    """Labels (n,) such that all points of a label are within tol of its first point."""
    z = x.detach().numpy()
    n = len(z)
    label = np.full(n, -1)
    free = np.arange(n)
    count = 0
    while len(free):
        is_near = np.abs(z[free, 0] - z[free[0], 0]) <= tol  # rules out nearly all points of a spread cloud
        is_near[is_near] = np.square(z[free[is_near]] - z[free[0]]).sum(1) <= tol * tol
        label[free[is_near]] = count
        free = free[~is_near]
        count += 1
        if count >= MIN_GROUPS and n - len(free) < 4 * count:  # each group costs a pass and gains little
            label[free] = count + np.arange(len(free))
            break
    return label


def merge(x: Tensor, a: Tensor, group: Index, cost: GroundCost) -> tuple[Tensor, Tensor, float]:
    """One point per group: the first of its points, with the mass of all of them.

    Returns:
        The merged points (k, d), their masses (k,), and (sum_i a_i c(x_i, merged x_i)^p)^{1/p}: W_p to any other
        cloud changes by no more. The gradient of a merged point is shared by the points of its group.
    """
    label = torch.from_numpy(group)
    first = x.detach()[np.unique(group, return_index=True)[1]]
    mass = torch.zeros(len(first), dtype=a.dtype).index_add(0, label, a)
    share = torch.where(mass[label] > 0, a / mass[label], 0.0).detach()
    moving = torch.zeros_like(first).index_add(0, label, share[:, None] * (x - x.detach()))  # zero, with a gradient
    distance = cost.distance(x.detach(), first[label])
    largest = float(distance.max()) or 1.0
    moved = largest * float((a.detach() * (distance / largest) ** cost.p).sum()) ** (1 / cost.p)
    return first + moving, mass, moved


def refine(coarse: Plan, a: Array, group_x: Index, b: Array, group_y: Index) -> tuple[Index, Index, Array]:
    """A plan between points of masses a (n,), b (m,) that moves every group of points as the coarse plan does.

    Args:
        coarse: a plan between the groups.
        group_x, group_y: the group of every point, (n,) and (m,).

    Returns:
        i, j and mass, (k,) each.
    """
    order = np.lexsort((coarse.j, coarse.i))
    target, mass = coarse.j[order], coarse.mass[order]
    # Sorted by group of x, the points of x share out the mass of the moves; sorted by group of y, those of y do.
    order_x, order_y, by_target = (np.argsort(z, kind="stable") for z in (group_x, group_y, target))
    i, _, mass_x = north_west_corner(a[order_x], mass)
    j, move, mass_y = north_west_corner(b[order_y], mass[by_target])
    by_move = np.argsort(by_target[move], kind="stable")
    # Within each move, the points of x meet those of y in any order.
    s, t, mass = north_west_corner(mass_x, mass_y[by_move])
    return order_x[i[s]], order_y[j[by_move[t]]], mass
