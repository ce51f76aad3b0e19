"""Where a transformer normalises its tokens (arXiv 2510.22026), as a change of the drift of its attention.

With theta = x / |x|, r = |x| and the drift A of the attention, all of them are theta' = (1/s) P_theta A(theta):

    post-norm           s = 1                                the field itself, on the sphere
    pre_norm            s = r,     r' = <theta, A>           x' = A(theta) in R^d
    peri_norm           s = r|A|,  r' = <theta, A>/|A|       x' = A(theta)/|A(theta)| in R^d
    ngpt                s = |A|/alpha                        on the sphere
    layer_norm_scaling  s = sqrt(t + 1)                      on the sphere
"""

from __future__ import annotations

import math

from torch import Tensor

from attn_flow.attention.fields import Field, Transformed
from attn_flow.base import checks


def pre_norm(field: Field) -> Transformed:
    """x' = A(x / |x|) in R^d: the attention sees normalised tokens, the residual stream is not normalised."""
    return Transformed(field, lambda A, t, x: A(t, _unit(x)), "pre_norm", needs_euclidean=True, input_radius=1.0)


def peri_norm(field: Field) -> Transformed:
    """x' = A / |A| at x / |x|, in R^d: normalisation before and after the attention."""
    transform = lambda A, t, x: _unit(A(t, _unit(x)))
    return Transformed(field, transform, "peri_norm", needs_euclidean=True, input_radius=1.0)


def ngpt(field: Field, alpha: float = 1.0) -> Transformed:
    """x' = alpha A / |A| on the sphere: steps of length alpha in the direction of the drift."""
    checks.require_positive(alpha=alpha)
    return Transformed(field, lambda A, t, x: alpha * _unit(A(t, x)), f"ngpt(alpha={alpha:g})")


def layer_norm_scaling(field: Field) -> Transformed:
    """x' = A / sqrt(t + 1) on the sphere: the drift of deeper layers is scaled down."""
    return Transformed(field, lambda A, t, x: A(t, x) / math.sqrt(t + 1), "layer_norm_scaling")


def _unit(x: Tensor) -> Tensor:
    return x / x.norm(dim=-1, keepdim=True)
