"""Limits of zero-temperature flows that are not linear: integrate, then certify token by token.

With several heads or biases every token still moves by itself, but has no closed form. A small speed proves nothing,
since tokens may rest on a plateau for a long time. What is accepted as a limit is a stable equilibrium.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from attn_flow.attention import Attention
from attn_flow.base import checks
from attn_flow.dynamics.steppers import Adaptive, rk4
from attn_flow.geometry import Sphere
from attn_flow.measures import Cloud
from attn_flow.prediction.zero_temperature import Support, check_support, context_of, elements, integrate

CANDIDATE_SPEED = 1e-3  # times |V|: faster tokens are not yet examined
NEWTON_STEPS = 5  # convergence is quadratic
REMEDY = "Run flow(attention, x0, t) at a finite beta instead, or give the support that tokens have."

Velocity = Callable[[Tensor], Tensor]


@dataclass(frozen=True, eq=False, repr=False)
class Settled:
    """Where tokens went at beta = infinity, and what is known about it, token by token.

    Attributes:
        x: (..., n, d), the limit where certified, the last position otherwise.
        certified: (..., n), whether the limit is established.
        speed: (..., n), the speed at the last position that the flow reached.
        rate: (..., n), the rate of attraction, minus the largest real part of the velocity's Jacobian along the sphere;
            NaN for tokens that were never slow enough to be examined.
        t: the time for which the flow ran.
    """

    x: Tensor
    certified: Tensor
    speed: Tensor
    rate: Tensor
    t: float

    def __repr__(self) -> str:
        count = f"{int(self.certified.sum())} of {self.certified.numel()} tokens certified"
        return f"Settled({count}, x {tuple(self.x.shape)}, t={self.t:g})"


def settle(attention: Attention, x0: Tensor, support: Support = None, *, horizon: float = 100.0) -> Settled:
    """Run the zero-temperature flow until every token is certified at a stable equilibrium, or up to the horizon.

    A token is certified if the Jacobian of the velocity along the sphere has only eigenvalues with negative real part
    and Newton's iteration from the token stays within 10 speed/rate and ends at a zero of the velocity, which is then
    returned. A continuum of equilibria, a cycle, a token between two limits, and tokens that attend to each other
    (support "tokens") are not certified. A head of rank one is refused: its drift jumps across a hyperplane.

    Args:
        attention: one `Attention`, without a batch.
        x0: tokens (..., n, d) of one norm.
        support: as in `limit`.
        horizon: the latest time.

    Returns:
        `Settled`, in the dtype of the tokens; the computation is in float64.

    Example:
        >>> from attn_flow import Attention
        >>> G, V = torch.diag(torch.tensor([3.0, 1.0])).double(), torch.diag(torch.tensor([2.0, 1.0])).double()
        >>> biased = Attention.from_matrices(G, V, query_bias=torch.tensor([0.1, 0.0]).double())
        >>> settled = settle(biased, torch.tensor([[0.6, 0.8], [-0.6, 0.8]]).double())
        >>> settled.x[:, 0].round(decimals=6), settled.certified
        (tensor([ 1., -1.], dtype=torch.float64), tensor([True, True]))
    """
    check_support(attention, support)
    checks.require_tokens("x0", x0)
    checks.require_positive(horizon=horizon)
    if shape := elements(attention)[0]:
        raise ValueError(f"attention has a batch {tuple(shape)}; expected one, settle each by itself.")
    cold = attention.to(torch.float64).with_beta(math.inf)
    support = support if support is None or isinstance(support, str) else support.to(torch.float64)
    interacting, jumps = isinstance(support, str), isinstance(support, (str, Cloud))
    size = float(torch.linalg.matrix_norm(cold.OV, 2).sum())
    ranks = [cold.dim] if jumps else _ranks(cold)
    if cold.dim > 1 and 1 in ranks:
        raise ValueError(
            f"head {ranks.index(1)} has G of rank 1 in d = {cold.dim}: at beta = inf its drift jumps across the "
            f"hyperplane where G x = 0, and tokens slide along it. {REMEDY}"
        )
    with torch.no_grad():
        x = x0.detach().double().clone()
        x = x if interacting else x.flatten(0, -2)
        geometry, context = Sphere(float(x.norm(dim=-1).mean())), context_of(cold, support)
        velocity = lambda x: geometry.tangent(x, cold.drift(x, context))
        speed, rate = torch.full_like(x[..., 0], math.nan), torch.full_like(x[..., 0], math.nan)
        certified = torch.zeros_like(speed, dtype=torch.bool)
        now, span = 0.0, min(5.0, horizon)
        while span > 0 and not bool(certified.all()):
            is_left = torch.ones_like(certified) if interacting else ~certified
            # Newton's iteration decides the digits. A smooth drift turns by O(1) in times of 1/|V|: many more steps
            # mean that it jumps.
            step = rk4 if jumps else Adaptive(tol=1e-6, max_steps=int(1000 + 200 * span * size))
            try:
                moved = integrate(cold, Cloud(x if interacting else x[is_left]), [0.0, span], support, step).x[-1]
            except (ValueError, FloatingPointError) as error:
                if min(ranks) == cold.dim:
                    raise
                raise ValueError(
                    f"head {ranks.index(min(ranks))} has G of rank {min(ranks)} in d = {cold.dim}, and tokens run into "
                    f"its kernel, where the drift at beta = inf is undefined, before t = {now + span:g}. {REMEDY}"
                ) from error
            if interacting:
                x, speed = moved, velocity(moved).norm(dim=-1)
            else:
                parts = _certify(velocity, moved, geometry, size)
                x[is_left], certified[is_left], speed[is_left], rate[is_left] = parts
            now, span = now + span, min(2 * span, horizon - now - span)
    certified, speed, rate = (z.reshape(x0.shape[:-1]) for z in (certified, speed, rate))
    return Settled(x.reshape(x0.shape).to(x0.dtype), certified, speed, rate, now)


def _ranks(attention: Attention) -> list[int]:
    """The rank of [G_h, K^T b_h] of every head: 1 if the direction of G x + b has two values only."""
    matrices = attention.G.detach()
    if attention.G_bias is not None:
        matrices = torch.cat([matrices, attention.G_bias.detach()[..., None]], dim=-1)
    return torch.linalg.matrix_rank(matrices).flatten().tolist()


def _certify(velocity: Velocity, x: Tensor, geometry: Sphere, size: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(x, certified, speed, rate) of tokens (n, d) that the flow brought to x; x is Newton's limit where certified."""
    speed = velocity(x).norm(dim=-1)
    rate, certified = torch.full_like(speed, math.nan), torch.zeros_like(speed, dtype=torch.bool)
    is_slow = speed <= CANDIDATE_SPEED * size
    if x.shape[-1] == 1:  # the sphere of R is two points, and nothing moves
        return x, ~certified, speed, torch.full_like(speed, math.inf)
    if not bool(is_slow.any()):
        return x, certified, speed, rate
    start, v = x[is_slow], speed[is_slow]
    y, rates = _newton(velocity, start, geometry)
    is_close = (y - start).norm(dim=-1) <= 10 * v / rates + 1e-12 * geometry.radius
    good = (rates > 1e-6 * size) & is_close & (velocity(y).norm(dim=-1) <= 1e-10 * size)
    x = x.clone()
    x[is_slow], certified[is_slow], rate[is_slow] = torch.where(good[:, None], y, start), good, rates
    return x, certified, speed, rate


