"""The steps of a flow: a velocity, fixed or adaptive steps, noise, merging and stopping."""

from __future__ import annotations

import itertools
import math
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from attn_flow.attention.fields import Field
from attn_flow.base import checks
from attn_flow.dynamics.merging import MergedCloud
from attn_flow.dynamics.noise import Noise
from attn_flow.dynamics.step_size import StepMonitor, StepWarning
from attn_flow.dynamics.steppers import Adaptive, RungeKutta, dopri5
from attn_flow.geometry import Geometry, Velocity, place
from attn_flow.measures.cloud import Cloud

Stop = Callable[[float, Cloud], bool | Tensor]


def prepare(field: Field, cloud: Cloud, geometry: Geometry, validate: bool = True) -> tuple[Field, Tensor]:
    """The field in its working precision, and the tokens (..., n, d) of a cloud at points of the geometry."""
    batch, x = field.check_cloud(cloud), cloud.filled()
    if not validate:
        x = geometry.retract(x)
    else:
        radius = cloud.max_norm if geometry.max_norm is None else geometry.max_norm
        dtype = checks.working_dtype(x.dtype, field.logit_bound(radius))
        field = field if dtype == x.dtype else field.in_float64()
        x = place("x0", x.to(dtype), geometry)
    return field, x.expand(*batch, *x.shape[-2:])


@dataclass(eq=False)
class Run:
    """One integration: its inputs, the number of evaluations of the field, and the reason it stopped.

    Args:
        field: the field, already in the dtype of the tokens.
        cloud: the initial cloud, whose weights and mask hold for the whole run.
        validate: whether values may be read from the device.
    """

    field: Field
    geometry: Geometry
    cloud: Cloud
    noise: Noise | None = None
    stop: Stop | None = None
    validate: bool = True
    evaluations: int = 0
    stopped: str | None = None
    tokens_left: int | None = None

    def velocity(self, field: Field, merged: MergedCloud | None = None) -> Velocity:
        """The velocity P_x F(t, x) of the tokens of the cloud, or of merged ones; padding does not move."""
        log_weights = self.cloud.log_weights if merged is None else merged.weights.log()

        def velocity(t: float, x: Tensor) -> Tensor:
            self.evaluations += 1
            log_w = None if log_weights is None else log_weights.to(x.dtype)
            return self.cloud.zero_padding(self.geometry.tangent(x, field(t, x, log_w)))

        return velocity

    def steps(
        self, x: Tensor, times: list[float], method: RungeKutta | Adaptive, h: float
    ) -> Iterator[tuple[float, Tensor]]:
        """Yield (t, x) at every time but the first, and where the run is stopped."""
        if isinstance(method, Adaptive):
            return adaptive_steps(self, x, times, method, h)
        return fixed_steps(self, x, times, method, h)

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
        cloud = Cloud.unchecked(x, self.cloud.weights, self.cloud.mask)
        if self.stop is not None and bool(torch.as_tensor(self.stop(t, cloud)).all()):
            self.stopped = f"stop condition at t = {t:.6g}"
        return self.stopped is not None


def fixed_steps(
    run: Run, x: Tensor, times: list[float], method: RungeKutta, h: float
) -> Iterator[tuple[float, Tensor]]:
    """Yield (t, x) at every time but the first, after equal steps of at most h in between."""
    monitor, piece, has_warned = StepMonitor(method), None, False
    step = monitor.step if run.validate else method.step
    for start, end, field, is_saved in run.spans(times):
        if field is not piece:
            monitor.forget()
            velocity, piece = run.velocity(field), field
        count = max(1, math.ceil((end - start) / h - 1e-4))  # float32 times may be off by a rounding error
        size = (end - start) / count
        for i in range(count):
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
    merged = MergedCloud.start(x, run.cloud.probabilities.to(x.dtype)) if _may_merge(run, method) else None
    now, size, attempts = times[0], h, 0
    first: Tensor | None = None  # the velocity at x, where it is known
    previous: tuple[float, float] | None = None  # size and error of the last accepted step
    piece: Field | None = None
    for _, end, field, is_saved in run.spans(times):
        if field is not piece:
            piece, first, previous = field, None, None
        velocity = run.velocity(field, merged)
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
            trial, error, last = dopri5.step_with_error(velocity, now, x, used, run.geometry, first)
            arrival = end if is_last else now + used
            next_first = last if run.noise is None else None  # dopri5's last stage is the velocity at the new point
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
                x, first, velocity = merged.x, None, run.velocity(field, merged)
            run.tokens_left = None if merged is None else x.shape[-2]
            if run.stop is not None and run.should_stop(now, x if merged is None else merged.expand(x)):
                is_saved = True
                break
        if is_saved:
            _require_finite(_read(x.sum())[0], x, now)
            yield now, x if merged is None else merged.expand(x)
        if run.stopped:
            return


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
