"""From mu_0 to mu_t: the residual self-attention ODE x_i' = P_{x_i} F_i(x), integrated.

    path = flow(attention, x0, t=torch.linspace(0, 20, 101), geometry=Sphere())

Leading axes of x0 (and of beta) are a batch of independent clouds: a sweep over seeds and betas is one call.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from attn_flow.attention import drifts
from attn_flow.attention.multihead import Attention
from attn_flow.base import checks, memory
from attn_flow.base.progress import progress_bar
from attn_flow.dynamics import sharded
from attn_flow.dynamics.distributed import ALONE, Processes
from attn_flow.dynamics.kicks import Noise
from attn_flow.dynamics.merging import Merged
from attn_flow.dynamics.placement import Placement, post
from attn_flow.dynamics.sharded import Shard
from attn_flow.dynamics.steppers import Adaptive, Step, Velocity, rk4
from attn_flow.dynamics.trajectory import Trajectory
from attn_flow.geometry import Euclidean, Geometry, Sphere
from attn_flow.measures import Cloud, Measure

Stop = Callable[[float, Cloud], bool | Tensor]


def consensus(tol: float = 1e-3) -> Stop:
    """Stop once every cloud of the batch lies within `tol` of its mean."""
    checks.positive("tol", tol)

    def reached(t: float, cloud: Cloud) -> bool:
        spread = (cloud.x - cloud.mean[..., None, :]).norm(dim=-1)
        shown = cloud.probabilities > 0
        return bool((torch.where(shown, spread, 0.0) < tol).all())

    return reached


def flow(
    attention: Attention | Callable[[float], Attention],
    x0: Tensor,
    t: float | Sequence[float] | Tensor,
    *,
    geometry: Geometry | None = None,
    step: Step | Adaptive = rk4,
    h: float = 0.05,
    weights: Tensor | None = None,
    mask: Tensor | None = None,
    context: Measure | None = None,
    placement: Placement = post,
    noise: Noise | None = None,
    generator: torch.Generator | None = None,
    stop: Stop | None = None,
    progress: bool = False,
    world: Processes = ALONE,
) -> Trajectory:
    """Integrate the flow from x0 (..., n, d) at t[0] and keep the clouds at the times t, which are hit exactly.

    attention: an `Attention`, or a function of time that returns one (a beta that changes along the path).
    t: increasing times; a single number T stands for 101 times from 0 to T.
    geometry: `Sphere()` unless given (`Euclidean()` for the pre and peri placements, which move the radius).
    step, h: a step function (euler, rk4, dopri5, your own) taken in equal steps of at most h between two times of
        t, or `Adaptive(tol=...)`, which chooses its own steps and ignores h.
    weights, mask: (..., n), the cloud as a weighted measure; tokens with mask False are padding: they are put on the
        first token of their cloud, where nobody sees them, and stay there.
    context: a fixed measure to attend to instead of the moving cloud: tokens then do not interact.
    noise: kicks between steps, x <- retract(x + sqrt(h) noise(x, generator)).
    stop: a function (t, cloud) -> bool asked after every step, such as `consensus(tol)`; the path then ends there.
    world: `processes()` under torchrun: each process is given the same arguments, moves its part of the tokens, and
        returns the whole path. A step of your own then sees a part of the cloud, a stop condition and noise all of it.
    """
    times = _times(t, x0)
    geometry = (Euclidean() if placement.flat else Sphere()) if geometry is None else geometry
    x = _start(attention, x0, geometry, weights, mask, placement, h, float(times[0]))
    _require_room(x, len(times), world)
    if world.count > 1:
        given = {"x0": x, "t": times, "weights": weights, "mask": mask}
        sharded.check(world, _at(attention, float(times[0])), given, noise is not None, generator)
    shard = Shard(world, x.shape[-2])
    path = _Path(attention, geometry, weights, mask, context, placement, noise, generator, stop, shard)
    kept_t, kept_x = [float(times[0])], [x]
    total = float(times[-1] - times[0])
    if not (callable(step) or isinstance(step, Adaptive)):
        raise ValueError(f"step = {step!r}, expected a step function (euler, rk4, dopri5, your own) or Adaptive().")
    if isinstance(step, Adaptive):
        clouds = path.adaptive(x, times.tolist(), step, h)
    else:
        clouds = path.fixed(x, times.tolist(), step, h)
    with progress_bar("flow", total or 1.0, progress and world.first) as advance:
        for now, cloud in clouds:
            advance(now - kept_t[-1], note=f"t = {now:.4g}")
            kept_t.append(now)
            kept_x.append(cloud)
    about = {
        "attention": describe(attention),
        "geometry": type(geometry).__name__,
        "step": getattr(step, "name", getattr(step, "__name__", repr(step))),
        "h": None if isinstance(step, Adaptive) else h,
        "placement": placement.name,
        "evaluations": path.evaluations,
        "processes": world.count,
        "stopped": path.stopped,
    }
    if path.tokens_left is not None:
        about["tokens_left"] = path.tokens_left
    return Trajectory(times.new_tensor(kept_t), torch.stack(kept_x), weights, mask, about)


def push_forward(attention: Attention | Callable[[float], Attention], x0: Tensor, t: float, **options: Any) -> Tensor:
    """The cloud at time t, (..., n, d): `flow` without the path; options as there."""
    return flow(attention, x0, [0.0] if t == 0 else [0.0, t], **options).x[-1]


def describe(attention: Attention | Callable[[float], Attention]) -> dict[str, Any]:
    """What a path remembers of the attention that made it, as plain JSON."""
    if not isinstance(attention, Attention):
        return {"scheduled": getattr(attention, "__name__", repr(attention))}
    beta = attention.beta
    return {
        "kind": attention.kind,
        "heads": attention.heads,
        "dim": attention.dim,
        "beta": beta.tolist() if isinstance(beta, Tensor) else beta if math.isfinite(beta) else "inf",
        "causal": attention.causal,
        "self_attention": attention.self_attention,
    }


def _times(t: float | Sequence[float] | Tensor, x0: Tensor) -> Tensor:
    times = torch.as_tensor(t, dtype=torch.float64).detach().cpu()  # the clock, not the tokens
    if times.ndim == 0:
        if not 0 < float(times) < math.inf:
            raise ValueError(f"t = {float(times)}, expected a positive, finite time.")
        times = torch.linspace(0, float(times), 101, dtype=torch.float64)
    if times.ndim != 1 or times.numel() == 0:
        raise ValueError(f"t has shape {tuple(times.shape)}, expected (T,) with at least one time.")
    if not bool(torch.isfinite(times).all()):
        raise ValueError("t has NaN or infinite times, expected finite ones.")
    if bool((times.diff() <= 0).any()):
        raise ValueError(f"t must increase strictly, got {[round(v, 6) for v in times.tolist()[:6]]}...; sort it.")
    return times


def _at(attention: Attention | Callable[[float], Attention], t: float) -> Attention:
    return attention if isinstance(attention, Attention) else attention(t)


def _start(
    attention: Attention | Callable[[float], Attention],
    x0: Tensor,
    geometry: Geometry,
    weights: Tensor | None,
    mask: Tensor | None,
    placement: Placement,
    h: float,
    t0: float,
) -> Tensor:
    """x0 checked and put on the geometry, padding on some point of it, with room for the attention's batch."""
    checks.tokens("x0", x0)
    checks.positive("h", h)
    first = _at(attention, t0)
    cloud = first._cloud(x0, weights, mask)
    if placement.flat and not isinstance(geometry, Euclidean):
        raise ValueError(f"placement {placement.name!r} moves the radius of tokens; expected geometry=Euclidean().")
    x = on_geometry("x0", x0, mask, geometry)
    return x.expand(*first._batch(x.shape[:-2], cloud.probabilities.shape[:-1]), *x.shape[-2:])


