"""A text's law quantised to a few weighted atoms for each head: the clusters that its queries can tell apart.

Tokens are grouped in the metric of the queries. With P the attention matrix and S the covariance of beta(Q x + b),
    weights a_j = sum_i P_ij (attention received),   points z_j = (S^{1/2} k_j, v_j), both halves of unit spread,
and weighted k-means gives clusters c with the atoms (k_c, v_c), the a-weighted means. The mass of an atom is
    log m_c = mean over queries i of  log sum_{j in c} e^{beta <q_i, k_j>} - beta <q_i, k_c>,   weighted by P_i(c),
so that it counts a cluster's tokens and what their spread adds. All queries share these K (k + v + 1) numbers. With a
window of tokens that a query sees for itself, those are taken out of the clusters again, mass and mean value.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from attn_flow.measures import Cloud, Measure, PerQueryCloud
from attn_flow.probe.head_space import HeadSpace

VALUE_SHARE = 0.5  # of the squared distance that keys' and values' spreads share: v against k
RESIDUAL = 0.5  # clusters are added until this much of the spread 1 + VALUE_SHARE is left
MOST = 4.0  # atoms over the square root of the number of tokens, at most, in short texts
SHARE = 1 / 3  # and over the number of tokens in long ones: what the criterion asks for grows nearly with them
ROUNDS = 5  # of k-means


@dataclass(frozen=True, eq=False)
class Window:
    """The tokens a query sees for itself: their places (n, w), and whether there are such places (n, w)."""

    place: Tensor
    inside: Tensor


def neighbours(space: HeadSpace, offsets: tuple[int, ...]) -> Window:
    """The tokens at these offsets from every token."""
    place = torch.arange(space.n, device=space.x.device)[:, None] + torch.tensor(offsets, device=space.x.device)
    inside = (place >= 0) & (place < space.n)
    place = place.clamp(0, space.n - 1)
    return Window(place, inside if space.sees is None else inside & space.sees.gather(-1, place))


@dataclass(frozen=True, eq=False)
class Atoms:
    """K atoms y (heads, K, k + v) with log masses (heads, K), -inf for none, and the clusters they came from."""

    y: Tensor
    log_mass: Tensor
    label: Tensor  # (heads, n) the cluster of every token
    share: Tensor  # (heads, n) share of its cluster's attention that a token receives
    window: Window | None = None

    @cached_property
    def counts(self) -> Tensor:
        """Atoms that have mass, (heads,)."""
        return (self.log_mass > -torch.inf).sum(-1)

    def law(self, space: HeadSpace) -> Measure:
        """The atoms as a measure for the queries of `space`: shared by all, or beside each query's own window."""
        weights = (self.log_mass - self.log_mass.amax(-1, keepdim=True)).exp()
        if self.window is None:
            return Cloud(self.y, weights)
        # Of cluster c, query i meets the share `rest` outside its window, and the mean value of that part.
        taken, rest = _outside(self.label, self.share, self.window, self.y.shape[-2])
        near = space.y[:, self.window.place]
        value = (self.y[:, None] - taken.mT @ near) / torch.where(rest > 0, rest, 1.0)[..., None]
        key = self.y[:, None, :, : space.k].expand(-1, space.n, -1, -1)
        atoms = torch.cat([key, value[..., space.k :]], dim=-1)
        top = self.log_mass.amax(-1)[:, None, None]
        return PerQueryCloud(
            torch.cat([atoms, near], dim=-2),
            torch.cat([weights[:, None] * rest, self.window.inside * (-top).exp()], dim=-1),
        )

    def rows(self, space: HeadSpace) -> Tensor:
        """The atoms' attention handed back to their tokens by share, (heads, n, n): what to compare with P."""
        scores = (space.beta[..., None] * space.g) @ self.y.mT + self.log_mass[:, None]
        return scores.softmax(-1).gather(-1, self.label[:, None].expand(-1, space.n, -1)) * self.share[:, None]


