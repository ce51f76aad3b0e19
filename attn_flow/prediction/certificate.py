"""Limits of the zero-temperature flow where it is not linear: integrate, then certify token by token.

With several heads or biases x' = P_x ( sum_h V_h (G_h x + b_h)/|G_h x + b_h| + c ): every token still moves by itself,
but has no closed form. A small speed proves nothing (a plateau has one); what is accepted is a stable equilibrium.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from attn_flow.attention import Attention
from attn_flow.attention.multihead import attention_alone
from attn_flow.base import checks
from attn_flow.base.words import brief
from attn_flow.dynamics.particles import push_forward
from attn_flow.dynamics.steppers import Adaptive, Step
from attn_flow.measures import Cloud, Measure
from attn_flow.observe.quantities import clusters
from attn_flow.prediction.zero_temperature import integration, known_support

SLOW = 1e-3  # of |V|: tokens faster than this are not yet candidates
NEAR = 0.05  # of the radius: candidates linked by steps of this size share one Newton iteration
REMEDY = "Run flow(attention, x0, t) at a finite beta instead, or give the support that tokens really have."
NEWTON = 6  # iterations from a candidate to the equilibrium; convergence is quadratic
JOINT = 2048  # largest n (d-1) for which interacting tokens are certified together


@dataclass(frozen=True, eq=False, repr=False)
class Settled:
    """Where tokens went at beta = inf, and what is known about it, token by token."""

    x: Tensor  # (..., n, d) the limit where certified, the last position otherwise
    certified: Tensor  # (..., n) bool
    speed: Tensor  # (..., n) |velocity| at the last position the flow reached
    rate: (
        Tensor  # (..., n) -max Re of the velocity's Jacobian along the sphere: > 0 is stable; NaN if never a candidate
    )
    t: float  # how long the flow ran

    def __repr__(self) -> str:
        found = f"{int(self.certified.sum())} of {self.certified.numel()} tokens certified"
        return f"Settled({found}, x={brief(self.x)}, t={self.t:g})"


def settle(
    attention: Attention,
    x0: Tensor,
    support: Measure | str | None = None,
    *,
    horizon: float = 100.0,
    step: Step | Adaptive | None = None,
    h: float = 0.05,
) -> Settled:
    """Run the zero-temperature flow until every token is certified at a stable equilibrium, or t reaches the horizon.

    x0: tokens (..., n, d) of one norm; they are not changed. support: as in `limit`. horizon: the latest time.
    step, h: as in `flow`; chosen by the support if not given.

    The certificate: the Jacobian J of the velocity along the sphere has all eigenvalues in Re < 0, and Newton's
    iteration from the token stays within 10 |v| / rate and ends at a zero of the velocity (which is then the limit
    returned). Computed in float64. With support "tokens" they interact, and J is that of all of them together.
    A continuum of equilibria, a cycle, and a token on a border are not certified. A head of rank one is refused: its
    drift jumps across a hyperplane, where tokens slide and no equilibrium is smooth.

    >>> import torch
    >>> from attn_flow import Attention
    >>> G, V = torch.diag(torch.tensor([3.0, 1.0])).double(), torch.diag(torch.tensor([2.0, 1.0])).double()
    >>> biased = Attention.from_matrices(G, V, query_bias=torch.tensor([0.1, 0.0]).double())
    >>> settled = settle(biased, torch.tensor([[0.6, 0.8], [-0.6, 0.8]]).double())
    >>> settled.x[:, 0].round(decimals=6), settled.certified
    (tensor([ 1., -1.], dtype=torch.float64), tensor([True, True]))
    """
    attention_alone("settle", attention)
    checks.tokens("x0", x0)
    checks.positive("horizon", horizon)
    if math.isinf(horizon):
        raise ValueError("horizon = inf, expected the time after which to give up.")
    known_support(attention, support)
    checks.held("x0", x0)
    if attention.batch_shape():
        raise ValueError(
            f"attention has a batch {tuple(attention.batch_shape())}; expected one, settle each by itself."
        )
    cold = attention.to(torch.float64).with_beta(math.inf)
    support = support if support is None or isinstance(support, str) else support.to(torch.float64)
    shape, interacting = x0.shape[:-1], isinstance(support, str)
    size = float(torch.linalg.matrix_norm(cold.values, 2).sum())
    ranks = None if interacting or isinstance(support, Cloud) else _ranks(cold)
    if ranks is not None and cold.dim > 1 and 1 in ranks:
        raise ValueError(
            f"head {ranks.index(1)} has G of rank 1 in d = {cold.dim}: at beta = inf its drift jumps across the "
            f"hyperplane where G x = 0, and tokens slide along it. {REMEDY}"
        )
    with torch.no_grad():
        x = x0.detach().double().clone()  # written into below
        x = x if interacting else x.flatten(0, -2)
        arguments = integration(cold, x, support)
        if isinstance(arguments["step"], Adaptive):
            arguments["step"] = Adaptive(tol=1e-6)  # the Newton polish, not the path, decides the digits
        arguments |= {"h": h} | ({} if step is None else {"step": step})
        speed, rate = (torch.full_like(x[..., 0], math.nan) for _ in range(2))
        certified = torch.zeros_like(speed, dtype=torch.bool)
        now, span = 0.0, min(5.0, horizon)
        while span > 0 and not bool(certified.all()):
            # Tokens that do not interact leave the integration once they are certified.
            left = torch.ones_like(certified) if interacting else ~certified
            if isinstance(arguments["step"], Adaptive):
                # A smooth drift turns by O(1) in times of 1/|V|: many more steps are a drift that jumps.
                arguments["step"] = replace(arguments["step"], max_steps=int(1000 + 200 * span * size))
            try:
                moved = push_forward(cold, x if interacting else x[left], span, **arguments)
            except (ValueError, FloatingPointError) as error:
                if ranks is None or min(ranks) == cold.dim:
                    raise
                raise ValueError(
                    f"head {ranks.index(min(ranks))} has G of rank {min(ranks)} in d = {cold.dim}, and tokens run into "
                    f"its kernel, where the drift at beta = inf is undefined, before t = {now + span:g}. {REMEDY}"
                ) from error
            found = _certify(cold, moved, arguments)
            for held, part in zip((x, certified, speed, rate), found):
                held[left] = part.reshape(held[left].shape)
            now, span = now + span, min(2 * span, horizon - now - span)
    return Settled(
        x.reshape(x0.shape).to(x0.dtype), certified.reshape(shape), speed.reshape(shape), rate.reshape(shape), now
    )


def _ranks(attention: Attention) -> list[int]:
    """Rank of [G_h, K^T b_h] of every head: 1 where the direction of G x + b has two values only."""
    seen = attention.G.detach()
    if attention.G_bias is not None:
        seen = torch.cat([seen, attention.G_bias.detach()[..., None]], dim=-1)
    return torch.linalg.matrix_rank(seen).flatten().tolist()


def _certify(cold: Attention, x: Tensor, arguments: dict[str, Any]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(x, certified, speed, rate) of tokens the flow has brought to x; x is Newton's limit where certified."""
    geometry, context = arguments["geometry"], arguments.get("context")

    def velocity(x: Tensor) -> Tensor:
        return geometry.tangent(x, cold.drift(x, context))

    size = float(torch.linalg.matrix_norm(cold.values, 2).sum())
    speed = velocity(x).norm(dim=-1)
    rate, certified = torch.full_like(speed, math.nan), torch.zeros_like(speed, dtype=torch.bool)
    if x.shape[-1] == 1:  # the sphere of R is two points, and nobody leaves one
        return x, ~certified, speed, torch.full_like(speed, math.inf)
    if context is None and (x.shape[-2] * (x.shape[-1] - 1) > JOINT or not bool((speed <= SLOW * size).all())):
        return x, certified, speed, rate
    candidate = speed <= SLOW * size
    if not bool(candidate.any()):
        return x, certified, speed, rate
    start, v = (x, speed) if context is None else (x[candidate], speed[candidate])
    if context is None:
        y, found_rate = _newton(velocity, start, geometry, joint=True)
    else:
        # Tokens of one cluster are on their way to one equilibrium: Newton starts from its slowest token only.
        label = clusters(start, NEAR * geometry.radius).labels
        order = v.argsort(descending=True)
        slowest = torch.zeros(int(label.max()) + 1, dtype=torch.long, device=x.device)
        slowest[label[order]] = order
        y, found_rate = _newton(velocity, start[slowest], geometry, joint=False)
        y, found_rate = y[label], found_rate[label]
    close = (y - start).norm(dim=-1) <= 10 * v / found_rate + 1e-12 * geometry.radius
    good = (found_rate > 1e-6 * size) & close & (velocity(y).norm(dim=-1) <= 1e-10 * size)
    y = torch.where(good[..., None], y, start)
    if context is None:
        return y, good, speed, found_rate
    x = x.clone()
    x[candidate], certified[candidate], rate[candidate] = y, good, found_rate
    return x, certified, speed, rate


