"""Tasks with known answers, generated on the fly, and tasks of your own tensors.

    majority   ids: the class that occurs most often in the cloud
    recall     pairs (key, value), then a key alone: its value
    side       points on the sphere: on which side of an unknown plane most of them lie

`y` is one class per cloud (batch,), or one per token (batch, n) with -100 for tokens that are not asked.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from attn_flow.base import checks
from attn_flow.base.files import digest
from attn_flow.geometry import Sphere

IGNORE = -100  # the class of tokens that are not asked, as in torch's cross_entropy
STREAMS = {"weights": 0, "training": 1, "held out": 2, "learned": 4}


def seed_of(seed: int, stream: str, *numbers: int) -> int:
    """A 63-bit seed that is a function of (seed, stream, numbers): there is no state to save and restore."""
    return int(np.random.SeedSequence([seed, STREAMS[stream], *numbers]).generate_state(1, np.uint64)[0] >> 1)


def generator_of(seed: int, stream: str, *numbers: int) -> torch.Generator:
    """A generator with the seed of `seed_of`."""
    return torch.Generator().manual_seed(seed_of(seed, stream, *numbers))


class Batch(NamedTuple):
    """Inputs x, answers y and, if inputs have different lengths, the mask of tokens."""

    x: Tensor
    y: Tensor
    mask: Tensor | None = None

    def map(self, function: Callable[[Tensor], Tensor]) -> Batch:
        """The batch with a function applied to inputs, answers and mask."""
        return Batch(function(self.x), function(self.y), None if self.mask is None else function(self.mask))

    def to(self, device: torch.device | str) -> Batch:
        """The batch on another device."""
        return self.map(lambda z: z.to(device))


Draw = Callable[[int, torch.Generator], Batch]


@dataclass(frozen=True)
class Task:
    """The data of a task, and the sizes of a stack for it.

    Args:
        name: the name in logs.
        draw, held_out: (size, generator) -> a batch to train on, and one that is never trained on.
        chance: the accuracy of the best answer that ignores the inputs.
        stack_options: the arguments of `DeepStack` that the task decides: inputs, outputs, readout, length, points.
        digest: a digest of the data, empty for generated tasks.
    """

    name: str
    draw: Draw
    held_out: Draw
    chance: float
    stack_options: dict[str, Any]
    digest: str = ""


def tensor_task(
    x: Tensor, y: Tensor, *, inputs: int, outputs: int, mask: Tensor | None = None, held_out: float = 0.2
) -> Task:
    """A task of your own examples, for `train_stack(recipe, task=...)`.

    Args:
        x: (examples, n) ids below `inputs`, or (examples, n, inputs) real vectors.
        y: (examples,) classes below `outputs`, or (examples, n) with -100 for tokens that are not asked.
        inputs, outputs: see `DeepStack`.
        mask: (examples, n), True or 1 for tokens.
        held_out: the share of the examples, the last ones, that is never trained on.

    Example:
        >>> x = torch.randint(5, (40, 6))
        >>> tensor_task(x, (x == 0).any(-1).long(), inputs=5, outputs=2).chance <= 1
        True
    """
    data = {"x": x, "y": y} | ({} if mask is None else {"mask": mask})
    for name, z in data.items():
        checks.require_same_device(name, z, "x", x)
    if y.is_floating_point():
        raise TypeError(f"y has dtype {y.dtype}, expected integers, the numbers of classes; use y.long().")
    points, examples, count = x.is_floating_point(), x.shape[0], round(held_out * x.shape[0])
    has_shapes = x.ndim in ((3,) if points else (2, 3)) and y.shape in ((examples,), x.shape[:2])
    if not has_shapes or (mask is not None and mask.shape != x.shape[:2]):
        shapes = ", ".join(f"{name} {tuple(z.shape)}" for name, z in data.items())
        expected = "(examples, n) ids or (examples, n, inputs) vectors, and their answers; a mask is (examples, n)"
        raise ValueError(f"the shapes are {shapes}, expected {expected}.")
    if not 0 < count < examples:
        raise ValueError(f"held_out = {held_out} of {examples} examples, expected some on each side.")
    y = y.long()
    classes = y[y != IGNORE]
    for name, ids, size in (("x", x, inputs), ("y", classes, outputs)):
        if not ids.is_floating_point() and (ids.numel() == 0 or not 0 <= int(ids.min()) <= int(ids.max()) < size):
            raise ValueError(f"{name} has values outside of 0 to {size - 1}, or none.")
    whole = Batch(x, y, None if mask is None else mask > 0)

    def draw(size: int, generator: torch.Generator) -> Batch:  # with replacement
        rows = torch.randint(examples - count, (size,), generator=generator)
        return whole.map(lambda z: z[rows])

    def last(size: int, generator: torch.Generator) -> Batch:
        return whole.map(lambda z: z[-count:][:size])

    options: dict[str, Any] = {"inputs": inputs, "outputs": outputs, "readout": "mean" if y.ndim == 1 else "token"}
    options |= {"points": points, "length": None if points else x.shape[1]}
    return Task("own", draw, last, float(classes.bincount().max() / classes.numel()), options, digest(data)[:16])


def _majority(n: int) -> Task:
    """Uniform ids (batch, n); y is the most frequent one, which is always unique."""
    _require_tokens(n, 3)
    classes = 4

    def draw(size: int, generator: torch.Generator) -> Batch:
        x = torch.randint(classes, (size, n), generator=generator)
        counts = torch.nn.functional.one_hot(x, classes).sum(-2)
        y = counts.argmax(-1)
        # A tie is broken by giving the first token of another winner to y.
        rivals = (counts == counts.amax(-1, keepdim=True)).scatter(1, y[:, None], False)
        is_tied = rivals.any(-1)
        position = rivals.gather(1, x).int().argmax(-1)
        x[is_tied, position[is_tied]] = y[is_tied]
        return Batch(x, y)

    return Task("majority", draw, draw, 1 / classes, {"inputs": classes, "outputs": classes})


def _recall(n: int) -> Task:
    """Ids (batch, n, 2): n - 1 tokens (key, value) with distinct keys, then a key and a blank, whose value is asked."""
    keys, values = 16, 8
    _require_tokens(n, 2, keys + 1)

    def draw(size: int, generator: torch.Generator) -> Batch:
        key = torch.rand(size, keys, generator=generator).argsort(-1)[:, : n - 1]
        value = torch.randint(values, (size, n - 1), generator=generator)
        question = torch.randint(n - 1, (size, 1), generator=generator)
        key = torch.cat([key, key.gather(1, question)], dim=1)
        blank = torch.full((size, 1), values)
        y = torch.full((size, n), IGNORE)
        y[:, -1:] = value.gather(1, question)
        return Batch(torch.stack([key, keys + torch.cat([value, blank], dim=1)], dim=-1), y)

    options = {"inputs": keys + values + 1, "outputs": values, "readout": "token"}
    return Task("recall", draw, draw, 1 / values, options)


PLANE_NORMAL = (2 / 3, -1 / 3, 2 / 3)  # of the task "side"


def _side(n: int) -> Task:
    """Points (batch, n, 3) on the sphere; y is 1 if most of them have <w, x> > 0, w the normal of a plane.

    The majority has 55% to 75% of the points. |<w, x>| is uniform in [0.05, 0.55] on one side of the plane and in
    [0.5, 1] on the other, drawn independently of y, so that the mean of the points says little of y.
    """
    _require_tokens(n, 20)
    w = torch.tensor(PLANE_NORMAL)

    def draw(size: int, generator: torch.Generator) -> Batch:
        y, far = torch.randint(2, (2, size, 1), generator=generator)
        count = torch.randint(-(-55 * n // 100), 75 * n // 100 + 1, (size, 1), generator=generator)
        is_majority = torch.rand(size, n, generator=generator).argsort(-1) < count
        side = torch.where(is_majority, y, 1 - y)
        u = torch.rand(size, n, generator=generator)
        height = torch.where(side == far, 0.5 + 0.5 * u, 0.05 + 0.5 * u)
        z = torch.randn(size, n, 3, generator=generator)
        across = Sphere().retract(z - (z @ w)[..., None] * w)
        x = ((2 * side - 1) * height)[..., None] * w + (1 - height**2).sqrt()[..., None] * across
        return Batch(x, y[:, 0])

    return Task("side", draw, draw, 0.5, {"inputs": 3, "outputs": 2, "points": True})


def _require_tokens(n: int, least: int, most: int = 10**9) -> None:
    if not least <= n <= most:
        limits = f"at least {least}" if most == 10**9 else f"{least} to {most}"
        raise ValueError(f"tokens = {n}, expected {limits}.")


GENERATED: dict[str, Callable[[int], Task]] = {"majority": _majority, "recall": _recall, "side": _side}