def _require_room(x: Tensor, times: int, world: Processes) -> None:
    """Either the path, twice while its clouds are stacked, or it once, everyone, and the stages of the own tokens."""
    memory.require(
        max(2 * times, times + 1 + 10 / world.count) * x.numel() * x.element_size(),
        f"a path of {times} times of {' x '.join(map(str, x.shape))} numbers",
        "ask for fewer times t (push_forward keeps the last only) or use float32",
        x.device,
    )


def on_geometry(name: str, x: Tensor, mask: Tensor | None, geometry: Geometry) -> Tensor:
    """x retracted. Padding goes to the first token of its cloud: a point of the geometry, and nobody sees it there."""
    if mask is not None:
        shape = torch.broadcast_shapes(mask.shape, x.shape[:-1])
        first = mask.expand(shape).to(torch.uint8).argmax(-1)[..., None, None].expand(*shape[:-1], 1, x.shape[-1])
        x = torch.where(mask[..., None], x, torch.gather(x.expand(*shape, x.shape[-1]), -2, first))
    x = geometry.retract(x)
    if checks.can_look(x) and not checks.all_finite(x):
        raise ValueError(
            f"{name} has a row that {type(geometry).__name__} cannot place (a zero row has no direction); remove it, "
            "hide it with mask, or use geometry=Euclidean()."
        )
    return x


