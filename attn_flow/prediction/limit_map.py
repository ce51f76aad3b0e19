"""Where low-temperature attention concentrates: the limit map, its rates and what follows it.

For large beta the distribution mu_t of the tokens concentrates on P_# mu_0,
W(mu_t, P_# mu_0) <= K (sqrt(log(beta+1)/beta) e^{Ct} + e^{-ct})   (Alcalde, Bungert, Riedl, Roith, arXiv 2605.10931),
where P(x) = Pi x / |Pi x| and Pi is the spectral projector of M = V G for the eigenvalues of largest real part.
docs/theory.md says which formulas are proved there and which are derived here.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, overload

import torch
from torch import Tensor

from attn_flow.attention import Attention
from attn_flow.base import checks
from attn_flow.base.files import to_plain
from attn_flow.drawing import html_text
from attn_flow.measures import Cloud, Measure, UniformSphere, as_cloud
from attn_flow.prediction.rates import Rates, concentration_rates
from attn_flow.prediction.requirements import Requirement, check_requirements, requirements
from attn_flow.prediction.spectrum import Spectrum, spectrum
from attn_flow.prediction.terminal import TerminalPhase, exit_of_clusters
from attn_flow.prediction.words import limit_sentences
from attn_flow.prediction.zero_temperature import (
    check_support,
    is_nonzero,
    linear_part,
    resting_points,
    zero_temperature_flow,
)

Times = float | Sequence[float] | Tensor


@dataclass(frozen=True, eq=False, repr=False)
class LimitMap:
    """The predicted limit of an attention flow, as `limit` returns it. A record is None where it does not apply.

    Attributes:
        case: "fixed": P(x) = Pi x/|Pi x|. "rotating": tokens concentrate on E and rotate in it. "jordan": they approach
            algebraically. "stationary": M = c I, nothing moves. "nonlinear": several heads, biases or other supports,
            where tokens are followed until they rest. "undefined": no limit is established. "batch": the weights are a
            batch, and `limit(attention)[i]` is one of its limits.
        reason: how the case is known, in words.
        attention, support: the arguments of `limit`.
        spectrum: the leading spectral subspace E of M, its projector and gap.
        rates, power: the exponential rates of concentration; the exponent a of W_2 ~ t^{-a} at a Jordan block.
        terminal: what clusters do once they have formed.
        elements, shape: the limits of a batch, and its shape.

    Example:
        >>> from attn_flow import Attention, limit
        >>> G, V = torch.tensor([[2.0, 0.5], [0.0, 1.0]]), torch.eye(2)
        >>> target = limit(Attention.from_matrices(G, V))
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
    support: Measure | None = None
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
        if self.rates is not None:
            words.append(f"decay of W2 {self.rates.decay():.6g}")
        if self.exit_rate:
            words.append(f"exit rate {self.exit_rate:.6g}")
        return f"LimitMap({', '.join(words)})"

    def _repr_html_(self) -> str:  # for notebooks
        return html_text([repr(self), *limit_sentences(self.as_dict())])

    def __iter__(self) -> Iterator[LimitMap]:
        return iter(self.elements)

    def __getitem__(self, index: int) -> LimitMap:
        return self.elements[index]

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
        return requirements(self.spectrum, self.rates, self.terminal)

    def examine(self, x: Tensor | Cloud, beta: float | None = None) -> tuple[Requirement, ...]:
        """Check `requires` against one initial cloud (n, d), and its number of tokens against beta if that is given.

        Example:
            >>> from attn_flow import Attention, limit
            >>> from attn_flow.measures.quadrature import circle
            >>> G, V = torch.diag(torch.tensor([4.0, 1.0])), torch.diag(torch.tensor([1.0, 2.0]))
            >>> needs = limit(Attention.from_matrices(G, V)).examine(circle(100))
            >>> [need.name for need in needs if need.met is False]
            ['asymmetric distribution']
        """
        cloud = as_cloud(x)
        if cloud.x.ndim != 2 or cloud.x.shape[-1] != self.attention.dim:
            raise ValueError(f"x has shape {tuple(cloud.x.shape)}, expected one cloud (n, {self.attention.dim}).")
        return check_requirements(self.requires, cloud, beta, self.attention, self.spectrum)

    def t_min(self, beta: float) -> float | None:
        """The time of least W2, to leading order in log(beta): log(beta)/(2g) (g + x)/(c_2 + x), with exit rate x.

        The least W2 falls like beta^{-1/2} for rates.tail >= 3 g and beta >= 100, within 0.03 of that exponent. Near
        tail = 2 g it is reached slowly, and for tail < 2 g it is smaller (docs/theory.md).

        The distribution must not be symmetric. None where this does not apply: dim E > 1, V does not
        map E into itself, or clusters do not leave at a known, finite rate; `requires` names the condition.
        """
        if not 1 < beta < math.inf:
            raise ValueError(f"beta = {beta}, expected 1 < beta < inf: t_min is an estimate for low temperature.")
        if self.rates is None or not self.exit_rate:
            return None
        g, c, exit_rate = self.rates.g, self.rates.decay(), self.exit_rate
        return math.log(beta) / (2 * g) * (g + exit_rate) / (c + exit_rate)

    def width(self, beta: float) -> float | None:
        """W_2 of clusters to their centres at beta if their tokens repel each other; None if they keep no width.

        Example:
            >>> from attn_flow import Attention, limit
            >>> G, V = torch.diag(torch.tensor([1.0, 2.0])), torch.diag(torch.tensor([-1.0, -3.0]))
            >>> round(limit(Attention.from_matrices(G, V)).width(beta=300.0), 4)
            0.0258
        """
        if self.terminal is None or self.terminal.width is None:
            return None
        return math.sqrt(self.terminal.width / beta)

    @overload
    def push_forward(self, x: Tensor, t: Times | None = None) -> Tensor: ...
    @overload
    def push_forward(self, x: Cloud, t: Times | None = None) -> Cloud: ...
    def push_forward(self, x: Tensor | Cloud, t: Times | None = None) -> Tensor | Cloud:
        """P(x), where each token goes; with t, the moving push-forward e^{tau(t) M} Pi x on the sphere of E.

        Args:
            x: tokens (..., n, d) or a `Cloud`; tokens keep their norms.
            t: a time >= 0, or increasing times (T,). A limit that rotates exists only at a time.

        Returns:
            The type it was given; for times (T,) with a first axis T. Differentiable in x where the limit is linear.
            Tokens without an established limit raise ValueError: those with Pi x = 0, and where the limit is not
            linear those that do not come to rest at a stable equilibrium.

        Example:
            >>> from attn_flow import Attention, Cloud, limit
            >>> attention = Attention.from_matrices(torch.eye(2), torch.diag(torch.tensor([2.0, 1.0])))
            >>> limit(attention).push_forward(Cloud(torch.tensor([[0.6, 0.8], [-0.6, 0.8]]))).x
            tensor([[ 1.,  0.],
                    [-1.,  0.]])
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
            x = x.expand(*torch.broadcast_shapes(x.shape[:-2], self.shape), *x.shape[-2:])
            parts = x.flatten(-2 - len(self.shape), -3).unbind(-3)
            each = [limit._push_forward(part, times) for limit, part in zip(self.elements, parts)]
            return torch.stack(each, dim=-3).unflatten(-3, self.shape)
        if self.case == "nonlinear":
            if times is not None:
                raise ValueError("a nonlinear limit has no moving push-forward; leave out the time t.")
            return resting_points(self.attention, x, self.support)
        if self.case == "undefined" or self.spectrum is None:
            raise ValueError(f"no limit is established: {self.reason}.")
        if times is not None:
            grid = times if times[0] == 0 else [0.0, *times]
            path = zero_temperature_flow(self.attention, x, grid, self.support).x
            return _project(path[-len(times) :], self.spectrum.projector)
        if self.rotates:
            pair = f"{self.spectrum.leading:.4g} +- {self.spectrum.frequencies[0]:.4g}i"
            raise ValueError(f"the leading eigenvalues {pair} rotate: no limit. Give a time: push_forward(x, t).")
        return _project(x, self.spectrum.direction)

    def as_dict(self) -> dict[str, Any]:
        """All numbers and words, ready for JSON; infinities are strings, and None stands where nothing applies."""
        if self.elements:
            each = [one.as_dict() for one in self.elements]
            return {"case": self.case, "shape": list(self.shape), "elements": each}
        read = lambda record, *names: {name: getattr(record, name, None) for name in names}
        values = read(self, "case", "reason", "dimension", "power")
        values |= read(self.spectrum, "leading", "gap", "index", "frequencies", "basis", "projector")
        values |= read(self.rates, "g", "kappa", "tail", "C")
        values |= {f"rate_w{p}": None if self.rates is None else self.rates.decay(p) for p in (1, 2)}
        values |= read(self.terminal, "exit_rate", "keeps_E", "width")
        values |= {f"terminal_{name}": value for name, value in read(self.terminal, "basis", "rate", "reason").items()}
        return to_plain(values | {"requires": [asdict(need) for need in self.requires]})


def _project(x: Tensor, A: Tensor) -> Tensor:
    """A x at the norm of x; raises if it is only rounding for some token, |A x| <= eps | |A| |x| |."""
    A = A.to(x)
    y = x @ A.mT
    if checks.can_read(x):
        rounding = torch.finfo(x.dtype).eps * (x.abs() @ A.abs().mT).norm(dim=-1)
        if count := int((y.norm(dim=-1) <= rounding).sum()):
            raise ValueError(
                f"{count} of {y[..., 0].numel()} tokens have Pi x = 0 to rounding, and no limit of their own; remove "
                "or perturb them."
            )
    return y * (x.norm(dim=-1) / y.norm(dim=-1))[..., None]


def limit(attention: Attention, support: Measure | None = None, tol: float = 1e-6) -> LimitMap:
    """The limit map of an attention flow on the sphere at low temperature: where the tokens concentrate.

    Args:
        attention: softmax attention without a causal mask; its beta is not used. Leading axes of the weights are a
            batch. A linear flow x' = P_x M x of your own is `Attention.from_matrices(I, M)`.
        support: what tokens attend to, by default the context of the attention. None: they fill their
            sphere, and M = V G. A centred EllipsoidSupport (or capped Gaussian) with covariance S: M = V S G. Any other
            measure, or a fixed Cloud: the limit is not linear.
        tol: gaps below tol |M|, parts of M below it, and singular values of G below tol |G| count as zero.

    Returns:
        A `LimitMap`.

    Example:
        >>> from attn_flow import Attention
        >>> G, V = torch.diag(torch.tensor([3.0, 1.0])), torch.diag(torch.tensor([1.0, 2.0]))
        >>> target = limit(Attention.from_matrices(G, V))
        >>> target.case, round(target.rates.g, 4), round(target.t_min(1000.0), 2)
        ('fixed', 0.3333, 10.36)
    """
    support = attention.context if support is None else support
    check_support(attention, support)
    if attention.kind != "softmax" or attention.causal:
        words = f"attention of kind {attention.kind!r}, causal={attention.causal}"
        raise ValueError(f"{words}: the limit map is known for softmax attention without a causal mask.")
    if not 0 < tol < 1:
        raise ValueError(f"tol = {tol}, expected a relative tolerance between 0 and 1.")
    bias, shift = attention.G_bias, attention.value_bias
    weights = {"Q": (attention.G, 3), "V": (attention.OV, 3), "query_bias": (bias, 2), "value_bias": (shift, 1)}
    arrays = {name: (z, axes) for name, (z, axes) in weights.items() if z is not None}
    shape = torch.broadcast_shapes(*(z.shape[:-axes] for z, axes in arrays.values()))
    if not shape:
        return _limit(attention, support, tol)
    flat = {name: z.expand(*shape, *z.shape[-k:]).flatten(0, len(shape) - 1) for name, (z, k) in arrays.items()}
    each = tuple(_limit(Attention(**dict(zip(flat, one))), support, tol) for one in zip(*flat.values()))
    return LimitMap("batch", f"{len(each)} limits", attention, support, elements=each, shape=tuple(shape))


def _limit(attention: Attention, support: Measure | None, tol: float) -> LimitMap:
    """The limit map of one attention."""
    fills_sphere = support is None or isinstance(support, UniformSphere)  # of any radius: directions move alike
    linear = linear_part(attention, None if fills_sphere else support, tol)
    values = attention.to(torch.float64).OV.detach().sum(-3)
    top = spectrum(values, tol)
    phase = TerminalPhase(top.basis, top.gap)
    if linear is None:
        causes = {
            "several heads": attention.heads > 1,
            "a query bias": is_nonzero(attention.G_bias),
            "a value bias": is_nonzero(attention.value_bias),
        }
        words = " and ".join(name for name, holds in causes.items() if holds) or "the support is no centred ellipsoid"
        reason = f"{words}: the flow is not linear, and tokens are followed one by one"
        return LimitMap("nonlinear", reason, attention, support, terminal=None if causes["a value bias"] else phase)
    W, N = (A.detach() for A in linear)
    M = W @ N
    main = spectrum(M, tol)
    is_singular = int(torch.linalg.matrix_rank(N, rtol=tol)) < len(N)
    if is_singular and main.leading <= tol * float(torch.linalg.matrix_norm(M, 2)):
        reason = f"G is singular and the leading real part of M is {main.leading:.3g}: tokens may run into ker G"
        return LimitMap("undefined", reason, attention, support, main, terminal=phase)
    if fills_sphere:
        phase = exit_of_clusters(phase, main, values, N, tol)
    power = None
    if main.case == "jordan" and not main.frequencies:
        # Tokens are 1/t from their limits, and a share t^{-rank} of the mass still crosses between limits.
        power = min(1.0, int(torch.linalg.matrix_rank(main.direction, rtol=tol)) / 2)
    rates = concentration_rates(main, W, N, tol)
    return LimitMap(main.case, _reason(main), attention, support, main, rates, power, phase)


def _reason(spectrum: Spectrum) -> str:
    """How the case of a linear limit is known."""
    leading, frequencies = f"{spectrum.leading:.6g}", ", ".join(f"{b:.6g}i" for b in spectrum.frequencies)
    return {
        "fixed": f"{spectrum.dimension} leading eigenvalue(s) {leading}, semisimple, gap {spectrum.gap:.3g}",
        "rotating": f"leading eigenvalues {leading} +- {frequencies}, semisimple: no pointwise limit",
        "jordan": f"Jordan block of index {spectrum.index} at {leading}: tokens approach like 1/t",
        "stationary": f"M = {leading} I to rounding or tol: every direction is stationary",
    }[spectrum.case]
