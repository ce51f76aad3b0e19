"""Which way a drift takes: every way's time beside that of the one that is chosen by itself, and what each costs."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import numpy as np
import torch
from scipy.optimize import nnls
from torch import Tensor

from attn_flow.attention import Attention, truncated
from attn_flow.averages import fourier, near
from attn_flow.averages.costs import Costs
from attn_flow.bench.measure import Ratio, interleaved
from attn_flow.geometry import Sphere

WRONG = 1.25  # times the fastest way beyond which the choice counts as wrong: less is the noise of a shared machine


def choice_ratios(quick: bool) -> Iterator[Ratio]:
    """The chosen way against the fastest of all, small to large, hot to cold; how many were wrong; the cost model."""
    sizes = (1024, 4096) if quick else (1024, 2048, 4096, 8192, 16384)
    cases = [(n, d, beta, torch.float32) for d in (2, 3) for n in sizes for beta in (1.0, 1e2, 1e4)]
    cases += [(n, d, beta, torch.float64) for d in (2, 3, 8) for n in sizes[1::2] for beta in (1.0, 1e3)]
    cases += [(n, d, math.inf, torch.float32) for d in (3,) for n in sizes]
    wrong = 0
    for n, d, beta, dtype in cases:
        row = _row(n, d, beta, dtype, 3 if quick else 5)
        wrong += row["ratio"] > WRONG
        yield row
    yield {
        "case": f"wrong choices of {len(cases)}",
        "against": f"{WRONG} x the fastest way",
        "ratio": wrong / len(cases),
    }
    constants, misfit = fitted(3 if quick else 5)
    yield {"case": "cost model, fitted", "against": "measured (median miss)", "ratio": misfit, **vars(constants)}


def _row(n: int, d: int, beta: float, dtype: torch.dtype, rounds: int) -> Ratio:
    x = Sphere().uniform(n, d, generator=torch.Generator().manual_seed(0), dtype=dtype)
    attention = Attention.identity(d, beta, dtype=dtype)
    with torch.no_grad():
        ways = ways_of(attention, x)
        chosen = {"chosen": partial(attention.drift, x)}
        seconds = interleaved({**chosen, **ways}, rounds, clock=time.process_time)
    taken = seconds.pop("chosen")
    fastest = min(seconds, key=lambda way: seconds[way])
    return {
        "case": f"choice n={n} d={d} beta={beta:g} {str(dtype).removeprefix('torch.')}",
        "against": f"{fastest}, the fastest way",
        "ratio": taken / seconds[fastest],
        "ours_s": taken,
        **{f"{way}_s": time for way, time in seconds.items()},
    }


def ways_of(attention: Attention, x: Tensor) -> dict[str, Callable[[], Tensor]]:
    """Name -> the drift of tokens x (n, d) that are queries and keys, by every way that can give it."""
    tolerance, beta = truncated.TRUNCATION[x.dtype], float(attention.beta)
    ways: dict[str, Callable[[], Tensor]] = {
        "dense": partial(replace(attention, truncation=0.0).drift, x),
        "near": lambda: _near(x, beta, tolerance).average,
    }
    if x.shape[-1] == 2 and beta < math.inf:
        ways["fourier"] = lambda: fourier.softmax(*(x.double(),) * 2, x, tolerance=tolerance, scale=beta).average
    return ways


def _near(x: Tensor, beta: float, tolerance: float, causal: bool = False) -> near.Near:
    x64 = x.double()
    if beta == math.inf:
        found = near.hardmax(x, x, x)
    else:
        found = near.softmax(x64, x64, x, tolerance=tolerance, scale=beta, causal=causal)
    assert found is not None  # every share of pairs is taken
    return found


# --- the constants of the cost model --------------------------------------------------------------------------------


def fitted(rounds: int = 5) -> tuple[Costs, float]:
    """The constants of `averages.costs` on this machine, by processor time, and how far off the median case is.

    Nonnegative least squares of relative errors: a case counts as much whether it takes a millisecond or a second.
    """
    found: dict[str, float] = {}
    misses: list[float] = []

    def fit(names: tuple[str, ...], rows: list[list[float]], seconds: list[float]) -> None:
        A, y = np.array(rows), np.array(seconds)
        constants = nnls(A / y[:, None], np.ones(len(y)))[0]
        found.update(zip(names, constants.tolist()))
        misses.extend(np.abs(A @ constants / y - 1).tolist())

    def cloud(n: int, d: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return Sphere().uniform(n, d, generator=torch.Generator().manual_seed(0), dtype=dtype)

    def clocked(function: Callable[[], object]) -> float:
        return interleaved({"it": function}, rounds, clock=time.process_time)["it"]

    with torch.no_grad():
        for suffix, dtype in (("", torch.float32), ("64", torch.float64)):
            shapes = [(n, d) for n in (1024, 2048) for d in (2, 3, 16)]
            run = lambda n, d, dtype=dtype: partial(
                Attention.identity(d, 1.0, truncation=0.0, dtype=dtype).drift, cloud(n, d, dtype)
            )
            columns = [[float(n**2), 2.0 * d * n**2] for n, d in shapes]
            fit((f"pair{suffix}", f"entry{suffix}"), columns, [clocked(run(*shape)) for shape in shapes])
        hard = Attention.identity(3, math.inf, truncation=0.0)
        fit(("hard",), [[2048**2]], [clocked(partial(hard.drift, cloud(2048, 3)))])
        cases = [(n, d, beta) for n in (1024, 2048, 4096) for d in (2, 3) for beta in (1.0, 1e2, 1e4)]
        cases += [(16384, 2, 1e4), (16384, 3, 1e4)]  # where patches are most of it
        rows, seconds = [], []
        for n, d, beta in cases:
            x, tolerance = cloud(n, d), truncated.TRUNCATION[torch.float32]
            share = _near(x, beta, tolerance).pairs
            rows.append([1.0, n * math.log2(n), n**2 / 64, share * n**2])
            seconds.append(clocked(partial(_near, x, beta, tolerance)))
        fit(("fixed", "order", "bound", "near"), rows, seconds)
        begun = found["fixed"] + found["order"] * 4096 * 12 + found["bound"] * 4096**2 / 64
        for name, x, beta, causal in (
            ("near64", cloud(4096, 3, torch.float64), 10.0, False),
            ("masked", cloud(4096, 3), 10.0, True),
            ("near_hard", cloud(4096, 3), math.inf, False),
        ):
            run_near = partial(_near, x, beta, truncated.TRUNCATION[x.dtype], causal)
            found[name] = max(0.0, clocked(run_near) - begun) / (run_near().pairs * 4096**2)
        wide, narrow = (clocked(partial(_near, cloud(2048, d, torch.float64), 1.0, 1e-12)) for d in (8, 3))
        found["near_entry"] = max(0.0, wide - narrow) / (10 * 2048**2)  # every pair is seen
        rows, seconds = [], []
        for n in (1024, 8192):
            for beta in (1.0, 1e2, 1e4):
                x = cloud(n, 2).double()
                rows.append([1.0, fourier.most_terms(beta) * 2 * n])
                seconds.append(clocked(partial(fourier.softmax, x, x, x.float(), tolerance=1e-6, scale=beta)))
        fit(("circle", "term"), rows, seconds)
    return Costs(**found), float(np.median(misses))
