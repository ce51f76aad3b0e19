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

from attn_flow.base import checks
from attn_flow.dynamics.steppers import Adaptive, Step, euler, named_step
from attn_flow.geometry import Euclidean, Geometry, known_geometry
from attn_flow.hooks.attach import (
    Attached,
    Clock,
    given,
    hidden,
    original_forward,
    padded,
    replace_forward,
    with_hidden,
)
from attn_flow.hooks.layout import Block, blocks, refuse_to_change
from attn_flow.hooks.temperature import attach_scaling, chosen_layers, factor_of
from attn_flow.nn.layer import ContinuousAttentionLayer
from attn_flow.nn.stack import DeepStack, placed

CACHES = ("past_key_values", "past_key_value", "layer_past", "use_cache")


def wrap(
    model: nn.Module,
    layers: int | Iterable[int] | None = None,
    *,
    beta: float | Tensor | None = None,
    beta_factor: float | Tensor | None = None,
    steps: int = 1,
    horizon: float = 1.0,
    step: Step | str = euler,
    geometry: Geometry | None = None,
    block: bool = False,
    permanent: bool = False,
) -> Attached:
    """Replaces the attention of some layers by the flow of their own weights: `with wrap(model, [3], steps=32): ...`.

    model: a known encoder, or what holds one (compiled models: wrap first, then compile), or a DeepStack.
    layers: their indices in firing order (a shared block fires once per layer); all by default.
    beta: inverse temperature of the scores, a number or one per head, instead of the trained 1/sqrt(k).
    beta_factor: the same as a multiple of the trained one.
    steps, horizon, step: the flow runs to time `horizon` in so many steps; step is "euler", "rk4", "dopri5", or any
        step function of attn_flow or your own.
    geometry: a set to retract to between steps, such as geometries(model)[layer]; by default tokens move freely.
    block: flow the whole block instead, x' = f(x) - x, feed-forward part and norms included.
    permanent: attach now, until `.remove()`. Parameters and state dict keep their names either way.

    Returns what to use in a `with`, or to `.remove()`; the model leaves as it came. Gradients flow through it, also in
    a backward pass after the `with`. To train, save and load a model of flows: `replace_attention`.

    Example:
        >>> from attn_flow.hooks import record
        >>> from attn_flow.hooks.demo import tiny_bert
        >>> model, tokenizer = tiny_bert()
        >>> plain = record(model, tokenizer, ["a b c"])
        >>> with wrap(model, layers=[1]):  # one Euler step of one is the pretrained layer
        ...     same = record(model, tokenizer, ["a b c"])
        >>> with wrap(model, layers=[1], beta=8.0, steps=4, step="rk4"):
        ...     other = record(model, tokenizer, ["a b c"])
        >>> bool((same.x - plain.x).abs().max() < 1e-5), bool((other.x - plain.x).abs().max() < 1e-5)
        (True, False)
    """
    if isinstance(model, DeepStack):
        if block or geometry is not None:
            raise ValueError("a DeepStack has its own blocks and geometry; expected neither block nor geometry.")
        stepper = fixed_step(step, steps, horizon)
        attached = Attached(model, Rerun(model, layers, beta, beta_factor, steps, horizon, stepper))
        return attached.apply() if permanent else attached
    refuse_to_change(model)
    checks.flags(block=block, permanent=permanent)
    geometry = None if geometry is None else known_geometry(geometry)
    found = blocks(model)
    chosen = chosen_layers(found, layers)
    if beta is not None and beta_factor is not None:
        raise ValueError(f"beta = {beta} and beta_factor = {beta_factor}: expected one of them at most.")
    stepper = fixed_step(step, steps, horizon)

    def attach(stack: ExitStack) -> None:
        stack.enter_context(padded(found[0].root))
        clock = Clock(found)
        clock.attach(stack)
        if beta is not None or beta_factor is not None:
            factors = {i: factor_of(found[i], beta, beta_factor) for i in chosen}
            attach_scaling(stack, found, clock, factors, every=layers is None)
        for one in {id(found[i].module): found[i] for i in chosen}.values():
            turns = None if layers is None else {i for i in chosen if found[i].module is one.module}
            wrapped = (WrappedBlock if block else WrappedAttention)(
                one, clock, turns, int(steps), horizon, stepper, geometry
            )
            wrapped.attach(stack)

    attached = Attached(model, attach)
    return attached.apply() if permanent else attached


