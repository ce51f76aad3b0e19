"""The mean-field continuity equation for densities on the circle and on S^2, spectral in space.

    d rho/dt + div(rho P_x F[rho](x)) = D Laplacian(rho),      rho relative to the uniform distribution, of mass one.

In harmonics Y_j, c_j = int rho Y_j: c_j' = int <grad Y_j, P_x F> rho - D l (l + d - 2) c_j. The mass c_0 never changes.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from attn_flow.attention.attention import Attention
from attn_flow.base import checks
from attn_flow.dynamics.harmonics import Harmonics, evaluated
from attn_flow.dynamics.steppers import Adaptive, dopri5
from attn_flow.measures.cloud import Cloud
from attn_flow.measures.von_mises_fisher import VonMisesFisher

NEGATIVE = 1e-6  # of the largest density: below zero by more is not resolved, by less is rounding of an empty region
BANDWIDTH = {2: 64, 3: 20}  # by dimension
MAX_BANDWIDTH = {2: 4096, 3: 128}  # tables of a few gigabytes


@dataclass(frozen=True, eq=False, repr=False)
class DensityPath:
    """A density along the mean-field flow, as coefficients in harmonics; made by `density_flow`.

    t: (T,). coefficients: (T, M), of the orthonormal harmonics of the uniform law, c_0 = 1 first. about: what was run.

    >>> from attn_flow import Attention
    >>> path = density_flow(Attention.identity(3), lambda x: 1 + 0.1 * x[:, 2], [0.0, 1.0])
    >>> path
    DensityPath(2 times from 0 to 1, S^2, bandwidth 20)
    >>> round(float(path.cloud(0).mean[2]), 4)  # a cloud, for whatever takes one
    0.0333
    """

    t: Tensor
    coefficients: Tensor
    harmonics: Harmonics = field(repr=False)
    about: dict[str, Any] = field(default_factory=dict)

    def __repr__(self) -> str:
        span = f"{len(self)} times from {float(self.t[0]):.6g} to {float(self.t[-1]):.6g}"
        where = "circle" if self.harmonics.x.shape[-1] == 2 else "S^2"
        return f"DensityPath({span}, {where}, bandwidth {self.harmonics.bandwidth})"

    def __len__(self) -> int:
        return self.t.shape[0]

    def density(self, x: Tensor) -> Tensor:
        """The density at unit vectors x (P, d), relative to the uniform distribution, (T, P)."""
        checks.require_tokens("x", x)
        if x.ndim != 2 or x.shape[-1] != self.harmonics.x.shape[-1]:
            raise ValueError(f"x has shape {tuple(x.shape)}, expected (P, {self.harmonics.x.shape[-1]}) unit vectors.")
        if float((x.double().norm(dim=-1) - 1).abs().max()) > 4 * torch.finfo(x.dtype).eps ** 0.5:
            raise ValueError("x has rows that are not unit vectors; divide them by their lengths.")
        return self.coefficients @ evaluated(x.double(), self.harmonics.bandwidth).mT

    def amplitudes(self) -> Tensor:
        """The size sqrt(sum c^2) of every degree 0, ..., bandwidth, (T, bandwidth + 1); sqrt(2) |c_k| on the circle."""
        by_degree = self.coefficients.new_zeros(len(self), self.harmonics.bandwidth + 1)
        by_degree.index_add_(1, self.harmonics.degree.long(), self.coefficients.square())
        return by_degree.sqrt()

    def growth_rates(self, k: int) -> Tensor:
        """d/dt log of the size of degree k, over every interval of t, (T - 1,)."""
        if not isinstance(k, int) or not 0 <= k <= self.harmonics.bandwidth:
            raise ValueError(f"k = {k}, expected a degree from 0 to {self.harmonics.bandwidth}.")
        return self.amplitudes()[:, k].log().diff() / self.t.diff().to(self.coefficients)

    def cloud(self, index: int) -> Cloud:
        """The density at one time as a weighted cloud on its nodes: moments, W2, energies are those of a `Cloud`."""
        rho = self.harmonics.values @ self.coefficients[index]
        return Cloud(self.harmonics.x, self.harmonics.weights * rho.clamp_min(0.0))

    def moments(self) -> tuple[Tensor, Tensor]:
        """Mean (T, d) and covariance (T, d, d) at every time."""
        moments = [self.cloud(i).moments() for i in range(len(self))]
        return torch.stack([m for m, _ in moments]), torch.stack([S for _, S in moments])


def density_flow(
    attention: Attention,
    density: Callable[[Tensor], Tensor] | VonMisesFisher,
    t: float | Sequence[float] | Tensor,
    *,
    diffusion: float = 0.0,
    bandwidth: int | None = None,
    tol: float = 1e-9,
    tail: float = 1e-7,
) -> DensityPath:
    """Solve the mean-field continuity equation of an attention on the unit circle or on S^2.

    Args:
        attention: of dimension 2 or 3, any heads, biases and kind, without a causal mask, at finite beta.
        density: a `VonMisesFisher`, or a function of unit vectors x (N, d) -> (N,), nonnegative, relative to the
            uniform law; it is scaled to mass one.
        t: increasing times; a single number T stands for 101 times from 0 to T.
        diffusion: D >= 0, the noise dx = ... + sqrt(2 D) dB of every token, as a Laplacian; per unit of t.
        bandwidth: the largest degree kept; 64 on the circle and 20 on S^2 unless given.
        tol: local error of a step in time, of the coefficients.
        tail: the largest share of the density that its highest tenth of degrees may hold. More is not resolved, and
            refused by name with the bandwidth to use.

    Returns:
        A `DensityPath`: times, coefficients, density at points, sizes and growth rates of modes, moments, clouds.

    Example:
        >>> from attn_flow import Attention
        >>> attention = Attention.identity(2, beta=5.0)
        >>> path = density_flow(attention, lambda x: 1 + 1e-6 * (4 * x[:, 0] ** 3 - 3 * x[:, 0]), [0.0, 1.0])
        >>> round(float(path.growth_rates(3)[0]), 4)  # of cos(3 theta): 9 I_3(5) / (5 I_0(5))
        0.6827
    """
    if not isinstance(attention, Attention) or attention.context is not None:
        raise TypeError(f"density_flow has no theory for {attention!r}, expected an Attention alone.")
    d = attention.dim
    if attention.batch_shape:
        raise ValueError(f"attention has the batch {tuple(attention.batch_shape)}; solve for each element by itself.")
    if d not in BANDWIDTH:
        raise ValueError(f"attention of dimension {d}; densities are solved on the circle (d = 2) and on S^2 (d = 3).")
    if attention.causal or not attention.self_attention:
        raise ValueError("causal and self_attention=False distinguish tokens, but a density has no single tokens.")
    if attention.is_hardmax:
        raise ValueError("beta = inf: a density fills the sphere; use zero_temperature_flow, or a finite beta.")
    L = BANDWIDTH[d] if bandwidth is None else bandwidth
    if not 4 <= L <= MAX_BANDWIDTH[d]:
        raise ValueError(f"bandwidth = {L}, expected from 4 to {MAX_BANDWIDTH[d]} degrees.")
    if isinstance(density, VonMisesFisher):
        checks.require_shape("the mean of the density", density.mean, (d,))
    checks.require_nonnegative(diffusion=diffusion)
    checks.require_positive(tail=tail)
    control, times = Adaptive(tol), checks.time_grid(t)
    basis = Harmonics.of(d, L).to(attention.G.device)
    run = _Spectral(attention.to(torch.float64), basis, diffusion, tail)
    c = run.start(density)
    coefficients, h = [c], 0.01
    with torch.no_grad():
        for now, end in itertools.pairwise(times):
            while now < end:
                if run.evaluations > len(dopri5.b) * control.max_steps:
                    raise FloatingPointError(f"{control.max_steps} steps took t to {now:.4g} only; raise tol.")
                used = min(h, end - now)
                ahead, error = run.step(c, used)
                longer = control.next_size(used, error / tol if math.isfinite(error) else math.inf)
                if not error <= tol:  # NaN too
                    h = longer
                    continue
                h = max(h, longer) if used < h else longer  # a step cut short by a time is no reason for shorter ones
                now = end if used == end - now else now + used
                c = ahead
                run.check(c, now)
            coefficients.append(c)
    about = {"field": attention.summary(), "diffusion": diffusion, "bandwidth": L, "tol": tol}
    about["evaluations"] = run.evaluations
    return DensityPath(torch.tensor(times, dtype=torch.float64), torch.stack(coefficients), basis, about)


class _Spectral:
    """One integration in harmonics: the right-hand side, a step, and whether it is resolved."""

    def __init__(self, attention: Attention, basis: Harmonics, diffusion: float, tail: float) -> None:
        self.attention, self.basis, self.tail = attention, basis, tail
        self.decay = diffusion * basis.laplacian
        self.test = (basis.gradients * basis.weights[:, None, None]).transpose(1, 2).reshape(-1, len(basis.degree))
        self.evaluations = 0

    def start(self, density: Callable[[Tensor], Tensor] | VonMisesFisher) -> Tensor:
        x, w = self.basis.x, self.basis.weights
        rho = density.to(torch.float64).density(x) if isinstance(density, VonMisesFisher) else density(x)
        if rho.shape != w.shape:
            raise ValueError(f"density returned shape {tuple(rho.shape)}, expected {tuple(w.shape)}: one per node.")
        if not bool(torch.isfinite(rho).all() & (rho >= 0).all() & (rho.max() > 0)):
            values = f"{float(rho.min()):.3g} to {float(rho.max()):.3g}"
            raise ValueError(f"density returned values from {values}, expected finite numbers >= 0, not all of them 0.")
        c = self.basis.values.mT @ (w * rho.double())
        c = c / c[0].clone()
        self.check(c, None)
        return c

    def slope(self, c: Tensor) -> Tensor:
        """int <grad Y_j, F> rho, (M,); gradients are tangent, so F needs no projection."""
        self.evaluations += 1
        rho = self.basis.values @ c
        masses = self.basis.weights * rho.clamp_min(0.0)  # negative by rounding only, see `check`
        masses = masses / masses.sum()
        F = self.attention(0.0, self.basis.x, masses.log())
        return (F * rho[:, None]).reshape(-1) @ self.test

    def step(self, c: Tensor, h: float) -> tuple[Tensor, float]:
        """One step of Dormand and Prince with the Laplacian solved exactly (Lawson), and its error estimate."""
        clock = [0.0, *(sum(row) for row in dopri5.a)]
        later = lambda z, part: z if part == 0 else z * torch.exp(-self.decay * (part * h))
        k = [self.slope(c)]
        for row, now in zip(dopri5.a, clock[1:]):
            stage = later(c, now) + h * sum(a * later(k_j, now - then) for a, k_j, then in zip(row, k, clock) if a)
            k.append(self.slope(stage))
        ahead = later(c, 1.0) + h * sum(b * later(k_j, 1 - then) for b, k_j, then in zip(dopri5.b, k, clock) if b)
        assert dopri5.embedded is not None
        gaps = [b - e for b, e in zip(dopri5.b, dopri5.embedded)]
        error = h * sum(gap * later(k_j, 1 - then) for gap, k_j, then in zip(gaps, k, clock) if gap)
        return ahead, float(torch.as_tensor(error).norm() / max(1.0, float(ahead.norm())))

    def check(self, c: Tensor, t: float | None) -> None:
        """Raise where the highest degrees hold more than `tail` of the density, or where it is negative."""
        L, degree = self.basis.bandwidth, self.basis.degree
        size = c.new_zeros(L + 1).index_add_(0, degree.long(), c.square()).sqrt()
        first = L + 1 - max(2, L // 10)
        share = float(size[first:].norm() / size.norm())
        rho = self.basis.values @ c
        below = float(-rho.min() / rho.max())
        if share <= self.tail and below <= max(NEGATIVE, self.tail):
            return
        when = "at the start" if t is None else f"at t = {t:.4g}"
        raise ValueError(
            f"the density is not resolved {when}: degrees {first} to {L} hold {share:.2g} of it (tail = {self.tail:g}) "
            f"and its lowest value is {-below:.2g} of the highest. Use bandwidth = {2 * L} or more, an earlier end, "
            "or diffusion > 0; a density that becomes an atom needs a cloud."
        )
