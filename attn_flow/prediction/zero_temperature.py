"""The flow at zero temperature, where tokens move independently of each other.

With full support and one head x' = P_x V G x / |G x|. A centred ellipsoid {y^T S^{-1} y <= rho^2} as context gives
x' = P_x rho V S G x / |S^{1/2} G x|. In both cases the drift is W N x / |N x|, whose flow is exact up to a clock:
x(t) = y/|y| with y = e^{tau W N} x_0 and t(tau) = int |N x| d tau. Several heads, biases and other contexts are
integrated.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from numpy.polynomial import legendre
from scipy.linalg import expm
from torch import Tensor

from attn_flow.attention.attention import Attention
from attn_flow.base import checks
from attn_flow.dynamics.flow import flow
from attn_flow.dynamics.linearisation import linearise
from attn_flow.dynamics.steppers import Adaptive, rk4
from attn_flow.dynamics.trajectory import Trajectory
from attn_flow.geometry import Sphere
from attn_flow.measures.cloud import Cloud, as_cloud
from attn_flow.measures.gaussian import EllipsoidSupport, Gaussian
from attn_flow.measures.sphere import UniformSphere
from attn_flow.prediction.spectrum import Array, spectrum

HORIZON = 200.0  # in which the fastest token would move by this many radii
NODES = 24  # Gauss-Legendre nodes of a panel of the exact flow, and terms of its series
MAX_LEVEL = 40  # a panel of h_0 2^40 multiplies rounding errors of the eigenvalues of M by 10^12
MAX_PANELS = 20_000  # of one token
RESOLVED = 1e-12  # relative size of the last Legendre coefficients of a panel that is short enough
EPS = float(np.finfo(np.float64).eps)


def zero_temperature_flow(attention: Attention, x0: Tensor | Cloud, t: float | Sequence[float] | Tensor) -> Trajectory:
    """The flow on the sphere at beta = infinity, where every token moves by itself.

    Where the flow is linear it is exact, without derivatives; otherwise it is integrated, as `flow` does.

    Args:
        attention: one `Attention`, without a batch; its beta is not used. Without a context, tokens attend to the
            whole sphere on which they lie. For hardmax attention to the moving tokens use `flow`.
        x0: tokens (..., n, d) or a `Cloud` at time t[0]; tokens keep their norms.
        t: increasing times, or a number T > 0 for 101 times from 0 to T.

    Example:
        >>> from attn_flow import Attention
        >>> attention = Attention.from_matrices(torch.eye(2), torch.diag(torch.tensor([2.0, 1.0])))
        >>> path = zero_temperature_flow(attention, torch.tensor([[0.6, 0.8]]), [0.0, 1.0])
        >>> path.x[1, 0, 1] / path.x[1, 0, 0]  # the tangent falls by e^{-t}: 4/3 e^{-1}
        tensor(0.4905)
    """
    cloud, times = as_cloud(x0), checks.time_grid(t)
    checks.require_shape("x0", cloud.x, (attention.dim,))
    x = cloud.filled()
    norms = x.detach().double().norm(dim=-1, keepdim=True)
    checks.require(norms > 0, "a token is zero and has no direction; remove it or mask it.")
    if attention.with_beta(1.0).batch_shape:
        raise ValueError("the weights of the attention are a batch; give one attention at a time.")
    linear = linear_part(attention)
    if linear is None:
        field, sphere = cold_field(attention, x)
        # A hardmax over points jumps: error control would only shrink the steps at every jump.
        method = rk4 if isinstance(attention.context, Cloud) else Adaptive(tol=1e-9)
        return flow(field, cloud, times, geometry=sphere, step=method, h=0.05)
    about = {"field": attention.with_beta(math.inf).summary(), "geometry": "Sphere", "step": "exact time change"}
    grid = torch.tensor(times, dtype=torch.float64)
    # Directions on a sphere of any radius that sees itself move as on the unit sphere.
    clock = 1.0 if attention.context is None else cold_field(attention, x)[1].radius
    inputs = (*linear, (x / norms).flatten(0, -2), (grid - grid[0]) / clock)
    points = torch.from_numpy(_linear_flow(*(z.detach().cpu().numpy() for z in inputs)))
    points = norms * points.to(x.device).unflatten(1, x.shape[:-1])
    return Trajectory(grid, points.to(x.dtype), cloud.weights, cloud.mask, about)


def cold_field(attention: Attention, x: Tensor) -> tuple[Attention, Sphere]:
    """The field of the zero-temperature flow of tokens (..., n, d), and the sphere through them."""
    norms, context = x.detach().double().norm(dim=-1), attention.context
    least, most = float(norms.min()), float(norms.max())
    if most - least > 1e-4 * most:
        raise ValueError(f"tokens have norms from {least:.4g} to {most:.4g}, expected one sphere; normalise them.")
    sphere = Sphere(float(norms.mean()))
    context = UniformSphere(attention.dim, sphere.radius) if context is None else context
    return attention.with_beta(math.inf).with_context(context), sphere


def linear_part(attention: Attention, tol: float = 1e-6) -> tuple[Tensor, Tensor] | None:
    """(W, N) in float64 with drift W N x / |N x| at beta = infinity; None if heads, biases or the context forbid it."""
    if attention.kind != "softmax" or attention.causal:
        words = f"attention of kind {attention.kind!r}, causal={attention.causal}"
        raise ValueError(f"{words}: the limit is known for softmax attention without a causal mask.")
    biases = [bias for bias in (attention.G_bias, attention.value_bias) if bias is not None]
    if attention.heads > 1 or any(bool((bias.detach() != 0).any()) for bias in biases):
        return None
    exact, support = attention.to(torch.float64), attention.context
    V, G = exact.OV[..., 0, :, :].double(), exact.G[..., 0, :, :].double()  # those of an identity have no dtype
    if support is None or isinstance(support, UniformSphere):
        return V if support is None else support.radius * V, G
    if not isinstance(support, (EllipsoidSupport, Gaussian)):
        return None
    checks.require_shape("the covariance of the context", support.cov, (attention.dim, attention.dim))
    rho = support.rho if isinstance(support, EllipsoidSupport) else support.cap
    if math.isinf(rho):
        raise ValueError("a Gaussian without cap has no support at beta = inf; use Gaussian.of_tokens or a cap.")
    variances, axes = torch.linalg.eigh(support.cov.double())
    deviations = variances.clamp(min=0).sqrt()  # rounding may leave a negative variance
    if float(support.mean.double().norm()) > tol * rho * float(deviations[-1]):
        return None
    root = axes * deviations @ axes.mT
    return rho * V @ root, root @ G


@torch.no_grad()
def resting_points(attention: Attention, x: Tensor) -> Tensor:
    """Where the zero-temperature flow takes tokens (..., n, d) of one norm, found by running it for a long time.

    A token has arrived if its speed is tiny and the Jacobian of the velocity has only eigenvalues of negative real part
    there. A small speed alone proves nothing: tokens may rest on a plateau, at a saddle or on a line of equilibria.
    """
    start = x.detach().double().flatten(0, -2)
    field, sphere = cold_field(attention.to(torch.float64), start)
    speed = float(field.drift(start).norm(dim=-1).max()) / sphere.radius
    end_time = HORIZON / max(speed, 1e-300)
    method = rk4 if isinstance(attention.context, Cloud) else Adaptive(tol=1e-7, merge=False, max_steps=3000)
    try:
        end = flow(field, start, [0.0, end_time], geometry=sphere, step=method, h=end_time / 1000).x[-1]
        local = linearise(field, end[:, None], geometry=sphere)  # tokens do not interact: each is a cloud of its own
    except FloatingPointError as error:
        raise ValueError("no limit is established: tokens turn or jump too often at beta = inf.") from error
    # Near a stable equilibrium the distance to it is at most speed / (-growth).
    has_arrived = (local.growth < -1e-6 * speed) & (local.speed <= 1e-6 * sphere.radius * -local.growth)
    if not bool(has_arrived.all()):
        raise ValueError(
            f"{int((~has_arrived).sum())} of {len(end)} tokens have no established limit: they do not rest at a stable "
            f"equilibrium before t = {end_time:.3g}. Run flow(attention, x0, t) at a finite beta instead."
        )
    return end.reshape(x.shape).to(x.dtype)


def _linear_flow(W: Array, N: Array, x0: Array, t: Array) -> Array:
    """The positions at increasing times t >= 0, (T,), of unit vectors x0 (n, d) at time 0, as (T, n, d).

    Every token advances by panels of tau of length h_0 2^level, as long as Legendre series resolve its direction x and
    its speed dt/dtau = |N x| in them. The series of the speed tells when the token meets a given time, that of the
    direction where it is then. The exponentials of a panel come from those of half its length by squaring, so that the
    cost grows with the turns of a token and with log |M| at most.
    """
    leading, identity, y = spectrum(torch.from_numpy(W @ N)), np.eye(len(W)), x0
    A, B = W @ N - leading.leading * identity, N @ W - leading.leading * identity
    # Both |y| and |N y| are smooth over h_0 = 1/(2 size), because N e^{tau W N} = e^{tau N W} N.
    size, max_speed = max(np.linalg.norm(A, 2), np.linalg.norm(B, 2)), np.linalg.norm(N, 2)
    if size == 0:  # M = c I
        return np.broadcast_to(x0, (len(t), *x0.shape)).copy()
    if not _norm(y @ N.T).all():
        raise ValueError("a token lies in ker G, where the zero-temperature drift G x/|G x| is undefined; remove it.")
    turns = t[-1] / max_speed * min(leading.frequencies, default=0.0) / (2 * math.pi)
    if turns > 4 * MAX_PANELS:  # a panel resolves less than four turns
        raise ValueError(f"tokens turn {turns:.2g} times before t = {t[-1]:.3g}; ask for a shorter time.")

    z, w = legendre.leggauss(NODES)
    to_series = w * legendre.legvander(z, NODES - 1).T * (np.arange(NODES) + 0.5)[:, None]
    nodes, h0 = np.append((z + 1) / 2, 1.0), 0.5 / size  # of a panel [0, 1], and its end
    exponentials, growth = [expm(nodes[:, None, None] * h0 * A)], [1.0]  # by level, (NODES + 1, d, d), and their norms
    clock, level, token = np.zeros(len(y)), np.zeros(len(y), dtype=int), np.arange(len(y))
    path = np.zeros((len(t), *x0.shape))
    for _ in range(MAX_PANELS):
        while len(exponentials) <= level.max():
            exponentials.append(exponentials[-1] @ exponentials[-1])
            growth.append(float(np.linalg.norm(exponentials[-1], 2, axis=(1, 2)).max()))
        panel = np.empty((NODES + 1, *y.shape))
        for number in np.unique(level):
            panel[:, level == number] = y[level == number] @ exponentials[number].swapaxes(1, 2)
        length = _norm(panel)
        panel /= length[..., None]
        speed = _norm(panel @ N.T)[..., None] / max_speed
        series = np.tensordot(to_series, np.concatenate([speed, panel], axis=-1)[:-1], 1)  # (NODES, n, 1 + d)
        tolerance = np.maximum(16 * EPS * np.array(growth)[level] / np.maximum(length.min(0), 1), RESOLVED)
        error = np.maximum(abs(series[..., 0]) / series[0, :, 0], abs(series[..., 1:]).max(-1))  # (NODES, n)
        is_resolved = ((error[-2:] <= tolerance).all(0) & (length[-1] > 1e-200)) | (level == 0)
        may_grow = (error[NODES // 2 :] <= tolerance).all(0)

        duration = np.where(is_resolved, h0 * 2.0**level * max_speed * series[0, :, 0], 0.0)
        first, stop = np.searchsorted(t, clock), np.searchsorted(t, clock + duration)
        who = np.repeat(np.arange(len(y)), stop - first)  # one entry for each time that a token meets in its panel
        if len(who):
            when = np.arange(len(who)) - (np.cumsum(stop - first) - stop)[who]
            path[when, token[who]] = _positions(series[:, who], (t[when] - clock[who]) / duration[who])

        y, clock = np.where(is_resolved[:, None], panel[-1], y), clock + duration
        level = np.clip(level + np.where(is_resolved, may_grow, -1), 0, MAX_LEVEL)
        is_left = clock <= t[-1]
        if not is_left.any():
            return path
        y, clock, level, token = y[is_left], clock[is_left], level[is_left], token[is_left]
        is_stuck = _norm(y @ N.T) <= 4 * EPS * max_speed
        if is_stuck.any():
            token, clock = token[is_stuck], clock[is_stuck]
            break
    raise ValueError(
        f"{len(token)} tokens come to t = {clock.max():.4g} and not to {t[-1]:.3g}: they run into ker G, where the "
        "drift is undefined, or turn too often. Ask for a shorter time."
    )


def _norm(x: Array) -> Array:
    return np.asarray(np.linalg.norm(x, axis=-1), dtype=np.float64)


def _positions(series: Array, share: Array) -> Array:
    """The directions (m, d) at given shares (m,) of the duration of panels with series (NODES, m, 1 + d)."""
    speed = series[..., 0]
    elapsed = legendre.legint(speed, lbnd=-1)
    z = 2 * share - 1
    for _ in range(20):  # Newton's method for elapsed(z) = share elapsed(1), which is 2 share speed_0
        excess = legendre.legval(z, elapsed, tensor=False) - 2 * share * speed[0]
        last, z = z, np.clip(z - excess / legendre.legval(z, speed, tensor=False), -1, 1)
        if (abs(z - last) < 1e-13).all():
            break
    x = np.asarray(legendre.legval(z[:, None], series[..., 1:], tensor=False), dtype=np.float64)
    return x / _norm(x)[:, None]
