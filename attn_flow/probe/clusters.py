"""Question 2: how few key-value clusters does a head need?

Attention is replaced in every layer by weighted clusters of the text's own keys and values, found by the queries of
other texts, and compared at equal size K with baselines, which it must beat, and with references that see the answer.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from attn_flow.probe import coresets
from attn_flow.probe.coresets import ForeignQueries, cluster_by_queries, foreign_queries
from attn_flow.probe.findings import MIN_TEXTS, Finding, bootstrap, resampled_texts
from attn_flow.probe.recording import MIN_TOKENS, Heads, Recording, record_encoder
from attn_flow.probe.replacement import Predict, Replacement, prepare_replacement

Averages = Callable[[Heads, ForeignQueries, int, torch.Generator], Tensor]  # what each head computes, (heads, n, v)

W2_GOAL = 0.3  # of the distance between texts, for which the number of clusters is reported
TEXTS = 8  # through depth by default
LAYER_TEXTS = 4  # for R2 layer by layer, which differs little between texts


def _fitted(h: Heads, f: ForeignQueries, K: int, g: torch.Generator) -> Tensor:
    queries = f.predicted(h.keys, h.values)
    coreset = cluster_by_queries(h.keys, h.values, queries, K)
    return coresets.fit(coreset, h.keys, h.values, queries).averages(h.queries)


def _pivoted_cholesky(h: Heads, f: ForeignQueries, K: int, g: torch.Generator) -> Tensor:
    length = f.queries.square().sum(-1).mean(-1).sqrt()
    return coresets.nystroem_averages(h.keys, h.values, h.queries, length, K)


CURVES: dict[str, Averages] = {  # run with every size
    "foreign_queries": lambda h, f, K, g: cluster_by_queries(h.keys, h.values, f.queries, K).averages(h.queries),
    "own_attention": lambda h, f, K, g: cluster_by_queries(h.keys, h.values, h.queries, K).averages(h.queries),
    "keys": lambda h, f, K, g: coresets.cluster_keys(h.keys, h.values, K).averages(h.queries),
    "top_tokens": lambda h, f, K, g: coresets.top_tokens(h.keys, h.values, h.queries, K).averages(h.queries),
    "random_clusters": lambda h, f, K, g: coresets.random_clusters(h.keys, h.values, f.queries, K, g).averages(
        h.queries
    ),
    "random_tokens": lambda h, f, K, g: coresets.random_tokens(h.keys, h.values, h.special, K, g).averages(h.queries),
}
SINGLE: dict[str, Averages] = {  # run with the middle size only
    "foreign_queries_fitted": _fitted,
    "top_tokens_and_rest": lambda h, f, K, g: coresets.top_tokens_and_rest(h.keys, h.values, h.queries, K).averages(
        h.queries
    ),
    "pivoted_cholesky": _pivoted_cholesky,
    "top_k_oracle": lambda h, f, K, g: coresets.top_k_averages(h.logits, h.values, K),
    "low_rank": lambda h, f, K, g: coresets.low_rank_averages(h.logits, h.values, K),
}
METHODS = CURVES | SINGLE
BASELINES = ("keys", "top_tokens", "random_clusters", "random_tokens", "top_tokens_and_rest", "pivoted_cholesky")


@dataclass(frozen=True, eq=False)
class Clusters:
    """What replacing attention by K clusters a head does, method by method in the order of METHODS.

    Args:
        sizes: (sizes,), the numbers K of clusters.
        lengths: (texts,), numbers of tokens.
        w2, embedding_cosine: (methods, sizes, texts), of the encoder's output with attention replaced in every layer;
            W2 is in units of the distance between texts. NaN for sizes that a method was not run with.
        explained: (methods, sizes, layers, first texts), R2 of what a layer's attention adds to the recorded tokens,
            against the text's mean output.
        short_lengths, short_sizes, short_w2: (cuts, texts), (cuts, sizes), (cuts, sizes, texts): the same for the first
            tokens of the texts, by foreign queries only. There may be no cuts.
        cost: (sizes,), multiplications that find and use the clusters, over those of exact attention.
        hides_tokens: (), whether attention is causal or local; then nothing is measured.
    """

    sizes: Tensor
    lengths: Tensor
    w2: Tensor
    embedding_cosine: Tensor
    explained: Tensor
    short_lengths: Tensor
    short_sizes: Tensor
    short_w2: Tensor
    cost: Tensor
    hides_tokens: Tensor

    def finding(self, seed: int = 0) -> Finding:
        """The verdict: supported where foreign queries beat every baseline in last-level W2, with the same K and texts.

        The 95% interval over texts of every paired difference must lie above 0, for all K ("supported") or some
        ("partly"). There is no verdict from fewer than 8 texts.
        """
        if bool(self.hides_tokens):
            return Finding(None, "Not asked: attention is causal or local, and no cluster serves all of its queries.")
        if not self.w2.numel() or bool(self.w2[0].isnan().all()):
            return Finding(None, "Not measured: clusters are found by queries of other texts, and here is only one.")
        rows = [list(METHODS).index(name) for name in BASELINES]
        differences, own, sizes, texts = self.w2[rows] - self.w2[0], self.w2[0], self.sizes.tolist(), self.w2.shape[-1]
        is_better = ((bootstrap(differences, seed).low > 0) | differences.isnan().all(-1)).all(0)  # NaN: not run
        better = self.sizes[is_better].tolist()
        best = BASELINES[int(self.w2[rows, len(sizes) // 2].mean(-1).nan_to_num(torch.inf).argmin())]
        draws, n = resampled_texts(texts, seed), float(self.lengths.double().mean())
        needed = {name: float(size_for_w2(self.sizes, w2.mean(-1))) for name, w2 in zip(METHODS, self.w2)}
        size, growth = needed["foreign_queries"], float(self._growth(torch.arange(texts)[None]))
        numbers = {
            "curve": self._curve(),
            "sizes": sizes,
            "sizes_that_beat_every_baseline": better,
            "best_baseline": best,
            "w2_goal": W2_GOAL,
            "clusters_for_w2_goal": needed,
            "share_of_tokens": size / n,
            "share_of_tokens_interval": _interval(size_for_w2(self.sizes, own[:, draws].mean(-1).mT) / n),
            "growth_exponent": growth,
            "growth_exponent_interval": _interval(self._growth(draws)),
            "tokens": n,
            "texts": texts,
            "cost_over_attention": dict(zip(sizes, self.cost.tolist())),
        }
        if math.isnan(size):
            w2 = own.mean(-1).tolist()
            s = 0 if w2[0] <= W2_GOAL else -1
            text = f"{sizes[s]} clusters a head, found by other texts' queries, replace attention at W2 {w2[s]:.2f}."
        else:
            grows = "" if math.isnan(growth) else f", growing like n^{growth:.1f}"
            share = f"{size:.0f} clusters a head ({size / n:.0%} of {n:.0f} tokens)"
            text = f"{share}, found by other texts' queries, replace attention at W2 {W2_GOAL}{grows}."
        if texts < MIN_TEXTS:
            return Finding(None, f"{text} No verdict: {texts} texts, at least {MIN_TEXTS} are needed.", numbers)
        verdict = "supported" if len(better) == len(sizes) else "partly" if better else "not supported"
        ending = {
            "supported": "Every baseline of equal size is worse",
            "partly": f"Every baseline of equal size is worse for K = {', '.join(map(str, better))} only",
            "not supported": f"Some baseline of equal size is as good ({best.replace('_', ' ')})",
        }[verdict]
        return Finding(verdict, f"{text} {ending}; finding clusters saves no work.", numbers)

    def _curve(self) -> dict[str, dict[str, dict[str, Any]]]:
        """Means over texts: method -> K -> embedding_cosine, w2, explained (by layer), for the sizes that were run."""
        return {
            name: {
                str(size): {
                    "embedding_cosine": self.embedding_cosine[m, s].mean(),
                    "w2": self.w2[m, s].mean(),
                    "explained": self.explained[m, s].mean(-1),
                }
                for s, size in enumerate(self.sizes.tolist())
                if not bool(self.embedding_cosine[m, s].isnan().all())
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
    replacement: Replacement,
    recording: Recording,
    generator: torch.Generator,
    *,
    sizes: Sequence[int] | None = None,
    texts: int = TEXTS,
    progress: Callable[[float], None] = lambda share: None,
) -> Clusters:
    """Replace attention in every layer by every method and size.

    Args:
        replacement: the encoder, run on its first texts.
        recording: all texts; those other than the replaced one give the foreign queries.
        generator: of random tokens, clusters and foreign queries.
        sizes: numbers of clusters; by default three powers of two up to half the median length.
        texts: how many texts are run through depth.
        progress: called with the share of the work that is done.
    """
    if recording.hides_tokens or recording.texts < 2:
        empty = {name: torch.zeros(0, dtype=torch.float64) for name in Clusters.__dataclass_fields__}
        return Clusters(**(empty | {"hides_tokens": torch.tensor(recording.hides_tokens)}))
    encoder = replacement.first(texts)
    lengths = torch.tensor([len(s) for s in encoder.recording.special])
    median, L = int(lengths.median()), recording.layers
    sizes = default_sizes(median) if sizes is None else list(sizes)
    cuts = [n for n in (median // 2, median // 4) if encoder.texts is not None and median // 4 >= MIN_TOKENS]
    middle = sizes[len(sizes) // 2]
    runs = [(name, K) for name in METHODS for K in sizes if name in CURVES or middle == K]
    foreign = [foreign_queries(recording, layer, len(lengths), generator) for layer in range(L)]
    shape = len(METHODS), len(sizes)
    w2, cosine = (torch.full((*shape, len(lengths)), torch.nan, dtype=torch.float64) for _ in range(2))
    first = encoder.recording.first(LAYER_TEXTS)
    r2 = torch.full((*shape, L, first.texts), torch.nan, dtype=torch.float64)
    for done, (name, K) in enumerate(runs):
        predict, place = _predict(METHODS[name], foreign, K, generator), (list(METHODS).index(name), sizes.index(K))
        w2[place], cosine[place] = encoder.compare(predict)
        r2[place] = explained(first, predict)
        progress(0.95 * (done + 1) / len(runs))
    short = [_measure_cut(encoder, n, generator) for n in cuts]
    progress(1.0)
    short_lengths, short_sizes, short_w2 = [torch.stack(column) for column in zip(*short)] or [torch.zeros(0)] * 3
    cost = _cost(first.heads(0, 0), torch.tensor(sizes, dtype=torch.float64))
    short_values = (short_lengths, short_sizes, short_w2)
    return Clusters(torch.tensor(sizes), lengths, w2, cosine, r2, *short_values, cost, torch.tensor(False))


def default_sizes(n: int) -> list[int]:
    """Three powers of two, up to half of n tokens.

    Example:
        >>> default_sizes(128), default_sizes(40)
        ([16, 32, 64], [4, 8, 16])
    """
    largest = 2 ** max(1, int(math.log2(max(2, n // 2))))
    return sorted({max(1, largest // 4), max(1, largest // 2), largest})


def size_for_w2(sizes: Tensor, curves: Tensor, goal: float = W2_GOAL) -> Tensor:
    """The K at which curves of W2 (..., sizes) first fall to a goal, linear in log K.

    The first and last pieces are continued to half of the smallest and twice the largest size; NaN beyond.

    Example:
        >>> round(float(size_for_w2(torch.tensor([16, 64]), torch.tensor([0.4, 0.2]))), 3)
        32.0
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


