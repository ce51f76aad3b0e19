"""Batches of attentions and of clouds, as predictions use them."""

from __future__ import annotations

import torch
from torch import Tensor

from attn_flow.attention import Attention
from attn_flow.measures import Cloud
from attn_flow.transport.distances import wasserstein


def elements(attention: Attention) -> tuple[torch.Size, list[Attention]]:
    """The batch shape of the weights, and the attention of every element; a batch of betas alone is none."""
    G, V, biases = attention.G, attention.OV, (attention.G_bias, attention.value_bias)
    axes = (G.shape[:-3], V.shape[:-3], *(b.shape[:-k] for b, k in zip(biases, (2, 1)) if b is not None))
    shape = torch.broadcast_shapes(*axes)
    if not shape:
        return shape, [attention]
    G, V = (A.expand(*shape, *A.shape[-3:]).flatten(0, len(shape) - 1) for A in (G, V))
    b, c = (
        z if z is None else z.expand(*shape, *z.shape[-k:]).flatten(0, len(shape) - 1) for z, k in zip(biases, (2, 1))
    )
    return shape, [
        Attention.from_matrices(
            G[i], V[i], query_bias=None if b is None else b[i], value_bias=None if c is None else c[i]
        )
        for i in range(len(G))
    ]


def w2(a: Cloud, b: Cloud, method: str = "auto") -> Tensor:
    """The Wasserstein distances W_2 of two batches of clouds."""
    return wasserstein(a, b, method=method)
