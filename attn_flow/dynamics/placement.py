"""Where a transformer normalises, as a velocity field made from the attention drift A (arXiv 2510.22026).

With theta = x/|x| and r = |x|, all of them are theta' = (1/s) P_theta A(theta):

    Post-LN     s = 1                                on the sphere
    Pre-LN      s = r,     r' = <theta, A>           x' = A(theta) in R^d
    Peri-LN     s = r|A|,  r' = <theta, A>/|A|       x' = A(theta)/|A(theta)| in R^d
    nGPT        s = |A|/alpha                        on the sphere
    LN-scaling  s = sqrt(t + 1)                      on the sphere
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from attn_flow.attention.fields import Function
from attn_flow.base import checks


@dataclass(frozen=True)
class Placement:
    """velocity(A, t, x) from the drift A(t, x); `flat` ones move the radius too and need Euclidean geometry."""

    name: str
    velocity: Callable[[Function, float, Tensor], Tensor]
    flat: bool = False


def _unit(x: Tensor) -> Tensor:
    return x / x.norm(dim=-1, keepdim=True)


def ngpt(alpha: float = 1.0) -> Placement:
    """Steps of length alpha in the direction of the drift."""
    checks.positive_finite("alpha", alpha)
    return Placement(f"ngpt(alpha={alpha:g})", lambda A, t, x: alpha * _unit(A(t, x)))


post = Placement("post", lambda A, t, x: A(t, x))
pre = Placement("pre", lambda A, t, x: A(t, _unit(x)), flat=True)
peri = Placement("peri", lambda A, t, x: _unit(A(t, _unit(x))), flat=True)
ln_scaling = Placement("ln_scaling", lambda A, t, x: A(t, x) / math.sqrt(t + 1))