def _newton(velocity: Callable[[Tensor], Tensor], x: Tensor, geometry: Any, joint: bool) -> tuple[Tensor, Tensor]:
    """Newton's iteration for velocity = 0 on the sphere, and -max Re of the Jacobian's spectrum where it ends."""
    for last in range(NEWTON):
        along = tangent_basis(x)  # (..., n, d, d-1)
        J = _jacobian(velocity, x, along, joint)
        if last == NEWTON - 1:
            break
        v = (along.mT @ velocity(x)[..., None])[..., 0]
        flat = v.flatten(-2) if joint else v
        # Least squares: at a continuum of equilibria J is singular, and the token is refused below by its rate.
        step = torch.linalg.lstsq(J, flat[..., None], driver="gelsd").solution[..., 0].reshape(v.shape)
        x = geometry.retract(x - (along @ step[..., None])[..., 0])
    rate = -torch.linalg.eigvals(J).real.amax(-1)
    return x, (rate[..., None].expand(x.shape[:-1]) if joint else rate)


def tangent_basis(x: Tensor) -> Tensor:
    """An orthonormal basis of x^perp for every token, (..., n, d, d-1): a Householder reflection of the axes."""
    u = x / x.norm(dim=-1, keepdim=True)
    w = torch.cat([u[..., :1] + torch.where(u[..., :1] < 0, -1.0, 1.0), u[..., 1:]], dim=-1)
    eye = torch.eye(x.shape[-1], dtype=x.dtype, device=x.device)
    reflection = eye - 2 * w[..., :, None] * w[..., None, :] / w.square().sum(-1)[..., None, None]
    return reflection[..., 1:]


def _jacobian(velocity: Callable[[Tensor], Tensor], x: Tensor, along: Tensor, joint: bool) -> Tensor:
    """d velocity / dx along the sphere: (..., n, d-1, d-1) token by token, (..., n(d-1), n(d-1)) of all together."""
    with torch.enable_grad():
        y = x.clone().requires_grad_()
        v = (along.mT @ velocity(y)[..., None])[..., 0]  # (..., n, d-1)
        # Tokens that do not interact have block-diagonal Jacobians: one backward pass serves all of them.
        outputs = list(v.flatten(-2).unbind(-1)) if joint else list(v.unbind(-1))
        rows = [torch.autograd.grad(out.sum(), y, retain_graph=True)[0] for out in outputs]
    if joint:
        return torch.einsum("...rnd,...ndk->...rnk", torch.stack(rows, dim=-3), along).flatten(-2)
    return torch.stack(rows, dim=-2) @ along
