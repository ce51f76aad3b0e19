"""Certified optimal transport of large clouds: a sparse linear program over a shortlist of pairs, grown until proved.

A plan on any subset of pairs costs at least the optimum. Potentials (u, v) with u_i = min_j c_ij - v_j over ALL j
are dual feasible, so <a, u> + <b, v> is at most the optimum. The program is solved on few pairs, the minimum is taken
over all of them (a k-d tree for |x - y|^2 in low dimension, blocks of rows otherwise: memory linear in n), pairs that
violate the dual are added, and the loop ends when the two bounds meet. The first shortlist comes from the same
problem on blocks of tokens (their mass, one of their points), so the pairs that matter are nearly all there; or from
the plan of a problem nearby.
Gottschlich & Schuhmacher, PLoS ONE 9 (2014); Schmitzer, J. Math. Imaging Vis. 56 (2016).
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from scipy.spatial import cKDTree

from attn_flow.transport.coupling import PIVOTS, Array, Ground, Index, Plan, leak, potential, simplex, staircase

# Below this many points a side, the dense program is solved.
DENSE = 800
# Tokens per block of the coarser problem, and pairs kept per token.
BLOCK = 5
CANDIDATES = 8
# Largest dimension where a k-d tree beats rows of the cost matrix.
TREE_DIMENSION = 6
# Entries of the cost matrix held at once: 8 MB.
ENTRIES = 1 << 20
ROUNDS = 60
# Temperatures of the potentials that the network simplex starts from, sweeps at each, and by how much they fall.
COOLINGS, SWEEPS, COOLER = 20, 5, 0.7
# Relative gap to which blocks are solved, and with which a plan from elsewhere is the better start: beyond it, pairs
# that matter are missing and rounds are many.
COARSE = 1e-2
# A gap that rounding alone may leave, for coordinates of order one.
ROUNDING = 1e-14


def shortlist(
    x: Array, a: Array, y: Array, b: Array, ground: Ground, gap: float = 1e-6, start: Plan | None = None
) -> Plan:
    """A plan whose cost is within the relative `gap` of the optimum, with the gap that was proved.

    start: a plan with the marginals a and b and a potential, of other points; left aside unless they are nearby.
    """
    squared = ground == Ground(2.0, "euclidean")
    if not squared:
        return _solve(x, a, y, b, ground, gap, 0.0, start)
    # |x - y|^2 = |x' - y'|^2 + 2 <x' - y', s> + |s|^2 for centred x', y' and s the shift of the means: the same
    # plans are optimal, and the tree prunes well.
    mean_x, mean_y = a @ x, b @ y
    shift = mean_x - mean_y
    tilt = 2 * (y - mean_y) @ shift
    start = None if start is None else replace(start, v=potential(start) + tilt)
    plan = _solve(x - mean_x, a, y - mean_y, b, ground, gap, float(shift @ shift), start)
    return replace(plan, v=potential(plan) - tilt)


def _solve(
    x: Array, a: Array, y: Array, b: Array, ground: Ground, gap: float, constant: float, start: Plan | None = None
) -> Plan:
    """Solve on blocks, refine to points; `constant` is a part of the cost that every plan pays."""
    m = len(y)
    if max(len(x), m) <= DENSE:
        return simplex(x, a, y, b, ground)
    if start is None or not _close(start, x, a, y, b, ground):
        bx, by = (_blocks(z) if len(z) > DENSE else np.arange(len(z)) for z in (x, y))
        X, A = _represent(x, a, bx)
        Y, B = _represent(y, b, by)
        coarse = _solve(X, A, Y, B, ground, max(gap, COARSE), constant)
        u = nearest(x, Y, potential(coarse), 1, ground)[2]
        feasible = _refined(coarse, a, bx, b, by, m)
    else:
        u = nearest(x, y, potential(start), 1, ground)[2]
        feasible = start.i * m + start.j
    v = nearest(y, x, u, 1, ground)[2]
    _, j, u = nearest(x, y, v, CANDIDATES, ground)
    _, i, _ = nearest(y, x, u, CANDIDATES, ground)
    pairs = _distinct(_key(j, m), _key(i, len(x), m), feasible)
    u, v = _annealed(x, a, y, b, ground, pairs, u, v)
    for _ in range(ROUNDS):
        plan, u = _sparse(x, a, y, b, ground, pairs, u, v)
        v = potential(plan)
        reduced, j, floor = nearest(x, y, v, CANDIDATES, ground)
        cost = float(plan.mass @ ground.pairs(x[plan.i], y[plan.j]))
        proved = max(cost - float(a @ floor + b @ v), 0.0)
        allowed = max(gap * (cost + constant), ROUNDING)
        row, column = np.nonzero(reduced - u[:, None] < -allowed / 8)
        grown = _distinct(pairs, row * m + j[row, column])
        # Without a new pair the bounds have met to the solver's rounding, and `proved` says how well.
        if proved <= allowed or len(grown) == len(pairs):
            break
        pairs = grown
    return replace(plan, gap=proved + leak(plan, a, b) * _largest(x, y, ground))


def _annealed(
    x: Array, a: Array, y: Array, b: Array, ground: Ground, pairs: Index, u: Array, v: Array
) -> tuple[Array, Array]:
    """Potentials nearer to the optimum on the given pairs (i m + j), by Sinkhorn's iteration on these pairs alone.

    The network simplex takes time like n^2 from potentials of blocks, and a quarter of it at n = 10^4 from these, which
    cost time like n. They are a start and prove nothing.
    """
    i, j = np.divmod(pairs, len(y))
    c = ground.pairs(x[i], y[j])
    eps = float((c - u[i] - v[j]).mean()) / 4
    if not eps > 0:
        return u, v
    by_j = np.argsort(j, kind="stable")
    ends = tuple((np.flatnonzero(np.r_[True, np.diff(k) > 0]), k) for k in (i, j[by_j]))
    log_a, log_b = np.log(a), np.log(b)

    def soft(z: Array, first: Index, k: Index) -> Array:
        top = np.maximum.reduceat(z, first)
        return top + np.log(np.add.reduceat(np.exp(z - top[k]), first))

    for _ in range(COOLINGS):
        for _ in range(SWEEPS):
            u = eps * (log_a - soft((v[j] - c) / eps, *ends[0]))
            v = eps * (log_b - soft(((u[i] - c) / eps)[by_j], *ends[1]))
        eps *= COOLER
    u = np.minimum.reduceat(c - v[j], ends[0][0])
    return u, np.minimum.reduceat((c - u[i])[by_j], ends[1][0])


def _close(start: Plan, x: Array, a: Array, y: Array, b: Array, ground: Ground) -> bool:
    """Whether the plan and its potential are within COARSE of the optimum between these points, too."""
    v = potential(start)
    cost = float(start.mass @ ground.pairs(x[start.i], y[start.j]))
    return cost - float(a @ nearest(x, y, v, 1, ground)[2] + b @ v) <= COARSE * cost


def _distinct(*keys: Index) -> Index:
    """Sorted and without repetition; np.unique hashes, which is slower where most is in order already."""
    joined = np.sort(np.concatenate(keys), kind="stable")
    return joined[np.r_[True, np.diff(joined) > 0]]


def _largest(x: Array, y: Array, ground: Ground) -> float:
    """A bound of every c_ij^p: pi, or the diagonal of the box around both clouds."""
    box = np.ptp(np.concatenate([x, y]), axis=0)
    return float(np.pi if ground.cost == "geodesic" else np.linalg.norm(box)) ** ground.p


def _sparse(
    x: Array, a: Array, y: Array, b: Array, ground: Ground, pairs: Index, u: Array, v: Array
) -> tuple[Plan, Array]:
    """The network simplex on the given pairs (i m + j), started at (u, v); its plan and its u."""
    from ot.lp.emd_wrap import emd_c_sparse

    i, j = np.divmod(pairs, len(y))
    c = ground.pairs(x[i], y[j])
    # Costs of order one: the solver's stopping tolerance is absolute.
    unit = c.mean() or 1.0
    start = u / unit, v / unit
    i, j, mass, _, u, v, _ = emd_c_sparse(a, b, i.astype(np.uint64), j.astype(np.uint64), c / unit, PIVOTS, *start)
    # Potentials are known up to a constant, which may be huge and would cost digits in u + v.
    level = np.median(v)
    return Plan(i.astype(np.int64), j.astype(np.int64), mass, v=(v - level) * unit), (u + level) * unit


def _key(columns: Index, m: int, transposed: int | None = None) -> Index:
    """(i, columns[i]) as i m + j; for neighbours of y among x (`m` of them) pass the number of y as `transposed`."""
    rows = np.repeat(np.arange(len(columns)), columns.shape[1])
    return rows * m + columns.ravel() if transposed is None else columns.ravel() * transposed + rows


def nearest(x: Array, y: Array, v: Array, k: int, ground: Ground) -> tuple[Array, Index, Array]:
    """The k smallest c_ij - v_j of each row with their j, (n, k) each, and a lower bound of the smallest, (n,)."""
    k = min(k, len(y))
    if ground == Ground(2.0, "euclidean") and x.shape[1] <= TREE_DIMENSION:
        # |x - y|^2 - v + max v is the squared distance of (x, 0) to (y, sqrt(max v - v)).
        lifted = np.c_[y, np.sqrt(v.max() - v)]
        far, j = cKDTree(lifted, balanced_tree=False, compact_nodes=False).query(np.c_[x, np.zeros(len(x))], k=k)
        j = j.reshape(len(x), k).astype(np.int64)
        last = far.reshape(len(x), k)[:, -1] ** 2 - v.max()
    else:
        j, last = _nearest_by_rows(x, y, v, k, ground)
    reduced = ground.pairs(np.repeat(x, k, 0), y[j.ravel()]).reshape(len(x), k) - v[j]
    # The search rounds (squared norms, the lift); what it left out is at least its last value minus that.
    rounding = 16 * np.finfo(float).eps * (x.shape[1] + 2) * (np.square(x).sum(1).max() + np.square(y).sum(1).max())
    rounding += 16 * np.finfo(float).eps * np.ptp(v)
    floor = reduced.min(1)
    return reduced, j, floor if k == len(y) else np.minimum(floor, last - rounding)


def _nearest_by_rows(x: Array, y: Array, v: Array, k: int, ground: Ground) -> tuple[Index, Array]:
    """The same search over blocks of rows of the cost matrix: j (n, k) and the k-th value (n,)."""
    rows = max(ENTRIES // len(y), 1)
    squared = ground == Ground(2.0, "euclidean")
    Y, V = torch.from_numpy(y), torch.from_numpy(v)
    offset = Y.square().sum(1) - V if squared else None
    js, lasts = [], []
    for part in np.array_split(x, range(rows, len(x), rows)):
        if offset is not None:
            X = torch.from_numpy(part)
            c = torch.addmm(offset, X, Y.T, alpha=-2) + X.square().sum(1, keepdim=True)
        else:
            c = torch.from_numpy(ground.matrix(part, y)) - V
        value, j = c.topk(k, largest=False)
        js.append(j.numpy())
        lasts.append(value[:, -1].numpy())
    return np.concatenate(js), np.concatenate(lasts)


def _blocks(x: Array) -> Index:
    """Labels (n,) of blocks of about BLOCK near points: halving along the longest side, every block at once."""
    n = len(x)
    order = np.arange(n)
    levels = int(np.ceil(np.log2(n / BLOCK)))
    for level in range(levels):
        first = n * np.arange(2**level) // 2**level
        z = x[order]
        side = np.maximum.reduceat(z, first) - np.minimum.reduceat(z, first)
        block = np.repeat(np.arange(2**level), np.diff(np.r_[first, n]))
        order = order[np.lexsort((z[np.arange(n), side.argmax(1)[block]], block))]
    label = np.empty(n, dtype=np.int64)
    first = n * np.arange(2**levels) // 2**levels
    label[order] = np.repeat(np.arange(2**levels), np.diff(np.r_[first, n]))
    return label


def _represent(x: Array, a: Array, label: Index) -> tuple[Array, Array]:
    """The mass of each block and the member nearest its mean: a point of the set on any geometry."""
    mass: Array = np.bincount(label, a).astype(np.float64)
    mean = np.stack([np.bincount(label, a * z) for z in x.T], 1) / mass[:, None]
    order = np.lexsort((np.square(x - mean[label]).sum(1), label))
    first = np.r_[0, np.flatnonzero(np.diff(label[order])) + 1]
    return x[order[first]], mass


def _refined(coarse: Plan, a: Array, bx: Index, b: Array, by: Index, m: int) -> Index:
    """Pairs of a feasible plan of the points that moves every block as the coarse plan does."""
    by_i = np.lexsort((coarse.j, coarse.i))
    to, mass = coarse.j[by_i], coarse.mass[by_i]
    # Points and coarse moves share one line of mass, sorted by block of x; then the same by block of y.
    x_order, y_order, by_j = (np.argsort(z, kind="stable") for z in (bx, by, to))
    i, _, mass_x = staircase(a[x_order], mass)
    j, move_y, mass_y = staircase(b[y_order], mass[by_j])
    i, j, move_y = x_order[i], y_order[j], by_j[move_y]
    # Inside each move, its points of x meet its points of y in any order.
    sort = np.argsort(move_y, kind="stable")
    s, t, _ = staircase(mass_x, mass_y[sort])
    return i[s] * m + j[sort][t]
