"""A stack of continuous layers (`attn_flow.nn.DeepStack`) as the probe reads an encoder: its clouds, and its passes.

A layer is a flow: what attention sees and adds is taken at the layer's beginning, and a prediction carried through
depth is the drift at every step of every layer. Feed-forward parts and normalisation stay as trained.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from itertools import count
from typing import Any

import torch
from torch import Tensor

from attn_flow.attention import Attention
from attn_flow.hooks.attach import replace_forward
from attn_flow.hooks.weights import precision
from attn_flow.nn.stack import DeepStack
from attn_flow.probe.clouds import SHORTEST, Clouds

Drift = Callable[[int, int, Tensor], Tensor]  # (layer, text, tokens (n, d)) -> what is added (n, d)


def record_stack(stack: DeepStack, inputs: Any, beta_factor: float = 1.0) -> Clouds:
    """Attention's input and output at the beginning of every layer, text by text, and the final states.

    beta_factor: on the learned inverse temperatures; the stack runs colder (above 1) or warmer.
    """
    ids, found = stack_inputs(inputs), [A.with_beta(beta_factor * A.beta) for A in stack.attentions()]
    own = own_drift(found)
    if ids.shape[1] < SHORTEST:
        raise ValueError(f"inputs have {ids.shape[1]} tokens a text, expected at least {SHORTEST} to leave a bulk.")
    z: list[list[Tensor]] = [[] for _ in range(stack.depth + 1)]
    out: list[list[Tensor]] = [[] for _ in range(stack.depth)]
    for text in range(len(ids)):
        seen: dict[int, tuple[Tensor, Tensor]] = {}

        def noted(layer: int, text: int, x: Tensor, seen: dict[int, tuple[Tensor, Tensor]] = seen) -> Tensor:
            added = own(layer, text, x)
            seen.setdefault(layer, (x, added))
            return added

        states = run_stack(stack, ids[text], noted, text)
        for layer, (x, added) in seen.items():
            z[layer].append(x)
            out[layer].append(added)
        z[-1].append(states[-1])
    n = ids.shape[1]
    names = [[str(entry) for entry in row] for row in ids.tolist()] if ids.ndim == 2 else [list(map(str, range(n)))]
    return Clouds(
        found,
        [None] * stack.depth,
        [None] * stack.depth,
        z,
        out,
        [torch.zeros(n, dtype=torch.bool, device=ids.device) for _ in range(len(ids))],
        names if ids.ndim == 2 else names * len(ids),
        list(range(len(ids))),
        content=hashlib.sha256(ids.cpu().contiguous().numpy().tobytes()).hexdigest(),
    )


def own_drift(attentions: Sequence[Attention]) -> Drift:
    """What the attentions themselves add."""
    return lambda layer, text, x: attentions[layer].drift(x)


def stack_inputs(inputs: Any) -> Tensor:
    """The ids or vectors of a stack: (texts, n, ...) from a tensor, or from a dictionary that holds nothing else."""
    held = next(iter(inputs.values())) if isinstance(inputs, dict) and len(inputs) == 1 else inputs
    if not isinstance(held, Tensor) or held.ndim < 2 or 0 in held.shape:
        raise ValueError("a DeepStack is probed with its inputs: probe(stack, ids), ids (texts, n), or vectors.")
    return held


@torch.no_grad()
def run_stack(stack: DeepStack, ids: Tensor, drift: Drift, text: int, start: Tensor | None = None) -> list[Tensor]:
    """The clouds (n, d) of one text before every layer and after the last, under another drift, without noise.

    ids: of this text alone, without an axis of texts. start: other tokens (n, d) for the first layer to begin with.
    """
    fired = count()

    def forward(layer: Any, x: Tensor, mask: Tensor | None = None, return_path: bool = False) -> Tensor:
        l = next(fired)
        field = lambda _, x: drift(l, text, x[0]).to(x.dtype)[None]
        begin = x if start is None or l else start.to(x.dtype)[None]
        return layer.evolve(begin, field, mask, return_path)

    with ExitStack() as attached:
        for layer in stack.layers:
            replace_forward(attached, layer, partial(forward, layer))
        found = stack.paths(ids[None])
    return [found[0][0][0, 0], *(x[0] for _, x in found)]


def stack_facts(stack: DeepStack) -> dict[str, Any]:
    """As `encoder_facts`: what the stack is, and what its Attentions leave out."""
    first = stack.attentions()[0]
    betas = [A.beta.flatten() for A in stack.attentions()]
    return {
        "architecture": "DeepStack",
        "model": type(stack).__name__,
        "layers": stack.depth,
        "shared": stack.shared,
        "heads": first.heads,
        "head_dim": first.Q.shape[-2],
        "dim": first.dim,
        "beta": [float(beta.mean()) for beta in betas],
        "norm": stack.placement.name,
        "causal": first.causal,
        "layer_scale": "none",
        "omits": ["feed-forward part"] if len(stack.ffns) else [],
    }


def check_stack(stack: DeepStack, inputs: Any) -> list[dict[str, Any]]:
    """The Attentions read, against the stack's own passes: clouds after every layer, on the first text."""
    ids = stack_inputs(inputs)[:1]
    own = [after[0] for _, after in stack.paths(ids)]
    read = run_stack(stack, ids[0], own_drift(stack.attentions()), 0)
    found, steps = [], stack.depth * (len(stack.paths(ids)[0][0]) - 1)
    for layer in range(stack.depth):
        error = float((read[layer + 1] - own[layer]).norm() / own[layer].norm())
        # Rounding of one step is carried on by the next; a wrong weight is off by parts in ten.
        if not error <= 1e4 * steps * precision(own[layer]):
            raise ValueError(
                f"layer {layer} of DeepStack: its tokens differ from those of the weights read by {error:.1e}; a layer "
                "of another kind inside? Use attn_flow.train.what_was_learned."
            )
        found.append(
            {"layer": layer, "error": error, "exact": True, "omits": "", "places": "", "omitted_logit_variance": 0.0}
        )
    return found


def chosen_rows(inputs: Any, kept: Sequence[int]) -> Tensor:
    """The inputs of these texts."""
    return stack_inputs(inputs)[list(kept)]
