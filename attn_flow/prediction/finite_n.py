"""Can n tokens follow the mean-field prediction? It takes an argmax over the whole support; a cloud over n points."""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass

import torch
from torch import Tensor

from attn_flow.attention import Attention
from attn_flow.attention.multihead import attention_alone
from attn_flow.base import checks


class ResolutionWarning(UserWarning):
    """The cloud has too few tokens for this beta and dimension: the mean-field prediction need not hold."""


@dataclass(frozen=True, eq=False, repr=False)
class Resolution:
    """Whether n tokens resolve the argmax that the mean-field prediction takes over the whole support."""

    self_argmax: Tensor  # (..., heads) fraction of tokens that are their own argmax of <G x, y>
    number: Tensor  # (..., heads) beta |G x| n^{-2/(d-1)}, mean over tokens; <~ 1 is resolved
    n: Tensor  # (...,) effective number of tokens 1 / sum w^2
    noise: Tensor  # (..., heads) (beta |G x|)^{(d+1)/2} / n; above 1 chance outweighs temperature in a sample
    verdict: str  # "resolved", "marginal", "noisy" (a sample) or "unresolved", of the worst cloud and head

    def __repr__(self) -> str:
        return f"Resolution({self.verdict}, number up to {float(self.number.max()):.3g}, n {float(self.n.min()):.4g})"


def resolution(
    attention: Attention,
    x: Tensor,
    *,
    weights: Tensor | None = None,
    mask: Tensor | None = None,
    beta: float | Tensor | None = None,
    warn: bool = True,
) -> Resolution:
    """Whether n tokens can follow the mean-field prediction, in memory linear in n.

    The softmax sees logits within O(1) of the maximum, a cap of tokens of squared radius 1/(beta |G x|), while n tokens
    on S^{d-1} are n^{-1/(d-1)} apart (THEORY 1, finite n).

    That cap holds m ~ n (beta |G x|)^{-(d-1)/2} of n random tokens. Their mean is off by (beta |G x| m)^{-1/2}, which
    exceeds what the temperature does, 1/(beta |G x|), unless n > (beta |G x|)^{(d+1)/2}: below, another sample of the
    same law goes elsewhere ("noisy"). Tokens with weights are taken for nodes of a quadrature, without such noise.

    Args:
        attention: who attends to whom.
        x: the cloud (..., n, d).
        weights, mask: (..., n), as in `Cloud`.
        beta: 0 <= beta <= inf in place of the attention's own; a number, or a tensor (..., heads).
        warn: where unresolved (number > 1), warn by name (`ResolutionWarning`).

    Returns:
        A `Resolution`: the number beta |G x| n^{-2/(d-1)}, how many tokens are their own argmax, the noise of a
        sample, and a verdict.

    Example:
        >>> from attn_flow import Attention, Sphere
        >>> x = Sphere().uniform(1000, 3, generator=torch.Generator().manual_seed(0))
        >>> resolution(Attention.identity(3, beta=10.0), x)
        Resolution(resolved, number up to 0.01, n 1000)
    """
    attention_alone("resolution", attention)
    checks.tokens("x", x)
    if attention.kind in ("linear", "relu", "sigmoid"):
        raise ValueError(
            f"attention of kind {attention.kind!r} sees every token at any beta; expected a softmax, whose caps shrink."
        )
    if beta is not None:
        checks.inverse_temperature(beta)
    cloud = attention.cloud(x, weights, mask)
    p = cloud.probabilities
    beta = attention.beta if beta is None else beta
    b = torch.as_tensor(beta, dtype=x.dtype, device=x.device)
    d = x.shape[-1]
    n = p.square().sum(-1).reciprocal()
    shown = p > 0
    own, number, noise = [], [], []
    for h in range(attention.heads):
        g = x @ attention.G[..., h, :, :].mT
        if attention.G_bias is not None:
            g = g + attention.G_bias[..., h, None, :]
        top = cloud.log_partition(g, math.inf)
        slack = 16 * torch.finfo(x.dtype).eps * g.norm(dim=-1) * x.norm(dim=-1).amax(-1, keepdim=True)
        own.append((p * ((g * x).sum(-1) >= top - slack)).sum(-1))
        reach = (p * torch.where(shown, g.norm(dim=-1) * x.norm(dim=-1), 0.0)).sum(-1)
        spacing = n ** (-2 / (d - 1)) if d > 1 else torch.zeros_like(n)
        cold = (b[..., h] if b.ndim and b.shape[-1] > 1 else b[..., 0] if b.ndim else b) * reach
        number.append(cold * spacing)
        noise.append(cold ** ((d + 1) / 2) / n)
    numbers, noises = torch.stack(number, dim=-1), torch.stack(noise, dim=-1)
    worst, chance = float(numbers.detach().max()), float(noises.detach().max())
    verdict = "resolved" if worst <= 0.1 else "marginal" if worst <= 1 else "unresolved"
    if weights is None and d > 1 and worst <= 1 < chance:
        verdict = "noisy"
    found = Resolution(torch.stack(own, dim=-1), numbers, n, noises, verdict)
    if warn and verdict == "unresolved":
        warnings.warn(
            f"beta |Gx| n^(-2/(d-1)) = {worst:.3g} > 1 with n = {float(n.min()):.0f}, d = {d}: "
            f"{float(found.self_argmax.max()):.0%} of tokens are their own argmax; the mean-field limit need not hold. "
            "Use more tokens, a smaller beta, or a weighted quadrature cloud (d = 2, 3).",
            ResolutionWarning,
            stacklevel=2,
        )
    return found
