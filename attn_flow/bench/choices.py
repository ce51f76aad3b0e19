"""Which way a drift takes: every way's time beside that of the one that is chosen by itself, and what each costs."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from functools import partial

import numpy as np
import torch
from scipy.optimize import nnls
from torch import Tensor

from attn_flow.attention import Attention, truncated
from attn_flow.averages import compiled, costs, fourier, near
from attn_flow.averages.costs import Costs
from attn_flow.averages.patches import Patches, share_seen
from attn_flow.bench.measure import Ratio, interleaved
from attn_flow.geometry import Sphere

WRONG = 1.25  # times the fastest way beyond which the choice counts as wrong: less is the noise of a shared machine
F32, F64 = torch.float32, torch.float64


def choice_ratios(quick: bool) -> Iterator[Ratio]:
    """The chosen way against the fastest of all, small to large, hot to cold; how many were wrong, and what they cost.

    Times are of the processor. Every way is a whole drift with the same checks, that of all keys without a choice: so
    a ratio holds what choosing takes, too. Last the constants of the cost model, fitted on this machine.
    """
    sizes = (1024, 4096) if quick else (512, 1024, 2048, 4096, 8192, 16384)
    rounds = 3 if quick else 7
    cases = [(n, d, beta, F32, False) for d in (2, 3) for n in sizes for beta in (1.0, 1e2, 1e4)]
    cases += [(n, d, beta, F64, False) for d in (2, 3, 8) for n in sizes[1::2] for beta in (1.0, 1e3)]
    cases += [(n, 3, math.inf, F32, False) for n in sizes]
    built = _built()
    if built:
        cases += [(n, 3, beta, F32, True) for n in sizes for beta in (1.0, 1e3)]
    losses = []
    for n, d, beta, dtype, kernel in cases:
        row = _row(n, d, beta, dtype, kernel, rounds)
        losses.append(row["ratio"])
        yield row
    wrong = sum(loss > WRONG for loss in losses)
    yield {
        "case": f"wrong choices of {len(cases)}",
        "against": f"{WRONG} x the fastest way",
        "ratio": wrong / len(cases),
        "wrong": wrong,
        "worst": max(losses),
        "geometric_mean": math.exp(sum(math.log(loss) for loss in losses) / len(losses)),
    }
    constants, misfit = fitted(rounds, built)
    yield {"case": "cost model, fitted", "against": "measured (median miss)", "ratio": misfit, **_fields(constants)}


def _built() -> bool:
    """Whether there is a compiled kernel: a compiler may be missing."""
    try:
        with compiled.kernel():
            return True
    except OSError:
        return False


def _fields(constants: Costs) -> dict[str, float]:
    return {name: float(f"{getattr(constants, name):.2g}") for name in Costs.__dataclass_fields__}


def _row(n: int, d: int, beta: float, dtype: torch.dtype, kernel: bool, rounds: int) -> Ratio:
    x, attention = _cloud(n, d, dtype), Attention.identity(d, beta, dtype=dtype)
    with torch.no_grad(), compiled.kernel() if kernel else nullcontext():
        ways: dict[str, Callable[[], Tensor]] = {"chosen": partial(attention.drift, x), **ways_of(attention, x)}
        seconds = interleaved(ways, rounds, clock=time.process_time)
    taken = seconds.pop("chosen")
    fastest = min(seconds, key=lambda way: seconds[way])
    return {
        "case": f"choice n={n} d={d} beta={beta:g} {str(dtype).removeprefix('torch.')}{', kernel' if kernel else ''}",
        "against": f"{fastest}, the fastest way",
        "ratio": taken / seconds[fastest],
        "ours_s": taken,
        **{f"{way}_s": time for way, time in seconds.items()},
    }


def ways_of(attention: Attention, x: Tensor) -> dict[str, Callable[[], Tensor]]:
    """Name -> the drift of tokens x (n, d) that are queries and keys, by every way that can give it.

    >>> from attn_flow import Sphere
    >>> list(ways_of(Attention.identity(3), Sphere().uniform(4, 3)))
    ['dense', 'near']
    """

    def by(**dear: float) -> Callable[[], Tensor]:
        """The drift where these ways and all pairs cost more than anything."""
        pairs = dict.fromkeys(("pair", "pair64", "hard"), math.inf)
        with_these = replace(costs.here(), **pairs, **dear)

        def drift() -> Tensor:
            with costs.assumed(with_these):
                return attention.drift(x)

        return drift

    everything = replace(attention, truncation=0.0)
    ways = {"dense": lambda: everything.drift(x), "near": by(circle=math.inf)}
    if x.shape[-1] == 2 and float(attention.beta) < math.inf:
        ways["fourier"] = by(fixed=math.inf, kernel_fixed=math.inf)
    return ways


def _cloud(n: int, d: int, dtype: torch.dtype = F32) -> Tensor:
    return Sphere().uniform(n, d, generator=torch.Generator().manual_seed(0), dtype=dtype)


def _near(x: Tensor, beta: float, causal: bool = False) -> near.Near:
    x64, tolerance = x.double(), truncated.TRUNCATION[x.dtype]
    if beta == math.inf:
        found = near.hardmax(x, x, x)
    else:
        found = near.softmax(x64, x64, x, tolerance=tolerance, scale=beta, causal=causal)
    assert found is not None  # every share of pairs is taken
    return found


# --- the constants of the cost model --------------------------------------------------------------------------------


def fitted(rounds: int = 5, kernel: bool = True) -> tuple[Costs, float]:
    """The constants of `averages.costs` on this machine, by processor time, and how far off the median case is.

    Nonnegative least squares of relative errors: a case counts as much whether it takes a millisecond or a second.

    Args:
        rounds: times that each case is run; the median counts.
        kernel: whether the compiled kernel is fitted too; its constants are else those that are known.
    """
    found: dict[str, float] = {}
    misses: list[float] = []

    def fit(names: tuple[str, ...], rows: list[list[float]], seconds: list[float]) -> None:
        A, y = np.array(rows), np.array(seconds)
        constants = nnls(A / y[:, None], np.ones(len(y)))[0]
        found.update(zip(names, constants.tolist()))
        misses.extend(np.abs(A @ constants / y - 1).tolist())

    def clocked(function: Callable[[], object]) -> float:
        return interleaved({"it": function}, rounds, clock=time.process_time)["it"]

    def dense(n: int, d: int, beta: float, dtype: torch.dtype) -> float:
        return clocked(partial(Attention.identity(d, beta, truncation=0.0, dtype=dtype).drift, _cloud(n, d, dtype)))

    def fit_patches(prefix: str, pair: str) -> None:
        """Sorting by itself; then bounds and pairs, from clouds of which little and much is near."""
        sizes = (1024, 4096, 16384, 65536)
        sorting = [clocked(partial(Patches.of, _cloud(n, 3, F64))) for n in sizes]
        fit((f"{prefix}fixed", f"{prefix}order"), [[1.0, n * math.log2(n)] for n in sizes], sorting)
        order = found[f"{prefix}order"]
        cases = [(n, d, beta) for n in (1024, 2048, 4096, 8192) for d in (2, 3) for beta in (1.0, 1e2, 1e3)]
        cases += [(n, d, 1e4) for n in (16384, 65536) for d in (2, 3)]  # where patches are most of it
        rows, seconds = [], []
        for n, d, beta in cases:
            run = partial(_near, _cloud(n, d), beta)
            rows.append([1.0, n**2 / 64, run().pairs * n**2])
            seconds.append(clocked(run) - order * n * math.log2(n))
        fit((f"{prefix}fixed", f"{prefix}bound", pair), rows, seconds)

    with torch.no_grad():
        for suffix, dtype in (("", F32), ("64", F64)):
            shapes = [(n, d) for n in (1024, 2048, 4096) for d in (2, 3, 16)]
            columns = [[float(n**2), 2.0 * d * n**2] for n, d in shapes]
            seconds = [dense(n, d, 1.0, dtype) for n, d in shapes]
            fit((f"pair{suffix}", f"entry{suffix}"), columns, seconds)
        found["faint"] = max(1.0, dense(4096, 3, 100.0, F32) / dense(4096, 3, 1.0, F32))
        fit(("hard",), [[float(n**2)] for n in (1024, 4096)], [dense(n, 3, math.inf, F32) for n in (1024, 4096)])
        x, window = _cloud(4096, 3), math.log(4096 / truncated.TRUNCATION[F32])
        found["look"] = clocked(partial(share_seen, x, x, None, 100.0, window, True)) / 4096
        fit_patches("", "near")
        begun = found["fixed"] + found["order"] * 4096 * 12 + found["bound"] * 4096**2 / 64
        for name, x, beta, causal in (
            ("near64", _cloud(4096, 3, F64), 10.0, False),
            ("masked", _cloud(4096, 3), 10.0, True),
            ("near_hard", _cloud(4096, 3), math.inf, False),
        ):
            run = partial(_near, x, beta, causal)
            found[name] = max(0.0, clocked(run) - begun) / (run().pairs * 4096**2)
        wide, narrow = (clocked(partial(_near, _cloud(2048, d, F64), 1.0)) for d in (8, 3))
        found["near_entry"] = max(0.0, wide - narrow) / (10 * 2048**2)  # every pair is seen
        if kernel:
            with compiled.kernel():
                fit_patches("kernel_", "kernel_pair")
                wide, narrow = (clocked(partial(_near, _cloud(4096, d), 1.0)) for d in (8, 3))
                found["kernel_entry"] = max(0.0, wide - narrow) / (10 * 4096**2)
        else:
            kept = (name for name in Costs.__dataclass_fields__ if name.startswith("kernel"))
            found.update({name: getattr(costs.here(), name) for name in kept})
        rows, seconds = [], []
        for n in (1024, 4096, 16384):
            for beta in (1.0, 1e2, 1e4):
                x = _cloud(n, 2).double()
                rows.append([1.0, fourier.terms(beta) * 2 * n])
                seconds.append(clocked(partial(fourier.softmax, x, x, x.float(), tolerance=1e-6, scale=beta)))
        fit(("circle", "term"), rows, seconds)
    return Costs(**found), float(np.median(misses))
