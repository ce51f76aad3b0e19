"""Certified optimal transport between large clouds: a linear program over few pairs of points, grown until proved.

A plan on any subset of pairs costs at least the optimum. The potential v of that plan and its c-transform u, taken
over ALL pairs, bound the optimum from below. So the program is solved on a shortlist of pairs, pairs that violate
u_i + v_j <= c_ij are added, and the loop ends when the two bounds meet. The first shortlist comes from the same
problem on blocks of about five points, so that nearly all pairs that matter are in it. Memory is linear in n.
Gottschlich and Schuhmacher, PLoS ONE 9 (2014); Schmitzer, J. Math. Imaging Vis. 56 (2016).
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from attn_flow.base.checks import require_extra
from attn_flow.kernels.near import cut_into_patches
from attn_flow.transport.ground_cost import GroundCost, c_transform, smallest_reduced_costs
from attn_flow.transport.network_simplex import MAX_PIVOTS, simplex
from attn_flow.transport.plan import Array, Index, Plan, refine

MAX_SIMPLEX_POINTS = 800  # up to this many points in each cloud the dense program is solved
BLOCK_POINTS = 5  # points per block of the coarser problem
NEIGHBOURS = 8  # pairs per point that enter the shortlist at a time
MAX_ROUNDS = 60
RTOL, COARSE_RTOL = 1e-6, 1e-2  # relative gaps to which points and blocks are solved
MIN_GAP = 1e-14  # a gap that rounding alone may leave, for coordinates of order one


def shortlist(x: Array, a: Array, y: Array, b: Array, cost: GroundCost) -> Plan:
    """A plan whose cost is within the relative gap 1e-6 of the optimum, with the gap that was proved."""
    if cost.is_squared_euclidean:
        # |x - y|^2 = |x' - y'|^2 + 2 <x' - y', s> + |s|^2 for centred x' and y', where s is the difference of the
        # means. The same plans are optimal for |x' - y'|^2, and the k-d tree is faster on centred clouds.
        mean_x, mean_y = a @ x, b @ y
        shift = mean_x - mean_y
        plan = _solve(x - mean_x, a, y - mean_y, b, cost, RTOL, float(shift @ shift))
        plan = replace(plan, v=plan.potential - 2 * (y - mean_y) @ shift)
    else:
        plan = _solve(x, a, y, b, cost, RTOL, 0.0)
    diameter = np.pi if cost.name == "geodesic" else float(np.linalg.norm(np.ptp(np.r_[x, y], axis=0)))  # or more
    return replace(plan, gap=plan.gap + plan.mass_error(a, b) * diameter**cost.p)


def _solve(x: Array, a: Array, y: Array, b: Array, cost: GroundCost, rtol: float, constant: float) -> Plan:
    """Solve on blocks, then on points; `constant` is a part of the cost that all plans share."""
    m = len(y)
    if max(len(x), m) <= MAX_SIMPLEX_POINTS:
        return simplex(x, a, y, b, cost)
    block_x, block_y = (_blocks(z) if len(z) > MAX_SIMPLEX_POINTS else np.arange(len(z)) for z in (x, y))
    coarse_x, coarse_a = _representatives(x, a, block_x)
    coarse_y, coarse_b = _representatives(y, b, block_y)
    coarse = _solve(coarse_x, coarse_a, coarse_y, coarse_b, cost, max(rtol, COARSE_RTOL), constant)
    i, j, _ = refine(coarse, a, block_x, b, block_y)
    pairs = i * m + j  # a pair (i, j) is stored as i m + j; these pairs have a plan with the right marginals
    v = c_transform(y, x, c_transform(x, coarse_y, coarse.potential, cost), cost)
    _, near_y, u = smallest_reduced_costs(x, y, v, NEIGHBOURS, cost)
    _, near_x, _ = smallest_reduced_costs(y, x, u, NEIGHBOURS, cost)
    rows, columns = np.arange(len(x))[:, None], np.arange(m)[:, None]
    pairs = _union(pairs, (rows * m + near_y).ravel(), (near_x * m + columns).ravel())
    for _ in range(MAX_ROUNDS):
        plan, u = _sparse_simplex(x, a, y, b, cost, pairs, u, v)
        v = plan.potential
        reduced, near_y, lower = smallest_reduced_costs(x, y, v, NEIGHBOURS, cost)
        value = float(plan.mass @ cost.of_pairs(x[plan.i], y[plan.j]))
        gap = max(value - float(a @ lower + b @ v), 0.0)
        allowed = max(rtol * (value + constant), MIN_GAP)
        row, column = np.nonzero(reduced - u[:, None] < -allowed / 8)
        grown = _union(pairs, row * m + near_y[row, column])
        # Without a new pair the bounds have met up to the rounding of the solver.
        if gap <= allowed or len(grown) == len(pairs):
            break
        pairs = grown
    return replace(plan, gap=gap)


def _sparse_simplex(
    x: Array, a: Array, y: Array, b: Array, cost: GroundCost, pairs: Index, u: Array, v: Array
) -> tuple[Plan, Array]:
    """The network simplex on a shortlist of pairs, started at the potentials (u, v): its plan and its u."""
    emd_c_sparse = require_extra("ot").lp.emd_wrap.emd_c_sparse  # the public function of POT does not take a start
    i, j = np.divmod(pairs, len(y))
    c = cost.of_pairs(x[i], y[j])
    unit = c.mean() or 1.0  # the solver stops at an absolute tolerance, so it gets costs of order one
    source, target = i.astype(np.uint64), j.astype(np.uint64)
    i, j, mass, _, u, v, _ = emd_c_sparse(a, b, source, target, c / unit, MAX_PIVOTS, u / unit, v / unit)
    # Potentials are known up to a constant, which may be huge and would cost digits in u + v.
    level = np.median(v)
    return Plan(i.astype(np.int64), j.astype(np.int64), mass, v=(v - level) * unit), (u + level) * unit


def _union(*pairs: Index) -> Index:
    """Sorted pairs without repetition; faster than np.unique where most of them are in order already."""
    joined = np.sort(np.concatenate(pairs), kind="stable")
    return joined[np.r_[True, np.diff(joined) > 0]]


def _blocks(x: Array) -> Index:
    """Labels (n,) of blocks of at most `BLOCK_POINTS` near points."""
    patches = cut_into_patches(torch.from_numpy(x), BLOCK_POINTS)
    number = torch.arange(len(patches.index))[:, None].expand(patches.index.shape)
    return np.unique(patches.scatter(number).numpy(), return_inverse=True)[1]  # some patches only fill up


def _representatives(x: Array, a: Array, label: Index) -> tuple[Array, Array]:
    """For each block, the point nearest to its mean, which lies on any geometry of the points, and its mass."""
    mass: Array = np.bincount(label, a).astype(np.float64)
    mean = np.stack([np.bincount(label, a * z) for z in x.T], 1) / mass[:, None]
    order = np.lexsort((np.square(x - mean[label]).sum(1), label))
    return x[order[np.searchsorted(label[order], np.arange(len(mass)))]], mass