def fixed_step(step: Step | str, steps: int, horizon: float) -> Step:
    """The step of this name, or ValueError for what no flow of a layer can be run by."""
    stepper = named_step(step)
    if isinstance(stepper, Adaptive):
        raise ValueError("step is adaptive, expected one of fixed size: euler, rk4, dopri5 or your own, and `steps`.")
    checks.whole("steps", steps)
    checks.positive("horizon", horizon)
    if math.isinf(horizon):
        raise ValueError("horizon = inf, expected a positive, finite time.")
    return stepper


class Rerun:
    """A DeepStack's layers run otherwise for a while: their time, steps and temperature."""

    def __init__(
        self,
        stack: DeepStack,
        layers: int | Iterable[int] | None,
        beta: float | Tensor | None,
        beta_factor: float | Tensor | None,
        steps: int,
        horizon: float,
        step: Step,
    ) -> None:
        if beta is not None and beta_factor is not None:
            raise ValueError(f"beta = {beta} and beta_factor = {beta_factor}: expected one of them at most.")
        self.chosen = chosen_layers(list(stack.layers), layers)
        self.stack, self.beta, self.beta_factor = stack, beta, beta_factor
        self.now = {"steps": int(steps), "horizon": horizon, "step": placed(step, stack.placement)}

    def __call__(self, held: ExitStack) -> None:
        for i in self.chosen:
            layer = self.stack.layers[i]
            assert isinstance(layer, ContinuousAttentionLayer)
            was = {name: getattr(layer, name) for name in self.now}
            held.callback(_run_again, layer, was, layer.beta.detach().clone())
            beta = layer.beta.detach() if self.beta is None else torch.as_tensor(self.beta)
            factor = 1.0 if self.beta_factor is None else torch.as_tensor(self.beta_factor)
            _run_again(layer, self.now, beta * factor)


def _run_again(layer: ContinuousAttentionLayer, how: dict[str, Any], beta: Tensor) -> None:
    for name, value in how.items():
        setattr(layer, name, value)
    if not torch.equal(layer.beta.detach(), beta.expand(layer.heads).to(layer.beta)):
        layer.beta = beta


class Wrapped:
    """One wrapped module. Plain attributes and no closures: a copied or pickled model carries its own flow along."""

    def __init__(
        self,
        block: Block,
        clock: Clock | None,
        turns: set[int] | None,
        steps: int,
        horizon: float,
        step: Step,
        geometry: Geometry | None = None,
    ) -> None:
        self.block, self.clock, self.turns = block, clock, turns  # turns None: at work whenever the block fires
        self.steps, self.horizon, self.step, self.geometry = steps, horizon, step, geometry

    @property
    def at_work(self) -> bool:
        return self.turns is None or self.clock is None or self.clock.layer in self.turns

    def words(self) -> str:
        """What it is, for a person and for comparison."""
        step = getattr(self.step, "name", getattr(self.step, "__name__", repr(self.step)))
        geometry = "" if self.geometry is None else f" on {type(self.geometry).__name__}"
        return f"a flow of time {self.horizon:g} in {self.steps} steps ({step}){geometry}"

    def replace(self, stack: ExitStack, module: nn.Module, part: ReplacedForward) -> None:
        if isinstance(module.__dict__.get("forward"), ReplacedForward):
            raise ValueError(
                f"{self.block.path} is wrapped already; remove that wrap first, or give all options to one wrap."
            )
        replace_forward(stack, module, part)

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
                "with each; call the model with use_cache=False, or set model.config.use_cache = False."
            )


class ReplacedForward:
    """A replaced `forward` of one module, with what was there before."""

    def __init__(self, wrapped: Any, module: nn.Module) -> None:
        self.wrapped, self.module, self.before = wrapped, module, module.__dict__.get("forward")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError

    def original(self, *args: Any, **kwargs: Any) -> Any:
        return original_forward(self.module, self.before, *args, **kwargs)


