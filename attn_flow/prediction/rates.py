"""How fast tokens concentrate at zero temperature: rates of x' = P_x M x / |N x|, where N = G for full support.

docs/theory.md derives them from the spectrum of M = V G.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from attn_flow.prediction.spectrum import Array, Spectrum, levels


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
    lower = [level for level in levels(M, tol) if level[0] <= spectrum.leading - spectrum.gap / 2]
    upper = [(spectrum.leading, spectrum.dimension)]
    decays: list[float] = []
    for real, imag, basis in lower:
        speed = _speed(M, score, basis, real, imag)
        decays.append(sum(k * (above - real) for above, k in upper) / speed if speed > 0 else math.inf)
        upper.append((real, len(imag)))
    basis, frequencies = spectrum.basis.cpu().numpy(), np.array(spectrum.frequencies)
    speed = _speed(M, score, basis, spectrum.leading, frequencies)
    singular = torch.linalg.svdvals(N)
    condition = float(singular[0] / singular[-1]) if float(singular[-1]) > 0 else math.inf
    return Rates(
        g=spectrum.gap / speed if speed > 0 else math.inf,
        kappa=decays[0] / spectrum.dimension,
        tail=min(decays),
        C=float(torch.linalg.matrix_norm(W, 2)) * (condition + 2),
    )


def _speed(M: Array, N: Array, basis: Array, real: float, imag: Array) -> float:
    """dt/dtau = |N e| of the slowest e in a level, averaged over one turn if the level is a rotating plane."""
    b = float(np.abs(imag).max(initial=0.0))
    if basis.shape[1] == 2 and b > 1e-12 * np.linalg.norm(M):
        A = (basis.T @ M @ basis - real * np.eye(2)) / b  # A^2 = -I, so e^{sA} = cos(s) I + sin(s) A
        s = 2 * np.pi * np.arange(512) / 512
        u = basis @ (np.cos(s)[:, None, None] * np.eye(2) + np.sin(s)[:, None, None] * A)[..., 0].T
        return float((np.linalg.norm(N @ u, axis=0) / np.linalg.norm(u, axis=0)).mean())
    return float(np.linalg.norm(N @ basis, 2))
