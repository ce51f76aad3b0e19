"""How much of a layer's logits closures do not hold: nothing, where contents and known places are all there is."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from attn_flow.hooks.attachment import evaluation_mode
from attn_flow.hooks.layout import encoder_inside
from attn_flow.hooks.positions import read_positions
from attn_flow.hooks.recorder import recording
from attn_flow.hooks.weights import attentions
from attn_flow.probe.clouds import local
from attn_flow.probe.head_space import as_heads_see


def omitted_shares(model: nn.Module, inputs: Mapping[str, Tensor]) -> list[float]:
    """The share of the variance of a layer's logits that contents and known places do not explain, layer by layer.

    model: a known encoder of HuggingFace. inputs: as the model takes them; the first text counts. A layer's own weights
    give its logits l up to a constant of each query; with c those that were read, both centred over the keys that a
    query sees, the share is sum (l - c)^2 / sum l^2 over heads, queries and keys. 0: they say it all; above 1:
    worse than nothing. NaN where the model does not show its weights.

    >>> from attn_flow.hooks.demo import tiny_bert
    >>> model, tokenizer = tiny_bert()
    >>> max(omitted_shares(model, dict(tokenizer(["a b c"], return_tensors="pt")))) < 1e-6  # no positions in its logits
    True
    """
    model = encoder_inside(model)
    found = attentions(model)
    if getattr(model, "config", None) is None:
        return [float("nan")] * len(found)
    options = {"use_cache": False} if "use_cache" in inspect.signature(model.forward).parameters else {}
    with torch.no_grad(), evaluation_mode(model), _shown(model), recording(model, "attn.hook_in") as cache:
        out = model(**inputs, **options, output_attentions=True)
        mask = cache.mask[0]
        z = [cache[f"blocks.{layer}.attn.hook_in"][0][mask] for layer in range(len(found))]
    weights = getattr(out, "attentions", None)
    if weights is None or len(weights) != len(found) or any(w is None for w in weights):
        return [float("nan")] * len(found)
    shares = []
    placed = read_positions(cache.blocks, len(z[0]))
    for block, A, x, P, places in zip(cache.blocks, found, z, weights, placed):
        space = as_heads_see(A, x, sees=local(len(x), block.window, x.device), places=places)
        seen = (P[0][:, mask][..., mask] > 0) & space.logits.isfinite()
        logits, content = (_centred(v.double(), seen) for v in (P[0][:, mask][..., mask].log(), space.logits))
        shares.append(float((logits - content).square().sum() / logits.square().sum()))
    return shares


def _centred(logits: Tensor, seen: Tensor) -> Tensor:
    """Less each query's mean over the keys it sees; 0 at the others."""
    shown = torch.where(seen, logits, 0.0)
    mean = shown.sum(-1, keepdim=True) / seen.sum(-1, keepdim=True).clamp_min(1)
    return torch.where(seen, shown - mean, 0.0)


@contextmanager
def _shown(model: Any) -> Iterator[None]:
    """Attention computed in the way that shows its weights, and in the model's own way again after."""
    own = getattr(model.config, "_attn_implementation", "eager")
    if own == "eager":
        yield
        return
    model.set_attn_implementation("eager")
    try:
        yield
    finally:
        model.set_attn_implementation(own)
