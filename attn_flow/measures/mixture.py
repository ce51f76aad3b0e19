"""Mixtures of measures, closed under the same two calls."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from attn_flow.averages import dense
from attn_flow.base import checks
from attn_flow.base.words import brief
from attn_flow.measures.measure import Measure, by_temperature


@dataclass(frozen=True, eq=False, repr=False)
class Mixture:
    """sum_c pi_c mu_c: tilted weights softmax_c(log pi_c + beta L_c(g)), mean their mean of the m_c(g).

    components: measures of one dimension d. weights: pi, (components,) or (..., components), nonnegative, of any total.

    >>> import torch
    >>> from attn_flow import Cloud, UniformSphere
    >>> sink = Cloud(torch.tensor([[0.0, 0.0, 5.0]]))
    >>> mu, g = Mixture([sink, UniformSphere(3)], weights=torch.tensor([0.1, 0.9])), torch.tensor([[0.0, 0.0, 1.0]])
    >>> mu
    Mixture(2 components: Cloud, UniformSphere; weights=float32 (2,))
    >>> mu.responsibilities(g, beta=1.0)  # the sink takes nearly all of this query's attention
    tensor([[0.9335, 0.0665]])
    """

    components: Sequence[Measure]
    weights: Tensor

    def __post_init__(self) -> None:
        checks.tensor("weights", self.weights, "(..., components)")
        if not isinstance(self.components, Sequence):
            raise ValueError(f"components is a {type(self.components).__name__}, expected a list of measures.")
        odd = [mu for mu in self.components if not hasattr(mu, "tilted_mean")]
        if odd:
            raise ValueError(f"components hold a {type(odd[0]).__name__}, expected measures.")
        if len(self.components) == 0 or 0 in self.weights.shape or self.weights.shape[-1:] != (len(self.components),):
            raise ValueError(
                f"weights have shape {tuple(self.weights.shape)} for {len(self.components)} components, "
                "expected one weight per component and at least one component."
            )
        checks.masses(self.weights, of="mixture")

    def __repr__(self) -> str:
        names = [type(mu).__name__ for mu in self.components]
        shown = ", ".join(names[:6]) + (", ..." if len(names) > 6 else "")
        return f"Mixture({len(names)} components: {shown}; weights={brief(self.weights)})"

    def to(self, *args: Any, **kwargs: Any) -> Mixture:
        """The same law with its tensors moved or cast, as `Tensor.to`."""
        checks.moves(*args, **kwargs)
        return Mixture([mu.to(*args, **kwargs) for mu in self.components], self.weights.to(*args, **kwargs))

    def log_partition(self, g: Tensor, beta: float | Tensor) -> Tensor:
        """L_beta(g) = (1/beta) log sum_c pi_c e^{beta L_c(g)}, (..., m), for queries g (..., m, d)."""
        L, log_pi = self._tilt(g, beta)
        log_partition = by_temperature(
            beta,
            g.double(),
            hot=lambda: (log_pi.exp() * L).sum(-1),
            warm=lambda b: _log_mean_exp(L, log_pi, b),
            cold=lambda: torch.where(log_pi.isneginf(), -torch.inf, L).amax(-1),
        )
        return log_partition.to(g.dtype)

    def tilted_mean(self, g: Tensor, beta: float | Tensor) -> Tensor:
        """m_beta(g), the mean of the components' under their tilted weights, (..., m, d)."""
        means = torch.stack([mu.tilted_mean(g, beta) for mu in self.components], dim=-1)
        return (means * self.responsibilities(g, beta)[..., None, :]).sum(-1)

    def responsibilities(self, g: Tensor, beta: float | Tensor) -> Tensor:
        """The tilted weights of the components, (..., m, components); ties are shared at beta = inf."""
        L, log_pi = self._tilt(g, beta)

        def cold() -> Tensor:
            shown = torch.where(log_pi.isneginf(), -torch.inf, L)
            top = shown >= shown.amax(-1, keepdim=True)
            return torch.where(top, log_pi, -torch.inf).softmax(-1)

        warm = lambda b: (b[..., None] * L + log_pi).softmax(-1)
        return by_temperature(beta, g.double(), log_pi.exp, warm, cold).to(g.dtype)

    def _tilt(self, g: Tensor, beta: float | Tensor) -> tuple[Tensor, Tensor]:
        """The components' L_c(g) and log pi_c, each (..., m, components).

        In float64 whatever g is: beta multiplies their differences, and at beta = 1e6 float32 has no digits left.
        """
        checks.floating("g", g, "(..., m, d)")
        g = g.double()
        L = torch.stack([mu.to(torch.float64).log_partition(g, beta) for mu in self.components], dim=-1)
        pi = self.weights.to(g)
        pi = pi / pi.detach().amax(-1, keepdim=True)  # whose sum may overflow
        pi = pi / pi.sum(-1, keepdim=True)
        return L, pi.log()[..., None, :].expand(L.shape)


def _log_mean_exp(L: Tensor, log_pi: Tensor, b: Tensor) -> Tensor:
    """(1/b) log sum_c pi_c e^{b L_c}, centred so that a small b does not cancel the digits of the mean."""
    mean = (log_pi.exp() * L).sum(-1)
    return mean + dense.log_mean_of_exp(b[..., None] * (L - mean[..., None]), log_pi.exp()) / b
