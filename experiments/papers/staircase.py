"""Clusters survive for exponentially long times, so that the energy of the tokens rises in steps.

Geshkovski, Koubbi, Polyanskiy, Rigollet, arXiv 2410.06833. 64 uniform tokens on the circle, the same for every inverse
temperature beta, move under softmax attention with Q, K and V the identity. Tokens quickly form clusters; then two
clusters merge only after a time of order exp(c beta), and the energy jumps (a, b). On a plateau the energy is that of
point clusters.

Differs from the paper: the plateaus are crossed by the adaptive stepper, which merges coincident tokens, up to t = e^{2
beta}; the time of the last merger is compared with the exact two-cluster ODE for its masses and angle. Clusters are
groups of tokens that gaps of more than 0.02 radians separate.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from attn_flow import Adaptive, Attention, Cloud, Sphere, consensus, flow
from attn_flow.base.progress import progress_bar
from attn_flow.experiments.claims import at_most, claim
from attn_flow.experiments.figures import THEORY, label, panels, shades
from attn_flow.geometry import angle as geodesic
from attn_flow.observe.quantities import clusters, log_energy
from attn_flow.theory import metastability as theory

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def compute(quick: bool = False, seed: int = 0, progress: bool = False) -> dict[str, Any]:
    betas = (6.0, 10.0) if quick else (6.0, 9.0, 12.0, 15.0)
    n = 32 if quick else 64
    x0 = Sphere().uniform(n, 2, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    runs = []
    with progress_bar("staircase", len(betas), progress) as advance:
        for beta in betas:
            runs.append(energy_steps(x0, beta, 60 if quick else 200))
            advance()
    claims = [
        at_most(f"beta = {r['beta']:g}: energy never falls; largest relative drop", r["drop"], 1e-9, "theorem")
        for r in runs
    ]
    claims += [
        at_most(
            f"beta = {r['beta']:g}: plateaus equal point clusters' energies; largest error of log E",
            r["level_error"],
            0.02,
            "derived",
        )
        for r in runs
    ]
    for r in runs:
        if r["last"] is not None:
            what = f"beta = {r['beta']:g}: time of the last merger over the two-cluster ODE"
            claims.append(claim(what, r["last"]["time"] / r["last"]["theory"], 1.0, 0.03))
    return {"seed": seed, "n": n, "runs": runs, "claims": claims}


def energy_steps(x0: Tensor, beta: float, points: int) -> dict[str, Any]:
    """log E along log-spaced times up to e^{2 beta}, the clusters on the way, and the last merger."""
    t = torch.cat([torch.zeros(1), torch.logspace(-1, 2 * beta / np.log(10), points)]).double()
    # rounding of the velocity, 1e-16, times a step of tol/1e-16 is an error of tol: no tolerance reaches much further
    path = flow(Attention.identity(2, beta), x0, t, step=Adaptive(tol=1e-6), stop=consensus(1e-5))
    log_e, count, levels = [], [], []
    for x in path.x:
        log_e.append(float(log_energy(x, beta)))
        mean, mass = groups(x)
        count.append(len(mass))
        levels.append(float(log_energy(Cloud(torch.as_tensor(mean), torch.as_tensor(mass)), beta)))
    log_e_, settled = np.array(log_e), np.array(count) <= 6
    return {
        "beta": beta,
        "t": path.t.tolist(),
        "log_energy": log_e,
        "clusters": count,
        "levels": levels,
        "drop": float(max(0.0, -np.diff(log_e_).min())),
        "level_error": float(np.abs(log_e_ - np.array(levels))[settled].max()),
        "last": last_merger(path.t.numpy(), path.x, np.array(count), beta),
        "evaluations": int(path.about["evaluations"]),
    }


def groups(x: Tensor) -> tuple[np.ndarray, np.ndarray]:
    """Centres (k, 2) and masses (k,) of tokens chained by gaps below .02."""
    chained = clusters(x, 0.02)
    mean = torch.zeros(int(chained.counts), 2, dtype=x.dtype).index_add(0, chained.labels, x)
    mass = torch.bincount(chained.labels).double() / len(x)
    return Sphere().retract(mean).numpy(), mass.numpy()


def last_merger(t: np.ndarray, x: Tensor, count: np.ndarray, beta: float) -> dict[str, float] | None:
    """From the first time two clusters are left to the time they are .1 apart, and what the pair's ODE says."""
    two = np.flatnonzero(count == 2)
    if len(two) < 3 or count[-1] != 1:
        return None
    angle = lambda i: float(geodesic(*torch.as_tensor(groups(x[i])[0])))
    start = int(two[0])
    phi = np.array([angle(i) for i in two])
    # An antipodal pair leaves on a logarithm of its asymmetry; or the grid of times jumps over phi = 0.1.
    phi_end = float(phi.min()) if phi[0] > 3.0 or phi.min() > 0.1 else 0.1
    end = float(np.interp(-phi_end, -phi, t[two]))
    masses = groups(x[start])[1]
    expected = float(theory.merge_time(beta, float(phi[0]), phi_end, float(masses[0])))
    return {"time": end - float(t[start]), "theory": expected, "phi": float(phi[0]), "mass": float(masses[0])}


def plot(numbers: dict[str, Any]) -> Figure:
    figure, (a, b) = panels(2)
    for run, colour in zip(numbers["runs"], shades(len(numbers["runs"]))):
        t, beta = np.array(run["t"])[1:], run["beta"]
        scale = np.log(2 * beta) - beta
        a.plot(np.log(t) / beta, np.exp(np.array(run["log_energy"])[1:] + scale), color=colour)
        settled = np.array(run["clusters"])[1:] <= 6
        a.plot((np.log(t) / beta)[settled], np.exp(np.array(run["levels"])[1:] + scale)[settled], **THEORY)
        b.step(np.log(t) / beta, run["clusters"][1:], color=colour, where="post", label=rf"$\beta={beta:g}$")
    label(a, "energy (dashed: of point clusters)", r"rescaled time $\log(t)/\beta$", "energy / largest", legend=False)
    b.set_yscale("log", base=2)
    b.set_ylim(0.9, numbers["n"])
    b.yaxis.set_major_formatter("{x:g}")
    label(b, "how many clusters are left", r"rescaled time $\log(t)/\beta$", "number of clusters")
    return figure
