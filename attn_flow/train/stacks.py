"""The stack that a recipe describes, and its answers for texts."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from attn_flow.geometry import Ellipsoid, Euclidean, Geometry, Sphere
from attn_flow.nn.stack import DeepStack
from attn_flow.train.recipes import Recipe
from attn_flow.train.tasks import seed_of
from attn_flow.train.texts import UNKNOWN, Vocabulary


@dataclass(frozen=True)
class Answer:
    """The label that a stack gives to a text, and its probability.

    Example:
        >>> Answer("yes", 0.9).label
        'yes'
    """

    label: str
    probability: float


class TrainedStack(DeepStack):
    """A `DeepStack` with its recipe, and the vocabulary if it was trained on texts."""

    recipe: Recipe
    vocabulary: Vocabulary | None = None

    @torch.no_grad()
    def predict(self, texts: Sequence[str]) -> list[Answer]:
        """An `Answer` for each text."""
        if isinstance(texts, str):
            raise ValueError("texts is one string, expected a list of strings; pass [text].")
        if self.vocabulary is None:
            raise ValueError(f"this stack was trained on {self.recipe.task!r}, not on texts; call it with its inputs.")
        if not texts:
            return []
        x, mask = self.vocabulary.encode(texts)
        unknown = int((x <= UNKNOWN).all(-1).sum())
        if unknown:
            message = f"{unknown} of {len(texts)} texts have no word that the stack knows; it guesses."
            warnings.warn(message, stacklevel=3)  # the decorator is between
        device, was_training = self.head.weight.device, self.training
        best = self.eval()(x.to(device), mask.to(device)).softmax(-1).max(-1)
        self.train(was_training)
        return [Answer(self.vocabulary.labels[int(i)], float(p)) for i, p in zip(best.indices, best.values)]


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


def make_stack(recipe: Recipe, options: dict[str, Any]) -> TrainedStack:
    """The untrained stack, which depends on the seed alone.

    Args:
        recipe: its sizes, and which matrices are symmetric: with G, K is the identity and Q symmetric; with V, O is.
            With a positive G and a symmetric V the eigenvalues of V G are real, so that its limit does not rotate.
        options: the arguments of `DeepStack` that the task decides.
    """
    names = ("dim", "heads", "head_dim", "depth", "shared", "horizon", "steps", "step", "learn_beta", "norm", "ffn")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed_of(recipe.seed, "weights"))
        stack = TrainedStack(
            **options,
            **{name: getattr(recipe, name) for name in names},
            beta=recipe.beta if recipe.beta_start is None else recipe.beta_start,
            geometry=_geometry(recipe),
            noise=recipe.noise,
            checkpoint=recipe.checkpointing,
        )
    stack.recipe = recipe
    if recipe.embedding == "identity":
        if not isinstance(stack.embedding, nn.Linear) or stack.embedding.in_features != recipe.dim:
            raise ValueError(f"embedding = 'identity': expected a task of vectors of dimension dim = {recipe.dim}.")
        nn.init.eye_(stack.embedding.weight)
        nn.init.zeros_(stack.embedding.bias)
        stack.embedding.requires_grad_(False)
    is_positive = recipe.symmetric == "positive"
    for matrix, constant, weight in (("G", "K", "Q"), ("V", "O", "V")):
        for layer in stack.layers if is_positive or matrix in recipe.symmetric else ():
            nn.init.eye_(getattr(layer, constant).requires_grad_(False)[0])
            shape = Positive() if is_positive and matrix == "G" else Symmetric()
            parametrize.register_parametrization(layer, weight, shape)
    return stack


def _geometry(recipe: Recipe) -> Geometry:
    if recipe.geometry == "layer-norm":
        return Ellipsoid.from_layer_norm(torch.ones(recipe.dim))
    return Sphere() if recipe.geometry == "sphere" else Euclidean()
