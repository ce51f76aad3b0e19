"""What is compared: each case returns our seconds (or megabytes) and those of the alternative."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from measure import peak_megabytes, seconds_in_turns
from torch import Tensor, nn

from attn_flow import Adaptive, Attention, Sphere, flow, wasserstein


@dataclass(frozen=True)
class Result:
    """One row of the table.

    Args:
        what: what was computed.
        against: the alternative.
        ours, theirs: seconds, or megabytes.
        unit: "s" or "MB".
        error: the relative difference between the two results, if it is meant to be small but not rounding.
    """

    what: str
    against: str
    ours: float
    theirs: float
    unit: str = "s"
    error: float | None = None

    @property
    def factor(self) -> float:
        """How many times faster, or smaller, ours is."""
        return self.theirs / self.ours


def tokens(n: int, d: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Uniform random tokens (n, d) on the unit sphere."""
    return Sphere().uniform(n, d, generator=torch.Generator().manual_seed(0), dtype=dtype)


def plain_drift(x: Tensor, beta: float) -> Tensor:
    """Softmax attention as a few plain operations."""
    return torch.softmax(beta * x @ x.mT, dim=-1) @ x


def plain_velocity(x: Tensor, beta: float) -> Tensor:
    """The drift, projected to the sphere."""
    drift = plain_drift(x, beta)
    return drift - (drift * x).sum(-1, keepdim=True) * x


def fused_drift(x: Tensor, beta: float) -> Tensor:
    """Softmax attention by torch's fused kernel."""
    z = x[None, None]
    return F.scaled_dot_product_attention(z, z, z, scale=beta)[0, 0]


