"""W_2 by the Sinkhorn divergence of geomloss, with bounds that are proved, for a batch of pairs at once.

geomloss estimates W_2^2 / 2 by entropic transport at the temperature eps = blur^2. On clusters of unequal masses the
estimate alone can be 80% too low. So the dual potentials of geomloss are turned into a transport plan with the right
marginals and into potentials that satisfy all inequalities, which bound W_2 from both sides however wrong they are.
Feydy, PhD thesis (2020), chapter 3; rounding of plans: Altschuler, Weed and Rigollet, NeurIPS 2017.
"""

from __future__ import annotations

import importlib.util
import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from attn_flow.base import checks
from attn_flow.kernels import dense
from attn_flow.transport.ground_cost import MAX_ENTRIES, require_matrix

# Blurs that are tried in turn if none is given, as parts of the diameter.
BLURS = (0.1, 0.05, 0.02, 0.01, 0.005)
# Sinkhorn iterations that tighten the bounds of one blur, and how often the bounds are computed.
MAX_ITERATIONS, CHECK_EVERY = 40, 10
# Entries of the matrices of all pairs in memory at a time.
BLOCK_ENTRIES = 2**24


@dataclass(frozen=True)
class Sinkhorn:
    """The method "sinkhorn" with its options: W_2 by geomloss, with proved bounds.

    Args:
        blur: the length below which geomloss does not resolve the clouds. None tries shorter and shorter lengths,
            from 0.1 to 0.005 of the diameter, until the error is proved to be within rtol.
        scaling: the ratio of successive lengths of geomloss's annealing, between 0 and 1. A larger one is more exact
            and slower.

    Example:
        >>> from attn_flow.transport import wasserstein
        >>> x = torch.linspace(0, 1, 20)[:, None]
        >>> wasserstein(x, x + 2, method=Sinkhorn(blur=0.05, scaling=0.5))
        tensor(2.)
    """

    blur: float | None = None
    scaling: float = 0.9

    def __post_init__(self) -> None:
        if self.blur is not None:
            checks.require_positive(blur=self.blur)
        if not 0 < self.scaling < 1:
            raise ValueError(f"scaling = {self.scaling}, expected a number between 0 and 1.")


class Bounds(NamedTuple):
    """Estimates of W_2 of a batch of pairs, low <= W_2 <= high, and potentials that prove the lower bound."""

    value: Tensor  # (B,), differentiable
    low: Tensor  # (B,)
    high: Tensor  # (B,)
    u: Tensor  # (B, n), with u_i + v_j <= |x_i - y_j|^2
    v: Tensor  # (B, m)

    @property
    def error(self) -> Tensor:
        """The distance of the value to the farther bound, (B,)."""
        value = self.value.detach()
        return torch.maximum(self.high - value, value - self.low)


