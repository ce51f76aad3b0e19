"""On a long text one attention layer averages or copies its tokens, depending on how beta grows with the length n.

arXiv 2510.05554 (equal cosines rho, critical gamma = 1/(1-rho)), arXiv 2605.08505 (uniform keys, beta ~ n^{2/(d-1)}).

(a) Tokens with equal cosines 0.5 and beta = gamma log n: dots are one layer run on exact simplices, lines the exact
formula, dashed its limit; the star is the limit at the critical gamma. Below it all outputs become equal, above it they
keep the cosine of the inputs. (b, c) Uniform keys on the sphere in dimension d, 10 clouds of 2,000 tokens: the weight
of a token on itself, and the sum of squared weights; dashed is the Poisson limit. (d) The beta at which tokens pay half
of their attention to themselves grows like n^{2/(d-1)}.

Differs from the papers: the exact finite-n correlation is drawn beside its limits, and the Poisson limit is turned into
numbers by quadrature.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from attn_flow import Attention, Sphere
from attn_flow.base.progress import progress_bar
from attn_flow.experiments.claims import at_most, claim
from attn_flow.experiments.figures import COLOURS, THEORY, label, name_lines, panels, shades
from attn_flow.theory import long_context as theory

if TYPE_CHECKING:
    from matplotlib.figure import Figure

RHO = 0.5


def compute(quick: bool = False, seed: int = 0, progress: bool = False) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    gammas = np.linspace(0.2, 4.0, 16)
    sizes = (16, 128) if quick else (16, 128, 1024)
    with progress_bar("long context", 5, progress) as advance:
        layers = {str(n): [one_layer(n, float(g)) for g in gammas] for n in sizes}
        advance()
        n, clouds = (800, 4) if quick else (2000, 10)
        b = np.geomspace(0.02, 20, 7 if quick else 12)
        poisson = {}
        for d in (2, 3, 5):
            poisson[str(d)] = uniform_keys(d, n, clouds, b, generator)
            advance()
        scaling = {str(d): half_points(d, (200, 1200) if quick else (250, 1000, 2500), generator) for d in (2, 3, 5)}
        advance()
    exact = {
        m: theory.output_correlation(RHO, gammas * np.log(int(m)), int(m)).tolist()
        for m in (*layers, "1000000", "1000000000000")
    }
    critical = 1 / (1 - RHO)
    far = theory.output_correlation(RHO, critical * np.array([0.7, 1.0, 1.4]) * np.log(1e30), 1e30)
    limit = [1.0, 4 * RHO / (1 + 3 * RHO), RHO]
    error = max(float(np.abs(np.array(layers[m]) - np.array(exact[m])).max()) for m in layers)
    claims = [
        at_most("one layer of equiangular tokens: largest distance from the exact correlation", error, 1e-10, "derived")
    ]
    claims += [
        claim(f"correlation {where} critical gamma, n = 1e30", f, e, 1e-3, source="theorem")
        for where, f, e in zip(("below", "at", "above"), far, limit)
    ]
    for dim, run in poisson.items():
        for key, words in (("self_error", "mean self-weight"), ("part_error", "participation")):
            what = f"uniform keys, d = {dim}: {words}, largest distance from the Poisson limit"
            claims.append(at_most(what, run[key], 0.03, "derived"))
    for dim, run in scaling.items():
        expected = 2 / (int(dim) - 1)
        what = f"uniform keys, d = {dim}: exponent of the critical beta in n"
        claims.append(claim(what, run["exponent"], expected, 0.1 * expected))
    return {
        "seed": seed,
        "rho": RHO,
        "gamma": gammas.tolist(),
        "layers": layers,
        "exact": exact,
        "n": n,
        "clouds": clouds,
        "b": b.tolist(),
        "poisson": poisson,
        "scaling": scaling,
        "claims": claims,
    }


def one_layer(n: int, gamma: float) -> float:
    """Cosine of two outputs of softmax attention on n exactly equiangular tokens at beta = gamma log n."""
    x = torch.linalg.cholesky(
        torch.full((n, n), RHO, dtype=torch.float64) + (1 - RHO) * torch.eye(n, dtype=torch.float64)
    )
    y = Attention.identity(n, gamma * np.log(n)).drift(x)[:2]
    return float(y[0] @ y[1] / (y[0].norm() * y[1].norm()))


def rows_of_uniform(d: int, n: int, clouds: int, b: np.ndarray, generator: torch.Generator) -> torch.Tensor:
    """Attention rows (clouds, b, 100, n) of 100 of n uniform tokens at beta = b n^{2/(d-1)}."""
    beta, rows = theory.critical_beta(n, d, b), []
    for _ in range(clouds):
        x = Sphere().uniform(n, d, generator=generator, dtype=torch.float64)
        rows.append(torch.stack([Attention.identity(d, float(value)).matrix(x)[0, :100] for value in beta]))
    return torch.stack(rows)


def self_weight(rows: torch.Tensor) -> np.ndarray:
    """The mean weight of a token on itself, by b."""
    return rows[..., torch.arange(100), torch.arange(100)].mean((0, 2)).numpy()


def uniform_keys(d: int, n: int, clouds: int, b: np.ndarray, generator: torch.Generator) -> dict[str, Any]:
    """Mean self-weight and participation sum_j w_j^2 at beta = b n^{2/(d-1)}, and the Poisson limit's."""
    rows = rows_of_uniform(d, n, clouds, b, generator)
    own, part = self_weight(rows), rows.square().sum(-1).mean((0, 2)).numpy()
    self_theory = np.array([theory.self_weight(float(v), d) for v in b])
    part_theory = np.array([theory.participation(float(v), d) for v in b])
    return {
        "self": own.tolist(),
        "self_theory": self_theory.tolist(),
        "self_error": float(np.abs(own - self_theory).max()),
        "participation": part.tolist(),
        "participation_theory": part_theory.tolist(),
        "part_error": float(np.abs(part - part_theory).max()),
    }


