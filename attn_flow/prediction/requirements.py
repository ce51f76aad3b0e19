"""What a prediction assumes, and whether a given attention and cloud meet it."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from attn_flow.attention import Attention
from attn_flow.measures import Cloud
from attn_flow.prediction.finite_n import resolution
from attn_flow.prediction.rates import Rates
from attn_flow.prediction.spectrum import Spectrum
from attn_flow.prediction.terminal import TerminalPhase


class PredictionWarning(UserWarning):
    """A cloud does not meet what a prediction requires, so that the prediction need not hold."""


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


ASSUMPTIONS = {
    "tokens come to rest": "the limit of a token is known where it comes to rest at a stable equilibrium",
    "enough tokens": "n tokens resolve the argmax: beta |Gx| n^(-2/(d-1)) <= 1",
    "little sampling noise": "the sampling error of random tokens is below the effect of temperature: "
    "(beta |Gx|)^((d+1)/2) <= n",
    "off the border": "no token has Pi x = 0, as those of ker G have; its limit would be decided by rounding",
    "unequal crossing masses": "W2 ~ t^(-power) if the masses that cross in both directions differ, 1/t if they are "
    "equal (even distributions)",
    "bounded density": "rates and t_min hold for a positive, bounded density near Pi x = 0, where tokens linger",
    "simple leading eigenvalue": "t_min and the exit rate are derived for two limits +-e (dim E = 1)",
    "E invariant under V": "t_min and the exit rate are derived for V e along the limit direction e",
    "clusters leave": "t_min needs clusters that leave at a known rate",
    "fast tail": "min W2 ~ beta^(-1/2) needs the tail to fall at 3 g or faster",
    "asymmetric distribution": "t_min and the exit need a distribution without the mirror symmetry of G and V: a "
    "symmetric one stays",
}


def _assume(name: str, met: bool | None = None, here: str = "") -> Requirement:
    """The assumption of this name, with what is the case here."""
    return Requirement(name, ASSUMPTIONS[name] + (f"; here {here}" if here else ""), met)


def requirements(
    spectrum: Spectrum | None, rates: Rates | None, terminal: TerminalPhase | None
) -> tuple[Requirement, ...]:
    """What a limit map assumes, decided as far as the weights alone can tell."""
    if spectrum is None:
        return (_assume("tokens come to rest"),)
    names = ["enough tokens"]
    names += [] if spectrum.case == "stationary" else ["little sampling noise", "off the border"]
    names += ["unequal crossing masses"] * (spectrum.case == "jordan") + ["bounded density"] * (rates is not None)
    needs = [_assume(name) for name in names]
    if rates is None or terminal is None:
        return tuple(needs)
    # What t_min and the exit rate assume. They are None where the first that is not met ends the list.
    is_simple, rate = spectrum.case == "fixed" and spectrum.dimension == 1, terminal.exit_rate
    needs.append(_assume("simple leading eigenvalue", is_simple, f"dim E = {spectrum.dimension}"))
    if not is_simple or terminal.keeps_E is None:
        return tuple(needs)
    if not terminal.keeps_E:
        rest = "Clusters then rest at an angle of order 1/beta from e, for a time that is not derived"
        return (*needs, _assume("E invariant under V", False, f"{terminal.reason}. {rest}"))
    here = terminal.reason
    if rate is not None:
        here += f" (exit rate {rate:.4g})" if rate else ", and they stay: W2 has no least value"
    needs += [_assume("E invariant under V", True), _assume("clusters leave", None if rate is None else rate > 0, here)]
    if rate:
        tail = rates.tail / rates.g
        needs += [_assume("fast tail", tail >= 3 * (1 - 1e-9), f"{tail:.3g} g"), _assume("asymmetric distribution")]
    return tuple(needs)


def check_requirements(
    needs: tuple[Requirement, ...], cloud: Cloud, beta: float | None, attention: Attention, spectrum: Spectrum | None
) -> tuple[Requirement, ...]:
    """The requirements, checked against one cloud (n, d) and beta where that is possible."""
    if spectrum is None:
        return needs
    eps, names = torch.finfo(cloud.x.dtype).eps, {need.name for need in needs}
    cloud, attention, Pi = cloud.to(torch.float64), attention.to(torch.float64), spectrum.direction.to(cloud.x.device)
    x = cloud.x
    is_rounding = (x @ Pi.mT).norm(dim=-1) <= eps * (x.abs() @ Pi.abs().mT).norm(dim=-1)
    count = int((is_rounding & (cloud.probabilities > 0)).sum())
    answers = {"off the border": (count == 0, f"{count} of {len(x)} here"), "bounded density": _density(Pi, cloud)}
    if beta is not None:
        sample = resolution(attention, cloud, beta=beta, warn=False)
        number, noise = float(sample.number.max()), float(sample.noise.max())
        answers["enough tokens"] = (number <= 1, f"here {number:.3g}")
        if cloud.weights is None:
            words = "" if noise <= 1 else f": sampling, not temperature, sets the least W2; {_remedy(cloud)}"
            answers["little sampling noise"] = (noise <= 1, f"here {noise:.3g} n{words}")
    if "asymmetric distribution" in names:
        answers["asymmetric distribution"] = _asymmetry(attention, spectrum.basis[:, 0].to(x), cloud)
    checked = []
    for need in needs:
        met, words = answers.get(need.name, (None, ""))
        checked.append(replace(need, met=met, text=f"{need.text}; {words}") if words else need)
    return tuple(checked)


def _remedy(cloud: Cloud) -> str:
    return "use " + "a quadrature (attn_flow.measures.quadrature) or " * (cloud.x.shape[-1] <= 3) + "more tokens"


def _density(Pi: Tensor, cloud: Cloud) -> tuple[bool | None, str]:
    """Compare the mass near Pi x = 0, where tokens linger, with that of a flat density; a factor of 2 counts as met.

    A flat density has 4^{-k}/2 of its mass where |Pi x| is within a quarter of its median, k the rank of Pi.
    """
    size, order = (cloud.x @ Pi.mT).norm(dim=-1).sort()
    p = cloud.probabilities[order]
    median = size[int((p.cumsum(0) < 0.5).sum())]
    share, flat = float(p[size < median / 4].sum()), 0.5 / 4 ** int(torch.linalg.matrix_rank(Pi))
    if flat / float(p.square().sum()) < 15:
        return None, "too few tokens to say"
    return flat / 2 < share < 2 * flat, f"share {share:.2g} there, {flat:.2g} if it is flat"


def _asymmetry(attention: Attention, e: Tensor, cloud: Cloud) -> tuple[bool, str]:
    """Whether the cloud breaks the reflection in the direction f in which clusters leave +-e.

    Measured by the mean of <x, f> on either side of E. If G and V do not share the reflection, clusters of every
    distribution leave.
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
    threshold = (3 * error).clamp_min(1e-10) if cloud.weights is None else torch.full_like(error, 1e-10)
    met, words = bool((size > threshold).any()), f"asymmetry {float(size.max()):.2g}"
    if not met and float(size.max()) > 1e-10:
        words += f", which a sample of a symmetric distribution has by chance; {_remedy(cloud)}"
    return met, words
