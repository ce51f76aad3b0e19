"""Thirteen real encoders, one question: does attention act through a law of the cloud, in a layer and through depth?

The probe's closures and nulls on every encoder of `attn-flow encoders` that was fetched (docs/encoders.md), on inputs
of its own kind; the same architecture untrained, two pairs before and after fine-tuning, and the tied blocks of ALBERT
and chytorch-rxnmap run beyond their depth. Ours: no paper compares encoders of so many kinds. What holds in all of
them, in most or in few is counted, so that a claim may fail. Encoders that were not fetched are named and left out.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from attn_flow.base.progress import progress_bar
from attn_flow.experiments.claims import bound
from attn_flow.experiments.encoders import ZOO, fetched, load_fetched, own_inputs
from attn_flow.experiments.parts import kept_part
from attn_flow.experiments.zoo_figure import PAIRS, best_null, mean
from attn_flow.experiments.zoo_figure import plot as plot
from attn_flow.hooks.attachment import with_depth
from attn_flow.hooks.fingerprints import fingerprint
from attn_flow.probe.clouds import Clouds, directions, record_clouds
from attn_flow.probe.heads import sharpness
from attn_flow.probe.nulls import (
    CROSS_FITTED,
    agreement_of,
    by_closure,
    by_control,
    by_null,
    cross_fitted,
    main_closure,
    steps,
    untrained_twin,
)
from attn_flow.probe.nulls import allowed as allowed_nulls
from attn_flow.probe.propagation import Bench, Passes, Prediction, bench, compare_passes

LAYER_NULLS = ("uniform", "rotated", "another_layer", "another_text")
DEPTH_NULLS = ("mean_output", "uniform", "rotated", "another_text", "removed")
TIED = ("rxnmapper", "rxnmap")  # one block fired again and again


def compute(
    quick: bool = False, seed: int = 0, progress: bool = False, parts: Path | None = None, names: tuple[str, ...] = ()
) -> dict[str, Any]:
    """names: which encoders, all that were fetched unless given (quick: the small ones). parts: see `kept_part`."""
    texts, length, deeper = (3, 48, 18) if quick else (8, 128, 48)
    wanted = names or (("sapiens", "rxnmapper") if quick else tuple(ZOO))
    here = [name for name in wanted if fetched(name) is not None]
    models = {}
    with progress_bar("zoo", len(here), progress) as advance:
        for name in here:
            advance(0, note=name)
            models[name] = _part(name, texts, length, seed, deeper if name in TIED else None, parts)
            advance(note=name)
    missing = [name for name in wanted if name not in here]
    return {
        "seed": seed,
        "texts": texts,
        "length": length,
        "deeper": deeper,
        "models": models,
        "missing": missing,
        "claims": _claims(models),
    }


def _part(name: str, texts: int, length: int, seed: int, deeper: int | None, parts: Path | None) -> dict[str, Any]:
    model, tokenizer = load_fetched(name)
    asked = {"texts": texts, "length": length, "seed": seed, "deeper": deeper, "weights": fingerprint(model)}

    def run() -> dict[str, Any]:
        source, chosen = own_inputs(name, tokenizer, model, texts, length)
        return one_model(model, source, chosen, length=length, seed=seed, deeper=deeper)

    return kept_part(parts, name, asked, run)


def one_model(
    model: nn.Module, source: Any, texts: list[str] | None, *, length: int, seed: int, deeper: int | None = None
) -> dict[str, Any]:
    """Everything of one encoder: layer by layer, through depth, its regime, its untrained twin; beyond its depth.

    source, texts: as `probe` takes them. length: tokens kept of each text. deeper: firings of a shared block.
    """
    with torch.no_grad():
        own = _one_run(model, source, texts, length, seed, nulls=True)
        twin = _one_run(untrained_twin(model, seed), source, texts, length, seed, nulls=False)
        beyond = None
        if deeper is not None:
            beyond = {
                "trained": _beyond(model, source, texts, length, seed, deeper),
                "untrained": _beyond(untrained_twin(model, seed), source, texts, length, seed, deeper),
            }
    return {**own, "untrained": twin, "beyond": beyond}


def _one_run(
    model: nn.Module, source: Any, texts: list[str] | None, length: int, seed: int, nulls: bool
) -> dict[str, Any]:
    clouds = record_clouds(model, source, texts, max_length=length, max_unknown=1.0 if not nulls else 0.1)
    generator = torch.Generator().manual_seed(seed)
    main = main_closure(clouds)
    predictions: dict[str, Prediction] = {"closure": by_closure(main)}
    if nulls:
        predictions["gaussian"] = by_closure(steps(clouds)["gaussian_closure"])
    if nulls and not clouds.partial:
        predictions[CROSS_FITTED] = cross_fitted
        predictions["random_clusters_closure"] = by_control("random_clusters_closure", generator)
    layer, depth = dict(predictions), dict(predictions)
    if nulls:
        tied = all(torch.equal(A.tensors["Q"], clouds.attentions[0].tensors["Q"]) for A in clouds.attentions)
        differing = [name for name in LAYER_NULLS if not (tied and name == "another_layer")]
        layer |= {name: by_null(name, clouds, generator) for name in allowed_nulls(differing, clouds)}
        depth |= {
            name: by_null(name, clouds, generator, corpus_mean=True) for name in allowed_nulls(DEPTH_NULLS, clouds)
        }
    else:
        depth["mean_output"] = by_null("mean_output", clouds, generator, corpus_mean=True)
    agreement = {name: agreement_of(clouds, predict) for name, predict in layer.items()}
    laid = bench(model, source, texts, clouds, length)
    carried = {}
    for name, predict in depth.items():
        passes = laid.run(predict)
        found = compare_passes(passes, laid.true, laid.between, laid.transport)
        carried[name] = {
            "cosine": _pooled_cosines(passes, laid),
            "embedding_cosine": float(found.embedding_cosine.mean()),
            "embedding_cosine_error": float(found.embedding_cosine.std()) / math.sqrt(clouds.texts),
            "w2": found.w2.mean(-1).tolist(),
        }
    return {
        "layers": clouds.layers,
        "dim": clouds.attentions[0].dim,
        "heads": clouds.attentions[0].heads,
        "n": sum(len(s) for s in clouds.special) / clouds.texts,
        "causal": clouds.partial,
        "main": main.name,
        "numbers": mean([main.cost(clouds.space(i, 0)).numbers for i in range(clouds.layers)]),
        "explained": {name: found.explained.mean(-1).tolist() for name, found in agreement.items()},
        "explained_error": (agreement["closure"].explained.std(-1) / math.sqrt(clouds.texts)).tolist(),
        "raw_cosine": agreement["closure"].cosine.mean(-1).tolist(),
        "depth": carried,
        "regime": _regime(clouds),
    }


def _pooled_cosines(passes: Passes, laid: Bench) -> list[float]:
    """Cosine of the mean-pooled states with the encoder's own, level by level from the first layer, mean over texts."""
    levels = range(1, len(laid.true.states[0]))
    pairs = list(zip(passes.states, laid.true.states))
    pooled = [[(a[level].mean(0), b[level].mean(0)) for a, b in pairs] for level in levels]
    return [mean([float(nn.functional.cosine_similarity(a, b, dim=0)) for a, b in row]) for row in pooled]


