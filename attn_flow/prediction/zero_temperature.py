"""The flow at beta = inf, where every token moves by itself: exact where it is linear, integrated otherwise.

Full support and one head: x' = P_x V G x / |G x|, solved by x(t) = e^{tau M} x_0 / |e^{tau M} x_0| with M = V G and
the time change tau' = 1/|G x| (THEORY 1). A centred ellipsoid {y^T S^{-1} y <= rho^2} as support gives
x' = P_x rho V S G x / |S^{1/2} G x|: the same with M = V S G. In both the drift is W u, u = N x / |N x|, M = W N.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from attn_flow.attention import Attention
from attn_flow.attention.multihead import attention_alone
from attn_flow.averages import dense
from attn_flow.base import checks
from attn_flow.dynamics.particles import flow
from attn_flow.dynamics.steppers import Adaptive, Step, rk4
from attn_flow.dynamics.trajectory import Trajectory
from attn_flow.geometry import Euclidean, Sphere, placed
from attn_flow.measures import Cloud, EllipsoidSupport, Gaussian, Measure, UniformSphere

PANELS = 100_000  # of the time change; each spans 1/(2 |M|) in tau
ORDER = 16  # Taylor terms in a panel: (1/2)^16/16! is below rounding
NODES = 16  # Gauss-Legendre nodes in a panel: exact to rounding, since |N x|/|x| is analytic within .34/|M| of it


def linear_part(
    attention: Attention, support: Measure | None = None, tol: float = 1e-6
) -> tuple[Tensor, Tensor] | None:
    """(W, N), float64, with drift W N x / |N x| at beta = inf; None where it is no such map: several heads, biases
    or a support that is no centred ellipsoid."""
    if attention.Q.ndim > 3 or attention.values.ndim > 3:
        raise ValueError(
            f"attention has batched weights (Q of shape {tuple(attention.Q.shape)}), expected (heads, k, d); "
            "predict one attention at a time."
        )
    biases = (attention.G_bias, attention.value_bias)
    if attention.heads > 1 or any(b is not None and bool((b != 0).any()) for b in biases):
        return None
    G, V = attention.to(torch.float64).G[0].detach(), attention.to(torch.float64).values[0].detach()
    if support is None:
        return V, G
    if isinstance(support, UniformSphere):
        return support.radius * V, G
    if isinstance(support, (EllipsoidSupport, Gaussian)):
        rho = support.rho if isinstance(support, EllipsoidSupport) else support.cap
        if math.isinf(rho):
            raise ValueError("a Gaussian without cap has no support at beta = inf; use Gaussian.bulk(..., n) or a cap.")
        mean, S = support.mean.double(), support.cov.double()
        if mean.ndim > 1:
            raise ValueError(f"support has batched moments {tuple(mean.shape)}, expected (d,); predict one at a time.")
        spread, axes = torch.linalg.eigh(S)
        if float(mean.norm()) > tol * rho * float(spread[-1].clamp(min=0).sqrt()):
            return None
        root = axes * spread.clamp(min=0).sqrt() @ axes.mT  # clamp: a covariance has no negative eigenvalue
        return rho * V @ root, root @ G
    return None


def zero_temperature_flow(
    attention: Attention,
    x0: Tensor,
    t: float | Sequence[float] | Tensor,
    support: Measure | str | None = None,
    *,
    weights: Tensor | None = None,
    mask: Tensor | None = None,
    step: Step | Adaptive | None = None,
    h: float = 0.05,
) -> Trajectory:
    """The flow on the sphere at beta = inf, where every token moves by itself.

    attention: its beta is not used. x0: tokens (..., n, d) at time t[0]; they keep their norms.
    t: increasing times, or a number T > 0 for 101 times from 0 to T.
    support: what tokens attend to. None: the full sphere; a measure with a tilted mean at beta = inf (an ellipsoid,
        a mixture, a frozen Cloud); "tokens": the moving cloud itself (hardmax).
    weights, mask: (..., n), kept in the path; they matter to the motion with support "tokens" only.
    step, h: integrate by `flow` with this step; without, the solution is exact where it is linear (`linear_part`)
        and integrated otherwise.
    Returns a Trajectory, differentiable in x0 and the weights where it is exact.

    >>> import torch
    >>> from attn_flow import Attention
    >>> attention = Attention.from_matrices(torch.eye(2), torch.diag(torch.tensor([2.0, 1.0])))
    >>> path = zero_temperature_flow(attention, torch.tensor([[0.6, 0.8]]), [0.0, 1.0])
    >>> path.x[1, 0, 1] / path.x[1, 0, 0]  # the tangent falls by e^{-t}: 4/3 e^{-1}
    tensor(0.4905)
    """
    attention_alone("zero_temperature_flow", attention)
    known_support(attention, support)
    checks.floating("x0", x0, "(..., n, d)")
    checks.held("x0", x0)
    checks.precise("x0", x0)
    if x0.ndim > 1:
        checks.width("x0", x0, attention.dim)
    checks.positive("h", h)
    try:
        times = torch.as_tensor(t, dtype=torch.float64).detach().cpu()
    except (TypeError, ValueError, RuntimeError):
        raise ValueError(f"t is a {type(t).__name__}, expected a time or times.") from None
    if times.ndim == 0:
        if not 0 < float(times) < math.inf:
            raise ValueError(f"t = {float(times)}, expected a positive, finite time.")
        times = torch.linspace(0, float(times), 101, dtype=torch.float64)
    checks.times(times)
    linear = None if isinstance(support, str) else linear_part(attention, support)
    if linear is None or step is not None:
        arguments = integration(attention, x0, support, mask) | ({} if step is None else {"step": step})
        cold = attention.with_beta(math.inf)
        if support == "tokens":
            return flow(cold, x0, times, h=h, weights=weights, mask=mask, **arguments)
        path = flow(cold, filled(x0, mask), times, h=h, **arguments)
        return replace(path, weights=weights, mask=mask)
    x0 = filled(x0, mask)
    W, N = (A.to(x0) for A in linear)
    checks.in_range("the product V G", W @ N)
    about = {"attention": attention.with_beta(math.inf).summary(), "geometry": "Sphere", "step": "exact time change"}
    return Trajectory(times, linear_flow(W, N, x0, times - times[0]), weights, mask, about)


def filled(x: Tensor, mask: Tensor | None) -> Tensor:
    """The tokens x (..., n, d), padding put where it has some direction; it has no mass."""
    if mask is not None:
        checks.token_mask(mask, x)
    x = placed("x0", x, mask, Euclidean())
    checks.tokens("x0", x)
    return x


def known_support(attention: Attention, support: Measure | str | None) -> None:
    """Refuse what is no support, or one of another dimension."""
    words = "expected None (the full sphere), a measure, or 'tokens' (the moving cloud itself)"
    if isinstance(support, str) and support != "tokens":
        raise ValueError(f"support = {support!r}, {words}.")
    if not (support is None or isinstance(support, str) or hasattr(support, "tilted_mean")):
        raise ValueError(f"support is a {type(support).__name__}, {words}.")
    widths: dict[type, Callable[[Any], int]] = {
        UniformSphere: lambda mu: mu.d,
        Cloud: lambda mu: mu.x.shape[-1],
        Gaussian: lambda mu: mu.mean.shape[-1],
        EllipsoidSupport: lambda mu: mu.mean.shape[-1],
    }
    if type(support) in widths and (d := widths[type(support)](support)) != attention.dim:
        raise ValueError(f"support has dimension {d}, expected d = {attention.dim} to match the attention.")


def integration(
    attention: Attention, x0: Tensor, support: Measure | str | None, mask: Tensor | None = None
) -> dict[str, Any]:
    """Arguments of `flow` for the zero-temperature flow on the sphere through the tokens x0."""
    known_support(attention, support)
    radius = dense.lengths(filled(x0, mask).detach())
    if float(radius.max() - radius.min()) > 1e-4 * float(radius.max()):
        raise ValueError(
            f"tokens have norms from {float(radius.min()):.4g} to {float(radius.max()):.4g}, expected one sphere; "
            "normalise them first."
        )
    found: dict[str, Any] = {"geometry": Sphere(float(radius.double().mean()))}
    if support != "tokens":
        found["context"] = UniformSphere(attention.dim) if support is None else support
    # A hardmax over points jumps: an error control would only shrink its steps at every jump.
    found["step"] = rk4 if support == "tokens" or isinstance(support, Cloud) else Adaptive(tol=1e-9)
    return found


def linear_flow(W: Tensor, N: Tensor, x0: Tensor, t: Tensor) -> Tensor:
    """x(t) of x' = P_x W N x / |N x| for every token of x0 (..., n, d) and time of t (T,): (T, ..., n, d), exact.

    t(tau) = int_0^tau |N e^{sM} x_0| / |e^{sM} x_0| ds is accumulated over panels of tau in which e^{sM} is a short
    Taylor series, and inverted in the panel that holds t by Newton's method on its Legendre expansion. e^{tau M} is
    never formed, so nothing overflows; M is shifted by tr(M)/d, which moves no direction.
    Tokens keep their norm r, and move as on the unit sphere in time t/r. Differentiable in x0, W and N.
    A token that has come to a leading eigenvector of M, to rounding, rests there and takes no further panels.
    """
    M, d = W @ N, W.shape[-1]
    eye = torch.eye(d, dtype=W.dtype, device=W.device)
    shift = torch.trace(M).detach() / d
    A = M - shift * eye
    size = max(float(torch.linalg.matrix_norm(B.detach(), 2)) for B in (A, N @ W - shift * eye))
    eps = torch.finfo(W.dtype).eps
    radius = x0.norm(dim=-1, keepdim=True)
    radius = torch.where((radius > 0) & (radius < math.inf), radius, dense.lengths(x0)[..., None])
    x = (x0 / radius).reshape(-1, d)
    if checks.can_look(x) and not bool(((x @ N.mT).norm(dim=-1) > 0).all()):
        raise ValueError("a token lies in ker G, where the zero-temperature drift G x/|G x| is undefined; remove it.")
    target = t.to(x)[:, None] / radius.reshape(1, -1)  # (T, tokens)
    if bool((target < 0).any()):
        raise ValueError(f"t reaches {float(t.min()):.3g}, expected nonnegative times.")
    if size == 0:  # M = c I: every direction is stationary
        return x0.expand(t.shape[0], *x0.shape)
    h = 0.5 / size
    reach = float(torch.linalg.matrix_norm(N.detach(), 2))  # of dt/dtau, so that tau is at least t / |N|
    if checks.can_look(target) and (least := float(target.detach().max()) / (reach * h)) > PANELS:
        raise ValueError(
            f"t = {float(t.max()):.3g} takes at least {least:.2g} panels of the time change, more than {PANELS}: "
            "tokens turn or rest long before. Ask for a shorter time; LimitMap.push_forward(x) is the limit itself."
        )
    leading = float(torch.linalg.eigvals(A.detach()).real.amax()) - math.sqrt(eps) * size
    z, w, legendre = _gauss_legendre(x)
    powers = ((z + 1) / 2)[:, None] ** torch.arange(ORDER + 1, dtype=x.dtype, device=x.device)
    found: list[tuple[Tensor, Tensor]] = []
    token, clock = torch.arange(x.shape[0], device=x.device), torch.zeros_like(x[:, 0])
    for _ in range(PANELS):
        terms = [x]
        for k in range(1, ORDER + 1):
            terms.append(terms[-1] @ A.mT * (h / k))
        series = torch.stack(terms)  # (ORDER + 1, tokens, d)
        inside = torch.tensordot(powers, series, 1)  # (NODES, tokens, d)
        speed = (inside @ N.mT).norm(dim=-1) / inside.norm(dim=-1)  # dt/dtau
        arrival = clock + h / 2 * (w @ speed)
        here = (target[:, token] >= clock) & (target[:, token] < arrival)  # (T, tokens)
        if bool(here.any()):
            when, who = here.nonzero(as_tuple=True)
            s = _invert(speed[:, who].mT @ legendre, 2 / h * (target[when, token[who]] - clock[who]))
            point = sum(s[:, None] ** k * series[k, who] for k in range(1, ORDER + 1)) + series[0, who]
            found.append((when * target.shape[1] + token[who], point / point.norm(dim=-1, keepdim=True)))
        left = arrival <= target[:, token].amax(0)
        if not bool(left.any()):
            break
        moving = speed[-1] > 4 * eps * reach
        if not bool(moving[left].any()):
            raise ValueError(
                f"{int(left.sum())} tokens run into ker G before t = {float(t.max()):.3g}, where the drift is "
                f"undefined: they are there at t = {float((clock * radius.reshape(-1)[token])[left].max()):.4g}. "
                "Ask for a shorter time."
            )
        growth = (x * terms[1]).sum(-1, keepdim=True)  # h <x, A x>
        turn = (terms[1] - growth * x).norm(dim=-1) / h
        rests = left & moving & (turn <= 8 * eps * size) & (growth[:, 0] / h > leading)
        if bool(rests.any()):
            when, who = ((target[:, token] >= arrival) & rests).nonzero(as_tuple=True)
            found.append((when * target.shape[1] + token[who], x[who]))
            left = left & ~rests
            if not bool(left.any()):
                break
        end = series.sum(0)[left]
        x, clock, token = end / end.norm(dim=-1, keepdim=True), arrival[left], token[left]
    else:
        raise ValueError(
            f"{int(left.sum())} tokens did not reach t = {float(t.max()):.3g} in {PANELS} panels of the time change: "
            "they run into ker G, or G is so ill-conditioned that |G x| is tiny where they go. Ask for a shorter time."
        )
    place, points = torch.cat([f[0] for f in found]), torch.cat([f[1] for f in found])
    path = torch.zeros(target.numel(), d, dtype=x.dtype, device=x.device).index_copy(0, place, points)
    return path.reshape(t.shape[0], *x0.shape) * radius


def _gauss_legendre(like: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Nodes z, weights w on [-1, 1], and the matrix from values at z to Legendre coefficients a_l."""
    z, w = np.polynomial.legendre.leggauss(NODES)
    degree = np.arange(NODES)
    to_coefficients = (w[:, None] * np.polynomial.legendre.legvander(z, NODES - 1)) * (2 * degree + 1) / 2
    z_, w_, matrix = (torch.as_tensor(a, dtype=like.dtype, device=like.device) for a in (z, w, to_coefficients))
    return z_, w_, matrix


