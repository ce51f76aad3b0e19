"""Temperature and length: which multiple of beta makes the embedding of a long text the mean of its chunks' embeddings?

Attention keeps the same sharpness over n keys as over n0 keys if beta is multiplied by log n / log n0 (theory of long
contexts), or by the root of that if the logits are Gaussian (`theory.random_energy`). Neither has a fitted number.
A colder attention is also more local, and chunks are local by construction. The baselines are local windows at the
trained beta: one in which tokens attend as far as at the best beta, and one of n0 tokens. Where the first gains as much
as the best beta, locality explains the gain. Retrieval is not measured, and need not improve.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from attn_flow.base.progress import progress_bar
from attn_flow.experiments.claims import at_least
from attn_flow.experiments.figures import COLOURS, THEORY, caption, label, panels
from attn_flow.experiments.parts import kept_part
from attn_flow.hooks.corpus import fingerprint
from attn_flow.hooks.demo import topics
from attn_flow.hooks.loading import load_encoder
from attn_flow.probe.encoders import record_encoder
from attn_flow.probe.recording import Heads, Predict, Recording
from attn_flow.probe.replacement import run

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ENCODERS = ("minilm", "sre", "mpnet")  # encoders of English prose; others have short inputs
PAIRS = ((512, 128), (512, 256), (256, 128), (128, 64), (256, 64), (512, 64))  # tokens of a text and of its chunks
FACTORS = tuple(0.8 + 0.1 * i for i in range(10))
RESAMPLES = 200
DISTANCE_TEXTS = 4  # on which attended distances are measured

Weights = Callable[[Heads], Tensor]  # attention weights (heads, n, n)


def compute(quick: bool = False, seed: int = 0, progress: bool = False, parts: Path | None = None) -> dict[str, Any]:
    """Cosines of long texts with their chunks by factor of beta, with the control, for every encoder that is here.

    parts: see `kept_part`.
    """
    from attn_flow.experiments.encoders import fetched

    pairs, texts = (((64, 32),), 3) if quick else (PAIRS, 16)
    wanted = ("minilm",) if quick else ENCODERS
    here = [name for name in wanted if name == "minilm" or fetched(name) is not None]
    models: dict[str, Any] = {}
    with progress_bar("temperature_and_length", len(here) * len(pairs), progress) as advance:
        for name in here:
            model, tokenizer = load_encoder(name)
            models[name] = []
            for n, n0 in pairs:
                if n > tokenizer.model_max_length:  # sre takes 256 tokens
                    advance(note=name)
                    continue
                options = {"n": n, "n0": n0, "texts": texts, "seed": seed, "weights": fingerprint(model)}
                run = lambda m=model, t=tokenizer, n=n, n0=n0: compare_lengths(m, t, n, n0, texts, seed)
                models[name].append(kept_part(parts, f"{name}-{n}-{n0}", options, run))
                advance(note=name)
    missing = [name for name in wanted if name not in here]
    return {"seed": seed, "texts": texts, "models": models, "missing": missing, "claims": _claims(models)}


def compare_lengths(model: nn.Module, tokenizer: Any, n: int, n0: int, texts: int, seed: int) -> dict[str, Any]:
    """The best factor of beta for texts of n tokens against their chunks of n0 tokens, and the cosines of windows."""
    chunks = list(cut_texts(topics(), tokenizer, n0, n // n0, texts))
    trained = replacing(colder(1.0))
    parts = [run(record_encoder(model, tokenizer, row, max_length=n0), trained).embeddings.mean(0) for row in chunks]
    target = nn.functional.normalize(torch.stack(parts), dim=-1)
    recording = record_encoder(model, tokenizer, [" ".join(row) for row in chunks], max_length=n)

    def cosine(weights: Weights) -> Tensor:
        return (run(recording, replacing(weights)).embeddings * target).sum(-1).double()

    by_factor = torch.stack([cosine(colder(factor)) for factor in FACTORS])
    draws = torch.randint(len(chunks), (RESAMPLES, len(chunks)), generator=torch.Generator().manual_seed(seed))
    resampled = sorted(best_factor(by_factor[:, draw].mean(-1)) for draw in draws)
    best = best_factor(by_factor.mean(-1))
    distance = attended_distance(recording, colder(best))
    width = matching_window(recording, distance)
    return {
        "n": n,
        "n0": n0,
        "texts": len(chunks),
        "cosine": by_factor.mean(-1).tolist(),
        "best": best,
        "low": resampled[round(0.025 * (RESAMPLES - 1))],
        "high": resampled[round(0.975 * (RESAMPLES - 1))],
        "logarithm": math.log(n) / math.log(n0),
        "root": math.sqrt(math.log(n) / math.log(n0)),
        "trained_cosine": float(cosine(colder(1.0)).mean()),
        "best_cosine": float(cosine(colder(best)).mean()),
        "trained_distance": attended_distance(recording, colder(1.0)),
        "best_distance": distance,
        "window": width,
        "window_cosine": float(cosine(local(width)).mean()),
        "chunk_window_cosine": float(cosine(local(n0)).mean()),
    }


def cut_texts(texts: Sequence[str], tokenizer: Any, n0: int, count: int, number: int) -> Iterator[list[str]]:
    """Of the first texts that are long enough: `count` chunks of whole words with at most n0 tokens each.

    Two of the tokens are special.
    """
    for text in texts:
        chunks: list[list[str]] = [[]]
        size = 0
        for word in text.split():
            tokens = len(tokenizer.tokenize(word))
            if size + tokens > n0 - 2:
                if len(chunks) == count:
                    break
                chunks.append([])
                size = 0
            chunks[-1].append(word)
            size += tokens
        else:
            continue
        yield [" ".join(words) for words in chunks]
        number -= 1
        if number == 0:
            return


def replacing(weights: Weights) -> Predict:
    """Attention with other weights, in every layer."""

    @torch.no_grad()
    def predict(heads: Heads, layer: int, text: int) -> Tensor:
        return heads.combine(weights(heads) @ heads.values)

    return predict


def colder(factor: float) -> Weights:
    """Attention weights at a multiple of the trained beta."""
    return lambda heads: (factor * heads.logits).softmax(-1)


def local(width: int) -> Weights:
    """Attention weights at the trained beta inside a window of `width` tokens; special tokens see all and are seen."""

    def weights(heads: Heads) -> Tensor:
        is_far = _distances(heads) > width // 2
        is_far = is_far & ~heads.special & ~heads.special[:, None]
        return heads.logits.masked_fill(is_far, -torch.inf).softmax(-1)

    return weights


def attended_distance(recording: Recording, weights: Weights) -> float:
    """Mean distance in tokens from a token to those it attends to, special tokens apart, over layers and some texts."""
    means = []
    for text in range(min(DISTANCE_TEXTS, recording.texts)):
        for layer in range(recording.layers):
            heads = recording.heads(layer, text)
            P = weights(heads)[:, ~heads.special][..., ~heads.special]
            distances = _distances(heads)[~heads.special][:, ~heads.special]
            means.append(float((P * distances).sum() / P.sum()))
    return sum(means) / len(means)


def matching_window(recording: Recording, distance: float) -> int:
    """The widest window in which tokens attend no farther than `distance` on average, at least 2, by bisection."""
    low, high = 2, 2 * max(len(special) for special in recording.special)
    while low < high:
        middle = (low + high + 1) // 2
        if attended_distance(recording, local(middle)) <= distance:
            low = middle
        else:
            high = middle - 1
    return low


def _distances(heads: Heads) -> Tensor:
    i = torch.arange(heads.n, device=heads.special.device)
    return (i[:, None] - i).abs()


def best_factor(cosines: Tensor) -> float:
    """The vertex of the parabola through the largest cosine (factors,) and its neighbours; an end if it is there."""
    i = int(cosines.argmax())
    if i in (0, len(FACTORS) - 1):
        return FACTORS[i]
    before, top, after = cosines[i - 1 : i + 2].tolist()
    curvature = before - 2 * top + after
    step = FACTORS[1] - FACTORS[0]
    return FACTORS[i] + (0.5 * step * (before - after) / curvature if curvature else 0.0)


def _claims(models: dict[str, list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Shares of all pairs of lengths: the sign, the two rules, and whether locality explains the gain."""
    rows = [row for pairs in models.values() for row in pairs]
    if not rows:
        return []
    share = lambda holds: sum(map(holds, rows)) / len(rows)
    inside = lambda rule: share(lambda row: row["low"] <= row[rule] <= row["high"])
    return [
        at_least("best factor of beta above 1, share of pairs", share(lambda row: row["best"] > 1), 0.8),
        at_least("log n / log n0 in the interval, share of pairs", inside("logarithm"), 0.5),
        at_least("its root in the interval, share of pairs", inside("root"), 0.5),
        at_least(
            "a window as local as the best beta gains less than it, share of pairs",
            share(lambda row: row["window_cosine"] < row["best_cosine"]),
            0.5,
        ),
        at_least(
            "a window of n0 tokens gains more than the best beta, share of pairs",
            share(lambda row: row["chunk_window_cosine"] > row["best_cosine"]),
            0.5,
        ),
    ]


