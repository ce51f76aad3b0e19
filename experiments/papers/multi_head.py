"""Several symmetric heads together always raise one energy, although the energy of a single head may fall.

arXiv 2605.04279, with V_h = G_h symmetric and unnormalised attention.

(a) Four random heads, 24 tokens in d = 6; of eight draws, the one in which a head's energy falls most. (b) Three scalar
heads near consensus: unequal heads are faster than equal ones with the same mean. (c) With V_h = cos(a) G_h + sin(a)
R_h, R_h random, the energy may fall. (d) In a trained encoder the outputs of attention are almost orthogonal to the
gradient of this energy: it is no gradient flow.

Differs from the paper: (c) breaks the theorem on purpose, and (d) looks for it in MiniLM, where its package is
installed.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from attn_flow import Attention, Cloud, Sphere, flow
from attn_flow.base.progress import progress_bar
from attn_flow.experiments.claims import at_least, at_most, claim
from attn_flow.experiments.figures import COLOURS, THEORY, label, name_lines, not_installed, panels
from attn_flow.observe.quantities import log_energy
from attn_flow.theory import multi_head as theory

if TYPE_CHECKING:
    from matplotlib.figure import Figure

D, HEADS, N = 6, 4, 24


def compute(quick: bool = False, seed: int = 0, progress: bool = False) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    with progress_bar("multi head", 4, progress) as advance:
        energy = energies(generator)
        advance()
        spreads = np.linspace(0, 0.9, 4 if quick else 10)
        rates = [terminal(1 + s * np.array([-1.0, 0.0, 1.0]), 1.0) for s in spreads]
        advance()
        angles = np.linspace(0, math.pi / 2, 5 if quick else 13)
        broken = [falling(a, 8 if quick else 64, generator) for a in angles]
        advance()
    simplex = [on_simplex(heads) for heads in ((1.0, 1.0), (0.5, 1.5), (-0.5, 1.5))]
    trained = encoder(2 if quick else 12)
    claims = [
        at_most("total energy: largest fall between times, relative", energy["total_fall"], 1e-12, "theorem"),
        at_least("a single head's energy falls at some time: largest fall, relative", energy["head_fall"], 1e-3),
    ]
    claims += [
        claim(f"terminal rate of heads 1 + {s:.2f} (-1, 0, 1)", r["rate"], r["theory"], 5e-3 * r["theory"])
        for s, r in zip(spreads, rates)
    ]
    claims += [
        at_least(
            "unequal heads are faster than averaged ones: smallest ratio",
            min(r["rate"] / rates[0]["rate"] for r in rates[1:]),
            1.0,
            "derived",
        ),
        claim("V_h = G_h: fraction of steps where the energy falls", broken[0]["fraction"], 0.0, 0.0, source="theorem"),
        at_least("V_h orthogonal to G_h: fraction of steps where the energy falls", broken[-1]["fraction"], 0.05),
    ]
    claims.append(
        at_most(
            "scalar heads on a simplex: largest distance of rho' from its closed form", max(simplex), 1e-12, "derived"
        )
    )
    if trained is not None:
        largest = max(abs(layer["mean"]) for layer in trained["layers"])
        what = "MiniLM: largest mean cosine of attention outputs with the energy gradient (1 for a gradient flow)"
        claims.append(at_most(what, largest, 0.3))
    return {
        "seed": seed,
        "encoder": trained,
        "energy": energy,
        "spread": spreads.tolist(),
        "rates": rates,
        "angle": angles.tolist(),
        "broken": broken,
        "claims": claims,
    }


def log_energies(x: Tensor, G: Tensor, beta: float) -> Tensor:
    """log energy of every head by itself, (..., heads)."""
    return torch.stack([log_energy(x, beta, G[..., h : h + 1, :, :]) for h in range(G.shape[-3])], -1)


def symmetric(heads: int, generator: torch.Generator, batch: tuple[int, ...] = ()) -> Tensor:
    A = torch.randn(*batch, heads, D, D, generator=generator, dtype=torch.float64) / math.sqrt(D)
    return (A + A.mT) / math.sqrt(2)


def energies(generator: torch.Generator) -> dict[str, Any]:
    """Per-head energies along eight paths, each with its own heads; kept: the one where a head's energy falls most."""
    beta, t = 1.0, torch.linspace(0, 3, 31, dtype=torch.float64)
    G = symmetric(HEADS, generator, (8,))
    x0 = Sphere().uniform((8, N), D, generator=generator, dtype=torch.float64)
    path = flow(Attention(Q=G, V=G, beta=beta, kind="unnormalised"), x0, t, h=0.05)
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


def on_simplex(heads: tuple[float, ...], beta: float = 1.0, n: int = 5) -> float:
    """Largest distance of rho' of equiangular tokens under scalar heads from its closed form."""
    eye = torch.eye(n, dtype=torch.float64)
    G = torch.tensor(heads, dtype=torch.float64)[:, None, None] * eye
    attention = Attention(Q=G, V=G, beta=beta, kind="unnormalised")
    rho, measured = np.linspace(-0.15, 0.95, 9), []
    for value in rho:
        x = torch.linalg.cholesky(value + (1 - value) * eye)
        v = Sphere().tangent(x, attention.drift(x))
        measured.append(float(v[0] @ x[1] + x[0] @ v[1]))
    expected = theory.velocity(rho, heads, beta, n)
    return float(np.abs(measured - expected).max())


