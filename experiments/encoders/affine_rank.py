"""Affine rank through the parts of a layer: heads multiply it, a norm adds at most one, the FFN fills it up.

arXiv 2604.23681 says that layer norm keeps affine rank and that residuals obstruct its collapse; only a digest is known
to us, so the counts are derived here. Tokens of affine rank r (the dimension of their affine hull): a row-stochastic A
keeps A X in that hull, so one head never raises r and H heads give at most H r, with the residual (H + 1) r. A norm
puts the hull on a sphere around 0, which spans one dimension more: at most r + 1. A nonlinear FFN gives n - 1. In
general position all are attained (for r <= 3 float64 falls short: heads and FFN are smooth functions of r numbers).
Then the effective rank of real tokens, and what depth does to them without residuals.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from attn_flow.base.progress import progress_bar
from attn_flow.experiments.claims import at_least, at_most, claim
from attn_flow.experiments.figures import COLOURS, THEORY, caption, label, not_installed, panels
from attn_flow.observe.quantities import effective_rank

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PARTS = ("input", "attention", "+ residual", "norm", "FFN", "+ residual ", "norm ")
RANKS, TOKENS = (4, 5, 6), 96
COUNTED = 1e-9  # singular values above this share of the largest count


def compute(quick: bool = False, seed: int = 0, progress: bool = False) -> dict[str, Any]:
    """Counts on drawn clouds, counts in a BERT layer, effective ranks by part, and depth without residuals."""
    generator = torch.Generator().manual_seed(seed)
    with progress_bar("affine rank", 3, progress) as advance:
        norms = [norm_alone(r, generator) for r in RANKS]
        single = [one_head(r, generator) for r in RANKS]
        advance()
        counts = layer_counts((3,) if quick else (0, 3, 5), seed)
        advance()
        real = encoders(2 if quick else 8, 32 if quick else 128, seed)
        advance()
    claims = [
        claim(f"norm of tokens of affine rank {r}: largest of 20 draws", max(c), r + 1, 0) for r, c in zip(RANKS, norms)
    ]
    claims += [claim(f"one head on affine rank {r}: largest of 20 draws", max(c), r, 0) for r, c in zip(RANKS, single)]
    for run in counts:
        for r, ranks in zip(RANKS, run["counts"]):
            wrong = sum(a != b for a, b in zip(ranks, predicted(r, run["heads"], TOKENS)))
            claims.append(claim(f"{run['name']}: parts whose rank is not the predicted one, rank {r} in", wrong, 0, 0))
    if real is not None:
        claims += encoder_claims(real)
    return {"seed": seed, "norms": norms, "single": single, "counts": counts, "encoders": real, "claims": claims}


def hull_dimension(x: Tensor) -> int:
    """The dimension of the affine hull of tokens (n, d): singular values of x less its mean above COUNTED."""
    sigma = torch.linalg.svdvals(x.double() - x.double().mean(-2, keepdim=True))
    return int((sigma > COUNTED * sigma[0]).sum())


def predicted(r: int, heads: int, n: int) -> list[int]:
    """Affine rank after every one of PARTS, for n tokens of affine rank r in general position."""
    mixed = heads * r
    return [min(rank, n - 1) for rank in (r, mixed, mixed + r, mixed + r + 1, n - 1, n - 1, n - 1)]


def drawn(r: int, generator: torch.Generator, n: int = TOKENS, d: int = 48) -> Tensor:
    """n tokens of R^d whose affine hull has dimension r and does not hold 0."""
    normal = lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64)
    return normal(d) + normal(n, r) @ normal(r, d)


def norm_alone(r: int, generator: torch.Generator) -> list[int]:
    """Affine ranks after a layer norm with gain and bias, of 20 clouds of affine rank r."""
    norm = nn.LayerNorm(48, dtype=torch.float64)
    with torch.no_grad():
        norm.weight.copy_(torch.rand(48, generator=generator) + 0.5)
        norm.bias.copy_(torch.randn(48, generator=generator))
        return [hull_dimension(norm(drawn(r, generator))) for _ in range(20)]


def one_head(r: int, generator: torch.Generator) -> list[int]:
    """Affine ranks of A X V^T with A a softmax of random scores, of 20 clouds of affine rank r."""
    ranks = []
    for _ in range(20):
        x = drawn(r, generator)
        A = torch.randn(len(x), len(x), generator=generator, dtype=torch.float64).softmax(-1)
        ranks.append(hull_dimension(A @ x @ torch.randn(48, 48, generator=generator, dtype=torch.float64)))
    return ranks


def layer_counts(layers: tuple[int, ...], seed: int) -> list[dict[str, Any]]:
    """Affine ranks by part when a layer of MiniLM reads tokens of affine rank r; nothing where it is not installed."""
    from attn_flow.experiments.encoders.minilm_variants import trained_and_untrained
    from attn_flow.hooks import blocks, record

    variants = trained_and_untrained(1, TOKENS, seed, torch.float64)
    if variants is None:
        return []
    model, inputs = variants[0]["trained"], variants[1]
    runs = []
    for i in layers:
        x = record(model, inputs, points=f"blocks.{i}.hook_in").x[0, 0]
        mean = x.mean(0)
        U, sigma, W = torch.linalg.svd(x - mean, full_matrices=False)
        block = blocks(model)[i]
        counts = [[hull_dimension(z) for z in parts(block, mean + (U[:, :r] * sigma[:r]) @ W[:r])] for r in RANKS]
        runs.append({"name": f"MiniLM, layer {i}", "heads": block.heads, "counts": counts})
    return runs


def parts(block: Any, x: Tensor) -> list[Tensor]:
    """What a BERT layer makes of tokens x (n, d), part by part."""
    with torch.no_grad():
        added = block["attention.output.dense"](_hidden(block["attention.self"](x[None])))[0]
        middle = block["attention.output.LayerNorm"](x + added)
        more = block["output.dense"](block["intermediate"](middle))
        return [x, added, x + added, middle, more, middle + more, block["output.LayerNorm"](middle + more)]


def _hidden(out: Any) -> Tensor:
    return out[0] if isinstance(out, tuple) else out


def encoders(texts: int, n: int, seed: int) -> dict[str, Any] | None:
    """Effective affine ranks by part and layer, and the spread of directions with and without residuals."""
    from attn_flow.experiments.encoders.minilm_variants import remove_parts, trained_and_untrained
    from attn_flow.hooks import record

    variants = trained_and_untrained(texts, n, seed)
    if variants is None:
        return None
    models, inputs = variants
    runs: dict[str, Any] = {"texts": texts, "n": n}
    for name, model in models.items():
        points = ["hook_in", "attn.hook_out", "hook_resid_mid", "mlp.hook_out", "hook_out"]
        x, a, m, f, y = record(model, inputs, points=points).x.unflatten(0, (5, -1))  # (layers, texts, n, d) each
        ranks = [effective_rank(z, centred=True).mean(-1).tolist() for z in (x, a, x + a, m, f, m + f, y)]
        spread = {"as it is": spread_of(record(model, inputs).x)}
        with remove_parts(model, "residuals"):
            spread["without residuals"] = spread_of(record(model, inputs, check=False).x)
        runs[name] = {"ranks": ranks, "spread": spread}  # ranks: (parts, layers)
    return runs


def spread_of(x: Tensor) -> list[float]:
    """1 - |mean direction|^2 at every level, a mean over texts: 0 where all tokens point the same way."""
    u = torch.nn.functional.normalize(x.double(), dim=-1)
    return (1 - u.mean(-2).square().sum(-1)).mean(-1).tolist()


def encoder_claims(real: dict[str, Any]) -> list[dict[str, Any]]:
    trained = real["trained"]
    ranks = np.array(trained["ranks"])  # (parts, layers)
    first, second = ranks[3] / ranks[2], ranks[6] / ranks[5]
    what = "MiniLM: effective rank after the norm of attention over before it, the layer farthest from 1"
    claims = [
        claim(what, max(first, key=lambda ratio: abs(ratio - 1)), 1.0, 0.1, "observed"),
        at_least("MiniLM: the same for the norm of the FFN, smallest", second.min(), 1),
        at_most(
            "MiniLM: effective rank of what the FFN adds over its input's, largest", (ranks[4] / ranks[3]).max(), 1
        ),
    ]
    for name in ("trained", "untrained"):
        spread = real[name]["spread"]
        claims.append(at_most(f"{name}: last spread without residuals", spread["without residuals"][-1], 1e-6))
        claims.append(at_least(f"{name}: last spread as it is", spread["as it is"][-1], 0.1))
    return claims


def plot(numbers: dict[str, Any]) -> Figure:
    """Counts by part, effective ranks by part, and the spread of directions by layer."""
    figure, (a, b, c) = panels(3, title="Affine rank through the parts of a layer")
    places = np.arange(len(PARTS))
    real = numbers["encoders"]
    for run in numbers["counts"][:1]:
        for r, ranks_by_part, colour in zip(RANKS, run["counts"], COLOURS):
            a.plot(places, ranks_by_part, "o", color=colour, label=f"$r={r}$ in")
            a.plot(places, predicted(r, run["heads"], TOKENS), **THEORY)
        a.set_ylim(0, 1.35 * TOKENS)
        a.set_xlabel("part")
    if real is None:
        for axis in (a, b, c):
            not_installed(axis)
    else:
        ranks = np.array(real["trained"]["ranks"])
        for i, colour in zip(range(ranks.shape[1]), COLOURS):
            b.plot(places, ranks[:, i], "o-", color=colour, markersize=3, linewidth=1, label=f"layer {i}")
        b.set_ylim(0, 1.4 * ranks.max())
        for name, colour in zip(("trained", "untrained"), COLOURS):
            for how, style in (("as it is", "-"), ("without residuals", ":")):
                values = real[name]["spread"][how]
                c.plot(values, style, color=colour, marker="o", markersize=3, label=f"{name}, {how}")
        c.set(yscale="log", ylim=(1e-15, 1e7))  # room for the legend above
    name = numbers["counts"][0]["name"] if numbers["counts"] else "a layer"
    label(a, f"{name}: tokens of affine rank r", "", "affine rank", legend=real is not None)
    label(b, "MiniLM: real tokens", "", "effective rank (centred)", legend=real is not None)
    label(c, "directions through depth", "level", r"$1-|{\rm mean\ direction}|^2$", legend=real is not None)
    for axis in (a, b):
        axis.set_xticks(places, [part.strip() for part in PARTS], rotation=35, ha="right", fontsize=7)
        axis.set_xlabel("after this part", fontsize=9)
        if axis.get_legend():
            axis.legend(fontsize=7, frameon=False, ncols=3, loc="upper center")
    words = "" if real is None else f" (b, c) {real['texts']} texts of {real['n']} tokens."
    caption(
        figure,
        f"(a) {TOKENS} tokens projected on r principal directions; dashed: r, Hr, (H+1)r, (H+1)r+1, n-1.{words} "
        f"Seed {numbers['seed']}.",
    )
    return figure
