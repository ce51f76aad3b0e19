"""How fast: the rates of each phase, read off the spectra of M = V G (concentration) and of V (what follows).

Zero-temperature flow x' = P_x M x / |N x|, N = G for full support; THEORY 1 (arXiv 2605.10931) with its derivations.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch

from attn_flow.spectrum import Array, Spectrum, levels, spectrum


def rates(found: Spectrum, M: Array, N: Array, tol: float) -> dict[str, Any]:
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
    g = found.gap / _speed(M, N, found.basis, found.leading, np.array(found.frequencies))
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
    if basis.shape[1] == 2 and b > 1e-12 * np.linalg.norm(M, 2):
        A = (basis.T @ M @ basis - real * np.eye(2)) / b  # A^2 = -I, so e^{sA} = cos(s) I + sin(s) A
        s = 2 * np.pi * np.arange(512) / 512
        u = basis @ (np.cos(s)[:, None, None] * np.eye(2) + np.sin(s)[:, None, None] * A)[..., 0].T
        return float((np.linalg.norm(N @ u, axis=0) / np.linalg.norm(u, axis=0)).mean())
    return float(np.linalg.norm(N @ basis, 2))


def algebraic(found: Spectrum, tol: float) -> dict[str, float]:
    """Jordan block: a typical token is 1/t away, and the mass still crossing is t^{-m}, m = rank N^{q-1}; so
    W_p ~ t^{-min(1, m/p)}."""
    if found.case != "jordan" or found.frequencies:
        return {}
    singular = np.linalg.svd(found.limit)[1]
    m = int((singular > tol * singular[0]).sum())
    return {"algebraic_w1": 1.0, "algebraic_w2": min(1.0, m / 2)}


def terminal(values: Array, found: Spectrum | None, tol: float) -> dict[str, Any]:
    """After the metastable phase each cluster sees only itself: x' = P_x V x, V summed over heads."""
    top = spectrum(values, tol)
    known: dict[str, Any] = {
        "terminal_case": top.case,
        "terminal_basis": torch.from_numpy(np.ascontiguousarray(top.basis)),
        "terminal_rate": None if math.isinf(top.gap) else top.gap,
    }
    if found is None or found.case == "stationary":
        return known
    E = found.basis
    v = float(np.linalg.eigvalsh((E.T @ values @ E + E.T @ values.T @ E) / 2).max())
    outside = E - top.basis @ (top.basis.T @ E)
    stays = v < 0 or np.linalg.norm(outside, 2) <= math.sqrt(tol)
    return known | {"exit_rate": 0.0 if stays else top.leading - v}


def layer(found: Spectrum, V: Array, G: Array, M: Array, tol: float) -> tuple[float | None, str]:
    """beta W2^2 = sum_{i>1} |v_1|/(lambda_1 - lambda_i), where the layer is Gaussian: dim E = 1, V e = v_1 e, v_1 < 0.

    Inside the cluster m_beta(G x) = (Sigma^{-1} + beta g_1)^{-1} beta G_perp y must equal (v_1 / V_perp) y, hence
    Sigma^{-1} = beta (lambda_1 - G_perp V_perp) / |v_1|, which is a covariance if G_perp V_perp is symmetric.
    """
    if found.case != "fixed" or found.dimension != 1:
        return None, f"it is derived for one fixed direction; here case {found.case!r}, dim E = {found.dimension}"
    e = found.basis[:, 0]
    v = float(e @ V @ e)
    if v >= 0:
        return None, f"<e, V e> = {v:.4g} >= 0, so the cluster collapses or leaves"
    if np.linalg.norm(V @ e - v * e) > math.sqrt(tol) * np.linalg.norm(V, 2):
        return None, "V moves E, so no cluster stays there"
    across = np.linalg.svd(e[None])[2][1:].T
    block = (across.T @ G @ across) @ (across.T @ V @ across)
    if np.linalg.norm(block - block.T) > math.sqrt(tol) * np.linalg.norm(M, 2):
        return None, "G V is not symmetric across E, so the layer is no Gaussian"
    lower = np.linalg.eigvalsh((block + block.T) / 2)
    return float((-v / (found.leading - lower)).sum()), f"<e, V e> = {v:.4g} < 0: a layer of width ~ beta^-1/2 stays"
