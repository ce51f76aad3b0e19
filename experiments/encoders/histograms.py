"""Run far beyond its depth, a trained encoder merges its tokens only in small groups, an untrained one all of them.

Geshkovski et al., arXiv 2312.10794 (figure on ALBERT).

(a) Mean cosine of two tokens, and the share of pairs above 0.9. (b, c) All cosines at some layers.

Differs from the paper: the encoder is the ALBERT inside the package rxnmapper (one block, trained to be applied 12
times, on chemical reactions), applied 96 times to 12 reactions; the cosine of a token with itself is removed, which
otherwise reads as clustering; the same block, untrained, is drawn beside it. It needs that package.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from attn_flow.base.progress import progress_bar
from attn_flow.experiments.claims import at_least, at_most
from attn_flow.experiments.figures import COLOURS, label, panels, shades
from attn_flow.measures.cloud import Cloud
from attn_flow.observe.quantities import close_pairs, pairwise_cosines

if TYPE_CHECKING:
    from matplotlib.figure import Figure

BINS = 100


def compute(quick: bool = False, seed: int = 0, progress: bool = False) -> dict[str, Any]:
    depth, texts = 96, 4 if quick else 12
    runs = []
    with progress_bar("histograms", 2, progress) as advance:
        for name in ("trained", "untrained"):
            runs.append(cosines(name, depth, texts, seed))
            advance()
    claims = []
    for run in runs:
        mean, close = np.array(run["mean"]), np.array(run["close"])
        what, end = f"{run['name']} block: ", run["trained_depth"]
        claims += [
            at_least(what + "mean cosine at the last layer minus at the trained depth", mean[-1] - mean[end], 0.0),
            at_least(what + "share of pairs above 0.9, last layer minus trained depth", close[-1] - close[end], 0.0),
        ]
    trained, untrained = (run["close"][-1] for run in runs)
    claims += [
        at_most("trained block: share of pairs above 0.9 at the last layer (small groups)", trained, 0.25),
        at_least("untrained block: the same (one group)", untrained, 0.9),
    ]
    return {"seed": seed, "depth": depth, "texts": texts, "runs": runs, "claims": claims}


def cosines(name: str, depth: int, texts: int, seed: int) -> dict[str, Any]:
    """Histograms, means and close pairs of off-diagonal cosines at every layer 0..depth, averaged over texts."""
    from attn_flow.experiments.encoders import load_rxnmapper, textbook_reactions
    from attn_flow.hooks import record
    from attn_flow.probe.untrained import untrained_copy

    model: Any
    model, tokenizer = load_rxnmapper()
    trained_depth = int(model.config.num_hidden_layers)
    if name == "untrained":
        model = untrained_copy(model, seed)
    model.config.num_hidden_layers = depth  # one shared block, run so many times
    path = record(model, tokenizer, textbook_reactions()[:texts])
    histograms, mean, close = [], [], []
    for x in path.x:
        cloud = Cloud(x, mask=path.mask)
        mass, edges = pairwise_cosines(cloud, BINS)
        middle = (edges[1:] + edges[:-1]) / 2
        histograms.append(mass.mean(0).tolist())
        mean.append(float((mass * middle).sum(-1).mean()))
        close.append(float(close_pairs(cloud, 0.9).mean()))
    return {
        "name": name,
        "trained_depth": trained_depth,
        "edges": edges.tolist(),
        "histograms": histograms,
        "mean": mean,
        "close": close,
    }


def plot(numbers: dict[str, Any]) -> Figure:
    runs = numbers["runs"]
    figure, (first, *axes) = panels(3)
    for run, colour in zip(runs, COLOURS):
        first.plot(run["mean"], color=colour, label=f"{run['name']}: mean cosine")
        first.plot(run["close"], color=colour, linestyle=":", label=f"{run['name']}: pairs above 0.9")
    first.axvline(runs[0]["trained_depth"], color="grey", linewidth=0.8)
    first.set_ylim(-0.05, 1.05)
    label(first, "beyond the trained depth (grey line)", "layer", "cosine, fraction of pairs")
    for axis, run in zip(axes, runs):
        edges = np.array(run["edges"])
        shown = (0, run["trained_depth"], 24, 48, 96)
        for k, colour in zip(shown, shades(len(shown))):
            axis.stairs(np.array(run["histograms"][k]) / np.diff(edges), edges, color=colour, label=f"layer {k}")
        axis.set_yscale("log")
        axis.set_ylim(1e-2, None)
        label(axis, f"{run['name']} block", "cosine of two tokens", "density of pairs")
    return figure
