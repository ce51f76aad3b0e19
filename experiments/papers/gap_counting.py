"""One key holds half of an attention row from a beta on that its gaps give; trained rows are near it, random ones far.

arXiv 2605.12697 (abstract only: all formulas are derived here, `attn_flow.theory.gap_counting`). Independent logits:
beta_c follows sin(pi a)/(pi a), a = hazard rate/beta, so that it grows like sqrt(log n), log n or log^2 n by the
distribution of the logits. Real rows: every query of every head of MiniLM, of its untrained copy, and of Gaussian
logits of the same spread.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from attn_flow.base.progress import progress_bar
from attn_flow.experiments.claims import at_least, at_most, claim
from attn_flow.experiments.figures import COLOURS, THEORY, caption, label, not_installed, panels
from attn_flow.theory import gap_counting as theory

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Distributions of independent logits: their hazard rate at the 1 - 1/n quantile, and rows drawn of them.
DISTRIBUTIONS: dict[
    str, tuple[Callable[[int], float], Callable[[np.random.Generator, tuple[int, int]], np.ndarray]]
] = {
    "exponential": (lambda n: 1.0, lambda rng, shape: rng.exponential(size=shape)),
    "Gaussian": (lambda n: float(theory.gaussian_hazard(n)), lambda rng, shape: rng.standard_normal(shape)),
    "soft edge": (lambda n: float(np.log(n) ** 2), lambda rng, shape: 1 / np.log(rng.random(shape))),
}
MULTIPLES = np.linspace(0.8, 4, 33)  # of the hazard rate, where shares of resolved rows are drawn


def compute(quick: bool = False, seed: int = 0, progress: bool = False) -> dict[str, Any]:
    """beta_c of drawn rows over n, and of the rows of MiniLM and its untrained copy at their own beta."""
    rng = np.random.default_rng(seed)
    sizes, entries = ((32, 256, 2048), 2**18) if quick else ((32, 128, 512, 2048, 8192), 2**21)
    with progress_bar("gap counting", len(DISTRIBUTIONS) * len(sizes) + 1, progress) as advance:
        drawn = []
        for name in DISTRIBUTIONS:
            for n in sizes:
                drawn.append(rows_of(name, n, entries // n, rng))
                advance()
        equal = [float(theory.resolving_beta(np.append(np.zeros(n - 1), 0.5))) for n in sizes]
        real = encoders(*((2, 64) if quick else (6, 256)), rng=rng, seed=seed)
        advance()
    claims = [
        claim(f"equal gaps 1/2, n = {n}: beta_c over log(n - 1)/g", b / (2 * np.log(n - 1)), 1.0, 1e-12)
        for n, b in zip(sizes, equal)
    ]
    for name in DISTRIBUTIONS:
        rows = [r for r in drawn if r["distribution"] == name]
        off = sum(r["outside"] for r in rows)
        claims.append(claim(f"{name} rows: rows outside the bounds from counting gaps", off, 0, 0))
        if name == "exponential":  # its hazard rate is the same everywhere: the share is exact at large n
            many, at = rows[len(rows) // 2], int(np.abs(MULTIPLES - 2).argmin())
            error = np.sqrt(0.25 / many["rows"])
            what = f"{name} rows, n = {many['n']}: share resolved at twice the hazard rate"
            claims.append(claim(what, many["share"][at], float(theory.resolved_share(MULTIPLES[at], 1.0)), 3.5 * error))
        else:
            ends = {name: np.log(rows[-1][name] / rows[0][name]) for name in ("median", "hazard")}
            power = {name: float(end / np.log(np.log(sizes[-1]) / np.log(sizes[0]))) for name, end in ends.items()}
            what = f"{name} rows: power of log n with which the median beta_c grows, against its hazard rate's"
            claims.append(claim(what, power["median"], power["hazard"], 0.4))
    if real is not None:
        claims += encoder_claims(real)
    return {"seed": seed, "sizes": list(sizes), "drawn": drawn, "equal": equal, "encoders": real, "claims": claims}


def rows_of(name: str, n: int, rows: int, rng: np.random.Generator) -> dict[str, Any]:
    """Rows of n independent logits: the median of beta_c, the share resolved at multiples of the hazard rate."""
    at, draw = DISTRIBUTIONS[name]
    s, hazard = draw(rng, (rows, n)), at(n)
    beta = theory.resolving_beta(s)
    return {
        "distribution": name,
        "n": n,
        "rows": rows,
        "hazard": hazard,
        "median": float(np.median(beta)),
        "share": [float((beta < m * hazard).mean()) for m in MULTIPLES],
        "outside": outside(s, beta),
    }


def outside(s: np.ndarray, beta: np.ndarray) -> int:
    """How many rows have a beta_c beyond the bounds from counting gaps, by more than rounding."""
    low, high = theory.gap_bounds(s)
    return int(((beta < low * (1 - 1e-9)) | (beta > high * (1 + 1e-9))).sum())


def encoders(texts: int, n: int, rng: np.random.Generator, seed: int) -> dict[str, Any] | None:
    """beta_c over the trained beta, by layer, of MiniLM, its untrained copy and Gaussian rows of the same spread."""
    from attn_flow.experiments.encoders.minilm_variants import trained_and_untrained
    from attn_flow.hooks import attentions, record

    variants = trained_and_untrained(texts, n, seed)
    if variants is None:
        return None
    models, inputs = variants
    runs: dict[str, Any] = {"texts": texts, "n": n}
    for name, model in models.items():
        layers = []
        for attention, x in zip(attentions(model), record(model, inputs, points="attn.hook_in").x):
            s = logits(attention, x)
            beta = theory.resolving_beta(s)
            gaussian = theory.resolving_beta(s.std(-1, keepdims=True) * rng.standard_normal(s.shape))
            layers.append(
                {
                    "median": float(np.median(beta)),
                    "quartiles": np.quantile(beta, [0.25, 0.75]).tolist(),
                    "gaussian": float(np.median(gaussian)),
                    "resolved": float((beta < 1).mean()),
                    "gaussian_resolved": float((gaussian < 1).mean()),
                    "by_head": (beta < 1).mean((0, 2)).tolist(),
                    "outside": outside(s, beta),
                }
            )
        runs[name] = layers
    return runs


def logits(attention: Any, x: torch.Tensor) -> np.ndarray:
    """beta <Q x_i + b, K x_j> of every head, (texts, heads, n, n): what the softmax of a layer is taken of."""
    x = x[:, None].double()
    q = x @ attention.Q.double().mT
    q = q if attention.query_bias is None else q + attention.query_bias.double()[:, None]
    return np.asarray(
        float(torch.as_tensor(attention.beta, dtype=torch.float64).max()) * (q @ (x @ attention.K.double().mT).mT)
    )


def encoder_claims(real: dict[str, Any]) -> list[dict[str, Any]]:
    """Trained rows are near their critical beta and sharper than Gaussian ones; untrained rows are Gaussian and far."""
    trained, untrained = real["trained"], real["untrained"]
    ratios = [layer["median"] / layer["gaussian"] for layer in untrained]
    late = [layer["median"] / layer["gaussian"] for layer in trained[2:]]
    off = sum(layer["outside"] for layer in trained + untrained)
    what = "untrained copy: median beta_c over that of Gaussian rows, the layer farthest from 1"
    return [
        claim("MiniLM and its untrained copy: rows outside the bounds from counting gaps", off, 0, 0),
        claim(what, max(ratios, key=lambda r: abs(r - 1)), 1.0, 0.1, "observed"),
        at_most("MiniLM, layers 2 on: the same ratio, largest", max(late), 0.8),
        at_most(
            "MiniLM, layers 1 on: median beta_c over the trained beta, largest",
            max(layer["median"] for layer in trained[1:]),
            3.0,
        ),
        at_least("untrained copy: the same, smallest", min(layer["median"] for layer in untrained), 10.0),
    ]


def plot(numbers: dict[str, Any]) -> Figure:
    """Shares of resolved rows, beta_c over n, and rows of real heads by layer."""
    real = numbers["encoders"]
    figure, (a, b, c) = panels(3, title="Half of a row's weight on one key: the critical beta by counting gaps")
    largest = max(numbers["sizes"])
    for name, colour in zip(DISTRIBUTIONS, COLOURS):
        rows = [r for r in numbers["drawn"] if r["distribution"] == name]
        a.plot(MULTIPLES, rows[-1]["share"], color=colour, label=name)
        n = [r["n"] for r in rows]
        b.plot(n, [r["median"] for r in rows], "o", color=colour, label=f"{name}")
        b.plot(n, [theory.MEDIAN_RATIO * r["hazard"] for r in rows], **THEORY)
    a.plot(MULTIPLES, theory.resolved_share(MULTIPLES, 1.0), **THEORY, label=r"$\sin(\pi a)/(\pi a)$, $n=\infty$")
    label(a, f"rows where one key holds half, $n={largest}$", r"$\beta$ / hazard rate $=1/a$", "share of rows")
    b.plot(numbers["sizes"], numbers["equal"], "s", color=COLOURS[3], label=r"equal gaps $1/2$")
    b.plot(numbers["sizes"], [2 * np.log(m - 1) for m in numbers["sizes"]], **THEORY)
    b.set(xscale="log", yscale="log", ylim=(1, 300 * np.log(largest) ** 2))
    label(b, r"$1$, $\sqrt{\log n}$, $\log n$, $\log^2 n$", "keys $n$", r"median $\beta_c$")
    if real is None:
        not_installed(c)
    else:
        for name, colour in zip(("trained", "untrained"), COLOURS):
            layers = real[name]
            depth = np.arange(len(layers))
            low, high = np.transpose([layer["quartiles"] for layer in layers])
            c.fill_between(depth, low, high, color=colour, alpha=0.2, linewidth=0)
            c.plot(depth, [layer["median"] for layer in layers], "o-", color=colour, label=f"MiniLM, {name}")
            c.plot(depth, [layer["gaussian"] for layer in layers], "x:", color=colour, label="Gaussian rows")
        c.axhline(1, color="grey", linewidth=0.8)
        c.set(yscale="log", ylim=(0.5, 1000))
    label(
        c, "heads of MiniLM (median, quartiles)", "layer", r"$\beta_c$ / the layer's $\beta$", legend=real is not None
    )
    words = "" if real is None else f" (c) {real['texts']} texts of {real['n']} tokens, all heads and queries."
    caption(
        figure,
        "Independent logits: exponential, Gaussian, and soft-edged with P(gap to the edge < g) = exp(-1/g); dashed: "
        f"1.657 times the hazard rate, log(n-1)/g for equal gaps.{words} Seed {numbers['seed']}.",
    )
    return figure
