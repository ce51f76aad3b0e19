"""The blocks of a model, found by matching it against the table of architectures: live handles on their modules."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from attn_flow.hooks.architectures import ARCHITECTURES, Architecture, NormPlacement, at, has
from attn_flow.nn.stack import DeepStack


@dataclass(frozen=True)
class Block:
    """One firing of one block: a live handle on its modules. Blocks that share weights are firings of one module.

    index: which layer it is. path: where it is in the model. architecture: the layout matched. root: the encoder whose
    forward pass fires it. module: the block itself. `block[path]` is a module inside; attn, core, heads, causal,
    positions, norm_placement, norm_in and beta(head_dim) are what the layout says of this block.

    Example:
        >>> from attn_flow.hooks.demo import tiny_bert
        >>> block = blocks(tiny_bert()[0])[1]
        >>> block.heads, block.norm_placement, block["attention.self.query"].in_features
        (2, 'post', 16)
    """

    index: int
    path: str
    architecture: Architecture
    root: nn.Module
    module: nn.Module

    def __getitem__(self, path: str) -> nn.Module:
        return self.module.get_submodule(path)

    def option(self, value: object) -> object:
        return value(self.module) if callable(value) else value

    def __repr__(self) -> str:
        return f"Block({self.index}, {self.path!r}, {self.architecture.name}, {type(self.module).__name__})"

    @property
    def attn(self) -> nn.Module:
        return self[self.architecture.attn]

    @property
    def core(self) -> nn.Module:
        """The module that owns the query projection, with the number of heads and the scale."""
        query = self[self.architecture.q]
        return query if isinstance(query, nn.MultiheadAttention) else self[self.architecture.q.rpartition(".")[0]]

    @property
    def norm_placement(self) -> NormPlacement:
        return str(self.option(self.architecture.norm_placement))

    @property
    def causal(self) -> bool:
        return bool(self.option(self.architecture.causal))

    @property
    def positions(self) -> str:
        """How positions enter the scores, which a function of token contents leaves out; empty if they do not."""
        return str(self.option(self.architecture.positions))

    @property
    def knows_places(self) -> bool:
        """Whether positions enter the scores, and `hooks.places` can say how."""
        arch = self.architecture
        return bool(self.positions) and any(f is not None for f in (arch.angles, arch.score_table, arch.score_terms))

    @property
    def heads(self) -> int:
        owners = (self.core, getattr(self.core, "config", None), getattr(self.root, "config", None))
        for owner in owners:
            for name in ("num_attention_heads", "num_heads", "n_heads", "n_head"):
                if isinstance(getattr(owner, name, None), int):
                    return getattr(owner, name)
        raise ValueError(f"{self.path}: no number of heads found in {type(self.core).__name__} or its config.")

    def beta(self, head_dim: int) -> float:
        """The trained inverse temperature of the scores <Qx, Ky>."""
        if self.architecture.beta is not None:
            return self.architecture.beta(self.core, head_dim)
        scale = getattr(self.core, "scaling", getattr(self.core, "scale", None))
        return scale if isinstance(scale, float) else 1 / math.sqrt(head_dim)

    @property
    def norm_in(self) -> nn.Module | None:
        """The norm whose output attention sees: the block's own, or the last one before it; None if there is none."""
        own = self[self.architecture.norm1]
        if self.norm_placement != "post" and not isinstance(own, nn.Identity):
            return own
        if self.index == 0:
            skip = not self.architecture.embed_norm or (
                self.architecture.unless and has(self.root, self.architecture.unless)
            )
            return None if skip else at(self.root, self.architecture.embed_norm)
        between, norm = self.architecture.after_norm
        if self.index == 1 and between and has(self.root, between):
            return at(self.root, norm)
        if self.norm_placement != "post":  # an Identity in the place of a pre-norm
            return None
        return self.previous[self.architecture.norm2]

    @property
    def previous(self) -> Block:
        return blocks(self.root)[self.index - 1]


def _firings(root: nn.Module, arch: Architecture) -> list[tuple[str, nn.Module]]:
    if callable(arch.blocks):
        return arch.blocks(root)
    listed = at(root, arch.blocks)
    return (
        [(f"{arch.blocks}.{i}", block) for i, block in enumerate(listed)] if isinstance(listed, nn.ModuleList) else []
    )


def _missing(block: nn.Module, arch: Architecture) -> list[str]:
    """Paths of the architecture that the block lacks, and of modules it refuses; empty if it matches."""
    needed = {
        arch.attn,
        arch.q,
        arch.k,
        arch.v,
        arch.o,
        arch.norm1,
        arch.norm2,
        arch.ffn,
        arch.emit,
        arch.layer_scale,
    } - {""}
    for path in filter(None, (arch.q_bias, arch.v_bias)):
        owner = at(block, path.rpartition(".")[0])
        if owner is None or not isinstance(getattr(owner, path.rpartition(".")[2], None), Tensor):
            return [path]
    return [p for p in sorted(needed) if not has(block, p)] + [f"no {p}" for p in arch.refuse if has(block, p)]


