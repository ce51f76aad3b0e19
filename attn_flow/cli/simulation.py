"""A simulation against its predicted limit: W2 to P_# mu_0 along the path, phases and resolution, for several betas."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from attn_flow.attention.multihead import Attention
from attn_flow.base import memory
from attn_flow.base.files import plain, versions, write_json
from attn_flow.dynamics.distributed import ALONE, Processes
from attn_flow.dynamics.particles import flow
from attn_flow.dynamics.steppers import STEPS
from attn_flow.geometry import Sphere
from attn_flow.measures import Cloud, quadrature
from attn_flow.prediction.finite_n import resolution
from attn_flow.prediction.limit_map import limit
from attn_flow.prediction.timeline import phases

MEASURED = 200  # times at most at which W2 is measured


def start(d: int, n: int, x: Tensor | None = None, nodes: bool = False, seed: int = 0) -> Cloud:
    """The initial law: your tokens x, weighted nodes of the uniform law (d = 2, 3), or n uniform random tokens."""
    if x is not None:
        if x.shape[-1] != d:
            raise ValueError(f"x has shape {tuple(x.shape)}, expected (n, {d}) to match G.")
        return Cloud(x)
    memory.require(4 * 8 * n * d, f"a cloud of {n} tokens in d = {d}", "ask for fewer --tokens")
    if nodes:
        if d not in (2, 3):
            raise ValueError(f"d = {d}: quadrature nodes exist for d = 2 and 3; leave --quadrature out.")
        return quadrature.circle(n) if d == 2 else quadrature.fibonacci(n)
    return Cloud(Sphere().uniform(n, d, generator=torch.Generator().manual_seed(seed), dtype=torch.float64))


def simulate(
    G: Tensor,
    V: Tensor,
    betas: list[float],
    cloud: Cloud,
    time: float,
    steps: int,
    step: str = "rk4",
    *,
    out: str | Path | None = None,
    progress: bool = False,
    world: Processes = ALONE,
) -> dict[str, Any] | None:
    """For every beta: t, w2 (the distance to the predicted limit), t_min, min_w2, phases, resolution.

    Several processes share the tokens; only the first measures, writes, and returns something.
    """
    if steps < 1:
        raise ValueError(f"steps = {steps}, expected at least one.")
    if step not in STEPS:
        raise ValueError(f"step = {step!r}, expected one of {', '.join(STEPS)}.")
    prediction = limit(Attention.from_matrices(G, V))
    h = time / steps
    every = max(1, -(-steps // MEASURED))
    t = torch.linspace(0, time, steps + 1, dtype=torch.float64)[::every]
    if float(t[-1]) < time:
        t = torch.cat([t, t.new_tensor([time])])
    runs = []
    for beta in betas:
        attention = Attention.from_matrices(G, V, beta=beta)
        path = flow(attention, cloud.x, t, step=STEPS[step], h=h, weights=cloud.weights, progress=progress, world=world)
        if not world.first:
            continue
        seen = resolution(attention, path.x[0], weights=cloud.weights, warn=False)
        numbers_of_argmax = {"self_argmax": seen.self_argmax.tolist(), "number": seen.number.tolist()}
        found = phases(path, prediction, warn=False).as_dict()
        runs.append({"beta": beta, **found, "resolution": {"verdict": seen.verdict, **numbers_of_argmax}})
        if out is not None:
            path.save(Path(out) / f"path_beta_{beta:g}.safetensors")
            if path.x.shape[-1] in (2, 3):
                from attn_flow.cli.figures import clouds_figure

                least = int(torch.tensor(found["w2"]).argmin())
                shown = sorted({0, least // 3, least, (least + len(path) - 1) // 2, len(path) - 1})
                title = rf"$\beta$ = {beta:g}: nearest to the predicted limit at t = {float(path.t[least]):.3g}"
                clouds_figure(path, shown, title).savefig(Path(out) / f"clouds_beta_{beta:g}.png", dpi=150)
    if not world.first:
        return None
    law = f"{len(cloud.x)} {'weighted nodes' if cloud.weights is not None else 'tokens'} in d = {cloud.x.shape[-1]}"
    numbers = {
        "limit": prediction.as_dict(),
        "runs": runs,
        "caption": f"{law}, {step}, h = {h:.3g}; limit case: {prediction.case}.",
    }
    if out is not None:
        from attn_flow.cli.figures import simulation_figure

        write_json({**numbers, "versions": versions()}, Path(out) / "simulate.json")
        simulation_figure(numbers).savefig(Path(out) / "simulate.png", dpi=150)
    return plain(numbers)
