"""The ground cost c(x, y)^p: of pairs, as a matrix, and its c-transform in memory linear in the number of points.

The c-transform of v is u_i = min_j c_ij - v_j, the largest u with u_i + v_j <= c_ij. Such a pair (u, v) proves the
lower bound <a, u> + <b, v> of the optimal cost.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from scipy.spatial import cKDTree
from torch import Tensor

from attn_flow.geometry import angle
from attn_flow.transport.plan import Array, Index

# The most entries of an n x m matrix that a solver may build: n = m = 5,000. The matrix takes 0.2 GB in float64, and
# solvers hold up to seven of them.
MAX_ENTRIES = 25_000_000
MAX_TREE_DIMENSION = 6  # above it, rows of the cost matrix are faster than a k-d tree
BLOCK_ENTRIES = 2**20  # of the cost matrix in memory at a time while rows are searched: 8 MB


def require_matrix(n: int, m: int) -> None:
    """Raise ValueError if an n x m matrix has more than `MAX_ENTRIES` entries."""
    if n * m > MAX_ENTRIES:
        raise ValueError(
            f"a {n:,} x {m:,} cost matrix has more than {MAX_ENTRIES:,} entries; use method='shortlist', whose memory "
            "is linear in the number of points, or method='sliced'."
        )


@dataclass(frozen=True)
class GroundCost:
    """c(x, y)^p, where c is the Euclidean distance or, if the name is "geodesic", the angle between unit vectors."""

    p: float
    name: str

    @property
    def is_squared_euclidean(self) -> bool:
        return self.p == 2 and self.name == "euclidean"

    def distance(self, x: Tensor, y: Tensor) -> Tensor:
        """c(x_i, y_i), from (..., d) and (..., d) to (...)."""
        return angle(x, y) if self.name == "geodesic" else (x - y).norm(dim=-1)

    def of_pairs(self, x: Array, y: Array) -> Array:
        """c(x_i, y_i)^p, from (n, d) and (n, d) to (n,)."""
        return self.distance(torch.from_numpy(x), torch.from_numpy(y)).numpy() ** self.p

    def matrix(self, x: Array, y: Array) -> Array:
        """c(x_i, y_j)^p, (n, m), from differences: the Gram matrix would lose half of the digits near zero."""
        require_matrix(len(x), len(y))
        c = _distances(x, y)
        if self.name == "geodesic":
            c = 2 * np.arctan2(c, _distances(x, -y))
        return c if self.p == 1 else c**self.p


def _distances(x: Array, y: Array) -> Array:
    """|x_i - y_j|, (n, m)."""
    mode = "donot_use_mm_for_euclid_dist"
    return torch.cdist(torch.from_numpy(x), torch.from_numpy(y), compute_mode=mode).numpy()


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
