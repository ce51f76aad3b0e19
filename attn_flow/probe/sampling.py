"""Attention over a random sample of the keys: its error, the exponent of that error, and its prediction from logits.

Of the N keys of a text that are not special, m are kept at random and weighted by N/m; special tokens are always kept.
The squared error of the output is written as (1 - m/N) m^(-2b). The first factor is exact for a mean of N numbers, so
attention that averages over many tokens has b = 1/2; attention that selects a few tokens has b near 0.

If the values are independent normal numbers, the expected squared error depends on the attention weights alone: it is
sum_j (p'_j - p_j)^2, with p the weights over all keys and p' those over the sample.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

SMALLEST_SAMPLE = 8
SIZES = 5  # sample sizes of a text
GAUSSIAN_LOGITS = 2**20  # number of simulated logits behind one value of the curve of Gaussian logits
LOGIT_SDS = np.concatenate([np.arange(0.0, 4.0, 0.25), np.arange(4.0, 8.0, 0.5), np.arange(8.0, 20.1, 2.0)])


def sample_sizes(n: int) -> Tensor:
    """Sample sizes (SIZES,) on a geometric grid from 8, or n/4 if that is less, to n/2."""
    low, high = max(1, min(SMALLEST_SAMPLE, n // 4)), max(2, n // 2)
    return torch.from_numpy(np.geomspace(low, high, SIZES).round().astype(np.int64))


def decay_exponent(squared_errors: Tensor, sizes: Tensor, n: int | Tensor) -> Tensor:
    """The exponent b (...) of squared errors (..., sizes) ~ (1 - m/n) m^(-2b), by least squares of the logarithms.

    The sizes m are (sizes,) or (..., sizes), all below n, which is a number or (..., 1).

    Example:
        >>> sizes = torch.tensor([8, 16, 32])
        >>> decay_exponent((1 - sizes / 64) / sizes, sizes, 64)
        tensor(0.5000)
    """
    m = sizes.to(squared_errors)
    y = (squared_errors.log() - torch.log1p(-m / n)) / 2
    x = -m.log()
    x = x - x.mean(-1, keepdim=True)
    return (x * y).sum(-1) / x.square().sum(-1)


def permuted_keys(special: Tensor, draws: int, generator: torch.Generator) -> Tensor:
    """Indices (draws, N) of the keys that are not special, in random orders; the first m are a sample of size m."""
    regular = (~special).nonzero()[:, 0]
    order = torch.rand(draws, len(regular), generator=generator, dtype=torch.float32).argsort(-1)
    return regular[order.to(regular.device)]


def weight_errors(logits: Tensor, special: Tensor, order: Tensor, sizes: Tensor) -> Tensor:
    """Expected squared error per component with independent normal values: E sum_j (p'_j - p_j)^2, (heads, sizes).

    The mean over the queries of logits (heads, queries, n) and over draws: `order` (draws, N) is from `permuted_keys`,
    and a sample of size m is the first m of it with all special keys (n,).
    """
    logits = logits.double()
    weights = (logits - logits.amax(-1, keepdim=True)).exp()
    squares = weights.square()
    (draws, N), n = order.shape, len(special)
    masks = torch.stack([torch.zeros(draws, n).to(weights).scatter_(1, order[:, :m], 1.0) for m in sizes.tolist()], 1)
    masks = masks.flatten(0, 1).mT  # (n, draws * sizes)
    factor = (N / sizes.to(weights)).repeat(draws)
    always, always_squared = (z[..., special].sum(-1, keepdim=True) for z in (weights, squares))
    total, sampled_squares = weights.sum(-1, keepdim=True), squares @ masks
    sampled = always + factor * (weights @ masks)
    second = (always_squared + factor.square() * sampled_squares) / sampled.square()  # sum_j p'_j^2
    cross = (always_squared + factor * sampled_squares) / (sampled * total)  # sum_j p'_j p_j
    errors = second - 2 * cross + squares.sum(-1, keepdim=True) / total.square()
    return errors.mean(-2).unflatten(-1, (draws, -1)).mean(-2)


def logit_sd(logits: Tensor, special: Tensor) -> Tensor:
    """Root mean square over queries of the standard deviation of a query's logits over visible regular keys, (heads,).

    Logits (heads, queries, n) are -inf for keys that a query does not see; special keys (n,) do not count.
    """
    logits = logits[..., ~special]
    is_visible = logits > -torch.inf
    count = is_visible.sum(-1, keepdim=True).clamp(min=1)
    mean = logits.where(is_visible, 0.0).sum(-1, keepdim=True) / count
    variance = (logits - mean).where(is_visible, 0.0).square().sum(-1, keepdim=True) / count
    return variance.double().mean((-2, -1)).sqrt()


def head_rows(columns: dict[str, Tensor]) -> list[dict[str, Any]]:
    """One row per head: its layer, its number, and an entry of every column (layers, heads)."""
    layers, heads = next(iter(columns.values())).shape
    entries = lambda i, h: {name: float(column[i, h]) for name, column in columns.items()}
    return [{"layer": i, "head": h, **entries(i, h)} for i in range(layers) for h in range(heads)]


def gaussian_exponent(sd: Tensor, n: int) -> Tensor:
    """The exponent b of n independent Gaussian logits with standard deviation `sd` (...) and independent values.

    Simulated at powers of two with fixed random numbers, and interpolated in log n and in sd.
    """
    power = max(3.0, math.log2(n))
    below, above = _gaussian_exponents(2 ** math.floor(power)), _gaussian_exponents(2 ** math.ceil(power))
    exponents = below + power % 1 * (above - below)
    return torch.as_tensor(np.interp(sd.double().cpu().numpy(), LOGIT_SDS, exponents))


@functools.cache
def _gaussian_exponents(n: int) -> np.ndarray:
    """The exponents at LOGIT_SDS."""
    z = torch.randn(GAUSSIAN_LOGITS // n, n, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    sizes = sample_sizes(n)
    exponents = [0.5]
    for sd in LOGIT_SDS[1:]:  # the first m logits of a row are a random sample, since all are independent
        weights = (sd * (z - z.amax(-1, keepdim=True))).exp()
        sums, squares = weights.cumsum(-1), weights.square().cumsum(-1)
        sampled, sampled_squares, total = sums[:, sizes - 1], squares[:, sizes - 1], sums[:, -1:]
        errors = sampled_squares * (1 / sampled.square() - 2 / (sampled * total)) + squares[:, -1:] / total.square()
        exponents.append(float(decay_exponent(errors.mean(0), sizes, n)))
    return np.array(exponents)
