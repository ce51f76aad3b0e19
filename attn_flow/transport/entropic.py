"""W_2 of large diffuse clouds by the Sinkhorn divergence, with an interval that is proved, or not at all.

With C_ij = |x_i - y_j|^2 / 2 and eps = blur^2, the softmin f_i = -eps log sum_j b_j e^{(g_j - C_ij)/eps} is the
log-sum-exp of an attention with queries x, keys y and key bias. The schedule is geomloss's (Feydy, thesis 2020,
chapter 3: symmetric averaged updates, eps annealed from the squared diameter); its value estimates W_2^2 / 2. Blocks
of one kernel matrix give the softmins of both sides at once, in memory linear in n, and the means of y and x under
its rows and columns, which is all the gradient needs.
The estimate alone is up to 80% wrong on clustered clouds. So potentials and plan are made feasible, which bounds the
optimum from both sides (`feasible`), and what the interval does not hold to `rtol` is refused.
"""

from __future__ import annotations

import importlib.util
import math
from dataclasses import dataclass

import torch
from torch import Tensor

from attn_flow.base.memory import require
from attn_flow.transport.coupling import Ground
from attn_flow.transport.feasible import interval

# Blurs tried, as parts of the diameter, when none is given.
BLURS = (0.1, 0.05, 0.02, 0.01, 0.005)
# Entries of a cost matrix held at once where no fused kernel gives the log-sum-exp.
ENTRIES = 1 << 22
# Entries of a kernel matrix in one block: what the second cache holds.
BLOCK = 1 << 18
# Sums of a kernel matrix outside (SMALL, 1/SMALL) have lost digits in float32.
SMALL = 1e-20
# Bytes for every entry of a cost matrix that geomloss holds without KeOps, as measured.
GEOMLOSS_BYTES = 56


class Unproved(ValueError):
    """The schedule ended before the distance was known to the error asked for."""


@dataclass(frozen=True, eq=False)
class Divergence:
    """S = OT_eps(x,y) - (OT_eps(x,x) + OT_eps(y,y))/2 ~ W_2^2/2, its gradients, and the potentials f (n,), g (m,)."""

    value: float
    dx: Tensor
    dy: Tensor
    da: Tensor
    db: Tensor
    g: Tensor


def softmin(eps: float, x: Tensor, y: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
    """-eps log sum_j e^{h_j - |x_i - y_j|^2/(2 eps)} (..., n), and the mean of y under those weights (..., n, d)."""
    bias = (h - y.square().sum(-1) / (2 * eps)).reshape(-1, 1, 1, y.shape[-2])
    q, k = (z.reshape(-1, 1, *z.shape[-2:]).contiguous() for z in (x, y))
    mean, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, k, attn_mask=bias, scale=1 / eps)
    return x.square().sum(-1) / 2 - eps * lse.reshape(x.shape[:-1]), mean.reshape(x.shape)


