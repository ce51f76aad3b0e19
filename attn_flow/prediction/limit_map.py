"""Where the flow goes: the limit map of low-temperature attention, its rates, and whether n tokens can follow it.

For large beta the law mu_t concentrates on P_# mu_0, W(mu_t, P_# mu_0) <= K (sqrt(log(beta+1)/beta) e^{Ct} + e^{-ct})
(Alcalde, Bungert, Riedl, Roith, arXiv 2605.10931), where P(x) = Pi x / |Pi x| and Pi is the spectral projector of
M = V G for the eigenvalues of largest real part. THEORY 1 derives what is computed here.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from attn_flow.attention import Attention
from attn_flow.base import checks
from attn_flow.measures import Measure, UniformSphere
from attn_flow.prediction.certificate import Settled, settle
from attn_flow.prediction.finite_n import Resolution, ResolutionWarning, resolution
from attn_flow.prediction.rates import algebraic, exponential_rates, stay, terminal
from attn_flow.prediction.spectral import Spectrum, spectrum
from attn_flow.prediction.zero_temperature import linear_part, zero_temperature_flow

__all__ = ["LimitMap", "Resolution", "ResolutionWarning", "limit", "resolution", "zero_temperature_flow"]


@dataclass(frozen=True, eq=False)
class LimitMap:
    """The predicted limit of an attention flow, and how it is known. None stands for "does not apply".

    case: "fixed" (P(x) = Pi x/|Pi x|), "rotating" (concentrates on E and turns in it), "jordan" (rate 1/t),
    "stationary" (M = c I), "undefined" (G singular; `off_kernel` is the case of tokens outside ker G) or
    "nonlinear" (several heads, biases, other supports: established token by token by `settle`).
    """

    case: Literal["fixed", "rotating", "jordan", "stationary", "undefined", "nonlinear"]
    attention: Attention = field(repr=False)
    support: Measure | str | None = field(repr=False)
    tol: float
    off_kernel: str | None = None
    leading: float | None = None  # largest real part of the spectrum of M
    gap: float | None = None  # to the next real part; inf if E is everything
    gap_error: float | None = None  # what rounding can do to the gap
    frequencies: tuple[float, ...] = ()
    basis: Tensor | None = field(default=None, repr=False)  # (d, k), orthonormal, spans E
    projector: Tensor | None = field(default=None, repr=False)  # Pi (d, d), oblique unless M is normal
    direction: Tensor | None = field(default=None, repr=False)  # the limit is along direction @ x: Pi, or N^{q-1} Pi
    kernel: Tensor | None = field(default=None, repr=False)  # (d, m) orthonormal, spans ker G
    g: float | None = None  # rate at which a typical token approaches E: gap / |G e_1|
    kappa: float | None = None  # rate at which tokens leave the next level: gap / |G e_2|
    tail: float | None = None  # rate at which the mass of the tokens that have not left vanishes
    rate_w1: float | None = None
    rate_w2: float | None = None
    C: float | None = None  # admissible growth rate |W| (cond N + 2) of the temperature error
    terminal_case: str | None = None
    terminal_basis: Tensor | None = field(default=None, repr=False)  # leading subspace of V
    terminal_rate: float | None = None  # v_top - v_next
    exit_rate: float | None = None  # how fast clusters leave E, v_top - <e, V e> in the plain case; 0: they stay
    layer: float | None = None  # beta W2^2 of the Gaussian layer that clusters keep where M has a negative leading part
    evidence: dict[str, Any] = field(default_factory=dict)

    @property
    def dimension(self) -> int | None:
        """dim E."""
        return None if self.basis is None else self.basis.shape[1]

    def rate(self, p: float = 2.0) -> float | None:
        """c_p = min(g, tail/p): W_p(mu_t, P_# mu_0) ~ e^{-c_p t} at beta = inf, for bounded densities."""
        if self.g is None or self.tail is None:
            return None
        return 0.0 if self.case == "jordan" else min(self.g, self.tail / p)

    def t_beta(self, beta: float, p: float = 2.0) -> float:
        """log(beta / log(beta+1)) / (2 (c_p + C)): where the two terms of the bound balance."""
        c = self.rate(p)
        if c is None or self.C is None:
            raise ValueError(f"case {self.case!r} has no rates, so no t_beta; expected a linear limit with a gap.")
        return math.log(beta / math.log(beta + 1)) / (2 * (c + self.C))

    def t_min(self, beta: float) -> float:
        """log(beta) / (2 g): the time of smallest W2, where the cluster is as wide as the temperature resolves.

        W2 there is ~ e^{-c_2 t_min} = beta^{-c_2/(2g)}: beta^{-1/2} unless the tail is slower than g.
        """
        if self.g is None:
            raise ValueError(f"case {self.case!r} has no rate g, so no t_min; expected a linear limit with a gap.")
        return math.log(beta) / (2 * self.g)

    def width(self, beta: float) -> float:
        """sqrt(sum_i |v_1| / (beta (lambda_1 - lambda_i))): W2 of the Gaussian layer around E."""
        if self.layer is None:
            raise ValueError(f"no Gaussian layer: {self.evidence.get('layer', 'the limit is not linear')}.")
        return math.sqrt(self.layer / beta)

    def push_forward(self, x: Tensor, t: float | None = None) -> Tensor:
        """P(x), (..., n, d), differentiable in x; with t the moving push-forward e^{tau(t) M} Pi x on the sphere of E.

        Tokens keep their norm. A rotating limit exists only at a time t. Tokens without an established limit
        (Pi x = 0, x in ker G, not certified) raise; `settle` reports a nonlinear case token by token.
        """
        checks.tokens("x", x)
        if self.case == "nonlinear":
            return self._settled(x)
        case = self.off_kernel if self.case == "undefined" else self.case
        if case == "undefined":
            raise ValueError(f"no limit is established: {self.evidence['because']}.")
        if t is None and self.frequencies:
            raise ValueError(
                f"the leading eigenvalues {self.leading:.4g} +- {self.frequencies[0]:.4g}i rotate: no limit. "
                "Give the time: push_forward(x, t)."
            )
        assert self.direction is not None  # every linear case has both
        assert self.projector is not None
        if self.kernel is not None:
            self._refuse(x, self.attention.to(x).G[0], "lie in ker G, where the drift is undefined")
        if t is not None:
            x = zero_temperature_flow(self.attention, x, [0.0, t], self.support).x[-1]
        A = (self.direction if t is None else self.projector).to(x)
        y = self._refuse(x, A, "have Pi x = 0 to rounding: they lie on the border between two limits")
        return y * (x.norm(dim=-1, keepdim=True) / y.norm(dim=-1, keepdim=True))

    def _refuse(self, x: Tensor, A: Tensor, why: str) -> Tensor:
        """A x, having raised if some of it is nothing but rounding: |A x| <= eps | |A| |x| |."""
        y = x @ A.mT
        if checks.can_look(x):
            rounding = torch.finfo(x.dtype).eps * (x.abs() @ A.abs().mT).norm(dim=-1)
            if bad := int((y.norm(dim=-1) <= rounding).sum()):
                raise ValueError(f"{bad} of {y[..., 0].numel()} tokens {why}; remove or perturb them.")
        return y

    def settle(self, x: Tensor, horizon: float = 100.0) -> Settled:
        """The zero-temperature flow of x until every token is certified or the horizon is reached, with evidence."""
        return settle(self.attention, x, self.support, horizon=horizon)

    def _settled(self, x: Tensor) -> Tensor:
        settled = self.settle(x)
        if not bool(settled.certified.all()):
            bad, n = int((~settled.certified).sum()), settled.certified.numel()
            raise ValueError(
                f"{bad} of {n} tokens have no certified limit (speeds up to {float(settled.speed.max()):.2g}). "
                "See settle(x) for the evidence of each, or give it a longer horizon."
            )
        return settled.x

    def as_dict(self) -> dict[str, Any]:
        """Everything that is a number or a word, ready for JSON (inf and None become None)."""
        names = [
            "case off_kernel tol leading gap gap_error frequencies dimension basis projector g kappa tail rate_w1",
            "rate_w2 C terminal_case terminal_basis terminal_rate exit_rate layer evidence",
        ]
        return {name: _plain(getattr(self, name)) for name in " ".join(names).split()}


def _plain(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.tolist()
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {k: _plain(v) for k, v in value.items()}
    return [_plain(v) for v in value] if isinstance(value, (tuple, list)) else value


def limit(attention: Attention, support: Measure | str | None = None, tol: float = 1e-6) -> LimitMap:
    """The limit map of an attention flow on the sphere at low temperature.

    support: None = tokens fill the sphere, M = V G; a centred EllipsoidSupport (or capped Gaussian) S, M = V S G; any
    other measure, a frozen Cloud, or "tokens" (the moving cloud itself, hardmax): nonlinear. beta is not used.
    tol: gaps below tol |M|, parts of M below it, and singular values of G below tol |G| count as zero.
    """
    if attention.kind != "softmax" or attention.causal:
        raise ValueError(
            f"attention of kind {attention.kind!r}, causal={attention.causal}; the limit map is for softmax without a "
            "causal mask."
        )
    linear = None if isinstance(support, str) else linear_part(attention, support, tol)
    values = attention.to(torch.float64).values.detach().sum(-3).cpu().numpy()
    common: dict[str, Any] = {"attention": attention, "support": support, "tol": tol}
    if linear is None:
        because = _why_nonlinear(attention, support)
        return LimitMap(
            case="nonlinear",
            **common,
            **(terminal(values, tol, attention.Q.device) if attention.value_bias is None else {}),
            evidence=because,
        )
    place = lambda A: torch.tensor(np.ascontiguousarray(A), device=attention.Q.device)
    W, N = (A.cpu().numpy() for A in linear)  # LAPACK's ordered Schur form lives on the CPU
    M = W @ N
    found = spectrum(M, tol)
    singular = np.linalg.svd(N)[1:]
    flat = singular[0] <= tol * singular[0].max()
    case, off_kernel, kernel = found.case, None, None
    if flat.any():
        # G x stays outside ker G, but reaches it in finite time unless the leading growth rate is positive.
        grows = found.leading > tol * np.linalg.norm(M, 2)
        case, off_kernel = "undefined", (found.case if grows else "undefined")
        kernel = place(singular[1][flat].T)
    cond = float(singular[0].max() / singular[0].min()) if singular[0].min() > 0 else math.inf
    exit_rate, layer, why_layer = None, None, "derived for tokens that fill the sphere"
    if support is None or isinstance(support, UniformSphere):
        exit_rate, layer, why_layer = stay(found, values, N, tol)
    return LimitMap(
        case=case,  # type: ignore[arg-type]
        **common,
        off_kernel=off_kernel,
        leading=found.leading,
        gap=found.gap,
        gap_error=found.gap_error,
        frequencies=found.frequencies,
        basis=place(found.basis),
        projector=place(found.projector),
        direction=place(found.limit),
        kernel=kernel,
        **exponential_rates(found, M, N, tol),
        C=float(np.linalg.norm(W, 2)) * (cond + 2),
        **terminal(values, tol, attention.Q.device),
        exit_rate=exit_rate,
        layer=layer,
        evidence={
            "because": _because(found, case, off_kernel, tol * float(np.linalg.norm(M, 2))),
            "gap_threshold": max(tol * float(np.linalg.norm(M, 2)), found.gap_error),
            "projector_norm": found.condition,
            "condition_of_G": cond,
            "nilpotency_index": found.index,
            "layer": why_layer,
            **algebraic(found, tol),
        },
    )


def _because(found: Spectrum, case: str, off_kernel: str | None, threshold: float) -> str:
    k = found.dimension
    words = {
        "fixed": f"{k} leading eigenvalue(s) {found.leading:.6g}, semisimple, gap {found.gap:.3g} > {threshold:.1g}",
        "rotating": f"leading eigenvalues {found.leading:.6g} +- i{found.frequencies}, semisimple: no pointwise limit",
        "jordan": f"Jordan block of index {found.index} at {found.leading:.6g}: approach like 1/t",
        "stationary": f"M = {found.leading:.6g} I to {threshold:.1g}: every direction is stationary",
    }[found.case]
    if case != "undefined":
        return words
    if off_kernel == "undefined":
        return f"G is singular and the leading real part {found.leading:.3g} <= 0: tokens run into ker G in finite time"
    return f"G is singular: undefined on ker G; off it, {words}"


def _why_nonlinear(attention: Attention, support: Measure | str | None) -> dict[str, Any]:
    reasons = {
        "several heads": attention.heads > 1,
        "a query bias": attention.G_bias is not None and bool((attention.G_bias != 0).any()),
        "a value bias": attention.value_bias is not None and bool((attention.value_bias != 0).any()),
    }
    found = [why for why, here in reasons.items() if here]
    if support is not None and not found:
        found.append(
            "tokens attend to themselves" if isinstance(support, str) else "the support is no centred ellipsoid"
        )
    return {"because": " and ".join(found) + ": x' = P_x F(x) is not linear; limits are certified token by token"}
