"""Everything that decides a training run, in one value: the same recipe gives the same loss curve on one machine."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch

from attn_flow.base import checks, memory
from attn_flow.dynamics.steppers import STEPS
from attn_flow.geometry import Ellipsoid, Euclidean, Geometry, Sphere
from attn_flow.nn.stack import PLACEMENTS, DeepStack
from attn_flow.train.fields import Fields
from attn_flow.train.tasks import Task, clusters, majority, parity, recall
from attn_flow.train.texts import labelled, masked

GEOMETRIES: dict[str, Callable[[int], Geometry]] = {
    "sphere": lambda d: Sphere(),
    "euclidean": lambda d: Euclidean(),
    "layer-norm": lambda d: Ellipsoid.from_layer_norm(torch.ones(d)),
}
BETA_MODES = ("fixed", "learned", "annealed")
Stack = TypeVar("Stack", bound=DeepStack)
LAYER_BYTES = 2**14  # of a layer's modules beside its weights
MOST = 10**9  # tokens, steps, updates ...: beyond it is a slip of the pen


def _in_range(recipe: Recipe, name: str, least: int, most: int) -> None:
    value = getattr(recipe, name)
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise ValueError(f"{name} = {value}, expected a whole number from {least} to {most}.")


@dataclass(frozen=True)
class Recipe(Fields):
    """Task, stack and training of one run; the options of `attn-flow train` are these fields.

    `steps` are a layer's, `updates` the optimiser's. What each field means is in its words there. Change one with
    `dataclasses.replace`: replace(recipe("majority"), beta=2.0).
    """

    def __post_init__(self) -> None:
        checks.one_of("task", self.task, (*TASKS, "own"))
        checks.one_of("geometry", self.geometry, tuple(GEOMETRIES))
        checks.one_of("placement", self.placement, tuple(PLACEMENTS))
        checks.one_of("step", self.step, tuple(STEPS))
        checks.one_of("beta_mode", self.beta_mode, BETA_MODES)
        for name in ("tokens", "dim", "heads", "depth", "steps", "updates", "batch"):
            _in_range(self, name, 1, MOST)
        if self.head_dim is not None:
            _in_range(self, "head_dim", 1, MOST)
        for name in ("ffn", "warmup"):
            _in_range(self, name, 0, MOST)
        _in_range(self, "seed", 0, 2**63 - 1)
        checks.flags(shared=self.shared, checkpointing=self.checkpointing, amp=self.amp)
        for name in ("horizon", "lr", "clip", "weight_decay", "noise", "beta_start"):
            checks.number(name, getattr(self, name))
        for name in ("horizon", "lr", "clip"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name} = {getattr(self, name)}, expected a positive, finite number.")
        for name in ("weight_decay", "noise"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"{name} = {getattr(self, name)}, expected 0 or more, and finite.")
        checks.inverse_temperature(self.beta)
        moving = {"fixed": (), "learned": ("beta",), "annealed": ("beta", "beta_start")}[self.beta_mode]
        for name in moving:
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(
                    f"{name} = {getattr(self, name)} cannot be {self.beta_mode}; expected positive, finite."
                )
        checks.positive_finite("beta_start", self.beta_start)
        if self.file is not None and (self.task == "own" or not TASKS[self.task].reads):
            raise ValueError(f"task {self.task!r} is generated and reads no file; expected file = None.")

    def make_task(self) -> Task:
        if self.task == "own":
            raise ValueError("the task is your own: give it to train_stack(recipe, task=...).")
        if self.file is None and self.task == "text":
            raise ValueError("task 'text' needs a file of label<TAB>text lines; give one with --file.")
        return TASKS[self.task].make(self)

    def make_stack(self, kind: type[Stack] = DeepStack, **decided: Any) -> Stack:  # type: ignore[assignment]
        """The stack at its start, with what the task decided; one seed, one stack, whatever was drawn before."""
        width = self.heads * self.head_dim if self.head_dim is not None else self.dim
        layer = 4 * self.dim * (4 * width + 2 * self.ffn) + LAYER_BYTES
        bytes_needed = 4 * (1 if self.shared else self.depth) * layer  # weights, gradients and AdamW's two moments
        memory.require(bytes_needed, f"a stack of {self.depth} layers of width {self.dim}", "ask for a smaller stack")
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed_of(self.seed, "weights"))
            stack = kind(
                **decided,
                dim=self.dim,
                heads=self.heads,
                head_dim=self.head_dim,
                depth=self.depth,
                shared=self.shared,
                horizon=self.horizon,
                steps=self.steps,
                step=STEPS[self.step],
                beta=self.beta_start if self.beta_mode == "annealed" else self.beta,
                learn_beta=self.beta_mode == "learned",
                geometry=GEOMETRIES[self.geometry](self.dim),
                placement=self.placement,
                ffn=self.ffn,
                noise=self.noise,
                checkpoint=self.checkpointing,
            )
        return stack

    def lr_at(self, update: int) -> float:
        """Linear over the warm-up, then half a cosine down to a hundredth."""
        warm = min(1.0, (update + 1) / self.warmup) if self.warmup else 1.0
        s = max(0, update - self.warmup) / max(1, self.updates - self.warmup)
        return self.lr * warm * (0.01 + 0.99 * (1 + math.cos(math.pi * min(1.0, s))) / 2)

    def set_beta_at(self, stack: DeepStack, update: int) -> None:
        """Annealed: beta_start (beta/beta_start)^s over the first 80% of the updates, then beta."""
        if self.beta_mode == "annealed":
            s = min(1.0, update / max(1.0, 0.8 * self.updates))
            for layer in stack.layers:
                layer.beta = self.beta_start * (self.beta / self.beta_start) ** s  # type: ignore[assignment]

    @property
    def stated_accuracy(self) -> float | None:
        """What the task states for its own recipe, whatever the seed; None for any other recipe."""
        if self.task == "own":
            return None
        known = TASKS[self.task]
        return known.accuracy if replace(self, seed=0) == recipe(self.task) else None

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


class KnownTask(NamedTuple):
    """A task, the recipe it is trained by unless told otherwise, and the accuracy on new inputs it then reaches."""

    make: Callable[[Recipe], Task]
    defaults: dict[str, Any]
    accuracy: float | None
    reads: bool = False


TASKS: dict[str, KnownTask] = {
    "majority": KnownTask(
        lambda r: majority(r.tokens),
        {"tokens": 16, "dim": 16, "steps": 2, "updates": 300, "lr": 1e-2, "warmup": 20},
        0.98,
    ),
    "recall": KnownTask(
        lambda r: recall(r.tokens),
        {"tokens": 9, "horizon": 2.0, "steps": 2, "beta": 8.0, "updates": 300, "lr": 1e-2, "warmup": 20},
        0.98,
    ),
    "clusters": KnownTask(
        lambda r: clusters(r.tokens), {"tokens": 16, "dim": 16, "horizon": 2.0, "steps": 4, "updates": 600}, 0.93
    ),
    "parity": KnownTask(
        lambda r: parity(r.tokens),
        {"tokens": 10, "heads": 2, "depth": 2, "horizon": 1.0, "steps": 1, "ffn": 64, "updates": 800},
        0.99,
    ),
    "text": KnownTask(
        lambda r: labelled(r.file or "", r.tokens),
        {"tokens": 32, "heads": 2, "horizon": 1.0, "steps": 2, "updates": 300, "weight_decay": 0.1},
        None,
        reads=True,
    ),
    "masked": KnownTask(
        lambda r: masked(r.file, r.tokens),
        {"tokens": 32, "dim": 64, "heads": 4, "depth": 2, "step": "euler", "steps": 1, "ffn": 128, "beta": 8.0}
        | {"updates": 1200, "lr": 8e-3},
        0.36,
        reads=True,
    ),
}


def recipe(task: str) -> Recipe:
    """The recipe a task is trained by unless told otherwise.

    Args:
        task: one of TASKS: majority, recall, clusters, parity, text or masked.

    Returns:
        A Recipe; change it with dataclasses.replace.

    >>> replace(recipe("majority"), beta=2.0, beta_mode="learned").updates
    300
    """
    checks.one_of("task", task, tuple(TASKS))
    return Recipe(task, **TASKS[task].defaults)


STREAMS = {"weights": 0, "training": 1, "held out": 2, "noise": 3, "learned": 4}


def seed_of(seed: int, stream: str, *numbers: int) -> int:
    """One 63-bit seed per (seed, stream, numbers), independent of one another: no state to save, none to restore."""
    return int(np.random.SeedSequence([seed, STREAMS[stream], *numbers]).generate_state(1, np.uint64)[0] >> 1)


def generator_of(seed: int, stream: str, *numbers: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed_of(seed, stream, *numbers))
