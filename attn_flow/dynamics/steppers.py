"""From x(t) to x(t + h): explicit Runge-Kutta steps whose every stage is a point of the geometry.

A step is any function step(velocity, t, x, h, geometry) -> x, with velocity(t, x) a tangent vector. Stages are
retracted before the velocity sees them, so that the scheme is an ordinary Runge-Kutta method for a smooth
extension of the flow to ambient space and keeps its order.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from attn_flow.base import checks
from attn_flow.geometry import Geometry

Velocity = Callable[[float, Tensor], Tensor]


class Step(Protocol):
    """A step: x(t + h) from x(t) = x (..., n, d) on a geometry, with velocity(t, x) tangent to it at x."""

    def __call__(self, velocity: Velocity, t: float, x: Tensor, h: float, geometry: Geometry) -> Tensor: ...


@dataclass(frozen=True, repr=False)
class RungeKutta:
    """An explicit tableau: stages k_i at t + c_i h, x + h sum_j a_ij k_j; the step x + h sum_i b_i k_i.

    Args:
        name: what paths remember of it.
        order: of convergence.
        a: rows of weights of the earlier stages, from the second stage on.
        b: weights of the stages in the step.
        embedded: those of a second, lower-order result: the difference estimates the local error.
        closing: where there is none, what the next step's first velocity weighs in place of the last stage's, in a
            result of another order; 0 if it gives none.

    Example:
        >>> from attn_flow import Attention, Euclidean, flow
        >>> heun = RungeKutta("heun", 2, a=((1.0,),), b=(0.5, 0.5))
        >>> x0 = torch.tensor([[1.0]])
        >>> flow(Attention.identity(1, 0.0), x0, [0.0, 0.5], step=heun, h=0.5, geometry=Euclidean()).x
        tensor([[[1.0000]],
        <BLANKLINE>
                [[1.6250]]])
    """

    name: str
    order: int
    a: tuple[tuple[float, ...], ...]
    b: tuple[float, ...]
    embedded: tuple[float, ...] | None = None
    closing: float = 0.0

    def __repr__(self) -> str:
        return self.name

    def __call__(self, velocity: Velocity, t: float, x: Tensor, h: float, geometry: Geometry) -> Tensor:
        return self.with_error(velocity, t, x, h, geometry)[0]

    def with_error(
        self, velocity: Velocity, t: float, x: Tensor, h: float, geometry: Geometry, first: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        """The step, its error estimate (or None), and the last stage's velocity; `first` is k_1 if known."""
        k = [velocity(t, x) if first is None else first]
        for row in self.a:
            # c_i = sum_j a_ij
            k.append(velocity(t + sum(row) * h, geometry.retract(_along(x, h, row, k))))
        error = None
        if self.embedded is not None:
            difference = tuple(b - e for b, e in zip(self.b, self.embedded))
            error = _along(torch.zeros_like(x), h, difference, k)
        return geometry.retract(_along(x, h, self.b, k)), error, k[-1]

    @property
    def reuses_last(self) -> bool:
        """Whether the last stage is the velocity at the new point, hence the next step's first (FSAL)."""
        return len(self.a) > 0 and self.a[-1] == self.b[:-1] and self.b[-1] == 0


def _along(x: Tensor, h: float, weights: tuple[float, ...], k: list[Tensor]) -> Tensor:
    for weight, k_i in zip(weights, k):
        if weight:
            x = torch.add(x, k_i, alpha=h * weight)
    return x


# Steps of order 1, 4 and 5: step=euler or step="euler" in `flow`, one, four and six evaluations of the drift a step.
euler = RungeKutta("euler", 1, a=(), b=(1.0,), closing=1 / 2)
rk4 = RungeKutta("rk4", 4, a=((1 / 2,), (0, 1 / 2), (0, 0, 1)), b=(1 / 6, 1 / 3, 1 / 3, 1 / 6), closing=1 / 6)
# Dormand and Prince (1980), order 5 with an embedded order 4.
dopri5 = RungeKutta(
    "dopri5",
    5,
    a=(
        (1 / 5,),
        (3 / 40, 9 / 40),
        (44 / 45, -56 / 15, 32 / 9),
        (19372 / 6561, -25360 / 2187, 64448 / 6561, -212 / 729),
        (9017 / 3168, -355 / 33, 46732 / 5247, 49 / 176, -5103 / 18656),
        (35 / 384, 0, 500 / 1113, 125 / 192, -2187 / 6784, 11 / 84),
    ),
    b=(35 / 384, 0, 500 / 1113, 125 / 192, -2187 / 6784, 11 / 84, 0),
    embedded=(5179 / 57600, 0, 7571 / 16695, 393 / 640, -92097 / 339200, 187 / 2100, 1 / 40),
)


