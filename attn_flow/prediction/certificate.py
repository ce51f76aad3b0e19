"""Limits of zero-temperature flows that are not linear: integrate, then certify token by token.

With several heads or biases every token still moves by itself, but has no closed form. A small speed proves nothing,
since tokens may rest on a plateau for a long time. What is accepted as a limit is a stable equilibrium.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from attn_flow.attention import Attention
from attn_flow.base import checks
from attn_flow.dynamics.steppers import Adaptive
from attn_flow.geometry import Sphere
from attn_flow.measures import Cloud, Measure, UniformSphere
from attn_flow.prediction.zero_temperature import check_support, integrate

NEWTON_STEPS = 5  # convergence is quadratic
REMEDY = "Run flow(attention, x0, t) at a finite beta instead, or give the support that tokens have."
Velocity = Callable[[Tensor], Tensor]


def settle(
    attention: Attention, x0: Tensor, support: Measure | None = None, *, horizon: float = 100.0
) -> tuple[Tensor, Tensor]:
    """Run the zero-temperature flow until every token is certified at a stable equilibrium, or up to the horizon.

    A token is certified if Newton's iteration stays within 10 speed/rate of it and ends at a zero of the velocity,
    where the Jacobian along the sphere has only eigenvalues with negative real part. This zero is its limit. A
    continuum of equilibria, a cycle, and a token between two limits are not certified. Heads whose drift jumps, because
    G has rank one or tokens run into its kernel, are refused.

    Args:
        attention: one `Attention`, without a batch.
        x0: tokens (..., n, d) of one norm.
        support: as in `limit`.
        horizon: the latest time.

    Returns:
        The tokens (..., n, d) at their limits, or at their last positions, and whether each is certified (..., n).

    Example:
        >>> from attn_flow import Attention
        >>> G, V = torch.diag(torch.tensor([3.0, 1.0])).double(), torch.diag(torch.tensor([2.0, 1.0])).double()
        >>> biased = Attention.from_matrices(G, V, query_bias=torch.tensor([0.1, 0.0]).double())
        >>> x, certified = settle(biased, torch.tensor([[0.6, 0.8], [-0.6, 0.8]]).double())
        >>> x[:, 0].round(decimals=6), certified
        (tensor([ 1., -1.], dtype=torch.float64), tensor([True, True]))
    """
    check_support(attention, support)
    checks.require_tokens("x0", x0)
    checks.require_positive(horizon=horizon)
    cold = attention.to(torch.float64).with_beta(math.inf)
    context = UniformSphere(cold.dim) if support is None else support.to(torch.float64)
    ranks = torch.linalg.matrix_rank(_with_bias(cold))
    if not isinstance(context, Cloud) and cold.dim > 1 and bool((ranks == 1).any()):
        raise ValueError(f"a head has G of rank 1: at beta = inf its drift jumps where G x = 0. {REMEDY}")
    x = x0.detach().double().flatten(0, -2)
    geometry, size = Sphere(float(x.norm(dim=-1).mean())), float(torch.linalg.matrix_norm(cold.OV, 2).sum())
    velocity = lambda x: geometry.tangent(x, cold.drift(x, context))
    now, span, certified = 0.0, min(5.0, horizon), torch.zeros(len(x), dtype=torch.bool)
    with torch.no_grad():
        while span > 0 and not bool(certified.all()):
            # Newton's iteration decides the digits. A smooth drift turns by O(1) in times of 1/|V|: many more steps
            # mean that it jumps.
            step = Adaptive(tol=1e-6, max_steps=int(1000 + 200 * span * size))
            try:
                x = integrate(cold, x, [0.0, span], context, step).x[-1]
            except (ValueError, FloatingPointError) as error:
                if bool((ranks == cold.dim).all()):
                    raise
                reason = f"tokens run into the kernel of a head's G before t = {now + span:g}"
                raise ValueError(f"{reason}, where the drift at beta = inf is undefined. {REMEDY}") from error
            speed = velocity(x).norm(dim=-1)
            y, rate = _newton(velocity, x, geometry, size)
            is_close = (y - x).norm(dim=-1) <= 10 * speed / rate + 1e-12 * geometry.radius
            certified = (rate > 1e-6 * size) & is_close & (velocity(y).norm(dim=-1) <= 1e-10 * size)
            now, span = now + span, min(2 * span, horizon - now - span)
    end = torch.where(certified[:, None], y, x).reshape(x0.shape).to(x0.dtype)
    return end, certified.reshape(x0.shape[:-1])


def _with_bias(attention: Attention) -> Tensor:
    """[G_h, K^T b_h] of every head: of rank 1 if the direction of G x + b has two values only."""
    if attention.G_bias is None:
        return attention.G.detach()
    return torch.cat([attention.G.detach(), attention.G_bias.detach()[..., None]], dim=-1)


def _newton(velocity: Velocity, x: Tensor, geometry: Sphere, size: float) -> tuple[Tensor, Tensor]:
    """Newton's iteration for velocity = 0 on the sphere, from tokens (n, d), and the rate of attraction at its end."""
    for _ in range(NEWTON_STEPS):
        # Least squares: the Jacobian is singular at a continuum of equilibria, which are refused by their rate.
        step = torch.linalg.lstsq(_jacobian(velocity, x, size), velocity(x)[..., None], driver="gelsd").solution
        x = geometry.retract(x - step[..., 0])
    return x, -torch.linalg.eigvals(_jacobian(velocity, x, size)).real.amax(-1)


def _jacobian(velocity: Velocity, x: Tensor, size: float) -> Tensor:
    """The Jacobian of the velocity along the sphere for every token, (n, d, d), strongly attracting across it."""
    with torch.enable_grad():
        y = x.clone().requires_grad_()
        # Tokens do not interact, so that one backward pass serves all of them.
        rows = [torch.autograd.grad(out.sum(), y, retain_graph=True)[0] for out in velocity(y).unbind(-1)]
    across = x[:, :, None] * x[:, None, :] / x.square().sum(-1)[:, None, None]
    along = torch.eye(x.shape[-1]).to(x) - across
    return along @ torch.stack(rows, dim=-2) @ along - 1e3 * size * across
