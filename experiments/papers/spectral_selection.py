"""With one symmetric matrix for scores and values, tokens align with its largest eigenvector or split into two signs.

arXiv 2604.26085, Q^T K = V = V^T.

(a) A dominating positive eigenvalue: 12 tokens with positive first coordinates all reach its eigenvector e_1, here the
worst token of each start. (b) Negative eigenvalues: uniform starts of n tokens end on both sides of the most negative
direction. An odd n needs an unbalanced split, which is stable only above the dashed beta, abs(log(n_+/n_-))/(2
abs(lambda)).

Differs from the paper: stability is decided by the full Jacobian spectrum in closed form (checked here against
autograd), and basins are measured from random starts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from attn_flow import Attention, Sphere, flow
from attn_flow.base.progress import progress_bar
from attn_flow.experiments.claims import at_most, claim
from attn_flow.experiments.figures import COLOURS, THEORY, label, panels, shades
from attn_flow.theory import spectral_selection as theory

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NEGATIVE = (-0.4, -1.0, -4.0)
SPLITS = ((2, 1.0), (4, 1.0), (8, 1.0), (3, 2.0), (3, 0.03))  # n, beta; the last split is not stable


def compute(quick: bool = False, seed: int = 0, progress: bool = False) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    starts = 24 if quick else 200
    with progress_bar("spectral selection", 4, progress) as advance:
        jacobian = [check_jacobian(generator) for _ in range(6 if quick else 30)]
        advance()
        aligned = alignment(starts, generator)
        advance()
        table = []
        for n, beta in SPLITS:
            fraction = split_fraction(n, np.array([beta]), starts, generator)[0]
            table.append({"n": n, "beta": beta, "fraction": fraction, "expected": float(split_is_stable(n, beta))})
        advance()
        betas = np.geomspace(0.02, 2, 6 if quick else 16)
        basin = {str(n): split_fraction(n, betas, starts, generator) for n in (3, 5)}
        stable = {str(n): [split_is_stable(n, float(b)) for b in np.geomspace(0.02, 2, 200)] for n in (3, 5)}
        advance()
    claims = [
        at_most("Jacobian eigenvalues: largest distance from autograd", max(jacobian), 1e-8, "derived"),
        claim(
            "fraction of starts in the cone of the dominating positive eigenvalue that align",
            aligned["in_cone"],
            1.0,
            0.0,
            source="theorem",
        ),
    ]
    for row in table:
        what = f"V = diag(-0.4, -1, -4), n = {row['n']}, beta = {row['beta']:g}: fraction of starts that split"
        claims.append(claim(what, row["fraction"], row["expected"], 0.0))
    return {
        "seed": seed,
        "starts": starts,
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


def check_jacobian(generator: torch.Generator) -> float:
    """Largest error of the formula for the tangent spectrum, at a random sign-split (or homogeneous) state."""
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
    return float(np.abs(measured - formula).max())


def run(lam: tuple[float, ...], beta: float | Tensor, x0: Tensor, T: float) -> Tensor:
    """The tokens (times, ..., n, d) from x0 (..., n, d) until T, with G = V = diag(lam)."""
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
    figure, (a, b) = panels(2)
    aligned = numbers["aligned"]
    time = np.array(aligned["t"])
    for path, colour in zip(aligned["worst"], shades(len(aligned["worst"]))):
        a.semilogy(time, 1 - np.array(path), color=colour, linewidth=0.8)
    a.semilogy(time, 2 * np.exp(-4 * time), **THEORY, label=r"$e^{-2(\lambda_1-\lambda_2)t}$")
    a.set_ylim(1e-8, 2)
    label(a, "alignment, V = diag(3, 1, -0.5)", "time t", r"$1-\min_i\langle x_i,e_1\rangle$")
    basin = numbers["basin"]
    for (n, fraction), colour in zip(basin["fraction"].items(), COLOURS):
        b.semilogx(basin["beta"], fraction, "o-", color=colour, markersize=4, linewidth=1, label=f"n = {n}")
        threshold = basin["fine"][int(np.argmax(basin["stable"][n]))]
        b.axvline(threshold, color=colour, linestyle="--", linewidth=1.3, label=f"stable above, n = {n}")
    label(b, "split by sign, V = diag(-0.4, -1, -4)", r"$\beta$", "fraction of starts that split")
    return figure
