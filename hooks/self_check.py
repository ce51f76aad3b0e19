"""Compare the weights that were read from a model with what its layers compute."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from attn_flow.hooks.evaluation import describe_changes
from attn_flow.hooks.inputs import batches
from attn_flow.hooks.layout import Block, encoder_inside, evaluation_mode
from attn_flow.hooks.positions import UnreadableWeightsError, as_float, relative_rounding
from attn_flow.hooks.recorder import ActivationCache, recording, run_batch
from attn_flow.hooks.weights import read_attention
from attn_flow.measures.cloud import Cloud

COMPARED = ("attn.hook_in", "attn.hook_out", "attn.q.hook_out", "attn.k.hook_out")
SCORES = "attn.hook_attn_scores"


@dataclass(frozen=True)
class Check:
    """The comparison of one layer: |A(z) from the weights - A(z) computed| / |A(z) computed|.

    Args:
        layer: its index.
        error: the relative difference.
        tolerance: what rounding allows.
        omits: why the two cannot agree, in words: positions, a mask, or a change of the layer; empty if they can.

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


@torch.no_grad()
def self_check(model: nn.Module, inputs: Mapping[str, Tensor]) -> list[Check]:
    """Compare the Attention of every layer with what the layer computes.

    Args:
        model: a known encoder, or something that holds one.
        inputs: as the model takes them; padding is left out of the comparison.

    Returns:
        One Check per layer: its relative error (Frobenius norm over tokens), and a tolerance of 16 rounding errors
        times one plus a bound on its logits. Where positions or a mask of pairs enter the scores, a layer is wrapped or
        scaled, or its weights are quantised, the two cannot agree and the Check says why. Any other layer that does not
        agree is a ValueError, and so is one that does not agree with its positions, where these can be read.

    Example:
        >>> from attn_flow.hooks.demo import tiny_bert
        >>> model, tokenizer = tiny_bert()  # or from_pretrained("bert-base-uncased")
        >>> all(check.exact for check in self_check(model, dict(tokenizer(["a b c"], return_tensors="pt"))))
        True
    """
    model = encoder_inside(model)
    with recording(model, (*COMPARED, SCORES)) as cache, evaluation_mode(model):
        run_batch(model, cache, next(batches(model, inputs, None, sys.maxsize)))
        checks = [_check_layer(block, cache) for block in cache.blocks]
    wrong = [check for check in checks if not check.exact and not check.omits]
    if wrong:
        worst = max(wrong, key=lambda check: check.error)
        raise ValueError(
            f"layer {worst.layer} of {type(model).__name__}: its attention differs from the weights read by "
            f"{worst.error:.1e} (expected {worst.tolerance:.0e}). The architecture "
            f"{cache.blocks[0].architecture.name!r} does not fit this model; register one of its own."
        )
    return checks


def _check_layer(block: Block, cache: ActivationCache) -> Check:
    changes = describe_changes(block)
    if changes:
        return Check(block.index, float("nan"), 0.0, changes)
    try:
        attention = read_attention(block)
    except UnreadableWeightsError as reason:
        return Check(block.index, float("nan"), 0.0, str(reason))
    z, output, q, k = (cache[f"blocks.{block.index}.{point}"] for point in COMPARED)
    z, tokens, rounding = as_float(z), cache.mask, max(relative_rounding(z), relative_rounding(output))
    relative = lambda y: float((y - output)[tokens].norm() / output[tokens].norm())
    error = relative(attention.drift(Cloud(z, mask=tokens)))
    # The rounding error of a logit is the relative one of its exponential.
    largest = block.beta * float(q[tokens].norm(dim=-1).amax() * k[tokens].norm(dim=-1).amax())
    omits = block.positions if cache.mask_of_pairs is None else "the mask of pairs of tokens"
    check = Check(block.index, error, 16 * rounding * (1 + largest), omits)
    if check.exact or not omits:
        return check
    try:
        scores = as_float(cache[f"blocks.{block.index}.{SCORES}"])
    except ValueError:  # positions that cannot be read, or others than 0, 1, ...
        return check
    added = torch.einsum("bhij,bjd,hkd,hek->bie", scores.softmax(-1), z, attention.V, attention.O)
    assert attention.value_bias is not None  # `read_attention` gives one
    error, largest = relative(added + attention.value_bias), max(largest, float(scores[scores.isfinite()].abs().max()))
    # Models may take angles, tables and norms of positions in float32.
    tolerance = 16 * max(rounding, torch.finfo(torch.float32).eps) * (1 + largest)
    return check if error <= tolerance else Check(block.index, error, tolerance, "")


def first_tokens(inputs: Mapping[str, Tensor], count: int = 16) -> dict[str, Tensor]:
    """A few tokens of the first text, or the first image; torch's encoder, which may have texts second, gets all."""
    texts = -1 if "src" in inputs else len(next(iter(inputs.values())))
    first = {name: t[:1] if t.ndim and len(t) == texts else t for name, t in inputs.items()}
    ids, mask = first.get("input_ids"), first.get("attention_mask")
    if ids is None or (mask is not None and mask.shape != ids.shape):
        return first
    columns = slice(count) if mask is None else mask[0].nonzero()[:count, 0]
    return {name: t[:, columns] if t.shape == ids.shape else t for name, t in first.items()}
