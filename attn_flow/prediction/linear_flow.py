"""The exact flow of x' = P_x W N x / |N x|: a matrix exponential and a scalar clock for every token.

x(t) = y/|y| with y = e^{tau M} x_0, M = W N, and t(tau) = int |N x| d tau. Every token advances by panels of tau of
length h_0 2^level, as long as Legendre series resolve its direction x and its speed dt/dtau = |N x| in them. The series
of the speed tells when the token meets a given time, that of the direction where it is then. The exponentials of a
panel come from those of half its length by squaring, so that the cost grows with the turns of a token and with log |M|
at most.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from attn_flow.base.checks import can_read
from attn_flow.prediction.spectrum import spectrum

NODES = 24  # Gauss-Legendre nodes of a panel, and terms of its series
MAX_LEVEL = 40  # a panel of h_0 2^40 multiplies rounding errors of the eigenvalues of M by 10^12
MAX_PANELS = 20_000  # of one token
RESOLVED = 1e-12  # relative size of the last Legendre coefficients of a panel that is short enough


def linear_flow(W: Tensor, N: Tensor, x0: Tensor, t: Tensor) -> Tensor:
    """The positions at increasing times t >= 0, (T,), of tokens x0 (..., n, d) at time 0, as (T, ..., n, d).

    Tokens keep their norm r, and move as on the unit sphere in time t/r. Computed in float64; differentiable in x0, W
    and N. A time that takes too many turns, and a token that runs into ker N, raise ValueError.
    """
    W, N, t, x = W.double(), N.double(), t.to(W.device, torch.float64), x0.double().reshape(-1, W.shape[-1])
    leading, identity = spectrum((W @ N).detach()), torch.eye(len(W)).to(W)
    A, B = W @ N - leading.leading * identity, N @ W - leading.leading * identity
    # Both |y| and |N y| are smooth over h_0 = 1/(2 size), because N e^{tau W N} = e^{tau N W} N.
    size, max_speed = max(_norm(A), _norm(B)), _norm(N)
    if size == 0:  # M = c I
        return x0.expand(len(t), *x0.shape)
    radius, end_time, h0 = x.norm(dim=-1), float(t[-1]), 0.5 / size
    y = x / radius[:, None]
    if can_read(y) and not bool(((y @ N.mT).norm(dim=-1) > 0).all()):
        raise ValueError("a token lies in ker G, where the zero-temperature drift G x/|G x| is undefined; remove it.")
    turns = end_time / float(radius.detach().min()) / max_speed * min(leading.frequencies, default=0.0) / (2 * math.pi)
    if turns > 4 * MAX_PANELS:  # a panel resolves less than four turns
        raise ValueError(f"tokens turn {turns:.2g} times before t = {end_time:.3g}; ask for a shorter time.")

    z, w = np.polynomial.legendre.leggauss(NODES)
    values_to_series = w * np.polynomial.legendre.legvander(z, NODES - 1).T * (np.arange(NODES) + 0.5)[:, None]
    to_series = torch.as_tensor(values_to_series).to(W)
    nodes = torch.as_tensor(np.append((z + 1) / 2, 1.0)).to(W)  # of a panel [0, 1], and its end
    exponentials = [torch.matrix_exp(nodes[:, None, None] * h0 * A)]  # by level, each (NODES + 1, d, d)
    growth = torch.ones(1).to(W)  # the largest norm of the exponentials of a level
    clock, level = torch.zeros_like(radius), torch.zeros_like(radius, dtype=torch.long)
    token = torch.arange(len(y), device=y.device)
    rows, points = [token[:0]], [y[:0]]
    for _ in range(MAX_PANELS):
        while len(exponentials) <= int(level.max()):
            exponentials.append(exponentials[-1] @ exponentials[-1])
            norms = torch.linalg.matrix_norm(exponentials[-1].detach(), 2)
            growth = torch.cat([growth, norms.amax()[None]])
        inside = y.new_empty(NODES + 1, *y.shape)
        for number in level.unique().tolist():
            inside[:, level == number] = torch.einsum("qij,nj->qni", exponentials[number], y[level == number])
        length = inside.norm(dim=-1, keepdim=True)
        inside = inside / length
        speed = (inside @ N.mT).norm(dim=-1, keepdim=True)
        series = torch.einsum("lq,qni->nli", to_series, torch.cat([speed / max_speed, inside], dim=-1)[:-1])
        rounding = 16 * torch.finfo(y.dtype).eps * growth[level] / length.detach().amin(0)[:, 0].clamp(min=1)
        tolerance, mean = rounding.clamp(min=RESOLVED), series[:, :1, 0].detach()
        error = torch.maximum(series[..., 0].abs() / mean, series[..., 1:].abs().amax(-1)).detach().mT  # (NODES, n)
        is_resolved = ((error[-2:] <= tolerance).all(0) & (length[-1, :, 0] > 1e-200)) | (level == 0)
        may_grow = (error[NODES // 2 :] <= tolerance).all(0)

        duration = radius[token] * h0 * 2.0 ** level.double() * max_speed * series[:, 0, 0]
        duration = torch.where(is_resolved, duration, 0.0)
        first, stop = (torch.searchsorted(t, z.detach().contiguous()) for z in (clock, clock + duration))
        who = torch.repeat_interleave(stop - first)  # one entry for each time that a token meets in its panel
        if len(who):
            when = torch.arange(len(who), device=who.device) - ((stop - first).cumsum(0) - stop)[who]
            rows.append(when * len(x) + token[who])
            points.append(_positions(series[who], (t[when] - clock[who]) / duration[who]))

        y, clock = torch.where(is_resolved[:, None], inside[-1], y), clock + duration
        level = (level + torch.where(is_resolved, may_grow.long(), -1)).clamp(0, MAX_LEVEL)
        is_left = clock <= end_time
        if not bool(is_left.any()):
            break
        y, clock, level, token = y[is_left], clock[is_left], level[is_left], token[is_left]
        is_stuck = (y @ N.mT).norm(dim=-1) <= 4 * torch.finfo(y.dtype).eps * max_speed
        if bool(is_stuck.any()):
            raise ValueError(
                f"{int(is_stuck.sum())} tokens run into ker G before t = {end_time:.3g}, where the drift is undefined: "
                f"they are there at t = {float(clock[is_stuck].max()):.4g}. Ask for a shorter time."
            )
    else:
        raise ValueError(
            f"{len(token)} tokens did not reach t = {end_time:.3g} in {MAX_PANELS} panels of the time change: they "
            "turn too often, or |G x| is tiny where they go. Ask for a shorter time."
        )
    path = torch.zeros(len(t) * len(x), x.shape[-1], dtype=x.dtype, device=x.device)
    path = path.index_copy(0, torch.cat(rows), torch.cat(points)) * radius.repeat(len(t))[:, None]
    return path.reshape(len(t), *x0.shape).to(x0.dtype)


def _norm(A: Tensor) -> float:
    return float(torch.linalg.matrix_norm(A.detach(), 2))


def _positions(series: Tensor, share: Tensor) -> Tensor:
    """The directions (m, d) at given shares (m,) of the duration of panels with series (m, NODES, 1 + d)."""
    speed = series[..., 0]
    odd = 2 * torch.arange(1, NODES, dtype=series.dtype, device=series.device) + 1

    def newton(z: Tensor) -> Tensor:
        P = _legendre(z)
        # int_{-1}^z P_l = (P_{l+1} - P_{l-1})/(2 l + 1)
        integral = speed[:, 0] * (z + 1) + (speed[:, 1:] * (P[:, 2:] - P[:, :-2]) / odd).sum(-1)
        return z - (integral - 2 * share * speed[:, 0]) / (speed * P[:, :-1]).sum(-1)

    with torch.no_grad():
        z = 2 * share - 1
        for _ in range(20):
            z, last = newton(z).clamp(-1, 1), z
            if bool((z - last).abs().lt(1e-13).all()):
                break
    P = _legendre(newton(z))  # this step carries the derivative of the implicit function
    x = torch.einsum("nl,nli->ni", P[:, :-1], series[..., 1:])
    return x / x.norm(dim=-1, keepdim=True)


def _legendre(z: Tensor) -> Tensor:
    """The Legendre polynomials P_0, ..., P_NODES at z (m,), as (m, NODES + 1)."""
    P = [torch.ones_like(z), z]
    for l in range(1, NODES):
        P.append(((2 * l + 1) * z * P[-1] - l * P[-2]) / (l + 1))
    return torch.stack(P, dim=-1)
