"""The blocks of a model, found by matching it against the table of architectures: live handles on their modules."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor, nn

from attn_flow.hooks.architectures import ROWS, Placement, Row, at, has


@dataclass(frozen=True)
class Block:
    """One firing of one block: a live handle on its modules. Blocks that share weights are firings of one module."""

    index: int
    path: str
    row: Row
    root: nn.Module
    module: nn.Module

    def __getitem__(self, path: str) -> nn.Module:
        return self.module.get_submodule(path)

    def option(self, value: object) -> object:
        return value(self.module) if callable(value) else value

    @property
    def attn(self) -> nn.Module:
        return self[self.row.attn]

    @property
    def core(self) -> nn.Module:
        """The module that owns the query projection, with the number of heads and the scale."""
        query = self[self.row.q]
        return query if isinstance(query, nn.MultiheadAttention) else self[self.row.q.rpartition(".")[0]]

    @property
    def placement(self) -> Placement:
        return str(self.option(self.row.placement))

    @property
    def causal(self) -> bool:
        return bool(self.option(self.row.causal))

    @property
    def positions(self) -> str:
        """How positions enter the scores, which a function of token contents leaves out; empty if they do not."""
        return str(self.option(self.row.positions))

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
        if self.row.beta is not None:
            return self.row.beta(self.core, head_dim)
        scale = getattr(self.core, "scaling", getattr(self.core, "scale", None))
        return scale if isinstance(scale, float) else 1 / math.sqrt(head_dim)

    @property
    def norm_in(self) -> nn.Module | None:
        """The norm whose output attention sees: the block's own, or the last one before it; None if there is none."""
        own = self[self.row.norm1]
        if self.placement != "post" and not isinstance(own, nn.Identity):
            return own
        if self.index == 0:
            skip = not self.row.embed_norm or (self.row.unless and has(self.root, self.row.unless))
            return None if skip else at(self.root, self.row.embed_norm)
        between, norm = self.row.after_norm
        if self.index == 1 and between and has(self.root, between):
            return at(self.root, norm)
        if self.placement != "post":  # an Identity in the place of a pre-norm
            return None
        return self.previous[self.row.norm2]

    @property
    def previous(self) -> Block:
        return blocks(self.root)[self.index - 1]


def _firings(root: nn.Module, row: Row) -> list[tuple[str, nn.Module]]:
    if callable(row.blocks):
        return row.blocks(root)
    listed = at(root, row.blocks)
    return [(f"{row.blocks}.{i}", block) for i, block in enumerate(listed)] if isinstance(listed, nn.ModuleList) else []


def _missing(block: nn.Module, row: Row) -> list[str]:
    """Paths of the row that the block lacks, and of modules the row refuses; empty if it matches."""
    needed = {row.attn, row.q, row.k, row.v, row.o, row.norm1, row.norm2, row.ffn, row.emit, row.layer_scale} - {""}
    for path in filter(None, (row.q_bias, row.v_bias)):
        owner = at(block, path.rpartition(".")[0])
        if owner is None or not isinstance(getattr(owner, path.rpartition(".")[2], None), Tensor):
            return [path]
    return [p for p in sorted(needed) if not has(block, p)] + [f"no {p}" for p in row.refuse if has(block, p)]


def _matches(model: nn.Module) -> Iterator[tuple[str, nn.Module, Row]]:
    """The submodules that are encoders of a known layout, at the smallest depth where there is one."""
    depth = lambda path: path.count(".") + bool(path)
    deepest = math.inf
    for path, module in sorted(model.named_modules(), key=lambda item: depth(item[0])):
        if depth(path) > deepest:
            return
        for row in ROWS:
            firings = _firings(module, row)
            if firings and not _missing(firings[0][1], row):
                deepest = depth(path)
                yield path, module, row
                break


def blocks(model: nn.Module) -> list[Block]:
    """The blocks of the encoder inside `model`, in the order they fire."""
    if not isinstance(model, nn.Module):
        raise ValueError(f"model is a {type(model).__name__}, expected a torch.nn.Module such as AutoModel gives.")
    found = list(_matches(model))
    if not found:
        raise ValueError(_unknown(model))
    path, root, row = found[0]
    if len(found) > 1:
        names = ", ".join(p for p, _, _ in found)
        raise ValueError(f"{type(model).__name__} holds several encoders: {names}; pass one of them, model.{path}.")
    prefix = f"{path}." if path else ""
    return [Block(i, prefix + p, row, root, block) for i, (p, block) in enumerate(_firings(root, row))]


def _unknown(model: nn.Module) -> str:
    """What is in the model instead of a known layout, nearest row first."""
    lists = [(p, m) for p, m in model.named_modules() if isinstance(m, nn.ModuleList) and len(m)]
    if not lists:
        return f"{type(model).__name__} has no list of blocks; expected an encoder with one of: {_known()}."
    path, listed = max(lists, key=lambda item: sum(1 for _ in item[1].modules()))
    children = sorted({p for p, _ in listed[0].named_modules() if p and p.count(".") < 2})
    nearest = min(ROWS, key=lambda row: len(_missing(listed[0], row)))
    return (
        f"{type(model).__name__} is of no known architecture. Its largest list of blocks is {path!r} with submodules "
        f"{', '.join(children)}. The nearest row, {nearest.name}, misses {', '.join(_missing(listed[0], nearest))}. "
        f"Known: {_known()}. Add a layout with attn_flow.hooks.register(Row(...))."
    )


def _known() -> str:
    return ", ".join(dict.fromkeys(row.name for row in ROWS))
