"""Tokens that attend to each other become equal exponentially fast, at rates that can be computed exactly.

Chen, Lin, Polyanskiy, Rigollet, arXiv 2504.14697; Geshkovski et al., arXiv 2312.10794. Dashed lines are predictions.

(a) Near consensus the rate is 1 for softmax and e^beta for unnormalised attention, here 32 tokens in d = 3. (b) From
the density (1 + 0.6 cos(angle))/(2 pi) the rate is min(c, (d-1) lambda/2), as the last mass leaves the antipode, where
the 800 quadrature nodes crowd. (c) Two thirds of the mass at e and one third at -e are stationary; the smaller cluster
becomes stable at beta = log(2)/2 with softmax. (d) 32 random starts of 32 tokens for each dimension d all end in one
cluster.

Differs from the paper: it proves some exponential rate (e^{-t/100}) for small beta; here the sharp rates are measured.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from attn_flow import Attention, Cloud, Sphere, flow
from attn_flow.base.progress import progress_bar
from attn_flow.experiments.claims import at_most, claim
from attn_flow.experiments.figures import COLOURS, FONT, THEORY, label, panels, shades
from attn_flow.measures.quadrature import circle
from attn_flow.theory import synchronisation as theory

if TYPE_CHECKING:
    from matplotlib.figure import Figure

CONSENSUS = (("softmax", 2.0), ("unnormalised", 0.5), ("unnormalised", 1.0), ("unnormalised", 2.0))
DENSITY = (("unnormalised", 0.0), ("unnormalised", 0.25), ("unnormalised", 0.5), ("softmax", 1.0))


def compute(quick: bool = False, seed: int = 0, progress: bool = False) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    with progress_bar("synchronisation", 4, progress) as advance:
        near = [near_consensus(kind, beta, generator) for kind, beta in CONSENSUS]
        advance()
        density = [from_density(kind, beta, 160 if quick else 800, 0.2 if quick else 0.1) for kind, beta in DENSITY]
        advance()
        atoms = two_atoms(np.linspace(0.05, 0.8, 7 if quick else 16))
        advance()
        spread = collapse(8 if quick else 32, 16 if quick else 32, generator)
        advance()
    claims = [
        claim(f"rate near consensus, {r['kind']} beta = {r['beta']:g}", r["rate"], r["theory"], 2e-3 * r["theory"])
        for r in near
    ]
    claims += [
        claim(f"W2 rate from a density on the circle, {r['kind']} beta = {r['beta']:g}", r["rate"], r["theory"], 2e-3)
        for r in density
    ]
    claims += [
        at_most("2/3-1/3 measure is stationary: largest speed", atoms["speed"], 1e-12, "theorem"),
        claim("beta at which the smaller atom becomes stable", atoms["threshold"], math.log(2) / 2, 1e-3),
        claim("fraction of random starts in one cluster, d >= 3", spread["fraction"], 1.0, 0.0, source="theorem"),
    ]
    return {"seed": seed, "near": near, "density": density, "atoms": atoms, "spread": spread, "claims": claims}


def near_consensus(kind: Any, beta: float, generator: torch.Generator) -> dict[str, Any]:
    """Spread of 32 tokens that start within .1 of each other, and its last rate."""
    c = float(theory.consensus_rate(beta, kind))
    x0 = torch.tensor([1.0, 0.0, 0.0]).double() + 0.05 * torch.randn(32, 3, generator=generator, dtype=torch.float64)
    t = torch.linspace(0, 6 / c, 61, dtype=torch.float64)
    path = flow(Attention.identity(3, beta, kind=kind), x0, t, h=0.1 / c)
    spread = (path.x - path.x.mean(-2, keepdim=True)).norm(dim=(-1, -2))
    rate = -float((spread[-1] / spread[-21]).log() / (t[-1] - t[-21]))
    return {"kind": kind, "beta": beta, "t": t.tolist(), "spread": spread.tolist(), "rate": rate, "theory": c}


def from_density(kind: Any, beta: float, n: int, h: float) -> dict[str, Any]:
    """W2(mu_t, delta) from (1 + .6 cos theta)/2pi: tokens cannot cross the axis, so the limit is theta = 0."""
    cloud = circle(n, lambda theta: 1 + 0.6 * theta.cos(), towards=0.0)
    slow = float(theory.wasserstein_rate(beta, 2, kind))
    t = torch.linspace(0, 6 / slow, 61, dtype=torch.float64)  # nodes reach 3e-8 of the antipode: t < 17/lambda
    path = flow(Attention.identity(2, beta, kind=kind), cloud, t, h=h)
    angle = torch.atan2(path.x[..., 1], path.x[..., 0])
    w2 = (cloud.probabilities * angle**2).sum(-1).sqrt()
    rate = -float((w2[-1] / w2[-21]).log() / (t[-1] - t[-21]))
    return {"kind": kind, "beta": beta, "n": n, "t": t.tolist(), "w2": w2.tolist(), "rate": rate, "theory": slow}


def two_atoms(betas: np.ndarray) -> dict[str, Any]:
    """Growth of a probe's deviation at -e for mu = 2/3 delta_e + 1/3 delta_{-e}, softmax and unnormalised."""
    eps, dt = 1e-6, 0.05
    x0 = torch.tensor([[1.0, 0.0], [-1.0, 0.0], [-math.cos(eps), math.sin(eps)]], dtype=torch.float64)
    weights = torch.tensor([2 / 3, 1 / 3, 0.0], dtype=torch.float64)
    rates: dict[str, list[float]] = {}
    speed = 0.0
    for kind in ("softmax", "unnormalised"):
        attention = Attention.identity(2, torch.as_tensor(betas)[:, None], kind=kind)  # type: ignore[arg-type]
        path = flow(attention, Cloud(x0, weights), [0.0, dt], h=dt / 4)
        rates[kind] = (torch.log(path.x[-1, :, 2, 1] / eps) / dt).tolist()
        speed = max(speed, float((path.x[-1, :, :2] - path.x[0, :, :2]).abs().max()) / dt)
    threshold = float(np.interp(0.0, -np.array(rates["softmax"]), betas))
    expected = {kind: theory.two_atom_rates(2 / 3, betas, kind)[1].tolist() for kind in rates}
    return {"beta": betas.tolist(), "rates": rates, "theory": expected, "speed": speed, "threshold": threshold}