def _matches(model: nn.Module) -> Iterator[tuple[str, nn.Module, Architecture]]:
    """The submodules that are encoders of a known layout, at the smallest depth where there is one."""
    depth = lambda path: path.count(".") + bool(path)
    deepest = math.inf
    for path, module in sorted(model.named_modules(), key=lambda item: depth(item[0])):
        if depth(path) > deepest:
            return
        for arch in ARCHITECTURES:
            firings = _firings(module, arch)
            if firings and not _missing(firings[0][1], arch):
                deepest = depth(path)
                yield path, module, arch
                break


def encoder_inside(model: Any) -> nn.Module:
    """The encoder in what people hold: the module whose forward pass takes token ids, pixels or embeddings.

    model: the encoder itself, or a pipeline, a SentenceTransformer, a model of encoder and decoder (its encoder), a
    DataParallel, DistributedDataParallel or compiled model. Returns the module inside, not a copy.
    """
    while (held := inside(model)) is not None:
        model = held
    if not isinstance(model, nn.Module):
        raise ValueError(f"model is a {type(model).__name__}, expected a torch.nn.Module such as AutoModel gives.")
    return model


def refuse_to_change(model: Any) -> None:
    """ValueError for what would not heed, or not bear, hooks attached to the encoder inside."""
    while model is not None:
        if isinstance(model, nn.DataParallel):
            raise ValueError("model is a DataParallel, whose replicas would share one state; wrap model.module first.")
        if isinstance(model, nn.Module) and "_orig_mod" in model._modules:
            raise ValueError("model is compiled and may not heed the change; change model._orig_mod, compile it after.")
        model = inside(model)


def inside(model: Any) -> Any:
    """What a parallel or compiled model, a pipeline, a SentenceTransformer or an encoder-decoder holds, or None."""
    if isinstance(model, nn.DataParallel | nn.parallel.DistributedDataParallel):
        return model.module
    if isinstance(model, nn.Module) and "_orig_mod" in model._modules:  # torch.compile
        return model._modules["_orig_mod"]
    if not isinstance(model, nn.Module):  # a pipeline
        return model.model if isinstance(getattr(model, "model", None), nn.Module) else None
    if isinstance(model, nn.Sequential) and len(model) and hasattr(model[0], "auto_model"):  # a SentenceTransformer
        return model[0].auto_model
    if hasattr(model, "get_encoder") and has(model, "encoder") and has(model, "decoder"):
        return model.get_submodule("encoder")
    return None


def blocks(model: nn.Module) -> list[Block]:
    """The blocks of the encoder inside `model`, in the order they fire.

    model: a known encoder, or what holds one. Returns one Block per layer. ValueError, naming what was found, for a
    model of no known architecture or of several encoders.

    Example:
        >>> from attn_flow.hooks.demo import tiny_bert
        >>> [(block.path, block.architecture.name) for block in blocks(tiny_bert()[0])]
        [('encoder.layer.0', 'BERT'), ('encoder.layer.1', 'BERT')]
    """
    model = encoder_inside(model)
    if isinstance(model, DeepStack):
        raise ValueError(
            "a DeepStack has no blocks of a pretrained encoder; use attentions(stack), wrap(stack, ...), record(stack, "
            "inputs) and attn_flow.train.what_was_learned."
        )
    found = list(_matches(model))
    if not found:
        raise ValueError(_unknown(model))
    path, root, arch = found[0]
    if len(found) > 1:
        names = ", ".join(p for p, _, _ in found)
        parts = " or ".join(f"model.{p}" for p, _, _ in found)
        raise ValueError(f"{type(model).__name__} holds several encoders: {names}; pass one of them, {parts}.")
    prefix = f"{path}." if path else ""
    return [Block(i, prefix + p, arch, root, block) for i, (p, block) in enumerate(_firings(root, arch))]


def _unknown(model: nn.Module) -> str:
    """What is in the model instead of a known layout, the nearest one named."""
    lists = [(p, m) for p, m in model.named_modules() if isinstance(m, nn.ModuleList) and len(m)]
    if not lists:
        return f"{type(model).__name__} has no list of blocks; expected an encoder with one of: {_known()}."
    path, listed = max(lists, key=lambda item: sum(1 for _ in item[1].modules()))
    children = sorted({p for p, _ in listed[0].named_modules() if p and p.count(".") < 2})
    nearest = min(ARCHITECTURES, key=lambda arch: len(_missing(listed[0], arch)))
    return (
        f"{type(model).__name__} is of no known architecture. Its largest list of blocks is {path!r} with submodules "
        f"{', '.join(children)}. The nearest, {nearest.name}, misses {', '.join(_missing(listed[0], nearest))}. "
        f"Known: {_known()}. Add a layout with attn_flow.hooks.register(Architecture(...))."
    )


def _known() -> str:
    return ", ".join(dict.fromkeys(arch.name for arch in ARCHITECTURES))
