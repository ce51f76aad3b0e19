"""The stack that a recipe describes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from attn_flow.nn.stack import DeepStack
from attn_flow.train.recipes import Recipe
from attn_flow.train.tasks import seed_of

FIELDS = ("dim", "heads", "depth", "ffn", "horizon", "steps", "step", "beta", "learn_beta")


class Symmetric(nn.Module):
    """A parametrisation of torch: the symmetric part of a matrix W, or the positive semidefinite W W^T."""

    def __init__(self, is_positive: bool = False) -> None:
        super().__init__()
        self.is_positive = is_positive

    def forward(self, weight: Tensor) -> Tensor:
        """(..., d, d) -> (..., d, d)."""
        return weight @ weight.mT if self.is_positive else (weight + weight.mT) / 2


def make_stack(recipe: Recipe, options: dict[str, Any]) -> DeepStack:
    """The untrained stack, which depends on the seed alone.

    Args:
        recipe: its sizes, and which matrices are symmetric: for G, K is the identity and Q symmetric; for V, O is the
            identity. With a positive G (or G = I) and a symmetric V the eigenvalues of V G are real: no limit rotates.
        options: the arguments of `DeepStack` that the task decides.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed_of(recipe.seed, "weights"))
        stack = DeepStack(**options, **{name: getattr(recipe, name) for name in FIELDS})
    if isinstance(stack.embedding, nn.Linear) and stack.embedding.in_features == recipe.dim:
        nn.init.eye_(stack.embedding.weight)
        nn.init.zeros_(stack.embedding.bias)
        stack.embedding.requires_grad_(False)
    for layer in stack.layers:
        if recipe.symmetric == "none":
            continue
        for name in ("Q", "K", "O") if recipe.symmetric == "V alone" else ("K", "O"):
            nn.init.eye_(layer.get_parameter(name).requires_grad_(False)[0])
        if recipe.symmetric != "V alone":
            parametrize.register_parametrization(layer, "Q", Symmetric(recipe.symmetric == "positive"))
        parametrize.register_parametrization(layer, "V", Symmetric())
    return stack
