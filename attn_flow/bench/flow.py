"""Whole flows: a sweep as one batch, and the crossing of a plateau."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from attn_flow.attention import Attention
from attn_flow.bench.measure import Row, interleaved, plain_drift
from attn_flow.flow import flow
from attn_flow.geometry import Sphere
from attn_flow.steppers import Adaptive


def sweep(quick: bool) -> Iterator[Row]:
    """8 betas x 8 seeds at n = 256 as one batch against 64 runs in a loop."""
    n, d, steps = 256, 3, 3 if quick else 10
    x = Sphere().uniform((8, 1, n), d, generator=torch.Generator().manual_seed(0))
    betas = torch.linspace(1, 8, 8)

    def together() -> None:
        flow(Attention.identity(d, betas[:, None]), x.expand(8, 8, n, d), [0, 0.1 * steps], h=0.1)

    def one_by_one() -> None:
        for seed in range(8):
            for beta in betas.tolist():
                flow(Attention.identity(d, beta), x[seed, 0], [0, 0.1 * steps], h=0.1)

    with torch.no_grad():
        seconds = interleaved({"ours": together, "loop": one_by_one}, 1 if quick else 3)
    ratio = seconds["ours"] / seconds["loop"]
    yield {"case": "sweep 8 betas x 8 seeds n=256", "against": "64 runs", "ratio": ratio, "ours_s": seconds["ours"]}


def plateau(quick: bool) -> Iterator[Row]:
    """Drift evaluations of the adaptive pair with merging across a metastable plateau, against torchdiffeq's dopri5."""
    horizon, n = (100.0 if quick else 1000.0), 64
    generator = torch.Generator().manual_seed(0)
    x = Sphere().uniform(n, 3, generator=generator, dtype=torch.float64)
    attention = Attention.identity(3, 12.0, dtype=torch.float64)
    with torch.no_grad():
        path = flow(attention, x, [0, horizon], step=Adaptive(1e-6))
        row = {"case": f"plateau beta=12 n={n} T={horizon:g}", "ours_evaluations": path.about["evaluations"]}
        try:
            from torchdiffeq import odeint
        except ModuleNotFoundError:
            yield {**row, "against": "torchdiffeq (not installed)", "ratio": float("nan")}
            return
        calls = 0

        def velocity(t: Tensor, y: Tensor) -> Tensor:
            nonlocal calls
            calls += 1
            return Sphere().tangent(y, plain_drift(y, 12.0))

        odeint(velocity, x, torch.tensor([0, horizon], dtype=torch.float64), rtol=1e-6, atol=1e-6, method="dopri5")
    yield {
        **row,
        "against": "torchdiffeq dopri5, same tolerance (evaluations)",
        "ratio": path.about["evaluations"] / calls,
        "theirs_evaluations": calls,
    }
