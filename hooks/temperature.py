"""Change the inverse temperature of a pretrained encoder: the queries are multiplied by a factor.

The scores are beta <q, k>, so this is exact with every attention implementation. The modules that make queries are
looked up whenever attention runs and exchanged for scaled ones during the call. So whatever stands there is scaled:
the trained projection, a LoRA adapter around it, or a quantised one.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from attn_flow.hooks.architectures import at
from attn_flow.hooks.attachment import LayerClock, attached, distinct, keep_padding
from attn_flow.hooks.layout import Block, blocks_to_change, choose_layers

Exchange = tuple[dict[str, Any], str, Any]  # a dictionary of modules or parameters, a name in it, and its own entry


def scale_beta(
    model: nn.Module,
    beta_factor: float | Tensor | Sequence[Any],
    layers: int | Iterable[int] | None = None,
) -> AbstractContextManager[nn.Module]:
    """Multiply the inverse temperature of some layers: `with scale_beta(model, 4.0): ...`.

    Position terms that are computed from queries are scaled too (rotary positions, DeBERTa's). A position bias that is
    added to the scores (MPNet, T5) is not.

    Args:
        model: a known encoder, or something that holds one.
        beta_factor: a nonnegative number, one per head, or (layers, heads). A tensor may require gradients.
        layers: indices of layers; all by default.

    Returns:
        A context manager for one `with` block, after which the model is as it was before. Run the backward pass inside
        it if the model uses gradient checkpointing. `replace_attention(model, beta_factor=4.0)` changes it for good.

    Example:
        >>> from attn_flow.hooks import record
        >>> from attn_flow.hooks.demo import tiny_bert
        >>> model, tokenizer = tiny_bert()  # or from_pretrained("bert-base-uncased")
        >>> plain = record(model, tokenizer, ["a b c"])
        >>> with scale_beta(model, 4.0, layers=1):
        ...     colder = record(model, tokenizer, ["a b c"])
        >>> [bool((a == b).all()) for a, b in zip(plain.x, colder.x)]
        [True, True, False]
    """
    all_blocks = blocks_to_change(model)
    chosen = choose_layers(len(all_blocks), layers)
    table = _as_tensor("beta_factor", beta_factor)
    if table.ndim > 2 or (table.ndim == 2 and table.shape[0] != len(chosen)):
        raise ValueError(
            f"beta_factor has shape {tuple(table.shape)}, expected (), (heads,) or (layers, heads) with layers = "
            f"{len(chosen)}."
        )
    rows = [table] * len(chosen) if table.ndim < 2 else list(table)
    factors = {i: per_head("beta_factor", row, all_blocks[i]) for i, row in zip(chosen, rows)}

    def attach(stack: ExitStack) -> None:
        keep_padding(stack, all_blocks[0].root)
        clock = LayerClock(all_blocks)
        clock.attach(stack)
        for block in distinct(all_blocks[i] for i in chosen):
            scaling = QueryScaling(block, clock, factors)
            stack.callback(block.attn.register_forward_pre_hook(scaling.enter).remove)
            # The last one to enter is the first to leave.
            handle = block.attn.register_forward_hook(scaling.leave, always_call=True, prepend=True)
            stack.callback(handle.remove)

    return attached(model, attach)


def _as_tensor(name: str, value: float | Tensor | Sequence[Any]) -> Tensor:
    if isinstance(value, Tensor):
        return value
    try:
        return torch.tensor(value, dtype=torch.float64)  # cast to the dtype of the queries later
    except (TypeError, ValueError):
        raise ValueError(f"{name} is a {type(value).__name__}, expected numbers.") from None


def per_head(name: str, values: float | Tensor | Sequence[Any], block: Block) -> Tensor:
    """Nonnegative numbers, one per head of a block, (heads,)."""
    values = _as_tensor(name, values)
    if values.ndim > 1 or (values.ndim == 1 and values.shape[0] not in (1, block.heads)):
        raise ValueError(f"{name} has shape {tuple(values.shape)}, expected () or (heads,) = ({block.heads},).")
    if not bool((torch.isfinite(values) & (values >= 0)).all()):
        raise ValueError(
            f"{name} = {values.tolist()}, expected finite numbers from 0; for beta = inf use "
            "attentions(model)[layer].with_beta(math.inf)."
        )
    return values.expand(block.heads)


def resolve_factor(block: Block, beta: float | Tensor | None, beta_factor: float | Tensor | None) -> Tensor | None:
    """The multiple (heads,) of the trained inverse temperature that either argument asks for; None for neither."""
    if beta is not None and beta_factor is not None:
        raise ValueError(f"beta = {beta} and beta_factor = {beta_factor}: expected one of them at most.")
    if beta is not None:
        return per_head("beta", beta, block) / block.beta
    return None if beta_factor is None else per_head("beta_factor", beta_factor, block)


class QueryScaling:
    """Hooks of an attention module that scale its queries during the call."""

    def __init__(self, block: Block, clock: LayerClock, factors: dict[int, Tensor]) -> None:
        self.block, self.clock, self.factors = block, clock, factors
        self._exchanged: list[Exchange] = []

    def factor(self, layer: int) -> Tensor | None:
        """The multiple (heads,) of the trained inverse temperature of a layer; None if it keeps its own."""
        return self.factors.get(layer)

    def enter(self, *_: Any) -> None:
        self._exchanged = exchange_queries(self.block, self.factor(self.clock.layer_of(self.block)))

    def leave(self, *_: Any) -> None:
        exchanged, self._exchanged = self._exchanged, []
        give_back(exchanged)


def query_scalings(attn: nn.Module) -> list[QueryScaling]:
    """The scalings that are attached to an attention module."""
    owners = [getattr(hook, "__self__", None) for hook in attn._forward_pre_hooks.values()]
    return [owner for owner in owners if isinstance(owner, QueryScaling)]


def exchange_queries(block: Block, factor: Tensor | None) -> list[Exchange]:
    """Exchange what makes the queries of a block for versions scaled by (heads,); `give_back` undoes it."""
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


def give_back(exchanged: list[Exchange]) -> None:
    """Put everything back that was exchanged, the last exchange first."""
    for entries, name, own in reversed(exchanged):
        entries[name] = own


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
    queries = factor.repeat_interleave(width // (3 * len(factor)))
    if fused == "(c h k)":
        return torch.cat([queries, torch.ones_like(queries), torch.ones_like(queries)])
    per_head = queries.view(len(factor), 1, -1)  # "(h c k)"
    return torch.cat([per_head, torch.ones_like(per_head), torch.ones_like(per_head)], 1).flatten()
