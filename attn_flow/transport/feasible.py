"""Proved bounds of W_2 from any potential: plans and potentials made feasible, for a batch of pairs at once.

A potential g of y gives a plan e^{(f_i + g_j - C_ij)/eps} with nearly the right masses and a dual that nearly holds,
C_ij = |x_i - y_j|^2 / 2. Made feasible they bound the optimum from both sides (rounding of plans: Altschuler, Weed &
Rigollet, NeurIPS 2017), however wrong g is.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from attn_flow.base import checks

# Iterations that tighten the interval; each is two softmins.
TIGHTEN = 40
# (eps, x (B, n, d), y (B, m, d), h (B, m)) -> -eps log sum_j e^{h_j - C_ij/eps} (B, n), mean of y under the weights.
Softmin = Callable[[float, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]


def interval(
    x: Tensor,
    a: Tensor,
    y: Tensor,
    b: Tensor,
    g: Tensor,
    blur: float,
    goal: Tensor,
    softmin: Softmin,
    entries: int,
) -> tuple[Tensor, Tensor]:
    """Proved bounds of W_2^2 (B,) from potentials g (B, m) of y, in float64; points without mass are not there.

    Iterated until all pairs are `goal` (B,) apart, asked after every tenth sweep, or TIGHTEN sweeps. Matrices hold at
    most `entries`.
    Upper: g lowered until no column has too much mass, the rest moved by the product plan.
    Lower: f_i = min_j C_ij - g_j and g_j = min_i C_ij - f_i over all pairs, which is dual feasible.
    """
    eps, log_a, log_b = blur**2, a.log(), b.log()
    norms = ((a * x.square().sum(-1)).sum(-1) + (b * y.square().sum(-1)).sum(-1)) / 2
    upper, lower = torch.full_like(goal, math.inf), torch.zeros_like(goal)
    for step in range(TIGHTEN):
        f = softmin(eps, x, y, log_b + g / eps)[0]
        exact = softmin(eps, y, x, log_a + f / eps)[0]
        if step % 10 == 9 or step == 0:
            lowered = torch.minimum(g, exact)
            soft, mean = softmin(eps, x, y, log_b + lowered / eps)
            rows, columns = a * ((f - soft) / eps).exp(), b * ((lowered - exact) / eps).exp()
            rest_x, rest_y = (a - rows).clamp(min=0), (b - columns).clamp(min=0)
            rest = rest_x.sum(-1)
            product = ((rest_x[..., None] * x).sum(1) * (rest_y[..., None] * y).sum(1)).sum(-1)
            product = torch.where(rest > 0, product / torch.where(rest > 0, rest, 1.0), 0.0)
            upper = torch.minimum(upper, norms - (rows * (x * mean).sum(-1)).sum(-1) - product)
            u = least_reduced(x, y, exact, b > 0, entries)
            lower = torch.maximum(lower, (a * u).sum(-1) + (b * least_reduced(y, x, u, a > 0, entries)).sum(-1))
            if checks.read(((upper - lower) - goal / 2).amax())[0] <= 0:
                break
        g = exact
    return 2 * lower, 2 * upper


def least_reduced(x: Tensor, y: Tensor, g: Tensor, there: Tensor, entries: int) -> Tensor:
    """min_j C_ij - g_j over the points of y that are there, (B, n), lowered by what rounding may have added."""
    offset = torch.where(there, y.square().sum(-1) / 2 - g, math.inf)[:, None, :]
    rows = x.split(max(1, entries // (len(x) * y.shape[1])), dim=1)
    least = torch.cat([torch.baddbmm(offset, some, y.mT, alpha=-1).amin(-1) for some in rows], dim=1)
    size = x.square().sum(-1).amax(-1) + y.square().sum(-1).amax(-1) + torch.where(there, g.abs(), 0.0).amax(-1)
    rounding = 4 * (x.shape[-1] + 2) * torch.finfo(x.dtype).eps * size
    return least + x.square().sum(-1) / 2 - rounding[:, None]
