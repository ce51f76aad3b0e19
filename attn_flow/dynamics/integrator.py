"""How a flow is stepped: fixed or adaptive steps of the velocity P_x F(x), with kicks, mergers, padding and shards."""

from __future__ import annotations

import itertools
import math
import warnings
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from attn_flow.attention import Field
from attn_flow.attention.fields import View
from attn_flow.averages.sinkhorn import NotBalanced
from attn_flow.base import checks
from attn_flow.dynamics.distributed import Shard
from attn_flow.dynamics.kicks import Kick
from attn_flow.dynamics.merging import Merged
from attn_flow.dynamics.pacing import Pace
from attn_flow.dynamics.placement import Placement
from attn_flow.dynamics.steppers import Adaptive, Step, Velocity
from attn_flow.geometry import Geometry
from attn_flow.measures import Cloud, Measure

Schedule = Callable[[float], Field]
Stop = Callable[[float, Cloud], bool | Tensor]


class StepWarning(UserWarning):
    """A fixed step is too long for the speed of the tokens."""


class PrecisionWarning(UserWarning):
    """Tokens on an accelerator grew, unseen, until float32 was too coarse for their logits."""


class Integrator:
    """One integration: the velocity, how often it was asked, and why it ended."""

    def __init__(
        self,
        field: Field,
        geometry: Geometry,
        weights: Tensor | None,
        mask: Tensor | None,
        context: Measure | None,
        placement: Placement,
        noise: Kick | None,
        generator: torch.Generator | None,
        stop: Stop | None,
        shard: Shard,
    ) -> None:
        self.field, self.geometry, self.context, self.placement = field, geometry, context, placement
        self.weights, self.mask, self.noise, self.generator, self.stop = weights, mask, noise, generator, stop
        self.shard = shard
        # The longest token that a field sees, where that is known; flat placements show it unit tokens.
        self.view = View(None, shard, context, 1.0 if placement.flat else geometry.longest)
        self._precise = False
        self._warned = False
        self.evaluations = 0
        self.stopped: str | None = None
        self.tokens_left: int | None = None

    def velocity(self, field: Field) -> Velocity:
        """P_x of the placed field, as it sees the tokens; padding does not move."""
        F = field.seen(self.view)

        def counted(t: float, x: Tensor) -> Tensor:
            self.evaluations += 1
            try:
                found = F(t, x)
            except NotBalanced:  # Sinkhorn says itself why its sweeps do not end
                raise
            except FloatingPointError as error:  # logits did
                raise left_range(x, t) from error
            if found.requires_grad and self.shard.world.count > 1:  # through what a Drift closes over
                raise ValueError("gradients do not pass between processes; use torch.no_grad(), or one process.")
            return found

        def velocity(t: float, x: Tensor) -> Tensor:
            return self.shown(self.geometry.tangent(x, self.placement.velocity(counted, t, x)))

        return velocity

    def velocities(self, times: list[float]) -> Iterator[tuple[float, float, Velocity, bool]]:
        """Spans without a jump inside, the velocity in them, and whether the end of each is one of the times."""
        kept = set(times)
        stops = sorted(kept | {t for t in self.field.jumps if times[0] < t < times[-1]})
        spans = list(itertools.pairwise(stops))
        pieces = [self.field.piece(*span) for span in spans]  # refused before the first step
        before, velocity = None, None
        for (start, end), piece in zip(spans, pieces):
            if velocity is None or piece is not before:
                before, velocity = piece, self.velocity(piece)
            yield start, end, velocity, end in kept

    def shown(self, v: Tensor) -> Tensor:
        """v, zero for padding."""
        return v if self.mask is None else torch.where(self.shard.own(self.mask, -1)[..., None], v, 0.0)

    def lengths_seen(self, x: Tensor) -> bool:
        """Whether every drift looks itself how long tokens are, or none is longer than they are told."""
        return x.device.type == "cpu" or self.placement.flat or self.geometry.longest is not None

    def choose_precision(self, longest: float, t: float) -> None:
        """For tokens on an accelerator that no geometry bounds: they may become twice as long until the next look."""
        room, self.view.longest = self.view.longest, 2 * longest
        precise = self.field.needs_float64(2 * longest)
        if room is not None and longest > room and precise and not self._precise:
            warnings.warn(
                f"tokens grew from {room / 2:.3g} to {longest:.3g} by t = {t:.4g}, unseen between two times: in "
                "float64 from here on; keep more times t, or use float64 throughout.",
                PrecisionWarning,
                stacklevel=5,
            )
        self._precise = precise

    def arrive(self, x: Tensor, pace: Pace, h: float, t: float) -> None:
        """At a kept time, in one read: raise if tokens are not finite, warn once of steps that they outran."""
        seen = pace.seen()
        if not checks.can_look(x) or not seen:
            return
        total, longest, *numbers = checks.read(x.sum(), _longest(x), *seen)
        if not self.lengths_seen(x):
            self.choose_precision(longest, t)
        if not math.isfinite(total) or self.shard.world.count > 1:
            self.check(x, t)
        farthest, error = (self.shard.world.largest(number) for number in numbers)
        message = pace.too_long(farthest, error, h, t)
        if message is not None and not self._warned:
            self._warned = True
            warnings.warn(message, StepWarning, stacklevel=4)

    def fixed(self, x: Tensor, times: list[float], step: Step, h: float) -> Iterator[tuple[float, Tensor]]:
        """Equal steps of at most h between consecutive times; yields (t, x) at each of them."""
        self.view.log_weights = self.begin(x, times[0]).log_weights
        x = self.shard.own(x)
        pace, before = Pace(step), None
        for start, end, velocity, kept in self.velocities(times):
            if velocity is not before:
                pace.forget()
            before = velocity
            steps = max(1, math.ceil((end - start) / h - 1e-9))
            size = (end - start) / steps
            for i in range(steps):
                x = pace.take(velocity, start + i * size, x, size, self.geometry)
                if self.noise is not None:
                    x = self.kicked(x, size)
                    pace.forget()
                now = start + (i + 1) * size if i + 1 < steps else end
                if x.device.type == "cpu":  # an accelerator would have to wait for every step
                    self.check(x, now)
                if self.ends(now, x):
                    yield now, self.everyone(x)
                    return
            if kept:
                self.arrive(x, pace, size, end)
                yield end, self.everyone(x)

    def begin(self, x: Tensor, t: float) -> Cloud:
        """The cloud at the first time, which was checked already, and the precision of its logits."""
        if not self.lengths_seen(x) and checks.can_look(x):
            self.choose_precision(checks.read(_longest(x))[0], t)
        with checks.unseen():
            return Cloud(x, self.weights, self.mask)

    def adaptive(self, x: Tensor, times: list[float], step: Adaptive, h: float) -> Iterator[tuple[float, Tensor]]:
        """Steps of the controlled size, clipped to hit every time; yields (t, x) at each of them.

        One read a step decides whether it is accepted and who merges.
        """
        cloud = self.begin(x, times[0])
        held = Merged.start(x, cloud.probabilities) if self.may_merge(step, times[0]) else None
        self.view.log_weights = cloud.log_weights
        x = self.shard.own(x)
        now, taken, size = times[0], 0, min(h, step.largest)
        first: Tensor | None = None  # the velocity at x, where it is known
        before: tuple[float, float] | None = None  # the last accepted step and its error
        smooth: Velocity | None = None  # what `first` and `before` are about
        for _, end, velocity, kept in self.velocities(times):
            if velocity is not smooth:
                smooth, first, before = velocity, None, None
            while now < end:
                taken += 1
                if taken > step.max_steps:
                    raise FloatingPointError(
                        f"{step.max_steps} steps were not enough: at t = {now:.6g} of {times[-1]:.6g}. "
                        "Try increasing max_steps or tol."
                    )
                last = now + size >= end
                used = end - now if last else size
                if not now + used > now:
                    raise FloatingPointError(f"the step shrank to {used:.3g} at t = {now:.6g}. Try a larger tol.")
                first = velocity(now, x) if first is None else first  # kept when the step is refused
                trial, error, after = step.pair.with_error(velocity, now, x, used, self.geometry, first)
                assert error is not None  # Adaptive takes pairs only
                arrival = end if last else now + used
                known = after if step.pair.reuses_last and self.noise is None else None  # the velocity at the trial
                group, left = None, torch.zeros_like(error[..., 0, 0]).amax()
                if held is not None:
                    known = velocity(arrival, trial) if known is None else known
                    everyone, velocities = self.shard.everyone(trial), self.shard.everyone(known)
                    group, left = held.groups(everyone, velocities, 10 * step.tol, taken)
                scaled, total, longest, joint = self.looked_at(
                    step.scaled_error(error, trial), x.sum().abs(), _longest(trial), left
                )
                if not math.isfinite(total):  # kicks did it: an accepted step without them is finite
                    self.check(x, now)
                if not scaled <= 1:  # or NaN: the trial left the range
                    size = step.next_step(used, scaled if math.isfinite(scaled) else math.inf)
                    continue
                now, first = arrival, known
                x = self.kicked(trial, used)
                grown = step.next_step(used, scaled, before)
                size = max(size, grown) if last else grown  # a step cut short to hit a time is no reason to slow down
                before = (used, scaled)
                if not self.lengths_seen(x):
                    self.choose_precision(longest, now)
                if self.noise is not None and (x.device.type == "cpu" or now == times[-1]):  # else with the next error
                    self.check(x, now)
                if held is not None and joint:
                    assert group is not None
                    held = held.joined(everyone, group, int(joint), self.geometry)
                    self.shard = Shard(self.shard.world, held.x.shape[-2])
                    x, first = self.shard.own(held.x), None
                    self.view.log_weights, self.view.part = held.log_weights, self.shard
                if self.ends(now, x, held):
                    yield now, self.everyone(x, held)
                    return
            if kept:
                yield now, self.everyone(x, held)

    def looked_at(self, *numbers: Tensor) -> list[float]:
        """Some numbers (), the largest of all processes: an accelerator is waited for once."""
        stacked = torch.stack([number.detach().double() for number in numbers])
        return self.shard.world.maxima(stacked).cpu().tolist()

    def everyone(self, x: Tensor, held: Merged | None = None) -> Tensor:
        """The whole cloud, of this process's tokens, merged or not."""
        x = self.shard.everyone(x)
        if held is None:
            return x
        self.tokens_left = held.x.shape[-2]  # of the cloud that has the most
        return held.everyone(x)

    def may_merge(self, step: Adaptive, t0: float) -> bool:
        reasons = {
            **dict.fromkeys(self.field.frozen(t0).tells_apart, True),
            "noise": self.noise is not None,
            "padding": self.mask is not None,
            "a context": self.context is not None,
            # Sums over groups depend there on the order in which threads add: processes could merge differently.
            "several CUDA processes": self.shard.world.count > 1 and self.shard.world.device.type == "cuda",
        }
        held = [why for why, here in reasons.items() if here]
        if step.merge and held:
            raise ValueError(f"merge=True with {held[0]}: merged tokens would not move alike; use merge=False.")
        return step.merge is not False and not held

    def kicked(self, x: Tensor, h: float) -> Tensor:
        if self.noise is None:
            return x
        kick = math.sqrt(h) * self.shard.own(self.noise(self.shard.everyone(x), self.generator))
        return self.geometry.retract(x + self.shown(kick))

    def check(self, x: Tensor, t: float) -> None:
        if checks.can_look(x) and self.shard.world.largest(not checks.all_finite(x)):
            raise left_range(x, t)

    def ends(self, t: float, x: Tensor, held: Merged | None = None) -> bool:
        if self.stop is None:
            return False
        answer = self.stop(t, Cloud(self.everyone(x, held), self.weights, self.mask))
        if self.shard.world.largest(bool(answer.all() if isinstance(answer, Tensor) else answer)):
            self.stopped = f"stop condition at t = {t:.6g}"
            return True
        return False


def _longest(x: Tensor) -> Tensor:
    """max_i |x_i|, ()."""
    return torch.linalg.vector_norm(x.detach(), dim=-1).amax()


def left_range(x: Tensor, t: float) -> FloatingPointError:
    """What is raised where tokens, or the logits of them, overflow."""
    return FloatingPointError(
        f"tokens left the range of {x.dtype} at t = {t:.6g}. Use a smaller h (unnormalised attention needs "
        "h <= .02 e^-beta), float64, or Adaptive(); a Drift of your own may have returned NaN or inf."
    )
