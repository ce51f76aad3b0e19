"""The flow at zero temperature, where tokens move independently of each other.

With full support and one head x' = P_x V G x / |G x|. A centred ellipsoid {y^T S^{-1} y <= rho^2} as support gives
x' = P_x rho V S G x / |S^{1/2} G x|. In both cases the drift is W N x / |N x|, which `linear_flow` solves exactly.
Several heads, biases and other supports are integrated, and `settle` certifies limits token by token.
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

NEWTON_STEPS = 5  # convergence is quadratic
REMEDY = "Run flow(attention, x0, t) at a finite beta instead, or give the support that tokens have."


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
        path = integrate(attention, x, times, support)
        return Trajectory(path.t, path.x, cloud.weights, cloud.mask, path.about)
    about = {"field": attention.with_beta(math.inf).summary(), "geometry": "Sphere", "step": "exact time change"}
    grid = torch.tensor(times, dtype=torch.float64)
    # Directions on a sphere of any radius that sees itself move as on the unit sphere.
    radius = x.double().norm(dim=-1, keepdim=True) if support is None else 1.0
    points = (radius * linear_flow(*linear, x.double() / radius, grid - grid[0])).to(x.dtype)
    return Trajectory(grid, points, cloud.weights, cloud.mask, about)


def integrate(
    attention: Attention, x: Tensor, times: Sequence[float], support: Measure | None, step: Adaptive | None = None
) -> Trajectory:
    """The zero-temperature flow of tokens (..., n, d) by the integrator, on the sphere through them."""
    norms = x.detach().norm(dim=-1)
    least, most = float(norms.min()), float(norms.max())
    if most - least > 1e-4 * most:
        raise ValueError(f"tokens have norms from {least:.4g} to {most:.4g}, expected one sphere; normalise them.")
    radius = float(norms.double().mean())
    context = UniformSphere(attention.dim, radius) if support is None else support
    # A hardmax over points jumps: error control would only shrink the steps at every jump.
    method = rk4 if isinstance(support, Cloud) else step or Adaptive(tol=1e-9)
    cold = attention.with_beta(math.inf).with_context(context)
    return flow(cold, x, times, geometry=Sphere(radius), step=method, h=0.05)


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
def settle(
    attention: Attention, x0: Tensor, support: Measure | None = None, *, horizon: float = 100.0
) -> tuple[Tensor, Tensor]:
    """Run the zero-temperature flow until every token is certified at a stable equilibrium, or up to the horizon.

    A token is certified if Newton's iteration stays near it and ends at a zero of the velocity where all eigenvalues of
    the Jacobian along the sphere have negative real part; a small speed proves nothing, since tokens may rest on a
    plateau. A continuum of equilibria, a cycle, and a token between two limits are not certified. Heads whose drift
    jumps, because G has rank one or tokens run into its kernel, raise ValueError.

    Args:
        attention: one `Attention`, without a batch.
        x0: tokens (..., n, d) of one norm.
        support: as in `limit`.
        horizon: the latest time.

    Returns:
        The tokens (..., n, d) at their limits, or at their last positions, and whether each is certified (..., n).

    Example:
        >>> from attn_flow import Attention
        >>> G, V = torch.diag(torch.tensor([3.0, 1.0])).double(), torch.diag(torch.tensor([2.0, 1.0])).double()
        >>> biased = Attention.from_matrices(G, V, query_bias=torch.tensor([0.1, 0.0]).double())
        >>> x, certified = settle(biased, torch.tensor([[0.6, 0.8], [-0.6, 0.8]]).double())
        >>> x[:, 0].round(decimals=6), certified
        (tensor([ 1., -1.], dtype=torch.float64), tensor([True, True]))
    """
    support = attention.context if support is None else support
    check_support(attention, support)
    checks.require_tokens("x0", x0)
    checks.require_positive(horizon=horizon)
    x = x0.detach().double().flatten(0, -2)
    geometry = Sphere(float(x.norm(dim=-1).mean()))
    context = UniformSphere(attention.dim, geometry.radius) if support is None else support
    cold = attention.with_beta(math.inf).with_context(context).to(torch.float64)
    # Of rank 1: the direction of G x + b has two values only.
    columns = [cold.G.detach()] + ([] if cold.G_bias is None else [cold.G_bias.detach()[..., None]])
    ranks = torch.linalg.matrix_rank(torch.cat(columns, dim=-1))
    if not isinstance(context, Cloud) and cold.dim > 1 and bool((ranks == 1).any()):
        raise ValueError(f"a head has G of rank 1: at beta = inf its drift jumps where G x = 0. {REMEDY}")
    size = float(torch.linalg.matrix_norm(cold.OV, 2).sum())
    now, span = 0.0, min(5.0, horizon)
    y, certified = x, torch.full((len(x),), cold.dim == 1)  # two points are a sphere on which nothing moves
    while span > 0 and not bool(certified.all()):
        # Newton's iteration decides the digits. A smooth drift turns by O(1) in times of 1/|V|: many more steps mean
        # that it jumps.
        step = Adaptive(tol=1e-6, max_steps=int(1000 + 200 * span * size))
        try:
            x = integrate(cold, x, [0.0, span], cold.context, step).x[-1]
        except (ValueError, FloatingPointError) as error:
            if bool((ranks == cold.dim).all()):
                raise
            reason = f"tokens run into the kernel of a head's G before t = {now + span:g}"
            raise ValueError(f"{reason}, where the drift at beta = inf is undefined. {REMEDY}") from error
        y, certified = _certify(cold, x, geometry, size)
        now, span = now + span, min(2 * span, horizon - now - span)
    end = torch.where(certified[:, None], y, x).reshape(x0.shape).to(x0.dtype)
    return end, certified.reshape(x0.shape[:-1])


def _certify(cold: Attention, x: Tensor, geometry: Sphere, size: float) -> tuple[Tensor, Tensor]:
    """The equilibria to which Newton's iteration takes tokens (n, d), and whether they are near and attracting."""
    y = x[:, None]  # tokens do not interact: each is a cloud of its own
    speed = linearise(cold, y, geometry=geometry).speed
    for _ in range(NEWTON_STEPS):
        near = linearise(cold, y, geometry=geometry)
        along = near.basis[:, 0].mT @ geometry.tangent(y, cold.drift(y)).mT
        # Least squares: the Jacobian is singular at a continuum of equilibria, which are refused by their rate.
        step = near.basis[:, 0] @ torch.linalg.lstsq(near.jacobian, along, driver="gelsd").solution
        y = geometry.retract(y - step.mT)
    end = linearise(cold, y, geometry=geometry)
    is_near = (y - x[:, None]).norm(dim=(-2, -1)) <= 10 * speed / -end.growth + 1e-12 * geometry.radius
    return y[:, 0], (end.growth < -1e-6 * size) & is_near & (end.speed <= 1e-10 * size)
