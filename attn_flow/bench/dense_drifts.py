"""One drift: its time and memory against the plain loop."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from attn_flow.attention import Attention
from attn_flow.base.memory import peak_memory
from attn_flow.bench.measure import Ratio, on_clocks, plain_drift
from attn_flow.geometry import Sphere


def drift_ratios(quick: bool) -> Iterator[Ratio]:
    """The softmax drift against the plain loop, and the share of the machine's matmul rate it reaches."""
    sizes = [(1000, 2), (1000, 64), (2000, 64)] if quick else [(1000, d) for d in (2, 3, 16, 64, 384)]
    sizes += [] if quick else [(4000, d) for d in (3, 16, 64, 384)]
    rounds = 3 if quick else 25
    for n, d in sizes:
        x, beta = Sphere().uniform(n, d, generator=torch.Generator().manual_seed(0)), 4.0
        attention = Attention.identity(d, beta)
        square = torch.randn(1024, 1024)
        with torch.no_grad():
            seconds, quiet = on_clocks(
                {
                    "ours": partial(attention.drift, x),
                    "plain": partial(plain_drift, x, beta),
                    "matmul": partial(torch.matmul, square, square),
                },
                rounds,
            )
        yield {
            "case": f"drift n={n} d={d}",
            "against": "softmax(beta x x^T) x",
            "ratio": seconds["ours"] / seconds["plain"],
            "ratio_of_processor": quiet["ours"] / quiet["plain"],
            "ours_s": seconds["ours"],
            # A drift is two products of n x d and d x n: 4 n^2 d operations against the square product's 2 1024^3.
            "share_of_matmul_rate": (4 * n**2 * d / quiet["ours"]) / (2 * 1024**3 / quiet["matmul"]),
        }


def memory_ratios(quick: bool) -> Iterator[Ratio]:
    """Extra peak memory of one drift, forward and with backward, against the plain loop."""
    n, d = (4000, 64) if quick else (16000, 64)
    x = Sphere().uniform(n, d, generator=torch.Generator().manual_seed(0))
    cases = {
        "one head": Attention.identity(d, 4.0),
        "4 heads of rank 16": Attention.random(d, 4, generator=torch.Generator().manual_seed(1)),
        "4 heads, causal": Attention.random(d, 4, generator=torch.Generator().manual_seed(1), causal=True),
        "one head, without self": Attention.identity(d, 4.0, self_attention=False),
        "one head, unnormalised": Attention.identity(d, 1.0, kind="unnormalised"),
    }

    def forward(attention: Attention) -> Callable[[], Any]:
        def run() -> Tensor:
            with torch.no_grad():
                return attention.drift(x)

        return run

    def both(drift: Callable[[Tensor], Tensor]) -> Callable[[], Any]:
        return lambda: drift(x.clone().requires_grad_()).sum().backward()

    plain = {"forward": lambda: plain_drift(x, 4.0), "backward": both(lambda y: plain_drift(y, 4.0))}
    theirs = {name: peak_memory(function) for name, function in plain.items()}
    for name, attention in cases.items():
        ours = {"forward": peak_memory(forward(attention)), "backward": peak_memory(both(attention.drift))}
        for way in ("forward", "backward"):
            yield {
                "case": f"peak {way} n={n} d={d}, {name}",
                "against": "plain loop",
                "ratio": ours[way] / theirs[way],
                "ours_mb": ours[way] / 2**20,
                "theirs_mb": theirs[way] / 2**20,
            }
