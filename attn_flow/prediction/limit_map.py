"""Where the flow goes: the limit map of low-temperature attention, its rates, and whether n tokens can follow it.

For large beta the law mu_t concentrates on P_# mu_0, W(mu_t, P_# mu_0) <= K (sqrt(log(beta+1)/beta) e^{Ct} + e^{-ct})
(Alcalde, Bungert, Riedl, Roith, arXiv 2605.10931), where P(x) = Pi x / |Pi x| and Pi is the spectral projector of
M = V G for the eigenvalues of largest real part. THEORY 1 derives what is computed here.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from attn_flow.attention import Attention
from attn_flow.attention.multihead import attention_alone
from attn_flow.averages import dense
from attn_flow.base import checks
from attn_flow.measures import Cloud, Measure, UniformSphere
from attn_flow.prediction.certificate import Settled, settle
from attn_flow.prediction.rates import Stay, algebraic, exponential_rates, stay, terminal
from attn_flow.prediction.requirements import Requirement, assumed, examined
from attn_flow.prediction.spectral import Array, Spectrum, spectrum
from attn_flow.prediction.zero_temperature import known_support, linear_part, zero_temperature_flow


@dataclass(frozen=True, eq=False, repr=False)
class LimitMap:
    """The predicted limit of an attention flow, and how it is known; made by `limit`. None: "does not apply".

    case: "fixed" (P(x) = Pi x/|Pi x|), "rotating" (concentrates on E and turns in it), "jordan" (rate 1/t),
    "stationary" (M = c I), "undefined" (G singular; `off_kernel` is the case of tokens outside ker G) or
    "nonlinear" (several heads, biases, other supports: established token by token by `settle`).
    Rates are per unit of t, eigenvalues those of M. `requires` says what is assumed, `examine` checks it on a cloud.

    Example:
        >>> from attn_flow import Attention, Sphere, limit
        >>> G, V = torch.tensor([[2.0, 0.5], [0.0, 1.0]]), torch.eye(2)
        >>> found = limit(Attention.from_matrices(G, V))
        >>> found
        LimitMap(fixed, dim E = 1, leading 2, gap 1, rate_w2 0.5)
        >>> found.push_forward(torch.tensor([[-0.2, 1.0]]) / 1.04**0.5)  # the projector is oblique
        tensor([[1., 0.]])
        >>> [need.name for need in found.requires]
        ['large n', 'little noise', 'off the border', 'simple leading eigenvalue', 'bounded density']
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
    exit_rate: float | None = None  # how fast clusters leave E, v_top - <e, V e> in the plain case; 0: they stay;
    # inf: no layer forms, since its modes grow ever faster with their degree
    layer: float | None = None  # beta W2^2 of the Gaussian layer that clusters keep where M has a negative leading part
    evidence: dict[str, Any] = field(default_factory=dict)

    def __repr__(self) -> str:
        words = [self.case if self.off_kernel is None else f"{self.case}, off ker G {self.off_kernel}"]
        words += [] if self.dimension is None else [f"dim E = {self.dimension}"]
        numbers = ("leading", "gap", "rate_w2", "exit_rate")
        words += [f"{name} {value:.6g}" for name in numbers if (value := getattr(self, name))]
        return f"LimitMap({', '.join(words)})"

    @property
    def requires(self) -> tuple[Requirement, ...]:
        """What the prediction assumes, as far as the weights can tell."""
        return assumed(self)

    def examine(
        self,
        x: Tensor,
        *,
        weights: Tensor | None = None,
        mask: Tensor | None = None,
        beta: float | None = None,
    ) -> tuple[Requirement, ...]:
        """`requires`, checked against the initial cloud x (n, d) with its weights and mask (n,), and beta if given.

        Example:
            >>> from attn_flow import Attention, limit
            >>> from attn_flow.measures.quadrature import circle
            >>> G, V = torch.diag(torch.tensor([4.0, 1.0])), torch.diag(torch.tensor([1.0, 2.0]))
            >>> for need in limit(Attention.from_matrices(G, V)).examine(circle(100).x):
            ...     if need.met is False:
            ...         print(need.name)
            asymmetric law
        """
        checks.tokens("x", x)
        if x.ndim != 2 or x.shape[-1] != self.attention.dim:
            raise ValueError(f"x has shape {tuple(x.shape)}, expected one cloud (n, {self.attention.dim}).")
        checks.held("x", x)
        if Cloud(x, weights, mask).x.ndim != 2:
            raise ValueError("weights or mask are a batch, expected (n,): those of one cloud.")
        if beta is not None:
            checks.inverse_temperature(beta)
        return examined(self, x, weights, mask, beta)

    @property
    def dimension(self) -> int | None:
        """dim E."""
        return None if self.basis is None else self.basis.shape[1]

    def rate(self, p: float = 2.0) -> float | None:
        """c_p = min(g, tail/p): W_p(mu_t, P_# mu_0) ~ e^{-c_p t} at beta = inf, for bounded densities; p >= 1."""
        checks.number("p", p)
        if not 1 <= p < math.inf:
            raise ValueError(f"p = {p}, expected a number with 1 <= p < inf.")
        if self.g is None or self.tail is None:
            return None
        return 0.0 if self.case == "jordan" else min(self.g, self.tail / p)

    def t_beta(self, beta: float, p: float = 2.0) -> float:
        """log(beta / log(beta+1)) / (2 (c_p + C)): where the two terms of the bound balance."""
        c = self.rate(p)
        if c is None or self.C is None:
            raise ValueError(f"case {self.case!r} has no rates, so no t_beta; expected a linear limit with a gap.")
        _check_cold(beta)
        return math.log(beta / math.log(beta + 1)) / (2 * (c + self.C))

    def t_min(self, beta: float) -> float:
        """The time of smallest W2, to leading order in log(beta): log(beta)/(2g) times (g + x)/(c_2 + x).

        The clusters are as narrow as the temperature resolves, e^{-gt} = beta^{-1/2}, at t = log(beta)/(2g). From then
        on their offset, beta^{-1/2}, grows at the exit rate x, while tokens that linger still arrive: W2 of those falls
        like e^{-c_2 t}. Where the tail is no slower than g, c_2 = g, this is log(beta)/(2g) and W2 ~ beta^{-1/2} there;
        where it is (c_2 < g), the two meet later, and corrections fall slowly with beta (docs/theory.md, section 1).
        Needs an asymmetric law (`requires`).
        """
        if self.g is None or self.rate_w2 is None or self.case == "jordan":
            raise ValueError(f"case {self.case!r} has no rate g, so no t_min; expected a linear limit with a gap.")
        _check_cold(beta)
        leaves = self.exit_rate or 0.0
        later = 1.0 if math.isinf(leaves) else (self.g + leaves) / (self.rate_w2 + leaves)
        return math.log(beta) / (2 * self.g) * later

    def width(self, beta: float) -> float:
        """sqrt(sum_i |v_1| / (beta (lambda_1 - lambda_i))): W2 of the Gaussian layer around E."""
        if self.layer is None:
            raise ValueError(f"no Gaussian layer: {self.evidence.get('layer', 'the limit is not linear')}.")
        _check_cold(beta)
        return math.sqrt(self.layer / beta)

    def push_forward(self, x: Tensor, t: float | None = None) -> Tensor:
        """P(x), where each token goes; with t the moving push-forward e^{tau(t) M} Pi x on the sphere of E.

        Args:
            x: tokens (..., n, d); they are not changed, and keep their norm.
            t: a time >= 0, for a limit that rotates: it exists only at a time.

        Returns:
            Tokens (..., n, d), differentiable in x where the limit is linear. Tokens without an established limit
            (Pi x = 0, x in ker G, not certified) raise; `settle` reports a nonlinear case token by token.
        """
        checks.tokens("x", x)
        checks.width("x", x, self.attention.dim)
        if t is not None:
            checks.nonnegative("t", t, "time", "; push_forward(x) without one is the limit itself")
        if self.case == "nonlinear":
            return self._settled(x)
        x = self._outside_kernel(x)
        if t is None and self.frequencies:
            raise ValueError(
                f"the leading eigenvalues {self.leading:.4g} +- {self.frequencies[0]:.4g}i rotate: no limit. "
                "Give the time: push_forward(x, t)."
            )
        if t is not None:
            return self.moving_push_forward(x, torch.tensor([t], dtype=torch.float64))[0]
        assert self.direction is not None  # every linear case has one
        return self._projected(x, self.direction)

    def moving_push_forward(self, x: Tensor, t: Tensor) -> Tensor:
        """push_forward(x, t) at every time of t (T,), increasing from 0 or later, in one go: (T, ..., n, d)."""
        checks.times(t)
        checks.tokens("x", x)
        checks.width("x", x, self.attention.dim)
        for name, z in (("x", x), ("t", t)):
            checks.held(name, z)
        start = self._outside_kernel(x)
        assert self.projector is not None
        if bool((t > 0).any()):
            times = t if float(t[0]) == 0 else torch.cat([torch.zeros_like(t[:1]), t])
            start = zero_temperature_flow(self.attention, start, times, self.support).x[-len(t) :]
        else:
            start = start.expand(len(t), *start.shape)
        return self._projected(start, self.projector)

    def _outside_kernel(self, x: Tensor) -> Tensor:
        """The tokens x, having raised where nothing is established for them."""
        if (self.off_kernel if self.case == "undefined" else self.case) == "undefined":
            raise ValueError(f"no limit is established: {self.evidence['because']}.")
        if self.kernel is not None:
            self._refuse(x, self.attention.to(x).G[0], "lie in ker G, where the drift is undefined")
        return x

    def _projected(self, x: Tensor, A: Tensor) -> Tensor:
        """A x at the norm of x."""
        y = self._refuse(x, A.to(x), "have Pi x = 0 to rounding: they lie on the border between two limits")
        return y * (dense.lengths(x) / y.norm(dim=-1))[..., None]

    def _refuse(self, x: Tensor, A: Tensor, why: str) -> Tensor:
        """A x up to a factor, having raised if some of it is nothing but rounding: |A x| <= eps | |A| |x| |."""
        u = x / dense.largest_entry(x)
        y = u @ A.mT
        if checks.can_look(x):
            rounding = torch.finfo(x.dtype).eps * (u.abs() @ A.abs().mT).norm(dim=-1)
            if bad := int((y.norm(dim=-1) <= rounding).sum()):
                raise ValueError(f"{bad} of {y[..., 0].numel()} tokens {why}; remove or perturb them.")
        return y

    def settle(self, x: Tensor, horizon: float = 100.0) -> Settled:
        """The zero-temperature flow of x (..., n, d) until every token is certified or t reaches the horizon.

        Returns `Settled`: positions, and for every token whether it is certified, its speed and its rate.
        """
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
        found = {name: _plain(getattr(self, name)) for name in " ".join(names).split()}
        return {**found, "requires": [asdict(need) for need in self.requires]}


