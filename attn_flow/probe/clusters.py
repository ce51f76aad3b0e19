"""Question 2: how few key-value clusters does a head need?

Attention is replaced in every layer by weighted clusters of the text's own keys and values, found by the queries of
other texts, and compared at equal size K with baselines, which it must beat, and with references that see the answer.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from torch import Tensor

from attn_flow import coresets
from attn_flow.coresets import cluster_by_queries
from attn_flow.probe import findings
from attn_flow.probe.encoders import record_encoder
from attn_flow.probe.findings import Finding, bootstrap, resampled_texts, with_interval
from attn_flow.probe.recording import MIN_TOKENS, Heads, Predict, Recording, explained
from attn_flow.probe.replacement import prepare_replacement

W2_GOAL = 0.3  # of the distance between texts, for which the number of clusters is reported
TEXTS = 8  # through depth by default
LAYER_TEXTS = 4  # for R2 layer by layer, which differs little between texts
QUERIES = 640  # of other texts; 128 lose 0.005 of embedding cosine in MiniLM, more gain nothing

CURVES = ("foreign_queries", "own_attention", "keys", "top_tokens", "random_clusters", "random_tokens")  # at every K
SINGLE_BASELINES = ("top_tokens_and_rest", "leverage_sample", "pivoted_cholesky")
BASELINES = (*CURVES[2:], *SINGLE_BASELINES)  # to be beaten
SINGLE = ("foreign_queries_fitted", *SINGLE_BASELINES, "top_k_oracle", "low_rank")  # at the middle K
METHODS = CURVES + SINGLE


@dataclass(frozen=True, eq=False)
class ForeignQueries:
    """Queries of other texts in one layer, from which the clusters of a text are found."""

    queries: Tensor  # (heads, m, k)
    tokens: tuple[Tensor, Tensor] | None  # keys and values of their tokens; None where positions enter the scores

    def predicted(self, keys: Tensor, values: Tensor) -> Tensor:
        """Queries that the text's own tokens may have; without `tokens` these queries themselves."""
        if self.tokens is None:
            return self.queries
        return coresets.predict_queries(self.queries, self.tokens, keys, values)


def foreign_queries(recording: Recording, layer: int, texts: int, generator: torch.Generator) -> list[ForeignQueries]:
    """For each of the first `texts` texts, QUERIES queries drawn from all other texts of the recording.

    They are at their own positions, none beyond the length of the text.
    """
    heads, result = [recording.heads(layer, t) for t in range(recording.texts)], []
    queries, keys, values = (torch.cat(z, 1) for z in zip(*((h.queries, h.keys, h.values) for h in heads)))
    owner = torch.cat([torch.full((h.n,), t) for t, h in enumerate(heads)])
    position = torch.cat([torch.arange(h.n) for h in heads])
    for text in range(texts):
        candidates = ((owner != text) & (position < heads[text].n)).nonzero()[:, 0]
        drawn = candidates[torch.randperm(len(candidates), generator=generator)[:QUERIES]].to(queries.device)
        tokens = (keys[:, drawn], values[:, drawn]) if recording.positions[layer] is None else None
        result.append(ForeignQueries(queries[:, drawn], tokens))
    return result


def replaced_averages(method: str, h: Heads, foreign: ForeignQueries, K: int, generator: torch.Generator) -> Tensor:
    """What each head computes from K clusters or tokens that a method of METHODS finds, (heads, n, v)."""
    k, v, own, others = h.keys, h.values, h.queries, foreign.queries
    predicted = foreign.predicted(k, v) if method == "foreign_queries_fitted" else own
    finders = {
        "foreign_queries": lambda: cluster_by_queries(k, v, others, K),
        "foreign_queries_fitted": lambda: coresets.fit(cluster_by_queries(k, v, predicted, K), k, v, predicted),
        "own_attention": lambda: cluster_by_queries(k, v, own, K),
        "keys": lambda: coresets.cluster_keys(k, v, K),
        "top_tokens": lambda: coresets.top_tokens(k, v, own, K),
        "top_tokens_and_rest": lambda: coresets.top_tokens(k, v, own, K, rest=True),
        "random_clusters": lambda: coresets.random_clusters(k, v, others, K, generator),
        "random_tokens": lambda: coresets.random_tokens(k, v, h.special, K, generator),
        "leverage_sample": lambda: coresets.leverage_sample(k, v, K, generator),
    }
    averages = {
        "pivoted_cholesky": lambda: coresets.nystroem_averages(k, v, own, others.square().sum(-1).mean(-1).sqrt(), K),
        "top_k_oracle": lambda: coresets.top_k_averages(h.logits, v, K),
        "low_rank": lambda: coresets.low_rank_averages(h.logits, v, K),
    }
    return averages[method]() if method in averages else finders[method]().averages(own)


