"""A pretrained layer as a flow: x -> x + A(x) becomes x(horizon) of x' = A(x), by the layer's own attention.

A(x) is what the layer adds to its residual stream, A(norm x) in a pre-norm block: masks, rotary and relative
positions stay as trained, and so do norms and feed-forward part. One Euler step of size one is the pretrained layer.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from attn_flow.dynamics.steppers import Step, euler
from attn_flow.geometry import Euclidean, Geometry
from attn_flow.hooks.attach import (
    Attached,
    Clock,
    forward_replaced,
    given,
    hidden,
    original_forward,
    padded,
    with_hidden,
)
from attn_flow.hooks.layout import Block, blocks
from attn_flow.hooks.temperature import attach_scaling, chosen_layers, factor_of

CACHES = ("past_key_values", "past_key_value", "layer_past", "use_cache")


def wrap(
    model: nn.Module,
    layers: int | Iterable[int] | None = None,
    *,
    beta: float | Tensor | None = None,
    steps: int = 1,
    horizon: float = 1.0,
    step: Step = euler,
    geometry: Geometry | None = None,
    block: bool = False,
    permanent: bool = False,
) -> Attached:
    """Replaces the attention of some layers by the flow of their own weights; `with wrap(model, [3], steps=32): ...`.

    layers: their indices in firing order (a shared block fires once per layer); all by default.
    beta: inverse temperature of the scores, a number or one per head, instead of the trained 1/sqrt(k).
    steps, horizon, step: how the flow is integrated; step is any stepper of attn_flow.
    geometry: a set to retract to between steps, such as geometries(model)[layer]; by default tokens move freely.
    block: flow the whole block instead, x' = f(x) - x, feed-forward part and norms included.
    permanent: attach now, until `.remove()`. Parameters and state dict keep their names either way.
    """
    found = blocks(model)
    chosen = chosen_layers(found, layers)
    if int(steps) != steps or steps < 1:
        raise ValueError(f"steps = {steps}, expected a whole number of at least 1.")
    if not 0 < horizon < math.inf:
        raise ValueError(f"horizon = {horizon}, expected a positive, finite time.")

    def attach(stack: ExitStack) -> None:
        stack.enter_context(padded(found[0].root))
        clock = Clock(found)
        clock.attach(stack)
        if beta is not None:
            factors = {i: factor_of(beta, found[i]) for i in chosen}
            attach_scaling(stack, found, clock, factors, every=layers is None)
        for one in {id(found[i].module): found[i] for i in chosen}.values():
            turns = None if layers is None else {i for i in chosen if found[i].module is one.module}
            flow = (BlockFlow if block else AttentionFlow)(one, clock, turns, int(steps), horizon, step, geometry)
            flow.attach(stack)

    attached = Attached(model, attach)
    return attached.apply() if permanent else attached


class Flow:
    """One wrapped module. Plain attributes and no closures: a copied or pickled model carries its own flow along."""

    def __init__(
        self,
        block: Block,
        clock: Clock,
        turns: set[int] | None,
        steps: int,
        horizon: float,
        step: Step,
        geometry: Geometry | None,
    ) -> None:
        self.block, self.clock, self.turns = block, clock, turns
        self.steps, self.horizon, self.step, self.geometry = steps, horizon, step, geometry

    @property
    def at_work(self) -> bool:
        return self.turns is None or self.clock.layer in self.turns

    def replace(self, stack: ExitStack, module: nn.Module, part: Part) -> None:
        if isinstance(module.__dict__.get("forward"), Part):
            raise ValueError(
                f"{self.block.path} is wrapped already; remove that wrap first, or give all options to one wrap."
            )
        stack.enter_context(forward_replaced(module, part))

    def displaced(self, velocity: Any, x0: Tensor) -> Tensor:
        """x(horizon) - x0. Without a geometry the displacement itself is integrated: one step of one loses no digit."""
        h = self.horizon / self.steps
        if self.geometry is None:
            u = torch.zeros_like(x0)
            for i in range(self.steps):
                u = self.step(lambda t, u: velocity(x0 + u), i * h, u, h, Euclidean())
            return u
        x, geometry = x0, self.geometry
        for i in range(self.steps):
            x = self.step(lambda t, x: geometry.tangent(x, velocity(x)), i * h, x, h, geometry)
        return x - x0

    def refuse_cache(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self.steps == 1 and self.step is euler:
            return
        if any(kwargs.get(name) not in (None, False) for name in CACHES) or any(
            hasattr(a, "get_seq_length") for a in args
        ):
            raise ValueError(
                f"{self.block.path} evaluates its attention several times and would fill a cache of keys and values "
                "with each; call the model with use_cache=False."
            )


class Part:
    """A replaced `forward` of one module, with what was there before."""

    def __init__(self, flow: Any, module: nn.Module) -> None:
        self.flow, self.module, self.before = flow, module, module.__dict__.get("forward")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError

    def original(self, *args: Any, **kwargs: Any) -> Any:
        return original_forward(self.module, self.before, *args, **kwargs)


class BlockFlow(Flow):
    """x' = f(x) - x for the whole block f."""

    def attach(self, stack: ExitStack) -> None:
        if self.block.root is self.block.module:
            raise ValueError(f"{self.block.path} is the model itself; expected a block inside it.")
        self.replace(stack, self.block.module, BlockPart(self, self.block.module))


