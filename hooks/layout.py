"""The blocks of a model, recognised by the table of architectures: live handles on their modules."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from operator import index
from typing import Any

import torch
from torch import Tensor, nn

from attn_flow.hooks.architectures import ARCHITECTURES, Architecture

ENTRY = "attn_flow"  # the name of the child of a replaced attention module, and of the entry in a config
HEADS = ("num_attention_heads", "num_heads", "n_heads", "n_head", "heads")
HEAD_DIMS = ("head_dim", "attention_head_size", "attention_head_dim", "head_size", "key_value_proj_dim")


@dataclass(frozen=True)
class Block:
    """One layer of an encoder: a live handle on its modules. The layers of a shared block have the same module.

    `block[path]` is a submodule.

    Args:
        index: number of the layer.
        path: where it is in the model.
        architecture: the layout that was recognised.
        root: the encoder whose forward pass runs the block.
        module: the block itself.

    Example:
        >>> from attn_flow.hooks.demo import tiny_bert
        >>> block = blocks(tiny_bert()[0])[1]
        >>> block.heads, block.norm_placement, block["attention.self.query"].in_features
        (2, 'post', 16)
    """

    index: int
    path: str
    architecture: Architecture = field(repr=False)
    root: nn.Module = field(repr=False)
    module: nn.Module = field(repr=False)

    def __getitem__(self, path: str) -> nn.Module:
        return self.module.get_submodule(path)

    def _resolve(self, value: object) -> object:
        """A value of the architecture, which may be a function of the block."""
        return value(self) if callable(value) else value

    @property
    def attn(self) -> nn.Module:
        """The attention module."""
        return self[self.architecture.attn]

    @property
    def core(self) -> nn.Module:
        """The module that owns the query projection, with the number of heads and the scale."""
        query = at(self.module, self.architecture.q)
        is_own = isinstance(query, nn.MultiheadAttention)
        return self[self.architecture.q if is_own else self.architecture.q.rpartition(".")[0]]

    @property
    def norm_placement(self) -> str:
        """ "post", "pre" or "parallel"."""
        return str(self._resolve(self.architecture.norm_placement))

    @property
    def causal(self) -> bool:
        """Whether a token attends only to itself and earlier ones."""
        return bool(self._resolve(self.architecture.causal))

    @property
    def positions(self) -> str:
        """How positions enter the scores, in words; empty if they do not."""
        return str(self._resolve(self.architecture.positions))

    @property
    def knows_positions(self) -> bool:
        """Whether positions enter the scores and `read_positions` can say how."""
        arch = self.architecture
        return bool(self.positions) and any(f is not None for f in (arch.angles, arch.score_table, arch.score_terms))

    @property
    def window(self) -> int | None:
        """How many tokens to each side a token attends to; None if there is no limit."""
        both = getattr(self.core, "local_attention", None)  # of ModernBERT in transformers 4
        if both is not None:
            return max(both) if max(both) >= 0 else None
        config = getattr(self.core, "config", None)
        every_layer = None if hasattr(config, "layer_types") else getattr(config, "sliding_window", None)  # as Mistral
        window = getattr(self.core, "sliding_window", every_layer)
        return window - 1 if window else None  # it counts the token itself

    @property
    def heads(self) -> int:
        """Number of heads."""
        owners = (self.core, getattr(self.core, "config", None), getattr(self.root, "config", None))
        counts = [getattr(owner, name, None) for owner in owners for name in HEADS]
        heads = next((count for count in counts if isinstance(count, int)), None)
        if heads is None:
            raise ValueError(f"{self.path}: no number of heads in {type(self.core).__name__} or its config.")
        return heads

    @property
    def head_dim(self) -> int:
        """Width of the queries of one head."""
        core = self.core
        widths = [getattr(core, name, None) for name in HEAD_DIMS]
        width = next((width for width in widths if isinstance(width, int)), None)
        if width is not None:  # of all models that may be quantised, where weights have another shape
            return width
        query: Any = self[self.architecture.q]
        rows = query.nf if hasattr(query, "nf") else query.weight.shape[0]  # a Conv1D has its weight transposed
        return rows // (3 * self.heads if self.architecture.fused else self.heads)

    @property
    def beta(self) -> float:
        """The trained inverse temperature of the scores <q, k>."""
        beta = self.architecture.beta
        if beta is not None:
            return beta(self) if callable(beta) else beta
        scale = getattr(self.core, "scaling", getattr(self.core, "scale", None))
        return scale if isinstance(scale, float) else 1 / math.sqrt(self.head_dim)

    @property
    def norm_in(self) -> nn.Module | None:
        """The norm whose output attention sees: the block's own or the last one before it; None if there is none."""
        arch, own = self.architecture, at(self.module, self.architecture.norm1)
        if self.norm_placement != "post" and not isinstance(own, nn.Identity):  # as in ModernBERT's first block
            return own
        if self.index == 0:
            is_absent = not arch.embed_norm or (arch.unless and at(self.root, arch.unless) is not None)
            return None if is_absent else at(self.root, arch.embed_norm)
        between = at(self.root, arch.after_norm) if self.index == 1 and arch.after_norm else None
        return blocks(self.root)[self.index - 1][arch.norm2] if between is None else between


