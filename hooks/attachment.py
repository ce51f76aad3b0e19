"""Attach hooks to a running model, and leave the model exactly as it was."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from attn_flow.hooks.layout import Block


def hidden_states(output: Any) -> Tensor:
    """The hidden states in the output of a layer: the output itself, or the first entry of a tuple."""
    return output[0] if isinstance(output, tuple | list) else output


def with_hidden_states(output: Any, x: Tensor) -> Any:
    """The output of a layer with other hidden states, in the same container."""
    return type(output)([x, *output[1:]]) if isinstance(output, tuple | list) else x


def input_states(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor:
    """The hidden states among the arguments of a layer."""
    return args[0] if args else kwargs.get("hidden_states", kwargs.get("src", kwargs.get("query")))


def replace_states(
    args: tuple[Any, ...], kwargs: Mapping[str, Any], x: Tensor
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a layer with other hidden states. torch's MultiheadAttention takes them three times."""
    before = input_states(args, kwargs)
    return tuple(x if a is before else a for a in args), {k: x if v is before else v for k, v in kwargs.items()}


class BlockListener:
    """What listens to the beginning of a block, also when gradient checkpointing computes the block a second time.

    Since transformers 5.23 a block checkpoints its `forward`, inside of its hooks, which then run only once.
    """

    def enter_block(self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        raise NotImplementedError

    def listen(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """The forward pre-hook of the block."""
        self.enter_block(module, args, kwargs)
        block: Any = module
        is_checkpointed = block.training and getattr(block, "gradient_checkpointing", False)
        if not is_checkpointed or type(block).__call__ is not nn.Module.__call__:  # before 5.23 hooks are inside
            return
        if not isinstance(block._gradient_checkpointing_func, ListenedCheckpoint):
            block._gradient_checkpointing_func = ListenedCheckpoint(block)


class ListenedCheckpoint:
    """The checkpointing function of a block for one call, with the listeners inside of what is checkpointed."""

    def __init__(self, block: Any) -> None:
        self.block, self.checkpoint = block, block._gradient_checkpointing_func

    def __call__(self, function: Any, *args: Any) -> Any:
        self.block._gradient_checkpointing_func = self.checkpoint
        kwargs = getattr(function, "keywords", {})  # of functools.partial

        def enter_and_run(*args: Any) -> Any:
            for hook in list(self.block._forward_pre_hooks.values()):
                listener = getattr(hook, "__self__", None)
                if isinstance(listener, BlockListener):
                    listener.enter_block(self.block, args, kwargs)
            return function(*args)

        return self.checkpoint(enter_and_run, *args)


class LayerClock(BlockListener):
    """Which layer is running: counts the blocks in a forward pass, since a shared block runs several times."""

    def __init__(self, layers: list[Block]) -> None:
        self.blocks = layers
        self.layer = -1
        self.is_running = False
        self._count = -1

    def attach(self, stack: ExitStack) -> None:
        root = self.blocks[0].root
        stack.callback(root.register_forward_pre_hook(self._begin).remove)
        stack.callback(root.register_forward_hook(self._end, always_call=True).remove)
        for module in {id(b.module): b.module for b in self.blocks}.values():
            stack.callback(module.register_forward_pre_hook(self.listen, with_kwargs=True).remove)

    def _begin(self, *_: Any) -> None:
        self._count, self.is_running = -1, True

    def _end(self, *_: Any) -> None:
        self.is_running = False

    def listen(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._count += self.is_running
        super().listen(module, args, kwargs)

    def enter_block(self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        indices = [b.index for b in self.blocks if b.module is module]
        # A block that is not shared is known by itself, also when it is computed a second time.
        self.layer = indices[0] if len(indices) == 1 else self._count


def keep_padding(stack: ExitStack, root: nn.Module) -> None:
    """Stop torch.nn.TransformerEncoder from packing padded batches into nested tensors."""
    if isinstance(root, nn.TransformerEncoder):
        stack.callback(setattr, root, "use_nested_tensor", root.use_nested_tensor)
        root.use_nested_tensor = False


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


@contextmanager
def attached(model: nn.Module, attach: Callable[[ExitStack], None]) -> Iterator[nn.Module]:
    """A change of a model during a `with` block. `attach` registers on the stack what undoes it."""
    with ExitStack() as stack:
        attach(stack)
        yield model