def _regime(clouds: Clouds) -> dict[str, Any]:
    """How sharply attention looks, and how near tokens are to each other, by layer."""
    entropy, largest, beta = [], [], []
    for layer in range(clouds.layers):
        seen = [sharpness(clouds.space(layer, text)) for text in range(clouds.texts)]
        entropy.append(mean([float(s["entropy"].mean()) for s in seen]))
        largest.append(mean([float(s["largest_weight"].mean()) for s in seen]))
        beta.append(mean([float(s["effective_beta"].mean()) for s in seen]))
    cosine = [mean([_pairwise(z) for z in level]) for level in clouds.z]
    return {"entropy": entropy, "largest_weight": largest, "effective_beta": beta, "pairwise_cosine": cosine}


def _pairwise(z: Tensor) -> float:
    """Mean cosine of different tokens."""
    x, n = directions(z), len(z)
    return float((x.sum(0).square().sum() - n) / (n * (n - 1)))


def _beyond(
    model: nn.Module, source: Any, texts: list[str] | None, length: int, seed: int, depth: int
) -> dict[str, Any]:
    """The shared block fired `depth` times: how near tokens come, and whether the closure still follows."""
    with with_depth(model, depth):
        clouds = record_clouds(model, source, texts, max_length=length, max_unknown=1.0)
        laid = bench(model, source, texts, clouds, length)
        generator = torch.Generator().manual_seed(seed)
        runs = {
            "closure": by_closure(main_closure(clouds)),
            "mean_output": by_null("mean_output", clouds, generator, corpus_mean=True),
        }
        cosine = {name: _pooled_cosines(laid.run(predict), laid) for name, predict in runs.items()}
        return {"cosine": cosine, "pairwise_cosine": [mean([_pairwise(z) for z in level]) for level in clouds.z]}


