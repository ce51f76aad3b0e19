"""Everything that decides a training run, as one value."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from attn_flow.base import checks
from attn_flow.nn.options import Step
from attn_flow.train.tasks import GENERATED, Task

TASKS: dict[str, dict[str, Any]] = {  # the fields of each recipe that differ from the defaults
    "majority": {"dim": 16, "steps": 2, "updates": 300, "lr": 1e-2, "warmup": 20},
    "recall": {"tokens": 9, "horizon": 2.0, "steps": 2, "beta": 8.0, "updates": 300, "lr": 1e-2, "warmup": 20},
    "side": {"tokens": 200, "dim": 3, "symmetric": "V alone", "horizon": 5.0, "steps": 20, "step": "euler"}
    | {"beta": 20.0, "updates": 300, "warmup": 20, "batch": 16, "lr": 2e-2},
}
SYMMETRIC = ("none", "GV", "positive", "V alone")


@dataclass(frozen=True)
class Recipe:
    """Task, stack and training of one run; change a field with `dataclasses.replace`.

    Args:
        task: "majority", "recall", "side", or "own" for data of your own.
        tokens: the number of tokens of one input.
        dim, heads, depth, ffn: see `DeepStack`. Vectors of dimension `dim` are the tokens themselves.
        horizon, steps, step: the flow of each layer, see `FlowOptions`.
        beta, learn_beta: the inverse temperature at the start, and whether each head learns its own.
        symmetric: symmetric matrices of a single head: "none"; "GV"; "positive" (GV, with G positive); "V alone" (G is
            the identity).
        updates, batch: the number of steps of the optimiser, and of inputs in each.
        lr, weight_decay, warmup, clip: of AdamW: the largest learning rate, the decay, the updates until that rate, and
            the largest norm of the gradient.
        seed: of all random numbers.

    Example:
        >>> from dataclasses import replace
        >>> replace(recipe("majority"), beta=2.0, learn_beta=True).updates
        300
    """

    task: str
    tokens: int = 16
    dim: int = 32
    heads: int = 1
    depth: int = 1
    ffn: int = 0
    horizon: float = 1.0
    steps: int = 4
    step: Step = "rk4"
    beta: float = 4.0
    learn_beta: bool = False
    symmetric: str = "none"
    updates: int = 500
    batch: int = 64
    lr: float = 3e-3
    weight_decay: float = 0.01
    warmup: int = 50
    clip: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        checks.require_choice("task", self.task, (*TASKS, "own"))
        checks.require_choice("symmetric", self.symmetric, SYMMETRIC)
        step = str(self.step)  # the name of the method, as in a checkpoint
        checks.require_choice("step", step, ("euler", "rk4", "dopri5"))
        object.__setattr__(self, "step", step)
        checks.require_count(updates=self.updates, batch=self.batch)
        checks.require_positive(lr=self.lr, clip=self.clip)
        checks.require_nonnegative(warmup=self.warmup, seed=self.seed, weight_decay=self.weight_decay)
        if self.symmetric != "none" and self.heads != 1:
            raise ValueError(f"symmetric = {self.symmetric!r} with {self.heads} heads, expected one.")

    def make_task(self) -> Task:
        """The task, with its data."""
        if self.task == "own":
            raise ValueError("the task is your own: pass it to train_stack(recipe, task=...).")
        return GENERATED[self.task](self.tokens)

    def lr_at(self, update: int) -> float:
        """The learning rate: linear over the warm-up, then half a cosine down to a hundredth."""
        warm = min(1.0, (update + 1) / self.warmup) if self.warmup else 1.0
        s = max(0, update - self.warmup) / max(1, self.updates - self.warmup)
        return self.lr * warm * (0.01 + 0.99 * (1 + math.cos(math.pi * min(1.0, s))) / 2)


def recipe(task: str) -> Recipe:
    """The default recipe of a task, to be changed by `dataclasses.replace`.

    Args:
        task: majority (most frequent class), recall (a key's value) or side (on which side of a plane most tokens lie).

    Example:
        >>> recipe("recall").beta
        8.0
    """
    checks.require_choice("task", task, TASKS)
    return Recipe(task, **TASKS[task])
