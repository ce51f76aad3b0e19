"""Compare the weights that were read from a model with what its layers compute."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor, nn

from attn_flow.hooks.evaluation import describe_changes
from attn_flow.hooks.inputs import TokenBatch
from attn_flow.hooks.layout import Block, encoder_inside, evaluation_mode
from attn_flow.hooks.positions import UnreadableWeightsError, projections, relative_rounding
from attn_flow.hooks.recorder import recording, run_batch
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


def _check_layer(block: Block, cache: Mapping[str, Tensor], tolerance: float | None) -> Check:
    changes = describe_changes(block)
    if changes:
        return Check(block.index, float("nan"), 0.0, "; ".join(changes))
    try:
        attention = read_attention(block)
    except UnreadableWeightsError as error:
        return Check(block.index, float("nan"), 0.0, str(error))
    mask: Tensor = cache.mask  # type: ignore[attr-defined]
    z, output = (cache[f"blocks.{block.index}.attn.hook_{end}"] for end in ("in", "out"))
    drift = attention.drift(Cloud(z.to(attention.tensors["Q"].dtype), mask=mask.to(z.device)))
    difference = float((drift - output)[mask].norm() / output[mask].norm())
    if tolerance is None:
        rounding = max(relative_rounding(z), relative_rounding(output))
        tolerance = 16 * rounding * (1 + _largest_logit(block, z[mask]))
    return Check(block.index, difference, tolerance, block.positions)


def _largest_logit(block: Block, z: Tensor) -> float:
    """A bound on beta <Q z_i + b, K z_j + c>: the rounding error of a logit is the relative one of its exponential."""
    weights, norms = projections(block), []
    for weight, bias in (weights["q"], weights["k"]):
        y = (z.to(weight.dtype) @ weight.flatten(0, 1).mT).unflatten(-1, weight.shape[:2])  # (n, heads, k)
        norms.append((y if bias is None else y + bias).norm(dim=-1).amax(0))
    return block.beta * float((norms[0] * norms[1]).amax())


def first_text(inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The inputs of the first text or image alone; torch's encoder, which may have texts second, gets all."""
    if "src" in inputs:
        return dict(inputs)
    texts = next(iter(inputs.values())).shape[0]
    return {name: t[:1] if t.ndim and t.shape[0] == texts else t for name, t in inputs.items()}