@dataclass(frozen=True, eq=False)
class Clusters:
    """What replacing attention by K clusters a head does, method by method in the order of METHODS.

    W2 and the cosine of embeddings are those of the encoder's output with attention replaced in every layer, W2 in
    units of the distance between texts. They are NaN for sizes that a method was not run with. The short ones are
    those of the first tokens of the texts, by foreign queries only; there may be no cuts.
    """

    sizes: Tensor  # (sizes,), the numbers K of clusters
    lengths: Tensor  # (texts,), numbers of tokens
    w2: Tensor  # (methods, sizes, texts)
    embedding_cosine: Tensor  # (methods, sizes, texts)
    explained: Tensor  # (methods, sizes, layers, first texts), R2 of what attention adds to the recorded tokens
    short_lengths: Tensor  # (cuts, texts)
    short_sizes: Tensor  # (cuts, sizes)
    short_w2: Tensor  # (cuts, sizes, texts)
    cost: Tensor  # (sizes,), multiplications that find and use the clusters, over those of exact attention

    def finding(self, seed: int = 0) -> Finding:
        """The verdict: supported where foreign queries beat every baseline in last-level W2, with the same K and texts.

        The 95% interval over texts of every paired difference must lie above 0, for all K ("supported") or some
        ("partly").
        """
        if self.w2.isnan().all():
            return Finding(None, "Not measured: the texts are equal, and the distance between texts is the unit of W2.")
        rows = [METHODS.index(name) for name in BASELINES]
        differences, own, sizes, texts = self.w2[rows] - self.w2[0], self.w2[0], self.sizes.tolist(), self.w2.shape[-1]
        is_better = ((bootstrap(differences, seed).low > 0) | differences.isnan().all(-1)).all(0)  # NaN: not run
        better, n = self.sizes[is_better].tolist(), float(self.lengths.double().mean())
        needed = {name: float(size_for_w2(self.sizes, w2.mean(-1))) for name, w2 in zip(METHODS, self.w2)}
        size, growth = needed["foreign_queries"], float(self._growth(torch.arange(texts)[None]))
        draws = resampled_texts(texts, seed)
        shares = _interval(size_for_w2(self.sizes, own[:, draws].mean(-1).mT) / n)
        numbers = {
            "curve": self._curve(),
            "sizes": sizes,
            "sizes_that_beat_every_baseline": better,
            "w2_goal": W2_GOAL,
            "clusters_for_w2_goal": needed,
            "share_of_tokens": size / n,
            "share_of_tokens_interval": shares,
            "growth_exponent": growth,
            "growth_exponent_interval": _interval(self._growth(draws)),
            "cost_over_attention": dict(zip(sizes, self.cost.tolist())),
        }
        verdict = "supported" if len(better) == len(sizes) else "partly" if better else "not supported"
        only = f" for K = {', '.join(map(str, better))} only" if verdict == "partly" else ""
        words = f"{'beat' if better else 'do not beat'} every baseline of equal size{only}"
        if math.isnan(size):  # the goal is far from the measured curve
            s = 0 if float(own[0].mean()) <= W2_GOAL else -1
            goal, needs, baseline = float(own[s].mean()), f"{sizes[s]} clusters a head", ""
            value = f"W2 {goal:.2f} with {sizes[s]} clusters"
        else:
            goal, needs = W2_GOAL, f"{size:.0f} clusters a head ({size / n:.0%} of {n:.0f} tokens)"
            low, high = (n * share for share in shares) if shares else (math.nan, math.nan)
            value = f"{with_interval(size, low, high, 0)} of {n:.0f} tokens for W2 {W2_GOAL}"
            rivals = [(needed[name], name.replace("_", " ")) for name in BASELINES if not math.isnan(needed[name])]
            baseline = "{1}: {0:.0f}".format(*min(rivals)) if rivals else "none reaches it"
        grows = "" if math.isnan(growth + size) else f", growing like n^{growth:.1f}"
        measured = f"{needs} replace attention at W2 {goal:.2g}{grows}; finding them saves no work"
        words = f"Clusters found by other texts' queries {words}"
        return findings.answer(verdict, words, measured, texts, numbers, value, baseline)

    def _curve(self) -> dict[str, dict[str, dict[str, Any]]]:
        """Means over texts: method -> K -> embedding_cosine, w2, explained (by layer), for the sizes that were run."""
        means = {"embedding_cosine": self.embedding_cosine, "w2": self.w2, "explained": self.explained}
        is_run = ~self.embedding_cosine.isnan().all(-1)
        return {
            name: {
                str(size): {key: values[m, s].mean(-1) for key, values in means.items()}
                for s, size in enumerate(self.sizes.tolist())
                if is_run[m, s]
            }
            for m, name in enumerate(METHODS)
        }

    def _growth(self, draws: Tensor) -> Tensor:
        """The exponent g of K ~ n^g at W2_GOAL for resampled texts, (draws,); NaN where it is not known."""
        if not len(self.short_sizes):
            return torch.full((len(draws),), torch.nan, dtype=torch.float64)
        curves = [(self.sizes, self.lengths, self.w2[0]), *zip(self.short_sizes, self.short_lengths, self.short_w2)]
        y = torch.stack([size_for_w2(sizes, w2[:, draws].mean(-1).mT).log() for sizes, _, w2 in curves])
        x = torch.stack([lengths.double()[draws].mean(-1).log() for _, lengths, _ in curves])
        x, y = x - x.mean(0), y - y.mean(0)
        return (x * y).sum(0) / x.square().sum(0)


