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
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from attn_flow.attention.fields import Field, Velocity
from attn_flow.base import checks
from attn_flow.measures.cloud import Cloud


@dataclass(frozen=True, eq=False)
class Transformed(Field):
    """A field whose drift F is changed token by token: (t, x) -> transform(F, t, x).

    Args:
        field: the field F.
        transform: a function of the drift (t, x) -> F(t, x), the time and the tokens.
        name: what a trajectory stores.
        needs_euclidean: whether tokens leave the sphere.
        sees_unit_tokens: whether F is evaluated at x / |x|.
    """

    field: Field
    transform: Callable[[Velocity, float, Tensor], Tensor]
    name: str
    needs_euclidean: bool = False
    sees_unit_tokens: bool = False

    def __call__(self, t: float, x: Tensor, log_weights: Tensor | None = None) -> Tensor:
        return self.transform(lambda s, y: self.field(s, y, log_weights), t, x)

    def summary(self) -> dict[str, Any]:
        return {"transform": self.name, "field": self.field.summary()}

    def check_cloud(self, cloud: Cloud, t: float = 0.0) -> torch.Size:
        return self.field.check_cloud(cloud, t)

    def logit_bound(self, radius: float | Tensor, times: Sequence[float] = (0.0,)) -> Tensor:
        return self.field.logit_bound(1.0 if self.sees_unit_tokens else radius, times)

    def in_float64(self) -> Field:
        return replace(self, field=self.field.in_float64())

    @property
    def jumps(self) -> tuple[float, ...]:  # type: ignore[override]
        return self.field.jumps

    def piece(self, start: float, end: float) -> Field:
        return replace(self, field=self.field.piece(start, end)) if self.jumps else self

    @property
    def not_exchangeable_because(self) -> tuple[str, ...]:
        return self.field.not_exchangeable_because


def pre_norm(field: Field) -> Transformed:
    """x' = A(x / |x|) in R^d: the attention sees normalised tokens, the residual stream is not normalised."""
    return Transformed(field, lambda A, t, x: A(t, _unit(x)), "pre_norm", True, True)


def peri_norm(field: Field) -> Transformed:
    """x' = A / |A| at x / |x|, in R^d: normalisation before and after the attention."""
    return Transformed(field, lambda A, t, x: _unit(A(t, _unit(x))), "peri_norm", True, True)


def ngpt(field: Field, alpha: float = 1.0) -> Transformed:
    """x' = alpha A / |A| on the sphere: steps of length alpha in the direction of the drift."""
    checks.require_positive(alpha=alpha)
    return Transformed(field, lambda A, t, x: alpha * _unit(A(t, x)), f"ngpt(alpha={alpha:g})")


def layer_norm_scaling(field: Field) -> Transformed:
    """x' = A / sqrt(t + 1) on the sphere: the drift of deeper layers is scaled down."""
    return Transformed(field, lambda A, t, x: A(t, x) / math.sqrt(t + 1), "layer_norm_scaling")


def _unit(x: Tensor) -> Tensor:
    return x / x.norm(dim=-1, keepdim=True)