class BlockPart(Part):
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not self.flow.at_work:
            return self.original(*args, **kwargs)
        self.flow.refuse_cache(args, kwargs)
        x0, last = given(args, kwargs), [None]
        # x + (f(x) - x) rounds; in float64 it rounds back to f(x). A geometry's tensors keep their own precision.
        wide = x0 if self.flow.geometry is not None or x0.device.type == "mps" else x0.double()

        def velocity(x: Tensor) -> Tensor:
            narrow = x.to(x0.dtype)
            last[:] = [self.original(*_with_tokens(args, narrow), **_named(kwargs, x0, narrow))]
            return hidden(last[0]).to(x.dtype) - x

        u = self.flow.displaced(velocity, wide)
        return with_hidden(last[0], (wide + u).to(x0.dtype))


class AttentionFlow(Flow):
    """x' = A(x) in place of one residual attention step. The layer is handed the displacement x(horizon) - x(0)."""

    x0: Tensor | None = None
    out: Tensor | None = None  # what the emitting module is to return, or has just computed
    emits: bool = False

    def attach(self, stack: ExitStack) -> None:
        block, row = self.block, self.block.row
        stack.callback(block.module.register_forward_pre_hook(self._enter, with_kwargs=True).remove)
        if isinstance(block.attn, nn.MultiheadAttention):
            # torch's fused path skips `forward` unless a hook is there.
            stack.callback(block.attn.register_forward_hook(_nothing).remove)
        self.replace(stack, block.attn, AttentionPart(self, block.attn))
        if row.emit:
            self.replace(stack, block[row.emit], EmitPart(self, block[row.emit]))

    def _enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.x0 = given(args, kwargs)


class AttentionPart(Part):
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        flow: AttentionFlow = self.flow
        if not flow.at_work:
            return self.original(*args, **kwargs)
        flow.refuse_cache(args, kwargs)
        block, z0, x0 = flow.block, given(args, kwargs), flow.x0
        assert x0 is not None  # the block's own hook has run
        inside = block.row.emit.startswith(block.row.attn + ".")
        last: list[Any] = []

        def velocity(x: Tensor) -> Tensor:
            z = x if block.placement == "post" else block[block.row.norm1](x)
            flow.out, flow.emits = None, False
            last[:] = [self.original(*_with_tokens(args, z), **_named(kwargs, z0, z))]
            if not block.row.emit:
                return hidden(last[0])
            if not inside:
                emit = block[block.row.emit]
                part = emit.forward
                assert isinstance(part, EmitPart)
                return part.original(hidden(last[0]))
            assert flow.out is not None  # the emitting module ran inside the attention
            return flow.out

        u = flow.displaced(velocity, x0)
        if not block.row.emit:
            return with_hidden(last[0], u)
        flow.out, flow.emits = u, True
        # ALBERT's attention ends in its own residual sum and norm: once more, with the displacement put in.
        return self.original(*args, **kwargs) if inside else last[0]


class EmitPart(Part):
    """The last module before the residual sum: hands over the displacement when it is ready."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        flow: AttentionFlow = self.flow
        if flow.emits and flow.out is not None:
            u, flow.out, flow.emits, flow.x0 = flow.out, None, False, None
            return u
        flow.out = self.original(*args, **kwargs)
        return flow.out


def _with_tokens(args: tuple[Any, ...], z: Tensor) -> list[Any]:
    """Positional arguments with other tokens (torch's MultiheadAttention takes them three times)."""
    return [z if a is args[0] else a for a in args]


def _named(kwargs: dict[str, Any], z0: Tensor, z: Tensor) -> dict[str, Any]:
    return {name: z if value is z0 else value for name, value in kwargs.items()}


def _nothing(*_: Any) -> None:
    """A hook that does nothing."""
