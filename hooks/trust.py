"""Whether what was read is what is there: weights against layers, texts against tokenizer, a run against its model."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from attn_flow.base.files import digest
from attn_flow.hooks.attach import evaluating
from attn_flow.hooks.inputs import TokenBatch, check_texts, count_unknown
from attn_flow.hooks.layout import Block, blocks, encoder_inside
from attn_flow.hooks.tape import forward, recording
from attn_flow.hooks.temperature import Scaling
from attn_flow.hooks.weights import attention, precision, projections
from attn_flow.hooks.wrapping import ReplacedForward

FEW = 8  # tokens that suffice to see whether weights and layer agree


@dataclass(frozen=True)
class Check:
    """One layer's comparison: |A(z) from the read weights - A(z) computed| / |A(z)|, and what explains it.

    layer: its index. error: the relative difference. tolerance: what rounding allows. omits: what a function of token
    contents leaves out, or what was changed on purpose, in words; empty if nothing. exact: error <= tolerance.

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
        return self.error <= self.tolerance


def self_check(model: nn.Module, inputs: Mapping[str, Tensor], tolerance: float | None = None) -> list[Check]:
    """Compares every layer's Attention with what the layer computes.

    model: a known encoder. inputs: as the model takes them; padding is left out of the comparison. tolerance: the
    relative error (Frobenius norm over tokens) up to which a layer counts as read; by default the layer's own rounding,
    16 ulp times one plus the largest logit.

    Returns one Check per layer. Where positions enter the scores, or a layer is wrapped or scaled, the two cannot agree
    and the Check says by name what is left out; elsewhere a layer that does not agree is a ValueError.

    Example:
        >>> from attn_flow.hooks.demo import tiny_bert
        >>> model, tokenizer = tiny_bert()
        >>> all(c.exact for c in self_check(model, dict(tokenizer(["a b c"], return_tensors="pt"))))
        True
    """
    model = encoder_inside(model)
    with recording(model, points=("attn_in", "attn_out")) as tape, evaluating(model):
        forward(model, tape, TokenBatch(dict(inputs)))
    mask, found = tape.mask, []
    for block in tape.blocks:
        z, out = (tape.state((kind, block.index)) for kind in ("attn_in", "attn_out"))
        changed = alterations(block)
        if changed:
            found.append(Check(block.index, float("nan"), 0.0, "; ".join(changed)))
            continue
        # In float64, so that what remains is the layer's own rounding.
        read = attention(block).to(torch.float64)
        drift = read.drift(z.double(), mask=mask.to(z.device))
        error = float((drift - out)[mask].norm() / out[mask].norm())
        ulp = max(precision(z), precision(out))
        allowed = 16 * ulp * (1 + _largest_logit(block, z[mask])) if tolerance is None else tolerance
        found.append(Check(block.index, error, allowed, block.positions))
    wrong = [c for c in found if not c.exact and not c.omits]
    if wrong:
        worst = max(wrong, key=lambda c: c.error)
        raise ValueError(
            f"layer {worst.layer} of {type(model).__name__}: its attention differs from the weights read by "
            f"{worst.error:.1e} (expected {worst.tolerance:.0e}). The architecture "
            f"{tape.blocks[0].architecture.name!r} does not fit this model; register one of its own."
        )
    return found


def _largest_logit(block: Block, z: Tensor) -> float:
    """beta |Q z_i + b| |K z_j + c| at most: an ulp of a logit is as much of its exponential, c cancels only after."""
    read, longest = projections(block), []
    for weight, bias in (read["q"], read["k"]):
        y = torch.einsum("nd,hkd->hnk", z.to(weight.dtype), weight)
        longest.append((y if bias is None else y + bias[:, None]).norm(dim=-1).amax(-1))
    return block.beta(read["q"][0].shape[-2]) * float((longest[0] * longest[1]).amax())


def check_on_few(model: nn.Module, batch: TokenBatch) -> list[Check]:
    """`self_check` on a few tokens of a batch: what every recording does first."""
    return self_check(model, few(batch.inputs))


