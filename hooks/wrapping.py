"""Run pretrained layers as flows or at another temperature during a `with` block; `replace_attention` does so for good.

x -> x + A(x) becomes x(horizon) of x' = A(x), where A(x) is what a layer's own attention adds to its residual stream;
in a pre-norm block it is computed from norm(x). Masks, rotary and relative positions, norms and the feed-forward part
stay as trained. One Euler step of size one is the pretrained layer.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from attn_flow.dynamics.steppers import euler
from attn_flow.geometry import Euclidean, Geometry
from attn_flow.hooks.caching import restore_cache, stop_caching
from attn_flow.hooks.evaluation import Change, ChangedAttention, changed_attention, read_settings
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
        >>> with wrap(model, layers=[1], beta_factor=2.0, steps=4, step="rk4"):
        ...     flow = record(model, tokenizer, ["a b c"])
        >>> [bool((a == b).all()) for a, b in zip(plain.x, flow.x)]  # by level: layer 1 is the last of two
        [True, True, False]
    """
    all_blocks = blocks_to_change(model)
    options = FlowOptions(horizon, steps, step, Euclidean() if geometry is None else geometry)
    chosen = choose_layers(len(all_blocks), layers)
    factors = {i: resolve_factor(all_blocks[i], beta, beta_factor) for i in chosen}
    return _changed(model, all_blocks, factors, options)


def scale_beta(
    model: nn.Module, beta_factor: float | Tensor, layers: int | Iterable[int] | None = None
) -> AbstractContextManager[nn.Module]:
    """Multiply the inverse temperature of some layers: `with scale_beta(model, 4.0): ...`.

    Position terms that are computed from queries are scaled too (rotary positions, DeBERTa's). A position bias that is
    added to the scores (MPNet, T5) is not.

    Args:
        model: a known encoder, or something that holds one.
        beta_factor: a nonnegative number, or one per head. A tensor may require gradients.
        layers: indices of layers; all by default.

    Returns:
        A context manager for one `with` block, as of `wrap`; `replace_attention(model, beta_factor=4.0)` is for good.

    Example:
        >>> from attn_flow.hooks import record
        >>> from attn_flow.hooks.demo import tiny_bert
        >>> model, tokenizer = tiny_bert()  # or from_pretrained("bert-base-uncased")
        >>> plain = record(model, tokenizer, ["a b c"])
        >>> with scale_beta(model, 4.0):
        ...     colder = record(model, tokenizer, ["a b c"])
        >>> bool((colder.x[0] == plain.x[0]).all()), bool((colder.x[1] == plain.x[1]).all())
        (True, False)
    """
    all_blocks = blocks_to_change(model)
    chosen = choose_layers(len(all_blocks), layers)
    factors = {i: resolve_factor(all_blocks[i], None, beta_factor) for i in chosen}
    return _changed(model, all_blocks, factors, None)


@contextmanager
def _changed(
    model: nn.Module, all_blocks: list[Block], factors: dict[int, Any], options: FlowOptions | None
) -> Iterator[nn.Module]:
    """The model with its attention changed in the layers that have an entry in `factors`."""
    with ExitStack() as stack:
        if options is not None:
            for i in factors:
                if read_settings(all_blocks[i])[0] is not None:
                    raise ValueError(f"layer {i} is a flow already; give all options to one wrap, or end that first.")
            stop_caching(model, all_blocks)
            stack.callback(restore_cache, all_blocks)
        clock = LayerClock(all_blocks)
        clock.attach(stack)
        change = Change(options, factors, clock)
        for block in distinct(all_blocks[i] for i in factors):
            changed = changed_attention(block) or ChangedAttention(block)
            changed.changes.append(change)
            stack.callback(changed.remove, change)
        yield model


def resolve_factor(block: Block, beta: float | Tensor | None, beta_factor: float | Tensor | None) -> Tensor | None:
    """The multiple (heads,) of the trained inverse temperature that either argument asks for; None for neither."""
    if beta is not None and beta_factor is not None:
        raise ValueError(f"beta = {beta} and beta_factor = {beta_factor}: expected one of them at most.")
    name, values, unit = ("beta_factor", beta_factor, 1.0) if beta is None else ("beta", beta, block.beta)
    if values is None:
        return None
    if not isinstance(values, Tensor):
        values = torch.tensor(values, dtype=torch.float64)  # cast to the dtype of the queries later
    if values.ndim > 1 or (values.ndim == 1 and values.shape[0] not in (1, block.heads)):
        raise ValueError(f"{name} has shape {tuple(values.shape)}, expected () or (heads,) = ({block.heads},).")
    if not bool((torch.isfinite(values) & (values >= 0)).all()):
        raise ValueError(
            f"{name} = {values.tolist()}, expected finite numbers from 0; for beta = inf use "
            "attentions(model)[layer].with_beta(math.inf)."
        )
    return values.expand(block.heads) / unit
