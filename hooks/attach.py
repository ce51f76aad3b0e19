"""Attaching to a running encoder, and leaving it exactly as it was found."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from attn_flow.hooks.layout import Block, blocks


def hidden(out: Any) -> Tensor:
    """The hidden states in what a layer returns: itself in transformers 5, the head of a tuple elsewhere."""
    return out[0] if isinstance(out, tuple | list) else out


def with_hidden(out: Any, x: Tensor) -> Any:
    """The same container with other hidden states."""
    return type(out)([x, *out[1:]]) if isinstance(out, tuple | list) else x


def given(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor:
    """The hidden states a layer is called with."""
    return args[0] if args else kwargs.get("hidden_states", kwargs.get("src", kwargs.get("query")))


class Clock:
    """Which layer is at work: counts the firings of blocks in a pass, so that a shared block knows its turn."""

    def __init__(self, found: list[Block]) -> None:
        self.blocks = found
        self.layer = -1
        self.awake = False
        self._fired = -1

    def attach(self, stack: ExitStack) -> None:
        root = self.blocks[0].root
        stack.callback(root.register_forward_pre_hook(self._begin).remove)
        stack.callback(root.register_forward_hook(self._end, always_call=True).remove)
        for module in {id(b.module): b.module for b in self.blocks}.values():
            stack.callback(module.register_forward_pre_hook(self._fire).remove)

    def _begin(self, *_: Any) -> None:
        self._fired, self.awake = -1, True

    def _end(self, *_: Any) -> None:
        self.awake = False

    def _fire(self, module: nn.Module, *_: Any) -> None:
        turns = [b.index for b in self.blocks if b.module is module]
        if self.awake:
            self._fired += 1
        # A block of its own is known by itself, also where checkpointing fires it a second time.
        self.layer = turns[0] if len(turns) == 1 else self._fired


def replace_forward(stack: ExitStack, module: nn.Module, forward: Callable[..., Any]) -> None:
    """An instance's own `forward`, until the stack is closed (not when it is forgotten, as a generator would)."""
    had, before = "forward" in module.__dict__, module.__dict__.get("forward")
    module.forward = forward
    stack.callback(_give_back, module, had, before)


def _give_back(module: nn.Module, had: bool, before: Any) -> None:
    if had:
        module.forward = before
    else:
        del module.forward


def original_forward(module: nn.Module, before: Callable[..., Any] | None, *args: Any, **kwargs: Any) -> Any:
    """What the module computed before a replacement; not a bound method, so that a copied model calls its own."""
    return type(module).forward(module, *args, **kwargs) if before is None else before(*args, **kwargs)


class padded:
    """torch.nn.TransformerEncoder packs padded batches into nested tensors unless told not to."""

    def __init__(self, root: nn.Module) -> None:
        self.root = root if isinstance(root, nn.TransformerEncoder) else None

    def __enter__(self) -> None:
        if self.root is not None:
            self.before, self.root.use_nested_tensor = self.root.use_nested_tensor, False

    def __exit__(self, *_: Any) -> None:
        if self.root is not None:
            self.root.use_nested_tensor = self.before


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Dropout off and no gradients; every submodule gets its own mode back."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, mode in modes:
            module.training = mode


@contextmanager
def deepened(model: nn.Module, depth: int | None) -> Iterator[None]:
    """A model of one shared block fired `depth` times instead of its trained number."""
    if depth is None:
        yield
        return
    found = blocks(model)
    different = len({id(b.module) for b in found})
    root: Any = found[0].root
    tied = isinstance(root, nn.TransformerEncoder) and len(found) > 1
    if not (found[0].architecture.shared or tied) or different > 1:
        raise ValueError(
            f"depth = {depth}: this {found[0].architecture.name} has {different} different blocks; only a model of one "
            "shared block (ALBERT) can be run beyond its trained depth."
        )
    if depth < 1:
        raise ValueError(f"depth = {depth}, expected at least one layer.")
    if tied:
        layers, root.layers = root.layers, nn.ModuleList([found[0].module] * depth)
        try:
            yield
        finally:
            root.layers = layers
        return
    config: Any = root.config
    before = config.num_hidden_layers
    config.num_hidden_layers = depth
    try:
        yield
    finally:
        config.num_hidden_layers = before


class Attached:
    """Something attached to a model: removed at the end of a `with`, or by `remove()` when it is permanent."""

    def __init__(self, model: nn.Module, attach: Callable[[ExitStack], None]) -> None:
        self.model, self._attach = model, attach
        self._stack: ExitStack | None = None

    def apply(self) -> Attached:
        if self._stack is not None:
            raise ValueError("already attached to the model; use it in one `with` at a time.")
        with ExitStack() as stack:
            self._attach(stack)
            self._stack = stack.pop_all()
        return self

    def remove(self) -> None:
        """The model as it was found."""
        stack, self._stack = self._stack, None
        if stack is not None:
            stack.close()

    @property
    def present(self) -> bool:
        return self._stack is not None

    def __enter__(self) -> nn.Module:
        if self._stack is None:
            self.apply()
            assert self._stack is not None
            for module in self.model.modules():
                if "_gradient_checkpointing_func" in module.__dict__:
                    self._stack.enter_context(remembered(module, self))
        return self.model

    @contextmanager
    def once_more(self) -> Iterator[None]:
        """Attached for a moment, after it was removed."""
        if self.present:
            yield
            return
        with ExitStack() as stack:
            self._attach(stack)
            yield

    def __exit__(self, *_: Any) -> None:
        self.remove()


@contextmanager
def remembered(module: Any, attached: Attached) -> Iterator[None]:
    """A checkpointed module that is computed again after the `with` block is computed as it was inside."""
    before = module._gradient_checkpointing_func
    module._gradient_checkpointing_func = Remembering(before, attached)
    try:
        yield
    finally:
        module._gradient_checkpointing_func = before


class Remembering:
    """A checkpointing function that attaches what was there once more when the backward pass comes later."""

    def __init__(self, checkpoint: Callable[..., Any], attached: Attached) -> None:
        self.checkpoint, self.attached = checkpoint, attached

    def __call__(self, function: Callable[..., Any], *args: Any) -> Any:
        def as_then(*args: Any) -> Any:
            with self.attached.once_more():
                return function(*args)

        return self.checkpoint(as_then, *args)

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy of the model checkpoints as ever."""
        return _itself, (self.checkpoint,)


def _itself(x: Any) -> Any:
    return x
