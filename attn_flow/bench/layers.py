"""The layer and its form of nn.MultiheadAttention beside torch's own: forward, forward and backward, what is saved."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor, nn

from attn_flow.bench.measure import Ratio, interleaved
from attn_flow.nn import ContinuousAttentionLayer, ContinuousMultiheadAttention


def layer_ratios(quick: bool) -> Iterator[Ratio]:
    """Ours / torch's module of the same widths: nn.MultiheadAttention, nn.TransformerEncoderLayer (fused forward)."""
    batch, n, dim, heads = (4, 32, 64, 4) if quick else (32, 128, 256, 8)
    x = torch.randn(batch, n, dim, generator=torch.Generator().manual_seed(0))
    attention = nn.MultiheadAttention(dim, heads, batch_first=True)
    encoder = nn.TransformerEncoderLayer(dim, heads, 4 * dim, dropout=0.0, batch_first=True).eval()
    drop_in = partial(ContinuousMultiheadAttention.from_multihead, attention)
    ours: dict[str, Callable[[Tensor], Tensor]] = {
        "drop-in, one Euler step": partial(_itself, drop_in()),
        "drop-in, one RK4 step": partial(_itself, drop_in(step="rk4")),
        "layer, one Euler step": ContinuousAttentionLayer(dim, heads, step="euler"),
        "layer, one RK4 step (default)": ContinuousAttentionLayer(dim, heads),
        "layer, 8 RK4 steps": ContinuousAttentionLayer(dim, heads, steps=8),
        "layer, 8 RK4 steps, checkpointed": ContinuousAttentionLayer(dim, heads, steps=8, checkpoint=True),
        "encoder layer, one Euler step": _with_flow(encoder, "euler"),
        "encoder layer, one RK4 step": _with_flow(encoder, "rk4"),
    }
    for name, function in ours.items():
        rounds = 3 if quick or "8 RK4" in name else 15  # long ones vary less
        timed = partial(interleaved, rounds=rounds, clock=time.process_time)
        theirs = encoder if name.startswith("encoder") else partial(_itself, attention)
        with torch.no_grad():
            forward = timed({"ours": partial(function, x), "theirs": partial(theirs, x)})
        both = timed({"ours": partial(_backward, function, x), "theirs": partial(_backward, theirs, x)})
        yield {
            "case": f"{name} ({batch}, {n}, {dim}), {heads} heads",
            "against": "nn.TransformerEncoderLayer" if theirs is encoder else "nn.MultiheadAttention",
            "ratio": both["ours"] / both["theirs"],
            "forward_ratio": forward["ours"] / forward["theirs"],
            "saved_ratio": _saved(function, x) / _saved(theirs, x),
            "saved_mb": _saved(function, x) / 1e6,
        }


def _with_flow(encoder: nn.TransformerEncoderLayer, step: str) -> nn.TransformerEncoderLayer:
    """The same layer with continuous attention."""
    other = copy.deepcopy(encoder)
    other.self_attn = ContinuousMultiheadAttention.from_multihead(encoder.self_attn, step=step)  # type: ignore[assignment]
    return other


def _itself(module: nn.Module, x: Tensor) -> Tensor:
    return module(x, x, x, need_weights=False)[0]


def _backward(function: Callable[[Tensor], Tensor], x: Tensor) -> None:
    function(x.detach().requires_grad_()).square().sum().backward()


def _saved(function: Callable[[Tensor], Tensor], x: Tensor) -> int:
    """Bytes that the forward pass keeps for the backward pass, each storage counted once."""
    held: dict[int, int] = {}

    def keep(z: Tensor) -> Tensor:
        held[z.untyped_storage().data_ptr()] = z.untyped_storage().nbytes()
        return z

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda z: z):
        y = function(x.detach().requires_grad_())
    del y
    return sum(held.values())