def explained(recording: Recording, predict: Predict) -> Tensor:
    """R2 of what attention adds to the recorded tokens, against each text's mean output, (layers, texts)."""
    rows = torch.zeros(recording.layers, recording.texts, dtype=torch.float64)
    for layer in range(recording.layers):
        for text in range(recording.texts):
            output = recording.outputs[layer][text].double()
            error = predict(recording.heads(layer, text), layer, text).double() - output
            variance = (output - output.mean(0)).square().sum()
            rows[layer, text] = 1 - error.square().sum() / variance.clamp_min(1e-30)
    return rows


def _predict(averages: Averages, foreign: list[list[ForeignQueries]], size: int, generator: torch.Generator) -> Predict:
    @torch.no_grad()
    def predict(heads: Heads, layer: int, text: int) -> Tensor:
        return heads.combine(averages(heads, foreign[layer][text], size, generator))

    return predict


def _measure_cut(encoder: Replacement, n: int, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """Lengths, sizes and W2 (sizes, texts) by foreign queries on the first n tokens of the texts."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*truncated")
        options: dict[str, Any] = {"batch": encoder.batch, "max_length": n, "beta_factor": encoder.beta_factor}
        recording = record_encoder(encoder.model, encoder.source, encoder.texts, max_unknown=1.0, **options)
        shorter = prepare_replacement(encoder.model, encoder.source, encoder.texts, recording, **options)
    foreign = [foreign_queries(recording, layer, recording.texts, generator) for layer in range(recording.layers)]
    sizes, method = default_sizes(n), METHODS["foreign_queries"]
    rows = [shorter.compare(_predict(method, foreign, size, generator))[0] for size in sizes]
    return torch.tensor([len(s) for s in recording.special]), torch.tensor(sizes), torch.stack(rows)


def _cost(heads: Heads, K: Tensor) -> Tensor:
    """Multiplications to find clusters by foreign queries and to use them, over those of exact attention."""
    n, m, k, v = heads.n, coresets.QUERIES, heads.keys.shape[-1], heads.values.shape[-1]
    grouping, masses = (2 * coresets.ROUNDS + 2) * n * K * (k + v), m * n * (k + K) + m * K * k
    return (grouping + masses + n * K * (k + v)) / (n * n * (k + v))


def _interval(values: Tensor) -> list[float] | None:
    """The 95% interval of resampled values; None unless nearly all of them are known."""
    known = values[torch.isfinite(values)]
    return known.quantile(torch.tensor([0.025, 0.975]).double()).tolist() if len(known) > 0.9 * len(values) else None
