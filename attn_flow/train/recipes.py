"""Everything that decides a training run, in one value: the same recipe gives the same loss curve."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, NamedTuple

import numpy as np
import torch

from attn_flow.base import checks
from attn_flow.dynamics.steppers import STEPS
from attn_flow.geometry import Ellipsoid, Euclidean, Geometry, Sphere
from attn_flow.nn.stack import PLACEMENTS, DeepStack, set_beta
from attn_flow.train.tasks import Task, clusters, majority, parity, recall
from attn_flow.train.texts import labelled, masked

GEOMETRIES: dict[str, Callable[[int], Geometry]] = {
    "sphere": lambda d: Sphere(),
    "euclidean": lambda d: Euclidean(),
    "layer-norm": lambda d: Ellipsoid.from_layer_norm(torch.ones(d)),
}
BETA_MODES = ("fixed", "learned", "annealed")


@dataclass(frozen=True)
class Recipe:
    """Task, stack and training of one run. `steps` are a layer's, `updates` the optimiser's.

    beta_mode: "fixed"; "learned", one log beta per head, from beta; "annealed", over the updates from beta_start to
    beta, geometrically.
    """

    task: str
    file: str | None = None
    tokens: int = 16
    dim: int = 32
    heads: int = 1
    head_dim: int | None = None
    depth: int = 1
    shared: bool = False
    horizon: float = 1.0
    steps: int = 4
    step: str = "rk4"
    geometry: str = "sphere"
    placement: str = "post"
    ffn: int = 0
    noise: float = 0.0
    beta: float = 4.0
    beta_mode: str = "fixed"
    beta_start: float = 1.0
    checkpointing: bool = False
    updates: int = 500
    batch: int = 64
    lr: float = 3e-3
    weight_decay: float = 0.01
    warmup: int = 50
    clip: float = 1.0
    amp: bool = True
    seed: int = 0

    def __post_init__(self) -> None:
        checks.one_of("task", self.task, tuple(TASKS))
        checks.one_of("geometry", self.geometry, tuple(GEOMETRIES))
        checks.one_of("placement", self.placement, tuple(PLACEMENTS))
        checks.one_of("step", self.step, tuple(STEPS))
        checks.one_of("beta_mode", self.beta_mode, BETA_MODES)
        for name in ("tokens", "dim", "heads", "depth", "steps", "updates", "batch"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} = {getattr(self, name)}, expected at least 1.")
        for name in ("horizon", "lr", "clip"):
            checks.positive(name, getattr(self, name))
        for name in ("weight_decay", "warmup", "seed"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} = {getattr(self, name)}, expected 0 or more.")
        if self.beta_mode == "annealed":
            for name in ("beta", "beta_start"):
                if not 0 < getattr(self, name) < math.inf:
                    raise ValueError(f"{name} = {getattr(self, name)} cannot be annealed; expected positive, finite.")
        if self.file is not None and not TASKS[self.task].reads:
            raise ValueError(f"task {self.task!r} is generated and reads no file; expected file = None.")
        if self.file is None and self.task == "text":
            raise ValueError("task 'text' needs a file of label<TAB>text lines; give one with --file.")

    def make_task(self) -> Task:
        return TASKS[self.task].make(self)

    def make_stack(self, **decided: Any) -> DeepStack:
        """The stack at its start, with what the task decided; one seed, one stack, whatever was drawn before."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed_of(self.seed, "weights"))
            stack = DeepStack(
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
                set_beta(layer, self.beta_start * (self.beta / self.beta_start) ** s)  # type: ignore[arg-type]

    @property
    def stated_accuracy(self) -> float | None:
        """What the task states for its own recipe, whatever the seed; None for any other recipe."""
        row = TASKS[self.task]
        if row.accuracy is None or replace(self, seed=0) != Recipe(self.task, **row.defaults):
            return None
        return row.accuracy

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


class Row(NamedTuple):
    """A task, the recipe it is trained by unless told otherwise, and the accuracy on new inputs it then reaches."""

    make: Callable[[Recipe], Task]
    defaults: dict[str, Any]
    accuracy: float | None
    reads: bool = False


TASKS: dict[str, Row] = {
    "majority": Row(
        lambda r: majority(r.tokens),
        {"tokens": 16, "dim": 16, "steps": 2, "updates": 300, "lr": 1e-2, "warmup": 20},
        0.98,
    ),
    "recall": Row(
        lambda r: recall(r.tokens),
        {"tokens": 9, "horizon": 2.0, "steps": 2, "beta": 8.0, "updates": 300, "lr": 1e-2, "warmup": 20},
        0.98,
    ),
    "clusters": Row(
        lambda r: clusters(r.tokens), {"tokens": 16, "dim": 16, "horizon": 2.0, "steps": 4, "updates": 600}, 0.93
    ),
    "parity": Row(
        lambda r: parity(r.tokens),
        {"tokens": 10, "heads": 2, "depth": 2, "horizon": 1.0, "steps": 1, "ffn": 64, "updates": 800},
        0.99,
    ),
    "text": Row(
        lambda r: labelled(r.file or "", r.tokens),
        {"tokens": 32, "heads": 2, "horizon": 1.0, "steps": 2, "updates": 300, "weight_decay": 0.1},
        None,
        reads=True,
    ),
    "masked": Row(
        lambda r: masked(r.file, r.tokens),
        {"tokens": 32, "dim": 64, "heads": 4, "depth": 2, "step": "euler", "steps": 1, "ffn": 128, "beta": 8.0}
        | {"updates": 1200, "lr": 8e-3},
        0.36,
        reads=True,
    ),
}


def recipe(task: str, **options: Any) -> Recipe:
    """The task's own recipe with some options changed; None means unchanged."""
    checks.one_of("task", task, tuple(TASKS))
    if unknown := sorted(set(options) - {field.name for field in fields(Recipe)}):
        raise ValueError(f"no option {unknown[0]!r}; expected some of {', '.join(f.name for f in fields(Recipe))}.")
    given = {name: value for name, value in options.items() if value is not None}
    return Recipe(task, **{**TASKS[task].defaults, **given})


STREAMS = {"weights": 0, "training": 1, "held out": 2, "noise": 3, "probe": 4}


def seed_of(seed: int, stream: str, *numbers: int) -> int:
    """One 63-bit seed per (seed, stream, numbers), independent of one another: no state to save, none to restore."""
    return int(np.random.SeedSequence([seed, STREAMS[stream], *numbers]).generate_state(1, np.uint64)[0] >> 1)


def generator_of(seed: int, stream: str, *numbers: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed_of(seed, stream, *numbers))
