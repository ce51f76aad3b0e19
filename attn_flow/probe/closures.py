"""What a layer's attention does, predicted from its weights and a short description of the cloud.

Attention is sum_h O_h V_h m_beta[mu](G_h x + ...). Replacing the cloud mu by a measure with few numbers (its mean, its
covariance, a few of its tokens as atoms) closes the dynamics. A head sees tokens only through (K y, V y), so every
measure lives on that joint space R^{k+v}, tilted along (Q x + b, 0); the prediction is the second half of its mean.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from attn_flow.attention import Attention
from attn_flow.measures import Cloud, EllipsoidSupport, Gaussian, Measure, Mixture, UniformSphere

WINDOW = (-2, -1, 0, 1, 2)  # the tokens a token sees for itself: its neighbours and itself
SINKS = 4  # tokens of a text that a head's mean query scores highest
CAP = 2.0  # standard deviations of the logits at which the pull of the bulk saturates


@dataclass(frozen=True, eq=False)
class OwnTokens:
    """A few tokens for each query, x (..., n, w, d), shown where `seen` (..., n, w): mass 1/w each.

    The i-th query g_i (..., n, d) meets the i-th row of tokens only: itself, its neighbours.
    """

    x: Tensor
    seen: Tensor

    def to(self, *args: Any, **kwargs: Any) -> OwnTokens:
        x = self.x.to(*args, **kwargs)
        return OwnTokens(x, self.seen.to(x.device))

    def _logits(self, g: Tensor, beta: float | Tensor) -> Tensor:
        scores = (self.x * g[..., None, :]).sum(-1)
        if not isinstance(beta, Tensor) and math.isinf(beta):
            best = torch.where(self.seen, scores, -torch.inf).amax(-1, keepdim=True)
            return torch.where(self.seen & (scores >= best), 0.0, -torch.inf)
        return torch.where(
            self.seen, torch.as_tensor(beta, dtype=g.dtype, device=g.device)[..., None] * scores, -torch.inf
        )

    def log_partition(self, g: Tensor, beta: float | Tensor) -> Tensor:
        if not isinstance(beta, Tensor) and math.isinf(beta):
            return torch.where(self.seen, (self.x * g[..., None, :]).sum(-1), -torch.inf).amax(-1)
        return (self._logits(g, beta).logsumexp(-1) - math.log(self.x.shape[-2])) / beta

    def tilted_mean(self, g: Tensor, beta: float | Tensor) -> Tensor:
        shown = self.seen.any(-1, keepdim=True)
        p = torch.where(shown, self._logits(g, beta), 0.0).softmax(-1)  # a query with no token of its own: any mean
        return (p[..., None] * self.x).sum(-2)


@dataclass(frozen=True, eq=False)
class HeadSpace:
    """One text as its heads see it: y = (K x, V x) and g = (Q x + b, 0), both (heads, n, k + v)."""

    attention: Attention
    x: Tensor
    special: Tensor  # (n,) True for [CLS], [SEP], ...

    @cached_property
    def y(self) -> Tensor:
        return torch.cat([_each_head(self.x, self.attention.K), _each_head(self.x, self.attention.V)], dim=-1)

    @cached_property
    def g(self) -> Tensor:
        q = _each_head(self.x, self.attention.Q)
        if self.attention.query_bias is not None:
            q = q + self.attention.query_bias[:, None, :]
        return torch.cat([q, torch.zeros_like(_each_head(self.x, self.attention.V))], dim=-1)

    def drift(self, mu: Measure, beta: float | Tensor | None = None) -> Tensor:
        """sum_h O_h V_h m_beta[mu](G_h x), plus the constant drift, (n, d)."""
        return self.assemble(self.per_head(mu, beta))

    def per_head(self, mu: Measure, beta: float | Tensor | None = None) -> Tensor:
        """V_h m_beta[mu](G_h x), (heads, n, v)."""
        b = self.attention.beta if beta is None else beta
        if isinstance(b, Tensor):
            b = b.expand(self.attention.heads)[:, None]
        k = self.attention.Q.shape[-2]
        return mu.tilted_mean(self.g, b)[..., k:]

    def assemble(self, average: Tensor) -> Tensor:
        assert self.attention.O is not None  # checked by `head_space`
        drift = torch.einsum("hnv,hdv->nd", average, self.attention.O)
        return drift if self.attention.value_bias is None else drift + self.attention.value_bias


def head_space(attention: Attention, x: Tensor, special: Tensor | None = None) -> HeadSpace:
    """One text x (n, d) through an attention with factored weights."""
    if x.ndim != 2 or x.shape[1] != attention.dim:
        raise ValueError(f"x has shape {tuple(x.shape)}, expected one text (n, d) = (n, {attention.dim}).")
    eye = torch.eye(attention.dim, dtype=x.dtype, device=x.device).expand(attention.heads, -1, -1)
    filled: dict[str, Any] = {name: eye for name in ("K", "V", "O") if getattr(attention, name) is None}
    if special is None:
        special = torch.zeros(x.shape[0], dtype=torch.bool, device=x.device)
    return HeadSpace(replace(attention, **filled), x, special)


def _each_head(x: Tensor, weight: Tensor | None) -> Tensor:
    assert weight is not None  # filled in by `head_space`
    return torch.einsum("nd,hkd->hnk", x, weight)


def gaussian(space: HeadSpace, cap: float = math.inf) -> Gaussian:
    """Mean and covariance of the text, unshrunk: the moments themselves, not an estimate of a larger population's."""
    return Gaussian.fit(Cloud(space.y), shrinkage=0.0, cap=cap)


