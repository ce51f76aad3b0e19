"""Evaluate the attention of a block at another temperature, or several times along a flow.

`wrap`, `scale_beta` and `replace_attention` put a `ChangedAttention` in the place of the `forward` of an attention
module. The modules of the block are looked up whenever attention runs. So whatever stands there acts: the trained
projection, a LoRA adapter around it, or a quantised one.

The scores are beta <q, k>, so that multiplying the queries changes beta exactly, with every attention implementation.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from attn_flow.hooks.layout import ENTRY, Block, LayerClock, at, hidden_states, input_states, with_hidden_states
from attn_flow.nn.options import FlowOptions

Settings = tuple[FlowOptions | None, Tensor | None]  # how a layer flows, and the multiple (heads,) of its beta
Exchange = tuple[dict[str, Any], str, Any]  # a dictionary of modules or parameters, a name in it, and its own entry


@dataclass(eq=False)
class Change:
    """What `wrap` and `scale_beta` change for a while.

    Args:
        options: how layers flow; None evaluates their attention once.
        factors: layer -> multiple (heads,) of the trained inverse temperature, or None. Other layers stay plain.
        clock: tells which layer runs a shared block.
    """

    options: FlowOptions | None
    factors: dict[int, Tensor | None]
    clock: LayerClock


class ChangedAttention:
    """The `forward` of an attention module whose queries are scaled, or whose layer is a flow.

    A flow returns the displacement x(horizon) - x(0) of x' = A(x), which the block adds to its tokens. This object has
    plain attributes only, so that a copied or pickled model carries its own along.
    """

    def __init__(self, block: Block) -> None:
        self.block, self.changes = block, list[Change]()
        self.module: Any = block.attn
        self.x0: Any = None  # the residual stream before the norm of a pre-norm block, while attention runs
        self.before = self.module.__dict__.get("forward")
        self.module.forward = self
        self.handles: list[RemovableHandle] = []
        if block.norm_placement != "post":
            # This hook is inside of the block, so that gradient checkpointing runs it again.
            norm = block[block.architecture.norm1]
            self.handles.append(norm.register_forward_pre_hook(self._enter_norm))
        # torch's encoder skips `forward` in its fused path unless there is a hook, and packs padded batches.
        self.handles.append(self.module.register_forward_hook(self._leave))
        self.had_nested_tensors = getattr(block.root, "use_nested_tensor", False)
        if self.had_nested_tensors:
            block.root.use_nested_tensor = False  # type: ignore[assignment]

    def remove(self, change: Change | None = None) -> None:
        """End a change. The module has its own `forward` again after the last."""
        if change is not None:
            self.changes.remove(change)
        if self.changes or hasattr(self.module, ENTRY):
            return
        for handle in self.handles:
            handle.remove()
        if self.had_nested_tensors:
            self.block.root.use_nested_tensor = True  # type: ignore[assignment]
        if self.module.__dict__.get("forward") is not self:
            self.module._old_forward = self.before or MethodType(type(self.module).forward, self.module)
        elif self.before is None:
            del self.module.forward
        else:
            self.module.forward = self.before

    def settings(self, layer: int) -> Settings:
        """How a layer flows, and the product of all factors of its inverse temperature."""
        child: Any = getattr(self.module, ENTRY, None)  # a LayerFlow, or what PEFT or accelerate put in its place
        active = [(change.options, change.factors[layer]) for change in self.changes if layer in change.factors]
        if child is not None:
            active.append((child.options, child()))  # called as a module, so that offloaded weights are there
        flow, product = None, None
        for options, factor in active:
            flow = flow if options is None else options
            if factor is not None:
                product = factor if product is None else product * factor.to(product)
        return flow, product

    def _enter_norm(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        self.x0 = args[0]

    def _leave(self, *_: Any) -> None:
        self.x0 = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        layer = self.changes[0].clock.layer_of(self.block) if self.changes else self.block.index
        options, factor = self.settings(layer)
        exchanged = exchange_queries(self.block, factor)
        try:
            return self.original(*args, **kwargs) if options is None else self._flow(options, *args, **kwargs)
        finally:
            for entries, name, own in reversed(exchanged):
                entries[name] = own

    def original(self, *args: Any, **kwargs: Any) -> Any:
        """The forward pass before the change. No bound method is kept, so that a copied model calls its own."""
        if self.before is None:
            return type(self.module).forward(self.module, *args, **kwargs)
        return self.before(*args, **kwargs)

    def _flow(self, options: FlowOptions, *args: Any, **kwargs: Any) -> Any:
        block, arch = self.block, self.block.architecture
        is_post, before = block.norm_placement == "post", input_states(args, kwargs)
        output: Any = None
        # The last module before the residual sum: inside the attention module, after it, or the attention itself.
        emit = OutputModule(block, arch.emit) if arch.emit else None
        is_inside = arch.emit.startswith(arch.attn + ".")

        def velocity(t: float, x: Tensor) -> Tensor:
            nonlocal output
            z = x if is_post else block[arch.norm1](x)
            # torch's MultiheadAttention takes the tokens three times.
            new_args = tuple(z if a is before else a for a in args)
            output = self.original(*new_args, **{name: z if a is before else a for name, a in kwargs.items()})
            if emit is None:
                added = hidden_states(output)
            else:
                added = emit.output if is_inside else emit.module.forward(hidden_states(output))
            return options.geometry.tangent(x, added)

        if emit is not None and is_inside:
            emit.install()
        try:
            u = options.displacement(velocity, before if is_post else self.x0)
            if emit is None:
                return with_hidden_states(output, u)
            emit.displacement = u
            if not is_inside:
                emit.install()
                return output
            # ALBERT's attention ends in its own residual sum and norm: once more, with the displacement put in.
            return self.original(*args, **kwargs)
        finally:
            if emit is not None and is_inside:
                emit.remove()


def changed_attention(block: Block) -> ChangedAttention | None:
    """What stands in the place of `forward` in a changed attention module; None if it is as it was loaded."""
    attributes = block.attn.__dict__
    forwards = attributes.get("forward"), attributes.get("_old_forward")  # the second is where accelerate keeps it
    return next((forward for forward in forwards if isinstance(forward, ChangedAttention)), None)


def read_settings(block: Block) -> Settings:
    """How a layer flows now, and the multiple (heads,) of its trained inverse temperature; None for what is trained."""
    changed = changed_attention(block)
    return (None, None) if changed is None else changed.settings(block.index)


def describe_changes(block: Block) -> str:
    """What `wrap`, `replace_attention` and `scale_beta` have changed in a layer, in words; empty if it is as loaded."""
    options, factor = read_settings(block)
    words = [] if options is None else [f"a flow with {options}"]
    if factor is not None:
        words.append(f"beta_factor {[float(f'{value:.6g}') for value in factor.tolist()]}")
    return "; ".join(words)


class OutputModule(nn.Module):
    """Stands in for the last module before the residual sum, to read its output or to return the displacement."""

    def __init__(self, block: Block, path: str) -> None:
        super().__init__()
        owner, _, self.name = path.rpartition(".")
        self.entries = block[owner]._modules
        module: Any = self.entries[self.name]
        self.module: Any = module.module if isinstance(module, OutputModule) else module  # after an interrupted call
        self.output: Any = None  # of the last call
        self.displacement: Tensor | None = None
        if self.module._forward_hooks or self.module._forward_pre_hooks:  # listeners get the displacement
            for name, hooks in vars(self.module).items():
                if name.startswith(("_forward_hooks", "_forward_pre_hooks")):
                    setattr(self, name, hooks)

    def install(self) -> None:
        self.entries[self.name] = self

    def remove(self) -> None:
        self.entries[self.name] = self.module

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        if self.displacement is None:
            self.output = self.module.forward(*args, **kwargs)
            return self.output
        self.remove()
        return self.displacement


# --- scaled queries ---


def exchange_queries(block: Block, factor: Tensor | None) -> list[Exchange]:
    """Exchange what makes the queries of a block for versions scaled by (heads,), and list the own entries."""
    arch = block.architecture
    exchanged: list[Exchange] = []
    if factor is None:
        return exchanged
    for path in (arch.q, *arch.also_query):
        module = at(block.module, path)
        if isinstance(module, nn.MultiheadAttention):  # it has no query module
            for name in ("in_proj_weight", "in_proj_bias"):
                _exchange_parameter(exchanged, module, name, factor, "(c h k)")
        elif module is not None:
            owner, _, name = path.rpartition(".")
            modules = block[owner]._modules
            exchanged.append((modules, name, module))
            modules[name] = ScaledProjection(module, factor, arch.fused if path == arch.q else "")
    if arch.q_bias:
        owner, _, name = arch.q_bias.rpartition(".")
        _exchange_parameter(exchanged, block[owner], name, factor, "")
    return exchanged


def _exchange_parameter(exchanged: list[Exchange], owner: nn.Module, name: str, factor: Tensor, fused: str) -> None:
    parameter = owner._parameters[name]
    if parameter is not None:
        exchanged.append((owner._parameters, name, parameter))
        scale = expand_factor(factor.to(parameter), parameter.shape[0], fused)
        owner._parameters[name] = (scale[:, None] if parameter.ndim == 2 else scale) * parameter  # type: ignore[assignment]


class ScaledProjection(nn.Module):
    """A projection whose queries are multiplied by a factor (heads,)."""

    def __init__(self, projection: nn.Module, factor: Tensor, fused: str) -> None:
        super().__init__()
        self.projection, self.factor, self.fused = projection, factor, fused

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        output = self.projection(*args, **kwargs)
        return output * expand_factor(self.factor.to(output), output.shape[-1], self.fused)


def expand_factor(factor: Tensor, width: int, fused: str) -> Tensor:
    """The factor (heads,) for every output of a projection, (width,): one for keys and values of a fused one."""
    if not fused:
        return factor.repeat_interleave(width // len(factor))
    queries = factor[:, None].expand(-1, width // (3 * len(factor)))  # (h, k)
    axis = 0 if fused == "(c h k)" else 1
    return torch.stack([queries, torch.ones_like(queries), torch.ones_like(queries)], axis).flatten()
