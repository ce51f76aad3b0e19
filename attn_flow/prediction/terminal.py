"""What clusters at +-e do once they have formed: collapse, keep a width, or leave towards V's leading direction.

A cluster that sees only itself moves by x' = P_x V x. Write _ for compressions to e^perp, let V e = v e, G e = gamma e
and lambda = v gamma (docs/theory.md).

lambda > 0: tokens of a cluster attract each other. If gamma > 0 each cluster sees itself and its offset y obeys
    y' = (V_ - v) y; if gamma < 0 it sees its antipode, y+' = v y+ + V_ y-.
lambda < 0: tokens of a cluster repel each other and balance at a Gaussian of precision beta (lambda - G_ V_)/|v|
    across e. For commuting symmetric G_ and V_, of eigenvalues G_j and V_j, its perturbation of degree k_j in
    coordinate j grows at [sum_j k_j (V_j/G_j)(lambda - G_j V_j)/|v|] prod_j (v/V_j)^{k_j}, where G_j V_j < lambda.
    If all V_j are negative, as v is, every perturbation decays. Nothing is claimed for other G and V.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
from torch import Tensor

from attn_flow.prediction.spectrum import Array, Spectrum


@dataclass(frozen=True, eq=False)
class TerminalPhase:
    """What follows concentration at finite temperature, dominated by the spectrum of V.

    Attributes:
        basis: (d, k), an orthonormal basis of the leading subspace of V (summed over heads), where clusters end up.
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
    """The phase with what clusters at the limits do, for V = value and G = score, both (d, d)."""
    V, G, basis = (A.detach().cpu().numpy() for A in (value, score, limit.basis))
    image, e = V @ basis, basis[:, 0]
    keeps_E = bool(np.linalg.norm(image - basis @ (basis.T @ image), 2) <= math.sqrt(tol) * np.linalg.norm(V, 2))
    phase = replace(phase, keeps_E=keeps_E)
    if limit.case != "fixed" or limit.dimension != 1:
        return replace(phase, reason="exit rates are derived for limits at two points +-e (dim E = 1) only")
    if not keeps_E:
        angle = math.degrees(math.acos(min(1.0, abs(float(e @ V @ e)) / float(np.linalg.norm(V @ e)))))
        return replace(phase, reason=f"V turns the limit direction e by {angle:.3g} degrees")
    v, gamma = float(e @ V @ e), float(e @ G @ e)
    across = np.linalg.svd(e[None])[2][1:].T
    V_, G_ = across.T @ V @ across, across.T @ G @ across
    if abs(limit.leading) <= tol * np.linalg.norm(V, 2) * np.linalg.norm(G, 2):
        reason = "the leading eigenvalue of M is 0: clusters neither contract nor spread"
        return replace(phase, reason=reason)
    if limit.leading > 0:
        growth = np.linalg.eigvals(V_).real
        rate = float(growth.max() - v if gamma > 0 else v + np.abs(growth).max())
        reason = f"each cluster sees {'itself' if gamma > 0 else 'its antipode'} and collapses to a point"
        return replace(phase, exit_rate=max(0.0, rate), reason=reason)
    is_symmetric = all(_is_symmetric(A, math.sqrt(tol)) for A in (V_, G_, G_ @ V_))
    if is_symmetric and v < 0 and np.linalg.eigvalsh(V_).max() < 0:
        width = float((abs(v) / (limit.leading - np.linalg.eigvalsh(G_ @ V_))).sum())
        return replace(phase, exit_rate=0.0, reason="clusters keep a Gaussian width", width=width)
    return replace(phase, reason="tokens of a cluster repel each other, and when they leave is not derived")


def _is_symmetric(A: Array, tol: float) -> bool:
    return bool(np.linalg.norm(A - A.T) <= tol * np.linalg.norm(A))
