"""The whole job of a study: simulate a cold flow and measure how far it is from its predicted limit."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from attn_flow.attention import Attention
from attn_flow.averages import compiled
from attn_flow.bench.measure import CLOCKS, Ratio
from attn_flow.dynamics.particles import flow
from attn_flow.dynamics.steppers import Adaptive
from attn_flow.geometry import Sphere
from attn_flow.prediction.limit_map import limit
from attn_flow.prediction.timeline import w2_curve

BETA, TOLERANCE = 100.0, 1e-5
TIMES = torch.linspace(0, 8, 9)
V = torch.diag(torch.tensor([1.0, 2.0, 1.0]))
# The limits of THEORY 1: on two points (M = V G has the eigenvalues 3, 2, 1), and on a circle (3, 3, 1), where no
# cloud collapses and every distance is a large problem.
LIMITS = {"two points": (3.0, 1.0, 1.0), "a circle": (3.0, 1.5, 1.0)}


def job_ratios(quick: bool) -> Iterator[Ratio]:
    """Flow at beta = 100 and W2 to its limit at nine times, against torchdiffeq, the plain softmax and POT dense.

    In torch's own dtype, at one tolerance: torchdiffeq bounds the root mean square of the error of a step, we the error
    of every token. Whose curve is wrong where they differ is measured: float64, at a thousandth of the tolerance.
    """
    n = 500 if quick else 4000
    for name, diagonal in LIMITS.items():
        G = torch.diag(torch.tensor(diagonal))
        x = Sphere().uniform(n, 3, generator=torch.Generator().manual_seed(0))
        with torch.no_grad():
            other, other_seconds, their_own = timed(theirs, x, G)
            exact = reference(x, G)
            for way, job in (("", ours), (", compiled kernel", with_kernel)):
                curve, seconds, own = timed(job, x, G)
                yield {
                    "case": f"flow and W2 at 9 times n={n} d=3 beta={BETA:g}, limit on {name}{way}",
                    "against": "torchdiffeq dopri5, plain softmax, POT dense",
                    "ratio": seconds / other_seconds,
                    "ratio_of_processor": own / their_own,
                    "ours_s": seconds,
                    "theirs_s": other_seconds,
                    "our_error": float((curve - exact).abs().max()),
                    "their_error": float((other - exact).abs().max()),
                }


def timed(way: Callable[[Tensor, Tensor], Tensor], x: Tensor, G: Tensor) -> tuple[Tensor, float, float]:
    """The curve and the seconds of one run by both clocks; a small one before it pays for imports."""
    way(x[:100], G)
    start = [clock() for clock in CLOCKS]
    curve = way(x, G)
    wall, own = (clock() - begun for clock, begun in zip(CLOCKS, start))
    return curve, wall, own


def ours(x: Tensor, G: Tensor) -> Tensor:
    attention = Attention.from_matrices(G, V, BETA)
    return w2_curve(flow(attention, x, TIMES, step=Adaptive(TOLERANCE)), limit(attention))


def reference(x: Tensor, G: Tensor) -> Tensor:
    """The curve without merging, in float64, at a thousandth of the tolerance."""
    attention = Attention.from_matrices(G.double(), V.double(), BETA)
    path = flow(attention, x.double(), TIMES, step=Adaptive(TOLERANCE / 1000, merge=False))
    return w2_curve(path, limit(attention))


def with_kernel(x: Tensor, G: Tensor) -> Tensor:
    with compiled.kernel():
        return ours(x, G)


def theirs(x: Tensor, G: Tensor) -> Tensor:
    import ot
    from torchdiffeq import odeint

    def velocity(t: Tensor, x: Tensor) -> Tensor:
        drift = torch.softmax(BETA * x @ G.mT @ x.mT, dim=-1) @ x @ V.mT
        return drift - (drift * x).sum(-1, keepdim=True) * x

    path = odeint(velocity, x, TIMES, rtol=TOLERANCE, atol=TOLERANCE, method="dopri5").double()
    target = limit(Attention.from_matrices(G, V, BETA)).push_forward(x).double()
    uniform = torch.full((len(x),), 1 / len(x), dtype=path.dtype)
    squared = [ot.emd2(uniform, uniform, torch.cdist(z, target) ** 2, numItermax=10**7) for z in path]
    return torch.stack(squared).sqrt()
