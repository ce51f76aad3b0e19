"""Numbers of one cloud: energies, spread, clusters, rank, and what its attention looks like.

Clouds are x (..., n, d) with optional weights and mask (..., n); leading axes are a batch. What compares all pairs runs
in blocks of rows, in memory linear in n, and never counts a token's likeness to itself.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from attn_flow.attention import Attention
from attn_flow.attention.multihead import attention_alone
from attn_flow.averages import dense
from attn_flow.base import checks, memory
from attn_flow.base.threads import at_most
from attn_flow.base.words import introduce
from attn_flow.geometry import Geometry, known_geometry
from attn_flow.measures import Cloud

ENTRIES = 2**21  # of pairwise tensors held at once


def log_energy(
    x: Tensor,
    beta: float,
    G: Tensor | None = None,
    *,
    weights: Tensor | None = None,
    mask: Tensor | None = None,
) -> Tensor:
    """log E_beta, E_beta = (1/(2 beta)) sum_h sum_ij w_i w_j e^{beta <x_i, G_h x_j>}, (...,); w = 1/n by default.

    G: None (the identity), (d, d), or (..., heads, d, d). Never decreases along the unnormalised flow with V_h = G_h
    symmetric, nor along the softmax flow of one head (arXiv 2312.10794, 2605.04279). e^beta overflows float64 beyond
    beta = 709: the logarithm does not. Differentiable.

    >>> float(log_energy(torch.eye(2, dtype=torch.float64), 1000.0))  # log(e^1000/4000): the tokens see only themselves
    991.705...
    """
    if not (isinstance(beta, numbers.Real) and 0 < beta < math.inf):
        raise ValueError(f"beta = {beta!r}, expected 0 < beta < inf; at beta = 0 the energy is infinite.")
    cloud = Cloud(x, weights, mask)
    x = cloud.x
    log_w = cloud.probabilities.log()
    if G is not None:
        checks.floating("G", G, "(d, d) or (..., heads, d, d)")
        checks.same_device("G", G, "x", x)
        if 0 in G.shape or G.shape[-2:] != (x.shape[-1],) * 2:
            raise ValueError(
                f"G has shape {tuple(G.shape)}, expected (d, d) or (..., heads, d, d) with d = {x.shape[-1]}."
            )
        checks.finite("G", G)
    y = x[..., None, :, :] if G is None else x[..., None, :, :] @ G.to(x)
    # <x_i, G x_j> = <G^T x_i, x_j>: rows times G
    heads = y.shape[-3]
    row = dense.softmax_and_log_sum(
        beta * y,
        x[..., None, :, :],
        x[..., None, :, :1],
        key_bias=log_w[..., None, :].expand(*log_w.shape[:-1], heads, -1),
    )[1]
    found = torch.logsumexp((row + log_w[..., None, :]).flatten(-2), dim=-1) - math.log(2 * beta)
    checks.in_range("the logarithm of the energy", found)
    return found


def energy(
    x: Tensor,
    beta: float,
    G: Tensor | None = None,
    *,
    weights: Tensor | None = None,
    mask: Tensor | None = None,
) -> Tensor:
    """E_beta itself, (...,), with the arguments of `log_energy`; raises where it overflows.

    >>> energy(torch.ones(3, 1), beta=1.0)  # e/2
    tensor(1.3591)
    """
    value = log_energy(x, beta, G, weights=weights, mask=mask).exp()
    if checks.can_look(value) and not bool(torch.isfinite(value).all()):
        raise ValueError(f"the energy at beta = {beta:g} overflows {x.dtype}; use log_energy.")
    return value


def diameter(
    x: Tensor, *, mask: Tensor | None = None, geometry: Geometry | None = None, entries: int = ENTRIES
) -> Tensor:
    """The largest distance between two tokens, (...,): straight, or along a geometry.

    >>> diameter(torch.tensor([[0.0, 0.0], [3.0, 4.0], [9.0, 9.0]]), mask=torch.tensor([True, True, False]))
    tensor(5.)
    """
    checks.tokens("x", x)
    shown = _shown(x, mask)
    geometry = None if geometry is None else known_geometry(geometry)
    widest = x.new_zeros(())
    for rows in _rows(x, x.shape[-1], entries):
        a, b = x[..., rows, None, :], x[..., None, :, :]
        distance = dense.lengths(a - b) if geometry is None else geometry.distance(a, b)
        both = shown[..., rows, None] & shown[..., None, :]
        widest = torch.maximum(widest, torch.where(both, distance, 0.0).amax((-2, -1)))
    checks.in_range("the diameter", widest)
    return widest


@dataclass(frozen=True, eq=False)
class Clusters:
    """Groups of tokens linked by steps of at most `tol`."""

    labels: Tensor  # (..., n): 0, 1, ... in the order of first tokens; -1 for padding
    counts: Tensor  # (...,) number of clusters
    mass: Tensor  # (..., n) mass of the cluster that a token belongs to
    tol: float
    speed: Tensor | None  # (...,) largest speed of a token: a count taken while tokens move fast will not last


def clusters(
    x: Tensor,
    tol: float = 1e-3,
    *,
    weights: Tensor | None = None,
    mask: Tensor | None = None,
    velocity: Tensor | None = None,
    entries: int = ENTRIES,
) -> Clusters:
    """Single-linkage clusters of every cloud: connected components of |x_i - x_j| <= tol.

    tol: a distance, in the units of x. velocity (..., n, d), if given, is reported as the largest speed beside the
    counts. entries: pairs held at once.

    >>> clusters(torch.tensor([[0.0], [0.1], [5.0]]), tol=0.2).labels
    tensor([0, 0, 1])
    """
    checks.positive("tol", tol)
    cloud = Cloud(x, weights, mask)
    x = cloud.x
    checks.held("x", x)
    checks.precise("x", x)
    shown = _shown(x, mask)
    n = x.shape[-2]
    root = torch.arange(n, device=x.device).expand(x.shape[:-1]).contiguous()
    blocks = list(_rows(x, 1, entries))
    held = _near(x, shown, blocks[0], tol) if len(blocks) == 1 else None  # one block is kept, several are recomputed
    while True:
        # Every token takes the smallest root in reach, roots follow their roots; chains collapse in few rounds.
        reach = []
        for rows in blocks:
            near = _near(x, shown, rows, tol) if held is None else held
            reach.append(torch.where(near, root[..., None, :], root[..., rows, None]).amin(-1))
        smallest = torch.cat(reach, dim=-1)
        hooked = root.scatter_reduce(-1, root, smallest, "amin")
        hooked = torch.minimum(hooked, smallest)
        while bool((hooked.gather(-1, hooked) != hooked).any()):
            hooked = hooked.gather(-1, hooked)
        if bool((hooked == root).all()):
            break
        root = hooked
    first = (root == torch.arange(n, device=x.device)) & shown
    number = first.cumsum(-1) - 1
    labels = torch.where(shown, number.gather(-1, root), -1)
    p = torch.where(shown, cloud.probabilities, 0.0)
    mass = torch.zeros_like(p).scatter_add(-1, root, p).gather(-1, root)
    speed = None
    if velocity is not None:
        checks.floating("velocity", velocity, "(..., n, d)")
        batch = velocity.shape[:-2]
        if 0 in batch or velocity.shape[-2:] != x.shape[-2:] or not checks.broadcasts(batch, x.shape[:-2]):
            raise ValueError(f"velocity has shape {tuple(velocity.shape)}, expected that of x, {tuple(x.shape)}.")
        checks.same_device("velocity", velocity, "x", x)
        checks.finite("velocity", velocity)
        speed = torch.where(shown, velocity.norm(dim=-1), 0.0).amax(-1)
    return Clusters(labels, first.sum(-1), torch.where(shown, mass, 0.0), tol, speed)


def _near(x: Tensor, shown: Tensor, rows: slice, tol: float) -> Tensor:
    """Whether |x_i - x_j| <= tol, for the rows i and all j of every cloud: by differences, exact at any tol."""
    distance = torch.cdist(x[..., rows, :], x, compute_mode="donot_use_mm_for_euclid_dist")
    return (distance <= tol) & shown[..., rows, None] & shown[..., None, :]


def pairwise_cosines(
    x: Tensor,
    bins: int = 100,
    *,
    weights: Tensor | None = None,
    mask: Tensor | None = None,
    entries: int = ENTRIES,
) -> tuple[Tensor, Tensor]:
    """Histogram of cos(x_i, x_j) over pairs i != j: masses (..., bins) summing to one, and edges (bins + 1,).

    >>> pairwise_cosines(torch.tensor([[1.0, 0.0], [2.0, 0.0], [-1.0, 0.0]]), bins=2)[0]  # one of three pairs agrees
    tensor([0.6667, 0.3333])
    """
    checks.whole("bins", bins)
    x = Cloud(x, weights, mask).x
    memory.require_tensor(*x.shape[:-2], bins, dtype=x.dtype, device=x.device)
    edges = torch.linspace(-1, 1, bins + 1, dtype=x.dtype, device=x.device)

    def count(cosine: Tensor, mass: Tensor) -> Tensor:
        place = ((cosine + 1) / 2 * bins).long().clamp(0, bins - 1)  # rounding puts cos(x, x) a little beyond 1
        histogram = torch.zeros(*x.shape[:-2], bins, dtype=x.dtype, device=x.device)
        return histogram.scatter_add(-1, place.flatten(-2), mass.flatten(-2))

    return _over_pairs(x, weights, mask, count, entries), edges


def close_pairs(
    x: Tensor, cosine: float = 0.999, *, weights: Tensor | None = None, mask: Tensor | None = None
) -> Tensor:
    """Fraction of pairs i != j with cos(x_i, x_j) > cosine, (...,): the phase diagram of arXiv 2312.10794.

    >>> close_pairs(torch.tensor([[1.0, 0.0], [2.0, 0.0], [-1.0, 0.0]]))
    tensor(0.3333)
    """
    checks.number("cosine", cosine)
    if not -1 <= cosine <= 1:
        raise ValueError(f"cosine = {cosine}, expected a number from -1 to 1.")
    return _over_pairs(x, weights, mask, lambda c, mass: (mass * (c > cosine)).sum((-2, -1)), ENTRIES)


def _over_pairs(
    x: Tensor, weights: Tensor | None, mask: Tensor | None, measure: Callable[[Tensor, Tensor], Tensor], entries: int
) -> Tensor:
    """sum over blocks of measure(cosines, masses w_i w_j), the diagonal left out and masses summing to one."""
    cloud = Cloud(x, weights, mask)
    x, p = cloud.x, cloud.probabilities
    checks.held("x", x)
    shown = _shown(x, mask)
    u = _directions(x, shown)
    pairs = 1 - p.square().sum(-1)
    if bool((pairs <= 0).any()):
        raise ValueError("a cloud has one token only: no pair to compare; expected two or more.")
    total: Tensor | None = None
    for rows in _rows(x, 1, entries):
        mass = p[..., rows, None] * p[..., None, :]
        i = torch.arange(x.shape[-2], device=x.device)
        mass = torch.where(i[rows, None] == i, 0.0, mass)
        part = measure(u[..., rows, :] @ u.mT, mass)
        total = part if total is None else total + part
    assert total is not None  # a cloud has at least one token
    return total / (pairs[..., None] if total.ndim > pairs.ndim else pairs)


def _directions(x: Tensor, shown: Tensor) -> Tensor:
    """x/|x|, whatever the size of the tokens; 0 for padding."""
    scaled = torch.where(shown[..., None], x / dense.largest_entry(x), 0.0)
    norm = scaled.norm(dim=-1, keepdim=True)
    if checks.can_look(norm) and bool((shown & (norm[..., 0] == 0)).any()):
        raise ValueError("x has a zero token, which has no direction; remove or mask it.")
    return scaled / torch.where(shown[..., None], norm, 1.0)


def effective_rank(
    x: Tensor, *, weights: Tensor | None = None, mask: Tensor | None = None, centred: bool = False
) -> Tensor:
    """exp of the entropy of the normalised singular values of the cloud, (...,) (Roy and Vetterli, 2007).

    centred: of the cloud less its mean.

    >>> effective_rank(torch.eye(5))
    tensor(5.)
    """
    checks.flags(centred=centred)
    cloud = Cloud(x, weights, mask)
    checks.held("x", x)
    checks.precise("x", x)
    y = x - cloud.mean[..., None, :] if centred else x
    with at_most(1):
        sigma = torch.linalg.svdvals(cloud.probabilities.sqrt()[..., None] * y)
    total = sigma.sum(-1, keepdim=True)
    if bool((total == 0).any()):
        raise ValueError("all tokens are zero (or equal, with centred=True): the cloud has no rank.")
    return torch.special.entr(sigma / total).sum(-1).exp()


def alignment(x: Tensor, basis: Tensor) -> Tensor:
    """|P_E x|^2 / |x|^2 of every token, (..., n), E spanned by the columns of basis (d, k), which must be independent.

    >>> alignment(torch.tensor([[3.0, 4.0]]), torch.tensor([[1.0], [0.0]]))
    tensor([0.3600])
    """
    checks.tokens("x", x)
    checks.floating("basis", basis, "(d, k)")
    if basis.ndim != 2 or basis.shape[0] != x.shape[-1] or not 1 <= basis.shape[1] <= basis.shape[0]:
        raise ValueError(
            f"basis has shape {tuple(basis.shape)}, expected (d, k) with d = {x.shape[-1]} to match x and 1 <= k <= d."
        )
    checks.finite("basis", basis)
    for name, z in (("x", x), ("basis", basis)):
        checks.held(name, z)
        checks.precise(name, z)
    if int(torch.linalg.matrix_rank(basis)) < basis.shape[1]:
        raise ValueError("basis has dependent columns, expected a basis of E; drop those that add no direction.")
    E = torch.linalg.qr(basis.to(x))[0]
    return (_directions(x, _shown(x, None)) @ E).square().sum(-1)


@dataclass(frozen=True, eq=False, repr=False)
class AttentionStatistics:
    """What the softmax of every head does to a cloud; NaN for the queries of padding."""

    entropy: Tensor  # (..., heads, n) nats, of the weights of every query
    largest_weight: Tensor  # (..., heads, n)
    logit_std: Tensor  # (..., heads, n) standard deviation of a query's logits under the cloud: s of THEORY 11
    self_argmax: Tensor  # (..., heads, n) 1 where a token attends most to itself, 0 elsewhere
    effective_beta: Tensor  # (..., heads) beta mean|G x| mean|y|: the beta of the unit sphere with G = I

    def __repr__(self) -> str:
        return introduce(self, "entropy", "largest_weight", "logit_std", "self_argmax", "effective_beta")


def attention_statistics(
    attention: Attention,
    x: Tensor,
    *,
    weights: Tensor | None = None,
    mask: Tensor | None = None,
    entries: int = ENTRIES,
) -> AttentionStatistics:
    """Entropy, largest weight, logit spread and self-attention of every query, effective beta of every head.

    attention: softmax at a finite beta. x: (..., n, d), with weights and mask (..., n) as in `Cloud`. In memory linear
    in n (`entries` pairs at once). Scaling G by c and beta by 1/c changes nothing.

    >>> found = attention_statistics(Attention.identity(2, beta=0.0), torch.eye(2))
    >>> found.entropy  # log 2: both tokens get the same
    tensor([[0.6931, 0.6931]])
    >>> attention_statistics(Attention.identity(2, beta=5.0), torch.eye(2)).self_argmax
    tensor([[1., 1.]])
    """
    cloud = Cloud(x, weights, mask)
    attention_alone("attention_statistics", attention)
    x = cloud.x
    checks.width("x", x, attention.dim)
    checks.same_device("x", x, "attention", attention.Q)
    if attention.cold or attention.kind != "softmax":
        raise ValueError(
            f"attention of kind {attention.kind!r}{' at beta = inf' if attention.cold else ''}; expected a softmax at "
            "finite beta, whose weights are a law over tokens."
        )
    part = attention.to(torch.float64)
    p, shown, y = cloud.probabilities.double(), _shown(x, mask), x.double()
    beta = torch.as_tensor(part.beta, dtype=y.dtype, device=y.device)
    beta = beta[..., None, None] if beta.ndim else beta
    queries = _queries(part, y)
    y = y[..., None, :, :]
    keys = y if part.K is None else y @ part.K.mT  # (..., heads, n, k): k numbers a key, not d
    dense.loses_digits(queries, keys, part.beta)  # raises where logits leave the range of float64
    mass, log_mass = p[..., None, None, :], p.log()[..., None, None, :]
    i = torch.arange(x.shape[-2], device=x.device)
    parts = []
    for rows in _rows(x, attention.heads, entries):
        scores = beta * (queries[..., rows, :] @ keys.mT)  # (..., heads, rows, n)
        hidden = (i > i[rows, None]) if attention.causal else torch.zeros_like(i > i[rows, None])
        hidden = hidden if attention.self_attention else hidden | (i == i[rows, None])
        A = (scores + log_mass).masked_fill(hidden, -math.inf).softmax(-1)
        centred = scores - (mass * scores).sum(-1, keepdim=True)
        own = A.diagonal(rows.start, dim1=-2, dim2=-1) >= A.amax(-1)
        parts.append((torch.special.entr(A).sum(-1), A.amax(-1), (mass * centred.square()).sum(-1).sqrt(), own))
    found = [torch.cat(part, dim=-1) for part in zip(*parts)]
    entropy, largest, spread, own = (torch.where(shown[..., None, :], f.to(x.dtype), math.nan) for f in found)
    return AttentionStatistics(entropy, largest, spread, own, effective_beta(attention, x, weights=weights, mask=mask))


def effective_beta(
    attention: Attention, x: Tensor, *, weights: Tensor | None = None, mask: Tensor | None = None
) -> Tensor:
    """beta mean|G x + b| mean|y|, (..., heads): the beta that the unit sphere with G = I would have.

    x: (..., n, d), with weights and mask (..., n) as in `Cloud`.

    >>> effective_beta(Attention.identity(2, beta=3.0), 2 * torch.eye(2))
    tensor([12.])
    """
    attention_alone("effective_beta", attention)
    cloud = Cloud(x, weights, mask)
    checks.width("x", x, attention.dim)
    checks.same_device("x", x, "attention", attention.Q)
    p, part, y = cloud.probabilities.double(), attention.to(torch.float64), cloud.x.double()
    queries = _queries(part, y)
    g = queries if part.K is None else queries @ part.K  # (..., heads, n, d)
    reach = (p[..., None, :] * dense.lengths(g)).sum(-1)
    found = (part.beta * reach * (p * dense.lengths(y)).sum(-1)[..., None]).to(x.dtype)
    if not attention.cold:
        checks.in_range("the effective beta", found)
    return found


def _queries(attention: Attention, x: Tensor) -> Tensor:
    """Q x + b, (..., heads, n, k)."""
    q = x[..., None, :, :] @ attention.Q.mT
    return q if attention.query_bias is None else q + attention.query_bias[..., None, :]


def _shown(x: Tensor, mask: Tensor | None) -> Tensor:
    shown = torch.ones(x.shape[:-1], dtype=torch.bool, device=x.device)
    if mask is None:
        return shown
    checks.token_mask(mask, x)
    return shown & mask


def _rows(x: Tensor, width: int, entries: int) -> Iterator[slice]:
    """Blocks of rows i such that all pairs (i, j) of all clouds, `width` numbers each, are at most `entries`."""
    checks.whole("entries", entries)
    n = x.shape[-2]
    step = max(1, entries // (n * math.prod(x.shape[:-2]) * width))
    return (slice(first, first + step) for first in range(0, n, step))
