"""The sliced distance: the p-th mean of W_p over random directions, which is another distance than W_p."""

from __future__ import annotations

import torch
from torch import Tensor

from attn_flow.transport.coupling import Ground
from attn_flow.transport.plans import plan_cost, plan_of


def sliced_distance(
    x: Tensor,
    a: Tensor,
    y: Tensor,
    b: Tensor,
    ground: Ground,
    n_projections: int,
    generator: torch.Generator | None,
) -> tuple[Tensor, float]:
    """(mean over directions theta of W_p(<theta, x>, <theta, y>)^p)^{1/p} and its Monte Carlo standard error."""
    if ground.cost != "euclidean":
        raise ValueError("method 'sliced' projects on lines, so it needs cost='euclidean'.")
    device = "cpu" if generator is None else generator.device
    theta = torch.randn(n_projections, x.shape[1], generator=generator, dtype=x.dtype, device=device).to(x.device)
    theta = theta / theta.norm(dim=-1, keepdim=True)
    top = torch.cat([x, y]).detach().abs().max()
    if top == 0:
        return (x.sum() + y.sum()) * 0.0, 0.0
    costs = []
    for direction in theta:
        s, t = (x / top) @ direction, (y / top) @ direction
        plan = plan_of(s[:, None], a, t[:, None], b, ground, "line")
        costs.append(plan_cost(s[:, None], a, t[:, None], b, ground, plan) ** ground.p)
    cost = torch.stack(costs)
    mean = cost.mean()
    if mean == 0:
        return mean * top, 0.0
    error = float(cost.detach().std() / n_projections**0.5 * mean.detach() ** (1 / ground.p - 1) / ground.p * top)
    return top * mean ** (1 / ground.p), error