def relative_error(drift: Tensor, x: Tensor, beta: float, rows: int = 256) -> float:
    """The largest relative error of some rows of a drift, against float64."""
    some = slice(None, None, max(1, len(x) // rows))
    exact = plain_drift_rows(x[some].double(), x.double(), beta)
    return float(((drift[some] - exact).norm(dim=-1) / exact.norm(dim=-1)).max())


def plain_drift_rows(queries: Tensor, x: Tensor, beta: float) -> Tensor:
    return torch.softmax(beta * queries @ x.mT, dim=-1) @ x


def drift(n: int, d: int, against: str, beta: float = 1.0, dtype: torch.dtype = torch.float32) -> Result:
    """One drift of n tokens, against the plain operations or torch's fused attention."""
    x, attention = tokens(n, d, dtype), Attention.identity(d, beta)
    theirs, name = {
        "plain": (plain_drift, "plain softmax loop"),
        "fused": (fused_drift, "torch's fused attention"),
    }[against]
    rounds = 3 if n > 20_000 else 9
    seconds = seconds_in_turns(partial(attention.drift, x), partial(theirs, x, beta), rounds)
    what = f"drift of {n:,} tokens, d = {d}, beta = {beta:g}"
    return Result(what, name, *seconds, error=relative_error(attention.drift(x), x, beta))


def fixed_steps(n: int = 256, d: int = 3, steps: int = 500, beta: float = 4.0) -> Result:
    """A flow in RK4 steps, against a loop of plain operations."""
    x0, h = tokens(n, d), 0.05
    attention = Attention.identity(d, beta)

    def plain() -> Tensor:
        x = x0
        for _ in range(steps):
            k1 = plain_velocity(x, beta)
            k2 = plain_velocity(F.normalize(x + h / 2 * k1, dim=-1), beta)
            k3 = plain_velocity(F.normalize(x + h / 2 * k2, dim=-1), beta)
            k4 = plain_velocity(F.normalize(x + h * k3, dim=-1), beta)
            x = F.normalize(x + h / 6 * (k1 + 2 * k2 + 2 * k3 + k4), dim=-1)
        return x

    def ours() -> Tensor:
        return flow(attention, x0, [0.0, steps * h], h=h).x[-1]

    return Result(
        f"flow of {n} tokens, {steps} RK4 steps", "plain loop of ten lines", *seconds_in_turns(ours, plain, 3)
    )


def adaptive_steps(n: int = 200, d: int = 3, beta: float = 9.0, end: float = 1000.0, tol: float = 1e-6) -> Result:
    """A flow through its plateaus at one tolerance, against torchdiffeq."""
    from torchdiffeq import odeint

    x0, times = tokens(n, d, torch.float64), torch.tensor([0.0, end], dtype=torch.float64)
    attention = Attention.identity(d, beta)

    def theirs() -> Tensor:
        return odeint(lambda t, x: plain_velocity(x, beta), x0, times, rtol=tol, atol=tol, method="dopri5")[-1]

    def ours() -> Tensor:
        return flow(attention, x0, times, step=Adaptive(tol=tol)).x[-1]

    seconds = seconds_in_turns(ours, theirs, 1)
    return Result(f"adaptive flow of {n} tokens until t = {end:g}", "torchdiffeq, dopri5", *seconds)


def transport(n: int = 10_000) -> Result:
    """W2 between two clouds on the sphere, certified within 1%, against the exact solver of POT."""
    import ot

    x, y = tokens(2 * n, 3, torch.float64).split(n)
    uniform = torch.full((n,), 1 / n, dtype=torch.float64)

    def theirs() -> float:
        return math.sqrt(float(ot.emd2(uniform, uniform, torch.cdist(x, y) ** 2, numItermax=10**7)))

    def ours() -> float:
        return float(wasserstein(x, y))

    seconds = seconds_in_turns(ours, theirs, 1)
    exact = theirs() if n <= 2000 else None
    error = None if exact is None else abs(ours() - exact) / exact
    return Result(f"W2 of {n:,} tokens, d = 3, within 1%", "POT, exact", *seconds, error=error)


def drop_in(batch: int = 32, n: int = 128, dim: int = 256, heads: int = 8) -> Result:
    """One Euler step of the drop-in module, forward and backward, against nn.MultiheadAttention."""
    from attn_flow.nn import ContinuousMultiheadAttention

    x = torch.randn(batch, n, dim, generator=torch.Generator().manual_seed(0))
    theirs = nn.MultiheadAttention(dim, heads, batch_first=True)
    ours = ContinuousMultiheadAttention.from_multihead(theirs)

    def backward(module: Any) -> None:
        z = x.detach().requires_grad_()
        module(z, z, z, need_weights=False)[0].square().sum().backward()

    seconds = seconds_in_turns(partial(backward, ours), partial(backward, theirs), 9)
    return Result(f"drop-in, {batch} x {n} tokens, with backward", "nn.MultiheadAttention", *seconds)


def recording(texts: int = 16) -> Result:
    """Recording every layer of MiniLM, against its forward pass."""
    from attn_flow.hooks import record
    from attn_flow.hooks.demo import minilm, topics

    model, tokenizer = minilm()
    pages = [text for text in topics() if len(text) > 2500][:texts]
    inputs = dict(tokenizer(pages, return_tensors="pt", padding=True, truncation=True, max_length=223))

    def forward() -> Any:
        with torch.no_grad():
            return model(**inputs)

    seconds = seconds_in_turns(lambda: record(model, inputs), forward, 7)
    return Result(f"all states of MiniLM, {inputs['input_ids'].numel():,} tokens", "its forward pass", *seconds)


def _our_memory(n: int) -> None:
    Attention.identity(3, 10.0).drift(tokens(n, 3))


def _plain_memory(n: int) -> None:
    plain_drift(tokens(n, 3), 10.0)


def memory(n: int = 20_000) -> Result:
    """The peak memory of one drift, against the plain operations, which form the attention matrix."""
    ours, theirs = peak_megabytes(_our_memory, n), peak_megabytes(_plain_memory, n)
    return Result(f"memory of a drift of {n:,} tokens", "plain softmax loop", max(ours, 1.0), theirs, unit="MB")


def growth(kernel: str, d: int, beta: float, sizes: tuple[int, ...]) -> float:
    """The exponent a of seconds ~ n^a of one drift, by least squares in logarithms."""
    attention = Attention.identity(d, beta, kernel=kernel)
    logs = []
    for n in sizes:
        x = tokens(n, d)
        seconds, _ = seconds_in_turns(partial(attention.drift, x), lambda: None, 3)
        logs.append((math.log(n), math.log(seconds)))
    u, v = torch.tensor(logs, dtype=torch.float64).T
    return float(((u - u.mean()) * (v - v.mean())).sum() / (u - u.mean()).square().sum())


# At most ten rows; "quick" has smaller sizes, which only show that everything runs.
CASES: dict[str, Callable[[bool], Result]] = {
    "drift_small": lambda quick: drift(1000, 64, "plain"),
    "drift": lambda quick: drift(1000 if quick else 4000, 64, "plain"),
    "near": lambda quick: drift(8192 if quick else 65536, 3, "fused", beta=1000.0),
    "circle": lambda quick: drift(4096 if quick else 16384, 2, "fused", beta=100.0, dtype=torch.float64),
    "memory": lambda quick: memory(4000 if quick else 20_000),
    "fixed_steps": lambda quick: fixed_steps(steps=50 if quick else 500),
    "adaptive_steps": lambda quick: adaptive_steps(n=50 if quick else 200, end=20.0 if quick else 1000.0),
    "transport": lambda quick: transport(500 if quick else 10_000),
    "drop_in": lambda quick: drop_in(*((4, 32, 64, 4) if quick else (32, 128, 256, 8))),
    "recording": lambda quick: recording(2 if quick else 16),
}
GROWTH: dict[str, tuple[str, int, float, tuple[int, ...]]] = {  # kernel, d, beta, numbers of tokens
    "dense (d = 64, beta = 1)": ("dense", 64, 1.0, (1000, 2000, 4000, 8000)),
    "near (d = 3, beta = 1,000)": ("near", 3, 1000.0, (8192, 16384, 32768, 65536)),
    "series (d = 2, beta = 100)": ("series", 2, 100.0, (8192, 16384, 32768, 65536)),
}
