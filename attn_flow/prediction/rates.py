"""How fast: the rates of each phase, read off the spectra of M = V G (concentration) and of V (what follows).

Zero-temperature flow x' = P_x M x / |N x|, N = G for full support; THEORY 1 (arXiv 2605.10931) with its derivations.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from attn_flow.prediction.hermite import degrees, mode_rates
from attn_flow.prediction.spectral import Array, Spectrum, levels, spectrum


def exponential_rates(found: Spectrum, M: Array, N: Array, tol: float) -> dict[str, Any]:
    """g, kappa, tail and c_p of a linear flow; None where E is everything.

    A token near level j (next real part, and so on) leaves it once some component of an upper level i has grown,
    at rate (lambda_i - lambda_j)/|G e_j|; the mass still there decays like e^{-r_j t} with
    r_j = sum_{i<j} k_i (lambda_i - lambda_j)/|G e_j|, and r_2 = k kappa. tail = min_j r_j: for d >= 3 a lower level
    with a large |G e_j| can be the slowest, which THEORY 1's min(g, k kappa/p) leaves out.
    """
    if math.isinf(found.gap):
        return dict.fromkeys(("g", "kappa", "tail", "rate_w1", "rate_w2"))
    below = levels(M, tol)
    above = [level for level in below if level[0] > found.leading - found.gap / 2]
    below = below[len(above) :]
    sizes = [(found.leading, found.dimension)]
    decay: list[float] = []
    for real, imag, basis in below:
        speed = _speed(M, N, basis, real, imag)
        decay.append(sum(k * (upper - real) for upper, k in sizes) / speed if speed > 0 else math.inf)
        sizes.append((real, len(imag)))
    speed = _speed(M, N, found.basis, found.leading, np.array(found.frequencies))
    g = found.gap / speed if speed > 0 else math.inf
    tail = min(decay)
    jordan = found.case == "jordan"
    return {
        "g": g,
        "kappa": decay[0] / found.dimension,
        "tail": tail,
        "rate_w1": 0.0 if jordan else min(g, tail),
        "rate_w2": 0.0 if jordan else min(g, tail / 2),
    }


def _speed(M: Array, N: Array, basis: Array, real: float, imag: Array) -> float:
    """dt/dtau = |N e| of the slowest e in a level; averaged over one turn for a plane that rotates."""
    b = float(np.abs(imag).max(initial=0.0))
    if basis.shape[1] == 2 and b > 1e-12 * np.linalg.norm(M):  # Frobenius: no SVD per level
        A = (basis.T @ M @ basis - real * np.eye(2)) / b  # A^2 = -I, so e^{sA} = cos(s) I + sin(s) A
        s = 2 * np.pi * np.arange(512) / 512
        u = basis @ (np.cos(s)[:, None, None] * np.eye(2) + np.sin(s)[:, None, None] * A)[..., 0].T
        return float((np.linalg.norm(N @ u, axis=0) / np.linalg.norm(u, axis=0)).mean())
    return float(np.linalg.norm(N @ basis, 2))


def algebraic(found: Spectrum, tol: float) -> dict[str, float]:
    """Jordan block: powers of 1/t. A typical token is 1/t away; a share t^{-m} still crosses, m = rank N^{q-1}.

    Paired with their limits, tokens are t^{-min(1, m/p)} away in L^p. W_p is that too where more mass crosses one way
    than the other; where as much crosses back (an even law), the crossing masses replace each other and W_p ~ 1/t.
    """
    if found.case != "jordan" or found.frequencies:
        return {}
    singular = np.linalg.svd(found.limit)[1]
    m = int((singular > tol * singular[0]).sum())
    paired = min(1.0, m / 2)
    return {"algebraic_w1": 1.0, "algebraic_l2": paired, "algebraic_w2": paired, "algebraic_w2_even": 1.0}


def terminal(V: Array, tol: float, device: torch.device | str = "cpu") -> dict[str, Any]:
    """After the metastable phase a cluster that sees only itself moves by x' = P_x V x, V summed over heads."""
    top = spectrum(V, tol)
    return {
        "terminal_case": top.case,
        "terminal_basis": torch.tensor(np.ascontiguousarray(top.basis), device=device),
        "terminal_rate": None if math.isinf(top.gap) else top.gap,
    }


@dataclass(frozen=True)
class Stay:
    """What clusters at +-e do after they have formed; None where it is not known."""

    exit_rate: float | None = None  # 0: they stay; inf: no layer to rest in
    layer: float | None = None  # beta W2^2 of the Gaussian layer
    modes: tuple[float, ...] = ()  # largest growth rate of the layer's perturbations of degree 1, 2, ...
    why: str = ""


