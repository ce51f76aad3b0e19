"""The flow at zero temperature, where tokens move independently of each other.

With full support and one head x' = P_x V G x / |G x|. A centred ellipsoid {y^T S^{-1} y <= rho^2} as support gives
x' = P_x rho V S G x / |S^{1/2} G x|. In both cases the drift is W N x / |N x|, which `linear_flow` solves exactly.
Several heads, biases and other supports are integrated.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from attn_flow.attention import Attention
from attn_flow.base import checks
from attn_flow.dynamics.flow import flow
from attn_flow.dynamics.linearisation import linearise
from attn_flow.dynamics.steppers import Adaptive, rk4
from attn_flow.dynamics.trajectory import Trajectory
from attn_flow.geometry import Sphere
from attn_flow.measures import Cloud, EllipsoidSupport, Gaussian, Measure, UniformSphere, as_cloud
from attn_flow.prediction.linear_flow import linear_flow

HORIZON = 200.0  # in which the fastest token would move by this many radii
REMEDY = "Run flow(attention, x0, t) at a finite beta instead."


def zero_temperature_flow(
    attention: Attention,
    x0: Tensor | Cloud,
    t: float | Sequence[float] | Tensor,
    support: Measure | None = None,
) -> Trajectory:
    """The flow on the sphere at beta = infinity, where every token moves by itself.

    Args:
        attention: one `Attention`, without a batch; its beta is not used.
        x0: tokens (..., n, d) or a `Cloud` at time t[0]; tokens keep their norms.
        t: increasing times, or a number T > 0 for 101 times from 0 to T.
        support: what tokens attend to. None: the context of the attention, or else the whole sphere on which they lie;
            or a measure with a tilted mean at beta = infinity (an ellipsoid, a mixture, a fixed `Cloud`). For hardmax
            attention to the moving tokens use `flow`.

    Returns:
        A `Trajectory`. Where the flow is linear it is exact, and differentiable in x0 and the weights; otherwise it is
        integrated, as `flow` does at beta = infinity with the support as context.

    Example:
        >>> from attn_flow import Attention
        >>> attention = Attention.from_matrices(torch.eye(2), torch.diag(torch.tensor([2.0, 1.0])))
        >>> path = zero_temperature_flow(attention, torch.tensor([[0.6, 0.8]]), [0.0, 1.0])
        >>> path.x[1, 0, 1] / path.x[1, 0, 0]  # the tangent falls by e^{-t}: 4/3 e^{-1}
        tensor(0.4905)
    """
    support = attention.context if support is None else support
    check_support(attention, support)
    cloud, times = as_cloud(x0), checks.time_grid(t)
    checks.require_shape("x0", cloud.x, (attention.dim,))
    x = cloud.filled()
    checks.require(x.detach().norm(dim=-1) > 0, "a token is zero and has no direction; remove it or mask it.")
    if max(attention.G.ndim, attention.OV.ndim) > 3:
        raise ValueError("the weights of the attention are a batch; give one attention at a time.")
    linear = linear_part(attention, support)
    if linear is None:
        field, sphere = cold_field(attention, x, support)
        # A hardmax over points jumps: error control would only shrink the steps at every jump.
        method = rk4 if isinstance(support, Cloud) else Adaptive(tol=1e-9)
        path = flow(field, x, times, geometry=sphere, step=method, h=0.05)
        return Trajectory(path.t, path.x, cloud.weights, cloud.mask, path.about)
    about = {"field": attention.with_beta(math.inf).summary(), "geometry": "Sphere", "step": "exact time change"}
    grid = torch.tensor(times, dtype=torch.float64)
    # Directions on a sphere of any radius that sees itself move as on the unit sphere.
    radius = x.double().norm(dim=-1, keepdim=True) if support is None else 1.0
    points = (radius * linear_flow(*linear, x.double() / radius, grid - grid[0])).to(x.dtype)
    return Trajectory(grid, points, cloud.weights, cloud.mask, about)


def cold_field(attention: Attention, x: Tensor, support: Measure | None) -> tuple[Attention, Sphere]:
    """The field of the zero-temperature flow of tokens (..., n, d), and the sphere through them."""
    norms = x.detach().norm(dim=-1)
    least, most = float(norms.min()), float(norms.max())
    if most - least > 1e-4 * most:
        raise ValueError(f"tokens have norms from {least:.4g} to {most:.4g}, expected one sphere; normalise them.")
    radius = float(norms.double().mean())
    context = UniformSphere(attention.dim, radius) if support is None else support
    return attention.with_beta(math.inf).with_context(context), Sphere(radius)


def linear_part(
    attention: Attention, support: Measure | None = None, tol: float = 1e-6
) -> tuple[Tensor, Tensor] | None:
    """(W, N) in float64 with drift W N x / |N x| at beta = infinity; None where the drift is not of this form.

    That is the case for several heads, for biases, and for supports that are no centred ellipsoid.
    """
    if attention.heads > 1 or is_nonzero(attention.G_bias) or is_nonzero(attention.value_bias):
        return None
    exact = attention.to(torch.float64)
    V, G = exact.OV[..., 0, :, :], exact.G[..., 0, :, :]
    if support is None or isinstance(support, UniformSphere):
        return V if support is None else support.radius * V, G
    if not isinstance(support, (EllipsoidSupport, Gaussian)):
        return None
    rho = support.rho if isinstance(support, EllipsoidSupport) else support.cap
    if math.isinf(rho):
        raise ValueError("a Gaussian without cap has no support at beta = inf; use Gaussian.of_tokens or a cap.")
    variances, axes = torch.linalg.eigh(support.cov.double())
    deviations = variances.clamp(min=0).sqrt()  # rounding may leave a negative variance
    if float(support.mean.double().norm()) > tol * rho * float(deviations[-1]):
        return None
    root = axes * deviations @ axes.mT
    return rho * V @ root, root @ G


def is_nonzero(bias: Tensor | None) -> bool:
    """Whether a bias is there and not zero."""
    return bias is not None and bool((bias.detach() != 0).any())


def check_support(attention: Attention, support: Measure | None) -> None:
    """Raise an error unless the attention and the support have a zero-temperature flow."""
    if not isinstance(attention, Attention):
        raise TypeError(f"attention is a {type(attention).__name__}, expected an Attention without other fields.")
    if support is None:
        return
    if not hasattr(support, "log_partition"):
        raise TypeError(f"support is a {type(support).__name__}, expected a measure, or None for the full sphere.")
    dimension = attention.dim  # of a measure that does not tell its own, such as a mixture
    if isinstance(support, UniformSphere):
        dimension = support.d
    elif isinstance(mean := getattr(support, "mean", None), Tensor):
        dimension = mean.shape[-1]
    if dimension != attention.dim:
        raise ValueError(f"support has dimension {dimension}, expected d = {attention.dim} of the attention.")


@torch.no_grad()
def resting_points(attention: Attention, x: Tensor, support: Measure | None) -> Tensor:
    """Where the zero-temperature flow takes tokens (..., n, d) of one norm, found by running it for a long time.

    A token has arrived if its speed is tiny and the Jacobian of the velocity has only eigenvalues of negative real part
    there. A small speed alone proves nothing: tokens may rest on a plateau, at a saddle or on a line of equilibria.
    """
    if x.shape[-1] == 1:  # the two points of this sphere do not move
        return x
    start = x.detach().double().flatten(0, -2)
    field, sphere = cold_field(attention.to(torch.float64), start, support)
    speed = float(field.drift(start).norm(dim=-1).max()) / sphere.radius
    end_time = HORIZON / max(speed, 1e-300)
    method = rk4 if isinstance(support, Cloud) else Adaptive(tol=1e-7, merge=False, max_steps=3000)
    try:
        end = flow(field, start, [0.0, end_time], geometry=sphere, step=method, h=end_time / 1000).x[-1]
    except FloatingPointError as error:
        raise ValueError(f"no limit is established: tokens turn or jump too often at beta = inf. {REMEDY}") from error
    # Tokens do not interact: each is a cloud of its own.
    local = linearise(field, end[:, None], geometry=sphere)
    # Near a stable equilibrium the distance to it is at most speed / (-growth).
    has_arrived = (local.growth < -1e-6 * speed) & (local.speed <= 1e-6 * sphere.radius * -local.growth)
    if count := int((~has_arrived).sum()):
        raise ValueError(
            f"{count} of {len(end)} tokens have no established limit: they do not come to rest at a stable equilibrium "
            f"before t = {end_time:.3g}. {REMEDY}"
        )
    return end.reshape(x.shape).to(x.dtype)
