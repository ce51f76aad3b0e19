"""W_2 by the Sinkhorn divergence of geomloss, with bounds that are proved.

geomloss estimates W_2^2 / 2 by entropic transport at the temperature eps = blur^2. On clusters of unequal masses the
estimate alone can be 80% too low. So the dual potentials of geomloss are turned into a transport plan with the right
marginals and into potentials that satisfy all inequalities, which bound W_2 from both sides however wrong they are.
Feydy, PhD thesis (2020), chapter 3; rounding of plans: Altschuler, Weed and Rigollet, NeurIPS 2017.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from attn_flow.kernels import dense
from attn_flow.transport.ground_cost import require_matrix
from attn_flow.transport.pair import Pair, Solution

# geomloss does not resolve lengths below its blur. These are tried in turn, as parts of the diameter.
BLURS = (0.1, 0.05, 0.02, 0.01, 0.005)
SCALING = 0.9  # the ratio of successive lengths of geomloss's annealing
# Sinkhorn iterations that tighten the bounds of one blur, and how often the bounds are computed.
ITERATIONS, CHECK_EVERY = 40, 10


def sinkhorn_distance(pair: Pair, rtol: float) -> Solution:
    """W_2 of a pair on any device; smaller blurs are tried until the relative error is at most rtol."""
    cost = pair.cost
    if not cost.is_squared_euclidean:
        raise ValueError(f"method 'sinkhorn' needs p = 2 and cost 'euclidean', got p = {cost.p:g} and {cost.name!r}.")
    require_matrix(len(pair.x), len(pair.y))
    pair, unit = pair.scaled()
    has_mass_x, has_mass_y = pair.a > 0, pair.b > 0
    masses = Pair(pair.x[has_mass_x], pair.a[has_mass_x], pair.y[has_mass_y], pair.b[has_mass_y], cost)
    points = pair.points()
    diameter = float((points.amax(0) - points.amin(0)).norm())  # or more
    if diameter == 0:  # geomloss raises where all points coincide
        zeros = torch.zeros_like(pair.a), torch.zeros_like(pair.b)
        return Solution(0.0 * pair.x.sum(), 0.0, "sinkhorn", potentials=zeros)
    for part in BLURS:
        value, error, v = _at_blur(masses, part * diameter, diameter, rtol)
        if error <= rtol * value.item():
            break
    x, y = pair.x.detach(), pair.y.detach()
    u = _c_transform(x, masses.y.detach(), v)  # of all points, those without mass too
    v = _c_transform(y, x, u).masked_scatter(has_mass_y, v)
    potentials = (2 * u * unit * unit, 2 * v * unit * unit)
    return Solution(value * unit, error * unit, "sinkhorn", potentials=potentials)


def _at_blur(pair: Pair, blur: float, diameter: float, rtol: float) -> tuple[Tensor, float, Tensor]:
    """The estimate of geomloss at one blur, its error, and half of the potential of y that proves the lower bound."""
    from geomloss import SamplesLoss

    settings = {"p": 2, "blur": blur, "scaling": SCALING, "diameter": diameter, "backend": "tensorized"}
    x, a, y, b = (z.detach() for z in (pair.x, pair.a, pair.y, pair.b))
    S = SamplesLoss("sinkhorn", **settings)(pair.a, pair.x, pair.b, pair.y)  # an estimate of W_2^2 / 2
    _, g = SamplesLoss("sinkhorn", debias=False, potentials=True, **settings)(a, x, b, y)
    estimate = max(float(S.detach()), 0.0)
    half_low, half_high, v = _bounds(x, a, y, b, g.reshape(b.shape), blur**2, rtol * estimate)
    low = math.sqrt(2 * half_low)
    high = max(math.sqrt(2 * max(half_high, 0.0)), low)
    value = min(max(math.sqrt(2 * estimate), low), high)
    gradient = (S - S.detach()) / (value or 1.0)  # zero, with the gradient of sqrt(2 S)
    return value + gradient, max(high - value, value - low), v


def _bounds(
    x: Tensor, a: Tensor, y: Tensor, b: Tensor, g: Tensor, eps: float, goal: float
) -> tuple[float, float, Tensor]:
    """Proved bounds of W_2^2 / 2 from any potential g (m,) of y, and the potential v of the lower bound.

    Sinkhorn iterations tighten them until they are within goal / 2 of each other.
    Upper bound: the plan exp((f_i + g_j - C_ij) / eps) a_i b_j, C_ij = |x_i - y_j|^2 / 2, with g lowered until no
    column has too much mass; the remaining mass is moved by the product plan.
    Lower bound: the c-transform of g and its c-transform, which satisfy u_i + v_j <= C_ij for all pairs.
    """
    log_a, log_b = a.log(), b.log()
    squares = (a @ x.square().sum(-1) + b @ y.square().sum(-1)) / 2
    lower, upper, best = 0.0, math.inf, torch.zeros_like(b)
    for iteration in range(ITERATIONS + 1):
        f, _ = _softmin(eps, x, y, log_b + g / eps)
        balanced, _ = _softmin(eps, y, x, log_a + f / eps)
        if iteration % CHECK_EVERY == 0:
            lowered = torch.minimum(g, balanced)
            f_lowered, mean = _softmin(eps, x, y, log_b + lowered / eps)
            rows, columns = a * ((f - f_lowered) / eps).exp(), b * ((lowered - balanced) / eps).exp()
            rest_x, rest_y = (a - rows).clamp(min=0), (b - columns).clamp(min=0)
            product = (rest_x @ x) @ (rest_y @ y) / rest_x.sum().clamp(min=torch.finfo(x.dtype).tiny)
            primal = float(squares - rows @ (x * mean).sum(-1) - product)
            upper = min(upper, primal)
            u = _c_transform(x, y, balanced)
            v = _c_transform(y, x, u)
            dual = float(a @ u + b @ v)
            if dual > lower:
                lower, best = dual, v
            if upper - lower <= goal / 2:
                break
        g = balanced
    return lower, upper, best


def _softmin(eps: float, x: Tensor, y: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
    """-eps log sum_j exp(h_j - |x_i - y_j|^2 / (2 eps)), (n,), and the mean of y under these weights, (n, d)."""
    mean, log_sum = dense.average_and_log_sum(x, y, y, h - y.square().sum(-1) / (2 * eps), scale=1 / eps)
    return x.square().sum(-1) / 2 - eps * log_sum, mean


def _c_transform(x: Tensor, y: Tensor, g: Tensor) -> Tensor:
    """min_j |x_i - y_j|^2 / 2 - g_j, (n,), lowered by what rounding may have added."""
    squares_x, squares_y = x.square().sum(-1), y.square().sum(-1)
    least = (squares_y / 2 - g - x @ y.mT).amin(-1)
    size = squares_x + squares_y.max() + g.abs().max()
    return least + squares_x / 2 - 4 * (x.shape[-1] + 2) * torch.finfo(x.dtype).eps * size
