"""Causal attention remembers the beginning and the end of a text and loses the middle, until a critical time.

arXiv 2605.09213 (kinetic model of lost in the middle), arXiv 2411.04990 (causal collapse). The recall of position s is
the response of the last position's modes to a small change of the token at s, with M = 8 symbols, beta = 1 and a
recency weight exp(lambda s), lambda = 1.

(a) Simulated recall meets the exact formula for the same number of positions; its limit for infinitely many is of order
1/N away. (b) Before t_crit the profile is U-shaped; later the last positions lose their advantage, while recall of the
first ones diverges as s tends to 0. (c) 24 causal tokens on the sphere: every token tends to the first, which never
moves; the dashed line is the rate of token 2.

Differs from the paper: each position carries a lattice of angles (the mean field of its random token), so a single run
has no Monte Carlo noise.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from scipy.linalg import expm
from torch import Tensor

from attn_flow import Attention, Cloud, Sphere, flow
from attn_flow.attention import Transformed
from attn_flow.base.progress import progress_bar
from attn_flow.experiments.claims import at_least, at_most, claim
from attn_flow.experiments.figures import COLOURS, THEORY, label, panels, shades
from attn_flow.theory import causal as theory

if TYPE_CHECKING:
    from matplotlib.figure import Figure

LAM, SYMBOLS, BETA, MODES = 1.0, 8, 1.0, 4


def compute(quick: bool = False, seed: int = 0, progress: bool = False) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    t_crit = theory.recency_time(BETA, LAM, SYMBOLS)
    N, m = (24, 10) if quick else (64, 16)
    sources = np.unique(np.round(np.linspace(N // 4, N - 2, 6 if quick else 12)).astype(int))
    with progress_bar("lost in the middle", 3, progress) as advance:
        collapse_ = collapse(generator)
        advance()
        profiles = []
        for ratio in (0.4, 1.3):
            profiles.append(profile(ratio * t_crit, N, m, sources, generator))
            advance()
    s = np.concatenate([np.geomspace(1e-4, 0.02, 60), np.linspace(0.021, 1, 140)])
    score = lambda ratio: theory.retrieval_score(ratio * t_crit, s, BETA, LAM, SYMBOLS).tolist()
    curves = {str(ratio): score(ratio) for ratio in (0.2, 0.5, 1.0, 2.0)}
    ends = lambda t: np.diff(theory.retrieval_score(t, [1 - 1e-4, 1.0], BETA, LAM, SYMBOLS))[0]
    claims = [
        claim(
            "causal, V = I: decay rate of the second token to x_1(0)",
            collapse_["rate"],
            theory.consensus_rates(2)[1],
            0.01,
        ),
        at_most("causal: largest distance from x_1(0) at the end", collapse_["end"], 1e-2, "theorem"),
        at_least("recency slope while every profile is U-shaped", ends(theory.u_shape_time(BETA, LAM)), 0.0, "theorem"),
        at_least("recency slope of the profile just before t_crit", ends(0.99 * t_crit), 0.0, "theorem"),
        at_most("recency slope just after", ends(1.01 * t_crit), 0.0, "theorem"),
    ]
    for p in profiles:
        what = f"particles at t = {p['t']:.3g}, N = {N}: "
        claims.append(at_most(what + "mean relative distance from N-position theory", p["error"], 0.1, "derived"))
        claims.append(
            at_most(
                what + "mean relative distance from its limit",
                p["continuum_error"],
                3 * max(1.0, p["t"]) / N,
                "theorem",
            )
        )
    return {
        "seed": seed,
        "t_crit": t_crit,
        "N": N,
        "m": m,
        "collapse": collapse_,
        "profiles": profiles,
        "s": s.tolist(),
        "curves": curves,
        "claims": claims,
    }


def collapse(generator: torch.Generator) -> dict[str, Any]:
    """Distances of 24 causal tokens on S^2 from the first, which never moves."""
    t = torch.linspace(0, 40, 81, dtype=torch.float64)
    x0 = Sphere().uniform(24, 3, generator=generator, dtype=torch.float64)
    path = flow(Attention.identity(3, 1.0, causal=True), x0, t, h=0.25)
    distance = (path.x - x0[0]).norm(dim=-1)
    largest = distance.amax(-1)
    second = distance[:, 1]  # moves with the first token alone
    rate = -float((second[-1] / second[-21]).log() / (t[-1] - t[-21]))
    return {"t": t.tolist(), "distance": distance.T.tolist(), "rate": rate, "end": float(largest[-1])}


def profile(t: float, N: int, m: int, sources: np.ndarray, generator: torch.Generator) -> dict[str, Any]:
    """Response of the last position's modes to a small modulation of one source position: S_t(s) for every source."""
    eps = 1e-4
    lattice = 2 * math.pi * torch.arange(m, dtype=torch.float64) / m
    theta = lattice + 2 * math.pi * torch.rand(N, 1, generator=generator, dtype=torch.float64)
    k = torch.arange(1, MODES + 1)
    moved = theta.expand(len(sources) + 1, N, m).clone()  # the last run stays unmodulated
    for i, source in enumerate(sources):
        moved[i, source] -= (eps / k * (theta[source, :, None] * k).sin()).sum(-1)
    position = torch.arange(N).repeat_interleave(m)
    weights = torch.exp(LAM * position.double() / N)
    weights = weights / weights.sum()
    visible = torch.stack([weights[position < j].sum() for j in range(N)])[position]
    # theta_j' = sum_{k<j} A_jk w'(theta_j - theta_k): A is normalised over k < j, and w' carries a factor beta
    scale = torch.where(visible > 0, BETA / torch.where(visible > 0, visible, 1.0), 0.0)
    # A token's own term is along the token, so that the projection to the circle removes it: k <= j acts as k < j.
    attention = Attention.identity(2, BETA, kind="unnormalised", causal=True)
    memory = Transformed(attention, lambda A, time, x: scale[:, None] * A(time, x), "memory")
    x0 = torch.stack([moved.cos(), moved.sin()], -1).flatten(-3, -2)
    path = flow(memory, Cloud(x0, weights), [0.0, t], h=0.15)
    c = modes(path.x, N, m, k)  # (2, runs, N, modes)
    response = (c[1, :-1, -1] - c[1, -1:, -1]).abs()
    source_mode = torch.stack([(c[0, i, s] - c[0, -1, s]).abs() for i, s in enumerate(sources.tolist())])
    score = (N * response / source_mode * torch.as_tensor(theory.mode_weights(SYMBOLS, MODES))).sum(-1).numpy()
    place = (sources + 0.5) / N
    expected = theory.retrieval_score(t, place, BETA, LAM, SYMBOLS)
    finite = finite_score(t, N)[sources]
    return {
        "t": t,
        "s": place.tolist(),
        "score": score.tolist(),
        "theory": expected.tolist(),
        "finite": finite.tolist(),
        "error": float(np.abs(score / finite - 1).mean()),
        "continuum_error": float(np.abs(score / expected - 1).mean()),
    }


