"""The flow of tokens x_i' = P_{x_i} F(t, x)_i, from an initial cloud to a list of times.

    path = flow(attention, x0, t=torch.linspace(0, 20, 101))

Leading axes of x0, and of the weights and betas of the field, are a batch of independent clouds: a sweep over seeds and
betas is one call.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from attn_flow.attention.fields import Field, require_field
from attn_flow.base import checks
from attn_flow.base.progress import progress_bar
from attn_flow.dynamics.integrator import Run, Stop, prepare
from attn_flow.dynamics.noise import Noise
from attn_flow.dynamics.steppers import Adaptive, RungeKutta, as_method, rk4
from attn_flow.dynamics.trajectory import Trajectory
from attn_flow.geometry import UNIT_SPHERE, Euclidean, Geometry
from attn_flow.measures.cloud import Cloud, as_cloud

MAX_STEPS = 10**9  # of fixed steps: more would take days even for one token


def consensus(tol: float = 1e-3) -> Stop:
    """A stop condition for `flow`: every cloud of the batch lies within the distance `tol` of its mean.

    Example:
        >>> from attn_flow import Attention
        >>> x0 = torch.tensor([[1.0, 0.1], [1.0, -0.1]])
        >>> path = flow(Attention.identity(2), x0, t=50.0, stop=consensus(1e-2))
        >>> bool(path.t[-1] < 50)
        True
    """
    checks.require_positive(tol=tol)

    def is_reached(t: float, cloud: Cloud) -> Tensor:
        distance = (cloud.x - cloud.mean[..., None, :]).norm(dim=-1)
        return ((distance < tol) | (cloud.probabilities == 0)).all()

    return is_reached


def flow(
    field: Field,
    x0: Tensor | Cloud,
    t: float | Sequence[float] | Tensor,
    *,
    geometry: Geometry = UNIT_SPHERE,
    step: str | RungeKutta | Adaptive = rk4,
    h: float = 0.05,
    noise: Noise | None = None,
    stop: Stop | None = None,
    validate: bool = True,
    progress: bool = False,
) -> Trajectory:
    """Integrate the flow of a field from the cloud x0 at time t[0] and save the clouds at the times t.

    Args:
        field: an `Attention`, or another field such as `attention + Drift(ffn)` or `Layers([A_1, A_2], times)`.
        x0: tokens (..., n, d), or a `Cloud` with weights and a mask. They are first moved to the geometry;
            padding rests on the first token of its cloud.
        t: increasing times, which are hit exactly; one number T stands for 101 times from 0 to T.

    Other arguments:
        geometry: the set that tokens live on.
        step: "euler", "rk4", "dopri5" or another `RungeKutta` method, in equal steps of at most h between two times; or
            "adaptive" = `Adaptive()`, for steps that meet a tolerance. A fixed step that is too long for the velocity
            gives a `StepWarning` with the h to use.
        h: the longest fixed step, or the first adaptive one, in units of t.
        noise: a random field that is added between steps (`attn_flow.dynamics.noise`).
        stop: a function (t, cloud) -> bool that is asked after every step, such as `consensus(tol)`.
        validate: False reads no value from the device: values are not checked, logits are computed in the dtype given,
            and no step is found too long. True reads at the start, at every saved time and at every adaptive step.
        progress: show a progress bar on standard error.

    Returns:
        A `Trajectory` in the dtype of x0: times t (T,), clouds x (T, ..., n, d), and in `about` what was run. Logits
        that float32 cannot resolve at the start are computed in float64.

    Example:
        >>> from attn_flow import Attention, Sphere
        >>> x0 = Sphere().uniform(100, 3, generator=torch.Generator().manual_seed(0))
        >>> path = flow(Attention.identity(3, beta=1.0), x0, t=[0.0, 1.0, 10.0])
        >>> path
        Trajectory(3 times from 0 to 10, x (3, 100, 3) float32)
        >>> bool(path.x[-1].std(-2).max() < path.x[0].std(-2).min() / 10)  # nearly one cluster
        True
    """
    times, method = checks.time_grid(t), as_method(step)
    require_field("field", field)
    checks.require_positive(h=h)
    if noise is not None and not callable(noise):
        raise TypeError(f"noise is {noise!r}, expected a function such as attn_flow.dynamics.noise.independent(0.1).")
    if not validate and (isinstance(method, Adaptive) or stop is not None):
        raise ValueError("validate=False reads no values, but adaptive steps and stop= need them; use validate=True.")
    if not isinstance(method, Adaptive) and (times[-1] - times[0]) / h > MAX_STEPS:
        raise ValueError(f"t = {times[-1]:g} takes over {MAX_STEPS:.0e} steps of h = {h:g}; use a larger h.")
    if field.needs_euclidean and not isinstance(geometry, Euclidean):
        raise ValueError("this field changes the length of tokens; use geometry=Euclidean().")
    cloud, summary = as_cloud(x0, "x0", validate), field.summary()
    field, x = prepare(field, cloud, geometry, validate)
    run = Run(field, geometry, cloud, noise, stop, validate)
    saved_times, clouds = [times[0]], [x]
    with progress_bar("flow", times[-1] - times[0] or 1.0, progress) as advance:
        for now, state in run.steps(x, times, method, h):
            advance(now - saved_times[-1], note=f"t = {now:.4g}")
            saved_times.append(now)
            clouds.append(state)
    about: dict[str, Any] = {
        "field": summary,
        "geometry": type(geometry).__name__,
        "step": method.name,
        "h": None if isinstance(method, Adaptive) else h,
        "evaluations": run.evaluations,
        "stopped": run.stopped,
    }
    if run.tokens_left is not None:
        about["tokens_left"] = run.tokens_left
    path = torch.stack(clouds).to(cloud.x.dtype)
    return Trajectory(torch.tensor(saved_times, dtype=torch.float64), path, cloud.weights, cloud.mask, about)
