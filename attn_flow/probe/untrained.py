"""The untrained copy of a model: the same architecture with freshly drawn weights."""

from __future__ import annotations

import copy
from typing import TypeVar

import torch
from torch import nn

Model = TypeVar("Model", bound=nn.Module)


def untrained_copy(model: Model, seed: int = 0) -> Model:
    """The same architecture with weights drawn anew, of a HuggingFace model or one with `reset_parameters`.

    Example:
        >>> from attn_flow.hooks.demo import tiny_bert
        >>> model, _ = tiny_bert()
        >>> weights = [m.encoder.layer[0].attention.self.query.weight for m in (model, untrained_copy(model, seed=1))]
        >>> weights[0].shape == weights[1].shape, torch.equal(*weights)
        (True, False)
    """
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        if hasattr(model, "config"):
            return type(model)(model.config).to(next(model.parameters())).eval()
        untrained = copy.deepcopy(model)
        for module in untrained.modules():
            for name in ("reset_parameters", "_reset_parameters"):
                if hasattr(module, name):
                    getattr(module, name)()
    return untrained.eval()
