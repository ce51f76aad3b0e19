"""How long and in which steps a layer flows: the options that all continuous layers share."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Literal, TypedDict

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from attn_flow.base import checks
from attn_flow.dynamics.steppers import RungeKutta, as_method, rk4
from attn_flow.geometry import UNIT_SPHERE, Euclidean, Geometry, Velocity, require_geometry

Step = Literal["euler", "rk4", "dopri5"] | RungeKutta


class FlowKeywords(TypedDict, total=False):
    """The keyword arguments that all continuous modules share."""

    beta: float | Tensor | None
    learn_beta: bool
    horizon: float
    steps: int
    step: Step
    geometry: Geometry
    checkpoint: bool
    validate: bool


@dataclass(frozen=True)
class FlowOptions:
    """A flow to time `horizon` in `steps` equal steps.

    Args:
        horizon: the time that tokens flow.
        steps: the number of equal steps.
        step: "euler", "rk4", "dopri5" or another `RungeKutta` method: 1, 4 or 7 evaluations of attention a step.
        geometry: the set that tokens live on.
        checkpoint: recompute each step in the backward pass, which takes the memory of one step.

    Example:
        >>> options = FlowOptions(horizon=1.0, steps=50, geometry=Euclidean())
        >>> options.run(lambda t, x: -x, torch.ones(1, 1))  # e^-1
        tensor([[0.3679]])
        >>> options.evaluations
        200
    """

    horizon: float = 1.0
    steps: int = 1
    step: Step = rk4
    geometry: Geometry = UNIT_SPHERE
    checkpoint: bool = False

    def __post_init__(self) -> None:
        require_geometry(self.geometry)
        checks.require_positive(horizon=self.horizon)
        checks.require_count(steps=self.steps)
        if not isinstance(as_method(self.step), RungeKutta):
            raise ValueError(f"step = {self.step!r}, expected a fixed step such as 'rk4': a layer takes equal steps.")

    @property
    def method(self) -> RungeKutta:
        """The Runge-Kutta method of a step."""
        return as_method(self.step)  # type: ignore[return-value]

    @property
    def evaluations(self) -> int:
        """How often attention is evaluated in one forward pass."""
        return self.steps * (1 + len(self.method.a))

    def states(self, velocity: Velocity, x: Tensor) -> Iterator[Tensor]:
        """Yield the tokens (..., n, d) after each step, for a velocity (t, x) -> tangent vectors (..., n, d)."""
        step, h = self.method.step, self.horizon / self.steps
        if self.checkpoint and torch.is_grad_enabled():
            step = partial(checkpoint, step, use_reentrant=False)
        for i in range(self.steps):
            x = step(velocity, i * h, x, h, self.geometry)
            yield x

    def run(self, velocity: Velocity, x: Tensor) -> Tensor:
        """x(horizon) from x(0) = x, (..., n, d)."""
        for state in self.states(velocity, x):
            x = state
        return x

    def displacement(self, velocity: Velocity, x: Tensor) -> Tensor:
        """x(horizon) - x, (..., n, d)."""
        if isinstance(self.geometry, Euclidean):  # integrated itself, so that one Euler step of size one loses no digit
            return self.run(lambda t, u: velocity(t, x + u), torch.zeros_like(x))
        return self.run(velocity, self.geometry.retract(x)) - x

    def __str__(self) -> str:
        cost = f"{self.evaluations} attention{'s' * (self.evaluations > 1)} a forward pass"
        return f"horizon={self.horizon:g}, steps={self.steps}, step={self.method} ({cost}), geometry={self.geometry}"
