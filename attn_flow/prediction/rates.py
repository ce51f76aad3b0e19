"""How fast tokens concentrate at zero temperature: rates of x' = P_x W N x / |N x|, where N = G for full support.

docs/theory.md derives them from the spectrum of M = V G.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from scipy.linalg import qr
from torch import Tensor

from attn_flow.prediction.spectrum import Array, Spectrum


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


def concentration_rates(spectrum: Spectrum, W: Tensor, N: Tensor, tol: float) -> Rates | None:
    """The rates of x' = P_x W N x / |N x|; None if E is the whole space or the approach is only algebraic.

    A token near level j (the next real part, and so on) leaves it once a component of an upper level i has grown, at
    rate (lambda_i - lambda_j)/|N e_j|. The mass still there decays at r_j = sum_{i<j} k_i (lambda_i - lambda_j)/|N e_j|
    and tail = min_j r_j: for d >= 3 a lower level with a large |N e_j| can be slower than the next one.
    """
    if math.isinf(spectrum.gap) or spectrum.case == "jordan":
        return None
    M, score = (W @ N).cpu().numpy(), N.cpu().numpy()
    upper, decays = [(spectrum.leading, spectrum.dimension)], []
    for eigenvalues, basis in _lower_levels(M, spectrum.leading - spectrum.gap / 2, tol):
        real = float(eigenvalues.real.mean())
        decay = sum(k * (above - real) for above, k in upper)
        decays.append(_ratio(decay, _speed(M, score, basis, float(np.abs(eigenvalues.imag).max()))))
        upper.append((real, len(eigenvalues)))
    speed = _speed(M, score, spectrum.basis.cpu().numpy(), max(spectrum.frequencies, default=0.0))
    singular = torch.linalg.svdvals(N)
    condition = _ratio(float(singular[0]), float(singular[-1]))
    C = float(torch.linalg.matrix_norm(W, 2)) * (condition + 2)
    return Rates(_ratio(spectrum.gap, speed), decays[0] / spectrum.dimension, min(decays), C)


def _ratio(a: float, b: float) -> float:
    return a / b if b > 0 else math.inf


def _lower_levels(M: Array, bound: float, tol: float) -> list[tuple[Array, Array]]:
    """Eigenvalues with real part below the bound, grouped by real part, and an orthonormal basis of each group.

    The basis of a defective group may miss directions; it serves for the speeds of tokens near that level.
    """
    eigenvalues, vectors = np.linalg.eig(M)
    order = [i for i in np.argsort(-eigenvalues.real) if eigenvalues[i].real <= bound]
    gaps = -np.diff(eigenvalues.real[order])
    groups = []
    for group in np.split(order, np.flatnonzero(gaps > tol * np.linalg.norm(M, 2)) + 1):
        span = np.hstack([vectors[:, group].real, vectors[:, group].imag])
        basis, R, _ = qr(span, mode="economic", pivoting=True)
        rank = int((np.abs(np.diag(R)) > tol * abs(R[0, 0])).sum())
        groups.append((eigenvalues[group], basis[:, :rank]))
    return groups


def _speed(M: Array, N: Array, basis: Array, frequency: float) -> float:
    """dt/dtau = |N e| of the slowest e in a level, averaged over one turn if the level is a rotating plane."""
    if basis.shape[1] != 2 or frequency <= 1e-12 * np.linalg.norm(M):
        return float(np.linalg.norm(N @ basis, 2))
    A = basis.T @ M @ basis
    A = (A - np.trace(A) / 2 * np.eye(2)) / frequency  # A^2 = -I, so that e^{sA} = cos(s) I + sin(s) A
    s = 2 * np.pi * np.arange(512) / 512
    x = basis @ np.stack([np.cos(s) + A[0, 0] * np.sin(s), A[1, 0] * np.sin(s)])
    return float((np.linalg.norm(N @ x, axis=0) / np.linalg.norm(x, axis=0)).mean())