class WrappedBlock(Wrapped):
    """x' = f(x) - x for the whole block f."""

    def attach(self, stack: ExitStack) -> None:
        if self.block.root is self.block.module:
            raise ValueError(f"{self.block.path} is the model itself; expected a block inside it.")
        self.replace(stack, self.block.module, BlockForward(self, self.block.module))


class BlockForward(ReplacedForward):
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not self.wrapped.at_work:
            return self.original(*args, **kwargs)
        self.wrapped.refuse_cache(args, kwargs)
        x0, last = given(args, kwargs), [None]
        # x + (f(x) - x) rounds; in float64 it rounds back to f(x). A geometry's tensors keep their own precision.
        wide = x0 if self.wrapped.geometry is not None or x0.device.type == "mps" else x0.double()

        def velocity(x: Tensor) -> Tensor:
            narrow = x.to(x0.dtype)
            last[:] = [self.original(*_with_tokens(args, narrow), **_named(kwargs, x0, narrow))]
            return hidden(last[0]).to(x.dtype) - x

        u = self.wrapped.displaced(velocity, wide)
        return with_hidden(last[0], (wide + u).to(x0.dtype))


class WrappedAttention(Wrapped):
    """x' = A(x) in place of one residual attention step. The layer is handed the displacement x(horizon) - x(0)."""

    x0: Tensor | None = None
    out: Tensor | None = None  # what the emitting module is to return, or has just computed
    emits: bool = False

    def attach(self, stack: ExitStack) -> None:
        block, arch = self.block, self.block.architecture
        stack.callback(block.module.register_forward_pre_hook(self._enter, with_kwargs=True).remove)
        if isinstance(block.attn, nn.MultiheadAttention):
            # torch's fused path skips `forward` unless a hook is there.
            stack.callback(block.attn.register_forward_hook(_nothing).remove)
        self.replace(stack, block.attn, AttentionForward(self, block.attn))
        if arch.emit:
            self.replace(stack, block[arch.emit], EmitForward(self, block[arch.emit]))

    def _enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.x0 = given(args, kwargs)


class AttentionForward(ReplacedForward):
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        wrapped: WrappedAttention = self.wrapped
        if not wrapped.at_work:
            return self.original(*args, **kwargs)
        wrapped.refuse_cache(args, kwargs)
        block, z0, x0, wrapped.x0 = wrapped.block, given(args, kwargs), wrapped.x0, None
        assert x0 is not None  # the block's own hook has run
        inside = block.architecture.emit.startswith(block.architecture.attn + ".")
        last: list[Any] = []

        def velocity(x: Tensor) -> Tensor:
            z = x if block.norm_placement == "post" else block[block.architecture.norm1](x)
            wrapped.out, wrapped.emits = None, False
            last[:] = [self.original(*_with_tokens(args, z), **_named(kwargs, z0, z))]
            if not block.architecture.emit:
                return hidden(last[0])
            if not inside:
                emit = block[block.architecture.emit]
                part = emit.forward
                assert isinstance(part, EmitForward)
                return part.original(hidden(last[0]))
            assert wrapped.out is not None  # the emitting module ran inside the attention
            return wrapped.out

        u = wrapped.displaced(velocity, x0)
        if not block.architecture.emit:
            return with_hidden(last[0], u)
        wrapped.out, wrapped.emits = u, True
        # ALBERT's attention ends in its own residual sum and norm: once more, with the displacement put in.
        return self.original(*args, **kwargs) if inside else last[0]


class EmitForward(ReplacedForward):
    """The last module before the residual sum: hands over the displacement when it is ready."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        wrapped: WrappedAttention = self.wrapped
        if wrapped.emits and wrapped.out is not None:
            u, wrapped.out, wrapped.emits = wrapped.out, None, False
            return u
        wrapped.out = self.original(*args, **kwargs)
        return wrapped.out


def _with_tokens(args: tuple[Any, ...], z: Tensor) -> list[Any]:
    """Positional arguments with other tokens (torch's MultiheadAttention takes them three times)."""
    return [z if a is args[0] else a for a in args]


def _named(kwargs: dict[str, Any], z0: Tensor, z: Tensor) -> dict[str, Any]:
    return {name: z if value is z0 else value for name, value in kwargs.items()}


def _nothing(*_: Any) -> None:
    """A hook that does nothing."""
