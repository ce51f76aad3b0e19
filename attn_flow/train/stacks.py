"""The stack that a recipe describes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from attn_flow.geometry import Ellipsoid, Euclidean, Geometry, Sphere
from attn_flow.nn.stack import DeepStack
from attn_flow.train.recipes import Recipe
from attn_flow.train.tasks import seed_of


class Symmetric(nn.Module):
    """The symmetric part of a matrix, as a parametrisation of torch."""

    def forward(self, weight: Tensor) -> Tensor:
        """(..., d, d) -> (..., d, d)."""
        return (weight + weight.mT) / 2


class Positive(nn.Module):
    """A positive semidefinite matrix W W^T, as a parametrisation of torch."""

    def forward(self, weight: Tensor) -> Tensor:
        """(..., d, d) -> (..., d, d)."""
        return weight @ weight.mT


def make_stack(recipe: Recipe, options: dict[str, Any]) -> DeepStack:
    """The untrained stack, which depends on the seed alone.

    Args:
        recipe: its sizes, and which matrices are symmetric: with G, K is the identity and Q symmetric; with V, O is.
            With a positive G (or G = I) and a symmetric V the eigenvalues of V G are real: its limit does not rotate.
        options: the arguments of `DeepStack` that the task decides.
    """
    names = ("dim", "heads", "head_dim", "depth", "shared", "horizon", "steps", "step", "learn_beta", "norm", "ffn")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed_of(recipe.seed, "weights"))
        stack = DeepStack(
            **options,
            **{name: getattr(recipe, name) for name in names},
            beta=recipe.beta,
            geometry=_geometry(recipe),
            noise=recipe.noise,
            checkpoint=recipe.checkpointing,
        )
    if recipe.embedding == "identity":
        if not isinstance(stack.embedding, nn.Linear) or stack.embedding.in_features != recipe.dim:
            raise ValueError(f"embedding = 'identity': expected a task of vectors of dimension dim = {recipe.dim}.")
        nn.init.eye_(stack.embedding.weight)
        nn.init.zeros_(stack.embedding.bias)
        stack.embedding.requires_grad_(False)
    for layer in (stack.layer(l) for l in range(len(stack.layers))):
        if recipe.symmetric in ("G", "GV", "positive"):
            _fix_at_identity(layer, "K")
            shape = Positive() if recipe.symmetric == "positive" else Symmetric()
            parametrize.register_parametrization(layer, "Q", shape)
        if recipe.symmetric == "V alone":
            _fix_at_identity(layer, "Q", "K")
        if recipe.symmetric not in ("none", "G"):
            _fix_at_identity(layer, "O")
            parametrize.register_parametrization(layer, "V", Symmetric())
    return stack


def _fix_at_identity(layer: nn.Module, *names: str) -> None:
    """Set weights (1, d, d) of a layer to the identity, and do not train them."""
    for name in names:
        nn.init.eye_(layer.get_parameter(name).requires_grad_(False)[0])


def _geometry(recipe: Recipe) -> Geometry:
    if recipe.geometry == "layer-norm":
        return Ellipsoid.from_layer_norm(torch.ones(recipe.dim))
    return Sphere() if recipe.geometry == "sphere" else Euclidean()
