"""One text as the heads of a layer see it.

A head sees tokens only through (K y, V y), so every law of tokens lives on that joint space R^{k+v}, tilted along
(Q x + b, 0); the prediction is the second half of its tilted mean. Where positions enter the scores, keys and queries
hold the tokens' places (`hooks.positions`), and laws are laws of contents and places.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from attn_flow.attention import Attention
from attn_flow.hooks.positions import Positions
from attn_flow.measures import Measure


@dataclass(frozen=True, eq=False)
class HeadSpace:
    """y = (K x, V x) and g = (Q x + b, 0), both (heads, n, k + v), of one text x (n, d)."""

    attention: Attention
    x: Tensor
    special: Tensor  # (n,) True for [CLS], [SEP], ...
    sees: Tensor | None = None  # (n, n) True where token i may attend to token j; None: everywhere
    places: Positions | None = None  # what the places of tokens do to queries and keys; None: nothing

    @property
    def n(self) -> int:
        return self.x.shape[0]

    @property
    def k(self) -> int:
        """Width of keys, the first part of y."""
        return self.attention.tensors["Q"].shape[-2] + (0 if self.places is None else self.places.width)

    @cached_property
    def y(self) -> Tensor:
        keys = _each_head(self.x, self.attention.K)
        keys = keys if self.places is None else self.places.keys(keys)
        return torch.cat([keys, _each_head(self.x, self.attention.V)], dim=-1)

    @cached_property
    def g(self) -> Tensor:
        q = _each_head(self.x, self.attention.Q)
        if self.attention.query_bias is not None:
            q = q + self.attention.query_bias[:, None, :]
        q = q if self.places is None else self.places.queries(q, self.beta)
        return torch.cat([q, torch.zeros_like(self.y[..., self.k :])], dim=-1)

    @cached_property
    def beta(self) -> Tensor:
        """(heads, 1)."""
        return (
            torch.as_tensor(self.attention.beta, dtype=torch.float64).to(self.x).expand(self.attention.heads)[:, None]
        )

    @cached_property
    def logits(self) -> Tensor:
        """beta <Q x_i + b, K x_j> with what places add, (heads, n, n), -inf where token i may not see j."""
        scores = (self.beta[..., None] * self.g[..., : self.k]) @ self.y[..., : self.k].mT
        return scores if self.sees is None else scores.masked_fill(~self.sees, -torch.inf)

    def per_head(self, mu: Measure, beta: float | Tensor | None = None) -> Tensor:
        """V_h m_beta[mu](G_h x), (heads, n, v)."""
        return mu.tilted_mean(self.g, self.beta if beta is None else beta)[..., self.k :]

    def drift(self, mu: Measure, beta: float | Tensor | None = None) -> Tensor:
        """sum_h O_h V_h m_beta[mu](G_h x), plus the constant drift, (n, d)."""
        return self.assembled(self.per_head(mu, beta))

    def assembled(self, average: Tensor) -> Tensor:
        """Heads' averages (heads, n, v) as the layer adds them, (n, d)."""
        assert self.attention.O is not None  # filled in by `as_heads_see`
        drift = torch.einsum("hnv,hdv->nd", average, self.attention.O)
        return drift if self.attention.value_bias is None else drift + self.attention.value_bias


def as_heads_see(
    attention: Attention,
    x: Tensor,
    special: Tensor | None = None,
    sees: Tensor | None = None,
    places: Positions | None = None,
) -> HeadSpace:
    """One text x (n, d) through an attention; a causal attention sees no later token."""
    if x.ndim != 2 or x.shape[1] != attention.dim:
        raise ValueError(f"x has shape {tuple(x.shape)}, expected one text (n, d) = (n, {attention.dim}).")
    eye = torch.eye(attention.dim, dtype=x.dtype, device=x.device).expand(attention.heads, -1, -1)
    filled: dict[str, Any] = {name: eye for name in ("K", "V", "O") if getattr(attention, name) is None}
    n = x.shape[0]
    if special is None:
        special = torch.zeros(n, dtype=torch.bool, device=x.device)
    if attention.causal:
        past = torch.ones(n, n, dtype=torch.bool, device=x.device).tril()
        sees = past if sees is None else past & sees
    return HeadSpace(replace(attention, **filled), x, special, sees, places)


def _each_head(x: Tensor, weight: Tensor | None) -> Tensor:
    assert weight is not None  # filled in by `as_heads_see`
    return torch.einsum("nd,hkd->hnk", x, weight)