def few(inputs: Mapping[str, Tensor], tokens: int = FEW) -> dict[str, Tensor]:
    """The first tokens of the first text; the first image; all of what is neither."""
    mask = inputs.get("attention_mask")
    if "src" in inputs or not inputs or (mask is not None and mask.ndim != 2):
        return dict(inputs)
    leading = next(iter(inputs.values()))
    one = {name: t[:1] if t.ndim and t.shape[0] == leading.shape[0] else t for name, t in inputs.items()}
    if "pixel_values" in inputs or leading.ndim < 2:
        return one
    n = leading.shape[1]
    places = (torch.arange(n) if mask is None else mask[0].cpu().nonzero()[:, 0])[:tokens]
    along = lambda t: t.ndim >= 2 and t.shape[:2] == (1, n)
    return {name: t[:, places.to(t.device)] if along(t) else t for name, t in one.items()}


def alterations(block: Block) -> list[str]:
    """What `wrap` and `scale_beta` have changed in a block, in words."""
    changed = []
    for path in dict.fromkeys(("", block.architecture.attn, block.architecture.q)):
        module = block[path]
        replaced = module.__dict__.get("forward")
        if isinstance(replaced, ReplacedForward):
            changed.append(replaced.wrapped.words())
        for hook in module._forward_hooks.values():
            owner = getattr(hook, "__self__", hook)  # a bound method's object
            if isinstance(owner, Scaling) and path == block.architecture.q:
                words = owner.words(block.index)
                changed += [words] if words else []
    return changed


def altered(model: nn.Module) -> list[str]:
    """What is wrapped or scaled in a model, layer by layer; empty for a model as it was loaded."""
    return [f"layer {b.index}: {words}" for b in blocks(model) for words in alterations(b)]


def unknown_share(tokenizer: Any, texts: Sequence[str]) -> float:
    """The share of tokens that a tokenizer does not know, special tokens aside.

    tokenizer: of HuggingFace. texts: a list of strings. Returns a number from 0 to 1; above a tenth the tokenizer is
    hardly the model's own, or the texts are of another kind than it was made for.

    Example:
        >>> from attn_flow.hooks.demo import tiny_bert
        >>> unknown_share(tiny_bert()[1], ["a b", "zebra a"])
        0.25
    """
    if isinstance(texts, str):
        raise ValueError("texts is one string, expected a list of strings; pass [text].")
    check_texts(texts)
    rows = tokenizer(list(texts), return_special_tokens_mask=True, verbose=False)
    unknown, content = count_unknown(tokenizer, rows["input_ids"], rows["special_tokens_mask"])
    return unknown / max(1, content)


def refuse_unknown(tokenizer: Any, unknown: int, content: int, most: float, last: bool = True) -> None:
    """ValueError if more than a share `most` of the tokens is unknown; before the `last` one, only if it is certain."""
    if not 0 <= most <= 1:
        raise ValueError(f"max_unknown = {most}, expected a share from 0 to 1.")
    if content < (1 if last else 1000) or unknown <= most * content:
        return
    raise ValueError(
        f"{unknown} of {content} tokens are unknown to {type(tokenizer).__name__} ({unknown / content:.0%}, expected "
        f"at most {most:.0%}): is it this model's tokenizer, are these its texts? max_unknown=1 records them anyway."
    )


def fingerprint(model: nn.Module) -> str:
    """A name that changes when any weight does: a digest of parameters and saved buffers, with names and dtypes."""
    state = {name: t for name, t in model.state_dict().items() if isinstance(t, Tensor)}
    if any(t.is_meta for t in state.values()):
        raise ValueError("a weight is on the meta device (offloaded or not loaded); load the model with its weights.")
    return f"{type(model).__name__} {digest(state)[:16]}"


# Letters, accents, digits, spaces and signs: where tokenizers of one vocabulary differ.
SAMPLE = ["The quick brown fox; naïve Œuvre, 12.5% of\tÅ\N{COMBINING RING ABOVE}  x_y-Z(=O)c1ccccc1 QVQLVESGG"]


def tokenizer_fingerprint(tokenizer: Any) -> str:
    """A name that changes when the tokenizer does: its vocabulary, its rules, and what it makes of a sample."""
    total = hashlib.sha256()
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        if hasattr(tokenizer, "get_vocab"):
            total.update(json.dumps(tokenizer.get_vocab(), sort_keys=True).encode())
    else:
        rules = json.loads(backend.to_str())
        # How a call last cut and padded is no part of what the tokenizer is.
        rules = {name: rule for name, rule in rules.items() if name not in ("truncation", "padding")}
        total.update(json.dumps(rules, sort_keys=True).encode())
    total.update(json.dumps([list(ids) for ids in tokenizer(SAMPLE)["input_ids"]]).encode())
    return f"{type(tokenizer).__name__} {total.hexdigest()[:16]}"
