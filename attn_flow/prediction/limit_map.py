"""Where low-temperature attention concentrates: the limit map, its rates and what follows it.

For large beta the distribution mu_t of the tokens concentrates on P_# mu_0 (arXiv 2605.10931), where P(x) = Pi x/|Pi x|
and Pi is the spectral projector of M = V G for the eigenvalues of largest real part. docs/theory.md says what is proved
there and what is derived here.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from attn_flow.attention.attention import Attention
from attn_flow.attention.weights import AXES
from attn_flow.base import checks
from attn_flow.base.files import to_plain
from attn_flow.drawing import html_text
from attn_flow.measures.cloud import Cloud, as_cloud
from attn_flow.measures.sphere import UniformSphere
from attn_flow.prediction.rates import Rates, TerminalPhase, concentration_rates, exit_of_clusters
from attn_flow.prediction.requirements import Requirement, check_requirements, requirements
from attn_flow.prediction.spectrum import Spectrum, spectrum
from attn_flow.prediction.words import limit_sentences
from attn_flow.prediction.zero_temperature import linear_part, resting_points, zero_temperature_flow

Tokens = TypeVar("Tokens", Tensor, Cloud)


@dataclass(frozen=True, eq=False, repr=False)
class LimitMap:
    """The predicted limit of an attention flow, as `limit` returns it. A record is None where it does not apply.

    Attributes:
        case: "fixed": P(x) = Pi x/|Pi x|. "rotating": tokens concentrate on E and rotate in it. "jordan": they approach
            algebraically. "stationary": M = c I, nothing moves. "nonlinear": several heads, biases or other contexts,
            where tokens are followed until they rest. "undefined": no limit is established. "batch": see `elements`.
        reason: how the case is known, in words.
        attention: that of `limit`, at beta = 1.
        spectrum: the leading spectral subspace E of M, its projector and gap.
        rates, power: the exponential rates of concentration; the exponent a of W_2 ~ t^{-a} at a Jordan block.
        terminal: what clusters do once they have formed.
        elements, shape: the limits of a batch of weights, flattened, and its shape.

    Example:
        >>> from attn_flow import Attention, limit
        >>> target = limit(Attention.from_matrices(torch.tensor([[2.0, 0.5], [0.0, 1.0]]), torch.eye(2)))
        >>> target
        LimitMap(fixed, dim E = 1, leading 2, gap 1, decay of W2 0.5)
        >>> target.push_forward(torch.tensor([[-0.2, 1.0]]) / 1.04**0.5)  # the projector is oblique
        tensor([[1., 0.]])
        >>> [need.name for need in target.requires if need.met is False]
        ['clusters leave']
    """

    case: str
    reason: str
    attention: Attention
    spectrum: Spectrum | None = None
    rates: Rates | None = None
    power: float | None = None
    terminal: TerminalPhase | None = None
    elements: tuple[LimitMap, ...] = ()
    shape: tuple[int, ...] = ()

    def __repr__(self) -> str:
        words = [self.case + f" {self.shape}" * bool(self.elements)]
        if self.spectrum is not None:
            words.append(f"dim E = {self.dimension}, leading {self.spectrum.leading:.6g}, gap {self.spectrum.gap:.6g}")
        words += [f"decay of W2 {self.rates.decay():.6g}"] if self.rates is not None else []
        words += [f"exit rate {self.exit_rate:.6g}"] if self.exit_rate else []
        return f"LimitMap({', '.join(words)})"

    def _repr_html_(self) -> str:  # for notebooks
        return html_text([repr(self), *limit_sentences(self.as_dict())])

    @property
    def dimension(self) -> int | None:
        """The dimension of E; None if the limit is not linear."""
        return None if self.spectrum is None else self.spectrum.dimension

    @property
    def basis(self) -> Tensor | None:
        """An orthonormal basis (d, k) of E; None if the limit is not linear."""
        return None if self.spectrum is None else self.spectrum.basis

    @property
    def rotates(self) -> bool:
        """Whether tokens rotate in E for ever: a limit exists at a given time only."""
        return self.spectrum is not None and bool(self.spectrum.frequencies)

    @property
    def exit_rate(self) -> float | None:
        """How fast clusters leave E at finite beta; None if it is not known."""
        return None if self.terminal is None else self.terminal.exit_rate

    @property
    def requires(self) -> tuple[Requirement, ...]:
        """What the prediction assumes, and whether this attention meets it; `examine` also looks at a cloud."""
        if self.elements:
            return (Requirement("one attention", "predictions are made for each of the `elements` of a batch", False),)
        return requirements(self.spectrum, self.rates, self.terminal, self.attention.context is not None)

    def examine(self, x: Tensor | Cloud, beta: float | None = None) -> tuple[Requirement, ...]:
        """Check `requires` against one initial cloud (n, d), and its number of tokens against beta if that is given."""
        cloud = as_cloud(x)
        if cloud.x.ndim != 2 or cloud.x.shape[-1] != self.attention.dim:
            raise ValueError(f"x has shape {tuple(cloud.x.shape)}, expected one cloud (n, {self.attention.dim}).")
        return check_requirements(self.requires, cloud, beta, self.attention, self.spectrum)

    def t_min(self, beta: float) -> float | None:
        """The time of least W2, to leading order in log(beta): log(beta)/(2g) (g + x)/(c_2 + x), with exit rate x.

        The distribution must not be symmetric. None where this does not apply: dim E > 1, V does not map E into itself,
        or clusters do not leave at a known rate; `requires` names the condition.
        """
        if not 1 < beta < math.inf:
            raise ValueError(f"beta = {beta}, expected 1 < beta < inf: t_min is an estimate for low temperature.")
        if self.rates is None or not self.exit_rate:
            return None
        g, c, exit_rate = self.rates.g, self.rates.decay(), self.exit_rate
        return math.log(beta) / (2 * g) * (g + exit_rate) / (c + exit_rate)

    def width(self, beta: float) -> float | None:
        """W_2 of clusters to their centres at beta if their tokens repel each other; None if they keep no width."""
        checks.require_positive(beta=beta)
        width = None if self.terminal is None else self.terminal.width
        return None if width is None else math.sqrt(width / beta)

    def push_forward(self, x: Tokens, t: float | Sequence[float] | Tensor | None = None) -> Tokens:
        """P(x), where each token goes; with t, the moving push-forward e^{tau(t) M} Pi x on the sphere of E.

        Tokens without an established limit raise ValueError: those with Pi x = 0, and where the limit is not linear
        those that do not come to rest at a stable equilibrium.

        Args:
            x: tokens (..., n, d) or a `Cloud`, which keep their norms. Without t the result is differentiable in x
                where the limit is linear.
            t: a time >= 0, or increasing times (T,), the first axis of the result. A rotating limit needs one.
        """
        cloud = as_cloud(x)
        checks.require_shape("x", cloud.x, (self.attention.dim,))
        times = None if t is None else torch.as_tensor(t, dtype=torch.float64).reshape(-1).tolist()
        if times is not None and not (times == sorted(set(times)) and times and 0 <= times[0] <= times[-1] < math.inf):
            raise ValueError(f"t = {t}, expected a finite time of at least 0, or increasing times.")
        y = self._push_forward(cloud.filled(), times)
        y = y[0] if times is not None and torch.as_tensor(t).ndim == 0 else y
        return Cloud(y, cloud.weights, cloud.mask) if isinstance(x, Cloud) else y

    def _push_forward(self, x: Tensor, times: list[float] | None) -> Tensor:
        """The push-forward (..., n, d), or (T, ..., n, d) at given times, of tokens (..., n, d)."""
        if self.elements:
            batch = checks.broadcast_axes({"x": x.shape[:-2], "the limits": torch.Size(self.shape)})
            x = x.expand(*batch, *x.shape[-2:])
            parts = x.flatten(-2 - len(self.shape), -3).unbind(-3)
            images = [each._push_forward(part, times) for each, part in zip(self.elements, parts)]
            return torch.stack(images, dim=-3).unflatten(-3, self.shape)
        if self.case == "nonlinear" and times is None:
            return resting_points(self.attention, x)
        if self.case == "undefined" or self.spectrum is None:
            raise ValueError(f"no formula for the limit: {self.reason}.")
        if times is not None:
            path = zero_temperature_flow(self.attention, x, times if times[0] == 0 else [0.0, *times]).x
            return _project(path[-len(times) :], self.spectrum.projector)
        if self.rotates:
            pair = f"{self.spectrum.leading:.4g} +- {self.spectrum.frequencies[0]:.4g}i"
            raise ValueError(f"the leading eigenvalues {pair} rotate: no limit. Give a time: push_forward(x, t).")
        return _project(x, self.spectrum.direction)

    def as_dict(self) -> dict[str, Any]:
        """All numbers and words, ready for JSON; None where nothing applies."""
        read = lambda record, *names: {name: getattr(record, name, None) for name in names}
        values = read(self, "case", "reason", "dimension", "power", "exit_rate")
        values |= read(self.spectrum, "leading", "gap", "index", "frequencies", "basis", "limit_basis", "projector")
        values |= read(self.rates, "g", "kappa", "tail", "C")
        values |= {f"rate_w{p}": None if self.rates is None else self.rates.decay(p) for p in (1, 2)}
        values |= read(self.terminal, "keeps_E", "width")
        values |= {f"terminal_{name}": value for name, value in read(self.terminal, "basis", "rate", "reason").items()}
        needs, elements = [asdict(need) for need in self.requires], [one.as_dict() for one in self.elements]
        return to_plain(values | {"requires": needs, "elements": elements})


def _project(x: Tensor, A: Tensor) -> Tensor:
    """A x at the norm of x; raises if it is only rounding for some token, |A x| <= eps | |A| |x| |."""
    A = A.to(x)
    y = x @ A.mT
    rounding = torch.finfo(x.dtype).eps * (x.abs() @ A.abs().mT).norm(dim=-1)
    is_lost = y.norm(dim=-1) <= rounding
    if checks.can_read(x) and bool(is_lost.any()):
        raise ValueError(
            f"{int(is_lost.sum())} of {is_lost.numel()} tokens have Pi x = 0 to rounding, and no limit of their own; "
            "remove or perturb them."
        )
    return y * (x.norm(dim=-1) / y.norm(dim=-1))[..., None]


def limit(attention: Attention, tol: float = 1e-6) -> LimitMap:
    """The limit map of an attention flow on the sphere at low temperature: where the tokens concentrate.

    Args:
        attention: softmax attention without a causal mask; its beta is not used. Leading axes of the weights are a
            batch. Its context is what tokens attend to: without one they fill their sphere, and M = V G; for a centred
            EllipsoidSupport (or capped Gaussian) with covariance S, M = V S G; with another measure, or a fixed Cloud,
            the limit is not linear. A linear flow x' = P_x M x of your own is `Attention.from_matrices(I, M)`.
        tol: gaps below tol |M|, parts of M below it, and singular values of G below tol |G| count as zero.

    Example:
        >>> from attn_flow import Attention
        >>> G, V = torch.diag(torch.tensor([3.0, 1.0])), torch.diag(torch.tensor([1.0, 2.0]))
        >>> target = limit(Attention.from_matrices(G, V))
        >>> target.case, round(target.rates.g, 4), round(target.t_min(1000.0), 2)
        ('fixed', 0.3333, 10.36)
    """
    if not 0 < tol < 1:
        raise ValueError(f"tol = {tol}, expected a relative tolerance between 0 and 1.")
    plain = attention.with_beta(1.0)
    shape = plain.batch_shape
    if not shape:
        return _limit(plain, tol)
    expand = lambda name, z: z.expand(*shape, *z.shape[-AXES[name] :]).flatten(0, len(shape) - 1)
    weights = {name: expand(name, z) for name, z in plain.tensors.items()}
    each = tuple(_limit(plain.copy_with(**dict(zip(weights, one))), tol) for one in zip(*weights.values()))
    return LimitMap(
        "batch", f"a batch of {len(each)} limits, which are in `elements`", plain, elements=each, shape=tuple(shape)
    )


def _limit(attention: Attention, tol: float) -> LimitMap:
    """The limit map of one attention."""
    fills_sphere = attention.context is None or isinstance(attention.context, UniformSphere)
    # Directions on a sphere of any radius move alike.
    linear = linear_part(attention.with_context(None) if fills_sphere else attention, tol)
    if linear is None:
        reason = "several heads, a bias or its context make the flow nonlinear, and tokens are followed one by one"
        return LimitMap("nonlinear", reason, attention)
    W, N = (A.detach() for A in linear)
    M, values = W @ N, attention.OV[0].detach().double()
    main, top = spectrum(M, tol), spectrum(values, tol)
    phase = TerminalPhase(top.basis, top.gap)
    is_singular = int(torch.linalg.matrix_rank(N, rtol=tol)) < len(N)
    if is_singular and main.leading <= tol * float(torch.linalg.matrix_norm(M, 2)):
        reason = f"G is singular and the leading real part of M is {main.leading:.3g}: tokens may run into ker G"
        return LimitMap("undefined", reason, attention, main, terminal=phase)
    if attention.context is None:
        phase = exit_of_clusters(phase, main, values, N, tol)
    elif main.gap < math.inf:
        phase = replace(phase, exit_rate=0.0, reason="tokens attend to a fixed context and not to each other")
    power = None
    if main.case == "jordan" and not main.frequencies:
        # Tokens are 1/t from their limits, and a share t^{-rank} of the mass still crosses between limits.
        power = min(1.0, main.limit_basis.shape[1] / 2)
    reason = f"the largest real part of the eigenvalues of M = V G is {main.leading:.6g}, with dim E = {main.dimension}"
    reason += f", and the next is lower by {main.gap:.3g}" if main.gap < math.inf else ""
    return LimitMap(main.case, reason, attention, main, concentration_rates(W, N, tol), power, phase)
