"""Tasks whose answers are known: generated on the fly, every batch a function of a generator alone.

    majority   which of the classes occurs most often in the cloud
    recall     pairs (key, value), then a key alone: which value belongs to it
    clusters   points around centres on a sphere, new ones in every cloud: who shares the first point's centre
    parity     bits: the parity of three of them, at places the model has to find

`y` is one class per cloud (batch,), or one per token (batch, n) with -100 where nothing is asked.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from attn_flow.base import checks
from attn_flow.base.files import digest
from attn_flow.geometry import Sphere
from attn_flow.nn.stack import Readout

NO_QUESTION = -100


class Batch(NamedTuple):
    """Inputs x, answers y and, where inputs have unequal lengths, the mask of tokens."""

    x: Tensor
    y: Tensor
    mask: Tensor | None = None

    def each(self, of: Callable[[Tensor], Tensor]) -> Batch:
        """The same done to inputs, answers and mask."""
        return Batch(of(self.x), of(self.y), None if self.mask is None else of(self.mask))

    def part(self, rank: int, of: int) -> Batch:
        """The rank-th of `of` equal slices along the batch."""
        size = self.y.shape[0] // of
        return self.each(lambda z: z[rank * size : (rank + 1) * size])

    def to(self, device: torch.device | str) -> Batch:
        return self.each(lambda z: z.to(device))


@dataclass(frozen=True)
class Task:
    """What a stack is asked: how wide its inputs and outputs are, and how a batch is drawn.

    draw(size, generator) -> Batch for training; held_out(size, generator) -> Batch never trained on.
    chance: the accuracy of the best answer that ignores the inputs.
    digest: what tells two versions of a task's file apart; empty for generated tasks.
    reads: the Vocabulary of a task of texts, which its checkpoints keep.
    """

    name: str
    inputs: int
    outputs: int
    draw: Callable[[int, torch.Generator], Batch]
    held_out: Callable[[int, torch.Generator], Batch]
    chance: float
    readout: Readout = "mean"
    length: int | None = None
    points: bool = False
    digest: str = ""
    reads: Any = None  # the Vocabulary of texts

    @property
    def stack_options(self) -> dict[str, Any]:
        """What of a DeepStack the task decides."""
        names = ("inputs", "outputs", "readout", "length", "points")
        return {name: getattr(self, name) for name in names}


def tensor_task(
    x: Tensor, y: Tensor, *, inputs: int, outputs: int, mask: Tensor | None = None, held_out: float = 0.2
) -> Task:
    """A task of your own examples: x (examples, n) ids below `inputs`, or (examples, n, inputs) real vectors.

    y: (examples,) one class each, or (examples, n) one per token with -100 where nothing is asked; below `outputs`.
    mask: (examples, n), True for tokens. held_out: the share of examples, the last ones, that is never trained on.
    Returns a Task for `train_stack(recipe, task=...)`.

    Example:
        >>> x = torch.randint(5, (40, 6))
        >>> tensor_task(x, (x == 0).any(-1).long(), inputs=5, outputs=2).chance <= 1
        True
    """
    for name, z, shape in (("x", x, "(examples, n) or (examples, n, inputs)"), ("y", y, "(examples,)")):
        checks.tensor(name, z, shape)
        checks.held(name, z)
    for name, number in (("inputs", inputs), ("outputs", outputs)):
        checks.whole(name, number)
    checks.number("held_out", held_out, "a share of the examples")
    if not 0 < held_out < 1:
        raise ValueError(f"held_out = {held_out}, expected a share of the examples, 0 < held_out < 1.")
    points = x.is_floating_point()
    if x.ndim not in ((3,) if points else (2, 3)) or 0 in x.shape or y.ndim not in (1, 2):
        shapes = f"x has shape {tuple(x.shape)} and y {tuple(y.shape)}"
        raise ValueError(f"{shapes}, expected (examples, n) ids or (examples, n, inputs) vectors, and answers.")
    for name, z in (("x", x), ("y", y)):
        if z.is_complex() or z.dtype == torch.bool or (name == "y" and z.is_floating_point()):
            raise ValueError(f"{name} has dtype {z.dtype}, expected {'classes' if name == 'y' else 'ids or vectors'}.")
    if points:
        checks.finite("x", x)
        checks.width("x", x, inputs)
    if mask is not None:
        checks.token_mask(mask, torch.empty(*x.shape[:2], 1))
        if mask.shape != x.shape[:2]:
            raise ValueError(f"mask has shape {tuple(mask.shape)}, expected (examples, n) = {tuple(x.shape[:2])}.")
    examples = x.shape[0]
    held = round(held_out * examples)
    if y.shape[0] != examples or not 0 < held < examples:
        raise ValueError(
            f"{examples} inputs, {y.shape[0]} answers, {held} held out: expected as many, some on each side."
        )
    asked = y[y != NO_QUESTION]
    if asked.numel() == 0 or (y.ndim == 2 and y.shape != x.shape[:2]):
        raise ValueError(f"y has shape {tuple(y.shape)} and asks {asked.numel()} questions, expected answers to x.")
    for name, ids, below in (("x", x, inputs), ("y", asked, outputs)):
        if not (name == "x" and points) and not 0 <= int(ids.min()) <= int(ids.max()) < below:
            raise ValueError(f"{name} holds {int(ids.min())} to {int(ids.max())}, expected 0 to {below - 1}.")
    whole = Batch(x, y, mask)
    seen, kept = whole.each(lambda z: z[: examples - held]), whole.each(lambda z: z[examples - held :])

    def draw(size: int, generator: torch.Generator) -> Batch:
        chosen = torch.randint(examples - held, (size,), generator=generator)
        return seen.each(lambda z: z[chosen])

    return Task(
        "own",
        inputs=inputs,
        outputs=outputs,
        draw=draw,
        held_out=lambda size, generator: kept.each(lambda z: z[:size]),
        chance=float(asked.bincount().max() / asked.numel()),
        readout="mean" if y.ndim == 1 else "token",
        length=None if points else x.shape[1],
        points=points,
        digest=digest({"x": x, "y": y} | ({} if mask is None else {"mask": mask}))[:16],
    )


def _generated(name: str, draw: Callable[[int, torch.Generator], Batch], **facts: object) -> Task:
    return Task(name=name, draw=draw, held_out=draw, **facts)  # type: ignore[arg-type]


def majority(n: int = 16, classes: int = 4) -> Task:
    """Ids (batch, n), uniform; y the most frequent, which is always strictly so."""
    if n < 3 or classes < 2:
        raise ValueError(f"tokens = {n}, classes = {classes}: expected at least 3 tokens and 2 classes.")

    def draw(size: int, generator: torch.Generator) -> Batch:
        x = torch.randint(classes, (size, n), generator=generator)
        counts = torch.nn.functional.one_hot(x, classes).sum(-2)
        y = counts.argmax(-1)
        # A tie is broken by giving the first token of another winner to y.
        rival = (counts == counts.amax(-1, keepdim=True)).scatter(1, y[:, None], False)
        tied = rival.any(-1)
        place = rival.gather(1, x).int().argmax(-1)
        x[tied, place[tied]] = y[tied]
        return Batch(x, y)

    return _generated("majority", draw, inputs=classes, outputs=classes, chance=1 / classes)


def recall(n: int = 9, keys: int = 16, values: int = 8) -> Task:
    """Ids (batch, n, 2): n - 1 tokens (key, value) with distinct keys, then a key and a blank, where y is asked."""
    if not 2 <= n <= keys + 1:
        raise ValueError(f"tokens = {n}, expected 2 to {keys + 1}: one question and pairs with {keys} distinct keys.")

    def draw(size: int, generator: torch.Generator) -> Batch:
        key = torch.rand(size, keys, generator=generator).argsort(-1)[:, : n - 1]
        value = torch.randint(values, (size, n - 1), generator=generator)
        asked = torch.randint(n - 1, (size, 1), generator=generator)
        key = torch.cat([key, key.gather(1, asked)], dim=1)
        blank = torch.full((size, 1), values)
        y = torch.full((size, n), NO_QUESTION)
        y[:, -1:] = value.gather(1, asked)
        return Batch(torch.stack([key, keys + torch.cat([value, blank], dim=1)], dim=-1), y)

    return _generated("recall", draw, inputs=keys + values + 1, outputs=values, chance=1 / values, readout="token")


def clusters(n: int = 16, centres: int = 3, d: int = 8, spread: float = 0.15) -> Task:
    """Points (batch, n, d + 1): centre + spread xi on the sphere, and a mark on the first; y: its cluster or not.

    Every cloud has its own uniform centres, so that nothing can be learned but to compare. The first point and
    a partner share a centre. The first itself is not asked.
    """
    if n < 3 or centres < 2:
        raise ValueError(f"tokens = {n}, centres = {centres}: expected at least 3 tokens and 2 centres.")

    def draw(size: int, generator: torch.Generator) -> Batch:
        centre = Sphere().uniform((size, centres), d, generator=generator)
        owner = torch.randint(centres, (size, n), generator=generator)
        owner[:, 1] = owner[:, 0]
        x = centre.gather(1, owner[..., None].expand(-1, -1, d))
        x = Sphere().retract(x + spread * torch.randn(size, n, d, generator=generator))
        mark = torch.zeros(size, n, 1)
        mark[:, 0] = 1
        y = (owner == owner[:, :1]).long()
        y[:, 0] = NO_QUESTION
        return Batch(torch.cat([x, mark], dim=-1), y)

    # Among the n - 1 asked, one partner and a third of the rest say yes.
    yes = (1 + (n - 2) / centres) / (n - 1)
    return _generated("clusters", draw, inputs=d + 1, outputs=2, chance=max(yes, 1 - yes), readout="token", points=True)


def parity(n: int = 10, subset: int = 3) -> Task:
    """Bits (batch, n); y the parity of `subset` of them, at places spread evenly over 0..n-1."""
    if not 1 <= subset <= n:
        raise ValueError(f"tokens = {n}, expected at least the {subset} bits whose parity is asked.")
    places = [round(i * (n - 1) / max(1, subset - 1)) for i in range(subset)]

    def draw(size: int, generator: torch.Generator) -> Batch:
        x = torch.randint(2, (size, n), generator=generator)
        return Batch(x, x[:, places].sum(-1) % 2)

    return _generated("parity", draw, inputs=2, outputs=2, chance=0.5, length=n)