def quantise(
    space: HeadSpace,
    *,
    window: tuple[int, ...] = (),
    residual: float = RESIDUAL,
    most: float | None = None,
    queries: Tensor | None = None,
    generator: torch.Generator | None = None,
) -> Atoms:
    """The atoms of one text. window: offsets of tokens that queries see for themselves, left out of the atoms' weights.

    queries (n,): the queries by which atoms are found, all of them unless given (to predict for the others).
    The number of atoms is the smallest whose residual spread is below `residual`, at most `most` sqrt(n); unless given,
    4 sqrt(n) or n/3, whichever is more. With a `generator`, tokens are grouped at random into as many clusters: the
    control that says whether clusters matter.
    """
    if space.sees is not None:
        raise ValueError("atoms shared by all queries need tokens that see each other; this attention hides some.")
    n, k = space.n, space.k
    logits = space.logits
    log_Z = logits.logsumexp(-1, keepdim=True)
    P = (logits - log_Z).exp()
    own = neighbours(space, window) if window else None
    if own is not None:
        mine = torch.zeros(n, n, device=P.device).scatter_add(-1, own.place, own.inside.float())
        P = P.masked_fill(mine > 0, 0.0)
    if queries is not None:
        P = P * queries[:, None]
    a = P.sum(-2) + 1e-12
    a = a / a.sum(-1, keepdim=True)
    paid = P.sum(-1)
    paid = paid / paid.sum(-1, keepdim=True)
    q = space.beta[..., None] * space.g[..., :k]
    q_centred = q - (paid[..., None] * q).sum(-2, keepdim=True)
    metric, values = _root((paid[..., None] * q_centred).mT @ q_centred), space.y[..., k:]
    keys = space.y[..., :k] @ metric
    z = torch.cat(
        [
            keys / _spread(keys, a).sqrt()[:, None, None],
            values * (VALUE_SHARE / _spread(values, a)).sqrt()[:, None, None],
        ],
        dim=-1,
    )
    bound = max(MOST * math.sqrt(n), SHARE * n) if most is None else most * math.sqrt(n)
    label, top = k_means(z, a, residual, min(n, math.ceil(bound)))
    if generator is not None:
        label = torch.randint(top, label.shape, generator=generator).to(label.device)
    member = torch.nn.functional.one_hot(label, top).to(P.dtype)
    weighed = member * a[..., None]
    received = weighed.sum(-2)
    y = weighed.mT @ space.y / received.clamp_min(1e-30)[..., None]
    share = a / received.gather(-1, label).clamp_min(1e-30)
    to_cluster = P @ member  # (heads, n, K)
    log_Z_c = to_cluster.clamp_min(1e-30).log() + log_Z
    if own is not None:  # what the window takes out of a cluster is not the atom's to explain
        rest = _outside(label, share, own, top)[1]
        log_Z_c = log_Z_c - rest.clamp_min(1e-30).log()
        to_cluster = to_cluster * (rest > 0)
    total = to_cluster.sum(-2)
    log_mass = (to_cluster * (log_Z_c - q @ y[..., :k].mT)).sum(-2) / total.clamp_min(1e-30)
    log_mass = log_mass.masked_fill((received <= 0) | (total <= 1e-20), -torch.inf)
    return Atoms(y, log_mass, label, share, own)


def _outside(label: Tensor, share: Tensor, window: Window, clusters: int) -> tuple[Tensor, Tensor]:
    """What each query's window takes of each cluster, (heads, n, w, K), and the share that is left, (heads, n, K)."""
    inside = (share[:, window.place] * window.inside)[..., None]
    taken = torch.nn.functional.one_hot(label[:, window.place], clusters).to(share) * inside
    rest = 1 - taken.sum(-2)
    return taken, torch.where(rest < 1e-3, 0.0, rest)  # a thousandth of a cluster has no mean to speak of


def k_means(z: Tensor, a: Tensor, residual: float, most: int) -> tuple[Tensor, int]:
    """Weighted k-means of z (heads, n, f) with weights a (heads, n): labels (heads, n), and the largest number used.

    Starts at the token of largest weight and goes on with the one of largest a d^2 (farthest first: no chance in it)
    until sum a d^2 <= residual, head by head.
    """
    first = a.argmax(-1)
    chosen = [first]
    d2 = (z - _rows(z, first[:, None])).square().sum(-1)
    left = [(a * d2).sum(-1)]
    while len(chosen) < most and bool((left[-1] > residual).any()):
        j = (a * d2).argmax(-1)
        chosen.append(j)
        d2 = torch.minimum(d2, (z - _rows(z, j[:, None])).square().sum(-1))
        left.append((a * d2).sum(-1))
    top = len(chosen)
    number = ((torch.stack(left, -1) > residual).sum(-1) + 1).clamp_max(top)
    used = torch.arange(top, device=z.device) < number[:, None]
    centres = _rows(z, torch.stack(chosen, -1))
    for _ in range(ROUNDS):
        label = _nearest(z, centres, used)
        weighed = torch.nn.functional.one_hot(label, top).to(z.dtype) * a[..., None]
        mass = weighed.sum(-2)
        centres = torch.where((mass > 0)[..., None], weighed.mT @ z / mass.clamp_min(1e-30)[..., None], centres)
    return _nearest(z, centres, used), top


def _nearest(z: Tensor, centres: Tensor, used: Tensor) -> Tensor:
    distance = centres.square().sum(-1)[:, None] - 2 * z @ centres.mT
    return distance.masked_fill(~used[:, None], math.inf).argmin(-1)


def _rows(z: Tensor, index: Tensor) -> Tensor:
    return z.gather(-2, index[..., None].expand(*index.shape, z.shape[-1]))


def _spread(x: Tensor, a: Tensor) -> Tensor:
    """Total variance of x (heads, n, f) under the weights a; no less than rounding leaves of a constant."""
    mean = (a[..., None] * x).sum(-2, keepdim=True)
    size = (a * x.square().sum(-1)).sum(-1)
    return (a * (x - mean).square().sum(-1)).sum(-1).clamp_min(torch.finfo(x.dtype).eps * size + 1e-30)


def _root(S: Tensor) -> Tensor:
    """F with F F^T = S."""
    values, vectors = torch.linalg.eigh(S)
    return vectors * values.clamp_min(0).sqrt()[..., None, :]
