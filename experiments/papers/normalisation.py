"""Where the normalisation sits in a layer decides how fast tokens become equal: exponentially or only like 1/t^2.

arXiv 2510.22026 compares Post-LN, Pre-LN, Peri-LN, nGPT and LN-scaling. Eight tokens with equal pairwise cosines rho,
0.05 at the start, move under softmax attention with beta = 2 and V the identity; nGPT has alpha = 0.5.

(a) The distance 1 - rho of the tokens from equality. (b) The local exponent over the predicted one, also for random
tokens (dotted); the prediction is an asymptote, reached after the first decade.

Differs from the paper: equal cosines reduce every scheme to one or two ODEs, so the whole path, not only its exponent,
is compared.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from attn_flow import Attention, Euclidean, Sphere, flow
from attn_flow.attention import Field, layer_norm_scaling, ngpt, peri_norm, pre_norm
from attn_flow.base.progress import progress_bar
from attn_flow.experiments.claims import at_most, claim
from attn_flow.experiments.figures import COLOURS, THEORY, label, panels
from attn_flow.theory import normalisation as theory

if TYPE_CHECKING:
    from matplotlib.figure import Figure

BETA, N, RHO0, ALPHA = 2.0, 8, 0.05, 0.5
SCHEMES: dict[str, tuple[Callable[[Field], Field], float]] = {
    "post": (lambda field: field, 14.0),
    "pre": (pre_norm, 120.0),
    "peri": (peri_norm, 120.0),
    "ngpt": (partial(ngpt, alpha=ALPHA), 28.0),
    "ln_scaling": (layer_norm_scaling, 60.0),
}
# t -> the variable in which log(1 - rho) is a line, and the slope of that line
LINES = {
    "post": (lambda t: t, -2.0, "e^{-2t}"),
    "pre": (lambda t: np.log(t + 1), -2.0, "t^{-2}"),
    "peri": (lambda t: np.log(t + 1), -2.0, "t^{-2}"),
    "ngpt": (lambda t: t, -2 * ALPHA, r"e^{-2\alpha t}"),
    "ln_scaling": (lambda t: np.sqrt(t + 1), -4.0, r"e^{-4\sqrt{t}}"),
}
NAMES = {"post": "Post-LN", "pre": "Pre-LN", "peri": "Peri-LN", "ngpt": "nGPT", "ln_scaling": "LN-scaling"}


def compute(quick: bool = False, seed: int = 0, progress: bool = False) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    runs = []
    with progress_bar("normalisation", len(SCHEMES), progress) as advance:
        for name in SCHEMES:
            runs.append(run(name, 0.3 if quick else 0.05, generator))
            advance()
    claims = [
        at_most(f"{r['scheme']}: largest distance of log(1 - rho) from the reduced ODE", r["error"], 1e-2, "derived")
        for r in runs
    ]
    for key, words in (("slope", "slope of log(1 - rho) in its own variable"), ("random_slope", "from random tokens")):
        claims += [
            claim(f"{r['scheme']}: {words}", r[key], r["expected"], 0.05 * abs(r["expected"]), "theorem") for r in runs
        ]
    return {"seed": seed, "n": N, "beta": BETA, "rho0": RHO0, "alpha": ALPHA, "runs": runs, "claims": claims}


def run(name: str, h: float, generator: torch.Generator) -> dict[str, Any]:
    """1 - rho of equiangular tokens and the mean of 1 - cosine of random ones, with the reduced ODE."""
    normalise, T = SCHEMES[name]
    t = torch.linspace(0, T, 81, dtype=torch.float64)
    equal = torch.linalg.cholesky(torch.full((N, N), RHO0) + (1 - RHO0) * torch.eye(N)).double()
    random = Sphere().uniform(N, N, generator=generator, dtype=torch.float64)
    random = Sphere().retract(random + 0.5 * random.mean(0))
    x0 = torch.stack([equal / equal.norm(dim=-1, keepdim=True), random])
    field = normalise(Attention.identity(N, BETA))
    path = flow(field, x0, t, h=h, geometry=Euclidean() if field.needs_euclidean else Sphere())
    theta = path.x / path.x.norm(dim=-1, keepdim=True)
    # 1 - cosine as |difference|^2 / 2: no cancellation as rho -> 1
    squared = torch.stack(
        [torch.cdist(x, x, compute_mode="donot_use_mm_for_euclid_dist").square().sum((-1, -2)) for x in theta]
    )
    gap = (squared / (2 * N * (N - 1))).numpy()
    reduced, _ = theory.solve(name, t.numpy(), BETA, N, RHO0, alpha=ALPHA)
    line, expected, _ = LINES[name]
    u = line(t.numpy())
    slope = lambda y: float((np.log(y[-1]) - np.log(y[60])) / (u[-1] - u[60]))
    return {
        "scheme": name,
        "t": t.tolist(),
        "gap": gap[:, 0].tolist(),
        "random": gap[:, 1].tolist(),
        "reduced": reduced.tolist(),
        "error": float(np.abs(np.log(gap[:, 0] / reduced)).max()),
        "slope": slope(gap[:, 0]),
        "random_slope": slope(gap[:, 1]),
        "expected": expected,
    }


def plot(numbers: dict[str, Any]) -> Figure:
    figure, (a, b) = panels(2, height=3.4)
    for r, colour in zip(numbers["runs"], COLOURS):
        t = np.array(r["t"])
        name, law = NAMES[r["scheme"]], LINES[r["scheme"]][2]
        a.loglog(t[1:], r["gap"][1:], color=colour, linewidth=2, label=f"{name}: ${law}$")
        a.loglog(t[1:], r["reduced"][1:], **THEORY)
        line, expected, _ = LINES[r["scheme"]]
        for key, style in (("gap", "-"), ("random", ":")):
            local = np.gradient(np.log(r[key]), line(t)) / expected
            b.plot(t[1:-1] / t[-1], local[1:-1], color=colour, linestyle=style)
    a.set_ylim(1e-10, 2)
    b.axhline(1, **THEORY)
    b.set_ylim(0, 1.5)
    label(a, "decay (dashed: reduced ODE)", "time t (layers)", r"$1-$ cosine of two tokens")
    label(b, "local exponent", "time / last time", "measured / predicted", legend=False)
    return figure