def collapse(seeds: int, n: int, generator: torch.Generator) -> dict[str, Any]:
    """Largest distance of a pair, from uniform starts, beta = 1, in d = 3, 4, 8."""
    t = torch.linspace(0, 40, 81, dtype=torch.float64)
    diameter, ends = {}, []
    for d in (3, 4, 8):
        x0 = Sphere().uniform((seeds, n), d, generator=generator, dtype=torch.float64)
        path = flow(Attention.identity(d, 1.0), x0, t, h=0.25)
        largest = torch.stack([torch.cdist(x, x).amax((-1, -2)) for x in path.x])
        diameter[str(d)] = largest.T.tolist()
        ends.append(largest[-1] < 1e-6)
    return {
        "t": t.tolist(),
        "diameter": diameter,
        "n": n,
        "seeds": seeds,
        "fraction": float(torch.cat(ends).double().mean()),
    }


def plot(numbers: dict[str, Any]) -> Figure:
    figure, (a, b, c, d) = panels(4)
    for axis, key, distance in ((a, "near", "spread"), (b, "density", "w2")):
        for run, colour in zip(numbers[key], COLOURS):
            t, y = np.array(run["t"]), np.array(run[distance])
            axis.semilogy(t, y, color=colour, label=rf"{run['kind']}, $\beta={run['beta']:g}$")
            axis.semilogy(t, y[-1] * np.exp(-run["theory"] * (t - t[-1])), **THEORY)
    a.set_xlim(0, 4)
    a.set_ylim(None, 10)  # room for the legend
    label(a, "tokens near each other", "time t", "spread of the tokens")
    label(b, "from a density on the circle", "time t", r"$W_2$ to one point")
    atoms = numbers["atoms"]
    for (kind, rates), colour in zip(atoms["rates"].items(), COLOURS):
        c.plot(atoms["beta"], rates, "o", color=colour, markersize=5, label=kind)
        c.plot(atoms["beta"], atoms["theory"][kind], **THEORY)
    c.axvline(math.log(2) / 2, color="grey", linewidth=0.8)
    c.axhline(0, color="grey", linewidth=0.8)
    c.text(math.log(2) / 2 + 0.01, c.get_ylim()[0], r"$\log(2)/2$", fontsize=FONT, va="bottom")
    label(c, "stability of the smaller cluster", r"$\beta$", "growth rate of a deviation")
    spread = numbers["spread"]
    for (dim, paths), colour in zip(spread["diameter"].items(), shades(3)):
        for i, path in enumerate(paths):
            d.semilogy(spread["t"], path, color=colour, linewidth=0.7, label=None if i else f"d = {dim}")
    d.set_ylim(1e-7, 4)  # above the rounding of distances
    label(d, r"random starts, softmax, $\beta=1$", "time t", "largest distance of two tokens")
    return figure
