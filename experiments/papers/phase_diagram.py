"""The phase diagram of clustering over (t, beta): in high dimension its boundary is the equiangular curve.

Geshkovski, Letrouit, Polyanskiy, Rigollet, arXiv 2312.10794, section 6 and figures. Fraction of pairs i != j with
<x_i, x_j> > .999, n = 32 uniform tokens, softmax, V = I. Differs from the paper: all betas and seeds are one batch; for
d > n the flow stays in the span of the n tokens, so d = 128 and 1024 are run, exactly, in R^n; the diagonal of the pair
matrix is removed, which otherwise reads as clustering.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from attn_flow import Attention, Sphere, flow
from attn_flow.base.progress import progress_bar
from attn_flow.experiments.claims import at_least, at_most
from attn_flow.experiments.figures import caption, label, panels
from attn_flow.observe.quantities import close_pairs
from attn_flow.theory import equiangular

if TYPE_CHECKING:
    from matplotlib.figure import Figure

N, CLOSE, DIMENSIONS = 32, 0.999, (2, 8, 128, 1024)


def compute(quick: bool = False, seed: int = 0, progress: bool = False) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    beta = np.linspace(0.1, 9.0, 12 if quick else 90)
    seeds, chunk = (4, 4) if quick else (64, 4)
    t = torch.linspace(0, 30, 61)
    fraction = {}
    with progress_bar("phase diagram", len(DIMENSIONS) * seeds // chunk, progress) as advance:
        for d in DIMENSIONS:
            parts = []
            for _ in range(seeds // chunk):
                parts.append(clustered(d, beta, chunk, t, 0.5 if quick else 0.25, generator))
                advance()
            fraction[str(d)] = torch.stack(parts).mean(0).numpy()  # (T, betas)
    curve = equiangular.time_between(1.0, 1 - CLOSE, beta, N)
    boundary = {d: crossing(t.numpy(), f) for d, f in fraction.items()}
    # compare where the curve lies inside the diagram
    inside = curve < 0.9 * float(t[-1])
    errors = {d: float(np.nanmedian(np.abs(b[inside] / curve[inside] - 1))) for d, b in boundary.items()}
    claims = [
        at_most(
            "d = 1024: median relative distance of the boundary from the equiangular time",
            errors["1024"],
            0.05,
            "theorem",
        ),
        at_most("d = 128: the same", errors["128"], 0.15, "theorem"),
        at_least("d = 2: the same (the curve is not the boundary there)", errors["2"], 0.15),
    ]
    return {
        "seed": seed,
        "seeds": seeds,
        "n": N,
        "t": t.tolist(),
        "beta": beta.tolist(),
        "fraction": fraction,
        "boundary": {d: b.tolist() for d, b in boundary.items()},
        "curve": curve.tolist(),
        "errors": errors,
        "claims": claims,
    }


def clustered(d: int, beta: np.ndarray, seeds: int, t: Tensor, h: float, generator: torch.Generator) -> Tensor:
    """Fraction of pairs i != j with cosine above .999, (T, betas), averaged over `seeds` starts shared by all betas."""
    x0 = Sphere().uniform((seeds, 1, N), d, generator=generator, dtype=torch.float64)
    if d > N:  # V = I keeps the span: the Gram matrix has a Cholesky factor in R^n, exactly the same flow
        x0 = torch.linalg.cholesky(x0 @ x0.mT)
    attention = Attention.identity(x0.shape[-1], torch.as_tensor(beta)[:, None])
    path = flow(attention, x0.float(), t, h=h)
    return torch.stack([close_pairs(x, CLOSE).mean(0) for x in path.x])


def crossing(t: np.ndarray, fraction: np.ndarray) -> np.ndarray:
    """First time the fraction passes 1/2, for every beta; NaN where it never does."""
    out = np.full(fraction.shape[1], np.nan)
    for j, f in enumerate(fraction.T):
        above = np.flatnonzero(f > 0.5)
        if len(above) and above[0] > 0:
            i = above[0]
            out[j] = t[i - 1] + (0.5 - f[i - 1]) / (f[i] - f[i - 1]) * (t[i] - t[i - 1])
    return out


def plot(numbers: dict[str, Any]) -> Figure:
    figure, axes = panels(4, title=r"Fraction of pairs with $\langle x_i,x_j\rangle>.999$")
    t, beta = np.array(numbers["t"]), np.array(numbers["beta"])
    curve = np.array(numbers["curve"])
    for axis, (d, fraction) in zip(axes, numbers["fraction"].items()):
        image = axis.pcolormesh(
            t, beta, np.asarray(fraction).T, cmap="viridis", vmin=0, vmax=1, shading="nearest", rasterized=True
        )
        axis.plot(curve, beta, color="white", linestyle="--", linewidth=1.5, label="equiangular ODE")
        boundary = np.array(numbers["boundary"][d], dtype=float)  # on disk "nan" where it is open
        axis.plot(boundary, beta, color="#d55e00", linewidth=1, label="fraction 1/2")
        axis.set_xlim(0, t[-1])
        label(axis, f"d={d}: off by {100 * numbers['errors'][d]:.0f}% (median)", "time t", r"$\beta$", legend=False)
    axes[0].legend(fontsize=7.5, loc="upper right", labelcolor="white", frameon=False)
    figure.colorbar(image, ax=axes, shrink=0.8, label="fraction of pairs")
    caption(
        figure,
        f"n={numbers['n']}, softmax, V=I, {numbers['seeds']} uniform starts, RK4, float32. White: time to rho=.999 "
        f"from rho=0 by the equiangular ODE; the boundary approaches it as d grows. Seed {numbers['seed']}.",
    )
    return figure