@dataclass(frozen=True)
class Adaptive:
    """Steps as large as a local error of `tol` per token allows, growing on metastable plateaus.

    Args:
        tol: largest |error| of a step over max(1, |x_i|), for every token.
        merge: join coincident tokens; None: wherever tokens are exchangeable, True: raise where they are not.
        pair: the Runge-Kutta pair with an embedded error estimate.
        max_steps: raise FloatingPointError beyond.
        largest: no step is longer, in units of t.

    Example:
        >>> from attn_flow import Attention, Sphere, flow
        >>> x0 = Sphere().uniform(20, 3, generator=torch.Generator().manual_seed(0))
        >>> path = flow(Attention.identity(3, beta=2.0), x0, t=[0.0, 1000.0], step=Adaptive(tol=1e-4))
        >>> path.about["tokens_left"]
        1

    On a plateau the cloud is a few tight clusters: their inner modes contract at rate 1 and would keep an explicit
    step below about 3 for ever. With `merge` (on by default wherever tokens are exchangeable) approaching tokens
    closer than ten times `tol` become one token with their joint weight; what is left moves exponentially slowly, and
    so do the steps grow. Both are needed: neither alone crosses a plateau of length e^beta.
    """

    tol: float = 1e-6
    merge: bool | None = None
    pair: RungeKutta = dopri5
    max_steps: int = 100_000
    largest: float = math.inf

    def __post_init__(self) -> None:
        checks.positive("tol", self.tol)
        checks.positive("largest", self.largest)
        checks.whole("max_steps", self.max_steps)
        if self.merge is not None:
            checks.flags(merge=self.merge)
        checks.instance("pair", self.pair, RungeKutta, "a Runge-Kutta pair such as dopri5")
        if self.pair.embedded is None:
            raise ValueError(f"pair {self.pair.name!r} has no embedded result to estimate errors; use dopri5.")

    @property
    def name(self) -> str:
        return f"adaptive {self.pair.name} tol={self.tol:g}"

    def scaled_error(self, error: Tensor, x: Tensor) -> Tensor:
        """max_i |error_i| / (tol max(1, |x_i|)), (): a step is accepted at 1 or below."""
        scale = x.detach().norm(dim=-1).clamp_min(1.0)
        return (error.detach().norm(dim=-1) / (self.tol * scale)).amax()

    def next_step(self, h: float, error: float, before: tuple[float, float] | None = None) -> float:
        """The step after one of size h with this scaled error; `before` are size and error of the accepted one before.

        0.9 h error^(-1/p), and no more than Gustafsson's prediction 0.9 h (h/h') (error'/error^2)^(1/p), which
        foresees that errors keep growing when clusters fall into each other; changed at most fivefold.
        """
        p, error = self.pair.order, max(error, 1e-30)
        factor = 0.9 * error ** (-1 / p)
        if before is not None:
            h_before, error_before = before
            factor = min(factor, 0.9 * (h / h_before) * (max(error_before, 1e-30) / error**2) ** (1 / p))
        return min(self.largest, h * min(5.0, max(0.2, factor)))


STEPS: dict[str, RungeKutta] = {step.name: step for step in (euler, rk4, dopri5)}


def named_step(step: str | Step | Adaptive) -> Step | Adaptive:
    """The step of this name ("euler", "rk4", "dopri5", "adaptive"); a step function or `Adaptive` is itself."""
    if isinstance(step, str):
        checks.one_of("step", step, (*STEPS, "adaptive"))
        return Adaptive() if step == "adaptive" else STEPS[step]
    if not (callable(step) or isinstance(step, Adaptive)):
        raise ValueError(f"step = {step!r}, expected a name, a step function (euler, rk4, your own) or Adaptive().")
    return step
