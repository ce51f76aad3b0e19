"""Several symmetric heads climb their total energy while a single head's energy may fall; heads add super-linearly.

arXiv 2605.04279 (V_h = G_h symmetric, unnormalised attention). Differs from the paper: monotonicity is also broken on
purpose, by rotating V_h away from G_h, to see how much of it survives.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from attn_flow.attention import Attention
from attn_flow.experiments.claims import bound, claim
from attn_flow.experiments.figures import COLOURS, THEORY, caption, label, panels
from attn_flow.flow import flow
from attn_flow.geometry import Sphere
from attn_flow.progress import progress as progress_bar
from attn_flow.theory import multi_head as theory

if TYPE_CHECKING:
    from matplotlib.figure import Figure

D, HEADS, N = 6, 4, 24


def compute(quick: bool = False, seed: int = 0, progress: bool = False) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    with progress_bar("multi head", 3, progress) as advance:
        energy = energies(generator)
        advance()
        spreads = np.linspace(0, 0.9, 4 if quick else 10)
        rates = [terminal(1 + s * np.array([-1.0, 0.0, 1.0]), 1.0) for s in spreads]
        advance()
        angles = np.linspace(0, math.pi / 2, 5 if quick else 13)
        broken = [falling(a, 8 if quick else 64, generator) for a in angles]
        advance()
    entropy_rho = np.linspace(-0.03, 1, 60)
    entropy = {str(b): theory.attention_entropy(entropy_rho, b, 32).tolist() for b in (1.0, 4.0, 9.0)}
    claims = [
        bound("total energy: largest fall between times, relative", energy["total_fall"], at_most=1e-12),
        bound("a single head's energy falls at some time: largest fall, relative", energy["head_fall"], at_least=1e-3),
    ]
    claims += [
        claim(f"terminal rate of heads 1 + {s:.2f} (-1, 0, 1)", r["rate"], r["theory"], 5e-3 * r["theory"])
        for s, r in zip(spreads, rates)
    ]
    claims += [
        bound(
            "unequal heads are faster than averaged ones: smallest ratio",
            min(r["theory"] / rates[0]["theory"] for r in rates[1:]),
            at_least=1.0,
        ),
        claim("V_h = G_h: fraction of steps where the energy falls", broken[0]["fraction"], 0.0, 0.0),
        bound("V_h orthogonal to G_h: fraction of steps where the energy falls", broken[-1]["fraction"], at_least=0.05),
    ]
    return {
        "seed": seed,
        "energy": energy,
        "spread": spreads.tolist(),
        "rates": rates,
        "angle": angles.tolist(),
        "broken": broken,
        "entropy": {"rho": entropy_rho.tolist(), "curves": entropy},
        "claims": claims,
    }


def log_energies(x: Tensor, G: Tensor, beta: float) -> Tensor:
    """log of (1/(2 beta n^2)) sum_ij e^{beta <x_i, G_h x_j>}, (..., heads)."""
    scores = beta * torch.einsum("...id,...hde,...je->...hij", x, G, x)
    return torch.logsumexp(scores.flatten(-2), -1) - math.log(2 * beta * x.shape[-2] ** 2)


def symmetric(heads: int, generator: torch.Generator, batch: tuple[int, ...] = ()) -> Tensor:
    A = torch.randn(*batch, heads, D, D, generator=generator, dtype=torch.float64) / math.sqrt(D)
    return (A + A.mT) / math.sqrt(2)


def energies(generator: torch.Generator) -> dict[str, Any]:
    """Per-head energies along eight paths, each with its own heads; kept: the one where a head's energy falls most."""
    beta, t = 1.0, torch.linspace(0, 6, 61, dtype=torch.float64)
    G = symmetric(HEADS, generator, (8,))
    x0 = Sphere().uniform((8, N), D, generator=generator, dtype=torch.float64)
    path = flow(Attention(Q=G, V=G, beta=beta, kind="unnormalised"), x0, t, h=0.025)
    heads = log_energies(path.x, G, beta).exp()  # (T, 8, heads)
    total = heads.sum(-1)
    highest = heads.cummax(0).values
    fall = ((highest - heads) / highest).amax((0, 2))
    shown = int(fall.argmax())
    return {
        "t": t.tolist(),
        "heads": heads[:, shown].T.tolist(),
        "total": total[:, shown].tolist(),
        "head_fall": float(fall[shown]),
        "total_fall": max(0.0, float((-total.diff(dim=0) / total[0]).max())),
    }