class _Path:
    """One integration: the velocity, how often it was asked, and why it ended."""

    def __init__(
        self,
        attention: Attention | Callable[[float], Attention],
        geometry: Geometry,
        weights: Tensor | None,
        mask: Tensor | None,
        context: Measure | None,
        placement: Placement,
        noise: Noise | None,
        generator: torch.Generator | None,
        stop: Stop | None,
        shard: Shard,
    ) -> None:
        self.attention, self.geometry, self.context, self.placement = attention, geometry, context, placement
        self.weights, self.mask, self.noise, self.generator, self.stop = weights, mask, noise, generator, stop
        self.shard = shard
        self.evaluations = 0
        self.stopped: str | None = None
        self.tokens_left: int | None = None

    def velocity(self, log_weights: Tensor | None) -> Velocity:
        """P_x of the placed drift, for tokens with these log weights; padding does not move."""

        def drift_of(t: float, x: Tensor) -> Tensor:
            self.evaluations += 1
            attention = _at(self.attention, t)
            if self.context is not None:
                return attention.drift(x, self.context)
            return drifts.against_cloud(attention, x, self.shard.everyone(x), log_weights, self.shard.first)

        def velocity(t: float, x: Tensor) -> Tensor:
            return self.shown(self.geometry.tangent(x, self.placement.velocity(drift_of, t, x)))

        return velocity

    def shown(self, v: Tensor) -> Tensor:
        """v, zero for padding."""
        return v if self.mask is None else torch.where(self.shard.own(self.mask, -1)[..., None], v, 0.0)

    def fixed(self, x: Tensor, times: list[float], step: Step, h: float) -> Iterator[tuple[float, Tensor]]:
        """Equal steps of at most h between consecutive times; yields (t, x) at each of them."""
        velocity = self.velocity(Cloud(x, self.weights, self.mask).log_weights)
        x = self.shard.own(x)
        for start, end in itertools.pairwise(times):
            steps = max(1, math.ceil((end - start) / h - 1e-9))
            size = (end - start) / steps
            for i in range(steps):
                x = self.kicked(step(velocity, start + i * size, x, size, self.geometry), size)
                now = start + (i + 1) * size if i + 1 < steps else end
                self.check(x, now)
                if self.ends(now, x):
                    yield now, self.everyone(x)
                    return
            yield end, self.everyone(x)

    def adaptive(self, x: Tensor, times: list[float], step: Adaptive, h: float) -> Iterator[tuple[float, Tensor]]:
        """Steps of the controlled size, clipped to hit every time; yields (t, x) at each of them."""
        cloud = Cloud(x, self.weights, self.mask)
        held = Merged.start(x, cloud.probabilities) if self.may_merge(step, times[0]) else None
        velocity = self.velocity(cloud.log_weights)
        x = self.shard.own(x)
        now, taken, size = times[0], 0, min(h, step.largest)
        first: Tensor | None = None  # the velocity at x, where it is known
        before: tuple[float, float] | None = None  # the last accepted step and its error
        for end in times[1:]:
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
                trial, error, at_trial = step.pair.with_error(velocity, now, x, used, self.geometry, first)
                assert error is not None  # Adaptive takes pairs only
                scaled = self.shard.world.largest(step.scaled_error(error, trial))
                if not scaled <= 1:  # or NaN: the trial left the range
                    size = step.next_step(used, scaled if math.isfinite(scaled) else math.inf)
                    continue
                now = end if last else now + used
                x = self.kicked(trial, used)
                first = at_trial if step.pair.reuses_last and self.noise is None else None
                grown = step.next_step(used, scaled, before)
                size = max(size, grown) if last else grown  # a step cut short to hit a time is no reason to slow down
                before = (used, scaled)
                self.check(x, now)
                if held is not None:
                    first = velocity(now, x) if first is None else first
                    everyone, velocities = self.shard.everyone(x), self.shard.everyone(first)
                    merged = held.merge(everyone, velocities, 10 * step.tol, self.geometry, taken)
                    if merged is not held:
                        held, self.shard = merged, Shard(self.shard.world, merged.x.shape[-2])
                        x, first = self.shard.own(merged.x), None
                        velocity = self.velocity(held.log_weights)
                    self.tokens_left = int(held.alive.sum(-1).max())
                if self.ends(now, x, held):
                    yield now, self.everyone(x, held)
                    return
            yield now, self.everyone(x, held)

    def everyone(self, x: Tensor, held: Merged | None = None) -> Tensor:
        """The whole cloud, of this process's tokens, merged or not."""
        x = self.shard.everyone(x)
        return x if held is None else held.everyone(x)

    def may_merge(self, step: Adaptive, t0: float) -> bool:
        first = _at(self.attention, t0)
        reasons = {
            "a causal mask": first.causal,
            "self_attention=False": not first.self_attention,
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
            raise FloatingPointError(
                f"tokens left the range of {x.dtype} at t = {t:.6g}. Use a smaller h (unnormalised attention needs "
                "h <= .02 e^-beta), float64, or Adaptive()."
            )

    def ends(self, t: float, x: Tensor, held: Merged | None = None) -> bool:
        if self.stop is None:
            return False
        answer = self.stop(t, Cloud(self.everyone(x, held), self.weights, self.mask))
        if self.shard.world.largest(bool(answer.all() if isinstance(answer, Tensor) else answer)):
            self.stopped = f"stop condition at t = {t:.6g}"
            return True
        return False
