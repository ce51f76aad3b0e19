"""Softmax averages on the circle by Fourier series, in time n K instead of n^2.

For keys R e^{i phi_j} and a query |q| e^{i psi}, with b = scale |q| R,

    exp(b cos(psi - phi_j)) = I_0(b) + 2 sum_{k > 0} I_k(b) cos k(psi - phi_j),

so sum_j w_j v_j exp(scale <q, k_j>) needs only the moments sum_j w_j v_j e^{-i k phi_j}. I_k(b) e^{-b} falls like
exp(-k^2 / 2b): about sqrt(72 b) terms reach the last digit of float64. The terms are of order one however small
their sum is, so that a query far from every key loses digits; such queries are averaged over all keys by `dense`.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from attn_flow.kernels import bessel, dense
from attn_flow.kernels.clouds import average_each_cloud, default_tolerance

FEATURE_ENTRIES = 2**18  # features in memory at a time
EPS = torch.finfo(torch.float64).eps


def softmax_average(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    log_weights: Tensor | None = None,
    *,
    scale: float | Tensor = 1.0,
    tolerance: float | None = None,
) -> Tensor:
    """The average of the values under softmax weights, (..., m, v), for keys on a circle around the origin.

    It is computed in float64. Queries whose average would lose more digits than the tolerance go to `dense`.

    Example:
        >>> angle = torch.linspace(0, 6, 1000, dtype=torch.float64)
        >>> x = torch.stack([angle.cos(), angle.sin()], dim=-1)
        >>> difference = softmax_average(x, x, x, scale=50.0) - dense.softmax_average(x, x, x, scale=50.0)
        >>> bool(difference.abs().max() < 1e-11)
        True
    """
    tolerance = tolerance or default_tolerance(values.dtype)
    if not is_on_circle(keys, tolerance):
        raise ValueError("the kernel 'series' needs keys of width 2 and equal length, no padding; use kernel='auto'.")

    def average(q: Tensor, k: Tensor, v: Tensor, log_w: Tensor) -> Tensor:
        return _average_one_cloud(q.double(), k.double(), v.double(), log_w.double(), tolerance).to(v.dtype)

    return average_each_cloud(average, scale * queries, keys, values, log_weights)


def is_on_circle(keys: Tensor, tolerance: float) -> bool:
    """Whether keys (..., n, 2) have one length in every cloud, up to a relative difference of `tolerance`."""
    if keys.shape[-1] != 2:
        return False
    lengths = keys.norm(dim=-1)
    longest, shortest = lengths.amax(-1), lengths.amin(-1)
    return bool((longest - shortest <= tolerance * longest).all())


def term_count(b: float) -> int:
    """K such that I_k(b) e^{-b} is below rounding for k > K.

    I_k(b) <= exp(sqrt(b^2 + k^2) - k asinh(k / b)) by Cauchy's integral over the circle of radius exp(asinh(k / b)).
    Newton's method approaches the root from the right, since the exponent is concave in k.
    """
    b, digits = max(b, EPS), -math.log(EPS / 8)
    k = digits + math.sqrt(digits**2 + 2 * digits * b)  # the exponent is below b - k^2 / 2(b + k)
    for _ in range(4):
        slope = math.asinh(k / b)
        k -= (b - math.hypot(b, k) + k * slope - digits) / slope
    return math.ceil(k)


def _average_one_cloud(q: Tensor, k: Tensor, v: Tensor, log_weights: Tensor, tolerance: float) -> Tensor:
    """The averages (m, v) of one cloud in float64, for queries that are already scaled."""
    lengths = q.norm(dim=-1)
    key_lengths = k.norm(dim=-1)
    b = lengths * key_lengths.mean()
    K = term_count(float(b.max()))
    # Rounding makes keys differ in length. A cold query sees keys in its own direction, where length acts as a weight.
    weights = torch.softmax(log_weights + lengths.mean() * (key_lengths - key_lengths.mean()), dim=-1)
    weighted = weights[:, None] * torch.cat([v, torch.ones_like(v[:, :1])], dim=-1)  # (n, v + 1)
    rows = max(1, FEATURE_ENTRIES // K)
    # Every block uses the same memory: new pages cost as much as what is written to them.
    powers = torch.ones(min(rows, max(len(q), len(k))), K + 1, dtype=torch.complex128, device=q.device)
    moments = sum(_features(points, powers).mT @ part for points, part in zip(k.split(rows), weighted.split(rows)))
    has_one_length = float(lengths.max() - lengths.min()) <= tolerance * float(lengths.max())
    if has_one_length:
        moments = moments * _coefficients(b.mean()[None], K).mT
    blocks = []
    for points, b_block in zip(q.split(rows), b.split(rows)):
        features = _features(points, powers)
        blocks.append((features if has_one_length else features * _coefficients(b_block, K)) @ moments)
    total = torch.cat(blocks)  # (m, v + 1): numerators, and the normaliser times e^{-b}
    average = total[:, :-1] / total[:, -1:]
    is_lost = ~(total[:, -1] >= 4 * EPS / tolerance)  # the rounding errors of the sum are about 4 EPS
    if bool(is_lost.any()):
        average[is_lost] = dense.softmax_average(q[is_lost], k, v, log_weights)
    return average


def _features(z: Tensor, powers: Tensor) -> Tensor:
    """cos k phi and sin k phi in turn, for k = 0..K and the angles phi of z (n, 2), by doubling: (n, 2 (K + 1)).

    Args:
        powers: (at least n, K + 1), the memory to use; its first column is 1.
    """
    length = z.norm(dim=-1, keepdim=True)
    step = torch.view_as_complex(z / torch.where(length > 0, length, 1.0))[:, None]
    powers, K, known = powers[: len(z)], powers.shape[1] - 1, 1
    while known <= K:
        torch.mul(powers[:, : min(known, K + 1 - known)], step, out=powers[:, known : 2 * known])
        step, known = step * step, 2 * known
    return torch.view_as_real(powers).flatten(1)


def _coefficients(b: Tensor, K: int) -> Tensor:
    """I_0(b) e^{-b} and 2 I_k(b) e^{-b} for k = 1..K, each twice, (n, 2 (K + 1))."""
    if len(b) == 1:
        ratios = torch.tensor([bessel.ratios(float(b), K)], dtype=b.dtype, device=b.device)
    else:
        ratios = torch.stack(bessel.ratios(b, K), dim=-1)
    coefficients = torch.cat([torch.special.i0e(b)[:, None], ratios], dim=-1).cumprod(-1)
    coefficients[:, 1:] *= 2
    return coefficients.repeat_interleave(2, dim=-1)
