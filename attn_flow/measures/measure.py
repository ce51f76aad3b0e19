"""Laws of tokens, each with its scaled log-partition and the gradient of it, the tilted mean.

    L_beta[mu](g) = (1/beta) log int e^{beta <g,y>} dmu(y)        (beta = 0: <g, mean>; beta = inf: max over supp)
    m_beta[mu](g) = grad_g L_beta = int y e^{beta <g,y>} dmu / int e^{beta <g,y>} dmu

Self-attention is V m_beta[mu](G x). Here mu is a cloud, the uniform law of a sphere, a Gaussian, an ellipsoid,
or a mixture of any of them; g is (..., m, d), beta a number or a tensor that broadcasts against (..., m).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

from attn_flow.base import checks


class Measure(Protocol):
    """What a law of tokens must answer: any object with these three methods may be attended to."""

    def log_partition(self, g: Tensor, beta: float | Tensor) -> Tensor:
        """L_beta(g), (..., m)."""
        ...

    def tilted_mean(self, g: Tensor, beta: float | Tensor) -> Tensor:
        """m_beta(g) = grad L_beta(g), (..., m, d)."""
        ...

    def to(self, *args: Any, **kwargs: Any) -> Measure:
        """The same law with its tensors moved or cast, as `Tensor.to`."""
        ...


def by_temperature(
    beta: float | Tensor,
    g: Tensor,
    hot: Callable[[], Tensor],
    warm: Callable[[Tensor], Tensor],
    cold: Callable[[], Tensor],
) -> Tensor:
    """hot() where beta = 0, cold() where beta = inf, warm(beta) between: each formula only where it has a meaning.

    A beta below the smallest normal number counts as 0: it cannot be divided by.
    """
    checks.inverse_temperature(beta)
    tiny = torch.finfo(g.dtype).tiny
    if not isinstance(beta, Tensor):
        if beta < tiny:
            return hot()
        return cold() if math.isinf(beta) else warm(torch.as_tensor(beta, dtype=g.dtype, device=g.device))
    b = beta.to(g)
    at_zero, at_inf = b < tiny, torch.isinf(b)
    if not checks.can_look(b) or not bool((at_zero | at_inf).any()):
        return warm(b)
    value = warm(torch.where(at_zero | at_inf, 1.0, b))
    vector = value.ndim > max(b.ndim, g.ndim - 1)  # a mean (..., m, d), or a number (..., m)
    for there, formula in ((at_zero, hot), (at_inf, cold)):
        if bool(there.any()):
            value = torch.where(there[..., None] if vector else there, formula(), value)
    return value
