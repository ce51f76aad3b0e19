"""Changing the temperature of a pretrained encoder: the query projection's output times a factor.

Scores are <beta Q x, K y>, so scaling queries where they are made is exact on every version and backend.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from attn_flow.base import checks
from attn_flow.hooks.architectures import has
from attn_flow.hooks.attach import Attached, Clock, padded
from attn_flow.hooks.layout import Block, blocks, refuse_to_change
from attn_flow.hooks.weights import projections


def chosen_layers(found: Sequence[Any], layers: int | Iterable[int] | None) -> list[int]:
    if layers is None:
        return list(range(len(found)))
    checks.instance("layers", layers, (int, Iterable), "a number, or several")
    wanted = [layers] if isinstance(layers, int) else list(layers)
    for i in wanted:
        if not isinstance(i, int) or not -len(found) <= i < len(found):
            raise ValueError(f"layer {i!r}: the model has {len(found)} layers, expected 0 to {len(found) - 1}.")
    if not wanted:
        raise ValueError("layers is empty, expected at least one; leave it out for all of them.")
    return sorted({i % len(found) for i in wanted})


def scale_beta(
    model: nn.Module,
    beta_factor: float | Tensor | Sequence[Any],
    layers: int | Iterable[int] | None = None,
    *,
    permanent: bool = False,
) -> Attached:
    """Multiplies the inverse temperature of layers by a factor: `with scale_beta(model, 4.0): ...` runs it colder.

    model: a known encoder. beta_factor: a number, one per head, or (layers, heads), from 0; a tensor may require
    gradients. layers: their indices in firing order; all by default. permanent: attach now, until `.remove()`.
    Exact on every backend: queries are scaled where they are made. Position terms that are computed from queries
    scale along (rotary, DeBERTa's); an additive position bias (MPNet, T5) does not.

    Returns what to use in a `with`, or to `.remove()`; the model leaves as it came.

    Example:
        >>> from attn_flow.hooks import record
        >>> from attn_flow.hooks.demo import tiny_bert
        >>> model, tokenizer = tiny_bert()
        >>> plain = record(model, tokenizer, ["a b c"])
        >>> with scale_beta(model, 4.0, layers=1):
        ...     colder = record(model, tokenizer, ["a b c"])
        >>> [bool((a == b).all()) for a, b in zip(plain.x, colder.x)]
        [True, True, False]
    """
    refuse_to_change(model)
    checks.flags(permanent=permanent)
    found = blocks(model)
    chosen = chosen_layers(found, layers)
    table = as_factors(beta_factor)
    if table.ndim > 2 or (table.ndim == 2 and table.shape[0] != len(chosen)):
        raise ValueError(
            f"beta_factor has shape {tuple(table.shape)}, expected (), (heads,) or (layers, heads) with layers = "
            f"{len(chosen)}."
        )
    rows = [table] * len(chosen) if table.ndim < 2 else list(table)
    factors = {i: _per_head(row, found[i], "beta_factor") for i, row in zip(chosen, rows)}

    def attach(stack: ExitStack) -> None:
        stack.enter_context(padded(found[0].root))
        clock = Clock(found)
        clock.attach(stack)
        attach_scaling(stack, found, clock, factors, every=layers is None and table.ndim < 2)

    attached = Attached(model, attach)
    return attached.apply() if permanent else attached


def as_factors(beta_factor: float | Tensor | Sequence[Any]) -> Tensor:
    if isinstance(beta_factor, Tensor):
        return beta_factor
    try:
        return torch.tensor(beta_factor, dtype=torch.get_default_dtype())
    except (TypeError, ValueError):
        raise ValueError(f"beta is a {type(beta_factor).__name__}, expected numbers.") from None


def _per_head(values: Tensor, block: Block, name: str) -> Tensor:
    if values.ndim == 1 and values.shape[0] not in (1, block.heads):
        raise ValueError(f"{name} has shape {tuple(values.shape)}, expected () or (heads,) = ({block.heads},).")
    if not bool((torch.isfinite(values) & (values >= 0)).all()):
        raise ValueError(
            f"{name} = {values.tolist()}, expected finite numbers from 0; for beta = inf use "
            "attentions(model)[layer].with_beta(math.inf)."
        )
    return values.expand(block.heads)


def factor_of(block: Block, beta: float | Tensor | None, beta_factor: float | Tensor | None) -> Tensor:
    """beta over the trained one, (heads,)."""
    if beta_factor is not None:
        return _per_head(as_factors(beta_factor), block, "beta_factor")
    assert beta is not None  # one of the two is
    wanted = _per_head(as_factors(beta), block, "beta")
    return wanted / block.beta(projections(block)["q"][0].shape[-2])


def attach_scaling(
    stack: ExitStack, found: list[Block], clock: Clock, factors: dict[int, Tensor], every: bool = False
) -> None:
    for block in {id(found[i].module): found[i] for i in factors}.values():
        mine = {i: f for i, f in factors.items() if found[i].module is block.module}
        if every:  # a shared block run beyond its depth is scaled there too
            mine = {-1: next(iter(mine.values()))}
        scale_queries(stack, block, FactorByTurn(clock, mine))


def scale_queries(stack: ExitStack, block: Block, factor: Factor) -> None:
    """Hooks that multiply the queries of one block by its factor."""
    arch, query = block.architecture, block[block.architecture.q]
    if isinstance(query, nn.MultiheadAttention):
        scaling = ScaledProjection(block, factor)
        stack.callback(query.register_forward_pre_hook(scaling.enter).remove)
        stack.callback(query.register_forward_hook(scaling.leave, always_call=True).remove)
        return
    stack.callback(query.register_forward_hook(ScaledOutput(block, factor, arch.fused, arch.q_bias)).remove)
    for path in arch.also_query:
        if has(block.module, path):
            stack.callback(block[path].register_forward_hook(ScaledOutput(block, factor, "", "")).remove)


class Factor(Protocol):
    """Where a beta_factor (heads,) comes from: that of a layer, or of the one at work; None: as trained."""

    def at(self, layer: int | None = None) -> Tensor | None: ...


class FactorByTurn:
    """Factors by layer; the key -1 stands for every layer."""

    def __init__(self, clock: Clock, factors: dict[int, Tensor]) -> None:
        self.clock, self.factors = clock, factors

    def at(self, layer: int | None = None) -> Tensor | None:
        return self.factors.get(-1, self.factors.get(self.clock.layer if layer is None else layer))


class Scaling:
    """The factor of a projection's outputs: (heads,) repeated over the head dimension, ones for keys and values."""

    def __init__(self, block: Block, factor: Factor, fused: str = "") -> None:
        self.block, self.factor, self.fused = block, factor, fused

    def words(self, layer: int) -> str:
        """What it does to a layer; empty if nothing."""
        factor = self.factor.at(layer)
        return "" if factor is None else f"beta_factor {[float(f'{v:.6g}') for v in factor.tolist()]}"

    def scale(self, width: int, like: Tensor) -> Tensor | None:
        """(width,), or None where this layer keeps its temperature."""
        factor = self.factor.at()
        if factor is None:
            return None
        factor = factor.to(like)
        if not self.fused:
            return factor.repeat_interleave(width // len(factor))
        q = factor.repeat_interleave(width // (3 * len(factor)))
        if self.fused == "(c h k)":
            return torch.cat([q, torch.ones_like(q), torch.ones_like(q)])
        per_head = q.view(len(factor), 1, -1)
        return torch.cat([per_head, torch.ones_like(per_head), torch.ones_like(per_head)], 1).flatten()


class ScaledOutput(Scaling):
    """A forward hook: out -> scale * out, and where a query bias b is added later, + (scale - 1) b."""

    def __init__(self, block: Block, factor: Factor, fused: str, bias: str) -> None:
        super().__init__(block, factor, fused)
        self.bias = bias

    def __call__(self, module: nn.Module, args: tuple[Any, ...], out: Tensor) -> Tensor | None:
        scale = self.scale(out.shape[-1], out)
        if scale is None:
            return None
        if not self.bias:
            return out * scale
        b = self.block.module.get_parameter(self.bias).view(self.block.heads, 1, -1)
        spread = torch.cat([b, torch.zeros_like(b), torch.zeros_like(b)], 1).flatten()
        return out * scale + (scale - 1) * spread


class ScaledProjection(Scaling):
    """torch's MultiheadAttention has no query module: its fused weight and bias are exchanged for the call."""

    def __init__(self, block: Block, factor: Factor) -> None:
        super().__init__(block, factor, "(c h k)")
        self.kept: dict[str, Any] = {}

    def enter(self, module: nn.Module, args: Any) -> None:
        weight = module.in_proj_weight
        scale = self.scale(weight.shape[0], weight)  # type: ignore[index, arg-type]
        if scale is None:
            return
        self.kept = {name: module._parameters[name] for name in ("in_proj_weight", "in_proj_bias")}
        for name, p in self.kept.items():
            if p is not None:
                module._parameters[name] = (scale[:, None] if p.ndim == 2 else scale) * p  # type: ignore[assignment]

    def leave(self, module: nn.Module, *_: Any) -> None:
        kept, self.kept = self.kept, {}
        module._parameters.update(kept)
