"""In high dimension one simple curve tells when tokens cluster, for every temperature.

Geshkovski, Letrouit, Polyanskiy, Rigollet, arXiv 2312.10794, section 6 and figures. Colour is the fraction of pairs of
different tokens with a cosine above 0.999, for 32 uniform tokens on the sphere in dimension d, softmax attention with V
= I, 64 starts, over time t and inverse temperature beta. White is the time at which tokens with equal cosines, 0 at the
start, reach 0.999; red is where half of the pairs do. The red curve approaches the white one as d grows.

Differs from the paper: for d > 32 the flow stays in the span of the tokens, so that it is run, exactly, in R^32; the
diagonal of the pair matrix is removed, which otherwise reads as clustering.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from attn_flow import Attention, Sphere, flow
from attn_flow.base.progress import progress_bar
from attn_flow.experiments.claims import at_least, at_most
from attn_flow.experiments.figures import FONT, label, panels
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
    figure, axes = panels(4)
    t, beta = np.array(numbers["t"]), np.array(numbers["beta"])
    curve = np.array(numbers["curve"])
    for axis, (d, fraction) in zip(axes, numbers["fraction"].items()):
        image = axis.pcolormesh(
            t, beta, np.asarray(fraction).T, cmap="cividis", vmin=0, vmax=1, shading="nearest", rasterized=True
        )
        axis.plot(curve, beta, color="white", linestyle="--", linewidth=2, label="equal cosines")
        boundary = np.array(numbers["boundary"][d], dtype=float)  # on disk "nan" where it is open
        axis.plot(boundary, beta, color="#ff4422", linewidth=1.6, label="half of the pairs")
        axis.set_xlim(0, t[-1])
        label(axis, f"dimension d = {d}", "time t", r"$\beta$", legend=False)
    axes[0].legend(fontsize=FONT - 0.5, loc="upper right", labelcolor="white", frameon=False)
    colours = figure.colorbar(image, ax=axes, shrink=0.6, aspect=30)
    colours.set_label("fraction of pairs with a cosine above 0.999", fontsize=FONT)
    return figure
