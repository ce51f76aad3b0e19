"""Evaluate the attention of a block at another temperature, or several times along a flow.

`wrap`, `scale_beta` and `replace_attention` put a `ChangedAttention` in the place of the `forward` of an attention
module. The modules of the block are looked up whenever attention runs. So whatever stands there acts: the trained
projection, a LoRA adapter around it, or a quantised one.

The scores are beta <q, k>, so that multiplying the queries changes beta exactly, with every attention implementation.
"""

from __future__ import annotations

from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from attn_flow.hooks.layout import Block, LayerClock, at, blocks, hidden_states, input_states, with_hidden_states
from attn_flow.nn.options import FlowOptions

CACHES = ("past_key_values", "past_key_value", "layer_past")
Settings = tuple[FlowOptions | None, Tensor | None]  # how a layer flows, and the multiple (heads,) of its beta
Exchange = tuple[dict[str, Any], str, Any]  # a dictionary of modules or parameters, a name in it, and its own entry


class ChangedAttention:
    """The `forward` of an attention module whose queries are scaled, or whose layer is a flow.

    A flow returns the displacement x(horizon) - x(0) of x' = A(x), which the block adds to its tokens. This object has
    plain attributes only, so that a copied or pickled model carries its own along.

    Args:
        block: the block of the attention module.
        clock: tells which layer runs a shared block.
        options: how the layer flows; None evaluates attention once.
        factors: layer -> multiple (heads,) of the trained inverse temperature, or None. Other layers stay plain.
    """

    x0: Tensor | None = None  # the residual stream before the norm of a pre-norm block

    def __init__(
        self,
        block: Block,
        clock: LayerClock | None = None,
        options: FlowOptions | None = None,
        factors: dict[int, Tensor | None] | None = None,
    ) -> None:
        self.block, self.module, self.clock = block, block.attn, clock
        self.options, self.factors = options, factors or {}
        self.handles: list[RemovableHandle] = []

    @property
    def is_flow(self) -> bool:
        return self.options is not None

    def settings(self, layer: int) -> Settings | None:
        """How a layer is evaluated; None if it stays plain."""
        return (self.options, self.factors[layer]) if layer in self.factors else None

    def attach(self) -> None:
        module, block = self.module, self.block
        if self.is_flow and any(change.is_flow for change in changes_of(module)):
            raise ValueError(f"{block.path} is wrapped already; remove that wrap first, or give all options to one.")
        self.before = module.__dict__.get("forward")
        module.forward = self  # type: ignore[assignment]
        if self.is_flow and block.norm_placement != "post":
            # This hook is inside of the block, so that gradient checkpointing runs it again.
            norm = block[block.architecture.norm1]
            self.handles.append(norm.register_forward_pre_hook(self._enter_norm))
        # torch's encoder skips `forward` in its fused path unless there is a hook, and packs padded batches.
        self.had_nested_tensors = getattr(block.root, "use_nested_tensor", False)
        if isinstance(module, nn.MultiheadAttention):
            self.handles.append(module.register_forward_hook(do_nothing))
            block.root.use_nested_tensor = False  # type: ignore[assignment]

    def detach(self) -> None:
        for handle in self.handles:
            handle.remove()
        if self.had_nested_tensors:
            self.block.root.use_nested_tensor = True  # type: ignore[assignment]
        outer = next((change for change in changes_of(self.module) if change.before is self), None)
        name = "forward" if self.module.__dict__.get("forward") is self else "_old_forward"
        if outer is not None:
            outer.before = self.before
        elif name == "forward" and self.before is None:
            del self.module.forward
        else:
            setattr(self.module, name, self.before or MethodType(type(self.module).forward, self.module))

    def _enter_norm(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        self.x0 = args[0]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        settings = self.settings(self.block.index if self.clock is None else self.clock.layer_of(self.block))
        if settings is None:
            return self.original(*args, **kwargs)
        options, factor = settings
        exchanged = exchange_queries(self.block, factor)
        try:
            if options is None:
                return self.original(*args, **kwargs)
            caches = [a for a in args if hasattr(a, "get_seq_length")] + [kwargs.get(name) for name in CACHES]
            if options.evaluations > 1 and any(cache is not None for cache in caches):
                raise ValueError(
                    f"{self.block.path} evaluates its attention {options.evaluations} times and each would fill the "
                    "cache of keys and values; pass use_cache=False, also to generate()."
                )
            return self._flow(options, *args, **kwargs)
        finally:
            for entries, name, own in reversed(exchanged):
                entries[name] = own
            self.x0 = None

    def original(self, *args: Any, **kwargs: Any) -> Any:
        """The forward pass before the change. No bound method is kept, so that a copied model calls its own."""
        if self.before is None:
            return type(self.module).forward(self.module, *args, **kwargs)
        return self.before(*args, **kwargs)

    def _flow(self, options: FlowOptions, *args: Any, **kwargs: Any) -> Any:
        block, arch = self.block, self.block.architecture
        before = input_states(args, kwargs)
        x0 = before if block.norm_placement == "post" else self.x0
        assert x0 is not None  # the norm of the block has run
        output: list[Any] = []
        # The last module before the residual sum: inside the attention module, after it, or the attention itself.
        emit = OutputModule(block, arch.emit) if arch.emit else None
        is_inside = arch.emit.startswith(arch.attn + ".")

        def velocity(x: Tensor) -> Tensor:
            z = x if block.norm_placement == "post" else block[arch.norm1](x)
            # torch's MultiheadAttention takes the tokens three times.
            new_args = tuple(z if a is before else a for a in args)
            new_kwargs = {name: z if a is before else a for name, a in kwargs.items()}
            output[:] = [self.original(*new_args, **new_kwargs)]
            if emit is None:
                return hidden_states(output[0])
            return emit.take() if is_inside else emit.module.forward(hidden_states(output[0]))

        if emit is not None and is_inside:
            emit.install()
        try:
            u = options.displacement(lambda t, x: options.geometry.tangent(x, velocity(x)), x0)
            if emit is None:
                return with_hidden_states(output[0], u)
            emit.displacement = u
            if not is_inside:
                emit.install()
                return output[0]
            # ALBERT's attention ends in its own residual sum and norm: once more, with the displacement put in.
            return self.original(*args, **kwargs)
        finally:
            if emit is not None and is_inside:
                emit.remove()


def do_nothing(*_: Any) -> None:
    """A hook without effect."""


def changes_of(module: nn.Module) -> list[ChangedAttention]:
    """The changes of an attention module, the outermost first."""
    changes: list[ChangedAttention] = []
    forward = module.__dict__.get("forward")
    if not isinstance(forward, ChangedAttention):
        forward = module.__dict__.get("_old_forward")  # where accelerate keeps it
    while isinstance(forward, ChangedAttention):
        changes.append(forward)
        forward = forward.before
    return changes


def active_factor(block: Block, layer: int) -> Tensor | None:
    """The product (heads,) of all factors of the trained inverse temperature of a layer; None if there is none."""
    settings = [change.settings(layer) for change in changes_of(block.attn)]
    factors = [setting[1] for setting in settings if setting is not None and setting[1] is not None]
    return torch.stack(factors).prod(0) if factors else None


def describe_changes(block: Block) -> list[str]:
    """What `wrap`, `replace_attention` and `scale_beta` have changed in a block, in words."""
    settings = [change.settings(block.index) for change in changes_of(block.attn)]
    words = [f"a flow with {setting[0]}" for setting in settings if setting is not None and setting[0] is not None]
    factor = active_factor(block, block.index)
    if factor is not None:
        words.append(f"beta_factor {[float(f'{value:.6g}') for value in factor.tolist()]}")
    return words


def list_changes(model: nn.Module) -> list[str]:
    """What is wrapped or scaled in a model, layer by layer; empty for a model as it was loaded."""
    return [f"layer {block.index}: {change}" for block in blocks(model) for change in describe_changes(block)]


class OutputModule(nn.Module):
    """Stands in for the last module before the residual sum, to read its output or to return the displacement."""

    def __init__(self, block: Block, path: str) -> None:
        super().__init__()
        owner, _, self.name = path.rpartition(".")
        self.entries = block[owner]._modules
        module: Any = self.entries[self.name]
        self.module: Any = module.module if isinstance(module, OutputModule) else module  # after an interrupted call
        self.output: Tensor | None = None
        self.displacement: Tensor | None = None
        if self.module._forward_hooks or self.module._forward_pre_hooks:  # listeners get the displacement
            for name, hooks in vars(self.module).items():
                if name.startswith(("_forward_hooks", "_forward_pre_hooks")):
                    setattr(self, name, hooks)

    def install(self) -> None:
        self.entries[self.name] = self

    def remove(self) -> None:
        self.entries[self.name] = self.module

    def take(self) -> Tensor:
        """The output of the last call."""
        output, self.output = self.output, None
        assert output is not None  # the attention has called its last module
        return output

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

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self._modules["projection"], name)


def expand_factor(factor: Tensor, width: int, fused: str) -> Tensor:
    """The factor (heads,) for every output of a projection, (width,): one for keys and values of a fused one."""
    if not fused:
        return factor.repeat_interleave(width // len(factor))
    queries = factor[:, None].expand(-1, width // (3 * len(factor)))  # (h, k)
    axis = 0 if fused == "(c h k)" else 1
    return torch.stack([queries, torch.ones_like(queries), torch.ones_like(queries)], axis).flatten()
