"""Decoders run without their cache of keys and values where a layer evaluates its attention several times."""

from __future__ import annotations

import inspect
import warnings
from functools import partial
from typing import Any

import torch
from torch import nn

from attn_flow.hooks.evaluation import read_settings
from attn_flow.hooks.layout import Block, inside


class WithoutCache:
    """A hook of the encoder that turns its cache off in forward passes and in generate(), with one warning.

    Whether a layer evaluates its attention several times is asked at every call. An argument use_cache=True or another
    config does not turn the cache on.
    """

    def __init__(self, model: Any, layers: list[Block]) -> None:
        self.layers, self.has_warned = layers, False
        self.generators: list[Any] = []
        while model is not None:
            if hasattr(type(model), "generate") and "generate" not in vars(model):
                model.generate = partial(self.generate, model)
                self.generators.append(model)
            model = inside(model)
        self.handle = layers[0].root.register_forward_pre_hook(self, with_kwargs=True)

    def __call__(
        self, root: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return args, self.without_cache(root.config, kwargs)

    def generate(self, model: Any, *args: Any, **kwargs: Any) -> Any:
        """The `generate` of the model."""
        config = kwargs.get("generation_config") or model.generation_config
        return type(model).generate(model, *args, **self.without_cache(config, kwargs))

    def without_cache(self, config: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
        """The arguments of a call, with use_cache=False where a layer evaluates its attention several times."""
        if all(flow is None or flow.evaluations == 1 for flow, _ in map(read_settings, self.layers)):
            return kwargs
        if kwargs.get("past_key_values") is not None:
            raise ValueError(
                "a layer evaluates its attention several times, and each would fill the cache of keys and values; pass "
                "no past_key_values and use_cache=False, also to generate()."
            )
        use_cache = kwargs.get("use_cache")
        use_cache = config.use_cache if use_cache is None else use_cache
        if use_cache is not False and not self.has_warned and not torch.compiler.is_compiling():
            self.has_warned = True
            warnings.warn(
                "a layer evaluates its attention several times, so the model runs without a cache of keys and values.",
                stacklevel=3,
            )
        return {**kwargs, "use_cache": False}

    def detach(self) -> None:
        self.handle.remove()
        for model in self.generators:
            del model.generate


def _hooks(layers: list[Block]) -> list[WithoutCache]:
    return [hook for hook in layers[0].root._forward_pre_hooks.values() if isinstance(hook, WithoutCache)]


def stop_caching(model: nn.Module, layers: list[Block]) -> None:
    """Run a model without its cache, if it has one, as long as a layer evaluates its attention several times."""
    root, core = layers[0].root, layers[0].core
    has_option = hasattr(getattr(root, "config", None), "use_cache")
    takes_option = "use_cache" in inspect.signature(root.forward).parameters
    # A BERT that is no decoder makes no cache; a Llama does, also where every token attends to all.
    if has_option and takes_option and getattr(core, "is_decoder", True) and not _hooks(layers):
        WithoutCache(model, layers)


def restore_cache(layers: list[Block]) -> None:
    """Undo `stop_caching`, unless a layer is a flow still."""
    if all(read_settings(block)[0] is None for block in layers):
        for hook in _hooks(layers):
            hook.detach()
