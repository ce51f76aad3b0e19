"""Whether the weights and positions that were read give what the layers of a model compute."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from attn_flow.hooks.inputs import pieces
from attn_flow.hooks.layout import blocks, encoder_inside, evaluation_mode
from attn_flow.hooks.positions import read_positions
from attn_flow.hooks.recorder import recording
from attn_flow.hooks.self_check import self_check
from attn_flow.hooks.weights import attentions
from attn_flow.probe.recording import read_heads

UNEXPLAINED = 0.01  # of the variance of a layer's logits: positions that leave more were misread


@dataclass(frozen=True)
class LayerCheck:
    """One layer: the weights as read against what it computes.

    Args:
        layer: its index.
        error: relative difference of attention from the weights alone; None where it cannot be compared.
        positions: what positions add to its scores, as the probe reads it; "" if nothing.
        omits: what of its scores the probe does not hold; "" if nothing.
        omitted_share: the share of the variance of its logits that is left out; None where it is unknown.
    """

    layer: int
    error: float | None
    positions: str
    omits: str
    omitted_share: float | None


def check_weights(
    model: nn.Module, source: Any, texts: Sequence[str] | None, max_length: int | None = None
) -> list[LayerCheck]:
    """Compare weights and positions with what the layers compute on the first two texts.

    Args:
        model, source, texts: as `probe` takes them.
        max_length: tokens kept of each text.

    Returns:
        One `LayerCheck` per layer. A layer that computes something else is a ValueError.
    """
    device = next(model.parameters()).device
    first = next(iter(pieces(model, source, None if texts is None else texts[:2], 2, max_length))).make()
    inputs = {name: t.to(device) for name, t in first.inputs.items()}
    checks = self_check(model, inputs)
    shares = omitted_shares(model, inputs) if any(c.omits for c in checks) else [0.0] * len(checks)
    result = []
    for check, share, block in zip(checks, shares, blocks(model)):
        reads_positions = bool(check.omits) and check.omits == block.positions and block.knows_positions
        if reads_positions and share is not None and share > UNEXPLAINED:
            raise ValueError(
                f"layer {check.layer} of {type(model).__name__}: its weights and positions as read leave {share:.2g} "
                f"of the variance of its logits unexplained. The architecture {block.architecture.name!r} does not "
                "fit this model; register one of its own."
            )
        is_complete = reads_positions and share is not None
        positions, omits = (check.omits, "") if is_complete else ("", check.omits)
        error = check.error if check.error == check.error else None
        result.append(LayerCheck(check.layer, error, positions, omits, share))
    return result


def omitted_shares(model: nn.Module, inputs: Mapping[str, Tensor]) -> list[float | None]:
    """The share of the variance of each layer's logits that contents and known positions do not explain.

    The model's own attention weights give its logits up to a constant of each query. Both kinds of logits are centred
    over the keys that a query sees, and the share is sum (own - read)^2 / sum own^2.

    Args:
        model: a known encoder of HuggingFace.
        inputs: as the model takes them; the first text counts.

    Returns:
        One number per layer; None where the model does not show its attention weights.

    Example:
        >>> from attn_flow.hooks.demo import tiny_bert
        >>> model, tokenizer = tiny_bert()
        >>> max(omitted_shares(model, dict(tokenizer(["a b c"], return_tensors="pt")))) < 1e-6
        True
    """
    model = encoder_inside(model)
    read = attentions(model)
    unknown: list[float | None] = [None] * len(read)
    if getattr(model, "config", None) is None:
        return unknown
    options = {"use_cache": False} if "use_cache" in inspect.signature(model.forward).parameters else {}
    with torch.no_grad(), evaluation_mode(model), _eager_attention(model), recording(model, "attn.hook_in") as cache:
        output = model(**inputs, **options, output_attentions=True)
        mask = cache.mask[0]
        states = [cache[f"blocks.{layer}.attn.hook_in"][0][mask] for layer in range(len(read))]
    weights = getattr(output, "attentions", None)
    if weights is None or len(weights) != len(read) or any(w is None for w in weights):
        return unknown
    shares: list[float | None] = []
    for block, attention, x, P, positions in zip(
        cache.blocks, read, states, weights, read_positions(cache.blocks, len(states[0]))
    ):
        P = P[0][:, mask][..., mask]
        logits = read_heads(attention, x, window=block.window, positions=positions).logits
        is_seen = (P > 0) & logits.isfinite()
        own, explained = (_centre(v.double(), is_seen) for v in (P.log(), logits))
        shares.append(float((own - explained).square().sum() / own.square().sum()))
    return shares


def _centre(logits: Tensor, is_seen: Tensor) -> Tensor:
    """The logits less each query's mean over the keys it sees; 0 at the others."""
    logits = torch.where(is_seen, logits, 0.0)
    mean = logits.sum(-1, keepdim=True) / is_seen.sum(-1, keepdim=True).clamp_min(1)
    return torch.where(is_seen, logits - mean, 0.0)


@contextmanager
def _eager_attention(model: Any) -> Iterator[None]:
    """Run attention in the implementation that returns its weights, and set back the model's own afterwards."""
    own = getattr(model.config, "_attn_implementation", "eager")
    if own == "eager":
        yield
        return
    model.set_attn_implementation("eager")
    try:
        yield
    finally:
        model.set_attn_implementation(own)
