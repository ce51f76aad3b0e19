"""In a trained encoder attention pulls tokens together in every layer, and the last feed-forward part lets them leave.

arXiv 2605.07772 says that a trained FFN (the feed-forward part of a layer) lets tokens leave clusters near the last
layers; only a digest is known to us, so quantities and baselines are ours. 16 texts of 128 tokens. For directions
u = x/|x| the energy e = (1/beta) log mean_ij exp(beta <u_i, u_j>), i != j, beta = 4, is that of docs/theory.md up to
constants: 1 for one cluster, 0 for orthogonal tokens. Its change in a layer is that of the attention part plus that of
the FFN part (a). Baselines (b, c): no FFN, FFN outputs given to other tokens of the same text, and the untrained copy.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from attn_flow.base.progress import progress_bar
from attn_flow.experiments.claims import at_least, at_most, claim
from attn_flow.experiments.figures import COLOURS, label, not_installed, panels

if TYPE_CHECKING:
    from matplotlib.figure import Figure

BETA = 4.0
RUNS = {"as it is": (), "without FFN": ("ffn",), "FFN of other tokens": ("shuffled ffn",)}


def compute(quick: bool = False, seed: int = 0, progress: bool = False) -> dict[str, Any]:
    """Energies by half layer of MiniLM and its untrained copy, as they are and changed."""
    texts, n = (4, 32) if quick else (16, 128)
    one, spread, pairs = torch.ones(5, 3), torch.eye(4), torch.tensor([[1.0], [1.0], [-1.0], [-1.0]])
    mean = (4 * math.exp(BETA) + 8 * math.exp(-BETA)) / 12  # over 12 ordered pairs: 4 at cosine 1, 8 at -1
    claims = [
        claim("one cluster: e", float(energy_of(one)), 1.0, 1e-12),
        claim("orthogonal tokens: e", float(energy_of(spread)), 0.0, 1e-12),
        claim("two antipodal pairs: e", float(energy_of(pairs)), math.log(mean) / BETA, 1e-12),
    ]
    real = encoders(texts, n, seed, progress)
    if real is not None:
        claims += encoder_claims(real)
    return {"seed": seed, "encoders": real, "claims": claims}


def energy_of(x: Tensor) -> Tensor:
    """e = (1/beta) log mean_{i != j} exp(beta <u_i, u_j>) of clouds (..., n, d), (...)."""
    u = torch.nn.functional.normalize(x.double(), dim=-1)
    n = u.shape[-2]
    scores = (BETA * u @ u.mT).masked_fill(torch.eye(n, dtype=torch.bool), -math.inf)
    return (scores.flatten(-2).logsumexp(-1) - math.log(n * (n - 1))) / BETA


def encoders(texts: int, n: int, seed: int, progress: bool) -> dict[str, Any] | None:
    """Energies (2L + 1, texts) at the input, after attention and after the FFN of every layer, for every run."""
    from attn_flow.experiments.encoders.minilm_variants import remove_parts, trained_and_untrained
    from attn_flow.hooks import record

    variants = trained_and_untrained(texts, n, seed)
    if variants is None:
        return None
    models, inputs = variants
    runs: dict[str, Any] = {"texts": texts, "n": n, "energy": {}}
    with progress_bar("energy by layer", len(models) * len(RUNS), progress) as advance:
        for name, model in models.items():
            for how, parts in RUNS.items():
                with remove_parts(model, *parts):
                    path = record(model, inputs, points=["resid", "hook_resid_mid"])
                whole, half = path.x[: len(path.x) // 2 + 1], path.x[len(path.x) // 2 + 1 :]
                levels = [e for i in range(len(half)) for e in (energy_of(whole[i]), energy_of(half[i]))]
                runs["energy"][f"{name}, {how}"] = torch.stack([*levels, energy_of(whole[-1])]).tolist()
                advance()
    return runs


def changes(energy: list[list[float]]) -> tuple[np.ndarray, np.ndarray]:
    """What attention and FFN change e by in every layer: (layers, texts) each."""
    step = np.diff(np.array(energy), axis=0)
    return step[0::2], step[1::2]


def encoder_claims(real: dict[str, Any]) -> list[dict[str, Any]]:
    """Means over texts; the last FFN part against its norm alone, in standard errors of their difference."""
    attention, ffn = changes(real["energy"]["trained, as it is"])
    _, norm = changes(real["energy"]["trained, without FFN"])
    _, untrained = changes(real["energy"]["untrained, as it is"])
    more = norm[-1] - ffn[-1]
    ends = [np.array(real["energy"][f"trained, {how}"])[-1].mean() for how in RUNS]
    return [
        at_least("MiniLM: what attention changes e by, smallest of its layers", attention.mean(-1).min(), 0),
        at_most("MiniLM: what the last FFN changes e by", ffn[-1].mean(), -0.02),
        at_least(
            "MiniLM, last layer: fall of e by the FFN part beyond that of its norm without FFNs, in errors",
            more.mean() / (more.std(ddof=1) / math.sqrt(len(more))),
            3,
        ),
        at_least("untrained copy: what the FFN changes e by, smallest of its layers", untrained.mean(-1).min(), -0.01),
        at_most("MiniLM: last e without FFN less as it is (no collapse without it)", ends[1] - ends[0], 0.1),
        at_least("MiniLM: last e as it is less with FFN outputs of other tokens", ends[0] - ends[2], 0.1),
    ]


def plot(numbers: dict[str, Any]) -> Figure:
    """What the two parts of a layer change, and energies through depth; bands and bars are two standard errors."""
    real = numbers["encoders"]
    figure, axes = panels(3)
    a, *both = axes
    if real is None:
        for axis in axes:
            not_installed(axis)
    else:
        parts = zip(changes(real["energy"]["trained, as it is"]), COLOURS, ("attention", "FFN"))
        for values, colour, what in parts:
            error = 2 * values.std(-1, ddof=1) / math.sqrt(values.shape[-1])
            a.errorbar(range(len(values)), values.mean(-1), error, marker="o", capsize=3, color=colour, label=what)
        a.axhline(0, color="grey", linewidth=0.8)
        for axis, name in zip(both, ("trained", "untrained")):
            for how, colour in zip(RUNS, COLOURS[2:]):
                e = np.array(real["energy"][f"{name}, {how}"])
                level, error = np.arange(len(e)) / 2, 2 * e.std(-1, ddof=1) / math.sqrt(e.shape[-1])
                axis.fill_between(level, e.mean(-1) - error, e.mean(-1) + error, color=colour, alpha=0.2, linewidth=0)
                axis.plot(level, e.mean(-1), "o-", markersize=4, color=colour, label=how)
            axis.set_ylim(0, 1.1)
    label(a, "MiniLM, trained: what each part of a layer changes", "layer", "change of the energy", real is not None)
    for axis, title in zip(both, ("MiniLM, trained", "untrained copy")):
        label(axis, title, "layer", "energy (1: one cluster)", legend=real is not None)
    return figure
