"""Compare the weights that were read from a model with what its layers compute."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from attn_flow.hooks.evaluation import describe_changes
from attn_flow.hooks.inputs import TokenBatch
from attn_flow.hooks.layout import Block, encoder_inside, evaluation_mode
from attn_flow.hooks.positions import Projections, UnreadableWeightsError, projections, relative_rounding
from attn_flow.hooks.recorder import ActivationCache, recording, run_batch
from attn_flow.hooks.weights import read_attention
from attn_flow.measures import Cloud


@dataclass(frozen=True)
class Check:
    """The comparison of one layer: |A(z) from the weights - A(z) computed| / |A(z) computed|.

    Args:
        layer: its index.
        error: the relative difference.
        tolerance: what rounding allows.
        omits: why the two cannot agree, in words: positions, or a change of the layer; empty if they can.

    Example:
        >>> Check(layer=0, error=2e-7, tolerance=2e-6, omits="").exact
        True
    """

    layer: int
    error: float
    tolerance: float
    omits: str

    @property
    def exact(self) -> bool:
        """Whether the weights say what the layer computes."""
        return self.error <= self.tolerance


def self_check(model: nn.Module, inputs: Mapping[str, Tensor], tolerance: float | None = None) -> list[Check]:
    """Compare the Attention of every layer with what the layer computes.

    Args:
        model: a known encoder, or something that holds one.
        inputs: as the model takes them; padding is left out of the comparison.
        tolerance: the relative error (Frobenius norm over tokens) up to which a layer agrees; by default that of its
            rounding, 16 rounding errors times one plus the largest logit.

    Returns:
        One Check per layer. Where positions enter the scores, a layer is wrapped or scaled, or its weights are
        quantised, the two cannot agree and the Check says why. Any other layer that does not agree is a ValueError.

    Example:
        >>> from attn_flow.hooks.demo import tiny_bert
        >>> model, tokenizer = tiny_bert()  # or from_pretrained("bert-base-uncased")
        >>> all(check.exact for check in self_check(model, dict(tokenizer(["a b c"], return_tensors="pt"))))
        True
    """
    model = encoder_inside(model)
    with recording(model, ("attn.hook_in", "attn.hook_out")) as cache, evaluation_mode(model):
        run_batch(model, cache, TokenBatch(dict(inputs)))
    checks = [_check_layer(block, cache, tolerance) for block in cache.blocks]
    wrong = [check for check in checks if not check.exact and not check.omits]
    if wrong:
        worst = max(wrong, key=lambda check: check.error)
        raise ValueError(
            f"layer {worst.layer} of {type(model).__name__}: its attention differs from the weights read by "
            f"{worst.error:.1e} (expected {worst.tolerance:.0e}). The architecture "
            f"{cache.blocks[0].architecture.name!r} does not fit this model; register one of its own."
        )
    return checks


def _check_layer(block: Block, cache: ActivationCache, tolerance: float | None) -> Check:
    changes = describe_changes(block)
    if changes:
        return Check(block.index, float("nan"), 0.0, "; ".join(changes))
    try:
        weights = projections(block)
        attention = read_attention(block, weights)
    except UnreadableWeightsError as error:
        return Check(block.index, float("nan"), 0.0, str(error))
    z, output = (cache[f"blocks.{block.index}.attn.hook_{end}"] for end in ("in", "out"))
    cloud = Cloud(z.to(weights["q"][0].dtype), mask=cache.mask.to(z.device))
    drift = attention(0.0, cloud.zero_padding(cloud.x), cloud.log_weights)
    difference = float((drift - output)[cache.mask].norm() / output[cache.mask].norm())
    if tolerance is None:
        rounding = max(relative_rounding(z), relative_rounding(output))
        tolerance = 16 * rounding * (1 + block.beta * _largest_product(cloud.x[cache.mask], weights))
    return Check(block.index, difference, tolerance, block.positions)


def _largest_product(z: Tensor, weights: Projections) -> float:
    """A bound on <Q z_i + b, K z_j + c>: the rounding error of a logit is the relative one of its exponential."""
    norms = []
    for weight, bias in (weights["q"], weights["k"]):
        y = torch.einsum("nd,hkd->nhk", z, weight)
        norms.append((y if bias is None else y + bias).norm(dim=-1).amax(0))
    return float((norms[0] * norms[1]).amax())


def first_tokens(inputs: Mapping[str, Tensor], count: int = 16) -> dict[str, Tensor]:
    """A few tokens of the first text, or the first image; torch's encoder, which may have texts second, gets all."""
    if "src" in inputs:
        return dict(inputs)
    leading = next(iter(inputs.values()))
    first = {name: t[:1] if t.ndim and t.shape[0] == leading.shape[0] else t for name, t in inputs.items()}
    mask = first.get("attention_mask")
    if "pixel_values" in inputs or leading.ndim < 2 or (mask is not None and mask.ndim != 2):
        return first
    n = leading.shape[1]
    columns = torch.arange(n)[:count] if mask is None else mask[0].nonzero()[:count, 0]
    return {name: t[:, columns] if t.ndim > 1 and t.shape[1] == n else t for name, t in first.items()}