def _claims(models: dict[str, Any]) -> list[dict[str, Any]]:
    """What holds in all encoders, in most, in few: shares of them."""
    if not models:
        return []

    def share(holds: Callable[[dict[str, Any]], bool], among: dict[str, Any] = models) -> float:
        return sum(holds(run) for run in among.values()) / len(among)

    def leads(run: dict[str, Any]) -> bool:
        nulls = [v for n, v in run["explained"].items() if n not in ("closure", "gaussian", CROSS_FITTED)]
        return all(r2 > max(0, *(null[i] for null in nulls)) for i, r2 in enumerate(run["explained"]["closure"]))

    def carries(run: dict[str, Any]) -> bool:
        found = run["depth"]["closure"]
        return found["embedding_cosine"] - 2 * found["embedding_cosine_error"] > best_null(run)[1]

    shared = {name: run for name, run in models.items() if not run["causal"]}
    claims = [
        bound("all: the closure is above 0 and every null in every layer, share", share(leads), at_least=1),
        bound("all: through depth it ends nearer than every null, share", share(carries), at_least=1),
        bound("all: raw cosine of untrained twins, least", _least(models, "raw_cosine"), at_least=0.98),
        bound(
            "most: embedding cosine .95 or more after all layers, share",
            share(lambda run: run["depth"]["closure"]["embedding_cosine"] >= 0.95),
            at_least=0.5,
        ),
        bound(
            "most: above 0 in every layer for queries by which it was not found, share",
            share(lambda run: min(run["explained"][CROSS_FITTED]) > 0, shared) if shared else math.nan,
            at_least=0.5,
        ),
        bound(
            "few: one Gaussian above 0 in every layer, share",
            share(lambda run: min(run["explained"]["gaussian"]) > 0),
            at_most=0.5,
        ),
        bound(
            "most: tokens are nearer to each other at the end, share",
            share(lambda run: run["regime"]["pairwise_cosine"][-1] > run["regime"]["pairwise_cosine"][0]),
            at_least=0.5,
        ),
    ]
    for before, after in PAIRS:
        if before in models and after in models:
            a, b = (models[name] for name in (before, after))
            nearer = b["regime"]["pairwise_cosine"][-1] - a["regime"]["pairwise_cosine"][-1]
            claims.append(bound(f"fine-tuning {before} to {after}: last cosine of tokens rises by", nearer, at_least=0))
            moved = max(abs(x - y) for x, y in zip(a["explained"]["closure"], b["explained"]["closure"]))
            claims.append(bound(f"fine-tuning {before} to {after}: explained variance moves by", moved, at_most=0.1))
    for name, run in models.items():
        if run["beyond"]:
            ends = {kind: found["pairwise_cosine"][-1] for kind, found in run["beyond"].items()}
            claims.append(bound(f"{name} beyond its depth: cosine of tokens, trained", ends["trained"], at_most=0.5))
            claims.append(bound(f"{name} beyond its depth: the same, untrained", ends["untrained"], at_least=0.5))
    return claims


def _least(models: dict[str, Any], name: str) -> float:
    return min(min(run["untrained"][name]) for run in models.values())
