"""The smallest reduced costs c_ij - v_j of every point, in memory linear in the number of points.

Their minimum over all j is the c-transform of v: the largest u with u_i + v_j <= c_ij. Such a pair (u, v) proves the
lower bound <a, u> + <b, v> of the optimal cost.
"""

from __future__ import annotations

import numpy as np
import torch
from scipy.spatial import cKDTree

from attn_flow.transport.coupling import Array, GroundCost, Index

# The largest dimension where a k-d tree is faster than rows of the cost matrix.
MAX_TREE_DIMENSION = 6
# Entries of the cost matrix in memory at a time: 8 MB.
BLOCK_ENTRIES = 2**20


def c_transform(x: Array, y: Array, v: Array, cost: GroundCost) -> Array:
    """min_j c_ij - v_j, (n,), lowered by what rounding may have added."""
    return smallest_reduced_costs(x, y, v, 1, cost)[2]


def smallest_reduced_costs(x: Array, y: Array, v: Array, k: int, cost: GroundCost) -> tuple[Array, Index, Array]:
    """The k smallest c_ij - v_j of every row.

    Returns:
        The reduced costs (n, k), their indices j (n, k), and a lower bound of the smallest of each row (n,).
    """
    k = min(k, len(y))
    if cost.is_squared_euclidean and x.shape[1] <= MAX_TREE_DIMENSION:
        # |x - y|^2 - v + max v is the squared distance of (x, 0) to (y, sqrt(max v - v)).
        tree = cKDTree(np.c_[y, np.sqrt(v.max() - v)], balanced_tree=False, compact_nodes=False)
        distances, j = (z.reshape(len(x), k) for z in tree.query(np.c_[x, np.zeros(len(x))], k=k))
        j, largest = j.astype(np.int64), distances[:, -1] ** 2 - v.max()
    else:
        j, largest = _search_by_rows(x, y, v, k, cost)
    reduced = cost.of_pairs(np.repeat(x, k, 0), y[j.ravel()]).reshape(len(x), k) - v[j]
    lower = reduced.min(1)
    if k < len(y):
        # The search rounds, so what it left out is at least its largest value minus the rounding errors.
        size = (x.shape[1] + 2) * (np.square(x).sum(1).max() + np.square(y).sum(1).max()) + np.ptp(v)
        lower = np.minimum(lower, largest - 16 * np.finfo(float).eps * size)
    return reduced, j, lower


def _search_by_rows(x: Array, y: Array, v: Array, k: int, cost: GroundCost) -> tuple[Index, Array]:
    """The same search over blocks of rows of the cost matrix: the indices (n, k) and the k-th values (n,)."""
    rows = max(BLOCK_ENTRIES // len(y), 1)
    Y, V = torch.from_numpy(y), torch.from_numpy(v)
    indices, largest = [], []
    for block in np.array_split(x, range(rows, len(x), rows)):
        X = torch.from_numpy(block)
        if cost.is_squared_euclidean:
            reduced = torch.addmm(Y.square().sum(1) - V, X, Y.T, alpha=-2) + X.square().sum(1, keepdim=True)
        else:
            reduced = torch.from_numpy(cost.matrix(block, y)) - V
        value, j = reduced.topk(k, largest=False)
        indices.append(j.numpy())
        largest.append(value[:, -1].numpy())
    return np.concatenate(indices), np.concatenate(largest)
