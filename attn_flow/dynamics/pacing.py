"""Whether fixed steps can follow the tokens: how far they carry one, and by how much they err."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from attn_flow.base import checks
from attn_flow.dynamics.steppers import RungeKutta, Step, Velocity
from attn_flow.geometry import Geometry

LOCAL_ERROR = 0.1  # u^(p+1)/(p+1)! of a step of order p that carries a token u of its length: beyond it is too far
ESTIMATED = 0.03  # the same by the estimate of a step's error, which sees that the velocity turns, too


class Pace:
    """What the steps so far did to the tokens, kept on their device until someone reads it.

    The error of a step is that of its embedded result, if it has one. Else, for steps with a `closing` weight w, it is
    h w |k - k'|: k the last stage's velocity, k' the velocity that the next step begins with.
    """

    def __init__(self, step: Step) -> None:
        self.step, self.order, self.closing = step, getattr(step, "order", 1), getattr(step, "closing", 0.0)
        self.farthest: Tensor | None = None
        self.error: Tensor | None = None
        self.forget()

    def forget(self) -> None:
        """The next velocity does not continue this one: a jump of the field, or a kick."""
        self._last: tuple[Tensor, float] | None = None

    def take(self, velocity: Velocity, t: float, x: Tensor, h: float, geometry: Geometry) -> Tensor:
        """The step from x at t, watched."""
        begins = True

        def watched(s: float, y: Tensor) -> Tensor:
            nonlocal begins
            v = velocity(s, y)
            if begins and checks.can_look(v):
                self.farthest = _largest(self.farthest, h * v, y)
                if self._last is not None:
                    before, size = self._last
                    self.error = _largest(self.error, self.closing * size * (v.detach() - before), y)
            begins = False
            if self.closing:
                self._last = v.detach(), h
            return v

        if not (isinstance(self.step, RungeKutta) and self.step.embedded is not None):
            return self.step(watched, t, x, h, geometry)
        x, error, _ = self.step.with_error(watched, t, x, h, geometry)
        assert error is not None
        if checks.can_look(error):
            self.error = _largest(self.error, error, x)
        return x

    def seen(self) -> list[Tensor]:
        """The farthest that a step carried a token and the largest error of one, () each; none before the first."""
        if self.farthest is None:
            return []
        return [self.farthest, torch.zeros_like(self.farthest) if self.error is None else self.error]

    def too_long(self, farthest: float, error: float, h: float, t: float) -> str | None:
        """What to say of steps of size h that tokens outran by time t."""
        most = (LOCAL_ERROR * math.factorial(self.order + 1)) ** (1 / (self.order + 1))
        power = self.order + 1 if self.order < 2 else self.order  # of h in the estimate: it is of the lower order
        shorter = most / farthest if farthest else math.inf, (ESTIMATED / error) ** (1 / power) if error else math.inf
        better = h / 4 * min(shorter)
        if farthest > most:
            what = f"carry tokens {farthest:.3g} times their length by t = {t:.4g}: too far"
        elif error > ESTIMATED:
            what = f"err by about {error:.2g} of a token's length by t = {t:.4g}: too long for its velocity"
        else:
            return None
        return f"steps of {h:.3g} {what} to be followed; use h <= {better:.2g}, or step='adaptive'."


def _largest(before: Tensor | None, moved: Tensor, x: Tensor) -> Tensor:
    """max |moved_i| / max(1, |x_i|), and what was before."""
    now = (moved.detach().norm(dim=-1) / x.detach().norm(dim=-1).clamp_min(1.0)).amax()
    return now if before is None else torch.maximum(before, now)
