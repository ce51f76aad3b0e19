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
from dataclasses import dataclass

import torch
from torch import Tensor

VALUE_SHARE = 0.5  # squared spread of the values in k-means, that of the keys being 1
ROUNDS = 5  # of k-means
RIDGE = 1e-2  # of fitted values, relative to the mean squared weight of a cluster
STEPS, STEP_SIZE = 12, 0.06  # of the gradient fit, in standard deviations of keys and values; the size falls to 0


@dataclass(frozen=True, eq=False)
class Coreset:
    """Weighted clusters of a text for every head.

    Args:
        keys, values: (heads, K, k) and (heads, K, v).
        log_masses: (heads, K), -inf for an empty cluster.

    Example:
        >>> pair = Coreset(torch.zeros(1, 2, 1), torch.tensor([[[0.0], [4.0]]]), torch.tensor([[3.0, 1.0]]).log())
        >>> pair.averages(torch.ones(1, 1, 1))
        tensor([[[1.]]])
    """

    keys: Tensor
    values: Tensor
    log_masses: Tensor

    def weights(self, queries: Tensor) -> Tensor:
        """(heads, m, K), the attention of the queries to the clusters."""
        return (queries @ self.keys.mT + self.log_masses[:, None]).softmax(-1)

    def averages(self, queries: Tensor) -> Tensor:
        """(heads, m, v), what the queries get."""
        return self.weights(queries) @ self.values


# --- clusters from queries ---


