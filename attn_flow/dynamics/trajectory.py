"""Clouds along a flow, or through the layers of an encoder."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from attn_flow.base import checks
from attn_flow.base.files import read_tensors, write_tensors
from attn_flow.drawing import animate_clouds, clouds_figure, html_text
from attn_flow.measures.cloud import Cloud

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PANELS = 5  # times that a figure shows


@dataclass(frozen=True, eq=False, repr=False)
class Trajectory:
    """Clouds x (T, ..., n, d) at times t (T,), with weights and mask (..., n) that do not change in time.

    Args:
        t: (T,), increasing times of a flow, or depth indices of an encoder's states, one kind of state after the other.
        x: (T, ..., n, d), the tokens at these times.
        weights: (..., n), masses of the tokens; None: all the same.
        mask: (..., n), True for tokens and False for padding; None: no padding.
        about: the field, the steps and other facts about its origin, as plain JSON.
        labels: plain lists about the tokens (strings, ids, texts, ...).

    Example:
        >>> path = Trajectory(torch.tensor([0.0, 1.0]), torch.randn(2, 5, 3))
        >>> path
        Trajectory(2 times from 0 to 1, x (2, 5, 3) float32)
        >>> len(path), path.cloud(-1).mean.shape
        (2, torch.Size([3]))
    """

    t: Tensor
    x: Tensor
    weights: Tensor | None = None
    mask: Tensor | None = None
    about: dict[str, Any] = field(default_factory=dict)
    labels: dict[str, list] = field(default_factory=dict)

    def __post_init__(self) -> None:
        checks.require_tensor("t", self.t)
        checks.require_floating("x", self.x)
        if self.t.ndim != 1 or self.x.ndim < 3 or 0 in self.x.shape[1:] or self.x.shape[0] != self.t.shape[0]:
            raise ValueError(
                f"t has shape {tuple(self.t.shape)} and x {tuple(self.x.shape)}, expected (T,) and (T, ..., n, d)."
            )
        for name in ("weights", "mask"):
            if getattr(self, name) is not None:
                checks.require_tensor(name, getattr(self, name))
                checks.require_shape(name, getattr(self, name), self.x.shape[-2:-1])

    def __repr__(self) -> str:
        span = f"{len(self)} times from {float(self.t[0]):.6g} to {float(self.t[-1]):.6g}" if len(self) else "no times"
        parts = [span, f"x {tuple(self.x.shape)} {str(self.x.dtype).removeprefix('torch.')}"]
        parts += [name for name in ("weights", "mask") if getattr(self, name) is not None]
        return f"Trajectory({', '.join(parts)})"

    def __len__(self) -> int:
        return self.t.shape[0]

    def __getitem__(self, index: int | slice | Tensor) -> Trajectory:
        """The path at some of its times; an integer gives a path of one time (see `cloud` for its cloud)."""
        t, x = self.t[index], self.x[index]
        return replace(self, t=t, x=x) if t.ndim else replace(self, t=t[None], x=x[None])

    def __iter__(self) -> Iterator[Cloud]:
        return (self.cloud(i) for i in range(len(self)))

    def cloud(self, index: int) -> Cloud:
        """The cloud at one time, with the weights and the mask of the trajectory."""
        return Cloud(self.x[index], self.weights, self.mask)

    def plot(self, predicted: Tensor | None = None, indices: Sequence[int] | None = None, title: str = "") -> Figure:
        """A figure of the clouds of one path (T, n, d) at some of its times; it needs matplotlib.

        Args:
            predicted: a basis (d, k) of the subspace of the limits, such as `limit(attention).basis`.
            indices: which times to show; by default five.
            title: what stands above the panels.
        """
        if indices is None:
            indices = torch.linspace(0, len(self) - 1, min(len(self), PANELS)).round().int().tolist()
        return clouds_figure(self.t, self.x, indices, predicted, title=title)

    def animate(
        self,
        path: str | os.PathLike[str],
        predicted: Tensor | None = None,
        curve: Tensor | None = None,
        seconds: float = 8.0,
    ) -> None:
        """Write one path (T, n, d) as an animated GIF; it needs matplotlib.

        Args:
            path: the file, such as "tokens.gif".
            predicted: a basis (d, k) of the subspace of the limits, such as `limit(attention).basis`.
            curve: (T,), distances to draw below the tokens, such as `phases(path, limit).w2`.
            seconds: the duration.
        """
        animate_clouds(path, self.t, self.x, predicted, curve=curve, seconds=seconds)

    def _repr_html_(self) -> str:
        """The path in a notebook: its repr, and a figure where it is one path of tokens and matplotlib is there."""
        return html_text([repr(self)], self.plot if self.x.ndim == 3 and self.x.shape[-1] > 1 else None)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the trajectory to a safetensors file, atomically."""
        tensors = {"t": self.t, "x": self.x, "weights": self.weights, "mask": self.mask}
        words = {"format": "attn_flow.Trajectory", "about": json.dumps(self.about), "labels": json.dumps(self.labels)}
        write_tensors({k: v for k, v in tensors.items() if v is not None}, path, words)

    @classmethod
    def load(cls, path: str | os.PathLike[str], device: torch.device | str = "cpu") -> Trajectory:
        """Read a saved trajectory; ValueError for a damaged file or another kind of file."""
        tensors, words = read_tensors(path, device)
        if words.get("format") != "attn_flow.Trajectory":
            raise ValueError(f"{path} is not a saved Trajectory; expected a file written by Trajectory.save.")
        return cls(**tensors, about=json.loads(words["about"]), labels=json.loads(words["labels"]))
