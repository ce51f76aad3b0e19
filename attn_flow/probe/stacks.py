"""A stack of continuous layers (`attn_flow.nn.DeepStack`), recorded as an encoder is.

A layer of a stack is a flow: its attention is recorded at the beginning of the layer.
"""

from __future__ import annotations

import hashlib
from typing import Any

import torch
from torch import Tensor

from attn_flow.nn.stack import DeepStack
from attn_flow.probe.recording import MIN_TOKENS, Recording


@torch.no_grad()
def record_stack(stack: DeepStack, ids: Any, beta_factor: float = 1.0) -> Recording:
    """Record a stack on ids (texts, n) or vectors (texts, n, inputs), at `beta_factor` times its trained beta."""
    if not isinstance(ids, Tensor) or ids.ndim < 2:
        raise ValueError("a DeepStack is probed with its inputs: probe(stack, ids), ids (texts, n), or vectors.")
    texts, n = ids.shape[:2]
    if n < MIN_TOKENS:
        raise ValueError(f"inputs have {n} tokens a text, expected at least {MIN_TOKENS}.")
    stack = stack.rerun(beta_factor=beta_factor)
    attentions, paths = stack.attentions(), stack.paths(ids)
    clouds = [path[0] for path, _ in paths]
    return Recording(
        attentions=attentions,
        windows=[None] * stack.depth,
        positions=[None] * stack.depth,
        states=[*map(list, clouds), list(paths[-1][1])],
        outputs=[list(attention.drift(x)) for attention, x in zip(attentions, clouds)],
        special=[torch.zeros(n, dtype=torch.bool, device=ids.device) for _ in range(texts)],
        tokens=[[str(entry) for entry in row] for row in (ids.tolist() if ids.ndim == 2 else [range(n)] * texts)],
        indices=list(range(texts)),
        digest=hashlib.sha256(ids.cpu().contiguous().numpy().tobytes()).hexdigest(),
        horizon=float(stack.options.horizon),
        steps=stack.options.steps,
    )


def stack_facts(stack: DeepStack) -> dict[str, Any]:
    """What the stack is, under the names of `hooks.encoder_facts`."""
    first = stack.attentions()[0]
    betas = [float(torch.as_tensor(A.beta, dtype=torch.float64).mean()) for A in stack.attentions()]
    sizes = {"layers": stack.depth, "heads": first.heads, "head_dim": first.tensors["Q"].shape[-2], "dim": first.dim}
    omits = ["feed-forward part"] if len(stack.ffns) else []
    return {"architecture": "DeepStack", "model": type(stack).__name__, **sizes, "beta": betas, "omits": omits}
