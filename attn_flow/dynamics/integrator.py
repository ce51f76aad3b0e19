"""The steps of a flow: a velocity, fixed or adaptive steps, noise, merging and stopping."""

from __future__ import annotations

import itertools
import math
import warnings
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from attn_flow.attention.fields import Field
from attn_flow.base import checks
from attn_flow.dynamics.merging import MergedCloud
from attn_flow.dynamics.noise import Noise
from attn_flow.dynamics.step_size import StepMonitor, StepWarning
from attn_flow.dynamics.steppers import Adaptive, RungeKutta, Velocity
from attn_flow.geometry import Geometry
from attn_flow.measures.cloud import Cloud


class Run:
    """One integration: what it is given, how often the field was evaluated, and why it ended.

    Args:
        field: the field, already in the dtype of the tokens.
        cloud: the initial cloud, whose weights and mask hold for the whole run.
        validate: whether values may be read from the device.
    """

    def __init__(
        self,
        field: Field,
        geometry: Geometry,
        cloud: Cloud,
        noise: Noise | None = None,
        stop: Callable[[float, Cloud], bool | Tensor] | None = None,
        validate: bool = True,
    ) -> None:
        self.field, self.geometry, self.cloud = field, geometry, cloud
        self.noise, self.stop, self.validate = noise, stop, validate
        self.evaluations = 0
        self.stopped: str | None = None
        self.tokens_left: int | None = None

    def velocity(self, field: Field, log_weights: Tensor | None) -> Velocity:
        """The velocity P_x F(t, x) of tokens with these log-weights; padding does not move."""

        def velocity(t: float, x: Tensor) -> Tensor:
            self.evaluations += 1
            return self.cloud.zero_padding(self.geometry.tangent(x, field(t, x, log_weights)))

        return velocity

    def spans(self, times: list[float]) -> Iterator[tuple[float, float, Field, bool]]:
        """Intervals without a jump of the field, the field in each, and whether its end is one of the times."""
        saved = set(times)
        stops = sorted(saved | {t for t in self.field.jumps if times[0] < t < times[-1]})
        for start, end in itertools.pairwise(stops):
            yield start, end, self.field.piece(start, end), end in saved

    def add_noise(self, x: Tensor, h: float) -> Tensor:
        """The tokens after the noise of a step of size h."""
        if self.noise is None:
            return x
        return self.geometry.retract(x + self.cloud.zero_padding(math.sqrt(h) * self.noise(x)))

    def should_stop(self, t: float, x: Tensor) -> bool:
        """Whether the stop condition holds for the tokens x (..., n, d)."""
        if self.stop is None:
            return False
        answer = self.stop(t, Cloud.unchecked(x, self.cloud.weights, self.cloud.mask))
        if bool(answer.all() if isinstance(answer, Tensor) else answer):
            self.stopped = f"stop condition at t = {t:.6g}"
        return self.stopped is not None


def fixed_steps(
    run: Run, x: Tensor, times: list[float], method: RungeKutta, h: float
) -> Iterator[tuple[float, Tensor]]:
    """Yield (t, x) at every time but the first, after equal steps of at most h in between."""
    monitor, previous, log_weights, has_warned = StepMonitor(method), None, run.cloud.log_weights, False
    log_weights = None if log_weights is None else log_weights.to(x.dtype)
    velocity: Velocity = run.velocity(run.field, log_weights)
    for start, end, field, is_saved in run.spans(times):
        if field is not previous:
            monitor.forget()
            velocity, previous = run.velocity(field, log_weights), field
        count = max(1, math.ceil((end - start) / h - 1e-4))  # float32 times may be off by a rounding error
        size = (end - start) / count
        for i in range(count):
            step = monitor.step if run.validate else method.step
            x = step(velocity, start + i * size, x, size, run.geometry)
            if run.noise is not None:
                x = run.add_noise(x, size)
                monitor.forget()
            now = start + (i + 1) * size if i + 1 < count else end
            if run.should_stop(now, x):
                yield now, x
                return
        if not is_saved:
            continue
        if run.validate and checks.can_read(x):
            total, displacement, error = _read(x.sum(), *monitor.numbers())
            _require_finite(total, x, end)
            message = monitor.warning(displacement, error, size, end)
            if message is not None and not has_warned:
                has_warned = True
                warnings.warn(message, StepWarning, stacklevel=3)
        yield end, x


