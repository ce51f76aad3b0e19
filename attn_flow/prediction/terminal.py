"""What clusters at +-e do once they have formed: collapse, keep a width, stay, or leave towards V's leading direction.

A cluster that sees only itself moves by x' = P_x V x. Write _ for compressions to e^perp, let V e = v e, G e = gamma e
and lambda = v gamma (docs/theory.md).

lambda > 0: tokens of a cluster attract each other. If gamma > 0 each cluster sees itself and its offset y obeys
    y' = (V_ - v) y; if gamma < 0 it sees its antipode, y+' = v y+ + V_ y-.
lambda < 0: tokens of a cluster repel each other and balance at a Gaussian of precision beta (lambda - G_ V_)/|v|
    across e. It is permanent if all its perturbations rho (1 + h) decay. A token at y then sees its mean moved by
    P^{-1} E[grad h] under N(B y, P^{-1}), with P = beta G_ V_ / v and B = v V_^{-1}. On the top degree of a polynomial
    h this gives h' = <A y, (grad h)(B y)>, A = (V_ P^{-1})^T Sigma^{-1}. For commuting diagonal blocks the rates are
    mu_k = [sum_j k_j (V_j/G_j)(lambda - lambda_j)/|v|] prod_i (v/V_i)^{k_i}.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from itertools import combinations_with_replacement

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from attn_flow.prediction.spectrum import Array, Spectrum

MAX_DEGREE, MAX_MODES = 12, 120  # perturbations of a cluster are examined up to this degree and count of monomials


@dataclass(frozen=True, eq=False)
class TerminalPhase:
    """What follows concentration at finite temperature, dominated by the spectrum of V.

    Attributes:
        basis: (d, k), an orthonormal basis of the leading subspace of V (summed over heads), where clusters end up.
        rate: v_top - v_next, the rate of the final approach; infinite if V is a multiple of the identity.
        exit_rate: how fast clusters leave E. 0: they stay. inf: no cluster of a finite width is stable at any degree.
            None: it is not known, for the `reason`.
        keeps_E: whether V maps E into itself, which exit rates and t_min require. None: not examined.
        reason: what clusters do, or why it is not known.
    """

    basis: Tensor
    rate: float
    exit_rate: float | None = None
    keeps_E: bool | None = None
    reason: str = ""


@dataclass(frozen=True)
class ClusterWidth:
    """The Gaussian width that clusters keep at finite beta if their tokens repel each other.

    Attributes:
        coefficient: beta W_2^2 = sum_i |v| / (lambda_1 - lambda_i) of the clusters about their centres.
        modes: the largest growth rate of its perturbations of degree 1, 2, ...; degree 1 is the offset of the cluster.

    Example:
        >>> import torch
        >>> from attn_flow import Attention, limit
        >>> G, V = torch.diag(torch.tensor([1.0, 2.0])), torch.diag(torch.tensor([-1.0, -3.0]))
        >>> round(limit(Attention.from_matrices(G, V)).width.w2(beta=300.0), 4)
        0.0258
    """

    coefficient: float
    modes: tuple[float, ...]

    def w2(self, beta: float) -> float:
        """The distance W_2 of the clusters to their centres at inverse temperature beta."""
        return math.sqrt(self.coefficient / beta)


def exit_of_clusters(
    phase: TerminalPhase, limit: Spectrum, value: Tensor, score: Tensor, tol: float
) -> tuple[TerminalPhase, ClusterWidth | None]:
    """The phase with its exit rate, and the width of clusters, for V = value and G = score, both (d, d)."""
    V, G, basis = (A.detach().cpu().numpy() for A in (value, score, limit.basis))
    image, e, width = V @ basis, basis[:, 0], None
    keeps_E = bool(np.linalg.norm(image - basis @ (basis.T @ image), 2) <= math.sqrt(tol) * np.linalg.norm(V, 2))
    if limit.case != "fixed" or limit.dimension != 1:
        rate, reason = None, "exit rates are derived for limits at two points +-e (dim E = 1) only"
    elif not keeps_E:
        angle = math.degrees(math.acos(min(1.0, abs(float(e @ V @ e)) / float(np.linalg.norm(V @ e)))))
        rate, reason = None, f"V turns the limit direction e by {angle:.3g} degrees"
    else:
        rate, reason, width = _exit(V, G, e, limit.leading, tol)
    return replace(phase, keeps_E=keeps_E, exit_rate=rate, reason=reason), width


def _exit(V: Array, G: Array, e: Array, leading: float, tol: float) -> tuple[float | None, str, ClusterWidth | None]:
    """Exit rate, its reason and the width of clusters at +-e, with V e = v e and G e = gamma e."""
    v, gamma, size = float(e @ V @ e), float(e @ G @ e), float(np.linalg.norm(V, 2) * np.linalg.norm(G, 2))
    across = np.linalg.svd(e[None])[2][1:].T
    V_, G_ = across.T @ V @ across, across.T @ G @ across
    real = lambda A: np.linalg.eigvals(A).real
    if abs(leading) <= tol * size:
        return None, "the leading eigenvalue of M is 0: clusters neither contract nor spread", None
    if leading > 0:
        rate = float(real(V_).max() - v if gamma > 0 else v + np.abs(real(V_)).max())
        target = "itself" if gamma > 0 else "its antipode"
        return max(0.0, rate), f"each cluster sees {target} and collapses to a point", None
    if np.linalg.matrix_rank(G_, tol=tol * np.linalg.norm(G, 2)) < len(G_):
        return None, "the leading eigenvalue of M is negative and G is singular across E", None
    block = G_ @ V_
    if np.linalg.norm(block - block.T) > math.sqrt(tol) * size:
        D = V_ - leading * np.linalg.inv(G_)
        rate = float(real(D).max() if gamma > 0 else np.abs(real(D)).max())
        reason = "G V is not symmetric across E: clusters are not Gaussian; the exit rate is that of their centres"
        return rate if rate > 0 else None, reason, None
    lower = np.linalg.eigvalsh((block + block.T) / 2)
    # A cluster that sees its antipode is the reflection of one that sees itself: G, V, gamma and v change sign.
    sign = 1.0 if gamma > 0 else -1.0
    count = 1
    while count < MAX_DEGREE and math.comb(len(V_) + count, count + 1) <= MAX_MODES:
        count += 1
    rates = [mode_rates(sign * V_, sign * G_, sign * v, sign * gamma, n).real for n in range(1, count + 1)]
    modes = tuple(float(z.max() if gamma > 0 else np.abs(z).max()) for z in rates)
    width = ClusterWidth(float((abs(v) / (leading - lower)).sum()), modes)
    fastest = int(np.argmax(np.array(modes) >= max(modes) - tol * abs(v)))  # the lowest degree of equal rates
    if modes[fastest] <= tol * abs(v):
        return 0.0, f"clusters keep a Gaussian width (perturbations up to degree {len(modes)} decay)", width
    if np.abs(np.linalg.eigvals(V_)).min() < abs(v) * (1 - tol):
        return math.inf, "perturbations of a cluster grow faster the higher their degree: no width is stable", width
    reason = f"clusters have a Gaussian width and leave through perturbations of degree {fastest + 1}"
    return modes[fastest], reason, width


def mode_rates(V: Array, G: Array, v: float, gamma: float, degree: int) -> NDArray[np.complex128]:
    """The complex growth rates of the perturbations of one degree >= 1 of a Gaussian cluster; V, G (m, m) across e.

    They are the eigenvalues of h -> <A y, (grad h)(B y)>, the derivative of h((B + s A) y) at s = 0, on the monomials
    of that degree. A complex step takes the derivative without rounding, at random points y.
    """
    m = len(V)
    precision = (v * gamma * np.eye(m) - G @ V) / abs(v)  # in units of beta
    A, B = (V @ np.linalg.inv(G @ V / v)).T @ precision, v * np.linalg.inv(V)
    powers = np.array([np.bincount(c, minlength=m) for c in combinations_with_replacement(range(m), degree)])
    y = np.random.default_rng(0).normal(size=(3 * len(powers), m))
    y /= np.linalg.norm(y, axis=1, keepdims=True)
    monomials = lambda z: np.prod(z[:, None, :] ** powers, axis=-1)
    images = monomials(y @ (B + 1e-30j * A).T).imag / 1e-30
    return np.linalg.eigvals(np.linalg.lstsq(monomials(y), images)[0]).astype(np.complex128)
