"""Where tokens stand, as the scores of a layer meet it: rotary positions, relative biases, disentangled positions.

With R_i a rotation by the angles of place i (RoPE), b a table (T5, MPNet) and c, p linear in a query and a key
(DeBERTa), token i with q_i = Q x_i + b_Q scores token j with k_j = K x_j + b_K by
    beta (<R_i q_i, R_j k_j> + c(q_i; i, j) + p(k_j; i, j)) + b(i, j).
So a token is a particle with a place: its key is turned by it, or has more coordinates, one or two for every place.
A key bias cancels in a softmax unless keys are turned, or met by places.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from attn_flow.hooks.layout import Block
from attn_flow.hooks.weights import projections


@dataclass(frozen=True, eq=False)
class Places:
    """The places 0 to count - 1 of one layer: what each does to the queries and keys of a token that stands there.

    angles: cos and sin (count, r) of the angles that turn the first r coordinates, in pairs (l, l + r/2). key_bias
    (heads, k): of keys, before anything else. table: b (heads, count, count), added to the scores whatever beta is.
    meet: c(q; i, j) + p(k; i, j) (heads, count, count) of queries and keys (heads, count, k), linear in each.

    Example:
        >>> places = Places(2, table=torch.tensor([[[0.0, -1.0], [-1.0, 0.0]]]))
        >>> q, k = places.queries(torch.ones(1, 2, 3), torch.ones(1, 1)), places.keys(torch.ones(1, 2, 3))
        >>> q @ k.mT  # 3 of the contents, less one for another place
        tensor([[[3., 2.],
                 [2., 3.]]])
    """

    count: int
    angles: tuple[Tensor, Tensor] | None = None
    key_bias: Tensor | None = None
    table: Tensor | None = None
    meet: Callable[[Tensor, Tensor], Tensor] | None = None

    @property
    def width(self) -> int:
        """Coordinates that places add to queries and keys."""
        return self.count * ((self.table is not None) + 2 * (self.meet is not None))

    def queries(self, q: Tensor, beta: Tensor) -> Tensor:
        """Queries q (heads, n, k) with their places, for scores that beta (heads, 1) will multiply."""
        n, parts = q.shape[-2], [self._turned(q)]
        if self.table is not None:
            parts.append(self.table[:, :n] / beta[..., None])
        if self.meet is not None:
            everywhere = pad(q, (0, 0, 0, self.count - n))
            parts += [self.meet(everywhere, torch.zeros_like(everywhere))[:, :n], self._unit(q)]
        return torch.cat(parts, dim=-1)

    def keys(self, k: Tensor) -> Tensor:
        """Keys k (heads, n, k) with their places."""
        k = k if self.key_bias is None else k + self.key_bias[:, None]
        n, parts = k.shape[-2], [self._turned(k)]
        if self.table is not None:
            parts.append(self._unit(k))
        if self.meet is not None:
            everywhere = pad(k, (0, 0, 0, self.count - n))
            parts += [self._unit(k), self.meet(torch.zeros_like(everywhere), everywhere).mT[:, :n]]
        return torch.cat(parts, dim=-1)

    def _unit(self, z: Tensor) -> Tensor:
        """A unit vector for every place, (heads, n, count)."""
        return torch.eye(z.shape[-2], self.count, dtype=z.dtype, device=z.device).expand(len(z), -1, -1)

    def _turned(self, z: Tensor) -> Tensor:
        if self.angles is None:
            return z
        cos, sin = (angle[: z.shape[-2]] for angle in self.angles)
        r = cos.shape[-1]
        a, b = z[..., : r // 2], z[..., r // 2 : r]
        return torch.cat([z[..., :r] * cos + torch.cat([-b, a], dim=-1) * sin, z[..., r:]], dim=-1)


def read_places(found: Sequence[Block], n: int) -> list[Places | None]:
    """The places of n tokens, layer by layer; None where they stay out of its scores, or enter in a way not known here.

    A table that all layers add is held once.

    Example:
        >>> from attn_flow.hooks import blocks
        >>> from attn_flow.hooks.demo import tiny_bert
        >>> read_places(blocks(tiny_bert()[0]), 8)  # positions are in the tokens
        [None, None]
    """
    tables: dict[Any, Tensor] = {}
    return [_of_layer(block, n, tables) if block.knows_places else None for block in found]


def _of_layer(block: Block, n: int, tables: dict[Any, Tensor]) -> Places:
    arch, (weight, bias) = block.architecture, projections(block)["k"]
    with torch.no_grad():
        if arch.angles is not None:
            cos, sin = (angle.to(weight) for angle in arch.angles(block.root, block.module, n))
            return Places(n, (cos, sin), bias)
        if arch.score_table is not None:
            key = arch.score_table, block.root, weight.dtype, weight.device
            if key not in tables:
                tables[key] = arch.score_table(block.root, n).to(weight)
            return Places(n, table=tables[key])
    terms, own = arch.score_terms, next(block.module.parameters()).dtype
    assert terms is not None  # or places would not be known
    beta = block.beta(weight.shape[-2])

    def meet(q: Tensor, k: Tensor) -> Tensor:
        with torch.no_grad():
            return terms(block.root, block.module, q.to(own), k.to(own)).to(q) / beta

    return Places(n, key_bias=bias, meet=meet)
