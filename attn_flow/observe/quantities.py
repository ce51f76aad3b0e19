"""Numbers of a cloud: energy, clusters, pairwise cosines and rank.

Every function takes tokens (..., n, d) or a `Cloud` with weights and a mask; leading axes are a batch. Statistics of
pairs run in blocks of rows, so that memory is linear in n, and never count a token's similarity to itself.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from attn_flow.base import checks
from attn_flow.measures.cloud import Cloud, as_cloud

BLOCK_SIZE = 2**21  # numbers in the pairwise tensors of one block


def _expand(cloud: Cloud) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens (..., n, d), their probabilities (..., n), and whether they are tokens (..., n), of one batch shape."""
    p = cloud.probabilities
    is_token = torch.ones_like(p, dtype=torch.bool) if cloud.mask is None else cloud.mask.expand(p.shape)
    return cloud.x.expand(*p.shape, cloud.x.shape[-1]), p, is_token


def _row_blocks(x: Tensor) -> Iterator[slice]:
    """Blocks of rows i such that the pairs (i, j) of all clouds fill at most a block."""
    n = x.shape[-2]
    rows = max(1, BLOCK_SIZE // (n * math.prod(x.shape[:-2])))
    return (slice(first, first + rows) for first in range(0, n, rows))


def log_energy(cloud: Tensor | Cloud, beta: float, G: Tensor | None = None) -> Tensor:
    """log E_beta with E_beta = (1/(2 beta)) sum_h sum_ij w_i w_j e^{beta <x_i, G_h x_j>}.

    The energy never decreases along the unnormalised flow with symmetric V_h = G_h, nor along the softmax flow of one
    such head (arXiv 2312.10794, 2605.04279). The logarithm does not overflow and is differentiable.

    Args:
        cloud: tokens (..., n, d) or a `Cloud`; the weights w_i sum to one.
        beta: inverse temperature, positive and finite.
        G: score matrices (d, d) or (..., heads, d, d); None is the identity.

    Returns:
        log E_beta (...).

    Example:
        >>> float(log_energy(torch.eye(2, dtype=torch.float64), 1000.0))  # log(e^1000/4000): no interaction
        991.705...
    """
    checks.require_positive(beta=beta)
    cloud = as_cloud(cloud)
    x, n, d = cloud.x, cloud.x.shape[-2], cloud.x.shape[-1]
    if G is None:
        g = x
    else:
        checks.require_shape("G", G, (d, d))
        g = x @ G.to(x) if G.ndim == 2 else (x[..., None, :, :] @ G.to(x)).flatten(-3, -2)  # (..., heads * n, d)
    log_w = cloud.log_weights
    log_w = torch.full_like(x[..., 0], -math.log(n)) if log_w is None else log_w  # (..., n)
    exponents = beta * cloud.log_partition(g, beta).unflatten(-1, (-1, n)) + log_w[..., None, :]  # (..., heads, n)
    return torch.logsumexp(exponents.flatten(-2), dim=-1) - math.log(2 * beta)


@dataclass(frozen=True, eq=False)
class Clusters:
    """Clusters of tokens.

    Args:
        labels: (..., n), 0, 1, ... in the order of the first tokens, -1 for padding.
        counts: (...), the number of clusters.
        mass: (..., n), the mass of the cluster that a token belongs to, 0 for padding.
    """

    labels: Tensor
    counts: Tensor
    mass: Tensor


def clusters(cloud: Tensor | Cloud, tol: float = 1e-3) -> Clusters:
    """Single-linkage clusters of every cloud: connected components of |x_i - x_j| <= tol.

    The number of rounds depends on the tokens, so this function reads one value from the device in each round.

    Args:
        cloud: tokens (..., n, d) or a `Cloud`.
        tol: the largest distance between linked tokens.

    Returns:
        `Clusters` with labels, counts and masses.

    Example:
        >>> clusters(torch.tensor([[0.0], [0.1], [5.0]]), tol=0.2).labels
        tensor([0, 0, 1])
    """
    checks.require_positive(tol=tol)
    x, p, is_token = _expand(as_cloud(cloud))
    x, n = x.to(torch.promote_types(x.dtype, torch.float32)), x.shape[-2]  # torch.cdist knows no half precision
    index = torch.arange(n, device=x.device)

    def linked(rows: slice) -> Tensor:
        # Differences are exact for close tokens, where |x|^2 - 2 <x,y> + |y|^2 cancels.
        distance = torch.cdist(x[..., rows, :], x, compute_mode="donot_use_mm_for_euclid_dist")
        return (distance <= tol) & is_token[..., rows, None] & is_token[..., None, :]

    blocks = list(_row_blocks(x))
    only_block = linked(blocks[0]) if len(blocks) == 1 else None  # several blocks are recomputed in every round
    root = index.expand(x.shape[:-1]).contiguous()
    while True:
        # Every token takes the smallest root it is linked to, and so does its root; then roots follow their roots.
        candidates = []
        for rows in blocks:
            is_linked = linked(rows) if only_block is None else only_block
            candidates.append(torch.where(is_linked, root[..., None, :], root[..., rows, None]).amin(-1))
        smallest = torch.cat(candidates, dim=-1)
        new_root = torch.minimum(root.scatter_reduce(-1, root, smallest, "amin"), smallest)
        for _ in range(n.bit_length()):
            new_root = new_root.gather(-1, new_root)
        if torch.equal(new_root, root):
            break
        root = new_root
    is_first = (root == index) & is_token
    labels = (is_first.cumsum(-1) - 1).gather(-1, root)
    mass = torch.zeros_like(p).scatter_add(-1, root, p).gather(-1, root)
    return Clusters(torch.where(is_token, labels, -1), is_first.sum(-1), torch.where(is_token, mass, 0.0))


def pairwise_cosines(cloud: Tensor | Cloud, bins: int = 100) -> tuple[Tensor, Tensor]:
    """Histogram of cos(x_i, x_j) over the pairs i != j. A zero token has cosine 0 with every other.

    Args:
        cloud: tokens (..., n, d) or a `Cloud`; a pair has the mass w_i w_j.
        bins: number of bins of equal width from -1 to 1.

    Returns:
        Masses (..., bins), which sum to one (NaN for a cloud of one token), and edges (bins + 1,).

    Example:
        >>> pairwise_cosines(torch.tensor([[1.0, 0.0], [2.0, 0.0], [-1.0, 0.0]]), bins=2)[0]  # one of three is close
        tensor([0.6667, 0.3333])
    """
    checks.require_count(bins=bins)

    def histogram(cosine: Tensor, mass: Tensor) -> Tensor:
        bin_index = ((cosine + 1) / 2 * bins).long().clamp(0, bins - 1)  # rounding may exceed 1
        empty = mass.new_zeros(*mass.shape[:-2], bins)
        return empty.scatter_add(-1, bin_index.flatten(-2), mass.flatten(-2))

    masses = _sum_over_pairs(cloud, histogram)
    return masses, torch.linspace(-1, 1, bins + 1, dtype=masses.dtype, device=masses.device)


def close_pairs(cloud: Tensor | Cloud, cosine: float = 0.999) -> Tensor:
    """Fraction of the pairs i != j with cos(x_i, x_j) > cosine: the phase diagram of arXiv 2312.10794.

    Args:
        cloud: tokens (..., n, d) or a `Cloud`; a pair has the mass w_i w_j.
        cosine: the threshold.

    Returns:
        The fraction (...); NaN for a cloud of one token.

    Example:
        >>> close_pairs(torch.tensor([[1.0, 0.0], [2.0, 0.0], [-1.0, 0.0]]))
        tensor(0.3333)
    """
    return _sum_over_pairs(cloud, lambda c, mass: (mass * (c > cosine)).sum((-2, -1))[..., None])[..., 0]


def _sum_over_pairs(cloud: Tensor | Cloud, statistic: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """Sum over blocks of statistic(cosines, masses) (..., k), for masses w_i w_j without i = j that sum to one."""
    x, p, _ = _expand(as_cloud(cloud))
    u, p, index = _directions(x), p.double(), torch.arange(x.shape[-2], device=x.device)  # sums of n^2 small masses
    total = torch.zeros((), dtype=p.dtype, device=x.device)
    for rows in _row_blocks(x):
        mass = torch.where(index[rows, None] == index, 0.0, p[..., rows, None] * p[..., None, :])
        total = total + statistic(u[..., rows, :] @ u.mT, mass)
    return (total / (1 - p.square().sum(-1, keepdim=True))).to(x.dtype)


def _directions(x: Tensor) -> Tensor:
    """x / |x| for tokens of any size; zero for a zero token."""
    size = x.detach().abs().amax(-1, keepdim=True)
    return F.normalize(x / torch.where(size > 0, size, 1.0), dim=-1)


def effective_rank(cloud: Tensor | Cloud, centred: bool = False) -> Tensor:
    """exp of the entropy of the normalised singular values of the cloud (Roy and Vetterli, 2007).

    Args:
        cloud: tokens (..., n, d) or a `Cloud`; a token has the weight of its square root in the matrix.
        centred: whether the mean is subtracted first.

    Returns:
        The effective rank (...), from 1 to min(n, d); NaN if all tokens are zero, or equal with centred=True.

    Example:
        >>> effective_rank(torch.eye(5))
        tensor(5.)
    """
    cloud = as_cloud(cloud)
    x = cloud.x - cloud.mean[..., None, :] if centred else cloud.x
    rows = cloud.probabilities.sqrt()[..., None] * x
    sigma = torch.linalg.svdvals(rows.to(torch.promote_types(x.dtype, torch.float32)))
    return torch.special.entr(sigma / sigma.sum(-1, keepdim=True)).sum(-1).exp().to(x.dtype)