def _check_cold(beta: float) -> None:
    checks.number("beta", beta)
    if not 1 < beta < math.inf:
        raise ValueError(f"beta = {beta}, expected 1 < beta < inf: times and widths are estimates for low temperature.")


def _plain(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.tolist()
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {k: _plain(v) for k, v in value.items()}
    return [_plain(v) for v in value] if isinstance(value, (tuple, list)) else value


def limit(attention: Attention, support: Measure | str | None = None, tol: float = 1e-6) -> LimitMap:
    """The limit map of an attention flow on the sphere at low temperature: where the tokens concentrate.

    Args:
        attention: softmax without a causal mask; beta is not used. A linear flow x' = P_x M x of your own is
            `Attention.from_matrices(I, M)`.
        support: what tokens attend to. None: they fill the sphere, M = V G; a centred EllipsoidSupport (or capped
            Gaussian) of covariance S: M = V S G; any other measure, a frozen Cloud, or "tokens" (the moving cloud
            itself, hardmax): nonlinear.
        tol: gaps below tol |M|, parts of M below it, and singular values of G below tol |G| count as zero.

    Returns:
        A `LimitMap`: its case, the subspace E and projector Pi, rates, what follows, `requires` and `evidence`.

    Example:
        >>> from attn_flow import Attention
        >>> G, V = torch.diag(torch.tensor([3.0, 1.0])), torch.diag(torch.tensor([1.0, 2.0]))
        >>> found = limit(Attention.from_matrices(G, V))
        >>> found.case, round(found.g, 4), round(found.t_min(1000.0), 2)
        ('fixed', 0.3333, 10.36)
    """
    attention_alone("limit", attention)
    if attention.kind != "softmax" or attention.causal:
        raise ValueError(
            f"attention of kind {attention.kind!r}, causal={attention.causal}; the limit map is for softmax without a "
            "causal mask."
        )
    checks.number("tol", tol)
    if not 0 < tol < 1:
        raise ValueError(f"tol = {tol}, expected a relative tolerance between 0 and 1.")
    known_support(attention, support)
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
        case, off_kernel = "undefined", _off_kernel(found, M, N, tol)
        kernel = place(singular[1][flat].T)
    cond = float(singular[0].max() / singular[0].min()) if singular[0].min() > 0 else math.inf
    after = Stay(why="derived for tokens that fill the sphere")
    if support is None or isinstance(support, UniformSphere):
        after = stay(found, values, N, tol)
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
        exit_rate=after.exit_rate,
        layer=after.layer,
        evidence={
            "because": _because(found, case, off_kernel, tol * float(np.linalg.norm(M, 2))),
            "gap_threshold": max(tol * float(np.linalg.norm(M, 2)), found.gap_error),
            "projector_norm": found.condition,
            "condition_of_G": cond,
            "nilpotency_index": found.index,
            "layer": after.why,
            "layer_modes": list(after.modes),
            **algebraic(found, tol),
        },
    )