def finite_score(t: float, N: int) -> np.ndarray:
    """S_t of N positions, exactly: N e^{a_n t A} for its limit g_{a_n}; a position's tokens see half of it."""
    weights = np.exp(LAM * np.arange(N) / N)
    visible = np.concatenate([[1.0], np.cumsum(weights)[:-1]])  # the first position sees nobody before it
    A = np.tril(np.broadcast_to(weights, (N, N)), -1) / visible[:, None]
    A[np.arange(1, N), np.arange(1, N)] = weights[1:] / visible[1:] / 2
    a, w = theory.mode_rates(BETA, MODES), theory.mode_weights(SYMBOLS, MODES)
    return sum(w_n * N * expm(a_n * t * A)[-1] for a_n, w_n in zip(a, w))


def modes(x: Tensor, N: int, m: int, k: Tensor) -> Tensor:
    """c_k of every position, (..., N, modes)."""
    theta = torch.atan2(x[..., 1], x[..., 0]).unflatten(-1, (N, m))
    return torch.exp(-1j * k * theta[..., None]).mean(-2)


def plot(numbers: dict[str, Any]) -> Figure:
    figure, (a, b, c) = panels(3)
    for profile_, colour in zip(numbers["profiles"], COLOURS):
        time = rf"$t={profile_['t'] / numbers['t_crit']:.1f}\,t_{{\rm crit}}$"
        a.plot(profile_["s"], profile_["score"], "o", color=colour, label=f"{time}, simulated")
        a.plot(profile_["s"], profile_["finite"], color=colour, label=f"{numbers['N']} positions, exact")
        a.plot(profile_["s"], profile_["theory"], **THEORY)
    a.set_ylim(0, None)
    label(a, "how much the last position recalls of position s (dashed: infinitely many)", "position s", "recall")
    for (ratio, curve), colour in zip(numbers["curves"].items(), shades(4)):
        words = rf"$t={float(ratio):g}\,t_{{\rm crit}}$"
        b.plot(numbers["s"], np.array(curve) / curve[-1], color=colour, label=words)
    b.set_ylim(0, 3)
    label(b, "closed form, by time", "position s", "recall / recall of s = 1")
    run = numbers["collapse"]
    t = np.array(run["t"])
    for path, colour in zip(run["distance"][1:], shades(len(run["distance"]) - 1)):
        c.semilogy(t, path, color=colour, linewidth=0.8)
    c.semilogy(t, 3 * np.exp(-t / 2), **THEORY, label=r"$e^{-t/2}$")
    c.set_ylim(1e-6, 6)
    label(c, "every token tends to the first", "time t", "distance to token 1")
    return figure
