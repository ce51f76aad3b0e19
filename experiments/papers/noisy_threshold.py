"""Noise keeps tokens apart; as it falls, clusters form smoothly if attention is warm, and with a jump if it is cold.

arXiv 2606.05140 states a threshold beta* with I_{d/2+1}/I_{d/2}(beta*) = 1/d; only its abstract is known to us, so what
it separates is derived here. Noise D makes degree 1 of the uniform distribution marginal at D_c = gamma_1/(d-1). There
degree 2 follows degree 1, whose amplitude a obeys d log a/dt = q a^2 with q of the sign of d I_{d/2+1} - I_{d/2}. For
beta < beta* (q negative) clusters grow from nothing as D falls below D_c; for beta > beta* (q positive) an ordered
distribution survives beside the uniform one above D_c. The figure shows the measured q and the predicted beta*.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from attn_flow import Attention, VonMisesFisher, density_flow
from attn_flow.base.progress import progress_bar
from attn_flow.experiments.claims import at_least, at_most, claim
from attn_flow.experiments.figures import COLOURS, THEORY, label, panels
from attn_flow.theory.metastability import growth_rate
from attn_flow.theory.noise import jump_beta

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SMALL, ABOVE = 0.02, 1.02  # mean of the small start; D over D_c where two distributions are stable
SCANNED = (1.0, 4.0)  # where a threshold might have been found


def compute(quick: bool = False, seed: int = 0, progress: bool = False) -> dict[str, Any]:
    """Signs of q over beta in d = 2, 3, and on the circle small and ordered starts just above D_c."""
    steps = np.linspace(*SCANNED, 3 if quick else 13)
    runs = []
    with progress_bar("noisy threshold", 2 * len(steps) + 4, progress) as advance:
        for d in (2, 3):
            q = []
            for beta in steps:
                q.append(cubic(float(beta), d))
                advance()
            runs.append({"d": d, "beta": steps.tolist(), "q": q, "found": crossing(steps, q)})
        ends = {}
        for name, factor in (("below", 0.6), ("above", 1.5)):
            for start, kappa in (("small", 0.05), ("ordered", 3.0)):
                ends[f"{name}, {start}"] = survivor(factor * jump_beta(2), kappa)
                advance()
    claims = [
        claim(f"d = {r['d']}: q changes sign at beta*", r["found"], jump_beta(r["d"]), 0.15 if quick else 0.05)
        for r in runs
    ]
    claims += [
        at_most("circle, below beta*: an ordered start decays above D_c", ends["below, ordered"], 0.5, "derived"),
        at_least("circle, above beta*: an ordered start survives there", ends["above, ordered"], 0.5, "derived"),
        at_most("circle, above beta*: a small start decays there", ends["above, small"], 0.9, "derived"),
    ]
    return {"seed": seed, "runs": runs, "ends": ends, "claims": claims}


def attention_and_noise(beta: float, d: int) -> tuple[Attention, float]:
    """Unnormalised attention with Q = K = V = I, and D_c = gamma_1/(d-1)."""
    attention = Attention.identity(d, beta, kind="unnormalised")
    return attention, float(growth_rate(1, beta, d, "unnormalised")) / (d - 1)


def cubic(beta: float, d: int) -> float:
    """d log a_1/dt / (D_c a_1^2) at D = D_c, once degree 2 is slaved to degree 1."""
    attention, D = attention_and_noise(beta, d)
    slow = 2 * d * D - float(growth_rate(2, beta, d, "unnormalised"))  # at which degree 2 is slaved
    bump = lambda x: 1 + d * SMALL * x[:, 0]
    path = density_flow(
        attention, bump, [0.0, 8 / slow, 12 / slow], diffusion=D, bandwidth=10 if d == 2 else 6, tol=1e-11
    )
    a = path.amplitudes()[:, 1]
    return float(path.growth_rates(1)[1] / (D * a[1] * a[2]))


def survivor(beta: float, kappa: float) -> float:
    """|mean| at a late time over |mean| at the start, from a von Mises-Fisher distribution, just above D_c."""
    attention, D = attention_and_noise(beta, 2)
    mu = VonMisesFisher(torch.eye(2, dtype=torch.float64)[0], kappa)
    path = density_flow(attention, mu, [0.0, 20 / D], diffusion=ABOVE * D, bandwidth=24, tol=1e-7, tail=1e-4)
    mean = path.moments()[0].norm(dim=-1)
    return float(mean[1] / mean[0])


def crossing(beta: np.ndarray, q: list[float]) -> float:
    """Where q first turns positive, by linear interpolation; NaN where it does not."""
    for i in range(len(q) - 1):
        if q[i] < 0 <= q[i + 1]:
            return float(beta[i] - q[i] * (beta[i + 1] - beta[i]) / (q[i + 1] - q[i]))
    return float("nan")


def plot(numbers: dict[str, Any]) -> Figure:
    """q over beta, with the predicted threshold dashed."""
    figure, axes = panels(2)
    for panel, r in zip(axes, numbers["runs"]):
        panel.plot(r["beta"], r["q"], "o-", color=COLOURS[0], label="measured")
        panel.axhline(0, color="0.7", lw=0.8)
        panel.axvline(jump_beta(r["d"]), label=r"predicted $\beta^*$", **THEORY)
        label(panel, f"dimension d = {r['d']}", r"$\beta$", "growth q of the clusters / $D_c$")
    return figure
