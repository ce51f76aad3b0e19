"""Random weights that all tokens share pull tokens together or push them apart, at rates that can be computed.

arXiv 2604.26898 (common noise), arXiv 2601.21942 (random value matrices). Points are exponents (Lyapunov exponents)
measured on pairs of tokens, with bars of two standard errors; dashed lines are theory. Where the exponent is negative,
a pair returns to equal (a) or opposite (b) tokens.

(a) Three kinds of noise, the same for all tokens; squares have linear noise and attention of strength a. Nearby tokens
approach each other except under quadratic noise in high dimension. (b) With random value matrices a pair leaves
opposite positions below a critical beta and returns to them above it.

Differs from the papers: exponents are measured at a finite layer width h. Their bias is linear in h, up to about h
(d-1)^2/2; h shrinks like d^{-2}, and that bias is part of the tolerance.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from attn_flow import Attention, Sphere, euler, flow
from attn_flow.base.progress import progress_bar
from attn_flow.dynamics.noise import Noise, gaussian_field, linear
from attn_flow.experiments.claims import claim
from attn_flow.experiments.figures import COLOURS, THEORY, label, panels, shades
from attn_flow.theory import noise as theory

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# name: the noise for a generator, and kappa'(1); kappa(1) = 1
FIELDS: dict[str, tuple[Callable[[torch.Generator], Noise], float]] = {
    "linear": (lambda generator: linear(1.0, generator), 1.0),
    "mixed": (lambda generator: gaussian_field(lambda rho: (1 + rho) / 2, generator=generator), 0.5),
    "quadratic": (lambda generator: gaussian_field(lambda rho: rho**2, generator=generator), 2.0),
}
GAP = 1e-4


def compute(quick: bool = False, seed: int = 0, progress: bool = False) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    dims = (4, 8) if quick else (3, 4, 6, 8, 12, 16)
    h, pairs = (0.01, 500) if quick else (0.005, 800)
    betas = np.linspace(0.2, 2.4, 6 if quick else 12)
    exponents, transition = [], {}
    with progress_bar("noise", 3 * len(dims) + 6, progress) as advance:
        for name in FIELDS:
            for d in dims:
                exponents.append(exponent(name, d, 0.0, h, pairs, generator))
                advance()
        for a in (-1.0, 0.5, 1.0):
            exponents.append(exponent("linear", 8, a, h, pairs, generator))
            advance()
        for d in (4, 8) if quick else (4, 8, 12):
            transition[str(d)] = antipodal(d, betas, h, pairs // 2, generator)
            advance()
    claims = [
        claim(
            f"exponent of 1 - rho, {e['kernel']} kernel, d = {e['d']}, a = {e['a']:g}",
            e["exponent"],
            e["theory"],
            4 * e["error"] + e["bias"],
        )
        for e in exponents
    ]
    for dim, run in transition.items():
        slope = abs(float(np.gradient(run["theory"], betas)[np.abs(betas - run["critical"]).argmin()]))
        tolerance = (4 * max(run["error"]) + width(h, int(dim)) * (int(dim) - 1) ** 2 / 2) / slope
        what = f"random values, d = {dim}: beta where antipodal pairs turn attracting"
        claims.append(claim(what, run["zero"], run["critical"], tolerance))
    return {
        "seed": seed,
        "h": h,
        "pairs": pairs,
        "exponents": exponents,
        "beta": betas.tolist(),
        "transition": transition,
        "claims": claims,
    }


def width(h: float, d: int) -> float:
    """A layer width whose bias h (d-1)^2/2 is that of d = 6 at most."""
    return h * min(1.0, 25 / (d - 1) ** 2)


def close_pairs(d: int, count: tuple[int, ...], generator: torch.Generator, sign: float = 1.0) -> Tensor:
    """Pairs (..., 2, d) a small angle apart, or (sign = -1) the same angle from antipodal."""
    x = Sphere().uniform(count, d, generator=generator, dtype=torch.float64)
    u = torch.randn(*count, d, generator=generator, dtype=torch.float64)
    y = Sphere().retract(x + GAP * Sphere().retract(Sphere().tangent(x, u)))
    return torch.stack([x, sign * y], -2)


def exponent(name: str, d: int, a: float, h: float, pairs: int, generator: torch.Generator) -> dict[str, Any]:
    """Mean of log((1 - rho_T)/(1 - rho_0))/T over pairs, drift a times softmax attention at beta = 1.

    T <= 1 ends before 1 - rho has changed by e^4 or so: a positive exponent would otherwise leave the linear regime.
    """
    noise, slope = FIELDS[name]
    expected = float(theory.lyapunov(d, 1.0, slope, a))
    T, h = min(1.0, 4 / max(abs(expected), 1e-3)), width(h, d)
    eye = torch.eye(d, dtype=torch.float64)
    x0 = close_pairs(d, (pairs,), generator)
    attention = Attention.from_matrices(eye, a * eye, 1.0)
    path = flow(attention, x0, [0.0, T], step=euler, h=h, noise=noise(generator))
    gap = (path.x[..., 0, :] - path.x[..., 1, :]).square().sum(-1) / 2
    growth = (gap[1] / gap[0]).log()
    return {
        "kernel": name,
        "d": d,
        "a": a,
        "exponent": float(growth.mean() / T),
        "error": float(growth.std() / T / math.sqrt(pairs)),
        "bias": h * (d - 1) ** 2 / 2,
        "theory": expected,
    }


def random_values(beta: Tensor, d: int, generator: torch.Generator) -> Noise:
    """xi(x_i) = W m_i, with m_i the softmax mean at beta and W Gaussian, fresh in every layer and pair."""
    attention = Attention.identity(d, beta)

    def noise(x: Tensor) -> Tensor:
        W = torch.randn(*x.shape[:-2], d, d, generator=generator, dtype=x.dtype, device=x.device)
        return attention.drift(x) @ W

    return noise


def antipodal(d: int, betas: np.ndarray, h: float, pairs: int, generator: torch.Generator) -> dict[str, Any]:
    """Exponent of 1 + rho from almost antipodal pairs under random values, for every beta, T = 1."""
    noise = random_values(torch.as_tensor(betas)[:, None], d, generator)
    x0 = close_pairs(d, (pairs, len(betas)), generator, -1.0)
    eye = torch.eye(d, dtype=torch.float64)
    still = Attention.from_matrices(eye, 0 * eye)
    path = flow(still, x0, [0.0, 1.0], step=euler, h=width(h, d), noise=noise)
    gap = (path.x[..., 0, :] + path.x[..., 1, :]).square().sum(-1) / 2
    growth = (gap[1] / gap[0]).log()
    mean = growth.mean(0).numpy()
    # the exponent falls with beta: its zero by interpolation on the line through the points around it
    return {
        "exponent": mean.tolist(),
        "error": (growth.std(0) / math.sqrt(pairs)).tolist(),
        "theory": theory.antipodal_lyapunov(betas, d).tolist(),
        "zero": float(np.interp(0.0, -mean, betas)),
        "critical": float(theory.critical_beta(d)),
    }


def plot(numbers: dict[str, Any]) -> Figure:
    figure, (a, b) = panels(2, height=3.5)
    bars: dict[str, Any] = {"fmt": "o", "markersize": 5}  # of two standard errors
    for name, colour in zip(FIELDS, COLOURS):
        runs = [e for e in numbers["exponents"] if e["kernel"] == name and e["a"] == 0]
        d, error = [e["d"] for e in runs], [2 * e["error"] for e in runs]
        a.errorbar(d, [e["exponent"] for e in runs], error, color=colour, label=f"{name} noise", **bars)
        a.plot(d, [e["theory"] for e in runs], **THEORY)
    for e in numbers["exponents"]:
        if e["a"] != 0:
            a.plot(e["d"], e["exponent"], "s", color="black", markersize=4)
            a.annotate(f"a = {e['a']:g}", (e["d"], e["exponent"]), (8, 2), textcoords="offset points")
    a.axhline(0, color="grey", linewidth=0.8)
    label(a, "nearby tokens", "dimension d", r"exponent of $1-\cos$")
    beta = np.array(numbers["beta"])
    fine = np.linspace(beta[0], beta[-1], 100)
    for (dim, run), colour in zip(numbers["transition"].items(), shades(3)):
        b.errorbar(beta, run["exponent"], 2 * np.array(run["error"]), color=colour, label=f"d = {dim}", **bars)
        b.plot(fine, theory.antipodal_lyapunov(fine, int(dim)), **THEORY)
    b.axhline(0, color="grey", linewidth=0.8)
    label(b, "opposite tokens, random values", r"$\beta$", r"exponent of $1+\cos$")
    return figure
