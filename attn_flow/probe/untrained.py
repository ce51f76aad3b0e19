"""The untrained copy of a model: the same architecture with freshly drawn weights."""

from __future__ import annotations

import copy
from typing import TypeVar

import torch
from torch import nn
from torch.nn.utils.parametrize import is_parametrized

Model = TypeVar("Model", bound=nn.Module)


def untrained_copy(model: Model, seed: int = 0) -> Model:
    """The same architecture with weights drawn anew, of a HuggingFace model or one with `reset_parameters`.

    A stack with symmetric or frozen matrices is a ValueError: these are not drawn by `reset_parameters`.

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
        if any(map(is_parametrized, model.modules())) or len({p.requires_grad for p in model.parameters()}) > 1:
            raise ValueError(
                f"{type(model).__name__} has symmetric or frozen matrices, which cannot be drawn anew here; make an "
                "untrained one by make_stack(recipe, options) of attn_flow.train.stacks with another seed."
            )
        untrained = copy.deepcopy(model)
        for module in untrained.modules():
            for name in ("reset_parameters", "_reset_parameters"):
                if hasattr(module, name):
                    getattr(module, name)()
    return untrained.eval()