def sinkhorn_distance(
    x: Tensor, a: Tensor, y: Tensor, b: Tensor, options: Sinkhorn, rtol: float, dtype: torch.dtype
) -> Bounds:
    """W_2 of points x (B, n, d), y (B, m, d) with probabilities a (B, n), b (B, m), in float64 on any device.

    Args:
        x, a, y, b: the pairs; points without mass are ignored and get potentials 0.
        options: the blur and the scaling.
        rtol: the relative error at which no smaller blur is tried.
        dtype: the dtype in which geomloss runs; the bounds are computed in float64.
    """
    n = max(x.shape[1], y.shape[1])
    if not _has_keops():
        require_matrix(n, n)
    pairs = max(1, MAX_ENTRIES // n**2)
    batches = zip(x.split(pairs), a.split(pairs), y.split(pairs), b.split(pairs))
    parts = [_solve(*part, options, rtol, dtype) for part in batches]
    return Bounds(*(torch.cat(z) for z in zip(*parts)))


def _solve(x: Tensor, a: Tensor, y: Tensor, b: Tensor, options: Sinkhorn, rtol: float, dtype: torch.dtype) -> Bounds:
    """Bounds of all pairs, each in units of its own diameter, with smaller blurs for those that need them."""
    has_mass_x, has_mass_y = a.detach() > 0, b.detach() > 0
    points, has_mass = torch.cat([x, y], 1).detach(), torch.cat([has_mass_x, has_mass_y], 1)[..., None]
    bottom = torch.where(has_mass, points, math.inf).amin(1, keepdim=True)  # (B, 1, d)
    top = torch.where(has_mass, points, -math.inf).amax(1, keepdim=True)
    side = (top - bottom).amax(-1, keepdim=True)
    unit = torch.where(side > 0, side, 1.0)
    unit = unit * ((top - bottom) / unit).norm(dim=-1, keepdim=True).clamp(min=1.0)  # (B, 1, 1), cannot overflow
    blurs: tuple[float, ...] = BLURS
    if options.blur is not None:  # a length, so all pairs need the same unit
        unit = unit.amax().expand_as(unit)
        blurs = (options.blur / float(unit[0]),)
    x = torch.where(has_mass_x[..., None], (x - (top + bottom) / 2) / unit, 0.0)
    y = torch.where(has_mass_y[..., None], (y - (top + bottom) / 2) / unit, 0.0)
    remaining = torch.arange(len(x), device=x.device)
    results = [x.new_zeros(len(x)) for _ in range(3)] + [torch.zeros_like(a), torch.zeros_like(b)]
    for blur in blurs:
        part = x[remaining], a[remaining], y[remaining], b[remaining]
        new = _at_blur(*part, blur, options.scaling, rtol, dtype)
        results = [old.index_copy(0, remaining, z) for old, z in zip(results, new)]
        remaining = remaining[new.error > rtol * new.value.detach()]
        if len(remaining) == 0:
            break
    is_point = side[:, 0, 0] == 0  # all points of the pair coincide
    value, low, high = (torch.where(is_point, 0.0, z * unit[:, 0, 0]) for z in results[:3])
    u, v = (torch.where(w, z * unit[:, 0] ** 2, 0.0) for w, z in zip((has_mass_x, has_mass_y), results[3:]))
    return Bounds(value, low, high, u, v)


def _at_blur(
    x: Tensor, a: Tensor, y: Tensor, b: Tensor, blur: float, scaling: float, rtol: float, dtype: torch.dtype
) -> Bounds:
    """The estimate of geomloss at one blur and its bounds, for pairs of diameter at most one."""
    from geomloss import SamplesLoss

    inputs = [z.to(dtype) for z in (a, x, b, y)]
    options = {"blur": blur, "scaling": scaling, "diameter": 1.0, "backend": "online" if _has_keops() else "tensorized"}
    S = SamplesLoss("sinkhorn", p=2, **options)(*inputs).double()  # (B,), an estimate of W_2^2 / 2
    plan = SamplesLoss("sinkhorn", p=2, debias=False, potentials=True, **options)
    g = plan(*(z.detach() for z in inputs))[1].reshape(b.shape).double()
    goal = rtol * S.detach().clamp(min=0)
    half_low, half_high, u, v = _bounds(x.detach(), a.detach(), y.detach(), b.detach(), g, blur**2, goal)
    low = (2 * half_low).sqrt()
    high = torch.maximum((2 * half_high).clamp(min=0).sqrt(), low)
    value = (2 * S.detach()).clamp(min=0).sqrt().clamp(low, high)
    gradient = (S - S.detach()) / torch.where(value > 0, value, 1.0)  # zero, with the gradient of sqrt(2 S)
    return Bounds(value + gradient, low, high, 2 * u, 2 * v)


def _bounds(
    x: Tensor, a: Tensor, y: Tensor, b: Tensor, g: Tensor, eps: float, goal: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Proved bounds of W_2^2 / 2 (B,) from any potentials g (B, m) of y, and the potentials of the lower bound.

    Sinkhorn iterations tighten them until they are within goal (B,) / 2 of each other.
    Upper bound: the plan exp((f_i + g_j - C_ij) / eps) a_i b_j, C_ij = |x_i - y_j|^2 / 2, with g lowered until no
    column has too much mass; the remaining mass is moved by the product plan.
    Lower bound: the c-transform of g and its c-transform, which satisfy u_i + v_j <= C_ij for all pairs.
    """
    log_a, log_b = a.log(), b.log()
    squares = ((a * x.square().sum(-1)).sum(-1) + (b * y.square().sum(-1)).sum(-1)) / 2
    upper, lower = torch.full_like(goal, math.inf), torch.zeros_like(goal)
    best_u, best_v = torch.zeros_like(a), torch.zeros_like(b)
    for iteration in range(MAX_ITERATIONS):
        f = _softmin(eps, x, y, log_b + g / eps)[0]
        balanced = _softmin(eps, y, x, log_a + f / eps)[0]
        if iteration == 0 or iteration % CHECK_EVERY == CHECK_EVERY - 1:
            lowered = torch.minimum(g, balanced)
            f_lowered, mean = _softmin(eps, x, y, log_b + lowered / eps)
            rows, columns = a * ((f - f_lowered) / eps).exp(), b * ((lowered - balanced) / eps).exp()
            rest_x, rest_y = (a - rows).clamp(min=0), (b - columns).clamp(min=0)
            rest = rest_x.sum(-1)
            product = ((rest_x[..., None] * x).sum(1) * (rest_y[..., None] * y).sum(1)).sum(-1)
            product = torch.where(rest > 0, product / torch.where(rest > 0, rest, 1.0), 0.0)
            primal = squares - (rows * (x * mean).sum(-1)).sum(-1) - product
            u = _c_transform(x, y, balanced, b > 0)
            v = _c_transform(y, x, u, a > 0)
            dual = (a * u).sum(-1) + (b * v).sum(-1)
            is_open = upper - lower > goal / 2  # so that the bounds of a pair do not depend on the rest of the batch
            is_better = is_open & (dual > lower)
            best_u, best_v = (torch.where(is_better[:, None], *z) for z in ((u, best_u), (v, best_v)))
            upper, lower = torch.where(is_open & (primal < upper), primal, upper), torch.where(is_better, dual, lower)
            if bool((upper - lower <= goal / 2).all()):
                break
        g = balanced
    return lower, upper, best_u, best_v


def _softmin(eps: float, x: Tensor, y: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
    """-eps log sum_j exp(h_j - |x_i - y_j|^2 / (2 eps)), (B, n), and the mean of y under these weights, (B, n, d)."""
    mean, log_sum = dense.average_and_log_sum(x, y, y, h - y.square().sum(-1) / (2 * eps), scale=1 / eps)
    return x.square().sum(-1) / 2 - eps * log_sum, mean


def _c_transform(x: Tensor, y: Tensor, g: Tensor, has_mass: Tensor) -> Tensor:
    """min_j |x_i - y_j|^2 / 2 - g_j over the points y with mass, (B, n), lowered by what rounding may have added."""
    offset = torch.where(has_mass, y.square().sum(-1) / 2 - g, math.inf)[:, None, :]
    blocks = x.split(max(1, BLOCK_ENTRIES // (len(x) * y.shape[1])), dim=1)
    least = torch.cat([torch.baddbmm(offset, block, y.mT, alpha=-1).amin(-1) for block in blocks], dim=1)
    size = x.square().sum(-1).amax(-1) + y.square().sum(-1).amax(-1) + torch.where(has_mass, g.abs(), 0.0).amax(-1)
    rounding = 4 * (x.shape[-1] + 2) * torch.finfo(x.dtype).eps * size
    return least + x.square().sum(-1) / 2 - rounding[:, None]


def _has_keops() -> bool:
    return importlib.util.find_spec("pykeops") is not None
