"""Where tokens stand, as the scores of a layer meet it: rotary positions (RoPE) and relative position biases.

With R_i a rotation by the angles of place i and b a table, token i scores token j by
    beta <R_i (Q x_i + b_Q), R_j (K x_j + b_K)> + b(i, j).
So a token is a particle with a place: its key is turned by it, or has one coordinate more for every place. A key bias
cancels in a softmax unless keys are turned.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from attn_flow.hooks.layout import Block
from attn_flow.hooks.weights import projections


@dataclass(frozen=True, eq=False)
class Places:
    """The places 0 to n - 1 of one layer: what each does to the queries and keys of a token that stands there.

    angles: cos and sin (n, r) of the angles that turn the first r coordinates, in pairs (l, l + r/2). key_bias
    (heads, k): of keys, before they are turned. table: b (heads, n, n), added to the scores whatever beta is.

    Example:
        >>> places = Places(table=torch.tensor([[[0.0, -1.0], [-1.0, 0.0]]]))
        >>> q, k = places.queries(torch.ones(1, 2, 3), torch.ones(1, 1)), places.keys(torch.ones(1, 2, 3))
        >>> q @ k.mT  # 3 of the contents, less one for another place
        tensor([[[3., 2.],
                 [2., 3.]]])
    """

    angles: tuple[Tensor, Tensor] | None = None
    key_bias: Tensor | None = None
    table: Tensor | None = None

    @property
    def width(self) -> int:
        """Coordinates that places add to queries and keys."""
        return 0 if self.table is None else self.table.shape[-1]

    def queries(self, q: Tensor, beta: Tensor) -> Tensor:
        """Queries q (heads, n, k) with their places, for scores that beta (heads, 1) will multiply."""
        q = self._turned(q)
        return q if self.table is None else torch.cat([q, self.table[:, : q.shape[-2]] / beta[..., None]], dim=-1)

    def keys(self, k: Tensor) -> Tensor:
        """Keys k (heads, n, k) with their places."""
        k = self._turned(k if self.key_bias is None else k + self.key_bias[:, None])
        if self.table is None:
            return k
        places = torch.eye(k.shape[-2], self.width, dtype=k.dtype, device=k.device)
        return torch.cat([k, places.expand(len(k), -1, -1)], dim=-1)

    def _turned(self, z: Tensor) -> Tensor:
        if self.angles is None:
            return z
        cos, sin = (angle[: z.shape[-2]] for angle in self.angles)
        r = cos.shape[-1]
        a, b = z[..., : r // 2], z[..., r // 2 : r]
        return torch.cat([z[..., :r] * cos + torch.cat([-b, a], dim=-1) * sin, z[..., r:]], dim=-1)


def read_places(block: Block, n: int) -> Places | None:
    """The places of n tokens in a layer; None where they stay out of its scores, or enter in a way not known here.

    Example:
        >>> from attn_flow.hooks import blocks
        >>> from attn_flow.hooks.demo import tiny_bert
        >>> read_places(blocks(tiny_bert()[0])[0], 8) is None  # positions are in the tokens
        True
    """
    arch = block.architecture
    with torch.no_grad():
        if arch.angles is not None:
            weight, bias = projections(block)["k"]
            cos, sin = (angle.to(weight) for angle in arch.angles(block.root, block.module, n))
            return Places((cos, sin), bias)
        if arch.score_table is not None:
            return Places(table=arch.score_table(block.root, n).to(projections(block)["k"][0]))
    return None
