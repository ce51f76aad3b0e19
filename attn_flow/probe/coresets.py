"""Weighted coresets of a head's keys and values: a few clusters in place of all tokens, shared by all queries.

With keys k_c, values v_c and masses m_c a query q gets sum_c p_c v_c with p_c proportional to m_c exp<q, k_c>. The
clusters are found from queries: with P the attention of these queries to the tokens and S their covariance, tokens are
grouped by k-means of the points (S^{1/2} k_j, v_j) with the weights a_j = sum_i P_ij, and a cluster has the a-weighted
mean key and value and the mass

    log m_c = mean over queries i, weighted by P_i(c), of  log sum_{j in c} exp<q_i, k_j> - <q_i, k_c>,

which counts its tokens and what their spread adds. Queries (heads, m, k) are always multiplied by beta.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from attn_flow.probe.recording import Recording

VALUE_SHARE = 0.5  # squared spread of the values in k-means, that of the keys being 1
ROUNDS = 5  # of k-means
QUERIES = 640  # foreign queries of a text; 128 lose 0.005 of embedding cosine in MiniLM, more gain nothing
RIDGE = 1e-2  # of fitted values, relative to the mean squared weight of a cluster
STEPS, STEP_SIZE = 12, 0.06  # of the gradient fit, in standard deviations of keys and values; the size falls to 0
FIT_STRIDE = 2  # every second query is enough for the gradient


@dataclass(frozen=True, eq=False)
class Coreset:
    """Weighted clusters of a text for every head.

    Args:
        keys, values: (heads, K, k) and (heads, K, v).
        log_masses: (heads, K), -inf for an empty cluster.
        slopes: (heads, K, v, k), the change of a cluster's mean value with the query (a dipole term), or None.
        centres: (heads, K, k), the queries at which the mean values hold; with slopes only.

    Example:
        >>> pair = Coreset(torch.zeros(1, 2, 1), torch.tensor([[[0.0], [4.0]]]), torch.tensor([[3.0, 1.0]]).log())
        >>> pair.averages(torch.ones(1, 1, 1))
        tensor([[[1.]]])
    """

    keys: Tensor
    values: Tensor
    log_masses: Tensor
    slopes: Tensor | None = None
    centres: Tensor | None = None

    def weights(self, queries: Tensor) -> Tensor:
        """(heads, m, K), the attention of the queries to the clusters."""
        return (queries @ self.keys.mT + self.log_masses[:, None]).softmax(-1)

    def averages(self, queries: Tensor) -> Tensor:
        """(heads, m, v), what the queries get."""
        weights = self.weights(queries)
        averages = weights @ self.values
        if self.slopes is None or self.centres is None:
            return averages
        constant = (self.slopes @ self.centres[..., None])[..., 0]
        outer = (weights[..., None] * queries[..., None, :]).flatten(-2)  # (heads, m, K k)
        tilt = outer @ self.slopes.mT.flatten(1, 2) - weights @ constant
        return averages + tilt


# --- clusters from queries ---


@dataclass(frozen=True, eq=False)
class QueryAttention:
    """Queries (heads, m, k) and what they see of n keys.

    Args:
        attention: (heads, m, n).
        log_sums: (heads, m, 1), log sum_j exp<q_i, k_j>.
        received: (heads, n), the share of all attention that a key receives.
    """

    queries: Tensor
    attention: Tensor
    log_sums: Tensor
    received: Tensor


def attend(queries: Tensor, keys: Tensor) -> QueryAttention:
    """The attention of queries to keys."""
    logits = queries @ keys.mT
    log_sums = logits.logsumexp(-1, keepdim=True)
    attention = (logits - log_sums).exp()
    received = attention.sum(-2) + 1e-12
    return QueryAttention(queries, attention, log_sums, received / received.sum(-1, keepdim=True))


def cluster_by_queries(keys: Tensor, values: Tensor, queries: Tensor, size: int) -> Coreset:
    """The coreset of `size` clusters that these queries tell apart.

    The queries may be those of other texts, or the text's own: then it is a reference that sees the answer.
    """
    seen = attend(queries, keys)
    labels = k_means(query_features(keys, values, queries, seen.received), seen.received, size)
    return merge(keys, values, labels, seen)


def query_features(keys: Tensor, values: Tensor, queries: Tensor, received: Tensor) -> Tensor:
    """The points (S^{1/2} k_j, v_j) that are clustered, (heads, n, k + v), both parts scaled to a fixed spread."""
    centred = queries - queries.mean(-2, keepdim=True)
    variances, directions = torch.linalg.eigh(centred.mT @ centred / queries.shape[-2])
    keys = keys @ (directions * variances.clamp_min(0).sqrt()[..., None, :])
    scaled = [
        x * (share / _spread(x, received)).sqrt()[:, None, None] for x, share in ((keys, 1.0), (values, VALUE_SHARE))
    ]
    return torch.cat(scaled, dim=-1)


def merge(keys: Tensor, values: Tensor, labels: Tensor, seen: QueryAttention) -> Coreset:
    """Clusters with labels (heads, n) as a coreset, with masses from the queries and their attention to the tokens."""
    member = one_hot(labels, int(labels.max()) + 1).to(keys)
    weighted = member * seen.received[..., None]
    total = weighted.sum(-2).clamp_min(1e-30)[..., None]
    centre_keys, centre_values = weighted.mT @ keys / total, weighted.mT @ values / total
    to_cluster = seen.attention @ member  # (heads, m, K)
    terms = to_cluster.clamp_min(1e-30).log() + seen.log_sums - seen.queries @ centre_keys.mT
    paid = to_cluster.sum(-2)
    log_masses = (to_cluster * terms).sum(-2) / paid.clamp_min(1e-30)
    log_masses = log_masses.masked_fill((member.sum(-2) == 0) | (paid <= 1e-20), -torch.inf)
    return Coreset(centre_keys, centre_values, log_masses)


def k_means(points: Tensor, weights: Tensor, size: int) -> Tensor:
    """Labels (heads, n) of weighted k-means of points (heads, n, f), without chance.

    It starts at the point of largest weight a and continues with the one of largest a d^2 (farthest first).
    """
    size = min(size, points.shape[-2])
    chosen = [weights.argmax(-1)]
    distances = _squared_distances(points, chosen[0])
    for _ in range(size - 1):
        chosen.append((weights * distances).argmax(-1))
        distances = torch.minimum(distances, _squared_distances(points, chosen[-1]))
    centres = _take(points, torch.stack(chosen, -1))
    for _ in range(ROUNDS):
        member = one_hot(_nearest(points, centres), size).to(points) * weights[..., None]
        mass = member.sum(-2)[..., None]
        centres = torch.where(mass > 0, member.mT @ points / mass.clamp_min(1e-30), centres)
    return _nearest(points, centres)


# --- coresets fitted to queries ---


def refit_values(coreset: Coreset, keys: Tensor, values: Tensor, queries: Tensor) -> Coreset:
    """The same clusters with the values that fit these queries best, by ridge regression around the mean values."""
    target = attend(queries, keys).attention @ values
    weights = coreset.weights(queries)
    gram = weights.mT @ weights
    ridge = RIDGE * gram.diagonal(dim1=-2, dim2=-1).mean(-1)[:, None, None] * torch.eye(gram.shape[-1]).to(gram)
    change = torch.linalg.solve(gram + ridge, weights.mT @ (target - weights @ coreset.values))
    return Coreset(coreset.keys, coreset.values + change, coreset.log_masses)


def fit(coreset: Coreset, keys: Tensor, values: Tensor, queries: Tensor) -> Coreset:
    """Keys, values and masses fitted to what these queries get, by a few steps of Adam and a last fit of the values."""
    some = queries[:, ::FIT_STRIDE]
    target = attend(some, keys).attention @ values
    scale = 1 / _spread(target, torch.full_like(target[..., 0], 1 / target.shape[-2])).clamp_min(1e-20)
    units = keys.std(-2, keepdim=True), values.std(-2, keepdim=True), torch.ones_like(keys[0, 0, 0])
    log_masses = coreset.log_masses.clamp_min(-30)
    start = (coreset.keys, coreset.values, log_masses)
    moves = [torch.zeros_like(x, requires_grad=True) for x in start]
    optimiser = torch.optim.Adam(moves, lr=STEP_SIZE)
    for step in range(STEPS):
        optimiser.param_groups[0]["lr"] = STEP_SIZE * (1 - step / STEPS)
        with torch.enable_grad():
            fitted = Coreset(*(x + unit * move for x, unit, move in zip(start, units, moves)))
            error = (fitted.averages(some) - target).square().sum(-1).mean(-1)
            gradients = torch.autograd.grad((error * scale).sum(), moves)
        for move, gradient in zip(moves, gradients):
            move.grad = gradient
        optimiser.step()
    fitted = Coreset(*((x + unit * move).detach() for x, unit, move in zip(start, units, moves)))
    fitted = refit_values(fitted, keys, values, queries)
    # Few queries may be overfitted: a head keeps its fit if that is better on queries which the gradient has not seen.
    held_out = queries[:, 1::FIT_STRIDE]
    target = attend(held_out, keys).attention @ values
    before, after = ((c.averages(held_out) - target).square().sum((-2, -1)) for c in (coreset, fitted))
    choose = lambda new, old: torch.where((after < before).reshape(-1, *[1] * (new.ndim - 1)), new, old)
    return Coreset(
        choose(fitted.keys, coreset.keys),
        choose(fitted.values, coreset.values),
        choose(fitted.log_masses, coreset.log_masses),
    )


def add_dipoles(keys: Tensor, values: Tensor, queries: Tensor, size: int) -> Coreset:
    """Clusters whose mean value moves with the query, by the covariance of values and keys inside the cluster.

    It is the first-order term of a multipole expansion (MuSe, arXiv 2509.10406) around the mean query that attends to
    the cluster. Each cluster holds k v + k numbers more.
    """
    seen = attend(queries, keys)
    labels = k_means(query_features(keys, values, queries, seen.received), seen.received, size)
    coreset = merge(keys, values, labels, seen)
    member = one_hot(labels, int(labels.max()) + 1).to(keys)
    weighted = member * seen.received[..., None]
    share = weighted / weighted.sum(-2, keepdim=True).clamp_min(1e-30)
    dk, dv = (x - _take(centres, labels) for x, centres in ((keys, coreset.keys), (values, coreset.values)))
    slopes = (share.mT @ (dv[..., None] * dk[..., None, :]).flatten(-2)).unflatten(-1, (dv.shape[-1], dk.shape[-1]))
    paid = seen.attention @ member
    centres = paid.mT @ queries / paid.sum(-2).clamp_min(1e-30)[..., None]
    dipoles = Coreset(coreset.keys, coreset.values, coreset.log_masses, slopes, centres)
    # Cold heads leave the linear range: the slopes of a head are damped by the factor that suits its queries best.
    some = queries[:, :: 2 * FIT_STRIDE]
    plain, target = coreset.averages(some), seen.attention[:, :: 2 * FIT_STRIDE] @ values
    tilt = dipoles.averages(some) - plain
    factor = ((target - plain) * tilt).sum((-2, -1)) / tilt.square().sum((-2, -1)).clamp_min(1e-30)
    return replace(dipoles, slopes=slopes * factor.clamp(0, 1)[:, None, None, None])


# --- other coresets ---


def cluster_keys(keys: Tensor, values: Tensor, size: int) -> Coreset:
    """k-means of the keys alone; the mass of a cluster is its number of tokens."""
    labels = k_means(keys - keys.mean(-2, keepdim=True), torch.full_like(keys[..., 0], 1 / keys.shape[-2]), size)
    member = one_hot(labels, int(labels.max()) + 1).to(keys)
    count = member.sum(-2)
    mean = lambda x: member.mT @ x / count.clamp_min(1)[..., None]
    return Coreset(mean(keys), mean(values), count.log())


def top_tokens(keys: Tensor, values: Tensor, queries: Tensor, size: int) -> Coreset:
    """The tokens that receive most attention of the queries, with equal masses."""
    best = attend(queries, keys).received.topk(min(size, keys.shape[-2])).indices
    return Coreset(_take(keys, best), _take(values, best), torch.zeros_like(best, dtype=keys.dtype))


def top_tokens_and_rest(keys: Tensor, values: Tensor, queries: Tensor, size: int) -> Coreset:
    """The size - 1 tokens that receive most attention of the queries, and all others as one cluster."""
    seen = attend(queries, keys)
    size = min(size, keys.shape[-2])
    best = seen.received.topk(size - 1).indices
    labels = torch.full_like(seen.received, size - 1, dtype=torch.long)
    labels.scatter_(1, best, torch.arange(size - 1, device=keys.device).expand_as(best))
    return merge(keys, values, labels, seen)


def random_clusters(keys: Tensor, values: Tensor, queries: Tensor, size: int, generator: torch.Generator) -> Coreset:
    """Tokens grouped at random, with masses from the queries: what is left without the right clusters."""
    seen = attend(queries, keys)
    labels = torch.randint(min(size, keys.shape[-2]), seen.received.shape, generator=generator).to(keys.device)
    return merge(keys, values, labels, seen)


def random_tokens(keys: Tensor, values: Tensor, special: Tensor, size: int, generator: torch.Generator) -> Coreset:
    """The special tokens, and others drawn at random, the same for all heads, that stand for all of their kind."""
    n, count = len(special), int(special.sum())
    drawn = torch.rand(n, generator=generator).to(keys.device).masked_fill(special, 2.0).topk(min(size, n)).indices
    others = max(1, min(size, n) - count)
    log_masses = torch.where(special[drawn], 0.0, math.log(max(1, n - count) / others)).to(keys)
    return Coreset(keys[:, drawn], values[:, drawn], log_masses.expand(len(keys), -1))


def leverage_tokens(keys: Tensor, values: Tensor, size: int, generator: torch.Generator) -> Coreset:
    """Tokens drawn by the leverage scores of their centred keys, weighted by one over the chance to be drawn."""
    n, size = keys.shape[-2], min(size, keys.shape[-2])
    centred = (keys - keys.mean(-2, keepdim=True)).double()
    gram = centred.mT @ centred
    ridge = gram.diagonal(dim1=-2, dim2=-1).sum(-1)[:, None, None] / size * torch.eye(gram.shape[-1]).to(gram)
    scores = (centred * torch.linalg.solve(gram + ridge + 1e-30, centred.mT).mT).sum(-1) + 1 / n
    scores = scores / scores.sum(-1, keepdim=True)
    noise = -torch.rand(scores.shape, generator=generator, dtype=torch.float64).to(keys.device).log()
    drawn = (scores / noise).topk(size).indices  # without replacement, in proportion to the scores
    chance = 1 - (1 - scores.gather(-1, drawn)) ** size
    return Coreset(_take(keys, drawn), _take(values, drawn), -chance.log().to(keys))


# --- averages that are not those of one coreset ---


def nystroem_averages(
    keys: Tensor, values: Tensor, queries: Tensor, length: Tensor, size: int, generator: torch.Generator
) -> Tensor:
    """Averages by randomly pivoted Cholesky with Nystroem weights, as WildCat (arXiv 2602.10056) describes it.

    exp<q, k_j> is a combination sum_s exp<q, k_s> W_sj of `size` pivots, W = H_SS^{-1} H_Sj with the kernel
    H = exp(t <k, k'>) of the centred keys. t brings queries and keys to one scale.

    Args:
        queries: (heads, n, k), those that attend.
        length: (heads,), the root mean square length of queries, for t.
    """
    k, v, q = (x.double() for x in (keys - keys.mean(-2, keepdim=True), values, queries))
    n, size = k.shape[-2], min(size, k.shape[-2])
    t = length.double() / k.square().sum(-1).mean(-1).sqrt().clamp_min(1e-30)
    exponents = t[:, None, None] * (k @ k.mT)
    kernel = (exponents - exponents.amax((-2, -1), keepdim=True)).exp()
    residual, factor, pivots = kernel.diagonal(dim1=-2, dim2=-1).clone(), k.new_zeros(len(k), n, size), []
    for s in range(size):
        noise = -torch.rand(residual.shape, generator=generator, dtype=torch.float64).to(k.device).log()
        pivot = (residual.clamp_min(1e-300) / noise).argmax(-1)
        pivots.append(pivot)
        row = _take(kernel, pivot[:, None])[:, 0] - (factor @ _take(factor, pivot[:, None]).mT)[..., 0]
        column = row / residual.gather(-1, pivot[:, None]).clamp_min(1e-300).sqrt()
        factor[..., s] = column
        residual = (residual - column.square()).scatter(-1, pivot[:, None], 0.0).clamp_min(0)
    chosen = torch.stack(pivots, -1)
    among = _take(_take(kernel, chosen).mT, chosen)
    jitter = 1e-10 * among.diagonal(dim1=-2, dim2=-1).amax(-1)[:, None, None] * torch.eye(size).to(among)
    weights = torch.linalg.solve(among + jitter, _take(kernel, chosen))
    logits = q @ _take(k, chosen).mT
    scores = (logits - logits.amax(-1, keepdim=True)).exp()
    below = (scores @ weights.sum(-1, keepdim=True)).clamp_min(1e-12)
    averages = scores @ (weights @ v) / below
    return averages.clamp(v.amin(-2, keepdim=True), v.amax(-2, keepdim=True)).to(values)


def top_k_averages(logits: Tensor, values: Tensor, size: int) -> Tensor:
    """Averages from each query's own `size` largest weights, and the mean value with all the weight that is left."""
    attention = logits.softmax(-1)
    largest = attention.topk(min(size, attention.shape[-1] - 1))
    top = torch.zeros_like(attention).scatter(-1, largest.indices, largest.values)
    return top @ values + (1 - top.sum(-1, keepdim=True)) * values.mean(-2, keepdim=True)


def low_rank_averages(logits: Tensor, values: Tensor, size: int, generator: torch.Generator) -> Tensor:
    """Averages by the rank-`size` approximation of the attention matrix, by subspace iteration."""
    attention = logits.softmax(-1)
    basis = torch.randn(attention.shape[-1], min(size, attention.shape[-1]), generator=generator).to(attention)
    for _ in range(4):
        basis = torch.linalg.qr(attention @ (attention.mT @ basis))[0]
    return basis @ (basis.mT @ (attention @ values))


# --- queries of other texts ---


@dataclass(frozen=True, eq=False)
class ForeignQueries:
    """Queries of other texts in one layer, from which the coreset of a text is found.

    Args:
        queries: (heads, m, k).
        residuals: (heads, m, k), the queries less what a linear map predicts from the key and value of their own token.
        linear: (heads, k + v + 1, k), that map, learned on the other texts; None where positions enter the scores.
    """

    queries: Tensor
    residuals: Tensor
    linear: Tensor | None

    def predicted(self, keys: Tensor, values: Tensor) -> Tensor:
        """Queries (heads, m, k) that this text's tokens may have: predicted from keys and values, plus residuals.

        Where positions enter the scores they are the foreign queries themselves.
        """
        if self.linear is None:
            return self.queries
        count, n = self.residuals.shape[-2], keys.shape[-2]
        tokens = torch.arange(count, device=keys.device) * n // count
        return (_regressors(keys, values) @ self.linear)[:, tokens] + self.residuals


def foreign_queries(
    recording: Recording, layer: int, texts: int, generator: torch.Generator, number: int = QUERIES
) -> list[ForeignQueries]:
    """For each of the first `texts` texts, `number` queries drawn from all other texts of the recording.

    They are at their own positions, none beyond the length of the text.
    """
    heads = [recording.heads(layer, t) for t in range(recording.texts)]
    pool = torch.cat([h.queries for h in heads], dim=-2)
    regressors = [_regressors(h.keys, h.values) for h in heads]
    owner, position = (
        torch.cat([make(t, h.n) for t, h in enumerate(heads)])
        for make in (lambda t, n: torch.full((n,), t), lambda t, n: torch.arange(n))
    )
    grams = [z.mT.double() @ z.double() for z in regressors]
    products = [z.mT.double() @ h.queries.double() for z, h in zip(regressors, heads)]
    gram_sum, product_sum, z = sum(grams), sum(products), torch.cat(regressors, dim=-2)
    result = []
    for text in range(texts):
        candidates = ((owner != text) & (position < heads[text].n)).nonzero()[:, 0]
        drawn = candidates[torch.randperm(len(candidates), generator=generator)[:number]].to(pool.device)
        queries, linear = pool[:, drawn], None
        residuals = queries
        if recording.positions[layer] is None:
            gram = gram_sum - grams[text]
            ridge = 1e-3 * gram.diagonal(dim1=-2, dim2=-1).mean(-1)[:, None, None] * torch.eye(gram.shape[-1]).to(gram)
            linear = torch.linalg.solve(gram + ridge, product_sum - products[text]).to(queries)
            residuals = queries - z[:, drawn] @ linear
        result.append(ForeignQueries(queries, residuals, linear))
    return result


def _regressors(keys: Tensor, values: Tensor) -> Tensor:
    return torch.cat([keys, values, torch.ones_like(keys[..., :1])], dim=-1)


def _nearest(points: Tensor, centres: Tensor) -> Tensor:
    return (centres.square().sum(-1)[:, None] - 2 * points @ centres.mT).argmin(-1)


def _squared_distances(points: Tensor, index: Tensor) -> Tensor:
    return (points - _take(points, index[:, None])).square().sum(-1)


def _take(x: Tensor, index: Tensor) -> Tensor:
    """Rows (heads, K, f) of x (heads, n, f) at index (heads, K)."""
    return x.gather(-2, index[..., None].expand(*index.shape, x.shape[-1]))


def _spread(x: Tensor, weights: Tensor) -> Tensor:
    """Total variance of x (heads, n, f) under weights (heads, n); at least what rounding leaves of a constant."""
    mean = (weights[..., None] * x).sum(-2, keepdim=True)
    size = (weights * x.square().sum(-1)).sum(-1)
    return (weights * (x - mean).square().sum(-1)).sum(-1).clamp_min(torch.finfo(x.dtype).eps * size + 1e-30)
