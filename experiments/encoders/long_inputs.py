"""Long inputs, up to 2,048 tokens: does attention come nearer to an average, and does it need a smaller share of keys?

Mean-field theory speaks of many tokens. The beginnings of the same inputs, of n tokens, give the exponent b of the
error m^(-b) over m random keys (an average: 1/2), and the number K of clusters per head, found by the queries of other
inputs, that replace attention in every layer at W2 = 0.3 of the distance between inputs.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from attn_flow.base.progress import progress_bar
from attn_flow.coresets import cluster_by_queries
from attn_flow.experiments.claims import at_least, at_most
from attn_flow.experiments.encoders.tables import TableEncoder, draw_table
from attn_flow.experiments.encoders.zoo import fetched, load_fetched, sample_inputs
from attn_flow.experiments.figures import COLOURS, THEORY, caption, label, panels
from attn_flow.experiments.parts import kept_part
from attn_flow.hooks.corpus import fingerprint
from attn_flow.probe.averaging import measure_averaging
from attn_flow.probe.clusters import foreign_queries, size_for_w2
from attn_flow.probe.encoders import record_encoder
from attn_flow.probe.recording import Heads, Predict, Recording
from attn_flow.probe.replacement import prepare_replacement

if TYPE_CHECKING:
    from matplotlib.figure import Figure

LENGTHS = {"silero": (128, 256, 512, 1024, 2048), "tabpfn": (128, 256, 512, 1024), "minilm": (128, 256, 512)}
GOAL = 0.3  # W2 over the distance between inputs


def compute(quick: bool = False, seed: int = 0, progress: bool = False, parts: Path | None = None) -> dict[str, Any]:
    """Exponents and numbers of clusters by length, for the encoders of LENGTHS that were fetched (parts: `kept_part`).

    quick: two inputs of 32 and 64 tokens of sapiens, whose inputs are short.
    """
    lengths = {"sapiens": (32, 64)} if quick else LENGTHS
    inputs = 2 if quick else 4
    encoders: dict[str, Any] = {}
    with progress_bar("long_inputs", sum(map(len, lengths.values())), progress) as advance:
        for name, sizes in lengths.items():
            if fetched(name) is None:
                continue
            model, tokenizer = load_fetched(name)
            encoders[name] = []
            for n in sizes:
                options = {"n": n, "inputs": inputs, "seed": seed, "weights": fingerprint(model)}
                run = lambda m=model, t=tokenizer, name=name, n=n: one_length(m, t, name, n, inputs, seed)
                encoders[name].append(kept_part(parts, f"{name}-{n}", options, run))
                advance(note=f"{name}, {n} tokens")
    missing = [name for name in lengths if name not in encoders]
    return {"seed": seed, "inputs": inputs, "encoders": encoders, "missing": missing, "claims": claims(encoders)}


def one_length(model: Any, tokenizer: Any, name: str, n: int, inputs: int, seed: int) -> dict[str, Any]:
    """b by layer and input, the share of heads with b above 0.4, and the number of clusters, for n tokens."""
    generator = torch.Generator().manual_seed(seed)
    source, texts = long_inputs(model, tokenizer, name, n, inputs)
    recording = record_encoder(model, source, texts, max_length=None if texts is None else n)
    averaging = measure_averaging(recording, generator)
    b, heads = averaging.exponents(averaging.layer_errors), averaging.exponents(averaging.head_errors)
    encoder = prepare_replacement(recording)
    sizes, w2 = [2], [encoder.compare(clustered(recording, 2, generator))[0].mean()]
    while sizes[-1] < n // 2 and (w2[-1] > GOAL or len(sizes) < 2):
        sizes.append(2 * sizes[-1])
        w2.append(encoder.compare(clustered(recording, sizes[-1], generator))[0].mean())
    clusters = size_for_w2(torch.tensor(sizes), torch.stack(w2), GOAL)
    return {
        "n": n,
        "b": b.tolist(),
        "share_of_heads": float((heads.nanmean(-1) > 0.4).double().mean()),
        "logit_sd": float(averaging.logit_sd.mean()),
        "sizes": sizes,
        "w2": torch.stack(w2).tolist(),
        "clusters": None if clusters.isnan() else float(clusters),  # None: the goal is not reached
    }


def long_inputs(model: Any, tokenizer: Any, name: str, n: int, inputs: int) -> tuple[Any, list[str] | None]:
    """Tables of n rows each, or consecutive stretches of all texts of an encoder, as `record_encoder` takes them."""
    if isinstance(model, TableEncoder):
        tables = [draw_table(n, centres=i, generator=torch.Generator().manual_seed(i)) for i in range(inputs)]
        with torch.no_grad():
            return {"src": torch.stack([model.rows(x, y) for x, y in tables])}, None
    texts = sample_inputs(name)
    size = len(texts) // inputs
    return tokenizer, [" ".join(texts[i * size : (i + 1) * size]) for i in range(inputs)]


def clustered(recording: Recording, size: int, generator: torch.Generator) -> Predict:
    """Attention over so many clusters per head, found by the queries of the other inputs."""
    foreign = [foreign_queries(recording, layer, recording.texts, generator) for layer in range(recording.layers)]

    @torch.no_grad()
    def predict(heads: Heads, layer: int, text: int) -> Tensor:
        clusters = cluster_by_queries(heads.keys, heads.values, foreign[layer][text].queries, size)
        return heads.combine(clusters.averages(heads.queries))

    return predict


def mean_exponent(row: dict[str, Any]) -> float:
    """The mean of b over layers and inputs."""
    return float(np.nanmean(np.array(row["b"], dtype=float)))


def claims(encoders: dict[str, Any]) -> list[dict[str, Any]]:
    claims = []
    for name, rows in encoders.items():
        first, last = rows[0], rows[-1]
        what = f"{name}, {first['n']} to {last['n']} tokens: "
        claims.append(at_least(what + "growth of the mean b", mean_exponent(last) - mean_exponent(first), 0.0))
        if first["clusters"] is not None and last["clusters"] is not None:
            growth = np.log(last["clusters"] / first["clusters"]) / np.log(last["n"] / first["n"])
            claims.append(at_most(what + "exponent g of K = n^g, below 1 if K/n falls", growth, 1.0))
    return claims


def plot(numbers: dict[str, Any]) -> Figure:
    """b by layer and the share of keys, against the number of tokens."""
    figure, (left, right) = panels(2, title="Longer inputs")
    for colour, (name, rows) in zip(COLOURS, numbers["encoders"].items()):
        n = [row["n"] for row in rows]
        by_layer = np.array([np.nanmean(np.array(row["b"], dtype=float), -1) for row in rows])  # (lengths, layers)
        left.plot(n, by_layer, color=colour, linewidth=0.7, alpha=0.4)
        left.plot(n, by_layer.mean(-1), "o-", color=colour, label=name)
        share = [np.nan if row["clusters"] is None else row["clusters"] / row["n"] for row in rows]
        right.plot(n, share, "o-", color=colour, label=name)
    left.axhline(0.5, **THEORY)
    for axis in (left, right):
        axis.set_xscale("log", base=2)
        axis.xaxis.set_major_formatter("{x:g}")
    left.set_ylim(0, 0.6)
    right.set_ylim(0)
    label(left, "does attention average?", "tokens n", "exponent b (an average: 1/2)")
    label(right, "which share of keys does it need?", "tokens n", "K / n for W2 = 0.3")
    caption(
        figure,
        f"{numbers['inputs']} inputs for each length; thick: mean over layers, thin: single layers. "
        f"Seed {numbers['seed']}.",
    )
    return figure