def _legendre(z: Tensor) -> Tensor:
    """P_0(z), ..., P_NODES(z), (..., NODES + 1)."""
    P = [torch.ones_like(z), z]
    for l in range(1, NODES):
        P.append(((2 * l + 1) * z * P[-1] - l * P[-2]) / (l + 1))
    return torch.stack(P, dim=-1)


def _invert(a: Tensor, target: Tensor) -> Tensor:
    """s = (z+1)/2 with int_{-1}^z sum_l a_l P_l = target, from int P_l = (P_{l+1} - P_{l-1})/(2l+1)."""
    odd = 2 * torch.arange(1, NODES, dtype=a.dtype, device=a.device) + 1

    def newton(z: Tensor, a: Tensor, target: Tensor) -> Tensor:
        P = _legendre(z)
        integral = a[:, 0] * (z + 1) + (a[:, 1:] * (P[:, 2:] - P[:, :-2]) / odd).sum(-1)
        return z - (integral - target) / (a * P[:, :-1]).sum(-1)

    with torch.no_grad():
        z = target / a[:, 0] - 1
        for _ in range(6):
            # The integrand varies by at most e over a panel; Newton stays inside but for rounding at the ends.
            z = newton(z, a, target).clamp(-1, 1)
    return (newton(z, a, target) + 1) / 2  # one more step carries the gradient of the implicit function
