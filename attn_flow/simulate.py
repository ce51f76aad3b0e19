"""A simulation against its predicted limit: W2 to P_# mu_0 along the path, phases and resolution, for several betas."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from attn_flow import quadrature
from attn_flow.attention import Attention
from attn_flow.flow import flow
from attn_flow.geometry import Sphere
from attn_flow.limit import LimitMap, ResolutionWarning, limit, resolution
from attn_flow.measures import Cloud
from attn_flow.phases import phases
from attn_flow.steppers import STEPS
from attn_flow.storage import plain, versions, write_json
from attn_flow.transport import wasserstein

MEASURED = 200  # times at most at which W2 is measured


def start(d: int, n: int, x: Tensor | None = None, nodes: bool = False, seed: int = 0) -> Cloud:
    """The initial law: your tokens x, weighted nodes of the uniform law (d = 2, 3), or n uniform random tokens."""
    if x is not None:
        if x.shape[-1] != d:
            raise ValueError(f"x has shape {tuple(x.shape)}, expected (n, {d}) to match G.")
        return Cloud(x)
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
) -> dict[str, Any]:
    """For every beta: t, w2 (the distance to the predicted limit), t_min, min_w2, phases, resolution."""
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
        path = flow(attention, cloud.x, t, step=STEPS[step], h=h, weights=cloud.weights, progress=progress)
        runs.append(_compared(attention, path, prediction, cloud))
        if out is not None:
            path.save(Path(out) / f"path_beta_{beta:g}.safetensors")
    law = f"{len(cloud.x)} {'weighted nodes' if cloud.weights is not None else 'tokens'} in d = {cloud.x.shape[-1]}"
    numbers = {
        "limit": prediction.as_dict(),
        "runs": runs,
        "caption": f"{law}, {step}, h = {h:.3g}; limit case: {prediction.case}.",
    }
    if out is not None:
        from attn_flow.plot import simulation_figure

        write_json({**numbers, "versions": versions()}, Path(out) / "simulate.json")
        simulation_figure(numbers).savefig(Path(out) / "simulate.png", dpi=150)
    return plain(numbers)


def _compared(attention: Attention, path: Any, prediction: LimitMap, cloud: Cloud) -> dict[str, Any]:
    rotating = bool(prediction.frequencies)
    fixed = None if rotating else prediction.push_forward(path.x[0])
    w2 = []
    for now, x in zip(path.t.tolist(), path.x):
        target = prediction.push_forward(path.x[0], t=now) if fixed is None else fixed
        w2.append(float(wasserstein(x, target, weights_x=cloud.weights, weights_y=cloud.weights)))
    best = min(range(len(w2)), key=w2.__getitem__)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResolutionWarning)  # said in the result itself
        seen = resolution(attention, path.x[0])
    return {
        "beta": attention.beta,
        "t": path.t.tolist(),
        "w2": w2,
        "t_min": float(path.t[best]),
        "min_w2": w2[best],
        "phases": phases(path, prediction, w2=w2).as_list(),
        "resolution": seen.as_dict(),
    }
