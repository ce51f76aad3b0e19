"""Drifts at low temperature: skipped keys, the circle, the compiled kernel, and the digits that are left."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from attn_flow.attention import Attention
from attn_flow.averages import compiled
from attn_flow.bench.measure import Ratio, interleaved, on_clocks, plain_drift
from attn_flow.geometry import Sphere

EXPONENTIALS = 20  # times the rate is measured in one go
CHECKED = 256  # tokens whose drift is compared with float64


def cold_ratios(quick: bool) -> Iterator[Ratio]:
    """Keys that matter against all keys, where few do and where all do, and hardmax."""
    n = 8192 if quick else 65536
    for beta in (1e3, 1e4):
        yield _against_fused(f"cold drift n={n} d=3 beta={beta:g}", Attention.identity(3, beta), _cloud(n, 3), quick)
    n = 8192 if quick else 16384
    for d, beta in ((3, 1.0), (3, 20.0), (16, 100.0)):
        attention = Attention.identity(d, beta)
        yield _against_all(f"nothing to skip n={n} d={d} beta={beta:g}", attention, _cloud(n, d), quick)
    yield _against_all(f"hardmax n={n} d=3", Attention.identity(3, math.inf), _cloud(n, 3), quick)


def circle_ratios(quick: bool) -> Iterator[Ratio]:
    """Fourier series on the circle against the fused kernel, in float64."""
    for n in (2048,) if quick else (4096, 16384):
        for beta in (1.0, 100.0):
            x, attention = _cloud(n, 2, torch.float64), Attention.identity(2, beta, dtype=torch.float64)
            yield _against_fused(f"circle n={n} beta={beta:g} float64", attention, x, quick)


def kernel_ratios(quick: bool) -> Iterator[Ratio]:
    """The compiled kernel against the fused one, and the share of torch's rate of exponentials it reaches."""
    numbers = torch.randn(2**17)  # enough for all threads, and in their caches
    result = torch.empty_like(numbers)

    def exponentials() -> None:
        for _ in range(EXPONENTIALS):
            torch.exp(numbers, out=result)

    sizes = [(4096, 1.0)] if quick else [(16384, 1.0), (16384, 100.0), (65536, 1e3), (65536, 1e4)]
    with compiled.kernel():
        for n, beta in sizes:
            row = _against_fused(
                f"compiled drift n={n} d=3 beta={beta:g}",
                Attention.identity(3, beta),
                _cloud(n, 3),
                quick,
                exponentials,
            )
            share = n**2 / (EXPONENTIALS * len(numbers)) * row.pop("beside_over_ours")
            yield {**row, "share_of_exp_rate": share}


def precision_ratios(quick: bool) -> Iterator[Ratio]:
    """The error of float32 tokens at low temperature, and what the digits cost beside the plain loop."""
    n = 1000 if quick else 4000
    x = _cloud(n, 3)
    for beta in (1e2, 1e3, 1e4, 1e5, 1e6):
        attention = Attention.identity(3, beta)
        with torch.no_grad():
            functions = {"ours": partial(attention.drift, x), "plain": partial(plain_drift, x, beta)}
            seconds = interleaved(functions, 3 if quick else 5)
            yield {
                "case": f"float32 drift n={n} d=3 beta={beta:g}",
                "against": "softmax(beta x x^T) x in float32",
                "ratio": seconds["ours"] / seconds["plain"],
                "ours_s": seconds["ours"],
                "relative_error": _error(attention.drift(x), x, beta),
                "their_error": _error(plain_drift(x, beta), x, beta),
            }


def _cloud(n: int, d: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return Sphere().uniform(n, d, generator=torch.Generator().manual_seed(0), dtype=dtype)


def _error(drift: Tensor, x: Tensor, beta: float) -> float:
    """The largest error of some rows against float64, relative to their drift (of length one or less)."""
    rows = slice(None, None, max(1, len(x) // CHECKED))
    exact = torch.softmax(beta * x[rows].double() @ x.double().mT, dim=-1) @ x.double()
    return float(((drift[rows] - exact).norm(dim=-1) / exact.norm(dim=-1)).max())


def _against_fused(
    case: str, attention: Attention, x: Tensor, quick: bool, beside: Callable[[], Any] | None = None
) -> Ratio:
    """One row against torch's fused attention in the dtype of x."""
    beta = float(attention.beta)

    def fused() -> Tensor:
        z = x[None, None]
        return F.scaled_dot_product_attention(z, z, z, scale=beta)

    functions: dict[str, Callable[[], Any]] = {"ours": partial(attention.drift, x), "fused": fused}
    if beside is not None:
        functions["beside"] = beside
    with torch.no_grad():
        seconds, quiet = on_clocks(functions, 3 if quick or len(x) > 20000 else 7)
        row = {
            "case": case,
            "against": "fused attention over all keys",
            "ratio": seconds["ours"] / seconds["fused"],
            "ratio_of_processor": quiet["ours"] / quiet["fused"],
            "ours_s": seconds["ours"],
            "relative_error": _error(attention.drift(x), x, beta),
            "their_error": _error(fused()[0, 0], x, beta),
        }
    return row if beside is None else {**row, "beside_over_ours": quiet["beside"] / quiet["ours"]}


def _against_all(case: str, attention: Attention, x: Tensor, quick: bool) -> Ratio:
    """One row against ourselves with truncation=0."""
    functions = {"ours": partial(attention.drift, x), "all": partial(replace(attention, truncation=0.0).drift, x)}
    with torch.no_grad():
        seconds, quiet = on_clocks(functions, 3 if quick else 7)
    return {
        "case": case,
        "against": "all keys (truncation=0)",
        "ratio": seconds["ours"] / seconds["all"],
        "ratio_of_processor": quiet["ours"] / quiet["all"],
        "ours_s": seconds["ours"],
    }
