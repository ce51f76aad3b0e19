"""Everything that decides a training run, as one value. The fields of a recipe are the options of `attn-flow train`.

Importing this module does not import torch, so that `attn-flow train --help` is quick.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from attn_flow.train.tasks import Task


class KnownTask(NamedTuple):
    """The fields of a task's recipe, and the accuracy on held-out inputs that this recipe reaches."""

    defaults: dict[str, Any]
    accuracy: float


TASKS = {
    "majority": KnownTask(
        {"tokens": 16, "dim": 16, "steps": 2, "updates": 300, "lr": 1e-2, "warmup": 20, "batch": 64}, 0.98
    ),
    "recall": KnownTask(
        {"tokens": 9, "horizon": 2.0, "steps": 2, "beta": 8.0, "updates": 300, "lr": 1e-2, "warmup": 20}, 0.98
    ),
    "side": KnownTask(
        {"tokens": 200, "dim": 3, "embedding": "identity", "symmetric": "V alone", "horizon": 5.0, "steps": 20}
        | {"step": "euler", "beta": 20.0, "updates": 300, "warmup": 20, "batch": 16, "lr": 2e-2},
        0.95,
    ),
}
SYMMETRIC = ("none", "GV", "positive", "V alone")
GEOMETRIES = ("sphere", "euclidean", "layer-norm")
EMBEDDINGS = ("learned", "identity")


def _option(default: Any, description: str) -> Any:
    """A field with a default, and its description in `attn-flow train --help`."""
    return field(default=default, metadata={"help": description})


@dataclass(frozen=True)
class Recipe:
    """Task, stack and training of one run. `steps` are those of a layer, `updates` those of the optimiser.

    The options are described in `attn-flow train --help`. Change one with `dataclasses.replace`.

    Example:
        >>> replace(recipe("majority"), beta=2.0, learn_beta=True).updates
        300
    """

    task: str = field(metadata={"help": "majority, recall or side."})
    tokens: int = _option(16, "Tokens of one input.")
    dim: int = _option(32, "Dimension of the tokens.")
    embedding: str = _option("learned", "learned, or identity: vectors of dimension --dim are the tokens.")
    heads: int = _option(1, "Attention heads.")
    head_dim: int | None = _option(None, "Width of a head, by default dim / heads.")
    symmetric: str = _option(
        "none", "Symmetric matrices of one head: none, GV; positive: GV, G positive; V alone: G = I."
    )
    depth: int = _option(1, "Layers.")
    shared: bool = _option(False, "One layer's weights for all layers.")
    horizon: float = _option(1.0, "Time of each layer's flow.")
    steps: int = _option(4, "Steps of each layer; 1 with --step euler is a discrete layer.")
    step: str = _option("rk4", "euler, rk4 or dopri5.")
    geometry: str = _option("sphere", "sphere, euclidean or layer-norm.")
    norm: str = _option("post", "post-norm, or pre and peri (euclidean).")
    ffn: int = _option(0, "Hidden width of the FFN after each layer; 0 for none.")
    beta: float = _option(4.0, "Inverse temperature.")
    learn_beta: bool = _option(False, "Train one beta per head, starting from --beta.")
    checkpointing: bool = _option(False, "Recompute steps in the backward pass: less memory, more time.")
    updates: int = _option(500, "Optimiser steps.")
    batch: int = _option(64, "Inputs per update, over all processes.")
    lr: float = _option(3e-3, "Largest learning rate of the cosine schedule.")
    weight_decay: float = _option(0.01, "Weight decay of AdamW.")
    warmup: int = _option(50, "Updates until the largest learning rate.")
    clip: float = _option(1.0, "Largest norm of the gradient.")
    seed: int = _option(0, "Seed of all random numbers.")

    def __post_init__(self) -> None:
        from attn_flow.base import checks

        choices = {"task": (*TASKS, "own"), "geometry": GEOMETRIES, "symmetric": SYMMETRIC, "embedding": EMBEDDINGS}
        for name, values in choices.items():
            checks.require_choice(name, getattr(self, name), values)
        checks.require_count(updates=self.updates, batch=self.batch)
        checks.require_positive(lr=self.lr, clip=self.clip)
        checks.require_nonnegative(warmup=self.warmup, seed=self.seed, weight_decay=self.weight_decay)
        if self.symmetric != "none" and (self.heads, self.head_dim or self.dim) != (1, self.dim):
            raise ValueError(f"symmetric = {self.symmetric!r}: expected one head of width dim = {self.dim}.")

    def make_task(self) -> Task:
        """The task, with its data."""
        from attn_flow.train.tasks import GENERATED

        if self.task == "own":
            raise ValueError("the task is your own: pass it to train_stack(recipe, task=...).")
        return GENERATED[self.task](self.tokens)

    def lr_at(self, update: int) -> float:
        """The learning rate: linear over the warm-up, then half a cosine down to a hundredth."""
        warm = min(1.0, (update + 1) / self.warmup) if self.warmup else 1.0
        s = max(0, update - self.warmup) / max(1, self.updates - self.warmup)
        return self.lr * warm * (0.01 + 0.99 * (1 + math.cos(math.pi * min(1.0, s))) / 2)

    @property
    def stated_accuracy(self) -> float | None:
        """The accuracy that the task states for its own recipe and any seed; None for other recipes."""
        is_known = self.task in TASKS and replace(self, seed=0) == recipe(self.task)
        return TASKS[self.task].accuracy if is_known else None


def recipe(task: str) -> Recipe:
    """The default recipe of a task.

    Args:
        task: majority (most frequent class), recall (a key's value) or side (on which side of a plane most tokens lie).

    Returns:
        A `Recipe`; change it with `dataclasses.replace`.

    Example:
        >>> recipe("recall").beta
        8.0
    """
    from attn_flow.base import checks

    checks.require_choice("task", task, TASKS)
    return Recipe(task, **TASKS[task].defaults)