def mixture(space: HeadSpace, *, window: tuple[int, ...] = (0,), sinks: int = 0, cap: float = CAP) -> Mixture:
    """Atoms (special tokens, and `sinks` tokens that a head's mean query scores highest), each token's own window, and
    a Gaussian for all the rest. Masses count tokens."""
    y, n = space.y, space.x.shape[0]
    heads = y.shape[0]
    atom = space.special.expand(heads, n).clone()
    if sinks:
        score = (space.g.mean(-2, keepdim=True) @ y.mT)[:, 0]
        best = score.masked_fill(atom, -torch.inf).topk(min(sinks, int((~space.special).sum()) - 1)).indices
        atom.scatter_(1, best, True)
    bulk = ~atom
    if int(bulk.sum(-1).min()) < 2:
        raise ValueError(f"a text of {n} tokens with {int(atom.sum(-1).max())} atoms leaves no bulk; use longer texts.")
    components: list[Measure] = [Gaussian.fit(Cloud(y, mask=bulk), shrinkage=0.0, cap=cap)]
    masses = [bulk.sum(-1).to(y.dtype)]
    if bool(atom.any()):
        components.append(Cloud(y, mask=atom))
        masses.append(atom.sum(-1).to(y.dtype))
    if window:
        place = torch.arange(n, device=y.device)[:, None] + torch.tensor(window, device=y.device)
        inside = (place >= 0) & (place < n)
        place = place.clamp(0, n - 1)
        components.append(OwnTokens(y[:, place], inside & bulk[:, place]))
        masses.append(torch.full_like(masses[0], len(window)))
    return Mixture(components, torch.stack(masses, dim=-1))


def closure(space: HeadSpace) -> Mixture:
    """The library's own closure: special tokens and sinks as atoms, neighbours, a saturating Gaussian bulk."""
    return mixture(space, window=WINDOW, sinks=SINKS)


def _sphere(space: HeadSpace) -> Tensor:
    radius = float(space.x.norm(dim=-1).square().mean().sqrt())
    return space.attention.with_beta(math.inf).drift(space.x, UniformSphere(space.attention.dim, radius))


def _ellipsoid(space: HeadSpace) -> Tensor:
    # An image of an ellipsoid is one; its radius is that of the tokens' own space, sqrt of the rank of n tokens in R^d.
    rank = min(space.x.shape[0] - 1, space.x.shape[1])
    support = EllipsoidSupport.fit(Cloud(space.y), shrinkage=0.0, rho=math.sqrt(max(rank, 1)))
    return space.drift(support, math.inf)


SUPPORTS: dict[str, tuple[str, Callable[[HeadSpace], Tensor]]] = {
    "sphere": ("full sphere at zero temperature", _sphere),
    "ellipsoid": ("fitted ellipsoid at zero temperature", _ellipsoid),
    "hardmax": ("the tokens themselves at zero temperature", lambda s: s.attention.with_beta(math.inf).drift(s.x)),
    "mean": ("plain mean", lambda s: s.drift(Cloud(s.y), 0.0)),
    "gaussian": ("Gaussian", lambda s: s.drift(gaussian(s))),
    "saturated": ("Gaussian, saturated at 1.5 standard deviations", lambda s: s.drift(gaussian(s, cap=1.5))),
    "mixture": ("special tokens, the token itself, Gaussian bulk", lambda s: s.drift(mixture(s))),
    "closure": ("special tokens, sinks, neighbours, Gaussian bulk", lambda s: s.drift(closure(s))),
}


def agreement(predicted: Tensor, computed: Tensor) -> tuple[float, float]:
    """Mean cosine over tokens, and the explained fraction 1 - |predicted - computed|^2 / |computed - its mean|^2."""
    cosine = torch.nn.functional.cosine_similarity(predicted, computed, dim=-1).mean()
    spread = (computed - computed.mean(0)).square().sum()
    return float(cosine), float(1 - (predicted - computed).square().sum() / spread)