def terminal(m: np.ndarray, beta: float) -> dict[str, float]:
    """Rate of 1 - rho near consensus with scalar heads m_h I, measured and from the closed form."""
    expected = float(theory.terminal_rate(m, beta))
    eye = torch.eye(3, dtype=torch.float64)
    G = torch.as_tensor(m)[:, None, None] * eye
    x0 = torch.tensor([[1.0, 0.02, 0.0], [1.0, -0.01, 0.02], [1.0, 0.0, -0.02]], dtype=torch.float64)
    t = torch.tensor([0.0, 3.0, 6.0], dtype=torch.float64) / expected
    path = flow(Attention(Q=G, V=G, beta=beta, kind="unnormalised"), x0, t, h=0.1 / expected)
    gap = (path.x - path.x.mean(-2, keepdim=True)).square().sum((-1, -2))
    return {"rate": -float((gap[2] / gap[1]).log() / (t[2] - t[1])), "theory": expected}


def falling(angle: float, draws: int, generator: torch.Generator) -> dict[str, float]:
    """V_h = cos(a) G_h + sin(a) R_h with R_h random, of the same size: how often and how far E falls."""
    beta, t = 1.0, torch.linspace(0, 6, 61, dtype=torch.float64)
    G = symmetric(HEADS, generator, (draws,))
    R = torch.randn(draws, HEADS, D, D, generator=generator, dtype=torch.float64) / math.sqrt(D)
    V = math.cos(angle) * G + math.sin(angle) * R
    x0 = Sphere().uniform((draws, N), D, generator=generator, dtype=torch.float64)
    path = flow(Attention(Q=G, V=V, beta=beta, kind="unnormalised"), x0, t, h=0.05)
    total = torch.logsumexp(log_energies(path.x, G, beta), -1)  # (T, draws)
    step = total.diff(dim=0)
    worst = (total.cummax(0).values - total).amax(0)  # log of the largest fall
    return {"fraction": float((step < -1e-9).double().mean()), "fall": float(1 - (-worst).exp().mean())}


def plot(numbers: dict[str, Any]) -> Figure:
    figure, (a, b, c, d) = panels(4, title="Multi-head attention as a gradient flow")
    energy = numbers["energy"]
    for i, head in enumerate(energy["heads"]):
        a.plot(energy["t"], head, color=COLOURS[i], linewidth=1, label=f"head {i + 1}")
    a.plot(energy["t"], energy["total"], color="black", linewidth=1.8, label="total")
    a.set_yscale("log")
    label(a, f"total rises, a head falls by {100 * energy['head_fall']:.0f}%", "time t", "energy")
    b.plot(numbers["spread"], [r["rate"] for r in numbers["rates"]], "o", color=COLOURS[0], label="simulated")
    b.plot(numbers["spread"], [r["theory"] for r in numbers["rates"]], **THEORY, label=r"$2\sum m_h e^{\beta m_h}$")
    b.axhline(numbers["rates"][0]["theory"], color="grey", linewidth=0.8, label="averaged heads")
    label(b, r"heads $1+s(-1,0,1)$, $\beta=1$", "spread s", "terminal rate of 1 - rho")
    angle = np.degrees(numbers["angle"])
    c.plot(
        angle, [r["fraction"] for r in numbers["broken"]], "o-", color=COLOURS[0], label="fraction of steps that fall"
    )
    c.plot(
        angle, [r["fall"] for r in numbers["broken"]], "s-", color=COLOURS[1], label="mean largest fall of E, relative"
    )
    label(c, r"$V_h=\cos a\,G_h+\sin a\,R_h$: monotonicity fails", "angle a (degrees)", "")
    for (beta, curve), colour in zip(numbers["entropy"]["curves"].items(), COLOURS):
        d.plot(numbers["entropy"]["rho"], curve, color=colour, label=rf"$\beta$={float(beta):g}")
    d.axhline(math.log(32), color="grey", linewidth=0.8)
    label(d, "attention entropy, n=32 (closed form)", r"cosine $\rho$", "entropy (nats)")
    caption(
        figure,
        f"Unnormalised attention. (a) {HEADS} random symmetric heads, d={D}, n={N}; of eight draws, the one whose head "
        f"falls most. (b) three tokens near consensus. (c) random G_h symmetric, R_h Gaussian. Seed {numbers['seed']}.",
    )
    return figure