def plot(numbers: dict[str, Any]) -> Figure:
    """Best factors against both rules, and the cosines of the trained beta, the best one and the window."""
    figure, (left, right) = panels(2, title="Temperature and length")
    ends = [1.0, 1.55]
    left.plot(ends, ends, **THEORY, label="log n / log n0")
    left.plot(ends, [math.sqrt(x) for x in ends], **{**THEORY, "linestyle": ":"}, label="its root (Gaussian logits)")
    for colour, (name, rows) in zip(COLOURS, numbers["models"].items()):
        best = [row["best"] for row in rows]
        errors = [[max(0.0, b - row["low"]) for b, row in zip(best, rows)]]
        errors.append([max(0.0, row["high"] - b) for b, row in zip(best, rows)])
        left.errorbar([row["logarithm"] for row in rows], best, errors, fmt="o", color=colour, label=name, markersize=4)
        gains = [row["best_cosine"] - row["trained_cosine"] for row in rows]
        windows = [row["window_cosine"] - row["trained_cosine"] for row in rows]
        right.plot(windows, gains, "o", color=colour, label=name, markersize=4)
    right.axline((0, 0), slope=1, **THEORY)
    label(left, "best factor of beta", "log n / log n0", "factor with the largest cosine")
    label(right, "gain in cosine over the trained beta", "local window", "best factor of beta")
    note = f"{numbers['texts']} help pages of Python, seed {numbers['seed']}; intervals over texts. "
    note += "Windows are as local as attention at the best beta; on the dashed line they gain as much as it."
    caption(figure, note)
    return figure