def measure_clusters(
    recording: Recording,
    generator: torch.Generator,
    *,
    sizes: Sequence[int] | None = None,
    texts: int = TEXTS,
    progress: Callable[[float], None] = lambda share: None,
) -> Clusters:
    """Replace attention in every layer by every method and size.

    Args:
        recording: at least two texts whose tokens see all of their text, recorded from a model.
        generator: of random tokens, clusters and foreign queries, which come from all texts but the replaced one.
        sizes: numbers of clusters; by default three powers of two up to half the median length.
        texts: how many texts are run through depth.
        progress: called with the share of the work that is done.
    """
    encoder = prepare_replacement(recording.first(texts))
    first, lengths = encoder.recording.first(LAYER_TEXTS), torch.tensor([len(s) for s in encoder.recording.special])
    n, L, T = int(lengths.median()), recording.layers, first.texts
    sizes = default_sizes(n) if sizes is None else list(sizes)
    foreign = [foreign_queries(recording, layer, len(lengths), generator) for layer in range(L)]
    runs = {
        (m, s): _predict(name, foreign, size, generator)
        for m, name in enumerate(METHODS)
        for s, size in enumerate(sizes)
        if name in CURVES or s == len(sizes) // 2
    }
    w2, cosine = (torch.full((len(METHODS), len(sizes), len(lengths)), torch.nan).double() for _ in range(2))
    r2 = torch.full((len(METHODS), len(sizes), L, T), torch.nan).double()
    for layer, text in product(range(L), range(T)):
        heads = first.heads(layer, text)
        for (m, s), predict in runs.items():
            r2[m, s, layer, text] = explained(predict(heads, layer, text), first.outputs[layer][text])
        progress(0.25 * (layer * T + text + 1) / (L * T))
    for done, ((m, s), predict) in enumerate(runs.items()):
        w2[m, s], cosine[m, s] = encoder.compare(predict)
        progress(0.25 + 0.65 * (done + 1) / len(runs))
    has_cuts = recording.inputs is not None and recording.inputs.texts is not None and n // 4 >= MIN_TOKENS
    short = [_measure_cut(encoder.recording, cut, generator) for cut in (n // 2, n // 4) if has_cuts]
    cuts = [torch.stack(column) for column in zip(*short)] or [torch.zeros(0)] * 3
    progress(1.0)
    cost = _cost(first.heads(0, 0), torch.tensor(sizes, dtype=torch.float64))
    return Clusters(torch.tensor(sizes), lengths, w2, cosine, r2, cuts[0], cuts[1], cuts[2], cost)


def default_sizes(n: int) -> list[int]:
    """Three powers of two, up to half of n tokens."""
    largest = 2 ** max(1, int(math.log2(max(2, n // 2))))
    return sorted({max(1, largest // 4), max(1, largest // 2), largest})


def size_for_w2(sizes: Tensor, curves: Tensor, goal: float = W2_GOAL) -> Tensor:
    """The K at which curves of W2 (..., sizes) first fall to a goal, linear in log K.

    The first and last pieces are continued to half of the smallest and twice the largest size; NaN beyond.
    """
    x, y = sizes.double().log(), curves.double()
    if len(x) < 2:
        return torch.full_like(y[..., 0], torch.nan)
    is_reached = y <= goal
    i = torch.where(is_reached.any(-1), is_reached.to(torch.uint8).argmax(-1) - 1, len(x) - 2).clamp(0, len(x) - 2)
    above, below = (y.gather(-1, j[..., None])[..., 0] for j in (i, i + 1))
    log_size = x[i] + (x[i + 1] - x[i]) * (above - goal) / (above - below).clamp_min(1e-30)
    is_near = (above > below) & (log_size >= x[0] - math.log(2)) & (log_size <= x[-1] + math.log(2))
    return torch.where(is_near, log_size.exp(), torch.nan)


def _predict(method: str, foreign: list[list[ForeignQueries]], size: int, generator: torch.Generator) -> Predict:
    return lambda heads, layer, text: heads.combine(
        replaced_averages(method, heads, foreign[layer][text], size, generator)
    )


def _measure_cut(recording: Recording, n: int, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """Lengths, sizes and W2 (sizes, texts) by foreign queries on the first n tokens of the texts."""
    inputs, sizes = recording.inputs, default_sizes(n)
    assert inputs is not None
    assert inputs.texts is not None
    texts = [inputs.texts[i] for i in recording.indices]
    options: dict[str, Any] = {"batch": inputs.batch, "beta_factor": inputs.beta_factor, "max_length": n}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*truncated")
        shorter = record_encoder(inputs.model, inputs.source, texts, max_unknown=1.0, **options)
    encoder = prepare_replacement(shorter)
    foreign = [foreign_queries(shorter, layer, shorter.texts, generator) for layer in range(shorter.layers)]
    w2 = [encoder.compare(_predict("foreign_queries", foreign, size, generator))[0] for size in sizes]
    return torch.tensor([len(special) for special in shorter.special]), torch.tensor(sizes), torch.stack(w2)


def _cost(heads: Heads, K: Tensor) -> Tensor:
    """Multiplications to find clusters by foreign queries and to use them, over those of exact attention."""
    n, m, k, v = heads.n, QUERIES, heads.keys.shape[-1], heads.values.shape[-1]
    grouping, masses = (2 * coresets.ROUNDS + 2) * n * K * (k + v), m * n * (k + K) + m * K * k
    return (grouping + masses + n * K * (k + v)) / (n * n * (k + v))


def _interval(values: Tensor) -> list[float] | None:
    """The 95% interval of resampled values; None unless nearly all of them are known."""
    known = values[torch.isfinite(values)]
    return known.quantile(torch.tensor([0.025, 0.975]).double()).tolist() if len(known) > 0.9 * len(values) else None