def half_points(d: int, sizes: tuple[int, ...], generator: torch.Generator) -> dict[str, Any]:
    """The beta at which tokens pay half of their attention to themselves, for several n, and its exponent in n."""
    betas = []
    for n in sizes:
        b = np.geomspace(0.5, 2, 4) * theory.critical_constant(d)
        own = self_weight(rows_of_uniform(d, n, 6, b, generator))
        betas.append(float(np.exp(np.interp(0.5, own, np.log(theory.critical_beta(n, d, b))))))
    slope = np.polyfit(np.log(sizes), np.log(betas), 1)[0]
    return {"n": list(sizes), "beta": betas, "exponent": float(slope), "balance": theory.critical_constant(d)}


def plot(numbers: dict[str, Any]) -> Figure:
    figure, (a, b, c, d) = panels(4)
    gamma, rho = np.array(numbers["gamma"]), numbers["rho"]
    for (n, curve), colour in zip(numbers["exact"].items(), shades(len(numbers["exact"]))):
        size = rf"$10^{{{len(n) - 1}}}$" if len(n) > 5 else n
        a.plot(gamma, curve, color=colour, label=f"n = {size}")
        if n in numbers["layers"]:
            a.plot(gamma, numbers["layers"][n], "o", color=colour, markersize=4)
    critical = 1 / (1 - rho)
    a.plot([gamma[0], critical, critical, gamma[-1]], [1, 1, rho, rho], **THEORY, label=r"$n=\infty$")
    a.plot(critical, 4 * rho / (1 + 3 * rho), "*", color="black", markersize=10)
    label(a, r"equal cosines, $\beta=\gamma\,\log\,n$", r"$\gamma$", "cosine of two outputs")
    for (dim, run), colour in zip(numbers["poisson"].items(), COLOURS):
        for axis, key in ((b, "self"), (c, "participation")):
            axis.semilogx(numbers["b"], run[key], "o", color=colour, markersize=5, label=f"d = {dim}")
            axis.semilogx(numbers["b"], run[f"{key}_theory"], **THEORY)
    label(b, "uniform keys: attention to itself", r"$\beta\, n^{-2/(d-1)}$", "mean weight of itself")
    label(c, "uniform keys: participation", r"$\beta\, n^{-2/(d-1)}$", r"mean of $\sum_j w_j^2$")
    for (dim, run), colour in zip(numbers["scaling"].items(), COLOURS):
        n = np.array(run["n"])
        d.loglog(n, run["beta"], "o", color=colour, label=f"d = {dim}")
        d.loglog(n, theory.critical_beta(n, int(dim), run["balance"]), **THEORY)
    d.set_xticks(n, [f"{size:,}" for size in n])
    d.xaxis.minorticks_off()
    label(d, "half of the attention on itself", "number of keys n", r"critical $\beta$", legend=False)
    name_lines(d)
    return figure