def _off_kernel(found: Spectrum, M: Array, N: Array, tol: float) -> str:
    """The case of tokens outside ker G, for singular G: "undefined" where they run into ker G in finite time.

    Time is t = int |N x|/|x| dtau along x = e^{tau M} x_0, and 0 is an eigenvalue of M. A positive leading part keeps
    |N x|/|x| away from 0. With leading part 0 the direction x tends to lies in E; semisimple: |N Pi x| decides, a
    rotation on the line keeps it. Jordan block of index q: M^{q-1} Pi = V (N M^{q-2} Pi) is not 0, so that |N x|/|x|
    falls no faster than 1/tau: t ~ log tau goes on, and tokens approach exponentially in t.
    """
    size = float(np.linalg.norm(M, 2))
    if found.leading > tol * size:
        return found.case
    if found.case == "jordan":
        return "undefined" if found.frequencies else "jordan"
    rests = np.linalg.norm(N @ found.projector, 2) > tol * np.linalg.norm(N, 2) * found.condition
    return found.case if rests else "undefined"


def _because(found: Spectrum, case: str, off_kernel: str | None, threshold: float) -> str:
    k, turns = found.dimension, ", ".join(f"{b:.6g}i" for b in found.frequencies)
    words = {
        "fixed": f"{k} leading eigenvalue(s) {found.leading:.6g}, semisimple, gap {found.gap:.3g} > {threshold:.1g}",
        "rotating": f"leading eigenvalues {found.leading:.6g} +- {turns}, semisimple: no pointwise limit",
        "jordan": f"Jordan block of index {found.index} at {found.leading:.6g}: approach like 1/t",
        "stationary": f"M = {found.leading:.6g} I to {threshold:.1g}: every direction is stationary",
    }[found.case]
    if case != "undefined":
        return words
    if off_kernel == "undefined":
        if found.case == "jordan" and found.frequencies:
            return "G is singular and a rotating Jordan block leads at 0: nothing is derived for it"
        return f"G is singular and the leading real part {found.leading:.3g} <= 0: tokens run into ker G in finite time"
    if found.case == "jordan" and abs(found.leading) <= threshold:
        words = words.replace("approach like 1/t", "towards ker G, exponentially in t, or like 1/t where |G x| stays")
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
