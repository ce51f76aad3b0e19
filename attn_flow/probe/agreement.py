"""How well a prediction fits what a layer computes: explained variance leads, the raw cosine flatters.

A constant, the mean output, has explained variance and centred cosine 0, and in a trained encoder a raw cosine of .5
to .9: attention outputs share a large mean.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Agreement:
    """Predictions against what was computed; numbers of one text, or tensors (layers, texts) of many.

    explained: 1 - sum_i |p_i - o_i|^2 / sum_i |o_i - o|^2 with o the text's mean output; at most 1, 0 for the mean.
    centred_cosine: mean over tokens of cos(p_i - p, o_i - o). cosine: mean over tokens of cos(p_i, o_i).
    """

    explained: Tensor
    centred_cosine: Tensor
    cosine: Tensor


def compare(predicted: Tensor, computed: Tensor) -> Agreement:
    """The agreement of one text: predicted and computed outputs, both (n, d), each number ().

    A constant has no direction left when its mean is subtracted: its centred cosine counts as 0.

    >>> out = torch.tensor([[1.0, 0.0], [-1.0, 0.0]])
    >>> float(compare(out / 2, out).explained)
    0.75
    """
    if predicted.shape != computed.shape or computed.ndim != 2:
        raise ValueError(
            f"predicted has shape {tuple(predicted.shape)} and computed {tuple(computed.shape)}, expected (n, d) both."
        )
    predicted, computed = predicted.double(), computed.double()
    p, o = (_centred(x) for x in (predicted, computed))
    explained = 1 - (predicted - computed).square().sum() / o.square().sum()
    return Agreement(explained, _cosine(p, o).mean(), _cosine(predicted, computed).mean())


def misses(predicted: Tensor, computed: Tensor) -> Tensor:
    """How badly each token is missed: |p_i - o_i|^2 over the mean of |o_j - o|^2, (n,). 1: as the mean does."""
    predicted, computed = predicted.double(), computed.double()
    return (predicted - computed).square().sum(-1) / _centred(computed).square().sum(-1).mean()


def _centred(x: Tensor) -> Tensor:
    """x less its mean over tokens; what rounding leaves of a constant is 0."""
    centred = x - x.mean(0)
    noise = 1e-12 * x.norm(dim=-1, keepdim=True).amax()
    return torch.where(centred.norm(dim=-1, keepdim=True) > noise, centred, 0.0)


def _cosine(a: Tensor, b: Tensor) -> Tensor:
    """cos(a_i, b_i), 0 where either has no direction."""
    size = a.norm(dim=-1) * b.norm(dim=-1)
    return torch.where(size > 0, (a * b).sum(-1) / torch.where(size > 0, size, 1.0), 0.0)
