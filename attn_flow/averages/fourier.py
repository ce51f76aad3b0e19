"""Softmax averages on the circle by Fourier series, in O(n K) instead of O(n^2).

For keys R e^{i phi_j} and a query |q| e^{i psi}, with b = scale |q| R,

    e^{b cos(psi - phi_j)} = I_0(b) + 2 sum_{k>0} I_k(b) cos k(psi - phi_j),

so sum_j w_j v_j e^{scale <q,k_j>} needs only the moments sum_j w_j v_j e^{-i k phi_j}. I_k(b) e^{-b} falls like
e^{-k^2/2b}: K ~ sqrt(72 b) terms reach the last digit of float64. Terms are of order one however small their sum is, so
a query far from every key loses digits; such rows are averaged key by key. Keys and queries whose lengths differ by
rounding count as one length, and what that costs is part of the error.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from attn_flow.averages import bessel
from attn_flow.averages.near import Near, over_all

ENTRIES = 2**18  # features held at once
EPS = torch.finfo(torch.float64).eps
ROUNDING = 4 * EPS  # of a sum whose terms add up to one
NEWTON = 4  # steps towards the number of terms: every one is still a bound
ROUND = 16  # units in the last place by which the norms of points on a circle may differ


def terms(b: float) -> int:
    """K with I_k(b) e^{-b} below rounding for k > K, by I_k(b) <= e^{sqrt(b^2 + k^2) - k asinh(k/b)}.

    That is Cauchy's integral over the circle |w| = e^{asinh(k/b)}. Newton from the right: the exponent is concave in k.
    """
    b, digits = max(b, EPS), -math.log(EPS / 8)
    k = digits + math.sqrt(digits**2 + 2 * digits * b)  # the exponent is below b - k^2 / 2 (b + k)
    for _ in range(NEWTON):
        slope = math.asinh(k / b)
        k -= (b - math.hypot(b, k) + k * slope - digits) / slope
    return math.ceil(k)


def fits(q: Tensor, k: Tensor, scale: float, tolerance: float, dtype: torch.dtype) -> int:
    """How many terms do for queries q if keys k (n, 2) are on a circle around 0 as far as `dtype` tells; else 0."""
    if k.shape[-1] != 2:
        return 0
    lengths, norms = q.norm(dim=-1), k.norm(dim=-1)
    low, high = float(norms.min()), float(norms.max())
    if high - low > ROUND * torch.finfo(dtype).eps * high:
        return 0
    # Where keys are not quite on the circle, `softmax` corrects for a query of mean length.
    uncorrected = scale * float(_range(lengths)) * (high - low)
    if uncorrected > max(tolerance, ROUNDING * scale):
        return 0
    return terms(scale * float(lengths.max()) * high)


def softmax(
    q: Tensor, k: Tensor, v: Tensor, *, tolerance: float, key_bias: Tensor | None = None, scale: float = 1.0
) -> Near:
    """sum_j softmax_j(scale <q_i,k_j> + bias_j) v_j for q (m, 2) and k (n, 2) in float64, where `fits`; v (n, v)."""
    length, norm = q.norm(dim=-1), k.norm(dim=-1)
    R = norm.mean()
    logits = scale * length.mean() * (norm - R)
    w = torch.softmax(logits if key_bias is None else logits + key_bias, dim=-1)
    b = scale * length * R
    K = terms(float(b.max()))
    weighted = w[:, None] * torch.cat([v.double(), torch.ones_like(w)[:, None]], dim=-1)
    rows = max(1, ENTRIES // K)
    # The same memory for every block: pages that are new cost as much as what is written to them.
    powers = torch.ones(min(rows, max(len(q), len(k))), K + 1, dtype=torch.complex128, device=q.device)
    moments = sum(_features(points, powers).mT @ part for points, part in zip(k.split(rows), weighted.split(rows)))
    same = float(_unevenness(b)) <= max(tolerance, ROUNDING)  # so are then all coefficients
    if same:
        moments = moments * _coefficients(b.mean()[None], K).mT
    total = torch.cat(
        [
            (_features(points, powers) if same else _features(points, powers) * _coefficients(bs, K)) @ moments
            for points, bs in zip(q.split(rows), b.split(rows))
        ]
    )
    mass = total[:, -1].clamp_min(torch.finfo(q.dtype).tiny)
    average = (total[:, :-1] / total[:, -1:]).to(v.dtype)
    # One b and one R for all: by Jensen b (1 - cos) is at most -log(mass) on average, so that is what each costs.
    uneven = _unevenness(norm) + (_unevenness(b) if same else 0.0)
    lost = ROUNDING / mass - mass.log().clamp_max(0.0) * uneven
    lost += scale * _range(length) * _range(norm)
    for some in (~(mass >= ROUNDING / tolerance)).nonzero()[:, 0].split(max(1, ENTRIES // len(k))):
        average[some] = over_all(q[some], k, v, key_bias, some, False, False, scale)
        lost[some] = 0.0
    return Near(average, lost, K / len(k))


def _range(z: Tensor) -> Tensor:
    return z.max() - z.min()


def _unevenness(z: Tensor) -> Tensor:
    """The range of lengths z over the largest; 0 where all are 0."""
    return _range(z) / z.max().clamp_min(torch.finfo(z.dtype).tiny)


def _features(z: Tensor, powers: Tensor) -> Tensor:
    """cos k phi and sin k phi in turn, for k = 0..K and the angles phi of z (n, 2), by doubling: (n, 2 (K + 1)).

    powers (at least n, K + 1): where they are written; its first column is 1.
    """
    step = torch.view_as_complex(z / z.norm(dim=-1, keepdim=True).clamp_min(torch.finfo(z.dtype).tiny))[:, None]
    powers, K, known = powers[: len(z)], powers.shape[1] - 1, 1
    while known <= K:
        torch.mul(powers[:, : min(known, K + 1 - known)], step, out=powers[:, known : 2 * known])
        step, known = step * step, 2 * known
    return torch.view_as_real(powers).flatten(1)


def _coefficients(b: Tensor, K: int) -> Tensor:
    """I_0(b) e^{-b} and 2 I_k(b) e^{-b} for k = 1..K, each twice, (n, 2 (K + 1))."""
    ratios = (
        torch.tensor([bessel.ratios(float(b), K)], dtype=b.dtype, device=b.device)
        if len(b) == 1
        else torch.stack(bessel.ratios(b, K), dim=-1)
    )
    found = torch.cat([torch.special.i0e(b)[:, None], ratios], dim=-1).cumprod(-1)
    found[:, 1:] *= 2
    return found.repeat_interleave(2, dim=-1)