def falling(angle: float, draws: int, generator: torch.Generator) -> dict[str, float]:
    """V_h = cos(a) G_h + sin(a) R_h with R_h random, of the same size: how often and how far E falls."""
    beta, t = 1.0, torch.linspace(0, 3, 31, dtype=torch.float64)
    G = symmetric(HEADS, generator, (draws,))
    R = torch.randn(draws, HEADS, D, D, generator=generator, dtype=torch.float64) / math.sqrt(D)
    V = math.cos(angle) * G + math.sin(angle) * R
    x0 = Sphere().uniform((draws, N), D, generator=generator, dtype=torch.float64)
    path = flow(Attention(Q=G, V=V, beta=beta, kind="unnormalised"), x0, t, h=0.05)
    total = torch.logsumexp(log_energies(path.x, G, beta), -1)  # (T, draws)
    step = total.diff(dim=0)
    worst = (total.cummax(0).values - total).amax(0)  # log of the largest fall
    return {"fraction": float((step < -1e-9).double().mean()), "fall": float(1 - (-worst).exp().mean())}


def encoder(texts: int) -> dict[str, Any] | None:
    """Cosine between each token's attention output and the gradient of its layer's energy, in MiniLM; None without it.

    A gradient flow has cosine 1 (V_h = G_h); the energy keeps the layer's own G_h and beta, and leaves biases out.
    """
    from attn_flow.hooks import attentions, record
    from attn_flow.hooks.demo import minilm, topics

    try:
        model, tokenizer = minilm()
    except ModuleNotFoundError:
        return None
    short = [" ".join(text.split()[:45]) for text in topics(texts)]
    path = record(model, tokenizer, short, max_length=128)
    assert path.mask is not None
    layers = []
    for attention, x in zip(attentions(model), path.x):
        x = x.clone().requires_grad_(True)
        beta = float(torch.as_tensor(attention.beta).max())  # one for all heads of an encoder's layer
        total = log_energy(Cloud(x, mask=path.mask), beta, attention.G).sum()
        (uphill,) = torch.autograd.grad(total, x)
        with torch.no_grad():
            output = attention.drift(Cloud(x, mask=path.mask))
            cosine = torch.cosine_similarity(uphill, output, dim=-1)[path.mask]
        layers.append({"mean": float(cosine.mean()), "downhill": float((cosine < 0).float().mean())})
    return {"texts": texts, "tokens": int(path.mask.sum()), "layers": layers}


def plot(numbers: dict[str, Any]) -> Figure:
    figure, (a, b, c, d) = panels(4)
    energy = numbers["energy"]
    for i, head in enumerate(energy["heads"]):
        a.semilogy(energy["t"], head, color=COLOURS[i], label=f"head {i + 1}")
    a.semilogy(energy["t"], energy["total"], color="black", linewidth=2, label="total")
    a.set_yticks([0.5, 1, 2, 5], ["0.5", "1", "2", "5"])
    a.yaxis.minorticks_off()
    label(a, "energy of four heads and their sum", "time t", "energy", legend=False)
    name_lines(a)
    b.plot(numbers["spread"], [r["rate"] for r in numbers["rates"]], "o", color=COLOURS[0], label="simulated")
    b.plot(numbers["spread"], [r["theory"] for r in numbers["rates"]], **THEORY, label=r"$2\sum m_h e^{\beta m_h}$")
    b.axhline(numbers["rates"][0]["theory"], color="grey", linewidth=1, label="three equal heads")
    label(b, r"heads $1-s,\ 1,\ 1+s$", "spread s of the heads", "rate to consensus")
    angle = np.degrees(numbers["angle"])
    c.plot(angle, [r["fraction"] for r in numbers["broken"]], "o-", color=COLOURS[0], label="share of falling steps")
    c.plot(angle, [r["fall"] for r in numbers["broken"]], "s-", color=COLOURS[1], label="largest fall, relative")
    label(c, "values turned away from the scores", "angle a (degrees)", "falls of the energy")
    trained = numbers["encoder"]
    if trained is None:
        not_installed(d)
    else:
        layers = range(len(trained["layers"]))
        downhill = [layer["downhill"] for layer in trained["layers"]]
        d.bar(layers, [layer["mean"] for layer in trained["layers"]], color=COLOURS[0], label="mean cosine")
        d.plot(layers, downhill, "s", color=COLOURS[1], label="tokens that go downhill")
        d.axhline(1, **THEORY, label="cosine of a gradient flow")
        d.axhline(0, color="grey", linewidth=0.8)
        d.set_ylim(-0.1, 1.7)
    label(d, "MiniLM: is it a gradient flow?", "layer", "cosine, fraction", legend=trained is not None)
    return figure
