"""Causal models run without their cache of keys and values where a layer evaluates its attention several times."""

from __future__ import annotations

import warnings
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn

from attn_flow.hooks.layout import Block, inside


class WithoutCache:
    """A hook of the encoder that turns its cache off in forward passes and in generate(), with one warning."""

    def __init__(self, model: Any, block: Block) -> None:
        self.has_warned = False
        self.generators: list[Any] = []
        while model is not None:
            if hasattr(type(model), "generate") and "generate" not in vars(model):
                model.generate = GenerationWithoutCache(model, self)
                self.generators.append(model)
            model = inside(model)
        self.handle = block.root.register_forward_pre_hook(self, with_kwargs=True)

    def __call__(
        self, root: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        config: Any = root.config
        use_cache = kwargs.get("use_cache")
        if (config.use_cache if use_cache is None else use_cache) and not torch.compiler.is_compiling():
            self.warn(stacklevel=5)
        return args, {**kwargs, "use_cache": False}

    def warn(self, stacklevel: int) -> None:
        if not self.has_warned:
            self.has_warned = True
            message = (
                "a layer evaluates its attention several times, so the model runs without a cache of keys and values."
            )
            warnings.warn(message, stacklevel=stacklevel)

    def detach(self) -> None:
        self.handle.remove()
        for model in self.generators:
            del model.generate


class GenerationWithoutCache:
    """The `generate` of a model without a cache: an argument use_cache=True or another config does not turn it on."""

    def __init__(self, model: Any, switch: WithoutCache) -> None:
        self.model, self.switch = model, switch

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        config = kwargs.get("generation_config") or self.model.generation_config
        if kwargs.get("use_cache", config.use_cache) is not False:
            self.switch.warn(stacklevel=3)
        return type(self.model).generate(self.model, *args, **{**kwargs, "use_cache": False})


def stop_caching(stack: ExitStack, model: nn.Module, block: Block) -> None:
    """Run a causal model without its cache until the stack is closed."""
    if block.causal and hasattr(getattr(block.root, "config", None), "use_cache"):
        stack.callback(WithoutCache(model, block).detach)


def restore_cache(block: Block) -> None:
    """Undo `stop_caching`."""
    for hook in list(block.root._forward_pre_hooks.values()):
        if isinstance(hook, WithoutCache):
            hook.detach()