def stay(found: Spectrum, V: Array, G: Array, tol: float) -> Stay:
    """Whether clusters at +-e stay, for dim E = 1 and V e = v e, G e = gamma e.

    Write _ for compressions to e^perp, and y for the offset of a cluster, lambda = v gamma.
    lambda > 0: tokens of a cluster agree and contract. If gamma > 0 each cluster sees itself, y' = (V_ - v) y; if
        gamma < 0 it sees its antipode, y+' = v y+ + V_ y-: it leaves at rate v + max |Re spec V_|.
    lambda < 0: tokens of a cluster repel; m_beta = (Sigma^-1 + beta |gamma|)^-1 beta G_ y balances them at the Gaussian
        Sigma^-1 = beta (lambda - G_ V_)/|v|, W2^2 = sum_i |v|/(beta (lambda - lambda_i)). It is permanent only where
        all its modes are stable (`hermite`): the offset, degree 1, with y' = (V_ - lambda G_^-1) y, and every other
        degree (both signs if gamma < 0). V_ and G_ diagonal of the signs of v and gamma suffice. Modes of degree n
        scale like (v V_^-1)^n: where that is larger than 1, higher ones grow ever faster and there is no layer at all.
    """
    if found.case != "fixed" or found.dimension != 1:
        return Stay(why=f"derived for one fixed direction; here case {found.case!r}, dim E = {found.dimension}")
    e = found.basis[:, 0]
    v, gamma, size = float(e @ V @ e), float(e @ G @ e), float(np.linalg.norm(V, 2) * np.linalg.norm(G, 2))
    if np.linalg.norm(V @ e - v * e) > math.sqrt(tol) * np.linalg.norm(V, 2):
        return Stay(why="V e is not along e: V moves the clusters at once")
    if abs(found.leading) <= tol * size:
        return Stay(why="the leading eigenvalue is 0: clusters neither contract nor repel")
    across = np.linalg.svd(e[None])[2][1:].T
    V_, G_ = across.T @ V @ across, across.T @ G @ across
    real = lambda A: np.linalg.eigvals(A).real
    if found.leading > 0:
        leaves = real(V_).max() - v if gamma > 0 else v + np.abs(real(V_)).max()
        seen = "itself" if gamma > 0 else "its antipode"
        return Stay(max(0.0, float(leaves)), why=f"leading eigenvalue > 0: each cluster sees {seen} and collapses")
    if np.linalg.matrix_rank(G_, tol=tol * np.linalg.norm(G, 2)) < len(G_):
        return Stay(why="leading eigenvalue < 0 and G is singular across E")
    block = G_ @ V_
    if np.linalg.norm(block - block.T) > math.sqrt(tol) * size:
        D = V_ - found.leading * np.linalg.inv(G_)
        leaves = float(real(D).max() if gamma > 0 else np.abs(real(D)).max())
        why = "leading eigenvalue < 0, but G V is not symmetric across E: the layer is no Gaussian"
        return Stay(leaves if leaves > 0 else None, why=f"{why}; the exit rate is its offset's, others may be faster")
    lower = np.linalg.eigvalsh((block + block.T) / 2)
    layer = float((abs(v) / (found.leading - lower)).sum())
    # A cluster that sees its antipode is one that sees itself, reflected: G, V, gamma and v change sign.
    sign = 1.0 if gamma > 0 else -1.0
    spectra = [mode_rates(sign * V_, sign * G_, sign * v, sign * gamma, n).real for n in degrees(len(V_))]
    modes = tuple(float(z.max() if gamma > 0 else np.abs(z).max()) for z in spectra)
    if np.abs(np.linalg.eigvals(V_)).min() < abs(v) * (1 - tol) and max(modes) > tol * abs(v):
        why = "high modes of it grow ever faster (an eigenvalue of V across E is below |v|): no layer forms"
        return Stay(math.inf, layer, modes, f"leading eigenvalue < 0: {why}")
    fastest = 1 + next(
        i for i, rate in enumerate(modes) if rate >= max(modes) - tol * abs(v)
    )  # of equal ones the first
    if modes[fastest - 1] <= tol * abs(v):
        why = f"a layer, permanent (modes to degree {len(modes)} decay)"
        return Stay(0.0, layer, modes, f"leading eigenvalue < 0: {why}")
    why = f"a layer, left at the exit rate of its modes of degree {fastest}"
    return Stay(modes[fastest - 1], layer, modes, f"leading eigenvalue < 0: {why}")
