"""With hard attention some tokens lead and never move; the others fall to them at a geometric rate.

Alcalde, Fantuzzi, Zuazua, arXiv 2407.01602 (leaders); arXiv 2508.09628 (Frank-Wolfe view). Every step is x <- (x +
alpha mean)/(1 + alpha), with alpha = 0.3, G the identity and the mean over the tokens of largest score.

(a) 40 Gaussian tokens in the plane, their convex hull in grey, leaders as stars. (b) Tokens that follow a leader from
the start. (c) From random points of a random polytope in six dimensions, the smallest Frank-Wolfe gap stays below the
bound of the paper. (d) Softmax attention with inverse temperature beta stays at a distance of order 1/beta from the
hardmax path.

Differs from the papers: a vertex of the hull that is not its own argmax does move; only leaders rest.
"""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from attn_flow import Attention, Euclidean, euler, flow
from attn_flow.attention import Transformed
from attn_flow.base.progress import progress_bar
from attn_flow.dynamics.step_size import StepWarning
from attn_flow.experiments.claims import at_least, at_most, claim
from attn_flow.experiments.figures import COLOURS, THEORY, label, name_lines, panels, shades
from attn_flow.theory import hardmax as theory

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ALPHA = 0.3
STEP = ALPHA / (1 + ALPHA)


def compute(quick: bool = False, seed: int = 0, progress: bool = False) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    n, steps = 40, 60
    x0 = torch.randn(n, 2, generator=generator, dtype=torch.float64)
    with progress_bar("hardmax", 3, progress) as advance:
        path = relaxed(x0, float("inf"), np.arange(steps + 1))
        cells = leaders_and_cells(path)
        advance()
        gaps = frank_wolfe(8 if quick else 40, 6, 120, generator)
        advance()
        betas = (1.0, 3.0, 10.0, 30.0, 100.0)
        marks = np.unique(np.round(np.geomspace(1, 300 if quick else 1000, 60)).astype(int))
        parting = leaving(x0, betas, np.concatenate([[0], marks]))
        advance()
    claims = [
        at_most(
            "flow with hardmax attention against x <- (x + alpha mean)/(1 + alpha): largest distance",
            cells["definition"],
            1e-12,
            "derived",
        ),
        at_most("leaders: largest displacement in 60 steps", cells["leader_motion"], 1e-12, "theorem"),
        at_most("followers of a leader that ever change whom they follow", cells["changed"], 0.0, "theorem"),
        at_most(
            "distance to the leader over (1+alpha)^-k: largest relative error", cells["rate_error"], 1e-6, "derived"
        ),
        at_most("Frank-Wolfe: largest ratio of the best gap to its bound", gaps["ratio"], 1.0, "theorem"),
        at_least(
            "hull vertices that move although G = I is positive (vertices, but no leaders)",
            cells["moving_vertices"],
            1.0,
        ),
        claim(
            "distance from the hardmax path after 100 steps: exponent in beta, 10 to 100",
            parting["exponent"],
            -1.0,
            0.1,
        ),
    ]
    return {"seed": seed, "n": n, "alpha": ALPHA, "cells": cells, "gaps": gaps, "parting": parting, "claims": claims}


def relaxed(x0: torch.Tensor, beta: float, marks: np.ndarray) -> np.ndarray:
    """x after k steps for every k of `marks`, (len(marks), n, d)."""
    attention = Attention.identity(x0.shape[-1], beta)
    # x' = A(x) - x; an Euler step of alpha/(1+alpha) is x <- (x + alpha A)/(1 + alpha)
    relaxed = Transformed(attention, lambda A, t, x: A(t, x) - x, "relaxed", needs_euclidean=True)
    times = torch.as_tensor(marks, dtype=torch.float64) * STEP
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", StepWarning)  # these steps are the model, not an approximation of a flow
        return flow(relaxed, x0, times, geometry=Euclidean(), step=euler, h=STEP).x.numpy()


def leaders_and_cells(path: np.ndarray) -> dict[str, Any]:
    """Who leads, who follows whom, and the facts of the module's docstring along the path (steps + 1, n, 2)."""
    from scipy.spatial import ConvexHull

    literal = [path[0]]
    for _ in range(len(path) - 1):
        literal.append(theory.step(literal[-1], ALPHA))
    heads = theory.leaders(path[0])
    target = theory.argmax_matrix(path[0])
    follows = [
        i for i in range(path.shape[1]) if i not in heads and target[i].sum() == 1 and target[i].argmax() in heads
    ]
    leader = np.array([target[i].argmax() for i in follows])
    changed = int(np.any([theory.argmax_matrix(x)[follows] != target[follows] for x in path[:30]], axis=(0, 2)).sum())
    distance = np.linalg.norm(path[:, follows] - path[0][leader], axis=-1)  # (steps + 1, followers)
    expected = distance[0] * (1 + ALPHA) ** -np.arange(float(len(path)))[:, None]
    vertices = ConvexHull(path[0]).vertices
    return {
        "path": path.tolist(),
        "leaders": heads.tolist(),
        "final": theory.argmax_matrix(path[-1]).argmax(1).tolist(),
        "definition": float(np.abs(np.array(literal) - path).max()),
        "leader_motion": float(np.abs(path[:, heads] - path[0][heads]).max()),
        "changed": changed,
        "distance": distance.T.tolist(),
        "expected": expected[:, 0].tolist(),
        "rate_error": float(np.abs(distance[:40] / expected[:40] - 1).max()),
        "moving_vertices": int(sum(v not in heads for v in vertices)),
        "vertices": vertices.tolist(),
    }