def blocks(model: nn.Module) -> list[Block]:
    """The blocks of the encoder inside `model`, in the order they run.

    Args:
        model: a known encoder, or something that holds one: a model with a head, a pipeline, a SentenceTransformer, a
            PEFT model, a compiled or parallel model.

    Returns:
        One Block per layer. ValueError, with what the model has instead, for a model of no known architecture or of
        several encoders.

    Example:
        >>> from attn_flow.hooks.demo import tiny_bert
        >>> model = tiny_bert()[0]  # or AutoModel.from_pretrained("bert-base-uncased")
        >>> [(block.path, block.architecture.name) for block in blocks(model)]
        [('encoder.layer.0', 'BERT'), ('encoder.layer.1', 'BERT')]
    """
    model = encoder_inside(model)
    matches = _matches(model)
    if not matches:
        raise ValueError(_describe_unknown(model))
    if len(matches) > 1:
        parts = " or ".join(f"model.{path}" for path, _, _ in matches)
        raise ValueError(f"{type(model).__name__} holds several encoders; pass one of them, {parts}.")
    path, root, arch = matches[0]
    prefix = f"{path}." if path else ""
    return [Block(i, prefix + p, arch, root, block) for i, (p, block) in enumerate(_layers(root, arch))]


def blocks_to_change(model: Any) -> list[Block]:
    """The blocks of a model that is going to be changed; ValueError if it would ignore the change."""
    outer = model
    while outer is not None:
        if isinstance(outer, nn.DataParallel) or (isinstance(outer, nn.Module) and "_orig_mod" in outer._modules):
            raise ValueError(
                f"model is a {type(outer).__name__} and may ignore the change; change model.module of a DataParallel, "
                "model._orig_mod of a compiled model, and compile it after."
            )
        outer = inside(outer)
    return blocks(model)


def encoder_inside(model: Any) -> nn.Module:
    """The encoder in what people have: the module whose forward pass takes token ids, pixels or embeddings.

    It is the module itself, or that inside a pipeline, a SentenceTransformer, a model of encoder and decoder (its
    encoder), a DataParallel, DistributedDataParallel or compiled model. It is not copied.
    """
    while (inner := inside(model)) is not None:
        model = inner
    if not isinstance(model, nn.Module):
        raise ValueError(f"model is a {type(model).__name__}, expected a torch.nn.Module such as AutoModel gives.")
    return model


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
    if hasattr(model, "get_encoder") and at(model, "encoder") is not None and at(model, "decoder") is not None:
        return model.get_submodule("encoder")
    return None


def choose_layers(count: int, layers: int | Iterable[int] | None) -> list[int]:
    """The indices of the layers that were asked for, of `count` layers; all for None."""
    chosen = [layers] if isinstance(layers, int) else list(map(index, range(count) if layers is None else layers))
    if not chosen or any(not -count <= i < count for i in chosen):
        raise ValueError(f"layers = {chosen}, expected indices from 0 to {count - 1}, and at least one.")
    return sorted({i % count for i in chosen})


# --- running a model ---


def hidden_states(output: Any) -> Tensor:
    """The hidden states in the output of a layer: the output itself, or the first entry of a tuple."""
    return output[0] if isinstance(output, tuple | list) else output


