"""W_2 of a batch of pairs on an accelerator: the Sinkhorn divergence and its proved interval, all pairs at once.

The mathematics is that of `entropic`, whose schedule is made for a CPU and asks a value after every sweep. Here the
number of sweeps is known beforehand, sums are taken with their maximum, and the host reads once before the schedule and
after every tenth sweep of the interval, however many pairs and points there are. A point without mass is there and
unseen.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from attn_flow.base import checks
from attn_flow.base.memory import require
from attn_flow.transport.entropic import BLURS, GEOMLOSS_BYTES, Unproved, anneal
from attn_flow.transport.feasible import interval

# Entries of the matrices of all pairs that are held at once.
ENTRIES = 1 << 24


def softmin(eps: float, x: Tensor, y: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
    """-eps log sum_j e^{h_j - |x_i - y_j|^2/(2 eps)} (B, n), and the mean of y under those weights (B, n, d)."""
    bias = (h - y.square().sum(-1) / (2 * eps))[:, None, :]
    parts = []
    for rows in x.split(max(1, ENTRIES // (len(x) * y.shape[1])), dim=1):
        logits = torch.baddbmm(bias, rows, y.mT, alpha=1 / eps)
        parts.append((logits.softmax(-1) @ y, logits.logsumexp(-1)))
    mean, log_sum = (torch.cat(part, dim=1) for part in zip(*parts))
    return x.square().sum(-1) / 2 - eps * log_sum, mean


def divergence(
    x: Tensor, a: Tensor, y: Tensor, b: Tensor, blur: float, scaling: float
) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor, Tensor], Tensor]:
    """S (B,) of clouds of diameter at most 1, its gradients in x, y, a and b, and the potential g (B, m)."""
    epsilons = anneal(1.0, blur, scaling)

    def schedule(x: Tensor, a: Tensor, y: Tensor, b: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        log_a, log_b = a.log(), b.log()
        f, g = softmin(epsilons[0], x, y, log_b)[0], softmin(epsilons[0], y, x, log_a)[0]
        for eps in epsilons:
            new_f, new_g = softmin(eps, x, y, log_b + g / eps)[0], softmin(eps, y, x, log_a + f / eps)[0]
            f, g = (f + new_f) / 2, (g + new_g) / 2
        last = epsilons[-1]
        return *softmin(last, x, y, log_b + g / last), *softmin(last, y, x, log_a + f / last)

    f, to_y, g, to_x = schedule(x, a, y, b)
    f_x, within_x, _, _ = schedule(x, a, x, a)
    g_y, within_y, _, _ = schedule(y, b, y, b)
    S = (a * (f - f_x)).sum(-1) + (b * (g - g_y)).sum(-1)
    return S, (a[..., None] * (within_x - to_y), b[..., None] * (within_y - to_x), f - f_x, g - g_y), g


def certified(
    x: Tensor,
    a: Tensor,
    y: Tensor,
    b: Tensor,
    rtol: float,
    blur: float | None,
    scaling: float,
    method: str,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """W_2 (B,) of pairs x (B, n, d), y (B, m, d) with probabilities a, b, and proved errors; ValueError beyond rtol.

    dtype: in which the schedule runs; the interval is in float64, as x is. Distances are differentiable.
    """
    seen = [torch.where((w.detach() > 0)[..., None], z.detach(), math.nan) for z, w in ((x, a), (y, b))]
    low, high = (torch.cat([z.nan_to_num(sign * math.inf) for z in seen], 1) for sign in (1, -1))
    bottom, top = low.amin(1), high.amax(1)
    diameter = (top - bottom).norm(dim=-1)
    (widest,) = checks.read(diameter.amax())
    if widest == 0:
        return (x - x.detach()).sum((-2, -1)), torch.zeros_like(diameter)
    # Pairs by their own diameter, or all alike where the blur is a length.
    unit = torch.where(diameter > 0, diameter, 1.0) if blur is None else torch.full_like(diameter, widest)
    blurs = BLURS if blur is None else (blur / widest,)
    centre = (top + bottom)[:, None, :] / 2
    x, y = (
        torch.where((w.detach() > 0)[..., None], (z - centre) / unit[:, None, None], 0.0) for z, w in ((x, a), (y, b))
    )
    found: list[Tensor] = [torch.zeros_like(diameter), torch.zeros_like(diameter)]
    open_ = list(range(len(x)))
    for size in blurs:
        at = torch.tensor(open_, device=x.device)
        distance, error, bounds = _at_blur(x[at], a[at], y[at], b[at], size, rtol, scaling, method, dtype)
        flat = diameter[at] == 0
        distance, error = (torch.where(flat, 0.0, z) for z in (distance, error))
        proved = error <= rtol * distance.detach()
        found = [z.index_copy(0, at, new) for z, new in zip(found, (distance, error))]
        open_ = [k for k, good in zip(open_, checks.read(*proved.unbind())) if not good]
        if not open_:
            return unit * found[0], unit * found[1]
    worst = int((error - rtol * distance.detach()).argmax())
    low_, high_ = (float(z[worst] * unit[at[worst]]) for z in bounds)
    raise Unproved(
        f"method {method!r} proves only {low_:.6g} <= W_2 <= {high_:.6g} for pair {int(at[worst])} of {len(x)}, more "
        f"than rtol = {rtol:g}: the clouds are clustered, or close to each other for their number of points. Use "
        "method='shortlist' (exact), merge_tol for clusters, a smaller blur, or a larger rtol."
    )


def _at_blur(
    x: Tensor,
    a: Tensor,
    y: Tensor,
    b: Tensor,
    blur: float,
    rtol: float,
    scaling: float,
    method: str,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor]]:
    """Distances (B,) with their gradient, errors, and the interval, at one blur."""
    X, A, Y, B = (z.detach() for z in (x, a, y, b))
    if method == "geomloss":
        S, slope, g = _geomloss(x, a, y, b, blur, scaling)
    else:
        S, slopes, g = divergence(X.to(dtype), A.to(dtype), Y.to(dtype), B.to(dtype), blur, scaling)
        slope = torch.zeros_like(A[:, 0])
        for d, z in zip(slopes, (x, y, a, b)):
            slope = slope + (d.double() * (z - z.detach())).flatten(1).sum(-1)
    S = S.double()
    low, high = interval(X, A, Y, B, g.double(), blur, rtol * S.clamp(min=0), softmin, ENTRIES)
    low = low.sqrt()
    high = torch.maximum(high.clamp(min=0).sqrt(), low)
    distance = (2 * S).clamp(min=0).sqrt().clamp(low, high)
    error = torch.maximum(high - distance, distance - low)
    return distance + slope / torch.where(distance > 0, distance, 1.0), error, (low, high)


def _geomloss(x: Tensor, a: Tensor, y: Tensor, b: Tensor, blur: float, scaling: float) -> tuple[Tensor, Tensor, Tensor]:
    """S (B,) as geomloss has it, S - S.detach() for its gradient, and the potential of y (B, m)."""
    from geomloss import SamplesLoss

    entries = max(x.shape[1], y.shape[1]) ** 2
    require(GEOMLOSS_BYTES * entries, "one pair of geomloss's matrices", "use method='sinkhorn'", x.device)
    pairs = max(1, ENTRIES // entries)
    found = []
    for some in range(0, len(x), pairs):
        given = [z[some : some + pairs] for z in (a, x, b, y)]
        loss = lambda **more: SamplesLoss(
            "sinkhorn", p=2, blur=blur, scaling=scaling, diameter=1.0, backend="tensorized", **more
        )
        S = loss()(*given)
        g = loss(debias=False, potentials=True)(*(z.detach() for z in given))[1]
        found.append((S, g.reshape(len(S), -1)))
    S, g = (torch.cat(part) for part in zip(*found))
    return S.detach(), S - S.detach(), g
