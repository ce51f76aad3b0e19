"""Cold attention has three time scales: tokens align, then diffuse, and at last clusters merge in pairs.

Multiscale sequel of Bruno, Pasqualotto, Agazzi, arXiv 2509.25040.

(a) Two clusters merge after a time that grows exponentially in the inverse temperature beta; the closed form is exact,
its limit for large beta is not yet reached. (b) Tokens on the sphere with G = diag(2,2,1) and V the identity approach
the leading plane E of M in a time of order 1. A cloud close to the plane does not fill the sphere, so finite beta
leaves the path of zero temperature, and stalls where the tokens are too few for the argmax. (c) The first two modes of
a lattice of tokens on the circle grow (V = I, backward heat equation) or decay (V = -I) like exp(k^2 t/beta), dashed,
at times of order beta.

Differs from the paper: each scale is run by itself, so that each can be measured to digits.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from attn_flow import Adaptive, Attention, flow, zero_temperature_flow
from attn_flow.base.progress import progress_bar
from attn_flow.experiments.claims import at_most, claim
from attn_flow.experiments.figures import COLOURS, THEORY, label, name_lines, panels, shades
from attn_flow.geometry import angle
from attn_flow.measures.quadrature import fibonacci
from attn_flow.theory import metastability as theory

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PHI, PHI_END = math.pi / 2, 0.1


def compute(quick: bool = False, seed: int = 0, progress: bool = False) -> dict[str, Any]:
    with progress_bar("multiscale", 3, progress) as advance:
        align = alignment((10.0, 30.0, 100.0), 800 if quick else 2500)
        advance()
        heating = [heat(beta, sign, 160 if quick else 400) for sign in (-1, 1) for beta in (40.0, 80.0, 160.0)]
        advance()
        pairs = pairing(np.arange(2.0, 9.0 if quick else 13.0))
        advance()
    claims = [
        at_most(
            f"alignment: relative distance from zero temperature at t = 2, beta = {r['beta']:g}",
            r["gap"],
            most,
            "theorem",
        )
        for r, most in zip(align["runs"], (0.2, 0.1, 0.05))
    ]
    claims += [
        claim(
            f"{'backward' if r['sign'] > 0 else 'forward'} heat, beta = {r['beta']:g}: rate of mode 2 times beta",
            r["rate"] * r["beta"],
            r["sign"] * 4.0,
            10 / r["beta"],  # the formula is the limit of large beta
            source="theorem",
        )
        for r in heating
    ]
    claims += [
        at_most("heat: relative distance of rates from gamma_k", max(r["error"] for r in heating), 2e-3, "derived")
    ]
    claims += [
        at_most("pairing time: largest relative distance from its closed form", pairs["error"], 2e-3, "derived"),
        claim(
            "pairing: last ratio to e^{beta(1-cos phi)}/(2 beta sin^2 phi)", pairs["ratio"], pairs["ratio_theory"], 0.01
        ),
    ]
    return {"seed": seed, "alignment": align, "heat": heating, "pairing": pairs, "claims": claims}


def alignment(betas: tuple[float, ...], n: int) -> dict[str, Any]:
    """S^2, G = diag(2, 2, 1), V = I: M's leading eigenspace is the plane x_3 = 0; root mean square of x_3."""
    cloud = fibonacci(n)
    t, at = torch.linspace(0, 6, 25, dtype=torch.float64), 8
    G = torch.diag(torch.tensor([2.0, 2.0, 1.0], dtype=torch.float64))
    V = torch.eye(3, dtype=torch.float64)
    cold = zero_temperature_flow(Attention.from_matrices(G, V), cloud.x, t).x[..., 2].square().mean(-1).sqrt()
    runs = []
    for beta in betas:
        path = flow(Attention.from_matrices(G, V, beta), cloud.x, t, h=0.25)
        size = path.x[..., 2].square().mean(-1).sqrt()
        runs.append({"beta": beta, "size": size.tolist(), "gap": abs(float(size[at] / cold[at]) - 1)})
    return {"t": t.tolist(), "runs": runs, "n": n, "cold": cold.tolist(), "at": float(t[at])}


