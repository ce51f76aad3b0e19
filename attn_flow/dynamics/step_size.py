"""Whether the fixed steps of a flow are short enough for its velocity."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from attn_flow.dynamics.steppers import RungeKutta
from attn_flow.geometry import Geometry, Velocity

MAX_LOCAL_ERROR = 0.1  # of u^(p+1) / (p+1)!, the error of a step of order p that moves a token by u of its length
MAX_ESTIMATE = 0.03  # of the estimated error of a step, relative to the length of a token


class StepWarning(UserWarning):
    """A fixed step is too long for the velocity of the tokens."""


class StepMonitor:
    """Takes steps and remembers, on the device of the tokens, how far they moved and how much they erred.

    The error of a step is estimated by h w |k - k'| with k the velocity of its last stage, k' the first velocity of the
    next step, and w the weight of the last stage.
    """

    def __init__(self, method: RungeKutta) -> None:
        self.method = method
        self.largest: Tensor | None = None  # displacement and error so far, relative to max(1, |x_i|), (2,)
        self._last: tuple[Tensor, float] | None = None  # the last velocity, and the size of its step

    def forget(self) -> None:
        """Forget the last velocity, because the next one does not continue it (a jump of the field, or noise)."""
        self._last = None

    def step(self, velocity: Velocity, t: float, x: Tensor, h: float, geometry: Geometry) -> Tensor:
        """The tokens after one step."""
        stages = self.method.stages(velocity, t, x, h, geometry, velocity(t, x))
        first = stages[0].detach()
        last, size = (first, 0.0) if self._last is None else self._last
        vectors = torch.stack([h * first, self.method.closing * size * (first - last)])  # (2, ..., n, d)
        lengths = vectors.norm(dim=-1) / x.detach().norm(dim=-1).clamp_min(1.0)
        largest = lengths.flatten(1).amax(1)
        self.largest = largest if self.largest is None else torch.maximum(self.largest, largest)
        self._last = (stages[-1].detach(), h) if self.method.closing else None
        return self.method.combine(x, h, stages, geometry)

    def numbers(self) -> list[Tensor]:
        """The largest displacement and the largest error, () each."""
        assert self.largest is not None  # there was a step
        return list(self.largest)

    def warning(self, displacement: float, error: float, h: float, t: float) -> str | None:
        """What to tell the user about steps of size h until time t; None if they are short enough."""
        p = self.method.order
        limit = (MAX_LOCAL_ERROR * math.factorial(p + 1)) ** (1 / (p + 1))
        if displacement > limit:
            reason = f"move tokens by {displacement:.3g} times their length"
        elif error > MAX_ESTIMATE:
            reason = f"have errors of about {error:.2g} of a token's length"
        else:
            return None
        shorter = min(limit / max(displacement, 1e-300), (MAX_ESTIMATE / max(error, 1e-300)) ** (1 / max(2, p)))
        return f"steps of h = {h:.3g} {reason} before t = {t:.4g}; use h <= {h / 4 * shorter:.2g}, or step='adaptive'."
