"""Speed and memory as ratios: each alternative runs beside ours, interleaved in one process, and its peak is measured.

A ratio is ours / theirs, the median over rounds: below 1 we are faster. Wall times of a shared machine mean little.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from attn_flow.attention import Attention
from attn_flow.flow import flow
from attn_flow.geometry import Sphere
from attn_flow.memory import peak_memory
from attn_flow.steppers import Adaptive
from attn_flow.transport import solve

Row = dict[str, Any]


def interleaved(functions: dict[str, Callable[[], Any]], rounds: int) -> dict[str, float]:
    """Median seconds of each function, all run once a round after one warm-up round."""
    times: dict[str, list[float]] = {name: [] for name in functions}
    for turn in range(rounds + 1):
        for name, function in functions.items():
            start = time.perf_counter()
            function()
            if turn:
                times[name].append(time.perf_counter() - start)
    return {name: statistics.median(values) for name, values in times.items()}


def plain_drift(x: Tensor, beta: float) -> Tensor:
    """The six-line loop of a researcher."""
    return torch.softmax(beta * x @ x.mT, dim=-1) @ x


def drift(quick: bool) -> Iterator[Row]:
    """The softmax drift against the plain loop, and the share of the machine's matmul rate it reaches."""
    sizes = [(1000, 2), (1000, 64), (2000, 64)] if quick else [(1000, d) for d in (2, 3, 16, 64, 384)]
    sizes += [] if quick else [(4000, d) for d in (3, 16, 64, 384)]
    rounds = 3 if quick else 9
    for n, d in sizes:
        x, beta = Sphere().uniform(n, d, generator=torch.Generator().manual_seed(0)), 4.0
        attention = Attention.identity(d, beta)
        square = torch.randn(1024, 1024)
        with torch.no_grad():
            seconds = interleaved(
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
            "ours_s": seconds["ours"],
            # A drift is two products of n x d and d x n: 4 n^2 d operations against the square product's 2 1024^3.
            "share_of_matmul_rate": (4 * n**2 * d / seconds["ours"]) / (2 * 1024**3 / seconds["matmul"]),
        }


def memory(quick: bool) -> Iterator[Row]:
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


def transport(quick: bool) -> Iterator[Row]:
    """W2 of spread, clustered and collapsed clouds: ours against POT's dense network simplex, with the error found."""
    import ot

    n = 500 if quick else 2000
    generator = torch.Generator().manual_seed(0)
    spread = Sphere().uniform((2, n), 3, generator=generator, dtype=torch.float64)
    centres = Sphere().uniform(5, 3, generator=generator, dtype=torch.float64)
    pick = torch.randint(5, (2, n), generator=generator)
    noise = torch.randn(2, n, 3, generator=generator, dtype=torch.float64)
    clouds = {"spread": spread, "clustered": centres[pick] + 1e-2 * noise, "collapsed": centres[pick]}
    uniform = torch.full((n,), 1 / n, dtype=torch.float64)
    for name, (x, y) in clouds.items():

        def dense(x: Tensor = x, y: Tensor = y) -> float:
            return float(ot.emd2(uniform, uniform, torch.cdist(x, y) ** 2)) ** 0.5

        seconds = interleaved({"ours": partial(solve, x, y), "dense": dense}, 1 if quick else 3)
        found = solve(x, y)
        yield {
            "case": f"W2 n={n} d=3 {name} ({found.method})",
            "against": "POT dense",
            "ratio": seconds["ours"] / seconds["dense"],
            "ours_s": seconds["ours"],
            "relative_error": abs(float(found.distance) - dense()) / dense(),
        }


def encoder(quick: bool) -> Iterator[Row]:
    """MiniLM: recording every level, its statistics, and the scalar metrics of clouds, against the forward pass."""
    from attn_flow import observe
    from attn_flow.hooks import Statistics, record
    from attn_flow.hooks.embedded import minilm, topics

    model, tokenizer = minilm()
    long = [text for text in topics() if len(text) > 2500]
    options = {"return_tensors": "pt", "padding": True, "truncation": True, "max_length": 223}
    few, many = (dict(tokenizer(long[:texts], **options)) for texts in ((1, 2) if quick else (2, 16)))

    def forward(inputs: dict[str, Tensor]) -> Any:
        with torch.no_grad():
            return model(**inputs)

    states = record(model, few).x.flatten(0, 1)

    def metrics() -> None:
        for x in states:
            u = x / x.norm(dim=-1, keepdim=True)
            observe.pairwise_cosines(u)
            observe.effective_rank(u)
            for beta in (1.0, 4.0, 16.0, 64.0):
                observe.log_energy(u, beta)

    cases: list[tuple[dict[str, Tensor], dict[str, Callable[[], Any]]]] = [
        (many, {"record": lambda: record(model, many), "statistics": lambda: record(model, many, sink=Statistics())}),
        (few, {"metrics": metrics}),
    ]
    for inputs, functions in cases:
        seconds = interleaved({"forward": partial(forward, inputs), **functions}, 3 if quick else 9)
        for name in functions:
            yield {
                "case": f"MiniLM {name}, {int(inputs['attention_mask'].sum())} tokens, all levels",
                "against": "plain forward pass",
                "ratio": seconds[name] / seconds["forward"],
                "ours_s": seconds[name],
            }


CASES: dict[str, Callable[[bool], Iterator[Row]]] = {
    "drift": drift,
    "memory": memory,
    "sweep": sweep,
    "plateau": plateau,
    "transport": transport,
    "encoder": encoder,
}


def bench(names: list[str] | None = None, *, quick: bool = False, threads: int | None = None) -> dict[str, Any]:
    """Rows of all asked cases, with the threads they ran on; denormals are flushed, so that no ratio flatters us."""
    unknown = [name for name in names or [] if name not in CASES]
    if unknown:
        raise ValueError(f"no bench {unknown}; expected some of {', '.join(CASES)}.")
    torch.set_flush_denormal(True)
    if threads is not None:
        torch.set_num_threads(threads)
    rows = [row for name in names or list(CASES) for row in CASES[name](quick)]
    return {"threads": torch.get_num_threads(), "rows": rows}