def attend(queries: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
    """The attention (heads, n, m) that keys receive from queries, and the logarithms (heads, 1, m) of its sums."""
    weights = keys @ queries.mT
    largest = weights.amax(-2, keepdim=True)
    sums = weights.sub_(largest).exp_().sum(-2, keepdim=True)  # in place: this is the largest tensor
    return weights.div_(sums), sums.log() + largest


def cluster_by_queries(keys: Tensor, values: Tensor, queries: Tensor, size: int) -> Coreset:
    """The coreset of `size` clusters that these queries tell apart.

    Args:
        keys, values: of one text, (heads, n, k) and (heads, n, v).
        queries: (heads, m, k), of other texts; with the text's own the clusters see the answer.
        size: K; there are at most n clusters.

    Example:
        >>> draw = lambda n, seed: torch.randn(1, n, 4, generator=torch.Generator().manual_seed(seed))
        >>> keys, values, own, others = draw(100, 0), draw(100, 1), draw(100, 2), draw(300, 3)
        >>> exact = (own @ keys.mT).softmax(-1) @ values
        >>> clusters = [cluster_by_queries(keys, values, others, size) for size in (20, 50)]
        >>> errors = [float((c.averages(own) - exact).norm() / exact.norm()) for c in clusters]
        >>> [round(error, 1) for error in errors]
        [0.3, 0.1]
    """
    attended = attend(queries, keys)
    received = attended[0].sum(-1) + 1e-12
    received = received / received.sum(-1, keepdim=True)
    centred = queries - queries.mean(-2, keepdim=True)
    variances, axes = torch.linalg.eigh(centred.mT @ centred / queries.shape[-2])
    parts = ((keys @ (axes * variances.clamp_min(0).sqrt()[..., None, :]), 1.0), (values, VALUE_SHARE))
    points = torch.cat([x * (share / _spread(x, received)).sqrt()[:, None, None] for x, share in parts], dim=-1)
    return merge(keys, values, queries, k_means(points, received, size), attended)


def merge(
    keys: Tensor, values: Tensor, queries: Tensor, labels: Tensor, attended: tuple[Tensor, Tensor] | None = None
) -> Coreset:
    """Clusters with labels (heads, n) as a coreset, with masses from the queries; `attended` is their `attend`."""
    attention, log_sums = attend(queries, keys) if attended is None else attended
    size, received = int(labels.max()) + 1, attention.sum(-1, keepdim=True) + 1e-12
    total = sum_clusters(received, labels, size).clamp_min(1e-30)
    centre_keys, centre_values = (sum_clusters(received * x, labels, size) / total for x in (keys, values))
    to_cluster = sum_clusters(attention, labels, size)  # (heads, K, m)
    terms = to_cluster.clamp_min(1e-30).log() + log_sums - centre_keys @ queries.mT
    paid = to_cluster.sum(-1)
    log_masses = (to_cluster * terms).sum(-1) / paid.clamp_min(1e-30)
    return Coreset(centre_keys, centre_values, log_masses.masked_fill(paid <= 1e-20, -torch.inf))


def k_means(points: Tensor, weights: Tensor, size: int) -> Tensor:
    """Labels (heads, n) of weighted k-means of points (heads, n, f), without chance.

    It starts at the point of largest weight a and continues with the one of largest a d^2 (farthest first).
    """
    size, heads = min(size, points.shape[-2]), torch.arange(len(points), device=points.device)
    squares = points.square().sum(-1)
    distances = (squares[..., None] + squares[:, None] - 2 * points @ points.mT).clamp_min(0) * weights[:, None]
    to_start, farthest, start = torch.full_like(weights, torch.inf), weights.argmax(-1), []
    for _ in range(size):
        start.append(farthest)
        to_start = torch.minimum(to_start, distances[heads, farthest])
        farthest = to_start.argmax(-1)
    centres = _take(points, torch.stack(start, -1))
    nearest = lambda centres: torch.baddbmm(centres.square().sum(-1)[:, None], points, centres.mT, alpha=-2).argmin(-1)
    weighted = torch.cat([points, torch.ones_like(points[..., :1])], -1) * weights[..., None]
    for _ in range(ROUNDS):
        sums = sum_clusters(weighted, nearest(centres), size)
        mass = sums[..., -1:]
        centres = torch.where(mass > 0, sums[..., :-1] / mass.clamp_min(1e-30), centres)
    return nearest(centres)


def sum_clusters(x: Tensor, labels: Tensor, size: int) -> Tensor:
    """(heads, size, f), the sums of the rows of x (heads, n, f) with each label (heads, n)."""
    rows = labels + size * torch.arange(len(labels), device=labels.device)[:, None]
    sums = x.new_zeros(len(labels) * size, x.shape[-1])
    return sums.index_add_(0, rows.flatten(), x.flatten(0, 1)).unflatten(0, (len(labels), size))


def fit(coreset: Coreset, keys: Tensor, values: Tensor, queries: Tensor) -> Coreset:
    """Keys, values and masses fitted to what these queries get: a few steps of Adam between two fits of the values."""
    target = (queries @ keys.mT).softmax(-1) @ values
    coreset = _refit_values(coreset, queries, target)
    scale = 1 / _spread(target, torch.full_like(target[..., 0], 1 / target.shape[-2]))
    start = (coreset.keys, coreset.values, coreset.log_masses.clamp_min(-30))
    units = keys.std(-2, keepdim=True), values.std(-2, keepdim=True), torch.ones(1).to(keys)
    moves = [torch.zeros_like(x, requires_grad=True) for x in start]
    moved = lambda: Coreset(*(x + unit * move for x, unit, move in zip(start, units, moves)))
    optimiser = torch.optim.Adam(moves)
    for step in range(STEPS):
        optimiser.param_groups[0]["lr"] = STEP_SIZE * (1 - step / STEPS)
        optimiser.zero_grad()
        with torch.enable_grad():
            ((moved().averages(queries) - target).square().sum(-1).mean(-1) * scale).sum().backward()
        optimiser.step()
    with torch.no_grad():
        return _refit_values(moved(), queries, target)


def _refit_values(coreset: Coreset, queries: Tensor, target: Tensor) -> Coreset:
    """The same clusters with the values that fit these queries best, by ridge regression around the mean values."""
    weights = coreset.weights(queries)
    change = _ridge(weights.mT @ weights, weights.mT @ (target - weights @ coreset.values), RIDGE)
    return Coreset(coreset.keys, coreset.values + change, coreset.log_masses)


# --- other coresets ---


def cluster_keys(keys: Tensor, values: Tensor, size: int) -> Coreset:
    """k-means of the keys alone; the mass of a cluster is its number of tokens."""
    labels = k_means(keys - keys.mean(-2, keepdim=True), torch.full_like(keys[..., 0], 1 / keys.shape[-2]), size)
    ones, count = torch.ones_like(keys[..., :1]), int(labels.max()) + 1
    mass, centre_keys, centre_values = (sum_clusters(x, labels, count) for x in (ones, keys, values))
    return Coreset(centre_keys / mass.clamp_min(1), centre_values / mass.clamp_min(1), mass[..., 0].log())


def top_tokens(keys: Tensor, values: Tensor, queries: Tensor, size: int, rest: bool = False) -> Coreset:
    """The tokens that receive most attention of the queries, with equal masses; or one less and the rest as one."""
    attended = attend(queries, keys)
    rank = attended[0].sum(-1).argsort(-1, descending=True)
    if rest:
        return merge(keys, values, queries, rank.argsort(-1).clamp(max=min(size, keys.shape[-2]) - 1), attended)
    best = rank[:, :size]
    return Coreset(_take(keys, best), _take(values, best), torch.zeros_like(best, dtype=keys.dtype))


def random_clusters(keys: Tensor, values: Tensor, queries: Tensor, size: int, generator: torch.Generator) -> Coreset:
    """Tokens grouped at random, with masses from the queries: what is left without the right clusters."""
    labels = torch.randint(min(size, keys.shape[-2]), keys.shape[:-1], generator=generator).to(keys.device)
    return merge(keys, values, queries, labels)


def random_tokens(keys: Tensor, values: Tensor, special: Tensor, size: int, generator: torch.Generator) -> Coreset:
    """The special tokens, and others drawn at random, the same for all heads, that stand for all of their kind."""
    n, count = len(special), int(special.sum())
    priorities = torch.rand(n, generator=generator, dtype=torch.float32).to(keys.device).masked_fill(special, 2.0)
    drawn = priorities.topk(min(size, n)).indices
    others = max(1, min(size, n) - count)
    log_masses = torch.where(special[drawn], 0.0, math.log(max(1, n - count) / others)).to(keys)
    return Coreset(keys[:, drawn], values[:, drawn], log_masses.expand(len(keys), -1))


def leverage_sample(keys: Tensor, values: Tensor, size: int, generator: torch.Generator) -> Coreset:
    """Tokens drawn by the leverage scores of their keys, with masses under which every sum over tokens is unbiased.

    This is priority sampling: with scores l_j, uniform u_j and t the next largest l_j/u_j, the tokens with the largest
    l_j/u_j have the masses max(1, t/l_j).
    """
    basis = torch.linalg.qr(torch.cat([keys, torch.ones_like(keys[..., :1])], -1))[0]
    scores = basis.square().sum(-1).clamp_min(1e-12)
    uniform = torch.rand(scores.shape, generator=generator, dtype=torch.float32).to(scores)
    priorities = scores / uniform.clamp_min(1e-12)
    order = priorities.argsort(-1, descending=True)
    drawn, following = order[:, :size], order[:, size : size + 1]
    masses = priorities.gather(-1, following) / scores.gather(-1, drawn) if following.shape[1] else torch.ones(1)
    return Coreset(_take(keys, drawn), _take(values, drawn), masses.to(keys).clamp_min(1).log().expand(drawn.shape))


# --- averages that are not those of one coreset ---


def nystroem_averages(keys: Tensor, values: Tensor, queries: Tensor, length: Tensor, size: int) -> Tensor:
    """Averages by pivoted Cholesky with Nystroem weights, after the idea of WildCat (arXiv 2602.10056).

    exp<q, k_j> is a combination sum_s exp<q, k_s> W_sj of `size` pivots, W = H_SS^{-1} H_Sj with the kernel
    H = exp(t <k, k'>) of the centred keys. Pivots are the keys of largest residual, and t brings queries, whose root
    mean square length is `length` (heads,), and keys to one scale.
    """
    k, v, q = (x.double() for x in (keys - keys.mean(-2, keepdim=True), values, queries))
    t = length.double() / k.square().sum(-1).mean(-1).sqrt().clamp_min(1e-30)
    exponents = t[:, None, None] * (k @ k.mT)
    kernel = (exponents - exponents.amax((-2, -1), keepdim=True)).exp()
    residual, pivots = kernel.diagonal(dim1=-2, dim2=-1).clone(), []
    factor = torch.zeros_like(kernel[..., :size])
    for s in range(factor.shape[-1]):
        pivot = residual.argmax(-1, keepdim=True)
        pivots.append(pivot)
        row = _take(kernel, pivot)[:, 0] - (factor @ _take(factor, pivot).mT)[..., 0]
        factor[..., s] = row / residual.gather(-1, pivot).clamp_min(1e-300).sqrt()
        residual = (residual - factor[..., s].square()).scatter(-1, pivot, 0.0).clamp_min(0)
    chosen = torch.cat(pivots, -1)
    weights = _ridge(_take(_take(kernel, chosen).mT, chosen), _take(kernel, chosen), 1e-10)
    logits = q @ _take(k, chosen).mT
    scores = (logits - logits.amax(-1, keepdim=True)).exp()
    averages = scores @ (weights @ v) / (scores @ weights.sum(-1, keepdim=True)).clamp_min(1e-12)
    return averages.clamp(v.amin(-2, keepdim=True), v.amax(-2, keepdim=True)).to(values)


def top_k_averages(logits: Tensor, values: Tensor, size: int) -> Tensor:
    """Averages from each query's own `size` largest weights, and the mean value with all the weight that is left."""
    attention = logits.softmax(-1)
    largest = attention.topk(min(size, attention.shape[-1] - 1))
    top = torch.zeros_like(attention).scatter(-1, largest.indices, largest.values)
    return top @ values + (1 - top.sum(-1, keepdim=True)) * values.mean(-2, keepdim=True)


def low_rank_averages(logits: Tensor, values: Tensor, size: int) -> Tensor:
    """Averages by the best approximation of the attention matrix of rank `size`."""
    attention = logits.softmax(-1)
    basis = torch.linalg.eigh(attention @ attention.mT)[1][..., -size:]
    return basis @ (basis.mT @ (attention @ values))


# --- queries that are not known ---


def predict_queries(queries: Tensor, tokens: tuple[Tensor, Tensor], keys: Tensor, values: Tensor) -> Tensor:
    """Queries (heads, m, k) that tokens with these keys and values (heads, n, ...) may have.

    A linear map from key and value to query is learned on other tokens, whose queries (heads, m, k) are `queries` and
    whose keys and values are `tokens`. Their residuals are added.
    """
    z, m, n = _regressors(*tokens).double(), queries.shape[-2], keys.shape[-2]
    linear = _ridge(z.mT @ z, z.mT @ queries.double(), 1e-3)
    residuals = queries - (z @ linear).to(queries)
    rows = torch.arange(m, device=keys.device) * n // m
    return (_regressors(keys, values) @ linear.to(keys))[:, rows] + residuals


# --- shared ---


def _regressors(keys: Tensor, values: Tensor) -> Tensor:
    return torch.cat([keys, values, torch.ones_like(keys[..., :1])], dim=-1)


def _ridge(gram: Tensor, right: Tensor, ridge: float) -> Tensor:
    """The solution of (gram + ridge times its mean diagonal) x = right."""
    size = ridge * gram.diagonal(dim1=-2, dim2=-1).mean(-1)[:, None, None]
    return torch.linalg.solve(gram + size * torch.eye(gram.shape[-1]).to(gram), right)


def _take(x: Tensor, index: Tensor) -> Tensor:
    """Rows (heads, K, f) of x (heads, n, f) at index (heads, K)."""
    return x.gather(-2, index[..., None].expand(*index.shape, x.shape[-1]))


def _spread(x: Tensor, weights: Tensor) -> Tensor:
    """Total variance of x (heads, n, f) under weights (heads, n); at least what rounding leaves of a constant."""
    mean = (weights[..., None] * x).sum(-2, keepdim=True)
    size = (weights * x.square().sum(-1)).sum(-1)
    return (weights * (x - mean).square().sum(-1)).sum(-1).clamp_min(torch.finfo(x.dtype).eps * size + 1e-30)
