"""Whole flows: a sweep as one batch, and the crossing of plateaus."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from attn_flow.attention import Attention
from attn_flow.bench.measure import Ratio, interleaved, plain_drift
from attn_flow.dynamics.particles import flow
from attn_flow.dynamics.steppers import Adaptive
from attn_flow.geometry import Sphere


def sweep_ratios(quick: bool) -> Iterator[Ratio]:
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


def plateau_ratios(quick: bool) -> Iterator[Ratio]:
    """Drift evaluations of the adaptive pair with merging across metastable plateaus, against torchdiffeq's dopri5.

    At the same error: the coarsest tolerance of ours (two a decade) that is no worse than theirs.
    """
    n = 64
    x = Sphere().uniform(n, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    horizon = 100.0 if quick else 1000.0
    with torch.no_grad():
        for beta in (12.0,) if quick else (4.0, 8.0, 12.0, 16.0):
            fine = _ours(x, beta, horizon, 1e-10, merge=False)[0]
            for theirs in (1e-5, 1e-6):
                path, calls = _theirs(x, beta, horizon, theirs)
                their_error = float((path - fine).abs().max())
                for half_decades in range(4, 20):
                    tolerance = 10 ** (-half_decades / 2)
                    end, evaluations = _ours(x, beta, horizon, tolerance)
                    error = float((end - fine).abs().max())
                    if error <= their_error:
                        break
                yield {
                    "case": f"plateau beta={beta:g} n={n} T={horizon:g} at tolerance {tolerance:.1g}",
                    "against": f"torchdiffeq dopri5 at {theirs:g}, same error (evaluations)",
                    "ratio": evaluations / calls,
                    "ours_evaluations": evaluations,
                    "theirs_evaluations": calls,
                    "error": error,
                    "their_error": their_error,
                }
        if not quick:
            evaluations = _ours(x, 12.0, 3e6, 1e-6)[1]
            row = {
                "case": f"plateau beta=12 n={n} T=3e+06",
                "against": "2,000 evaluations",
                "ratio": evaluations / 2000,
            }
            yield {**row, "ours_evaluations": evaluations}


def _ours(x: Tensor, beta: float, horizon: float, tolerance: float, merge: bool | None = None) -> tuple[Tensor, int]:
    """The last cloud and how often the drift was asked."""
    attention = Attention.identity(x.shape[-1], beta, dtype=x.dtype)
    path = flow(attention, x, [0, horizon], step=Adaptive(tolerance, merge=merge))
    return path.x[-1], path.about["evaluations"]


def _theirs(x: Tensor, beta: float, horizon: float, tolerance: float) -> tuple[Tensor, int]:
    from torchdiffeq import odeint

    calls = 0

    def velocity(t: Tensor, y: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        return Sphere().tangent(y, plain_drift(y, beta))

    t = torch.tensor([0, horizon], dtype=x.dtype)
    return odeint(velocity, x, t, rtol=tolerance, atol=tolerance, method="dopri5")[-1], calls
