"""Scores and values with one symmetric matrix: tokens align with a dominating positive eigenvalue, or split by sign.

arXiv 2604.26085, Q^T K = V = V^T. Differs from the paper: stability is decided by the full Jacobian spectrum in closed
form (checked here against autograd), and basins are measured from random starts over (n, beta).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from attn_flow import Attention, Sphere, flow
from attn_flow.base.progress import progress_bar
from attn_flow.experiments.claims import at_most, claim
from attn_flow.experiments.figures import COLOURS, caption, label, panels, shades
from attn_flow.theory import spectral_selection as theory

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NEGATIVE = (-0.4, -1.0, -4.0)
SPLITS = {(2, 1.0): 1.0, (4, 1.0): 1.0, (8, 1.0): 1.0, (3, 2.0): 1.0, (3, 0.03): 0.0}


def compute(quick: bool = False, seed: int = 0, progress: bool = False) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    starts = 24 if quick else 200
    with progress_bar("spectral selection", 4, progress) as advance:
        jacobian = [check_jacobian(generator) for _ in range(6 if quick else 30)]
        advance()
        aligned = alignment(starts, generator)
        advance()
        table = []
        for (n, beta), expected in SPLITS.items():
            fraction = split_fraction(n, np.array([beta]), starts, generator)[0]
            table.append({"n": n, "beta": beta, "fraction": fraction, "expected": expected})
        advance()
        betas = np.geomspace(0.02, 2, 6 if quick else 16)
        basin = {str(n): split_fraction(n, betas, starts, generator) for n in (3, 5)}
        stable = {str(n): [split_is_stable(n, float(b)) for b in np.geomspace(0.02, 2, 200)] for n in (3, 5)}
        advance()
    claims = [
        at_most(
            "Jacobian eigenvalues: largest distance from autograd", max(j["error"] for j in jacobian), 1e-8, "derived"
        ),
        claim(
            "fraction of starts in the cone of the dominating positive eigenvalue that align",
            aligned["in_cone"],
            1.0,
            0.0,
            source="theorem",
        ),
    ]
    for row in table:
        what = f"V = diag(-.4, -1, -4), n = {row['n']}, beta = {row['beta']:g}: fraction of starts that split"
        claims.append(claim(what, row["fraction"], row["expected"], 0.0, "observed"))
    return {
        "seed": seed,
        "starts": starts,
        "jacobian": jacobian,
        "aligned": aligned,
        "table": table,
        "basin": {
            "beta": betas.tolist(),
            "fraction": basin,
            "fine": np.geomspace(0.02, 2, 200).tolist(),
            "stable": stable,
        },
        "claims": claims,
    }


def check_jacobian(generator: torch.Generator) -> dict[str, Any]:
    """Tangent spectrum at a sign-split (or homogeneous) state of a random spectrum: autograd and formula, sorted."""
    draw = lambda low, high: int(torch.randint(low, high, (1,), generator=generator))
    d, n_plus, n_minus, p = draw(3, 6), draw(1, 4), draw(0, 4), 0
    lam = 3 * torch.randn(d, generator=generator, dtype=torch.float64)
    beta = float(2 * torch.rand(1, generator=generator))
    V = torch.diag(lam)
    attention = Attention.from_matrices(V, V, beta)
    sign = torch.cat([torch.ones(n_plus), -torch.ones(n_minus)]).double()
    x = sign[:, None] * torch.eye(d, dtype=torch.float64)[p]
    n = n_plus + n_minus
    velocity = lambda y: Sphere().tangent(y, attention.drift(y))
    J = torch.autograd.functional.jacobian(velocity, x)[:, 1:, :, 1:].reshape(n * (d - 1), n * (d - 1))
    measured = np.sort(np.linalg.eigvals(J.numpy()).real)
    if n_minus:
        formula = theory.sign_split_eigenvalues(lam.numpy(), p, n_plus, n_minus, beta)
    else:
        formula = theory.homogeneous_eigenvalues(lam.numpy(), p, n)
    return {"measured": measured.tolist(), "theory": formula.tolist(), "error": float(np.abs(measured - formula).max())}


def run(lam: tuple[float, ...], beta: float | Tensor, x0: Tensor, T: float) -> Tensor:
    """|<x, e_p>| signed, (T, starts, n, d)."""
    V = torch.diag(torch.tensor(lam, dtype=torch.float64))
    size = max(map(abs, lam))
    return flow(Attention.from_matrices(V, V, beta), x0, torch.linspace(0, T, 31), h=0.8 / size).x


def alignment(starts: int, generator: torch.Generator) -> dict[str, Any]:
    """V = diag(3, 1, -.5), beta = 1: tokens in the cone <x, e_1> > .3 of the dominating positive eigenvalue."""
    x0 = Sphere().uniform((starts, 12), 3, generator=generator, dtype=torch.float64)
    x0 = torch.where(x0[..., :1] < 0, -x0, x0)
    x0 = Sphere().retract(x0 + torch.tensor([0.5, 0, 0], dtype=torch.float64))
    x = run((3.0, 1.0, -0.5), 1.0, x0, 8.0)
    cosine = x[..., 0].amin(-1)  # the worst token
    return {
        "t": np.linspace(0, 8, 31).tolist(),
        "worst": cosine.T[:30].tolist(),
        "in_cone": float((cosine[-1] > 1 - 1e-4).double().mean()),
    }


def split_fraction(n: int, betas: np.ndarray, starts: int, generator: torch.Generator) -> list[float]:
    """Fraction of uniform starts that end on +-e_3 with both signs present, V = diag(-.4, -1, -4), for every beta."""
    x0 = Sphere().uniform((starts, 1, n), 3, generator=generator, dtype=torch.float64)
    z = run(NEGATIVE, torch.as_tensor(betas, dtype=torch.float64)[:, None], x0, 40.0)[-1][..., 2]
    both = (z > 0).any(-1) & (z < 0).any(-1)
    return ((z.abs() > 1 - 1e-4).all(-1) & both).double().mean(0).tolist()


def split_is_stable(n: int, beta: float) -> bool:
    """Whether some split of n tokens along the most negative direction has a negative spectrum."""
    return any(theory.sign_split_eigenvalues(NEGATIVE, 2, k, n - k, beta).max() < 0 for k in range(1, n))


def plot(numbers: dict[str, Any]) -> Figure:
    starts = numbers["starts"]
    figure, (a, b, c) = panels(3, title="Spectral selection: G = V symmetric")
    for run_ in numbers["jacobian"]:
        a.plot(run_["theory"], run_["measured"], "o", markersize=3, alpha=0.6)
    low, high = a.get_xlim()
    a.plot([low, high], [low, high], color="black", linestyle="--", linewidth=0.8)
    worst = max(j["error"] for j in numbers["jacobian"])
    label(a, f"Jacobian spectra (largest error {worst:.0e})", "closed form", "autograd", legend=False)
    aligned = numbers["aligned"]
    for path, colour in zip(aligned["worst"], shades(len(aligned["worst"]))):
        b.semilogy(aligned["t"], 1 - np.array(path), color=colour, linewidth=0.7)
    time = np.array(aligned["t"])
    b.semilogy(
        time, 2 * np.exp(-4 * time), color="black", linestyle="--", linewidth=1, label=r"$e^{-2(\lambda_1-\lambda_2)t}$"
    )
    b.set_ylim(1e-8, 2)
    label(b, "V = diag(3, 1, -.5): alignment in the cone", "time t", r"$1-\min_i\langle x_i,e_1\rangle$")
    basin = numbers["basin"]
    for (n, fraction), colour in zip(basin["fraction"].items(), COLOURS):
        c.semilogx(
            basin["beta"], fraction, "o-", color=colour, markersize=4, linewidth=0.8, label=f"n={n}: starts that split"
        )
        threshold = basin["fine"][int(np.argmax(basin["stable"][n]))]
        c.axvline(
            threshold,
            color=colour,
            linestyle="--",
            linewidth=1,
            label=f"n={n}: a split is stable above {threshold:.3f}",
        )
    label(c, "V = diag(-.4, -1, -4): polarisation", r"$\beta$", "fraction of starts")
    caption(
        figure,
        f"(a) random spectra at homogeneous and sign-split states. (b) {min(30, starts)} of {starts} starts of 12 "
        f"tokens, positive first coordinates. (c) {starts} uniform starts per point, t=40; odd n needs an unbalanced "
        f"split, which holds only above |log(n+/n-)|/(2|lambda|). Seed {numbers['seed']}.",
    )
    return figure