def heat(beta: float, sign: int, n: int) -> dict[str, Any]:
    """Modes 1, 2, 3 of a slightly modulated lattice under V = sign I, over t = beta/8."""
    k = torch.arange(1, 4)
    theta = 2 * math.pi * torch.arange(n, dtype=torch.float64) / n
    theta = theta + 1e-5 * (theta[:, None] * k).sin().sum(-1)
    t = torch.linspace(0, beta / 8, 21, dtype=torch.float64)
    V = sign * torch.eye(2, dtype=torch.float64)
    attention = Attention.from_matrices(torch.eye(2, dtype=torch.float64), V, beta)
    path = flow(attention, torch.stack([theta.cos(), theta.sin()], -1), t, h=0.5)
    angles = torch.atan2(path.x[..., 1], path.x[..., 0])
    modes = torch.exp(-1j * k * angles[..., None]).mean(-2).abs()  # (T, 3)
    rates = ((modes[-1] / modes[0]).log() / t[-1]).numpy()
    gamma = sign * theory.growth_rate(k.numpy(), beta)
    return {
        "beta": beta,
        "sign": sign,
        "n": n,
        "t": t.tolist(),
        "modes": (modes / modes[0]).T.tolist(),
        "rate": float(rates[1]),
        "error": float(np.abs(rates / gamma - 1).max()),
    }


def pairing(betas: np.ndarray) -> dict[str, Any]:
    """Time for two tokens at angle pi/2 to close to .1, by the adaptive stepper, against the closed form."""
    exact = theory.merge_time(betas, PHI, PHI_END)
    x0 = torch.tensor([[1.0, 0.0], [math.cos(PHI), math.sin(PHI)]], dtype=torch.float64)
    times = []
    for beta, T in zip(betas, exact):
        t = torch.cat([torch.zeros(1), torch.linspace(0.98, 1.02, 9)]).double() * T
        path = flow(Attention.identity(2, float(beta)), x0, t, step=Adaptive(tol=1e-9))
        phi = angle(path.x[:, 0], path.x[:, 1]).numpy()
        times.append(float(np.interp(-math.log(PHI_END), -np.log(phi), t.numpy())))
    measured, limit = np.array(times), np.exp(betas * (1 - math.cos(PHI))) / (2 * betas * math.sin(PHI) ** 2)
    return {
        "beta": betas.tolist(),
        "time": times,
        "theory": exact.tolist(),
        "limit": limit.tolist(),
        "error": float(np.abs(measured / exact - 1).max()),
        "ratio": float(measured[-1] / limit[-1]),
        "ratio_theory": float(exact[-1] / limit[-1]),
    }


def plot(numbers: dict[str, Any]) -> Figure:
    figure, (a, b, c) = panels(3)
    pairs = numbers["pairing"]
    a.semilogy(pairs["beta"], pairs["time"], "o", color=COLOURS[0], label="simulated")
    a.semilogy(pairs["beta"], pairs["theory"], **THEORY, label="closed form (exponential integrals)")
    limit = r"its limit $e^{\beta(1-\cos\phi)}/(2\beta\sin^2\phi)$"
    a.semilogy(pairs["beta"], pairs["limit"], color=COLOURS[1], linestyle=":", label=limit)
    label(a, r"pairing: two clusters at the angle $\phi=\pi/2$", r"$\beta$", "time until the angle is 0.1")
    align = numbers["alignment"]
    t = np.array(align["t"])
    for run, colour in zip(align["runs"], shades(3)):
        b.semilogy(t, run["size"], color=colour, label=rf"$\beta={run['beta']:g}$")
    b.semilogy(t, align["cold"], **THEORY, label=r"$\beta=\infty$")
    label(b, "alignment, t of order 1", "time t", "distance to the plane E")
    for run, colour in zip(numbers["heat"], shades(3) * 2):
        time = np.array(run["t"]) / run["beta"]
        for k in (1, 2):
            c.semilogy(time, run["modes"][k - 1], color=colour)
    for sign in (-1, 1):
        for k in (1, 2):
            c.semilogy(time, np.exp(sign * k**2 * time), **THEORY, label=f"k = {k}")  # in units of 1/beta
    c.text(0.045, 1.3, r"$V=I$")
    c.text(0.03, 0.72, r"$V=-I$")
    c.set_yticks([0.6, 1.0, 1.6], ["0.6", "1", "1.6"])
    c.yaxis.minorticks_off()
    label(c, r"heat, t of order $\beta$", r"rescaled time $t/\beta$", "mode / its start", legend=False)
    name_lines(c)
    return figure