def frank_wolfe(count: int, d: int, steps: int, generator: torch.Generator) -> dict[str, Any]:
    """min_{k<K} gap_k against its bound, from random points of a random polytope in R^d with a random positive G."""
    draw = lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64).numpy()
    vertices, root = draw(4 * d, d), draw(d, d)
    G = root @ root.T / d
    mix = np.exp(draw(count, 4 * d))
    x = mix / mix.sum(1, keepdims=True) @ vertices
    f = lambda y: 0.5 * np.einsum("ni,ij,nj->n", y, G, y)
    rise = f(vertices).max() - f(x)
    gaps = []
    for _ in range(steps):
        gaps.append(theory.frank_wolfe_gap(x, vertices, G))
        x = (x + ALPHA * vertices[((x @ G) @ vertices.T).argmax(1)]) / (1 + ALPHA)
    best = np.minimum.accumulate(np.array(gaps), 0)  # (steps, count)
    limit = np.stack([rise * (1 + ALPHA) / (ALPHA * k) for k in range(1, steps + 1)])  # the bound of arXiv 2508.09628
    return {"best": best.T.tolist(), "bound": limit.max(1).tolist(), "ratio": float((best / limit).max()), "d": d}


def leaving(x0: torch.Tensor, betas: tuple[float, ...], marks: np.ndarray) -> dict[str, Any]:
    """Median and largest distance of tokens from their hardmax paths for every beta, and its exponent in beta."""
    cold = relaxed(x0, float("inf"), marks)
    runs: list[dict[str, Any]] = []
    for beta in betas:
        distance = np.linalg.norm(relaxed(x0, beta, marks) - cold, axis=-1)
        runs.append({"beta": beta, "largest": distance.max(1).tolist(), "median": np.median(distance, 1).tolist()})
    at = int(np.abs(marks - 100).argmin())
    cold_runs = [run for run in runs if run["beta"] >= 10]
    off = [run["median"][at] for run in cold_runs]
    exponent = np.polyfit(np.log([run["beta"] for run in cold_runs]), np.log(off), 1)[0]
    return {"k": marks.tolist(), "runs": runs, "exponent": float(exponent)}


def plot(numbers: dict[str, Any]) -> Figure:
    figure, (a, b, c, d) = panels(4)
    cells = numbers["cells"]
    path = np.array(cells["path"])
    colours = dict(zip(sorted(set(cells["final"])), COLOURS * 3))
    hull = [*cells["vertices"], cells["vertices"][0]]
    a.plot(path[0][hull, 0], path[0][hull, 1], color="grey", linewidth=0.8)
    for i in range(path.shape[1]):
        a.plot(path[:, i, 0], path[:, i, 1], color=colours[cells["final"][i]], linewidth=1)
        a.plot(*path[0, i], ".", color=colours[cells["final"][i]], markersize=5)
    for i in cells["leaders"]:
        a.plot(*path[0, i], "*", color="black", markersize=11, zorder=6)
    label(a, "leaders (stars) and followers", r"$x_1$", r"$x_2$", legend=False)
    k = np.arange(path.shape[0])
    for row, colour in zip(cells["distance"], shades(len(cells["distance"]))):
        b.semilogy(k, np.array(row) / row[0], color=colour, linewidth=1)
    b.semilogy(k, (1 + numbers["alpha"]) ** -k.astype(float), **THEORY, label=r"$(1+\alpha)^{-k}$")
    label(b, "followers fall geometrically", "step k", "distance to the leader / first")
    gaps = numbers["gaps"]
    steps = np.arange(1, len(gaps["bound"]) + 1)
    for row in gaps["best"]:
        c.loglog(steps, np.maximum(row, 1e-16), color=COLOURS[0], linewidth=0.7)
    c.loglog(steps, gaps["bound"], **THEORY, label="bound")
    c.set_ylim(1e-8, None)
    label(c, "Frank-Wolfe gap", "steps K", "smallest gap so far")
    parting = numbers["parting"]
    for run, colour in zip(parting["runs"], shades(5)):
        distance = np.maximum(run["median"][1:], 1e-12)
        d.loglog(parting["k"][1:], distance, color=colour, label=rf"$\beta={run['beta']:g}$")
    d.set_ylim(1e-4, 10)
    label(d, "softmax instead of hardmax", "step k", "distance from the hardmax path", legend=False)
    name_lines(d)
    return figure
