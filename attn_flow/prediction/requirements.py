"""What a prediction assumes, and whether a given cloud meets it."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from attn_flow.attention import Attention
from attn_flow.measures import Cloud
from attn_flow.prediction.finite_n import resolution


@dataclass(frozen=True)
class Requirement:
    """One assumption. met: True or False where it could be checked, None where not (no cloud, or no way to tell)."""

    name: str
    text: str
    met: bool | None = None

    def __str__(self) -> str:
        return f"{self.name} ({ {True: 'met', False: 'NOT met', None: 'not checked'}[self.met] }): {self.text}"


class Limit(Protocol):
    """What is asked here of a `LimitMap`: its case and spectrum, by the same names."""

    @property
    def attention(self) -> Attention: ...
    @property
    def case(self) -> str: ...
    @property
    def tol(self) -> float: ...
    @property
    def dimension(self) -> int | None: ...
    @property
    def leading(self) -> float | None: ...
    @property
    def frequencies(self) -> tuple[float, ...]: ...
    @property
    def g(self) -> float | None: ...
    @property
    def exit_rate(self) -> float | None: ...
    @property
    def basis(self) -> Tensor | None: ...
    @property
    def direction(self) -> Tensor | None: ...
    @property
    def requires(self) -> tuple[Requirement, ...]: ...


def assumed(limit: Limit) -> tuple[Requirement, ...]:
    """What the weights alone say; `examined` looks at a cloud too."""
    if limit.case == "nonlinear":
        return (Requirement("certificates", "limits hold token by token, where `settle` certifies them"),)
    found = [Requirement("large n", "n tokens show the support as the argmax sees it: beta |Gx| n^{-2/(d-1)} <= 1")]
    if limit.case == "undefined":
        found.append(Requirement("outside ker G", "no token lies in ker G, where the drift is undefined"))
    if limit.case == "stationary":
        return tuple(found)
    text = "a random sample shows the temperature, not its own chance: (beta |Gx|)^{(d+1)/2} <= n"
    found.append(Requirement("little noise", text))
    found.append(Requirement("off the border", "no token has Pi x = 0: its limit is decided by rounding"))
    if limit.case == "fixed" and limit.dimension is not None:
        simple = f"exit rate and layer are derived for dim E = 1; here it is {limit.dimension}"
        found.append(Requirement("simple leading eigenvalue", simple, limit.dimension == 1))
    if limit.g is not None and limit.case in ("fixed", "rotating"):
        text = "rates and t_min are those of laws with a density that is positive where tokens linger"
        found.append(Requirement("bounded density", text))
    if limit.case == "jordan":
        text = "W2 ~ t^{-1/2} where the two masses that still cross differ, 1/t where they are equal (an even law)"
        found.append(Requirement("unequal crossing masses", text))
    if limit.exit_rate:
        text = "t_min and the exit need a law without the reflection symmetry of G and V; a symmetric one never leaves"
        found.append(Requirement("asymmetric law", text))
    return tuple(found)


def examined(
    limit: Limit, x: Tensor, weights: Tensor | None, mask: Tensor | None, beta: float | None
) -> tuple[Requirement, ...]:
    """The same, checked against the cloud x (n, d) and beta where that is possible."""
    cloud = Cloud(x.detach(), weights, mask).to(torch.float64)
    p, y = cloud.probabilities, cloud.x
    attention = limit.attention.to(torch.float64)
    seen = None if beta is None else resolution(attention, y, weights=p, beta=beta, warn=False)
    found = []
    for need in limit.requires:
        met, text = need.met, need.text
        if need.name == "large n" and seen is not None:
            met, text = seen.verdict != "unresolved", f"{text}; here {float(seen.number.max()):.3g}"
        if need.name == "little noise" and seen is not None and weights is None:
            noise = float(seen.noise.max())
            met, text = noise <= 1, f"{text}; here {noise:.3g} n"
            text = text if met else f"{text}: sampling, not temperature, sets the smallest W2; {remedy(y.shape[-1])}"
        if need.name in ("off the border", "outside ker G") and limit.direction is not None:
            A = limit.direction if need.name == "off the border" else attention.G[0]
            A = A.to(y)
            rounding = torch.finfo(x.dtype).eps * (y.abs() @ A.abs().mT).norm(dim=-1)
            bad = int((((y @ A.mT).norm(dim=-1) <= rounding) & (p > 0)).sum())
            met, text = bad == 0, f"{text}; {bad} of {len(y)} here"
        if need.name == "bounded density":
            met, text = _density(limit, y, p, text)
        if need.name == "unequal crossing masses":
            met, text = _crossing(limit, y, p, text)
        if need.name == "asymmetric law":
            moments = _odd_moments(limit, y, p)
            if moments is not None:
                size, chance = moments
                least = 1e-10 if weights is not None else (3 * chance).clamp_min(1e-10)
                met, text = bool((size > least).any()), f"{text}; asymmetry {float(size.max()):.2g}"
                if not met and float(size.max()) > 1e-10:
                    text += f", which a sample of a symmetric law has by chance; {remedy(y.shape[-1])}"
        found.append(replace(need, met=met, text=text))
    return tuple(found)


def _density(limit: Limit, y: Tensor, p: Tensor, text: str) -> tuple[bool | None, str]:
    """Mass near Pi x = 0, where tokens linger: |Pi x| within a quarter of its median, which a flat density has with
    share 4^{-k}/2. Within a factor of 2 counts as met; None where fewer than 15 tokens are expected there."""
    assert limit.direction is not None  # as every limit with a rate has them
    assert limit.dimension is not None
    size = (y @ limit.direction.to(y).mT).norm(dim=-1)
    order = size.argsort()
    median = size[order[int((p[order].cumsum(0) < 0.5).sum())]]
    share, flat = float(p[size < median / 4].sum()), 0.5 / 4**limit.dimension
    if flat / float(p.square().sum()) < 15:
        return None, text
    return flat / 2 < share < 2 * flat, f"{text}; share {share:.2g} there, {flat:.2g} if it is flat"


def _crossing(limit: Limit, y: Tensor, p: Tensor, text: str) -> tuple[bool | None, str]:
    """Masses about to cross from one side to the other, at a Jordan block with one limit direction +-e."""
    assert limit.direction is not None
    left, singular, right = torch.linalg.svd(limit.direction.to(y))
    if limit.frequencies or int((singular > limit.tol * singular[0]).sum()) != 1:
        return None, text
    u, along = y @ right[0], y @ left[:, 0]  # the limit is sign(u) e
    width = u.abs().quantile(0.1)
    there, back = (u > 0) & (u < width) & (along < 0), (u < 0) & (u > -width) & (along > 0)
    up, down = float(p[there].sum()), float(p[back].sum())
    noise = math.sqrt(float(p[there | back].square().sum()))  # of a sample; a quadrature has less
    return abs(up - down) > 2 * noise, f"{text}; here {up:.3g} and {down:.3g}, +- {noise:.1g}"


def remedy(d: int) -> str:
    """What to do where chance decides."""
    return "use more tokens" if d > 3 else "use a quadrature (simulate --quadrature) or more tokens"


def _odd_moments(limit: Limit, y: Tensor, p: Tensor) -> tuple[Tensor, Tensor] | None:
    """Odd moments on either side of E along the direction in which clusters leave, (8,), and their standard errors if
    y is a sample; None if unknown.

    1 and no error where G and V do not share the reflection in that direction: no law is then safe from leaving.
    """
    if limit.basis is None or limit.basis.shape[1] != 1:
        return None
    attention = limit.attention.to(torch.float64)
    V, G = attention.values[0].detach(), attention.G[0].detach()
    e = limit.basis[:, 0].to(y)
    across = torch.linalg.svd(e[None])[2][1:].mT
    V_ = (across.mT @ V @ across).cpu().numpy()
    if limit.leading is not None and limit.leading < 0:
        V_ = V_ - limit.leading * np.linalg.inv((across.mT @ G @ across).cpu().numpy())
    values, vectors = np.linalg.eig(V_.T)
    f = across @ torch.from_numpy(np.ascontiguousarray(vectors[:, values.real.argmax()].real)).to(y)
    f = f / f.norm()
    for A in (G, V):
        if float((A @ f - (f @ A @ f) * f).norm() + (A.mT @ f - (f @ A @ f) * f).norm()) > 1e-9 * float(A.norm()):
            return torch.ones(1), torch.zeros(1)
    s, c = y @ f, y @ e
    odd = torch.stack([side * s * c**a * s**b for side in (c > 0, c < 0) for a in (0, 2) for b in (0, 2)])
    return (odd @ p).abs(), (odd * p).norm(dim=-1)