def _newton(velocity: Velocity, x: Tensor, geometry: Sphere) -> tuple[Tensor, Tensor]:
    """Newton's iteration for velocity = 0 on the sphere, from tokens (n, d), and the rate of attraction at its end."""
    for _ in range(NEWTON_STEPS):
        basis = _tangent_basis(x)  # (n, d, d-1)
        v = basis.mT @ velocity(x)[..., None]
        # Least squares: the Jacobian is singular at a continuum of equilibria, which are refused by their rate.
        step = torch.linalg.lstsq(_jacobian(velocity, x, basis), v, driver="gelsd").solution
        x = geometry.retract(x - (basis @ step)[..., 0])
    return x, -torch.linalg.eigvals(_jacobian(velocity, x, _tangent_basis(x))).real.amax(-1)


def _tangent_basis(x: Tensor) -> Tensor:
    """An orthonormal basis of x^perp for every token, (n, d, d-1), by a Householder reflection."""
    u = x / x.norm(dim=-1, keepdim=True)
    w = torch.cat([u[..., :1] + torch.where(u[..., :1] < 0, -1.0, 1.0), u[..., 1:]], dim=-1)
    identity = torch.eye(x.shape[-1], dtype=x.dtype, device=x.device)
    return (identity - 2 * w[..., :, None] * w[..., None, :] / w.square().sum(-1)[..., None, None])[..., 1:]


def _jacobian(velocity: Velocity, x: Tensor, basis: Tensor) -> Tensor:
    """The Jacobian of the velocity along the sphere for every token, (n, d-1, d-1)."""
    with torch.enable_grad():
        y = x.clone().requires_grad_()
        v = (basis.mT @ velocity(y)[..., None])[..., 0]  # (n, d-1)
        # Tokens do not interact, so that one backward pass serves all of them.
        rows = [torch.autograd.grad(out.sum(), y, retain_graph=True)[0] for out in v.unbind(-1)]
    return torch.stack(rows, dim=-2) @ basis
