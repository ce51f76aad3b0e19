"""Tokens with a Gaussian distribution keep one, with a mean and covariance that blow up if V = I and decay if V = -I.

Castin et al., arXiv 2501.18322: m' = V(m + beta S G m), S' = beta(V S G S + S G^T S V^T). 2,500 tokens in the plane
with exactly the initial mean m and covariance S move under softmax attention with beta = 0.5. Differs from the paper:
closed forms for V = v I and any G (blow-up time) or symmetric G (whole path) are compared with tokens, and it is said
where n tokens must leave them (grey): the mean of the keys that a token attends to lies at beta (g^T S g)^{1/2}
standard deviations, g = G x, and n tokens reach only sqrt(2 log n).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from attn_flow import Attention, Euclidean, flow
from attn_flow.base.progress import progress_bar
from attn_flow.experiments.claims import at_most, claim
from attn_flow.experiments.figures import COLOURS, THEORY, label, panels
from attn_flow.theory import gaussian as theory

if TYPE_CHECKING:
    from matplotlib.figure import Figure

BETA, LATE = 0.5, 2000.0  # LATE: the time at which the covariance of V = -I has come to its limit
S0 = np.array([[0.6, 0.2], [0.2, 0.3]])
M0 = np.array([0.3, -0.2])
SYMMETRIC = np.array([[1.0, 0.3], [0.3, 0.5]])
SKEW = np.array([[0.5, 1.5], [-1.5, 0.5]])
CASES = {"blow-up: V = I": (1.0, SYMMETRIC), "stable: V = -I": (-1.0, SYMMETRIC), "V = I, G rotates": (1.0, SKEW)}


def compute(quick: bool = False, seed: int = 0, progress: bool = False) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    n = 600 if quick else 2500
    runs = []
    with progress_bar("gaussian", len(CASES), progress) as advance:
        for name, (v, G) in CASES.items():
            runs.append(case(name, v, G, n, generator))
            advance()
    claims = [
        at_most(
            f"{r['case']}: integrated ODE against the closed form of S, relative", r["closed_error"], 1e-7, "derived"
        )
        for r in runs
    ]
    claims += [
        at_most(
            f"{r['case']}: particles' covariance at t = {r['t_check']:.2f}, relative distance from the ODE",
            r["particle_error"],
            0.1 if quick else 0.05,
            "theorem",
        )
        for r in runs
    ]
    ratio = runs[0]["integrated_blow_up"] / runs[0]["blow_up"]
    tail = LATE * theory.solve([0.0, LATE], M0, S0, -np.eye(2), SYMMETRIC, BETA)[2][-1, 0, 0]
    expected = np.linalg.inv(2 * BETA * SYMMETRIC)[0, 0]
    claims += [
        claim("blow-up time of the ODE over its closed form", ratio, 1.0, 2e-3),
        claim("stable case: t S(t) -> (2 beta G)^{-1}, largest entry", tail, expected, 0.02 * expected),
    ]
    return {"seed": seed, "n": n, "beta": BETA, "runs": runs, "claims": claims}


def start(n: int, generator: torch.Generator) -> torch.Tensor:
    """n tokens whose empirical mean and covariance are exactly M0 and S0."""
    z = torch.randn(n, 2, generator=generator, dtype=torch.float64)
    z = z - z.mean(0)
    z = z @ torch.linalg.inv(torch.linalg.cholesky(z.T @ z / n)).T
    return torch.as_tensor(M0) + z @ torch.linalg.cholesky(torch.as_tensor(S0)).T


def case(name: str, v: float, G: np.ndarray, n: int, generator: torch.Generator) -> dict[str, Any]:
    """Means and covariances of particles, of the ODE, and in closed form."""
    end = theory.blow_up_time(S0, v, G, BETA)
    T = 0.95 * end if np.isfinite(end) else 6.0
    t = np.linspace(0, T, 41)
    _, m, S = theory.solve(t, M0, S0, v * np.eye(2), G, BETA)
    inverse = np.linalg.inv(S0) - BETA * v * t[:, None, None] * (G + G.T)
    closed = np.linalg.inv(inverse)
    attention = Attention.from_matrices(torch.as_tensor(G), v * torch.eye(2, dtype=torch.float64), BETA)
    path = flow(attention, start(n, generator), torch.as_tensor(t), geometry=Euclidean(), h=T / 40)
    mean = path.x.mean(-2)
    centred = path.x - mean[:, None]
    covariance = (centred.mT @ centred / n).numpy()
    size = lambda A: np.linalg.norm(A, axis=(-2, -1))
    # spread of the logits, beta (g^T S g)^{1/2} with g = G x, for a token x two standard deviations beyond the mean
    of_mean = np.einsum("ti,tij,tj->t", m @ G.T, S, m @ G.T)
    of_token = np.einsum("tij,jk,tkl,il->t", S, G, S, G)
    spread = BETA * (np.sqrt(of_mean) + 2 * np.sqrt(of_token))
    check = 16
    blown = (
        theory.solve(np.linspace(0, 1.2 * end, 1201), M0, S0, v * np.eye(2), G, BETA)[0][-1]
        if np.isfinite(end)
        else np.inf
    )
    return {
        "case": name,
        "t": t.tolist(),
        "blow_up": end,
        "integrated_blow_up": float(blown),
        "ode": size(S).tolist(),
        "ode_mean": np.linalg.norm(m, axis=-1).tolist(),
        "particles": size(covariance).tolist(),
        "particle_mean": mean.norm(dim=-1).tolist(),
        "closed_error": float((size(S - closed) / size(S)).max()),
        "t_check": float(t[check]),
        "particle_error": float(size(covariance - S)[check] / size(S)[check]),
        "spread": spread.tolist(),
        "cap": float(np.sqrt(2 * np.log(n))),
    }


def plot(numbers: dict[str, Any]) -> Figure:
    figure, axes = panels(2)
    for axis, run in zip(axes, numbers["runs"]):  # the third case looks like the first
        t, end = np.array(run["t"]), float(run["blow_up"])
        axis.semilogy(t, run["particles"], "o", color=COLOURS[0], markersize=4, label="tokens, covariance")
        axis.semilogy(t, run["particle_mean"], "s", color=COLOURS[1], markersize=3, label="tokens, mean")
        axis.semilogy(t, run["ode"], **THEORY, label="ODE")
        axis.semilogy(t, run["ode_mean"], **THEORY)
        over = np.flatnonzero(np.array(run["spread"]) > run["cap"])
        if np.isfinite(end) and len(over):
            axis.axvspan(t[over[0]], end, color=COLOURS[6], alpha=0.25, label="n too small")
        label(axis, run["case"], "time t", "norm")
    return figure
