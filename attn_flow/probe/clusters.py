"""Question 2 of the probe: how few key-value clusters does a head need?

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
from attn_flow.probe.findings import RESAMPLES, Finding, bootstrap
from attn_flow.probe.recording import MIN_TOKENS, Heads, Recording, record_encoder
from attn_flow.probe.replacement import Predict, Replacement, prepare_replacement

Averages = Callable[[Heads, ForeignQueries, int, torch.Generator], Tensor]  # what each head computes, (heads, n, v)

W2_GOAL = 0.3  # of the distance between texts, for which the number of clusters is reported
TEXTS = 8  # through depth by default
LAYER_TEXTS = 4  # for R2 layer by layer, which differs little between texts
MIN_TEXTS = 8  # for a verdict
LIMITS = (
    "Clusters describe what attention does; finding them costs more than the attention they replace. "
    "Reaching a distance with K clusters here does not bound the K that other texts need."
)


def _fitted(heads: Heads, foreign: ForeignQueries, size: int, generator: torch.Generator) -> Tensor:
    queries = foreign.predicted(heads.keys, heads.values)
    coreset = cluster_by_queries(heads.keys, heads.values, queries, size)
    coreset = coresets.refit_values(coreset, heads.keys, heads.values, queries)
    return coresets.fit(coreset, heads.keys, heads.values, queries).averages(heads.queries)


def _pivoted_cholesky(heads: Heads, foreign: ForeignQueries, size: int, generator: torch.Generator) -> Tensor:
    length = foreign.queries.square().sum(-1).mean(-1).sqrt()
    return coresets.nystroem_averages(heads.keys, heads.values, heads.queries, length, size, generator)


METHODS: dict[str, Averages] = {
    "foreign_queries": lambda h, f, K, g: cluster_by_queries(h.keys, h.values, f.queries, K).averages(h.queries),
    "foreign_queries_fitted": _fitted,
    "dipoles": lambda h, f, K, g: coresets.add_dipoles(h.keys, h.values, f.queries, K).averages(h.queries),
    "own_attention": lambda h, f, K, g: cluster_by_queries(h.keys, h.values, h.queries, K).averages(h.queries),
    "top_k_oracle": lambda h, f, K, g: coresets.top_k_averages(h.logits, h.values, K),
    "low_rank": lambda h, f, K, g: coresets.low_rank_averages(h.logits, h.values, K, g),
    "keys": lambda h, f, K, g: coresets.cluster_keys(h.keys, h.values, K).averages(h.queries),
    "top_tokens": lambda h, f, K, g: coresets.top_tokens(h.keys, h.values, h.queries, K).averages(h.queries),
    "top_tokens_and_rest": lambda h, f, K, g: coresets.top_tokens_and_rest(h.keys, h.values, h.queries, K).averages(
        h.queries
    ),
    "leverage_tokens": lambda h, f, K, g: coresets.leverage_tokens(h.keys, h.values, K, g).averages(h.queries),
    "pivoted_cholesky": _pivoted_cholesky,
    "random_clusters": lambda h, f, K, g: coresets.random_clusters(h.keys, h.values, f.queries, K, g).averages(
        h.queries
    ),
    "random_tokens": lambda h, f, K, g: coresets.random_tokens(h.keys, h.values, h.special, K, g).averages(h.queries),
}
REFERENCES = ("own_attention", "top_k_oracle", "low_rank")  # they see the text's own attention
VARIANTS = ("foreign_queries_fitted", "dipoles")  # of the same size K, at a higher cost
CORE = ("foreign_queries", "own_attention", "keys", "top_tokens", "random_clusters", "random_tokens")
LARGE_PASS = 1e11  # multiplications of one pass of all texts beyond which fewer sizes and methods are run
BASELINES = tuple(name for name in METHODS if name not in ("foreign_queries", *VARIANTS, *REFERENCES))


@dataclass(frozen=True, eq=False)
class Clusters:
    """What replacing attention by K clusters a head does, method by method in the order of METHODS.

    Args:
        sizes: (sizes,), the numbers K of clusters.
        lengths: (texts,), numbers of tokens.
        w2, embedding_cosine: (methods, sizes, texts), of the encoder's output with attention replaced in every layer;
            W2 is in units of the distance between texts.
        explained: (methods, sizes, layers, first texts), R2 of what a layer's attention adds to the recorded tokens,
            against the text's mean output.
        short_lengths, short_sizes, short_w2: (cuts, texts), (cuts, sizes), (cuts, sizes, texts): the same for the first
            tokens of the texts, by foreign queries only. There may be no cuts.
        cost: (sizes,), multiplications that find and use the clusters, over those of exact attention.
        logit_bound: (layers, heads), the largest |query| times the largest |centred key|.
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
    logit_bound: Tensor
    hides_tokens: Tensor

    def curve(self) -> dict[str, dict[str, dict[str, Any]]]:
        """Means over texts: method -> K -> embedding_cosine, w2, explained (by layer), for the sizes that were run."""
        return {
            name: {
                str(size): {
                    "embedding_cosine": _number(self.embedding_cosine[m, s].mean()),
                    "w2": _number(self.w2[m, s].mean()),
                    "explained": [_number(value) for value in self.explained[m, s].mean(-1)],
                }
                for s, size in enumerate(self.sizes.tolist())
                if not bool(self.embedding_cosine[m, s].isnan().all())
            }
            for m, name in enumerate(METHODS)
        }

    def finding(self, seed: int = 0) -> Finding:
        """The verdict: supported where foreign queries beat every baseline in last-level W2, with the same K and texts.

        The 95% interval over texts of every paired difference must lie above 0, for all K ("supported") or some
        ("partly").
        """
        if bool(self.hides_tokens):
            return Finding(None, "Not asked: attention is causal or local, and no cluster serves all of its queries.")
        if not self.w2.numel() or bool(self.w2[0].isnan().all()):
            return Finding(None, "Not measured: clusters are found by queries of other texts, and here is only one.")
        better, best_baseline = self._compare(seed)
        numbers = self._numbers(seed) | {
            "curve": self.curve(),
            "sizes": self.sizes.tolist(),
            "sizes_that_beat_every_baseline": better,
            "best_baseline": best_baseline,
        }
        texts, sizes = self.w2.shape[-1], self.sizes.tolist()
        sentence = self._sentence(numbers)
        if texts < MIN_TEXTS:
            return Finding(None, f"{sentence} No verdict: {texts} texts, at least {MIN_TEXTS} are needed.", numbers)
        verdict = "supported" if len(better) == len(sizes) else "partly" if better else "not supported"
        ending = {
            "supported": "Every baseline of equal size is worse",
            "partly": f"Every baseline of equal size is worse for K = {', '.join(map(str, better))} only",
            "not supported": f"Some baseline of equal size is as good ({best_baseline.replace('_', ' ')})",
        }[verdict]
        return Finding(verdict, f"{sentence} {ending}; finding clusters saves no work.", numbers)

    def _compare(self, seed: int) -> tuple[list[int], str]:
        """The sizes for which foreign queries beat every baseline, and the best baseline at the middle size."""
        rows = [list(METHODS).index(name) for name in BASELINES]
        differences = self.w2[rows] - self.w2[list(METHODS).index("foreign_queries")]
        is_better = ((bootstrap(differences, seed).low > 0) | differences.isnan().all(-1)).all(0)  # NaN: not run
        middle = self.w2[rows, len(self.sizes) // 2].mean(-1)
        return self.sizes[is_better].tolist(), BASELINES[int(middle.nan_to_num(torch.inf).argmin())]

    def _numbers(self, seed: int) -> dict[str, Any]:
        """Clusters needed for W2_GOAL by method, their share of the tokens, their growth, costs and logit bounds."""
        texts = self.w2.shape[-1]
        draws = torch.randint(texts, (RESAMPLES, texts), generator=torch.Generator().manual_seed(seed))
        needed = {m: size_for_w2(self.sizes, self.w2[i].mean(-1)) for i, m in enumerate(METHODS)}
        own = self.w2[list(METHODS).index("foreign_queries")]
        mean_length = self.lengths.double().mean()
        resampled = size_for_w2(self.sizes, own[:, draws].mean(-1).mT)
        growth, growths = self._growth(own, torch.arange(texts)[None])[0], self._growth(own, draws)
        return {
            "w2_goal": W2_GOAL,
            "clusters_for_w2_goal": {name: _number(size) for name, size in needed.items()},
            "share_of_tokens": _number(needed["foreign_queries"] / mean_length),
            "share_of_tokens_interval": _interval(resampled / mean_length),
            "growth_exponent": _number(growth),
            "growth_exponent_interval": _interval(growths),
            "tokens": float(mean_length),
            "texts": texts,
            "cost_over_attention": {str(K): float(c) for K, c in zip(self.sizes.tolist(), self.cost)},
            "logit_bound": self.logit_bound.tolist(),
        }

    def _growth(self, own: Tensor, draws: Tensor) -> Tensor:
        """The exponent g of K ~ n^g at W2_GOAL for resampled texts, (draws,); NaN where it is not known."""
        if not len(self.short_sizes):
            return torch.full((len(draws),), torch.nan, dtype=torch.float64)
        curves = [(self.sizes, self.lengths, own), *zip(self.short_sizes, self.short_lengths, self.short_w2)]
        y = torch.stack([size_for_w2(sizes, w2[:, draws].mean(-1).mT).log() for sizes, _, w2 in curves])
        x = torch.stack([lengths.double()[draws].mean(-1).log() for _, lengths, _ in curves])
        x, y = x - x.mean(0), y - y.mean(0)
        return (x * y).sum(0) / x.square().sum(0)

    def _sentence(self, numbers: dict[str, Any]) -> str:
        size, tokens = numbers["clusters_for_w2_goal"]["foreign_queries"], numbers["tokens"]
        if size is None:
            w2 = self.w2[list(METHODS).index("foreign_queries")].mean(-1).tolist()
            s = 0 if w2[0] <= W2_GOAL else -1
            return (
                f"{self.sizes[s]} clusters a head, found by other texts' queries, replace attention at W2 {w2[s]:.2f}."
            )
        growth = numbers["growth_exponent"]
        grows = "" if growth is None else f", growing like n^{growth:.1f}"
        return (
            f"{size:.0f} clusters a head ({size / tokens:.0%} of {tokens:.0f} tokens), found by other texts' queries, "
            f"replace attention at W2 {W2_GOAL}{grows}."
        )


def measure_clusters(
    replacement: Replacement,
    recording: Recording,
    generator: torch.Generator,
    *,
    sizes: Sequence[int] | None = None,
    texts: int = TEXTS,
    progress: Callable[[float], None] | None = None,
) -> Clusters:
    """Replace attention in every layer by every method of METHODS and every size.

    Args:
        replacement: the encoder, run on its first texts.
        recording: all texts; those other than the replaced one give the foreign queries.
        generator: of random tokens, clusters and foreign queries.
        sizes: numbers of clusters; by default three powers of two up to half the median length. In large encoders the
            default is two, and methods outside of CORE run with the second one only.
        texts: how many texts are run through depth.
        progress: called with the share of the work that is done.
    """
    if recording.hides_tokens:
        return _nothing_measured(hides_tokens=True)
    if recording.texts < 2:
        return _nothing_measured(hides_tokens=False)
    encoder = replacement.first(texts)
    texts, median = encoder.recording.texts, int(torch.tensor([len(s) for s in encoder.recording.special]).median())
    d = encoder.recording.attentions[0].dim
    is_large = sizes is None and 12 * recording.layers * d**2 * median * texts > LARGE_PASS
    sizes = list(sizes) if sizes is not None else default_sizes(median)[: 2 if is_large else 3]
    cuts = [n for n in (median // 2, median // 4) if encoder.texts is not None and median // 4 >= MIN_TOKENS]
    runs, done = len(METHODS) * len(sizes) + sum(len(default_sizes(n)) for n in cuts), 0

    def count() -> None:
        nonlocal done
        done += 1
        if progress is not None:
            progress(done / runs)

    foreign = [foreign_queries(recording, layer, texts, generator) for layer in range(recording.layers)]
    rows: list[tuple[Tensor, Tensor, Tensor]] = []
    not_run = torch.full((recording.layers, texts), torch.nan, dtype=torch.float64)
    for name in METHODS:
        for size in sizes:
            if is_large and name not in CORE and size != sizes[-1]:
                rows.append((not_run[0], not_run[0], not_run[:, :LAYER_TEXTS]))
                count()
                continue
            predict = _predict(METHODS[name], foreign, size, generator)
            comparison = encoder.compare(predict, levels=[recording.layers])
            rows.append(
                (
                    comparison.w2[0],
                    comparison.embedding_cosine,
                    explained(encoder.recording.first(LAYER_TEXTS), predict),
                )
            )
            count()
    shape = len(METHODS), len(sizes)
    w2, cosine, r2 = (torch.stack(column).unflatten(0, shape) for column in zip(*rows))
    short = [_measure_cut(encoder, n, generator, count) for n in cuts]
    stack = lambda i, empty: torch.stack([row[i] for row in short]) if short else empty
    return Clusters(
        torch.tensor(sizes),
        torch.tensor([len(s) for s in encoder.recording.special]),
        w2,
        cosine,
        r2,
        stack(0, torch.zeros(0, texts, dtype=torch.long)),
        stack(1, torch.zeros(0, len(sizes), dtype=torch.long)),
        stack(2, torch.zeros(0, len(sizes), texts, dtype=torch.float64)),
        _cost(encoder.recording.heads(0, 0), sizes),
        _logit_bound(encoder.recording),
        torch.tensor(False),
    )


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


def _measure_cut(
    encoder: Replacement, n: int, generator: torch.Generator, count: Callable[[], None]
) -> tuple[Tensor, Tensor, Tensor]:
    """Lengths, sizes and W2 (sizes, texts) by foreign queries on the first n tokens of the texts."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*truncated")
        options: dict[str, Any] = {"batch": encoder.batch, "max_length": n, "beta_factor": encoder.beta_factor}
        recording = record_encoder(encoder.model, encoder.source, encoder.texts, max_unknown=1.0, **options)
        shorter = prepare_replacement(encoder.model, encoder.source, encoder.texts, recording, **options)
    foreign = [foreign_queries(recording, layer, recording.texts, generator) for layer in range(recording.layers)]
    rows, sizes = [], default_sizes(n)
    for size in sizes:
        predict = _predict(METHODS["foreign_queries"], foreign, size, generator)
        rows.append(shorter.compare(predict, levels=[recording.layers]).w2[0])
        count()
    return torch.tensor([len(s) for s in recording.special]), torch.tensor(sizes), torch.stack(rows)


def _cost(heads: Heads, sizes: Sequence[int]) -> Tensor:
    """Multiplications to find clusters by foreign queries and to use them, over those of exact attention."""
    n, m, k, v = heads.n, coresets.QUERIES, heads.keys.shape[-1], heads.values.shape[-1]
    K = torch.tensor(sizes, dtype=torch.float64)
    grouping = (2 * coresets.ROUNDS + 2) * n * K * (k + v)
    masses = m * n * (k + K) + m * K * k
    return (grouping + masses + n * K * (k + v)) / (n * n * (k + v))


def _logit_bound(recording: Recording) -> Tensor:
    """The largest |q| times the largest |k - mean k| of every head, mean over texts, (layers, heads)."""
    rows = []
    for layer in range(recording.layers):
        heads = [recording.heads(layer, text) for text in range(recording.texts)]
        centred = [h.keys - h.keys.mean(-2, keepdim=True) for h in heads]
        bounds = [h.queries.norm(dim=-1).amax(-1) * key.norm(dim=-1).amax(-1) for h, key in zip(heads, centred)]
        rows.append(torch.stack(bounds).mean(0))
    return torch.stack(rows).double().cpu()


def _nothing_measured(hides_tokens: bool) -> Clusters:
    empty = {name: torch.zeros(0, dtype=torch.float64) for name in Clusters.__dataclass_fields__}
    return Clusters(**(empty | {"hides_tokens": torch.tensor(hides_tokens)}))


def _number(value: Tensor) -> float | None:
    """A number, or None where it is not known."""
    return float(value) if bool(torch.isfinite(value)) else None


def _interval(values: Tensor) -> list[float] | None:
    """The 95% interval of resampled values; None unless nearly all of them are known."""
    known = values[torch.isfinite(values)]
    return known.quantile(torch.tensor([0.025, 0.975]).double()).tolist() if len(known) > 0.9 * len(values) else None
