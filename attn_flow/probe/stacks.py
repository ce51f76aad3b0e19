"""A stack of continuous layers (`attn_flow.nn.DeepStack`) as the probe reads an encoder: its clouds, and its passes.

A layer is a flow: what attention sees and adds is taken at the layer's beginning, and a prediction carried through
depth is the drift at every step of every layer. Feed-forward parts and normalisation stay as trained.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor

from attn_flow.attention import Attention, Transformed
from attn_flow.attention import Drift as DriftField
from attn_flow.hooks.weights import relative_rounding
from attn_flow.nn.layer import NORMS
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
    index = -1

    def enter(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        nonlocal index
        index += 1
        if start is None or index > 0:
            return None
        return (start.to(args[0].dtype)[None], *args[1:]), kwargs

    def field(layer: Any) -> Any:
        l = index
        return NORMS[layer.norm](DriftField(lambda _, x: drift(l, text, x[0]).to(x.dtype)[None]))

    with ExitStack() as attached:
        for layer in set(stack.layers):
            attached.callback(layer.register_forward_pre_hook(enter, with_kwargs=True).remove)
            layer.field = partial(field, layer)  # type: ignore[assignment]
            attached.callback(delattr, layer, "field")
        found = stack.paths(ids[None])
    return [found[0][0][0, 0], *(x[0] for _, x in found)]


def stack_facts(stack: DeepStack) -> dict[str, Any]:
    """As `encoder_facts`: what the stack is, and what its Attentions leave out."""
    first = stack.attentions()[0]
    betas = [torch.as_tensor(A.beta, dtype=torch.float64) for A in stack.attentions()]
    return {
        "architecture": "DeepStack",
        "model": type(stack).__name__,
        "layers": stack.depth,
        "shared": stack.shared,
        "heads": first.heads,
        "head_dim": first.tensors["Q"].shape[-2],
        "dim": first.dim,
        "beta": [float(beta.mean()) for beta in betas],
        "norm": stack.norm,
        "causal": first.causal,
        "layer_scale": "none",
        "omits": ["feed-forward part"] if len(stack.ffns) else [],
    }


def check_stack(stack: DeepStack, inputs: Any) -> list[dict[str, Any]]:
    """The Attentions read, against every drift that the layers compute, on the first text and in float64.

    What is checked is how weights are read, so that a copy in float64 may be asked: rounding is far from any wrong
    weight there. `error` is the largest |read - computed| of a layer over the size of the terms that are summed.
    """
    twin = copy.deepcopy(stack).double()
    ids = stack_inputs(inputs)[:1]
    ids = ids.double() if ids.is_floating_point() else ids
    found, index = twin.attentions(), -1
    errors: list[list[float]] = [[] for _ in found]
    allowed: list[list[float]] = [[] for _ in found]

    def enter(module: Any, args: tuple[Any, ...]) -> None:
        nonlocal index
        index += 1

    def field(layer: Any) -> Any:
        l, expected = index, NORMS[layer.norm](found[index])

        def watch(F: Any, s: float, x: Tensor) -> Tensor:
            computed, y = F(s, x), x if layer.norm == "post" else x / x.norm(dim=-1, keepdim=True)
            difference = (expected(s, x) - computed)[0].norm()
            errors[l].append(float(torch.where(difference > 0, difference / _size_of_terms(found[l], y[0]), 0.0)))
            allowed[l].append(relative_rounding(x) * _length_of_sums(found[l], y[0]))
            return computed

        return Transformed(type(layer).field(layer), watch, "watched")

    for layer in set(twin.layers):
        layer.register_forward_pre_hook(enter)
        layer.field = partial(field, layer)  # type: ignore[assignment]
    with torch.no_grad():
        twin.paths(ids)
    for l in range(stack.depth):
        if not errors[l] or any(not e <= most for e, most in zip(errors[l], allowed[l])):
            seen = f"differ from those of the weights read by {max(errors[l]):.1e}" if errors[l] else "are not seen"
            raise ValueError(
                f"layer {l} of DeepStack: its drifts {seen}; a layer of another kind inside? Use "
                "attn_flow.train.what_was_learned."
            )
    return [
        {"layer": l, "error": max(errors[l]), "exact": True, "omits": "", "places": "", "omitted_logit_variance": 0.0}
        for l in range(stack.depth)
    ]


def _size_of_terms(A: Attention, x: Tensor) -> Tensor:
    """(sum_h |O_h V_h| max|x| + |value bias|) sqrt(n): no drift of tokens x (n, d), and no partial sum, is larger."""
    values = A.tensors["O"].norm(dim=(-2, -1)) * A.tensors["V"].norm(dim=(-2, -1))
    bias = 0.0 if A.value_bias is None else A.value_bias.norm()
    return (values.sum() * x.norm(dim=-1).max() + bias) * len(x) ** 0.5


def _length_of_sums(A: Attention, x: Tensor) -> float:
    """How many half ulps of the size of its terms a drift may round by, twice: of what is read and of what is computed.

    A sum of m products rounds by m half ulps of the product of the norms. Logits are two sums of d and one of k <= d,
    at most L in size: (3 d + 3) L, and L more for what exp is given; an error e of a logit is one of e of its
    exponential, and another e of the sum that this is divided by. Averages, V and O: 2 n + 2 d; then heads and biases.
    """
    n, d = x.shape
    query = A.tensors["Q"].norm(dim=(-2, -1)) * x.norm(dim=-1).max()
    query = query if A.query_bias is None else query + A.query_bias.norm(dim=-1)
    L = float((A.beta * query * A.tensors["K"].norm(dim=(-2, -1)) * x.norm(dim=-1).max()).max())
    return 2 * (3 * d + 4) * L + 2 * n + 2 * d + A.heads + 4


def chosen_rows(inputs: Any, kept: Sequence[int]) -> Tensor:
    """The inputs of these texts."""
    return stack_inputs(inputs)[list(kept)]
