"""Attach hooks to a running model, and leave the model exactly as it was."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
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
