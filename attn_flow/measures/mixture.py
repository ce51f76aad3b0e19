"""Mixtures of measures, which have the same two functions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from attn_flow.base import checks
from attn_flow.kernels.dense import is_infinite
from attn_flow.measures.measure import Measure, as_tensor, over_beta


@dataclass(frozen=True, eq=False, repr=False)
class Mixture:
    """sum_c pi_c mu_c: the mean of the m_c(g) under the tilted weights softmax_c(log pi_c + beta L_c(g)).

    Args:
        components: measures of one dimension d.
        weights: pi, (components,) or (..., components), nonnegative, of any sum.

    Example:
        >>> from attn_flow import Cloud, UniformSphere
        >>> sink = Cloud(torch.tensor([[0.0, 0.0, 5.0]]))
        >>> mu = Mixture([sink, UniformSphere(3)], weights=torch.tensor([0.1, 0.9]))
        >>> mu
        Mixture(Cloud, UniformSphere)
        >>> mu.responsibilities(torch.tensor([[0.0, 0.0, 1.0]]), beta=1.0)  # the sink has nearly all of the weight
        tensor([[0.9335, 0.0665]])
    """

    components: Sequence[Measure]
    weights: Tensor

    def __post_init__(self) -> None:
        checks.require_tensor("weights", self.weights)
        if len(self.components) == 0 or self.weights.shape[-1:] != (len(self.components),):
            raise ValueError(
                f"weights have shape {tuple(self.weights.shape)} for {len(self.components)} components, "
                "expected one weight per component and at least one component."
            )
        w = self.weights.detach()
        is_valid = w.isfinite() & (w >= 0) & (w > 0).any(-1, keepdim=True)
        checks.require(is_valid, "weights must be finite and nonnegative, with a positive one in every mixture.")

    def __repr__(self) -> str:
        names = [type(mu).__name__ for mu in self.components]
        return f"Mixture({', '.join(names[:6])}{', ...' if len(names) > 6 else ''})"

    def to(self, *args: Any, **kwargs: Any) -> Mixture:
        """The same measure with its tensors moved or cast, as `Tensor.to`."""
        return Mixture([mu.to(*args, **kwargs) for mu in self.components], self.weights.to(*args, **kwargs))

    def log_partition(self, g: Tensor, beta: float | Tensor) -> Tensor:
        """L_beta(g) = (1/beta) log sum_c pi_c e^{beta L_c(g)}, (..., m), for queries g (..., m, d)."""
        L, log_pi = self._tilt(g, beta)
        if is_infinite(beta):
            return torch.where(log_pi.isneginf(), -torch.inf, L).amax(-1).to(g.dtype)
        mean = (log_pi.exp() * L).sum(-1)
        b, centred = as_tensor(beta, L), L - mean[..., None]
        log_mean = (b[..., None] * centred + log_pi).logsumexp(-1)
        return (mean + over_beta(log_mean, b, centred.abs().amax(-1))).to(g.dtype)

    def tilted_mean(self, g: Tensor, beta: float | Tensor) -> Tensor:
        """m_beta(g), the mean of the components' under their tilted weights, (..., m, d)."""
        means = torch.stack([mu.tilted_mean(g, beta) for mu in self.components], dim=-1)
        return (means * self.responsibilities(g, beta)[..., None, :]).sum(-1)

    def responsibilities(self, g: Tensor, beta: float | Tensor) -> Tensor:
        """The tilted weights of the components, (..., m, components); ties are shared at beta = inf."""
        L, log_pi = self._tilt(g, beta)
        if is_infinite(beta):
            visible = torch.where(log_pi.isneginf(), -torch.inf, L)
            logits = torch.where(visible >= visible.amax(-1, keepdim=True), log_pi, -torch.inf)
        else:
            logits = as_tensor(beta, L)[..., None] * L + log_pi
        return logits.softmax(-1).to(g.dtype)

    def _tilt(self, g: Tensor, beta: float | Tensor) -> Sequence[Tensor]:
        """The components' L_c(g) and log pi_c, each (..., m, components).

        They are computed in float64: beta multiplies their differences, which float32 does not resolve when cold.
        """
        g = g.double()
        L = torch.stack([mu.to(torch.float64).log_partition(g, beta) for mu in self.components], dim=-1)
        pi = self.weights.to(g)
        pi = pi / pi.detach().amax(-1, keepdim=True)  # so that the sum cannot overflow
        pi = pi / pi.sum(-1, keepdim=True)
        return torch.broadcast_tensors(L, pi.log()[..., None, :])