def softmins(
    eps: float,
    x: Tensor,
    y: Tensor,
    a: Tensor,
    b: Tensor,
    f: Tensor,
    g: Tensor,
    means: bool = False,
    entries: int = BLOCK,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The softmins of g over y (n,) and of f over x (m,), both from K_ij = e^{(f_i + g_j - C_ij)/eps}, computed once.

    f_i - eps log sum_j b_j K_ij is the softmin of g: near the fixed point K is of order one, so no maximum is needed.
    For x is y, half of K is enough; it comes in blocks of `entries`. With `means`, also the means of y and x under
    those weights, else empty.
    """
    unit = 1 / (eps * math.log(2))  # exp2 takes half the time of exp
    left = torch.cat([x, f[:, None] - x.square().sum(-1, keepdim=True) / 2, torch.ones_like(x[:, :1])], -1) * unit
    right = torch.cat([y, torch.ones_like(y[:, :1]), g[:, None] - y.square().sum(-1, keepdim=True) / 2], -1)
    Q = b[:, None] * torch.cat([torch.ones_like(b)[:, None], y], -1) if means else b[:, None]
    P = a[:, None] * torch.cat([torch.ones_like(a)[:, None], x], -1) if means else a[:, None]
    rows, columns = torch.zeros_like(P), torch.zeros_like(Q)
    step = max(entries // len(y), 32)
    for i in range(0, len(x), step):
        block, first = slice(i, i + step), i if x is y else 0
        # Below the clamp nothing counts, and denormal numbers are slow.
        K = (left[block] @ right[first:].T).clamp_(min=-100).exp2_()
        rows[block] += K @ Q[first:]
        if x is y:  # the square on the diagonal is whole
            K, first = K[:, step:], first + step
        columns[first:] += K.T @ P[block]
    if x is y:
        rows = columns = rows + columns
    total = torch.cat([rows[:, 0], columns[:, 0]])
    if not (total > SMALL).logical_and(total < 1 / SMALL).all():  # far from the fixed point: with the maximum, then
        (soft_f, to_y), (soft_g, to_x) = softmin(eps, x, y, b.log() + g / eps), softmin(eps, y, x, a.log() + f / eps)
        return soft_f, to_y, soft_g, to_x
    return (
        f - eps * rows[:, 0].log(),
        rows[:, 1:] / rows[:, :1],
        g - eps * columns[:, 0].log(),
        columns[:, 1:] / columns[:, :1],
    )


def anneal(diameter: float, blur: float, scaling: float) -> list[float]:
    """eps = diameter^2, then down by scaling^2 a step to blur^2."""
    steps = max(math.ceil(math.log(blur / diameter) / math.log(scaling)), 0)
    return [diameter**2, *((diameter * scaling**k) ** 2 for k in range(steps)), blur**2]


def divergence(x: Tensor, a: Tensor, y: Tensor, b: Tensor, blur: float, scaling: float, diameter: float) -> Divergence:
    """The Sinkhorn divergence at eps = blur^2 by annealing; no gradients are recorded, they are computed."""
    epsilons = anneal(diameter, blur, scaling)

    def schedule(x: Tensor, a: Tensor, y: Tensor, b: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        f, _, g, _ = softmins(epsilons[0], x, y, a, b, torch.zeros_like(a), torch.zeros_like(b))
        for eps in epsilons:
            new_f, _, new_g, _ = softmins(eps, x, y, a, b, f, g)
            f, g = (f + new_f) / 2, (g + new_g) / 2
        return softmins(epsilons[-1], x, y, a, b, f, g, means=True)

    f, to_y, g, to_x = schedule(x, a, y, b)
    f_x, within_x, _, _ = schedule(x, a, x, a)
    g_y, within_y, _, _ = schedule(y, b, y, b)
    return Divergence(
        value=float(a @ (f - f_x) + b @ (g - g_y)),
        dx=a[:, None] * (within_x - to_y),
        dy=b[:, None] * (within_y - to_x),
        da=f - f_x,
        db=g - g_y,
        g=g,
    )


def certified(
    x: Tensor,
    a: Tensor,
    y: Tensor,
    b: Tensor,
    ground: Ground,
    rtol: float,
    blur: float | None,
    scaling: float,
    method: str,
    dtype: torch.dtype,
) -> tuple[Tensor, float]:
    """W_2 as the Sinkhorn divergence puts it, with a proved error of at most rtol, or a ValueError.

    dtype: in which the schedule runs; the interval is always in float64.
    """
    ground.expect_euclidean(method)
    if method == "geomloss" and not _keops():
        what = f"geomloss, which holds {len(x)} x {len(y)} matrices without KeOps,"
        remedy = "install pykeops or use method='sinkhorn'"
        require(GEOMLOSS_BYTES * max(len(x), len(y)) ** 2, what, remedy, x.device)
    keep_x, keep_y = a.detach() > 0, b.detach() > 0
    x, a, y, b = x[keep_x], a[keep_x], y[keep_y], b[keep_y]
    both = torch.cat([x, y]).detach()
    diameter = float((both.amax(0) - both.amin(0)).norm())
    if diameter == 0:
        return (x.sum() - x.detach().sum()) * 0.0, 0.0
    X, Y = (z.detach() - both.mean(0) for z in (x, y))
    A, B = a.detach(), b.detach()
    low = high = 0.0
    for size in (blur,) if blur is not None else (part * diameter for part in BLURS):
        if method == "geomloss":
            value, slope, g = _geomloss(x, a, y, b, size, scaling, diameter)
        else:
            S = divergence(X.to(dtype), A.to(dtype), Y.to(dtype), B.to(dtype), size, scaling, diameter)
            value, g = S.value, S.g
            moves = ((S.dx, x), (S.dy, y), (S.da, a), (S.db, b))
            slope = torch.stack([(d.double() * (z - z.detach())).sum() for d, z in moves]).sum()
        # From an estimate W^2, an interval of width 2 rtol W^2 is an error of rtol W on either side.
        goal = A.new_tensor([rtol * max(value, 0.0)])
        bounds = interval(X[None], A[None], Y[None], B[None], g[None].double(), size, goal, softmin, ENTRIES)
        low, high = (float(z) for z in bounds)
        low, high = math.sqrt(low), math.sqrt(max(high, low))
        distance = min(max(math.sqrt(max(2 * value, 0.0)), low), high)
        error = max(high - distance, distance - low)
        if error <= rtol * distance:
            return distance + slope / distance, error
    raise Unproved(
        f"method {method!r} proves only {low:.6g} <= W_2 <= {high:.6g} at blur {size:.3g}, more than rtol = {rtol:g}: "
        "the clouds are clustered, or close to each other for their number of points. Use method='shortlist' "
        "(exact), merge_tol for clusters, a smaller blur, or a larger rtol."
    )


def _keops() -> bool:
    return importlib.util.find_spec("pykeops") is not None


def _geomloss(
    x: Tensor, a: Tensor, y: Tensor, b: Tensor, blur: float, scaling: float, diameter: float
) -> tuple[float, Tensor, Tensor]:
    """S as geomloss has it, S - S.detach() for its gradient, and the potential of y of the plan (without debiasing)."""
    from geomloss import SamplesLoss

    backend = "online" if _keops() else "tensorized"
    loss = lambda **more: SamplesLoss(
        "sinkhorn", p=2, blur=blur, scaling=scaling, diameter=diameter, backend=backend, **more
    )
    S = loss()(a, x, b, y)
    plan = loss(debias=False, potentials=True)
    _, g = plan(a.detach(), x.detach(), b.detach(), y.detach())
    return S.item(), S - S.detach(), g.flatten()
