"""Whether n tokens can follow the mean-field prediction, which takes an argmax over the whole support."""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass

import torch
from torch import Tensor

from attn_flow.attention import Attention
from attn_flow.base import checks
from attn_flow.measures import Cloud, as_cloud


class ResolutionWarning(UserWarning):
    """The cloud has too few tokens for this beta and dimension: the mean-field prediction need not hold."""


@dataclass(frozen=True, eq=False, repr=False)
class Resolution:
    """How well n tokens resolve the argmax of the mean-field prediction.

    Attributes:
        self_argmax: (..., heads), the fraction of tokens that are their own argmax of <G x, y>.
        number: (..., heads), beta |G x| n^{-2/(d-1)}, averaged over tokens; at most about 1 if resolved.
        n: (...), the effective number of tokens 1 / sum w^2.
        noise: (..., heads), (beta |G x|)^{(d+1)/2} / n; above 1 the sampling error exceeds the effect of temperature.
        verdict: "resolved", "marginal", "noisy" (a random sample) or "unresolved", of the worst cloud and head.
    """

    self_argmax: Tensor
    number: Tensor
    n: Tensor
    noise: Tensor
    verdict: str

    def __repr__(self) -> str:
        return f"Resolution({self.verdict}, number up to {float(self.number.max()):.3g}, n {float(self.n.min()):.4g})"


def resolution(
    attention: Attention, x: Tensor | Cloud, *, beta: float | Tensor | None = None, warn: bool = True
) -> Resolution:
    """Measure whether n tokens can follow the mean-field prediction, in memory linear in n.

    The softmax sees a cap of squared radius 1/(beta |G x|), while n tokens on the sphere are n^{-1/(d-1)} apart.
    Random tokens in the cap have a mean that is off by more than the effect of the temperature unless
    n > (beta |G x|)^{(d+1)/2}. Tokens with weights are taken for nodes of a quadrature, which have no such noise.

    Args:
        attention: an `Attention`.
        x: tokens (..., n, d), or a `Cloud`.
        beta: an inverse temperature in place of the attention's own: a number, or a tensor (..., heads).
        warn: warn (`ResolutionWarning`) if the cloud is unresolved, number > 1.

    Returns:
        A `Resolution`.

    Example:
        >>> from attn_flow import Attention, Sphere
        >>> x = Sphere().uniform(1000, 3, generator=torch.Generator().manual_seed(0))
        >>> resolution(Attention.identity(3, beta=10.0), x)
        Resolution(resolved, number up to 0.01, n 1000)
    """
    cloud = as_cloud(x)
    checks.require_shape("x", cloud.x, (attention.dim,))
    beta = attention.beta if beta is None else beta
    checks.require_beta(beta)
    tokens, p = cloud.x, cloud.probabilities
    attention, d = attention.to(tokens.dtype), tokens.shape[-1]
    n = p.square().sum(-1).reciprocal()
    g = torch.einsum("...hij,...nj->...hni", attention.G.to(tokens), tokens)  # (..., heads, n, d)
    if attention.G_bias is not None:
        g = g + attention.G_bias[..., None, :]
    size, radius = g.norm(dim=-1), tokens.norm(dim=-1)[..., None, :]
    top = torch.stack([cloud.log_partition(head, math.inf) for head in g.unbind(-3)], dim=-2)
    rounding = 16 * torch.finfo(tokens.dtype).eps * size * radius.amax(-1, keepdim=True)
    own = (g * tokens[..., None, :, :]).sum(-1) >= top - rounding
    mass = p[..., None, :]
    mean_size = torch.where(mass > 0, mass * size * radius, 0.0).sum(-1)  # (..., heads)
    cold = torch.as_tensor(beta, dtype=tokens.dtype, device=tokens.device) * mean_size
    number = cold * (n[..., None] ** (-2 / (d - 1)) if d > 1 else 0.0)
    noise = cold ** ((d + 1) / 2) / n[..., None]
    worst, chance = float(number.detach().max()), float(noise.detach().max())
    verdict = "resolved" if worst <= 0.1 else "marginal" if worst <= 1 else "unresolved"
    if cloud.weights is None and d > 1 and worst <= 1 < chance:
        verdict = "noisy"
    result = Resolution((mass * own).sum(-1), number, n, noise, verdict)
    if warn and verdict == "unresolved":
        warnings.warn(
            f"beta |Gx| n^(-2/(d-1)) = {worst:.3g} > 1 with n = {float(n.min()):.0f}, d = {d}: the mean-field limit "
            "need not hold. Use more tokens, a smaller beta, or a weighted quadrature cloud (d = 2, 3).",
            ResolutionWarning,
            stacklevel=2,
        )
    return result
