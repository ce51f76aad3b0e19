"""From mu_0 to mu_t: the residual self-attention ODE x_i' = P_{x_i} F_i(x), integrated.

    path = flow(attention, x0, t=torch.linspace(0, 20, 101), geometry=Sphere())

Leading axes of x0 (and of beta) are a batch of independent clouds: a sweep over seeds and betas is one call.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from attn_flow.attention import Field
from attn_flow.attention.fields import as_field
from attn_flow.base import checks, memory
from attn_flow.base.progress import progress_bar
from attn_flow.dynamics.distributed import ALONE, Processes, Shard, check_shared
from attn_flow.dynamics.integrator import Integrator, Schedule, Stop
from attn_flow.dynamics.kicks import Kick
from attn_flow.dynamics.placement import Placement, post
from attn_flow.dynamics.steppers import Adaptive, Step, named_step, rk4
from attn_flow.dynamics.trajectory import Trajectory
from attn_flow.geometry import Euclidean, Geometry, known_geometry, placed
from attn_flow.measures import Cloud, Measure

MOST_STEPS = 10**9  # days, even for one token: a slip of the pen


def consensus(tol: float = 1e-3) -> Stop:
    """A stop condition for `flow`: every cloud of the batch lies within `tol` of its mean.

    Args:
        tol: distance, in the units of the tokens.

    Returns:
        A function (t, cloud) -> bool.

    Example:
        >>> from attn_flow import Attention
        >>> x0 = torch.tensor([[1.0, 0.1], [1.0, -0.1]])
        >>> path = flow(Attention.identity(2), x0, t=50.0, stop=consensus(1e-2))
        >>> path.about["stopped"] is not None and bool(path.t[-1] < 50)
        True
    """
    checks.positive("tol", tol)

    def reached(t: float, cloud: Cloud) -> bool:
        spread = (cloud.x - cloud.mean[..., None, :]).norm(dim=-1)
        shown = cloud.probabilities > 0
        return bool((torch.where(shown, spread, 0.0) < tol).all())

    return reached


def flow(
    attention: Field | Schedule,
    x0: Tensor,
    t: float | Sequence[float] | Tensor,
    *,
    geometry: Geometry | None = None,
    step: str | Step | Adaptive = rk4,
    h: float = 0.05,
    weights: Tensor | None = None,
    mask: Tensor | None = None,
    context: Measure | None = None,
    placement: Placement = post,
    noise: Kick | None = None,
    generator: torch.Generator | None = None,
    stop: Stop | None = None,
    validate: bool = True,
    progress: bool = False,
    world: Processes = ALONE,
) -> Trajectory:
    """Integrate the flow from x0 at t[0] and keep the clouds at the times t, which are hit exactly.

    Args:
        attention: an `Attention`; any field, such as `attention + Drift(ffn)` or `Layers([A_1, A_2], times)`, at whose
            jumps steps end; or a function of time that returns one (a beta that changes smoothly along the path).
        x0: tokens (..., n, d); they are put on the geometry first.
        t: increasing times; a single number T stands for 101 times from 0 to T.
        geometry: `Sphere()` unless given (`Euclidean()` for the pre and peri placements, which move the radius).
        step: "euler", "rk4", "dopri5" or such a function (your own too), taken in equal steps of at most h between two
            times of t; or "adaptive" = `Adaptive()`, which chooses its own steps. A fixed step that tokens outrun warns
            by name (`StepWarning`) with the h to use.
        h: the largest fixed step, and the first adaptive one, in units of t.
        weights: (..., n), masses of the tokens: the cloud as a weighted measure.
        mask: (..., n), True for tokens. Padding is put on the first token of its cloud, unseen, and stays.
        context: a fixed measure to attend to instead of the moving cloud: tokens then do not interact by attention.
        placement: where the transformer normalises (`attn_flow.dynamics.placement`).
        noise: kicks between steps, x <- retract(x + sqrt(h) noise(x, generator)) (`attn_flow.dynamics.kicks`).
        generator: of the noise.
        stop: a function (t, cloud) -> bool asked after every step, such as `consensus(tol)`; the path then ends there.
        validate: False reads nothing from an accelerator, so that the host runs ahead of it and fixed steps can be
            captured as a graph: entries that are not finite, padding without tokens and steps that are too long then
            show in the result alone, and logits that need float64 are yours to know (float64 tokens; beta of about
            200 on the unit sphere). True reads once at the start, once at every kept time, and once a step of
            `Adaptive`. On a CPU, where a read costs nothing, everything is looked at either way.
        progress: show a bar on standard error.
        world: `processes()` under torchrun: each process is given the same arguments, moves its part of the tokens, and
            returns the whole path, the same bits in each. A step of your own then sees a part of the cloud, a stop
            condition and noise all of it.

    Returns:
        A `Trajectory`: times t (T,), clouds x (T, ..., n, d), and in `about` what was run and how many evaluations of
        the drift it took.

    Example:
        >>> from attn_flow import Attention, Sphere
        >>> x0 = Sphere().uniform(100, 3, generator=torch.Generator().manual_seed(0))
        >>> path = flow(Attention.identity(3, beta=1.0), x0, t=[0.0, 1.0, 10.0])
        >>> path.x.shape
        torch.Size([3, 100, 3])
        >>> bool(path.x[-1].std(-2).max() < path.x[0].std(-2).min() / 10)  # nearly one cluster
        True
    """
    times = _times(t)
    step = named_step(step)
    if not validate and (isinstance(step, Adaptive) or stop is not None):
        asks = "step='adaptive'" if isinstance(step, Adaptive) else "stop="
        raise ValueError(f"validate=False with {asks}, which reads values after every step; use validate=True.")
    checks.instance("placement", placement, Placement, "one of attn_flow.dynamics.placement")
    checks.instance("world", world, Processes, "processes()")
    if noise is not None:
        checks.function("noise", noise, "(x, generator) -> kicks, such as kicks.independent(sigma)")
    if stop is not None:
        checks.function("stop", stop, "(t, cloud) -> bool, such as consensus(tol)")
    checks.made_with(None, None, generator)
    geometry = known_geometry(geometry, placement.flat)
    field = as_field(attention)
    first = field.frozen(times[0])
    with checks.unseen(not validate):
        with checks.together():
            x = _start(first, x0, geometry, weights, mask, context, placement, h)
        if not isinstance(step, Adaptive) and (times[-1] - times[0]) / h > MOST_STEPS:
            span = f"t = {times[-1]:g} in steps of h = {h:g}"
            raise ValueError(f"{span} are more than {MOST_STEPS:.0e} steps; use a larger h.")
        _require_room(x, len(times), world)
        if world.count > 1:
            given = {"x0": x, "t": torch.tensor(times, dtype=torch.float64), "weights": weights, "mask": mask}
            check_shared(world, first.tensors, given, noise is not None, generator)
        shard = Shard(world, x.shape[-2])
        run = Integrator(field, geometry, weights, mask, context, placement, noise, generator, stop, shard)
        kept_t, kept_x = [times[0]], [x]
        total = times[-1] - times[0]
        if isinstance(step, Adaptive):
            clouds = run.adaptive(x, times, step, h)
        else:
            clouds = run.fixed(x, times, step, h)
        with progress_bar("flow", total or 1.0, progress and world.first) as advance:
            for now, cloud in clouds:
                advance(now - kept_t[-1], note=f"t = {now:.4g}")
                kept_t.append(now)
                kept_x.append(cloud)
        about = {
            "attention": field.summary(),
            "geometry": type(geometry).__name__,
            "step": getattr(step, "name", getattr(step, "__name__", repr(step))),
            "h": None if isinstance(step, Adaptive) else h,
            "placement": placement.name,
            "evaluations": run.evaluations,
            "processes": world.count,
            "stopped": run.stopped,
        }
    if run.tokens_left is not None:
        about["tokens_left"] = run.tokens_left
    with checks.unseen():  # weights and mask were checked at the start
        return Trajectory(torch.tensor(kept_t, dtype=torch.float64), torch.stack(kept_x), weights, mask, about)


def push_forward(
    attention: Field | Schedule,
    x0: Tensor,
    t: float,
    *,
    geometry: Geometry | None = None,
    step: str | Step | Adaptive = rk4,
    h: float = 0.05,
    weights: Tensor | None = None,
    mask: Tensor | None = None,
    context: Measure | None = None,
    placement: Placement = post,
    noise: Kick | None = None,
    generator: torch.Generator | None = None,
    stop: Stop | None = None,
    validate: bool = True,
    world: Processes = ALONE,
) -> Tensor:
    """The cloud at time t >= 0, (..., n, d): `flow` from time 0 without the path; arguments as there.

    Example:
        >>> from attn_flow import Attention
        >>> push_forward(Attention.identity(2), torch.tensor([[3.0, 4.0]]), 1.0)  # one token rests, on the sphere
        tensor([[0.6000, 0.8000]])
    """
    checks.nonnegative("t", t, "time")
    return flow(
        attention,
        x0,
        [0.0] if t == 0 else [0.0, t],
        geometry=geometry,
        step=step,
        h=h,
        weights=weights,
        mask=mask,
        context=context,
        placement=placement,
        noise=noise,
        generator=generator,
        stop=stop,
        validate=validate,
        world=world,
    ).x[-1]


def _times(t: float | Sequence[float] | Tensor) -> list[float]:
    """The clock of the host, whatever the device of the tokens."""
    if isinstance(t, Tensor):
        checks.real_times(t)
        t = t.detach().double().cpu().tolist()
    if isinstance(t, str | complex) or not (hasattr(t, "__float__") or hasattr(t, "__len__")):
        raise ValueError(f"t is a {type(t).__name__}, expected a time or times.")
    if isinstance(t, float | int) or not hasattr(t, "__len__"):
        end = float(t)  # type: ignore[arg-type]
        if not 0 < end < math.inf:
            raise ValueError(f"t = {end}, expected a positive, finite time.")
        return torch.linspace(0, end, 101, dtype=torch.float64).tolist()
    if torch.compiler.is_compiling():
        return list(t)
    if isinstance(t, dict | set | bytes):
        raise ValueError(f"t is a {type(t).__name__}, expected a time or times.")
    try:
        times = torch.as_tensor(t, dtype=torch.float64)
    except (TypeError, ValueError):
        raise ValueError("t holds what are no times, expected a time or times.") from None
    checks.times(times)
    return times.tolist()


def _start(
    field: Field,
    x0: Tensor,
    geometry: Geometry,
    weights: Tensor | None,
    mask: Tensor | None,
    context: Measure | None,
    placement: Placement,
    h: float,
) -> Tensor:
    """x0 checked and put on the geometry, padding on some point of it, with room for the field's batch."""
    checks.tokens("x0", x0)
    checks.positive("h", h)
    if context is not None and not field.attends:
        raise ValueError(f"{field!r} attends to nobody; expected an Attention in it, or context=None.")
    batch = field.admit(Cloud(x0, weights, mask), context)
    if placement.flat and not isinstance(geometry, Euclidean):
        raise ValueError(f"placement {placement.name!r} moves the radius of tokens; expected geometry=Euclidean().")
    x = placed("x0", x0, mask, geometry)
    return x.expand(*batch, *x.shape[-2:])


def _require_room(x: Tensor, times: int, world: Processes) -> None:
    """Either the path, twice while its clouds are stacked, or it once, everyone, and the stages of the own tokens."""
    memory.require(
        max(2 * times, times + 1 + 10 / world.count) * x.numel() * x.element_size(),
        f"a path of {times} times of {' x '.join(map(str, x.shape))} numbers",
        "ask for fewer times t (push_forward keeps the last only) or use float32",
        x.device,
    )
