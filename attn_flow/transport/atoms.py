"""Coincident points as one atom: fewer points, and the distance they moved is part of the error."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from attn_flow.transport.coupling import Ground, Index

# Leaders tried before a cloud counts as spread.
LEADERS = 64


def merged_clouds(
    x: Tensor, a: Tensor, y: Tensor, b: Tensor, ground: Ground, tol: float, dense: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, float] | None:
    """Both clouds as atoms, and the distance they moved: W_p changes by no more. None where it would not pay.

    dense: points a side up to which the dense solvers are fastest.
    """
    owner_x, owner_y = _atoms(x, tol), _atoms(y, tol)
    atoms = 1 + int(owner_x.max()), 1 + int(owner_y.max())
    # Small uniform clouds lose the assignment solver by merging; large ones gain by any atom.
    worth = 0.25 if len(x) * len(y) <= dense**2 else 0.95
    if atoms[0] * atoms[1] > worth * len(x) * len(y):
        return None
    X, A, moved_x = _merge(x, a, owner_x, ground)
    Y, B, moved_y = _merge(y, b, owner_y, ground)
    return X, A, Y, B, moved_x + moved_y


def _atoms(x: Tensor, tol: float) -> Index:
    """Labels (n,) such that points of one label are within tol of its first point."""
    z = x.detach().cpu().numpy()
    n = len(z)
    label = np.full(n, -1)
    free = np.arange(n)
    k = 0
    while len(free):
        near = np.abs(z[free, 0] - z[free[0], 0]) <= tol  # one coordinate rules out nearly all in a spread cloud
        near[near] = np.square(z[free[near]] - z[free[0]]).sum(1) <= tol * tol
        label[free[near]] = k
        free = free[~near]
        k += 1
        # What is left is spread: each leader costs a pass over the points and gains little.
        if k >= LEADERS and n - len(free) < 4 * k:
            label[free] = k + np.arange(len(free))
            break
    return label


def _merge(x: Tensor, a: Tensor, owner: Index, ground: Ground) -> tuple[Tensor, Tensor, float]:
    """The first point of every label with the label's mass, and (sum a c(x, its atom)^p)^{1/p}."""
    first = torch.from_numpy(np.unique(owner, return_index=True)[1]).to(x.device)
    label = torch.from_numpy(owner).to(x.device)
    mass = torch.zeros(len(first), dtype=a.dtype, device=a.device).index_add(0, label, a)
    leader = x.detach()[first]
    share = torch.where(mass[label] > 0, a / mass[label], 0.0).detach()
    # The value is the leader's, exactly; the gradient is shared by all it stands for.
    pull = torch.zeros_like(leader).index_add(0, label, share[:, None] * (x - x.detach()))
    far = ground.distance(x.detach(), leader[label])
    top = float(far.max())
    moved = top * float((a.detach() * (far / top) ** ground.p).sum()) ** (1 / ground.p) if top > 0 else 0.0
    return leader + pull, mass, moved