def adaptive_steps(
    run: Run, x: Tensor, times: list[float], method: Adaptive, h: float
) -> Iterator[tuple[float, Tensor]]:
    """Yield (t, x) at every time but the first, after steps that meet the tolerance and end at that time.

    The device is read once a step: the numbers that decide whether a step is accepted and which tokens merge.
    """
    log_weights = run.cloud.log_weights
    log_weights = None if log_weights is None else log_weights.to(x.dtype)
    merged = MergedCloud.start(x, run.cloud.probabilities.to(x.dtype)) if _may_merge(run, method) else None
    now, size, attempts = times[0], h, 0
    first: Tensor | None = None  # the velocity at x, where it is known
    previous: tuple[float, float] | None = None  # size and error of the last accepted step
    piece: Field | None = None
    for _, end, field, is_saved in run.spans(times):
        if field is not piece:
            piece, first, previous = field, None, None
        velocity = run.velocity(field, log_weights)
        while now < end:
            attempts += 1
            is_last = now + size >= end
            used = end - now if is_last else size
            if attempts > method.max_steps or not now + used > now:
                raise FloatingPointError(
                    f"no progress at t = {now:.6g} of {times[-1]:.6g} after {attempts} steps; use a larger tol, or "
                    "more max_steps."
                )
            first = velocity(now, x) if first is None else first  # kept when the step is rejected
            trial, error, last = method.method.step_with_error(velocity, now, x, used, run.geometry, first)
            arrival = end if is_last else now + used
            next_first = last if method.method.reuses_last and run.noise is None else None
            group, count = None, x.new_zeros(())
            if merged is not None:
                next_first = velocity(arrival, trial) if next_first is None else next_first
                group, count = merged.groups(trial, next_first, 10 * method.tol, attempts)
            scaled, total, joint = _read(method.scaled_error(error, trial), x.sum(), count)
            _require_finite(total, x, now)
            if not scaled <= 1:  # or NaN: the trial left the range
                size = method.next_size(used, scaled if math.isfinite(scaled) else math.inf)
                continue
            now, first, x = arrival, next_first, run.add_noise(trial, used)
            grown = method.next_size(used, scaled, previous)
            size = max(size, grown) if is_last else grown  # a step cut short is no reason for shorter steps afterwards
            previous = (used, scaled)
            if merged is not None and group is not None and joint:
                merged = merged.join(x, group, int(joint), run.geometry)
                x, log_weights, first = merged.x, merged.log_weights, None
                velocity = run.velocity(field, log_weights)
            if run.stop is not None and run.should_stop(now, x if merged is None else merged.expand(x)):
                yield now, _expand(run, x, merged)
                return
        if is_saved:
            _require_finite(_read(x.sum())[0], x, now)
            yield now, _expand(run, x, merged)


def _expand(run: Run, x: Tensor, merged: MergedCloud | None) -> Tensor:
    """All tokens of the cloud, from those that are left after merging."""
    if merged is None:
        return x
    run.tokens_left = merged.x.shape[-2]
    return merged.expand(x)


def _may_merge(run: Run, method: Adaptive) -> bool:
    reasons = list(run.field.not_exchangeable_because)
    reasons += ["noise"] * (run.noise is not None) + ["padding"] * (run.cloud.mask is not None)
    if method.merge and reasons:
        raise ValueError(f"merge=True with {reasons[0]}: coincident tokens may separate; use merge=False.")
    return method.merge is not False and not reasons


def _read(*numbers: Tensor) -> list[float]:
    """Several numbers () in one read from the device."""
    values: list[float] = torch.stack([number.detach().double() for number in numbers]).tolist()
    return values


def _require_finite(total: float, x: Tensor, t: float) -> None:
    if math.isfinite(total) or bool(x.detach().isfinite().all()):
        return
    raise FloatingPointError(
        f"tokens left the range of {x.dtype} before t = {t:.6g}. Use a smaller h (unnormalised attention needs "
        "h <= 0.02 e^-beta), float64 or step='adaptive'; a Drift of your own may have returned NaN or infinity."
    )
