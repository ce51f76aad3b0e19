"""Run pretrained layers as flows: x -> x + A(x) becomes x(horizon) of x' = A(x).

A(x) is what a layer's own attention adds to its residual stream; in a pre-norm block it is computed from norm(x).
Masks, rotary and relative positions, norms and the feed-forward part stay as trained. One Euler step of size one is
the pretrained layer.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from contextlib import AbstractContextManager, ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from attn_flow.dynamics.steppers import euler
from attn_flow.geometry import Euclidean, Geometry
from attn_flow.hooks.attachment import (
    LayerClock,
    attached,
    distinct,
    hidden_states,
    input_states,
    keep_padding,
    replace_states,
    with_hidden_states,
)
from attn_flow.hooks.layout import Block, blocks_to_change, choose_layers, inside
from attn_flow.hooks.temperature import exchange_queries, give_back, query_scalings, resolve_factor
from attn_flow.nn.options import FlowOptions, Step

CACHES = ("past_key_values", "past_key_value", "layer_past")


def wrap(
    model: nn.Module,
    layers: int | Iterable[int] | None = None,
    *,
    beta: float | Tensor | None = None,
    beta_factor: float | Tensor | None = None,
    steps: int = 1,
    horizon: float = 1.0,
    step: Step = euler,
    geometry: Geometry | None = None,
) -> AbstractContextManager[nn.Module]:
    """Run the attention of some layers as the flow of their own weights: `with wrap(model, [3], steps=32): ...`.

    To train, save and load a model of flows, use `replace_attention`.

    Args:
        model: a known encoder, or something that holds one. Wrap a model before compiling it.
        layers: indices of layers; all by default. A shared block (ALBERT) has one index for each time it runs.
        beta: inverse temperature of the scores, a number or one per head, instead of the trained 1/sqrt(head_dim).
        beta_factor: the same as a multiple of the trained one.
        steps, horizon: the flow runs to time `horizon` in this many equal steps.
        step: "euler", "rk4", "dopri5", or another step function.
        geometry: a set to stay on, such as geometries(model)[layer]; by default tokens move freely.

    Returns:
        A context manager for one `with` block, after which the model is as it was before. Gradients flow through it;
        run the backward pass inside it if the model uses gradient checkpointing. Causal models run without a cache of
        keys and values where attention is evaluated several times.

    Example:
        >>> from attn_flow.hooks import record
        >>> from attn_flow.hooks.demo import tiny_bert
        >>> model, tokenizer = tiny_bert()  # or AutoModel.from_pretrained("bert-base-uncased")
        >>> plain = record(model, tokenizer, ["a b c"])
        >>> with wrap(model, layers=[1]):  # one Euler step of size one is the pretrained layer
        ...     same = record(model, tokenizer, ["a b c"])
        >>> with wrap(model, layers=[1], beta=8.0, steps=4, step="rk4"):
        ...     other = record(model, tokenizer, ["a b c"])
        >>> bool((same.x - plain.x).abs().max() < 1e-5), bool((other.x - plain.x).abs().max() < 1e-5)
        (True, False)
    """
    all_blocks = blocks_to_change(model)
    options = FlowOptions(horizon, steps, step, Euclidean() if geometry is None else geometry)
    chosen = choose_layers(len(all_blocks), layers)
    factors = {i: resolve_factor(all_blocks[i], beta, beta_factor) for i in chosen}

    def attach(stack: ExitStack) -> None:
        keep_padding(stack, all_blocks[0].root)
        if options.evaluations > 1:
            stop_caching(stack, model, all_blocks[0], stacklevel=6)
        clock = LayerClock(all_blocks)
        clock.attach(stack)
        for block in distinct(all_blocks[i] for i in chosen):
            AttentionFlow(block, options, clock, factors).attach(stack)

    return attached(model, attach)


class AttentionFlow:
    """The `forward` of a wrapped attention module: x' = A(x) in place of one residual attention step.

    It returns the displacement x(horizon) - x(0), which the block adds. It has plain attributes only, so that a copied
    or pickled model carries its own flow along.
    """

    x0: Tensor | None = None  # the residual stream before the norm of a pre-norm block

    def __init__(
        self, block: Block, options: FlowOptions | None, clock: LayerClock, factors: dict[int, Tensor | None]
    ) -> None:
        self.block, self.module, self.clock = block, block.attn, clock
        self._options, self._factors = options, factors  # a layer without an entry in `factors` is plain
        self.before = self.module.__dict__.get("forward")

    def attach(self, stack: ExitStack) -> None:
        if find_wrapped_forward(self.module)[1] is not None:
            raise ValueError(
                f"{self.block.path} is wrapped already; remove that wrap first, or give all options to one wrap."
            )
        self.module.forward = self  # type: ignore[assignment]
        if self.before is None:
            stack.callback(delattr, self.module, "forward")
        else:
            stack.callback(setattr, self.module, "forward", self.before)
        # This hook is inside of the block, so that gradient checkpointing runs it again.
        if self.block.norm_placement != "post":
            norm = self.block[self.block.architecture.norm1]
            stack.callback(norm.register_forward_pre_hook(self.enter_norm).remove)
        if isinstance(self.module, nn.MultiheadAttention):  # torch's fused path skips `forward` unless there is a hook
            stack.callback(self.module.register_forward_hook(do_nothing).remove)

    def enter_norm(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        self.x0 = args[0]

    @property
    def options(self) -> FlowOptions:
        """How the layer flows."""
        assert self._options is not None
        return self._options

    def is_active(self, layer: int) -> bool:
        """Whether this layer flows."""
        return layer in self._factors

    def factor(self, layer: int) -> Tensor | None:
        """The multiple (heads,) of the trained inverse temperature of a layer; None if it keeps its own."""
        return self._factors.get(layer)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        layer = self.clock.layer_of(self.block)
        if not self.is_active(layer):
            return self.original(*args, **kwargs)
        caches = [a for a in args if hasattr(a, "get_seq_length")] + [kwargs.get(name) for name in CACHES]
        if self.options.evaluations > 1 and any(cache is not None for cache in caches):
            raise ValueError(
                f"{self.block.path} evaluates its attention {self.options.evaluations} times and each would fill the "
                "cache of keys and values; pass use_cache=False, also to generate()."
            )
        exchanged = exchange_queries(self.block, self.factor(layer))
        try:
            return self.flow(*args, **kwargs)
        finally:
            give_back(exchanged)
            self.x0 = None

    def original(self, *args: Any, **kwargs: Any) -> Any:
        """The forward pass before it was replaced. No bound method is kept, so that a copied model calls its own."""
        if self.before is None:
            return type(self.module).forward(self.module, *args, **kwargs)
        return self.before(*args, **kwargs)

    def flow(self, *args: Any, **kwargs: Any) -> Any:
        block, arch = self.block, self.block.architecture
        x0 = input_states(args, kwargs) if block.norm_placement == "post" else self.x0
        assert x0 is not None  # the norm of the block has run
        output: list[Any] = []
        # The last module before the residual sum: inside the attention module, after it, or the attention itself.
        emit = OutputModule(block, arch.emit) if arch.emit else None
        is_inside = arch.emit.startswith(arch.attn + ".")

        def velocity(x: Tensor) -> Tensor:
            z = x if block.norm_placement == "post" else block[arch.norm1](x)
            new_args, new_kwargs = replace_states(args, kwargs, z)
            output[:] = [self.original(*new_args, **new_kwargs)]
            if emit is None:
                return hidden_states(output[0])
            return emit.take() if is_inside else emit.module.forward(hidden_states(output[0]))

        if emit is not None and is_inside:
            emit.install()
        try:
            geometry = self.options.geometry
            u = self.options.displacement(lambda t, x: geometry.tangent(x, velocity(x)), x0)
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


def find_wrapped_forward(module: nn.Module) -> tuple[str, AttentionFlow | None]:
    """The wrapped forward of a module and the attribute that holds it. accelerate keeps it under another name."""
    for name in ("forward", "_old_forward"):
        forward = module.__dict__.get(name)
        if isinstance(forward, AttentionFlow):
            return name, forward
    return "", None


def active_factor(block: Block, layer: int) -> Tensor | None:
    """The multiple (heads,) of the trained inverse temperature that `scale_beta` and flows ask for; None for none."""
    sources = [*query_scalings(block.attn), find_wrapped_forward(block.attn)[1]]
    factors = [factor for source in sources if source is not None and (factor := source.factor(layer)) is not None]
    return torch.stack(factors).prod(0) if factors else None


class OutputModule(nn.Module):
    """Stands in for the last module before the residual sum, to read its output or to return the displacement."""

    def __init__(self, block: Block, path: str) -> None:
        super().__init__()
        owner, _, self.name = path.rpartition(".")
        self.entries = block[owner]._modules
        module: Any = self.entries[self.name]
        is_interrupted = isinstance(module, OutputModule)  # after an interrupted call
        self.module: Any = module.module if is_interrupted else module
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


def do_nothing(*_: Any) -> None:
    """A hook without effect."""


class CacheSwitch:
    """A hook that runs a causal model without its cache of keys and values, in forward passes and in generate()."""

    def __init__(self, model: Any) -> None:
        self.has_warned = False
        self.before: list[tuple[Any, bool | None]] = []
        self.generators: list[Any] = []
        while model is not None:
            generation = getattr(model, "generation_config", None)
            if generation is not None and generation.use_cache is not False:
                self.before.append((generation, generation.use_cache))
                generation.use_cache = False
            if hasattr(type(model), "generate") and "generate" not in vars(model):
                model.generate = GenerationWithoutCache(model, self)
                self.generators.append(model)
            model = inside(model)

    def __call__(
        self, root: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        use_cache = kwargs.get("use_cache")
        config: Any = root.config
        if (config.use_cache if use_cache is None else use_cache) and not torch.compiler.is_compiling():
            self.warn(stacklevel=5)
        return args, {**kwargs, "use_cache": False}

    def warn(self, stacklevel: int) -> None:
        """Say once that there is no cache."""
        if not self.has_warned:
            self.has_warned = True
            message = (
                "a layer evaluates its attention several times, so the model runs without a cache of keys and values."
            )
            warnings.warn(message, stacklevel=stacklevel)

    def restore(self) -> None:
        """Turn the cache on again where it was on."""
        for generation, use_cache in self.before:
            generation.use_cache = use_cache
        for model in self.generators:
            del model.generate


class GenerationWithoutCache:
    """The `generate` of a model without a cache: an argument use_cache=True or another config does not turn it on."""

    def __init__(self, model: Any, switch: CacheSwitch) -> None:
        self.model, self.switch = model, switch

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if kwargs.get("use_cache"):
            self.switch.warn(stacklevel=3)
        return type(self.model).generate(self.model, *args, **{**kwargs, "use_cache": False})


def stop_caching(stack: ExitStack, model: nn.Module, block: Block, stacklevel: int) -> None:
    """Run a causal model without its cache until the stack is closed."""
    if block.causal and hasattr(getattr(block.root, "config", None), "use_cache"):
        switch = CacheSwitch(model)
        if switch.before:
            switch.warn(stacklevel)
        stack.callback(switch.restore)
        stack.callback(block.root.register_forward_pre_hook(switch, with_kwargs=True).remove)
