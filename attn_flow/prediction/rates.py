"""How fast tokens concentrate at zero temperature, and what their clusters do afterwards (see docs/theory.md)."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from attn_flow.prediction.spectrum import Array, Spectrum, spectrum


@dataclass(frozen=True)
class Rates:
    """Rates of concentration on E, per unit of time, for initial distributions with a bounded density.

    Attributes:
        g: the rate at which a typical token approaches E, gap / |G e_1|.
        kappa: the rate at which tokens leave the next spectral level, gap / |G e_2|.
        tail: the rate at which the mass of the tokens that have not left a lower level vanishes; dim E kappa in d = 2.
        C: an admissible growth rate |V| (cond G + 2) of the error due to the temperature; it is far from sharp.

    Example:
        >>> from attn_flow import Attention, limit
        >>> G, V = torch.diag(torch.tensor([1.0, 3.0])), torch.diag(torch.tensor([3.0, 0.5]))
        >>> rates = limit(Attention.from_matrices(G, V)).rates
        >>> rates.g, rates.kappa, rates.decay(p=1), rates.decay(p=2)
        (1.5, 0.5, 0.5, 0.25)
    """

    g: float
    kappa: float
    tail: float
    C: float

    def decay(self, p: float = 2.0) -> float:
        """c_p = min(g, tail/p): W_p(mu_t, P_# mu_0) decays like e^{-c_p t} at zero temperature. p >= 1."""
        if not 1 <= p < math.inf:
            raise ValueError(f"p = {p}, expected a number with 1 <= p < inf.")
        return min(self.g, self.tail / p)


def concentration_rates(W: Tensor, N: Tensor, tol: float) -> Rates | None:
    """The rates of x' = P_x W N x / |N x| (N = G for full support); None if E is everything or at a Jordan block.

    A token near level j (the next real part, and so on) leaves it once a component of an upper level i has grown, at
    rate (lambda_i - lambda_j)/|N e_j|. The mass still there decays at r_j = sum_{i<j} k_i (lambda_i - lambda_j)/|N e_j|
    and tail = min_j r_j: for d >= 3 a lower level with a large |N e_j| can be slower than the next one.
    """
    levels: list[Spectrum] = []
    speeds, decays, inside = [], [], torch.eye(len(N)).to(N)
    while inside.shape[1]:  # the invariant subspace of the levels that are left
        level = spectrum(inside.mT @ W @ N @ inside, tol)
        basis, frequency = (inside @ level.basis).cpu().numpy(), max(level.frequencies, default=0.0)
        speeds.append(_speed((W @ N).cpu().numpy(), N.cpu().numpy(), basis, frequency))
        decay = sum(upper.dimension * (upper.leading - level.leading) for upper in levels)
        decays.append(decay / speeds[-1] if speeds[-1] > 0 else math.inf)
        levels.append(level)
        lower = torch.linalg.svd(torch.eye(inside.shape[1]).to(N) - level.projector)[0]
        inside = inside @ lower[:, : inside.shape[1] - level.dimension]
    if len(levels) == 1 or levels[0].case == "jordan":
        return None
    C = float(torch.linalg.matrix_norm(W, 2) * (torch.linalg.cond(N) + 2))
    return Rates(levels[0].gap / speeds[0], decays[1] / levels[0].dimension, min(decays[1:]), C)


def _speed(M: Array, N: Array, basis: Array, frequency: float) -> float:
    """dt/dtau = |N e| of the slowest e in a level, averaged over one turn if the level is a rotating plane."""
    if basis.shape[1] != 2 or frequency <= 1e-12 * np.linalg.norm(M):
        return float(np.linalg.norm(N @ basis, 2))
    A = basis.T @ M @ basis
    A = (A - np.trace(A) / 2 * np.eye(2)) / frequency  # A^2 = -I, so that e^{sA} = cos(s) I + sin(s) A
    s = 2 * np.pi * np.arange(512) / 512
    x = basis @ np.stack([np.cos(s) + A[0, 0] * np.sin(s), A[1, 0] * np.sin(s)])
    return float((np.linalg.norm(N @ x, axis=0) / np.linalg.norm(x, axis=0)).mean())


@dataclass(frozen=True, eq=False)
class TerminalPhase:
    """What follows concentration at finite temperature, dominated by the spectrum of V.

    Attributes:
        basis: (d, k), an orthonormal basis of the leading subspace of V, where clusters end up.
        rate: v_top - v_next, the rate of the final approach; infinite if V is a multiple of the identity.
        exit_rate: how fast clusters leave E. 0: they stay. None: it is not known, for the `reason`.
        keeps_E: whether V maps E into itself, which exit rates and t_min require. None: not examined.
        reason: what clusters do, or why it is not known.
        width: beta W_2^2 = sum_i |v| / (lambda_1 - lambda_i) of clusters about their centres, if they keep a width.
    """

    basis: Tensor
    rate: float
    exit_rate: float | None = None
    keeps_E: bool | None = None
    reason: str = ""
    width: float | None = None


def exit_of_clusters(phase: TerminalPhase, limit: Spectrum, value: Tensor, score: Tensor, tol: float) -> TerminalPhase:
    """The phase with what clusters do, which see only themselves: x' = P_x V x. V = value and G = score are (d, d).

    With V e = v e, G e = gamma e, lambda = v gamma, and _ for compressions to e^perp: if lambda > 0 the offset y of a
    cluster obeys y' = (V_ - v) y for gamma > 0, and y+' = v y+ + V_ y- for gamma < 0, where it sees its antipode. If
    lambda < 0 tokens repel each other and balance at a Gaussian, which is permanent for commuting symmetric G_ and V_
    if all eigenvalues of V_ are negative, as v is.
    """
    V, G, basis = (A.detach().cpu().numpy() for A in (value, score, limit.basis))
    image, e = V @ basis, basis[:, 0]
    keeps_E = bool(np.linalg.norm(image - basis @ (basis.T @ image), 2) <= math.sqrt(tol) * np.linalg.norm(V, 2))
    phase = replace(phase, keeps_E=keeps_E)
    if limit.case != "fixed" or limit.dimension != 1:
        return replace(phase, reason="exit rates are derived for a simple leading eigenvalue (dim E = 1) only")
    v, gamma = float(e @ V @ e), float(e @ G @ e)
    if not keeps_E:
        angle = math.degrees(math.acos(min(1.0, abs(v) / float(np.linalg.norm(V @ e)))))
        return replace(phase, reason=f"V turns the limit direction e by {angle:.3g} degrees")
    if abs(limit.leading) <= tol * np.linalg.norm(V, 2) * np.linalg.norm(G, 2):
        return replace(phase, reason="the leading eigenvalue of M is 0: clusters neither contract nor spread")
    across = np.linalg.svd(e[None])[2][1:].T
    V_, G_ = across.T @ V @ across, across.T @ G @ across
    if limit.leading > 0:
        growth = np.linalg.eigvals(V_).real
        rate = float(growth.max() - v if gamma > 0 else v + np.abs(growth).max())
        reason = f"each cluster sees {'itself' if gamma > 0 else 'its antipode'} and collapses to a point"
        return replace(phase, exit_rate=max(0.0, rate), reason=reason)
    is_symmetric = all(np.linalg.norm(A - A.T) <= math.sqrt(tol) * np.linalg.norm(A) for A in (V_, G_, G_ @ V_))
    if is_symmetric and v < 0 and np.linalg.eigvalsh(V_).max() < 0:
        width = float((abs(v) / (limit.leading - np.linalg.eigvalsh(G_ @ V_))).sum())
        return replace(phase, exit_rate=0.0, reason="clusters keep a Gaussian width", width=width)
    return replace(phase, reason="tokens of a cluster repel each other, and when they leave is not derived")
