"""Small random differences between tokens grow into a number of clusters that the temperature decides.

Bruno, Pasqualotto, Agazzi, arXiv 2410.23228. The uniform distribution on the circle is unstable: a wave with k maxima
grows at the rate gamma_k (a), and k_max(beta) is the fastest (b), where beta is the inverse temperature. (c, d) 20,000
random tokens under unnormalised attention with beta = 5: waves grow by the linear theory (dashed) until the grey line;
then clusters form where the initial noise predicts. The noise of a run decides between neighbouring numbers of
clusters, so only their mean over 16 seeds is compared with k_max.

Differs from the paper: its runs (Euler steps of 0.0001) are binned into 600 equal cells of the circle, each a token
with its multiplicity, and integrated by RK4; rates are correct by the factor pi that its notebook misses. Growth in d >
3 is read off the mean-field drift of the uniform density with one grain of mass added, not from tokens.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from scipy.special import eval_gegenbauer, roots_jacobi
from torch import Tensor

from attn_flow import Attention, Cloud, Mixture, UniformSphere, flow
from attn_flow.base.progress import progress_bar
from attn_flow.experiments.claims import at_most, claim
from attn_flow.experiments.figures import COLOURS, FONT, THEORY, label, panels, shades
from attn_flow.measures.quadrature import fibonacci
from attn_flow.theory import metastability as theory

if TYPE_CHECKING:
    from matplotlib.figure import Figure

KINDS = ("softmax", "unnormalised", "sinkhorn")


def compute(quick: bool = False, seed: int = 0, progress: bool = False) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    with progress_bar("metastability", 5, progress) as advance:
        circle = [circle_rates(kind, 5.0, 64, generator) for kind in KINDS]
        advance()
        sphere = sphere_rates(5.0, 600 if quick else 2000)
        high = [drift_rates(d, 10.0) for d in (2, 3, 8, 64)]
        advance()
        selected = selected_modes(np.geomspace(0.7, 22, 12 if quick else 48), generator)
        advance()
        runs = []
        for beta, T in ((5.0, 0.6), (7.0, 0.1)):
            size = (2000, 200, 12) if quick else (20_000, 600, 16)
            runs.append(paper_run(beta, T, *size, generator))
            advance()
    claims = [
        at_most(
            f"growth rates on the circle, {c['kind']}: largest relative error, k = 1..6", c["error"], 0.01, "derived"
        )
        for c in circle
    ]
    claims.append(at_most("growth rates on S^2, k = 1..5: largest relative error", sphere["error"], 0.01, "derived"))
    claims += [
        at_most(f"growth rates from the mean-field drift, d = {h['d']}: relative error", h["error"], 1e-4, "derived")
        for h in high
    ]
    claims.append(claim("fraction of betas whose fastest simulated mode is k_max", selected["agreement"], 1.0, 0.0))
    for run in runs:
        what = f"beta = {run['beta']:g}, unnormalised: "
        claims.append(
            at_most(
                what + f"clusters {run['offset']:.3f} spacings from predicted centres (rotated at random: "
                f"{run['random_offset']:.3f}); share of random rotations that come as near",
                run["chance"],
                0.05,
            )
        )
        what += "mean number of clusters, against k_max"  # weak: a seed's noise decides between neighbouring k
        claims.append(claim(what, np.mean(run["clusters"]), run["k_max"], 1.0, "theorem"))
    return {
        "seed": seed, "circle": circle, "sphere": sphere, "high": high, "selected": selected, "runs": runs,
        "claims": claims,
    }  # fmt: skip


def on_circle(theta: Tensor) -> Tensor:
    return torch.stack([theta.cos(), theta.sin()], -1)


def modes(x: Tensor, k: Tensor, weights: Tensor | None = None) -> Tensor:
    """c_k = mean e^{-i k theta}, (..., len(k))."""
    waves = torch.exp(-1j * k * torch.atan2(x[..., 1], x[..., 0])[..., None])
    return waves.mean(-2) if weights is None else (weights[..., None] * waves).sum(-2)


def circle_rates(kind: Any, beta: float, n: int, generator: torch.Generator) -> dict[str, Any]:
    """Growth of modes 1..6 of a lattice with 1e-5 noise, over half an e-folding of the fastest."""
    k = np.arange(1, 7)
    gamma = theory.growth_rate(k, beta, kind=kind)
    theta = 2 * math.pi * torch.arange(n, dtype=torch.float64) / n
    theta = theta + 1e-5 * torch.randn(n, generator=generator, dtype=torch.float64)
    T = 0.5 / gamma.max()
    path = flow(Attention.identity(2, beta, kind=kind), on_circle(theta), [0.0, T], h=T / 4)
    c = modes(path.x, torch.as_tensor(k))
    measured = (torch.log(c[1] / c[0]).real / T).numpy()
    return {"kind": kind, "beta": beta, "n": n, **compare(k, measured, gamma)}


def compare(k: np.ndarray, measured: np.ndarray, gamma: np.ndarray) -> dict[str, Any]:
    """Measured and predicted growth rates of modes k, and the largest relative error where gamma is not tiny."""
    counted = np.abs(gamma) > 1e-4 * np.abs(gamma).max()
    error = float(np.abs(measured / gamma - 1)[counted].max())
    return {"k": k.tolist(), "measured": measured.tolist(), "theory": gamma.tolist(), "error": error}


def sphere_rates(beta: float, n: int) -> dict[str, Any]:
    """Growth of zonal harmonics on S^2: Fibonacci cloud with weights 1 + eps P_k(z), against the same with -eps."""
    k = np.arange(1, 6)
    gamma = theory.growth_rate(k, beta, 3)
    legendre = lambda x: torch.as_tensor(np.stack([eval_gegenbauer(j, 0.5, x[..., 2].numpy()) for j in k], -1))
    base = fibonacci(n)
    tilt = 1e-4 * legendre(base.x).T  # (k, n)
    weights = torch.cat([1 + tilt, 1 - tilt]) / n
    T = 0.5 / gamma.max()
    path = flow(Attention.identity(3, beta), Cloud(base.x, weights), [0.0, T], h=T / 2)
    moment = [torch.einsum("bn,bnk->bk", weights, legendre(x)) for x in path.x.expand(2, len(weights), n, 3)]
    start, end = [torch.diagonal(m[: len(k)] - m[len(k) :]) for m in moment]
    return {"beta": beta, "n": n, **compare(k, (torch.log(end / start) / T).numpy(), gamma)}


def drift_rates(d: int, beta: float) -> dict[str, Any]:
    """gamma_k from the drift of (1-eps) uniform + eps delta_e: every harmonic at once, by Gegenbauer.

    Z_k of the density grows at int grad Z_k . v / Z_k(1); the drift of uniform itself has no tangent part.
    """
    k, eps = np.arange(1, 9), 1e-7
    t, w = roots_jacobi(80, (d - 3) / 2, (d - 3) / 2)
    w = w / w.sum()
    e = torch.zeros(1, d, dtype=torch.float64)
    e[0, 0] = 1
    x = torch.zeros(len(t), d, dtype=torch.float64)
    x[:, 0], x[:, 1] = torch.as_tensor(t), torch.as_tensor(np.sqrt(1 - t**2))
    mixture = Mixture([UniformSphere(d), Cloud(e)], torch.tensor([1 - eps, eps], dtype=torch.float64))
    drift = Attention.identity(d, beta, context=mixture).drift(x)
    # the tangent direction of growing <x, e> is (e - t x), of squared length 1 - t^2
    speed = (drift[:, 0] - torch.as_tensor(t) * (drift * x).sum(-1)).numpy() / eps
    measured = []
    for j in k:
        if d == 2:  # Chebyshev
            slope, at_one = j * np.sin(j * np.arccos(t)) / np.sqrt(1 - t**2), 1.0
        else:
            slope, at_one = (d - 2) * eval_gegenbauer(j - 1, d / 2, t), eval_gegenbauer(j, d / 2 - 1, 1.0)
        measured.append(float((w * slope * speed).sum() / at_one))
    return {"d": d, "beta": beta, **compare(k, np.array(measured), theory.growth_rate(k, beta, d))}


def selected_modes(betas: np.ndarray, generator: torch.Generator) -> dict[str, Any]:
    """The mode of a noisy lattice that gains most, softmax, one batch over beta; betas at a switch are moved off it."""
    switches = np.array([theory.switch_point(k) for k in range(1, 8)])
    near = np.abs(betas[:, None] / switches - 1).min(1) < 0.02
    betas = np.where(near, betas * 1.05, betas)
    n, k = 128, torch.arange(1, 12)
    theta = 2 * math.pi * torch.arange(n, dtype=torch.float64) / n
    theta = theta + 1e-6 * torch.randn(n, generator=generator, dtype=torch.float64)
    attention = Attention.identity(2, torch.as_tensor(betas)[:, None])
    path = flow(attention, on_circle(theta), [0.0, 3.0], h=0.3)
    c = modes(path.x, k).abs()
    fastest = k[(c[1] / c[0]).argmax(-1)].numpy()
    expected = theory.k_max(betas)
    return {"beta": betas.tolist(), "k": fastest.tolist(), "n": n, "agreement": float((fastest == expected).mean())}


def paper_run(beta: float, T: float, n: int, cells: int, seeds: int, generator: torch.Generator) -> dict[str, Any]:
    """n iid angles, binned to `cells` tokens with multiplicities; unnormalised flow to T; modes, clusters, centres."""
    theta0 = 2 * math.pi * torch.rand(seeds, n, generator=generator, dtype=torch.float64)
    counts = torch.stack([torch.bincount((row * cells / (2 * math.pi)).long(), minlength=cells) for row in theta0])
    weights = counts.double() / n
    theta = 2 * math.pi * (torch.arange(cells, dtype=torch.float64) + 0.5) / cells
    t = torch.linspace(0, T, 49, dtype=torch.float64)
    attention = Attention.identity(2, beta, kind="unnormalised")
    x0 = on_circle(theta).expand(seeds, cells, 2)
    path = flow(attention, Cloud(x0, weights), t, h=1.2 * math.exp(-beta))
    k = torch.arange(1, 9)
    c = modes(path.x, k, weights)  # (T, seeds, k)
    gamma = theory.growth_rate(k.numpy(), beta, kind="unnormalised")
    runs = [predicted(c[0, i].numpy(), gamma) for i in range(seeds)]
    groups = [clusters(path.x[-1, i], weights[i]) for i in range(seeds)]
    # The baseline: each seed's centres turned by an angle of its own, a thousand times.
    turns = 2 * math.pi * torch.rand(1001, seeds, generator=generator, dtype=torch.float64).numpy()
    turns[0] = 0.0
    offsets = np.mean(
        [offset(group, centres, turn) for (_, centres), group, turn in zip(runs, groups, turns.T)], axis=0
    )
    angles = torch.atan2(path.x[:, 0, :, 1], path.x[:, 0, :, 0]) % (2 * math.pi)
    shown = (0, 16, 24, 48)
    histogram = lambda i: np.histogram(angles[i].numpy(), 120, (0, 2 * math.pi), weights=weights[0].numpy())[0]
    return {
        "beta": beta,
        "t": t.tolist(),
        "k": k.tolist(),
        "gamma": gamma.tolist(),
        "modes": c[:, 0].abs().T.tolist(),
        "k_max": int(theory.k_max(beta)),
        "exit_time": runs[0][0],
        "centres": runs[0][1].tolist(),
        "clusters": [len(group) for group in groups],
        "offset": float(offsets[0]),
        "random_offset": float(offsets[1:].mean()),
        "chance": float((offsets[1:] <= offsets[0]).mean()),
        "density": [histogram(i).tolist() for i in shown],
        "density_t": [float(t[i]) for i in shown],
    }


def offset(group: np.ndarray, centres: np.ndarray, turns: np.ndarray) -> np.ndarray:
    """Mean distance of clusters (angle, mass) to the nearest of the centres turned by each angle, in spacings."""
    away = group[:, 0, None, None] - centres[:, None] - turns  # (clusters, centres, turns)
    distance = np.abs(np.angle(np.exp(1j * away))).min(1)
    mean: np.ndarray = (group[:, 1, None] * distance).sum(0) / (2 * math.pi / len(group))
    return mean


def predicted(c: np.ndarray, gamma: np.ndarray) -> tuple[float, np.ndarray]:
    """Exit time and cluster centres from the initial modes alone: maxima of the linear density at exit."""
    exit_time = float(np.min(-np.log(np.abs(c)) / gamma))
    theta = np.linspace(0, 2 * math.pi, 2000, endpoint=False)
    k = np.arange(1, len(c) + 1)
    density = (np.exp(1j * theta[:, None] * k) @ (c * np.exp(gamma * exit_time))).real
    peaks = (density > np.roll(density, 1)) & (density > np.roll(density, -1)) & (density > 0)
    return exit_time, theta[peaks]


def clusters(x: Tensor, weights: Tensor) -> np.ndarray:
    """(angle, mass) of groups of tokens separated by gaps of more than .2 rad, of mass at least 2%."""
    theta, order = (torch.atan2(x[:, 1], x[:, 0]) % (2 * math.pi)).sort()
    mass = weights[order]
    gap = torch.cat([theta[1:] - theta[:-1], theta[:1] + 2 * math.pi - theta[-1:]])
    cuts = torch.nonzero(gap > 0.2).flatten()
    if len(cuts) == 0:
        return np.empty((0, 2))
    first = int(cuts[-1]) + 1 - len(theta)
    out = []
    for cut in cuts.tolist():
        members = torch.arange(first, cut + 1) % len(theta)
        total = mass[members].sum()
        mean = (mass[members] * torch.exp(1j * theta[members])).sum() / total
        out.append((float(mean.angle() % (2 * math.pi)), float(total)))
        first = cut + 1
    return np.array([group for group in out if group[1] > 0.02])


def plot(numbers: dict[str, Any]) -> Figure:
    figure, (a, b, c, d) = panels(4)
    for run, colour, marker in zip(numbers["circle"], COLOURS, "ox^"):
        top = max(run["theory"])
        a.plot(run["k"], np.array(run["measured"]) / top, marker, color=colour, markersize=6, label=run["kind"])
        a.plot(run["k"], np.array(run["theory"]) / top, **THEORY)
    label(a, r"which waves grow, $\beta=5$", "number of waves k", "growth rate / largest")
    fine = np.geomspace(0.7, 22, 400)
    b.semilogx(numbers["selected"]["beta"], numbers["selected"]["k"], "o", color=COLOURS[0], label="simulated")
    b.semilogx(fine, theory.k_max(fine), **THEORY, label=r"$k_{\max}$")
    label(b, "the wave that grows fastest", r"$\beta$", "number of waves k")
    run = numbers["runs"][0]
    t = np.array(run["t"])
    for j, colour in zip(range(1, 5), shades(4)):
        c.semilogy(t, run["modes"][j], color=colour, label=f"k = {run['k'][j]}")
        growing = run["modes"][j][0] * np.exp(run["gamma"][j] * t)
        c.semilogy(t[growing < 1], growing[growing < 1], **THEORY)
    c.axvline(run["exit_time"], color="grey", linewidth=1)
    c.set_ylim(3e-4, 1.5)
    label(c, r"from noise to clusters, $\beta=5$", "time t", "size of wave k")
    edges = np.linspace(0, 2 * np.pi, len(run["density"][0]) + 1)
    for density, time, colour in zip(run["density"], run["density_t"], shades(4)):
        d.stairs(np.sqrt(np.array(density)), edges, color=colour, linewidth=1.4, label=f"t = {time:.2f}")
    for i, centre in enumerate(run["centres"]):
        d.axvline(centre, 0, 0.7, **THEORY, label=None if i else "predicted")
    d.set_ylim(0, 1.45 * d.get_ylim()[1])  # room for the legend above the clusters
    label(d, "clusters and predicted centres", "angle (radians)", "square root of the mass", legend=False)
    d.legend(fontsize=FONT - 0.5, frameon=False, ncols=2, loc="upper center")
    return figure
