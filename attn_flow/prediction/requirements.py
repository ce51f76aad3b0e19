"""What a prediction assumes, and whether a given attention and cloud meet it: what n tokens resolve, symmetries."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from attn_flow.attention.attention import Attention
from attn_flow.base import checks
from attn_flow.measures.cloud import Cloud, as_cloud
from attn_flow.prediction.rates import Rates, TerminalPhase
from attn_flow.prediction.spectrum import Spectrum

REMEDY = "use a quadrature (attn_flow.measures.quadrature, for d = 2 and 3) or more tokens"


@dataclass(frozen=True)
class Requirement:
    """One assumption of a prediction: its name, its text in words, and whether it is met (None: not checked).

    Example:
        >>> print(Requirement("enough tokens", "n is large", met=False))
        enough tokens (NOT met): n is large
    """

    name: str
    text: str
    met: bool | None = None

    def __str__(self) -> str:
        words = {True: "met", False: "NOT met", None: "not checked"}[self.met]
        return f"{self.name} ({words}): {self.text}"


def requirements(
    spectrum: Spectrum | None, rates: Rates | None, terminal: TerminalPhase | None, has_context: bool
) -> tuple[Requirement, ...]:
    """What a limit map assumes, decided as far as the weights alone can tell."""
    needs = []
    if not has_context:
        needs.append(Requirement("enough tokens", "n tokens resolve the argmax: beta |Gx| n^(-2/(d-1)) <= 1"))
    if not has_context and (spectrum is None or spectrum.case != "stationary"):
        noise = "the sampling error of random tokens is below the effect of temperature: (beta |Gx|)^((d+1)/2) <= n"
        needs.append(Requirement("little sampling noise", noise))
    if spectrum is None:
        rest = "a token has a limit if it comes to rest at a stable equilibrium"
        return (*needs, Requirement("tokens come to rest", rest))
    if spectrum.case == "jordan":
        crossing = "W2 ~ t^(-power) if the masses that cross in both directions differ, 1/t if they are equal"
        needs.append(Requirement("unequal crossing masses", f"{crossing} (even distributions)"))
    if rates is None or terminal is None:
        return tuple(needs)
    density = "rates and t_min hold for a positive, bounded density near Pi x = 0, where tokens linger"
    simple = f"t_min and the exit rate are derived for two limits +-e (dim E = 1); here dim E = {spectrum.dimension}"
    is_simple = spectrum.case == "fixed" and spectrum.dimension == 1
    needs.append(Requirement("bounded density", density))
    if has_context:
        stay = f"t_min needs clusters that leave; here {terminal.reason}: they stay, and W2 has no least value"
        return (*needs, Requirement("clusters leave", stay, False))
    needs.append(Requirement("simple leading eigenvalue", simple, is_simple))
    # What t_min and the exit rate assume. They are None where the first that is not met ends the list.
    if not is_simple or terminal.keeps_E is None:
        return tuple(needs)
    rate, here = terminal.exit_rate, terminal.reason
    invariant = "t_min and the exit rate are derived for V e along the limit direction e"
    if not terminal.keeps_E:
        rest = "Clusters then rest at an angle of order 1/beta from e, for a time that is not derived"
        return (*needs, Requirement("E invariant under V", f"{invariant}; here {here}. {rest}", False))
    if rate is not None:
        here += f" (exit rate {rate:.4g})" if rate else ", and they stay: W2 has no least value"
    leave = f"t_min needs clusters that leave at a known rate; here {here}"
    needs.append(Requirement("E invariant under V", invariant, True))
    needs.append(Requirement("clusters leave", leave, None if rate is None else rate > 0))
    if rate:
        tail = rates.tail / rates.g
        fast = f"min W2 ~ beta^(-1/2) needs the tail to fall at 3 g or faster; here {tail:.3g} g"
        symmetric = "t_min and the exit need a distribution without the mirror symmetry of G and V; others stay"
        needs.append(Requirement("fast tail", fast, tail >= 3 * (1 - 1e-9)))
        needs.append(Requirement("asymmetric distribution", symmetric))
    return tuple(needs)


def check_requirements(
    needs: tuple[Requirement, ...], cloud: Cloud, beta: float | None, attention: Attention, spectrum: Spectrum | None
) -> tuple[Requirement, ...]:
    """The requirements, checked against one cloud (n, d) and beta where that is possible."""
    cloud, attention = cloud.to(torch.float64), attention.to(torch.float64)
    sample = None if beta is None else resolution(attention.with_beta(beta), cloud)
    checked = []
    for need in needs:
        met, words = need.met, ""
        if need.name == "enough tokens" and sample is not None:
            number = float(sample.number.max())
            met, words = number <= 1, f"here {number:.3g}"
        elif need.name == "little sampling noise" and sample is not None and cloud.weights is None:
            noise = float(sample.noise.max())
            met, words = noise <= 1, f"here {noise:.3g} n"
            words += "" if met else f": sampling, not temperature, sets the least W2; {REMEDY}"
        elif need.name == "asymmetric distribution" and spectrum is not None:
            met, words = _asymmetry(attention, spectrum.basis[:, 0].to(cloud.x), cloud)
        checked.append(replace(need, met=met, text=f"{need.text}; {words}" if words else need.text))
    return tuple(checked)


def _asymmetry(attention: Attention, e: Tensor, cloud: Cloud) -> tuple[bool, str]:
    """Whether the cloud breaks the reflection in the direction f in which clusters leave +-e.

    Measured by the mean of <x, f> on either side of E. If G and V do not share the reflection, all clusters leave.
    """
    x, p, V, G = cloud.x, cloud.probabilities, attention.OV[0].detach(), attention.G[0].detach()
    across = torch.linalg.svd(e[None])[2][1:].mT
    growth, vectors = torch.linalg.eig(across.mT @ V @ across)
    fastest = growth.real if float(e @ G @ e) > 0 else growth.real.abs()  # clusters that see their antipode
    f = across @ vectors[:, fastest.argmax()].real
    f = f / f.norm()
    if any(float((A @ f - (f @ A @ f) * f).norm()) > 1e-9 * float(A.norm()) for A in (G, V, G.mT, V.mT)):
        return True, "G and V have no such symmetry"
    odd = torch.stack([(x @ f) * (x @ e > 0), (x @ f) * (x @ e < 0)])
    size, error = (odd @ p).abs(), (odd * p).norm(dim=-1)
    # Random tokens of a symmetric distribution have means of the size of their standard errors.
    threshold = (3 * error if cloud.weights is None else 0 * error).clamp_min(1e-10)
    met, words = bool((size > threshold).any()), f"asymmetry {float(size.max()):.2g}"
    if not met and float(size.max()) > 1e-10:
        words += f", which a sample of a symmetric distribution has by chance; {REMEDY}"
    return met, words


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


def resolution(attention: Attention, x: Tensor | Cloud) -> Resolution:
    """Measure whether n tokens (..., n, d) can follow the mean-field prediction, in memory linear in n.

    The softmax sees a cap of squared radius 1/(beta |G x|), while n tokens on the sphere are n^{-1/(d-1)} apart.
    Random tokens in the cap have a mean that is off by more than the effect of the temperature unless
    n > (beta |G x|)^{(d+1)/2}. Tokens with weights are taken for nodes of a quadrature, which have no such noise.

    Example:
        >>> from attn_flow import Attention, Sphere
        >>> x = Sphere().uniform(1000, 3, generator=torch.Generator().manual_seed(0))
        >>> resolution(Attention.identity(3, beta=10.0), x)
        Resolution(resolved, number up to 0.01, n 1000)
    """
    cloud = as_cloud(x)
    checks.require_shape("x", cloud.x, (attention.dim,))
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
    cold = torch.as_tensor(attention.beta, dtype=tokens.dtype, device=tokens.device) * mean_size
    number = cold * (n[..., None] ** (-2 / (d - 1)) if d > 1 else 0.0)
    noise = cold ** ((d + 1) / 2) / n[..., None]
    worst, chance = float(number.detach().max()), float(noise.detach().max())
    verdict = "resolved" if worst <= 0.1 else "marginal" if worst <= 1 else "unresolved"
    if cloud.weights is None and d > 1 and worst <= 1 < chance:
        verdict = "noisy"
    return Resolution((mass * own).sum(-1), number, n, noise, verdict)