def with_hidden_states(output: Any, x: Tensor) -> Any:
    """The output of a layer with other hidden states, in the same container."""
    return type(output)([x, *output[1:]]) if isinstance(output, tuple | list) else x


def input_states(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor:
    """The hidden states among the arguments of a layer."""
    return args[0] if args else kwargs.get("hidden_states", kwargs.get("src", kwargs.get("query")))


class LayerClock:
    """Which layer is running: counts the blocks in a forward pass, since a shared block runs several times."""

    def __init__(self, layers: list[Block]) -> None:
        self.blocks, self.layer, self.is_running = layers, -1, False

    def attach(self, stack: ExitStack) -> None:
        root = self.blocks[0].root
        stack.callback(root.register_forward_pre_hook(self._begin).remove)
        stack.callback(root.register_forward_hook(self._end, always_call=True).remove)
        for block in distinct(self.blocks):
            stack.callback(block.module.register_forward_pre_hook(self._enter).remove)

    def layer_of(self, block: Block) -> int:
        """The layer that runs this block. One that is not shared is known, also when it is computed a second time."""
        return self.layer if sum(b.module is block.module for b in self.blocks) > 1 else block.index

    def _begin(self, *_: Any) -> None:
        self.layer, self.is_running = -1, True

    def _end(self, *_: Any) -> None:
        self.is_running = False

    def _enter(self, *_: Any) -> None:
        self.layer += self.is_running


def distinct(layers: Iterable[Block]) -> list[Block]:
    """The blocks without those that have the module of an earlier one."""
    return list({id(block.module): block for block in reversed(list(layers))}.values())[::-1]


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """No dropout and no gradients; afterwards every submodule is in its own mode again."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, mode in modes:
            module.training = mode


# --- recognising a model ---


def at(module: nn.Module, path: str) -> nn.Module | None:
    """The submodule at a path, or None."""
    try:
        return module.get_submodule(path)
    except AttributeError:
        return None


def _layers(root: nn.Module, arch: Architecture) -> list[tuple[str, nn.Module]]:
    """(path, block) of all layers of an encoder; empty if it has no such list."""
    if callable(arch.blocks):
        return arch.blocks(root)
    modules = at(root, arch.blocks)
    return [(f"{arch.blocks}.{i}", m) for i, m in enumerate(modules)] if isinstance(modules, nn.ModuleList) else []


def _fits(root: nn.Module, arch: Architecture) -> bool:
    """Whether a module is an encoder of a layout: all its blocks have the submodules of the layout."""
    layers = _layers(root, arch)
    paths = {arch.attn, arch.q, arch.k, arch.v, arch.o, arch.norm1, arch.norm2, arch.ffn, arch.emit, arch.layer_scale}
    has = lambda block, path: getattr(at(block, path.rpartition(".")[0]), path.rpartition(".")[2], None) is not None
    return bool(layers) and all(
        all(at(block, path) is not None for path in paths) and not any(has(block, path) for path in arch.refuse)
        for _, block in layers
    )


def _matches(model: nn.Module) -> list[tuple[str, nn.Module, Architecture]]:
    """The submodules that are encoders of a known layout, at the smallest depth where there is one."""
    depth = lambda path: path.count(".") + bool(path)
    matches: list[tuple[str, nn.Module, Architecture]] = []
    for path, module in sorted(model.named_modules(), key=lambda item: depth(item[0])):
        if matches and depth(path) > depth(matches[0][0]):
            break
        matches += [(path, module, arch) for arch in ARCHITECTURES if _fits(module, arch)][:1]
    return matches


def _describe_unknown(model: nn.Module) -> str:
    """What a model has instead of a known layout."""
    known = ", ".join(dict.fromkeys(arch.name for arch in ARCHITECTURES))
    lists = [(p, m) for p, m in model.named_modules() if isinstance(m, nn.ModuleList) and len(m)]
    if not lists:
        return f"{type(model).__name__} has no list of blocks; expected an encoder with one of: {known}."
    path, modules = max(lists, key=lambda item: len(list(item[1].modules())))
    children = sorted({p for p, _ in modules[0].named_modules() if p and p.count(".") < 2})
    return (
        f"{type(model).__name__} is of no known architecture. Its largest list of blocks is {path!r} with submodules "
        f"{', '.join(children)}. Known: {known}. Add a layout with attn_flow.hooks.register(Architecture(...))."
    )
