"""The flow at zero temperature, where tokens move independently of each other.

With full support and one head x' = P_x V G x / |G x|. A centred ellipsoid {y^T S^{-1} y <= rho^2} as support gives
x' = P_x rho V S G x / |S^{1/2} G x|. In both cases the drift is W N x / |N x|, which `linear_flow` solves exactly.
Several heads, biases and other supports are integrated.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from attn_flow.attention import Attention
from attn_flow.base import checks
from attn_flow.dynamics.flow import flow
from attn_flow.dynamics.steppers import Adaptive, RungeKutta, rk4
from attn_flow.dynamics.trajectory import Trajectory
from attn_flow.geometry import Sphere
from attn_flow.measures import Cloud, EllipsoidSupport, Gaussian, Measure, UniformSphere, as_cloud
from attn_flow.prediction.linear_flow import linear_flow

Support = Measure | str | None


def zero_temperature_flow(
    attention: Attention,
    x0: Tensor | Cloud,
    t: float | Sequence[float] | Tensor,
    support: Support = None,
) -> Trajectory:
    """The flow on the sphere at beta = infinity, where every token moves by itself.

    Args:
        attention: an `Attention`; its beta is not used.
        x0: tokens (..., n, d) or a `Cloud` at time t[0]; tokens keep their norms.
        t: increasing times, or a number T > 0 for 101 times from 0 to T.
        support: what tokens attend to. None: the full sphere; a measure with a tilted mean at beta = infinity (an
            ellipsoid, a mixture, a fixed `Cloud`); "tokens": the moving cloud itself (hardmax attention).

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
    check_support(attention, support)
    cloud, times = as_cloud(x0), checks.time_grid(t)
    checks.require_shape("x0", cloud.x, (attention.dim,))
    x = cloud.filled()
    checks.require(x.detach().norm(dim=-1) > 0, "a token is zero and has no direction; remove it or mask it.")
    linear = linear_part(attention, support)
    if linear is not None:
        if max(A.ndim for A in linear) > 2:
            raise ValueError(f"the weights are a batch {tuple(linear[0].shape[:-2])}; give one attention at a time.")
        field = attention.with_beta(math.inf).summary()
        about = {"field": field, "geometry": "Sphere", "step": "exact time change"}
        saved = torch.tensor(times, dtype=torch.float64)
        return Trajectory(saved, linear_flow(*linear, x, saved - saved[0]), cloud.weights, cloud.mask, about)
    if support == "tokens":
        return integrate(attention, cloud, times, support)
    path = integrate(attention, Cloud(x), times, support)  # tokens do not interact
    return replace(path, weights=cloud.weights, mask=cloud.mask)


def integrate(
    attention: Attention,
    cloud: Cloud,
    times: Sequence[float],
    support: Support,
    step: RungeKutta | Adaptive | None = None,
) -> Trajectory:
    """The zero-temperature flow by the integrator, on the sphere through the tokens."""
    norms = cloud.filled().detach().norm(dim=-1)
    least, most = float(norms.min()), float(norms.max())
    if most - least > 1e-4 * most:
        raise ValueError(f"tokens have norms from {least:.4g} to {most:.4g}, expected one sphere; normalise them.")
    # A hardmax over points jumps: error control would only shrink the steps at every jump.
    jumps = support == "tokens" or isinstance(support, Cloud)
    step = step or (rk4 if jumps else Adaptive(tol=1e-9))
    geometry, context = Sphere(float(norms.double().mean())), context_of(attention, support)
    cold = attention.with_beta(math.inf).with_context(context)
    return flow(cold, cloud, times, geometry=geometry, step=step, h=0.05)


def context_of(attention: Attention, support: Support) -> Measure | None:
    """The measure that tokens attend to; None for the moving cloud."""
    if isinstance(support, str):
        return None
    return UniformSphere(attention.dim) if support is None else support


def linear_part(attention: Attention, support: Support = None, tol: float = 1e-6) -> tuple[Tensor, Tensor] | None:
    """(W, N) in float64 with drift W N x / |N x| at beta = infinity; None where the drift is not of this form.

    That is the case for several heads, for biases, and for supports that are no centred ellipsoid.
    """
    has_bias = is_nonzero(attention.G_bias) or is_nonzero(attention.value_bias)
    if isinstance(support, str) or attention.heads > 1 or has_bias:
        return None
    exact = attention.to(torch.float64)
    V, G = exact.OV[..., 0, :, :], exact.G[..., 0, :, :]
    if support is None:
        return V, G
    if isinstance(support, UniformSphere):
        return support.radius * V, G
    if isinstance(support, (EllipsoidSupport, Gaussian)):
        rho = support.rho if isinstance(support, EllipsoidSupport) else support.cap
        if math.isinf(rho):
            raise ValueError("a Gaussian without cap has no support at beta = inf; use Gaussian.bulk(..., n) or a cap.")
        mean, S = support.mean.double(), support.cov.double()
        if mean.ndim > 1:
            raise ValueError(f"support has batched moments {tuple(mean.shape)}, expected (d,); predict one at a time.")
        variances, axes = torch.linalg.eigh(S)
        deviations = variances.clamp(min=0).sqrt()  # rounding may leave a negative variance
        if float(mean.norm()) <= tol * rho * float(deviations[-1]):
            root = axes * deviations @ axes.mT
            return rho * V @ root, root @ G
    return None


def elements(attention: Attention) -> tuple[torch.Size, list[Attention]]:
    """The batch shape of the weights, and the attention of every element; a batch of betas alone is none."""
    bias, shift = attention.G_bias, attention.value_bias
    weights = {"Q": (attention.G, 3), "V": (attention.OV, 3)}
    weights |= {} if bias is None else {"query_bias": (bias, 2)}
    weights |= {} if shift is None else {"value_bias": (shift, 1)}
    shape = torch.broadcast_shapes(*(z.shape[:-axes] for z, axes in weights.values()))
    if not shape:
        return shape, [attention]
    flat = {name: z.expand(*shape, *z.shape[-k:]).flatten(0, len(shape) - 1) for name, (z, k) in weights.items()}
    return shape, [Attention(**dict(zip(flat, each))) for each in zip(*flat.values())]


def is_nonzero(bias: Tensor | None) -> bool:
    """Whether a bias is there and not zero."""
    return bias is not None and bool((bias.detach() != 0).any())


def check_support(attention: Attention, support: Support) -> None:
    """Raise an error unless the attention and the support have a zero-temperature flow."""
    if not isinstance(attention, Attention):
        raise TypeError(f"attention is a {type(attention).__name__}, expected an Attention without other fields.")
    if isinstance(support, str):
        checks.require_choice("support", support, ["tokens"])
    dimension = attention.dim
    if isinstance(support, UniformSphere):
        dimension = support.d
    elif isinstance(support, (Cloud, Gaussian, EllipsoidSupport)):
        dimension = (support.x if isinstance(support, Cloud) else support.mean).shape[-1]
    if dimension != attention.dim:
        raise ValueError(f"support has dimension {dimension}, expected d = {attention.dim} of the attention.")
