"""Explicit Runge-Kutta steps as tables of coefficients, and the control of adaptive steps.

Every stage is retracted to the geometry before the velocity sees it. The scheme is then an ordinary Runge-Kutta method
for a smooth extension of the flow to ambient space, and keeps its order.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from attn_flow.base import checks
from attn_flow.geometry import Geometry, Velocity


@dataclass(frozen=True, repr=False)
class RungeKutta:
    """An explicit Runge-Kutta method: k_i = v(t + c_i h, x + h sum_j a_ij k_j), then x + h sum_i b_i k_i.

    Args:
        name: the name that trajectories store.
        order: the order of convergence.
        a: the rows of the table from the second stage on; c_i is the sum of row i.
        b: the weights of the stages.
        embedded: the weights of a result of lower order, which estimates the error of a step; None if there is none.
        closing: w in the estimate h w |last stage - first velocity of the next step| of the error; 0: no estimate.

    Example:
        >>> from attn_flow import Attention, Euclidean, flow
        >>> heun = RungeKutta("heun", 2, a=((1.0,),), b=(0.5, 0.5))
        >>> attention, x0 = Attention.identity(1, beta=0.0), torch.ones(1, 1)
        >>> flow(attention, x0, [0.0, 0.5], step=heun, h=0.5, geometry=Euclidean()).x[-1]
        tensor([[1.6250]])
    """

    name: str
    order: int
    a: tuple[tuple[float, ...], ...]
    b: tuple[float, ...]
    embedded: tuple[float, ...] | None = None
    closing: float = 0.0

    def __repr__(self) -> str:
        return self.name

    def stages(
        self, velocity: Velocity, t: float, x: Tensor, h: float, geometry: Geometry, first: Tensor
    ) -> list[Tensor]:
        """All stages k_i (..., n, d) of a step from x at time t, given the first."""
        k = [first]
        for row in self.a:
            k.append(velocity(t + sum(row) * h, geometry.retract(_add(x, h, row, k))))
        return k

    def combine(self, x: Tensor, h: float, stages: list[Tensor], geometry: Geometry) -> Tensor:
        """x(t + h) from x(t) = x and the stages, (..., n, d)."""
        return geometry.retract(_add(x, h, self.b, stages))

    def step(self, velocity: Velocity, t: float, x: Tensor, h: float, geometry: Geometry) -> Tensor:
        """x(t + h) from x(t) = x, (..., n, d)."""
        return self.combine(x, h, self.stages(velocity, t, x, h, geometry, velocity(t, x)), geometry)

    def step_with_error(
        self, velocity: Velocity, t: float, x: Tensor, h: float, geometry: Geometry, first: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """x(t + h), the difference from the embedded result, and the last stage, (..., n, d) each."""
        k = self.stages(velocity, t, x, h, geometry, first)
        difference = tuple(b - e for b, e in zip(self.b, self.embedded or self.b))
        return self.combine(x, h, k, geometry), _add(torch.zeros_like(x), h, difference, k), k[-1]


def _add(x: Tensor, h: float, coefficients: tuple[float, ...], k: list[Tensor]) -> Tensor:
    """x + h sum_i coefficients_i k_i."""
    for coefficient, stage in zip(coefficients, k):
        if coefficient:
            x = torch.add(x, stage, alpha=h * coefficient)
    return x


euler = RungeKutta("euler", 1, a=(), b=(1.0,), closing=1 / 2)
rk4 = RungeKutta("rk4", 4, a=((1 / 2,), (0, 1 / 2), (0, 0, 1)), b=(1 / 6, 1 / 3, 1 / 3, 1 / 6), closing=1 / 6)
dopri5 = RungeKutta(  # Dormand and Prince (1980)
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
    """Steps as long as a local error of `tol` per token allows; coincident tokens are merged.

    On a plateau the cloud is a few tight clusters. Their inner modes contract at rate 1 and would keep an explicit step
    below about 3. With `merge`, approaching tokens in one cell of a grid of side 10 `tol`, in units of the
    tokens, become one token with their joint weight; what is left moves exponentially slowly, and the steps grow.

    Args:
        tol: the largest error of a step, relative to max(1, |x_i|), of any token.
        merge: None merges wherever tokens are exchangeable; True raises an error where they are not; False never does.
        max_steps: the number of attempted steps after which `flow` raises FloatingPointError.

    Example:
        >>> from attn_flow import Attention, Sphere, flow
        >>> x0 = Sphere().uniform(20, 3, generator=torch.Generator().manual_seed(0))
        >>> path = flow(Attention.identity(3, beta=2.0), x0, t=[0.0, 1000.0], step=Adaptive(tol=1e-4))
        >>> path.about["tokens_left"]
        1
    """

    tol: float = 1e-6
    merge: bool | None = None
    max_steps: int = 100_000

    def __post_init__(self) -> None:
        checks.require_positive(tol=self.tol)
        checks.require_count(max_steps=self.max_steps)

    @property
    def name(self) -> str:
        """The name that trajectories store."""
        return f"adaptive dopri5 tol={self.tol:g}"

    def scaled_error(self, error: Tensor, x: Tensor) -> Tensor:
        """max_i |error_i| / (tol max(1, |x_i|)), (): a step is accepted if it is at most 1."""
        scale = x.detach().norm(dim=-1).clamp_min(1.0)
        return (error.detach().norm(dim=-1) / (self.tol * scale)).amax()

    def next_size(self, h: float, error: float, previous: tuple[float, float] | None = None) -> float:
        """The size of the step after one of size h with this scaled error.

        It is 0.9 h error^(-1/p), but not more than Gustafsson's prediction 0.9 h (h/h') (error'/error^2)^(1/p) from the
        accepted step before, `previous` = (h', error'), which expects errors to keep growing. It changes at most
        fivefold.
        """
        p, error = dopri5.order, max(error, 1e-30)
        factor = 0.9 * error ** (-1 / p)
        if previous is not None:
            h_before, error_before = previous
            factor = min(factor, 0.9 * (h / h_before) * (max(error_before, 1e-30) / error**2) ** (1 / p))
        return h * min(5.0, max(0.2, factor))


METHODS: dict[str, RungeKutta] = {method.name: method for method in (euler, rk4, dopri5)}


def as_method(step: str | RungeKutta | Adaptive) -> RungeKutta | Adaptive:
    """The method of this name ("euler", "rk4", "dopri5", "adaptive"); a method is returned as it is."""
    if isinstance(step, (RungeKutta, Adaptive)):
        return step
    checks.require_choice("step", step, (*METHODS, "adaptive"))
    return Adaptive() if step == "adaptive" else METHODS[step]
