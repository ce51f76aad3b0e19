"""`make animation`: docs/flow.gif, tokens on a sphere that gather at the predicted points, stay, and leave."""

from __future__ import annotations

import io
import math
from pathlib import Path

import numpy as np
import torch
from matplotlib import patheffects
from PIL import Image

from attn_flow import Attention, Cloud, flow, limit, wasserstein
from attn_flow.base.figures import style
from attn_flow.measures.quadrature import fibonacci

OUT = Path(__file__).parent / "flow.gif"
FRAMES, SECONDS, END = 88, 8.0, 14.0
BACKGROUND, INK, GRID = "#10192b", "#e8edf5", "#5b6b86"
SIDES = ("#56b4e9", "#e69f00")  # the colour of a token says at which point it is predicted to end
TOKENS = 1200
BETA = 100.0


def view(x: np.ndarray) -> np.ndarray:
    """Coordinates on the picture (first two) and depth, seen from above and from the side of the first axis."""
    turn, tilt = math.radians(52), math.radians(20)
    a, b, c = x[..., 0], x[..., 1], x[..., 2]
    right = math.cos(turn) * b - math.sin(turn) * a
    front = math.cos(turn) * a + math.sin(turn) * b
    up = math.cos(tilt) * c - math.sin(tilt) * front
    return np.stack([right, up, math.cos(tilt) * front + math.sin(tilt) * c], axis=-1)


def simulate() -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, float]:
    """Times, tokens, W2 to the prediction, the predicted point of every token, and the predicted time of least W2."""
    G = torch.diag(torch.tensor([3.0, 1.0, 1.0], dtype=torch.float64))
    V = torch.diag(torch.tensor([1.0, 2.0, 1.2], dtype=torch.float64))
    cloud = fibonacci(TOKENS, lambda x: torch.exp(x @ torch.tensor([0.4, 0.8, 0.3], dtype=x.dtype)))
    attention = Attention.from_matrices(G, V, beta=BETA)
    target = limit(attention)
    path = flow(attention, cloud, t=torch.linspace(0, END, FRAMES), h=0.1)
    ends = target.push_forward(cloud)
    w2 = [float(wasserstein(Cloud(x, cloud.weights), ends)) for x in path.x]
    t_min = target.t_min(BETA)
    assert t_min is not None  # V keeps the leading direction
    return path.t.numpy(), path.x.numpy(), np.array(w2), target.push_forward(cloud.x).numpy(), t_min


def draw() -> None:
    t, x, w2, ends, t_min = simulate()
    colours = np.where(ends[:, 0] > 0, *SIDES)
    rings = view(np.array([[1.0, 0.0, 0.0], [-1.0, 0.0, 0.0]]))
    outline = [patheffects.withStroke(linewidth=3, foreground=BACKGROUND)]
    frames = []
    with style(width=8.0) as pyplot, pyplot.style.context("dark_background"):
        for i in range(FRAMES):
            figure = pyplot.figure(figsize=(6.2, 5.6), facecolor=BACKGROUND, layout="none")
            top = figure.add_axes((0.0, 0.27, 1.0, 0.73))
            top.set(xlim=(-1.75, 1.75), ylim=(-1.12, 1.2), aspect="equal", facecolor=BACKGROUND)
            top.axis("off")
            top.add_patch(pyplot.Circle((0, 0), 1, facecolor="#18243c", edgecolor=GRID, linewidth=1))
            seen = view(x[i])
            order = np.argsort(seen[:, 2])
            depth = (seen[order, 2] + 1) / 2
            top.scatter(
                seen[order, 0],
                seen[order, 1],
                s=7 + 12 * depth,
                c=colours[order],
                alpha=0.15 + 0.75 * depth,
                linewidths=0,
            )
            for ring in rings:
                dim = 1.0 if ring[2] > 0 else 0.45
                top.plot(*ring[:2], "o", ms=20, mfc="none", mec=INK, mew=2.0, alpha=dim)
            label = "predicted from Q, K, V"
            top.annotate(
                label, rings[0, :2], (-1.72, -0.93), color=INK, path_effects=outline, va="center",
                arrowprops={"arrowstyle": "-", "color": INK, "alpha": 0.6, "shrinkB": 9},
            )  # fmt: skip
            phase = "gather" if t[i] < 0.8 * t_min else "are nearest" if t[i] < 1.2 * t_min else "leave"
            top.text(-1.72, 1.07, f"The tokens {phase}", color=INK)
            low = figure.add_axes((0.13, 0.1, 0.83, 0.19), facecolor=BACKGROUND)
            low.plot(t, w2, color=GRID, linewidth=1)
            low.plot(t[: i + 1], w2[: i + 1], color=INK, linewidth=2)
            low.plot(t[i], w2[i], "o", color=INK, ms=6)
            low.axvline(t_min, color=SIDES[1], linestyle=":", linewidth=1.5)
            low.text(t_min + 0.15, 1.6, "predicted time of least distance", color=SIDES[1])
            low.set(xlim=(0, END), ylim=(0, 1.85), yticks=[0, 1], ylabel="$W_2$ to the\nprediction", xlabel="time")
            buffer = io.BytesIO()
            figure.savefig(buffer, dpi=100, facecolor=BACKGROUND)
            pyplot.close(figure)
            frames.append(Image.open(buffer).convert("RGB"))
    palette = frames[FRAMES // 3].quantize(40)
    small = [frame.quantize(palette=palette, dither=Image.Dither.NONE) for frame in frames]
    step = int(1000 * SECONDS / FRAMES)
    pauses = [step] * (FRAMES - 1) + [1200]
    small[0].save(OUT, save_all=True, append_images=small[1:], duration=pauses, loop=0, optimize=True)


if __name__ == "__main__":
    draw()
