"""A stack of continuous layers (`attn_flow.nn.DeepStack`) as the probe reads an encoder.

A layer is a flow. Its attention is recorded at the beginning of the layer; a replaced attention is the drift at every
step. Feed-forward parts and normalisation stay as trained.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor

from attn_flow.attention import Drift
from attn_flow.nn.layer import NORMS, ContinuousAttentionLayer
from attn_flow.nn.stack import DeepStack
from attn_flow.probe.recording import MIN_TOKENS, Recording
from attn_flow.probe.weights_check import LayerCheck

TOLERANCE = 1e-9  # relative error of a layer's displacement in float64, far above rounding and below any wrong weight


def stack_inputs(inputs: Any) -> Tensor:
    """The ids or vectors (texts, n, ...) of a stack, from a tensor or from a dictionary that holds nothing else."""
    tensor = next(iter(inputs.values())) if isinstance(inputs, dict) and len(inputs) == 1 else inputs
    if not isinstance(tensor, Tensor) or tensor.ndim < 2 or 0 in tensor.shape:
        raise ValueError("a DeepStack is probed with its inputs: probe(stack, ids), ids (texts, n), or vectors.")
    return tensor


@torch.no_grad()
def record_stack(stack: DeepStack, inputs: Any, beta_factor: float = 1.0) -> Recording:
    """Record a stack that runs at `beta_factor` times its trained inverse temperature."""
    ids = stack_inputs(inputs)
    texts, n = ids.shape[:2]
    if n < MIN_TOKENS:
        raise ValueError(f"inputs have {n} tokens a text, expected at least {MIN_TOKENS}.")
    stack = stack.rerun(beta_factor=beta_factor)
    attentions, paths, nothing = stack.attentions(), stack.paths(ids), [None] * stack.depth
    clouds = [path[0] if stack.norm == "post" else path[0] / path[0].norm(dim=-1, keepdim=True) for path, _ in paths]
    return Recording(
        attentions,
        list(nothing),
        list(nothing),
        [*map(list, clouds), list(paths[-1][1])],
        [list(attention.drift(x)) for attention, x in zip(attentions, clouds)],
        [torch.zeros(n, dtype=torch.bool, device=ids.device) for _ in range(texts)],
        [[str(entry) for entry in row] for row in (ids.tolist() if ids.ndim == 2 else [range(n)] * texts)],
        list(range(texts)),
        digest=hashlib.sha256(ids.cpu().contiguous().numpy().tobytes()).hexdigest(),
        horizon=float(stack.options.horizon),
        steps=stack.options.steps,
    )


@torch.no_grad()
def run_stack(stack: DeepStack, ids: Tensor, drift: Callable[[int, Tensor], Tensor]) -> Tensor:
    """The output (n, d) of a stack for one text under another drift(layer, tokens (n, d)) -> (n, d), without noise."""
    layers = -1

    def enter(*_: Any) -> None:
        nonlocal layers
        layers += 1

    def field(layer: ContinuousAttentionLayer) -> Any:
        index = layers
        return NORMS[layer.norm](Drift(lambda _, x: drift(index, x[0]).to(x.dtype)[None]))

    with ExitStack() as changes:
        for layer in stack.layers:
            changes.callback(layer.register_forward_pre_hook(enter).remove)
            layer.field = partial(field, layer)  # type: ignore[arg-type, assignment]
            changes.callback(delattr, layer, "field")
        return stack.paths(ids[None])[-1][1][0]


def check_stack(stack: DeepStack, inputs: Any) -> list[LayerCheck]:
    """Compare one Euler step of every layer, in float64, with the attention as read; ValueError where they differ."""
    ids = stack_inputs(inputs)[:1]
    copy = stack.rerun(step="euler", steps=1).double()
    paths, horizon = copy.paths(ids.double() if ids.is_floating_point() else ids), copy.options.horizon
    checks = []
    for layer, (attention, (path, _)) in enumerate(zip(copy.attentions(), paths)):
        x = path[0]
        drift = copy.geometry.tangent(x, NORMS[copy.norm](attention)(0.0, x))
        step = copy.geometry.retract(x + horizon * drift) - x
        error = float((path[-1] - x - step).norm() / step.norm().clamp_min(1e-300))
        if not error <= TOLERANCE:
            raise ValueError(
                f"layer {layer} of the DeepStack moves its tokens differently from the weights read, by {error:.1e}; "
                "a layer of another kind inside? Use attn_flow.train.what_was_learned."
            )
        checks.append(LayerCheck(layer, error, "", "", 0.0))
    return checks


def stack_facts(stack: DeepStack) -> dict[str, Any]:
    """What the stack is, under the names of `hooks.encoder_facts`."""
    first = stack.attentions()[0]
    return {
        "architecture": "DeepStack",
        "model": type(stack).__name__,
        "layers": stack.depth,
        "shared": stack.shared,
        "heads": first.heads,
        "head_dim": first.tensors["Q"].shape[-2],
        "dim": first.dim,
        "beta": [float(torch.as_tensor(A.beta, dtype=torch.float64).mean()) for A in stack.attentions()],
        "norm": stack.norm,
        "causal": first.causal,
        "layer_scale": "none",
        "omits": ["feed-forward part"] if len(stack.ffns) else [],
    }
