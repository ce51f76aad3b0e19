"""Run pretrained layers as flows or at another temperature during a `with` block.

x -> x + A(x) becomes x(horizon) of x' = A(x), where A(x) is what a layer's own attention adds to its residual stream;
in a pre-norm block it is computed from norm(x). Masks, rotary and relative positions, norms and the feed-forward part
stay as trained. One Euler step of size one is the pretrained layer.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from attn_flow.dynamics.steppers import euler
from attn_flow.geometry import Euclidean, Geometry
from attn_flow.hooks.caching import stop_caching
from attn_flow.hooks.evaluation import ChangedAttention
from attn_flow.hooks.layout import Block, LayerClock, blocks_to_change, choose_layers, distinct
from attn_flow.nn.options import FlowOptions, Step


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
    return _changed(model, all_blocks, factors, options)


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
    rows = list(table) if table.ndim == 2 else [table] * len(chosen)
    factors = {i: _per_head("beta_factor", row, all_blocks[i]) for i, row in zip(chosen, rows)}
    return _changed(model, all_blocks, factors, None)


@contextmanager
def _changed(
    model: nn.Module, all_blocks: list[Block], factors: dict[int, Any], options: FlowOptions | None
) -> Iterator[nn.Module]:
    """The model with its attention changed in the layers that have an entry in `factors`."""
    with ExitStack() as stack:
        if options is not None and options.evaluations > 1:
            stop_caching(stack, model, all_blocks[0])
        clock = LayerClock(all_blocks)
        clock.attach(stack)
        for block in distinct(all_blocks[i] for i in factors):
            change = ChangedAttention(block, clock, options, factors)
            change.attach()
            stack.callback(change.detach)
        yield model


def resolve_factor(block: Block, beta: float | Tensor | None, beta_factor: float | Tensor | None) -> Tensor | None:
    """The multiple (heads,) of the trained inverse temperature that either argument asks for; None for neither."""
    if beta is not None and beta_factor is not None:
        raise ValueError(f"beta = {beta} and beta_factor = {beta_factor}: expected one of them at most.")
    if beta is not None:
        return _per_head("beta", beta, block) / block.beta
    return None if beta_factor is None else _per_head("beta_factor", beta_factor, block)


def _as_tensor(name: str, value: float | Tensor | Sequence[Any]) -> Tensor:
    if isinstance(value, Tensor):
        return value
    try:
        return torch.tensor(value, dtype=torch.float64)  # cast to the dtype of the queries later
    except (TypeError, ValueError):
        raise ValueError(f"{name} is a {type(value).__name__}, expected numbers.") from None


def _per_head(name: str, values: float | Tensor | Sequence[Any], block: Block) -> Tensor:
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
