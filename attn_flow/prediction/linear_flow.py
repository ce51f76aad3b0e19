"""The exact flow of x' = P_x W N x / |N x|: a matrix exponential and a scalar clock for every token.

x(t) = e^{tau M} x_0 / |e^{tau M} x_0| with M = W N and tau' = 1/|N x|, so that t(tau) = int |N y|/|y| d tau along
y = e^{tau M} x_0. The integral is accumulated over panels of tau by Gauss-Legendre quadrature, and inverted in the
panel that contains t by Newton's method on the Legendre series of the integrand. Every token has its own panels of
length h_0 2^level, as long as they resolve the integrand and the direction; both are smooth over h_0 = 1/(2 |M|). The
exponentials of these lengths are computed once, by repeated squaring, so that the cost grows with the turns of a token
and with log |M| at most.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from attn_flow.base.checks import can_read
from attn_flow.prediction.spectrum import spectrum

NODES = 24  # Gauss-Legendre nodes of a panel
TERMS = 16  # of the Taylor series in h_0: (1/2)^16/16! is below rounding
MAX_LEVEL = 40  # a panel of h_0 2^40 multiplies rounding errors of the eigenvalues of M by 10^12
MAX_PANELS = 20_000  # of one token
RESOLVED = 1e-12  # relative size of the last Legendre coefficients of a panel that is short enough


def linear_flow(W: Tensor, N: Tensor, x0: Tensor, t: Tensor) -> Tensor:
    """The positions at increasing times t >= 0, (T,), of tokens x0 (..., n, d) at time 0, as (T, ..., n, d).

    Tokens keep their norm r, and move as on the unit sphere in time t/r. Computed in float64; differentiable in x0, W
    and N. A time that takes too many turns, and a token that runs into ker N, raise ValueError.
    """
    W, N, t, x = W.double(), N.double(), t.to(W.device, torch.float64), x0.double().reshape(-1, W.shape[-1])
    radius = x.norm(dim=-1)  # (tokens,)
    y, end_time = x / radius[:, None], float(t[-1])
    leading = spectrum((W @ N).detach())
    panels = _Panels(W, N, leading.leading)
    if panels.size == 0:  # M = c I
        return x0.expand(len(t), *x0.shape)
    if can_read(y) and not bool(((y @ N.mT).norm(dim=-1) > 0).all()):
        raise ValueError("a token lies in ker G, where the zero-temperature drift G x/|G x| is undefined; remove it.")
    tau = end_time / float(radius.detach().min()) / panels.reach
    turns = tau * min(leading.frequencies, default=0.0) / (2 * math.pi)
    if turns > NODES / 6 * MAX_PANELS:  # consecutive nodes are at most 60 degrees apart
        raise ValueError(f"tokens turn {turns:.2g} times before t = {end_time:.3g}; ask for a shorter time.")

    clock, level = torch.zeros_like(radius), torch.zeros_like(radius, dtype=torch.long)
    token = torch.arange(len(y), device=y.device)
    rows, points = [token[:0]], [y[:0]]
    for _ in range(MAX_PANELS):
        series, end, is_resolved, may_grow = panels.evaluate(y, level)
        length = panels.h0 * 2.0 ** level.double()
        span = torch.where(is_resolved, radius[token] * length * series[:, 0], 0.0)  # in time
        first, stop = (torch.searchsorted(t, z.detach().contiguous()) for z in (clock, clock + span))
        who = torch.repeat_interleave(stop - first)  # one entry for each time that a token meets in its panel
        if len(who):
            when = torch.arange(len(who), device=who.device) - ((stop - first).cumsum(0) - stop)[who]
            share = _invert(series[who], (t[when] - clock[who]) / span[who] * series[who, 0])
            rows.append(when * len(x) + token[who])
            points.append(panels.propagate(y[who], share * length[who], int(level[who].max())))
        y, clock = torch.where(is_resolved[:, None], end, y), clock + span
        level = (level + torch.where(is_resolved, may_grow.long(), -1)).clamp(0, MAX_LEVEL)
        is_left = clock <= end_time
        if not bool(is_left.any()):
            break
        y, clock, level, token = y[is_left], clock[is_left], level[is_left], token[is_left]
        is_stuck = (y @ N.mT).norm(dim=-1) <= 4 * torch.finfo(y.dtype).eps * panels.reach
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


class _Panels:
    """Exponentials of A = W N - shift over panels of length h_0 2^level, and the speed dt/dtau = |N y|/|y| in them."""

    def __init__(self, W: Tensor, N: Tensor, shift: float) -> None:
        identity = torch.eye(len(W)).to(W)
        self.A, self.N = W @ N - shift * identity, N
        # Both |y| and |N y| are smooth over h_0: N e^{tau W N} = e^{tau N W} N.
        both = self.A, N @ W - shift * identity
        self.size = max(float(torch.linalg.matrix_norm(B.detach(), 2)) for B in both)
        self.reach = float(torch.linalg.matrix_norm(N.detach(), 2))  # the largest speed
        self.h0 = 0.5 / self.size if self.size > 0 else 1.0
        z, w = np.polynomial.legendre.leggauss(NODES)
        to_series = w[:, None] * np.polynomial.legendre.legvander(z, NODES - 1) * (np.arange(NODES) + 0.5)
        self.to_series = torch.as_tensor(to_series).to(W)  # from values at the nodes to Legendre coefficients
        shares = torch.as_tensor(np.append((z + 1) / 2, 1.0)).to(W)[:, None, None]  # the nodes and the end of a panel
        self.exponentials = _taylor(identity.expand(NODES + 1, -1, -1), self.A, shares * self.h0)[None]

    def at(self, levels: int) -> Tensor:
        """e^{s h A} at the nodes and the end of panels of the first levels, (levels, NODES + 1, d, d), by squaring."""
        while len(self.exponentials) < levels:
            last = self.exponentials[-1:]
            self.exponentials = torch.cat([self.exponentials, last @ last])
        return self.exponentials

    def evaluate(self, y: Tensor, level: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The Legendre series (n, NODES) of the speed in the panels of levels (n,) that start at y (n, d).

        Also the ends of the panels (n, d), whether they are resolved (n,), and whether longer ones may be (n,).
        """
        table = self.at(1 + int(level.max()))
        order, (numbers, counts) = level.argsort(), level.unique(return_counts=True)
        parts = zip(numbers.tolist(), y[order].split(counts.tolist()))
        inside = torch.cat([torch.einsum("qij,nj->qni", table[number], part) for number, part in parts], dim=1)
        inside = inside[:, order.argsort()]
        size = inside.norm(dim=-1, keepdim=True)
        x = inside / size
        series = (x[:-1] @ self.N.mT).norm(dim=-1).mT @ self.to_series
        turns = (torch.cat([y[None], x[:-1]]) * x).sum(-1).amin(0)  # the least cosine between neighbours
        is_resolved = (series[:, -2:].abs().amax(-1) <= RESOLVED * series[:, 0]) & (turns > 0.5)
        is_resolved = (is_resolved & (size[-1, :, 0] > 1e-200)) | (level == 0)
        may_grow = series[:, NODES // 2 :].abs().amax(-1) <= RESOLVED * series[:, 0]
        return series, x[-1], is_resolved, may_grow

    def propagate(self, y: Tensor, tau: Tensor, level: int) -> Tensor:
        """The directions of e^{tau A} y for y (n, d) and 0 <= tau <= h_0 2^level (n,).

        The binary digits of tau / h_0 select exponentials, and a Taylor series serves the rest.
        """
        digits = (tau.detach() / self.h0).floor().clamp(max=2**level - 1).long()
        for bit in range(level):
            step = y @ self.at(level)[bit, -1].mT
            y = torch.where((digits >> bit & 1).bool()[:, None], step / step.norm(dim=-1, keepdim=True), y)
        total = _taylor(y, self.A.mT, (tau - digits.to(tau) * self.h0)[:, None])
        return total / total.norm(dim=-1, keepdim=True)


def _taylor(start: Tensor, A: Tensor, h: Tensor) -> Tensor:
    """start e^{h A} for |h A| <= 1/2."""
    term = total = start
    for k in range(1, TERMS + 1):
        term = term @ A * (h / k)
        total = total + term
    return total


def _invert(series: Tensor, target: Tensor) -> Tensor:
    """The share s of a panel at which int_0^s of a Legendre series (n, NODES) in 2 s - 1 reaches the target (n,)."""
    odd = 2 * torch.arange(1, NODES, dtype=series.dtype, device=series.device) + 1

    def newton(z: Tensor) -> Tensor:
        P = [torch.ones_like(z), z]
        for l in range(1, NODES):
            P.append(((2 * l + 1) * z * P[-1] - l * P[-2]) / (l + 1))
        values = torch.stack(P, dim=-1)
        # int_{-1}^z P_l = (P_{l+1} - P_{l-1})/(2 l + 1)
        integral = series[:, 0] * (z + 1) + (series[:, 1:] * (values[:, 2:] - values[:, :-2]) / odd).sum(-1)
        return z - (integral - 2 * target) / (series * values[:, :-1]).sum(-1)

    with torch.no_grad():
        z = (2 * target / series[:, 0] - 1).clamp(-1, 1)
        for _ in range(20):
            z, last = newton(z).clamp(-1, 1), z
            if float((z - last).abs().max()) < 1e-13:
                break
    return (newton(z) + 1) / 2  # the last step carries the derivative of the implicit function
