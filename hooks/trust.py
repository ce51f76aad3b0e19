"""Whether what was read is what is there: weights against layers, texts against tokenizer, a run against its model."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor, nn

from attn_flow.base import checks
from attn_flow.hooks.attach import evaluating
from attn_flow.hooks.inputs import TokenBatch, check_texts, count_unknown
from attn_flow.hooks.layout import Block, blocks, encoder_inside
from attn_flow.hooks.moments import keys
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
    checks.instance("inputs", inputs, Mapping, "a dict of tensors, as the model takes them")
    if tolerance is not None:
        checks.positive("tolerance", tolerance)
    with recording(model, points=("attn_in", "attn_out")) as tape, evaluating(model):
        forward(model, tape, TokenBatch(dict(inputs)))
    mask, found = tape.mask, []
    for block in tape.blocks:
        z, out = (tape.state((kind, block.index)) for kind in ("attn_in", "attn_out"))
        changed = alterations(block)
        if changed:
            found.append(Check(block.index, float("nan"), 0.0, "; ".join(changed)))
            continue
        read = attention(block)
        drift = read.drift(z.to(read.Q.dtype), mask=mask.to(z.device))
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
        y = (z.to(weight.dtype) @ weight.flatten(0, 1).mT).unflatten(-1, weight.shape[:2])  # (n, heads, k)
        longest.append((y if bias is None else y + bias).norm(dim=-1).amax(0))
    return block.beta(read["q"][0].shape[-2]) * float((longest[0] * longest[1]).amax())


def check_on_few(model: nn.Module, batch: TokenBatch, as_built: Build) -> None:
    """`self_check` on a few tokens of a batch: what every recording does first.

    as_built: `build(model)` before hooks were attached. A model that passed is not run again while it is built the
    same way and takes the same kind of inputs.
    """
    now = as_built and (*as_built, *((name, t.ndim, t.dtype, t.device) for name, t in batch.inputs.items()))
    if now is None or _passed.get(model) != now:
        self_check(model, few(batch.inputs))
        _passed[model] = now


Build = tuple[Any, ...] | None
_passed: WeakKeyDictionary[nn.Module, Build] = WeakKeyDictionary()  # models whose weights were read rightly


def build(model: nn.Module) -> Build:
    """How a model is built: classes, methods, plain attributes and kinds of tensors of all modules; None if hooked.

    Another layer, adapter, option or dtype is another build. Other numbers in its tensors are not: they are read when
    they are used, all the same way.
    """
    found: list[Any] = []
    configs: dict[int, Any] = {}
    for module in model.modules():
        own = module.__dict__
        if own["_forward_hooks"] or own["_forward_pre_hooks"] or "forward" in own:
            return None  # what a hook does cannot be told from its name: look every time
        found += [type(module), type(module).forward]
        for name, value in own.items():
            if name in ("_parameters", "_buffers"):
                found += [(key, t if t is None else (t.dtype, t.shape, t.device)) for key, t in value.items()]
            elif name == "_modules":
                found.append(tuple(value))
            elif name == "config":
                configs[id(value)] = value
            elif isinstance(value, PLAIN):
                found.append((name, repr(value)))
    found += [repr(sorted(vars(config).items(), key=lambda item: item[0])) for config in configs.values()]
    return tuple(found)


PLAIN = (bool, int, float, str, tuple, list, dict)


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
    checks.instance("texts", texts, Sequence, "a list of strings")
    checks.function("tokenizer", tokenizer, "of texts, as HuggingFace's tokenizers are")
    if not texts:
        raise ValueError("texts is empty, expected at least one text.")
    check_texts(texts)
    rows = tokenizer(list(texts), return_special_tokens_mask=True, verbose=False)
    unknown, content = count_unknown(tokenizer, rows["input_ids"], rows["special_tokens_mask"])
    return unknown / max(1, content)


def refuse_unknown(tokenizer: Any, unknown: int, content: int, most: float, last: bool = True) -> None:
    """ValueError if more than a share `most` of the tokens is unknown; before the `last` one, only if it is certain."""
    checks.number("max_unknown", most, "a share from 0 to 1")
    if not 0 <= most <= 1:
        raise ValueError(f"max_unknown = {most}, expected a share from 0 to 1.")
    if content < (1 if last else 1000) or unknown <= most * content:
        return
    raise ValueError(
        f"{unknown} of {content} tokens are unknown to {type(tokenizer).__name__} ({unknown / content:.0%}, expected "
        f"at most {most:.0%}): is it this model's tokenizer, are these its texts? max_unknown=1 records them anyway."
    )


def fingerprint(model: nn.Module) -> str:
    """A name that changes when any weight does: of parameters and saved buffers, with names, dtypes and shapes.

    A change of one number always changes it, of several all but once in 2^32 at worst; it is no proof against malice.
    """
    total = hashlib.sha256()
    for name, t in sorted(model.state_dict().items()):
        if not isinstance(t, Tensor):
            continue
        if t.is_meta:
            raise ValueError(
                "a weight is on the meta device (offloaded or not loaded); load the model with its weights."
            )
        total.update(json.dumps([name, str(t.dtype), list(t.shape)]).encode())
        total.update(_checksums(t.detach().cpu().contiguous().flatten().view(torch.uint8).numpy()))
    return f"{type(model).__name__} {total.hexdigest()[:16]}"


def _checksums(content: np.ndarray) -> bytes:
    """sum_i w_i (x_i ^ x_i >> 29) mod 2^64 of every 256 kB, for words x_i of eight bytes and odd w_i: four times as
    fast as SHA-256. The shift carries signs, the top bits of numbers, to where products depend on all of w_i.
    """
    words, w = len(content) // 8, _odd_numbers()
    x, rest, found = content[: 8 * words].view(np.uint64), content[8 * words :], []
    for start in range(0, words, len(w)):
        part = x[start : start + len(w)]
        mixed = part >> np.uint64(29)
        mixed ^= part
        mixed *= w[: len(part)]
        found.append(mixed.sum(dtype=np.uint64))
    return np.array(found, dtype=np.uint64).tobytes() + rest.tobytes()


@cache
def _odd_numbers(many: int = 2**15) -> np.ndarray:
    place = torch.arange(many)
    return (keys(0, torch.zeros_like(place), place) | 1).numpy().view(np.uint64)


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
