"""The heads' weights as a drift wants them: prepared once, used at every stage of a flow.

Low-rank factors are never multiplied out. What has full rank acts where it is cheapest: K on the queries, V after the
average, so that keys and values are the tokens themselves. beta is applied once, as the averages' scale where it is one
number and in the queries where it is not.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

import torch
from torch import Tensor

from attn_flow.averages import dense, sinkhorn
from attn_flow.base.words import introduce

Kind = Literal["softmax", "unnormalised", "hardmax", "sinkhorn", "linear", "relu", "sigmoid"]
ALL = slice(None)
NO_BATCH = torch.Size(())


@dataclass(frozen=True, eq=False, repr=False)
class Projections:
    """Maps from tokens to queries, keys and values of every head, and from the heads' averages to the drift.

    None stands for the identity. `precise`: whether float32 is too coarse for the logits, or a function that tells it
    from queries, keys and scale; None: each drift looks.
    """

    query: Tensor | None  # (..., heads, k, d)
    query_bias: Tensor | None  # (..., heads, 1, k)
    query_scale: Tensor | None  # (..., heads, 1, 1): beta where it is no number and the queries are the tokens
    key: Tensor | None  # (..., heads, k, d)
    value: Tensor | None  # (..., heads, v, d)
    output: Tensor | None  # (..., heads, d, v)
    constant: Tensor | None  # (..., 1, d)
    scale: float
    heads: int
    dim: int
    kind: Kind
    causal: bool
    self_attention: bool
    cold: bool
    truncation: float | None
    batch: torch.Size
    given: Mapping[str, Any]
    precise: bool | Callable[[Tensor, Tensor, float], bool] | None = None

    @classmethod
    def of(
        cls,
        Q: Tensor,
        K: Tensor | None,
        V: Tensor | None,
        O: Tensor | None,
        beta: float | Tensor,
        query_bias: Tensor | None = None,
        value_bias: Tensor | None = None,
        *,
        kind: Kind = "softmax",
        causal: bool = False,
        self_attention: bool = True,
        truncation: float | None = None,
        identity_query: bool = False,
        batch: torch.Size = NO_BATCH,
    ) -> Projections:
        """Of weights (..., heads, k, d), (..., heads, d, v) and beta, a number or (..., heads), all unchecked."""
        given = {name: z for name, z in locals().items() if name != "cls"}
        heads, k, d = Q.shape[-3:]
        keys_stay = K is None or k >= d
        values_stay = V is None or O is None or V.shape[-2] >= d
        query, bias = (None if identity_query else Q), query_bias
        if K is not None and keys_stay:
            query = K.mT @ Q
            bias = None if bias is None else (K.mT @ bias[..., None])[..., 0]
        query_scale, cold = None, not isinstance(beta, Tensor) and beta == math.inf
        if isinstance(beta, Tensor):
            per_head = beta.to(Q.dtype)[..., None]
            bias = None if bias is None else per_head * bias
            if query is None:
                query_scale = per_head[..., None]
            else:
                query = per_head[..., None] * query
        output = O
        if V is not None and values_stay:
            output = V if O is None else O @ V
        return cls(
            query=query,
            query_bias=None if bias is None else bias[..., None, :],
            query_scale=query_scale,
            key=None if keys_stay else K,
            value=None if values_stay else V,
            output=output,
            constant=None if value_bias is None else value_bias[..., None, :],
            scale=1.0 if isinstance(beta, Tensor) or cold else float(beta),
            heads=heads,
            dim=d,
            kind=kind,
            causal=causal,
            self_attention=self_attention,
            cold=cold,
            truncation=truncation,
            batch=batch,
            given=given,
        )

    def __repr__(self) -> str:
        return introduce(self, "query", "key", "value", "output", "scale", "kind", "causal", "cold", "precise")

    @property
    def double(self) -> Projections:
        """The same in float64, from the weights as they were given: a product rounded to float32 is too coarse."""
        return self._in_double() if torch.compiler.is_compiling() else self._double

    @cached_property
    def _double(self) -> Projections:
        return self._in_double()

    def _in_double(self) -> Projections:
        cast: dict[str, Any] = {name: z.double() if isinstance(z, Tensor) else z for name, z in self.given.items()}
        return replace(Projections.of(**cast), precise=None if self.precise is None else False)

    @property
    def logit_terms(self) -> tuple[Tensor, Tensor]:
        """scale |q| |k| <= a r^2 + b r for tokens no longer than r: a and b, ()."""
        like = self.tensors[0] if self.tensors else torch.ones(())
        q, k = (like.new_ones(()) if z is None else _norm_bound(z) for z in (self.query, self.key))
        q = q if self.query_scale is None else q * self.query_scale.amax()
        b = q.new_zeros(()) if self.query_bias is None else self.query_bias.norm(dim=-1).amax()
        return self.scale * q * k, self.scale * b * k

    def logit_bound(self, radius: float) -> Tensor:
        """scale |q| |k| is no larger for tokens of at most this length, ()."""
        a, b = self.logit_terms
        return (a * radius + b) * radius

    @property
    def tensors(self) -> list[Tensor]:
        queries = (self.query, self.query_bias, self.query_scale)
        return [z for z in (*queries, self.key, self.value, self.output, self.constant) if z is not None]

    @property
    def shared_out(self) -> bool:
        """Whether every query shares out one unit of attention, so that scores matter relative to each other."""
        return self.kind in ("softmax", "sinkhorn")

    @property
    def same_queries_and_keys(self) -> bool:
        """Whether a token is its own query and key, up to the scale."""
        return all(z is None for z in (self.query, self.query_bias, self.query_scale, self.key))

    @property
    def key_width(self) -> int:
        return self.dim if self.key is None else self.key.shape[-2]

    @property
    def value_width(self) -> int:
        return self.dim if self.value is None else self.value.shape[-2]

    def queries(self, x: Tensor, heads: slice = ALL) -> Tensor:
        """Q x + b in the space where keys live, (..., heads, n, k)."""
        if self.query is None:
            q = x[..., None, :, :].expand(*x.shape[:-2], len(range(self.heads)[heads]), *x.shape[-2:])
            q = q if self.query_scale is None else q * self.query_scale[..., heads, :, :]
        else:
            q = _per_head(x, self.query[..., heads, :, :])
        return q if self.query_bias is None else q + self.query_bias[..., heads, :, :]

    def keys(self, y: Tensor, heads: slice = ALL) -> Tensor:
        """K y, or y itself where K acts on the queries, (..., heads or 1, n, k)."""
        return y[..., None, :, :] if self.key is None else _per_head(y, self.key[..., heads, :, :])

    def values(self, y: Tensor, heads: slice = ALL) -> Tensor:
        """V y, or y itself where V acts on the average, (..., heads or 1, n, v)."""
        return y[..., None, :, :] if self.value is None else _per_head(y, self.value[..., heads, :, :])

    def key_bias(self, y: Tensor, log_weights: Tensor | None) -> Tensor | None:
        """Log weights of the keys (..., 1, n); with Sinkhorn's potential added, (..., heads, n)."""
        log_w = None if log_weights is None else log_weights[..., None, :]
        if self.kind != "sinkhorn":
            return log_w
        if log_w is None:
            log_w = torch.full_like(y[..., 0], -math.log(y.shape[-2]))[..., None, :]
        q, k = self.queries(y) * self.scale, self.keys(y)
        if self.loses_digits(q, k, 1.0):
            return self.double.key_bias(y.double(), log_w[..., 0, :].double())
        return sinkhorn.potential(q, k, log_w) + log_w

    def loses_digits(self, q: Tensor, k: Tensor, scale: float) -> bool:
        """Whether logits scale <q, k> need float64: as chosen for the whole flow, or by looking."""
        if self.precise is not None:
            precise = self.precise(q, k, scale) if callable(self.precise) else self.precise
            return precise and q.dtype == torch.float32 and not torch.is_autocast_enabled(q.device.type)
        return dense.loses_digits(q, k, scale)

    def summed(self, average: Tensor, heads: slice = ALL) -> Tensor:
        """sum_h O_h (average)_h, or O_h V_h where the tokens themselves were averaged: (..., n, d)."""
        if self.output is None:
            return average[..., 0, :, :] if average.shape[-3] == 1 else average.sum(-3)
        stacked = self.output[..., heads, :, :].mT.flatten(-3, -2)  # (..., heads * v, d)
        return average.transpose(-2, -3).flatten(-2) @ stacked

    def output_norm(self, head: slice) -> Tensor | float:
        """How much longer `summed` makes the average of one head."""
        if self.output is None:
            return 1.0
        return torch.linalg.matrix_norm(self.output[..., head, :, :], ord=2)[..., 0]

    def with_constant(self, drift: Tensor) -> Tensor:
        return drift if self.constant is None else drift + self.constant


def _per_head(x: Tensor, weight: Tensor) -> Tensor:
    """Every head's weight on every token: x (..., n, d), weight (..., heads, k, d) -> (..., heads, n, k)."""
    heads, k, _ = weight.shape[-3:]
    return (x @ weight.flatten(-3, -2).mT).unflatten(-1, (heads, k)).transpose(-2, -3)


def _norm_bound(weight: Tensor) -> Tensor:
    """The largest spectral norm of the heads, from above, without an SVD: |A| <= |(A A^T)^4|_F^{1/8}, ()."""
    A = weight if weight.shape[-2] <= weight.shape[-1] else weight.mT
    size = torch.linalg.vector_norm(A, dim=(-2, -1), keepdim=True).clamp_min(torch.finfo(A.dtype).tiny)
    gram = (A / size) @ (A / size).mT
    square = gram @ gram
    return (size[..., 0, 0] * torch.linalg.vector_norm(square @ square, dim=(-2, -1)) ** 0.125).amax()
