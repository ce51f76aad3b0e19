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
from attn_flow.dynamics.harmonics import Harmonics, harmonics_at
from attn_flow.dynamics.steppers import Adaptive, dopri5
from attn_flow.geometry import Euclidean
from attn_flow.measures.cloud import Cloud
from attn_flow.measures.quadrature import density_values
from attn_flow.measures.von_mises_fisher import VonMisesFisher

NEGATIVE = 1e-6  # of the largest density: below zero by more is not resolved, by less is rounding of an empty region
BANDWIDTH = {2: 64, 3: 20}  # by dimension
MAX_BANDWIDTH = {2: 4096, 3: 128}  # tables of a few gigabytes


@dataclass(frozen=True, eq=False, repr=False)
class DensityPath:
    """A density along the mean-field flow, as coefficients in harmonics; made by `density_flow`.

    Args:
        t: (T,), times.
        coefficients: (T, M), of the orthonormal harmonics of the uniform distribution, c_0 = 1 first.
        harmonics: these harmonics, with nodes and weights.
        about: what was run, plain JSON.

    Example:
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
        d = self.harmonics.x.shape[-1]
        if x.ndim != 2 or x.shape[1] != d:
            raise ValueError(f"x has shape {tuple(x.shape)}, expected (P, {d}) unit vectors.")
        checks.require_unit("x", x)
        return self.coefficients @ harmonics_at(x.double(), self.harmonics.bandwidth).mT

    def amplitudes(self) -> Tensor:
        """The size sqrt(sum c^2) of every degree 0, ..., bandwidth, (T, bandwidth + 1); sqrt(2) |c_k| on the circle."""
        return self.harmonics.amplitudes(self.coefficients)

    def growth_rates(self, k: int) -> Tensor:
        """d/dt log of the size of degree k, over every interval of t, (T - 1,)."""
        return self.amplitudes()[:, k].log().diff() / self.t.diff().to(self.coefficients)

    def cloud(self, index: int) -> Cloud:
        """The density at one time as a weighted cloud on its nodes: moments, W2, energies are those of a `Cloud`."""
        rho = self.harmonics.values @ self.coefficients[index]
        return Cloud(self.harmonics.x, self.harmonics.weights * rho.clamp_min(0.0))

    def moments(self) -> tuple[Tensor, Tensor]:
        """Mean (T, d) and covariance (T, d, d) at every time."""
        means, covariances = zip(*(self.cloud(i).moments() for i in range(len(self))))
        return torch.stack(means), torch.stack(covariances)


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
        attention: of dimension 2 or 3, without a causal mask, at finite beta.
        density: a `VonMisesFisher`, or a function of unit vectors x (N, d) -> (N,), nonnegative, relative to the
            uniform distribution; it is scaled to mass one.
        t: increasing times; a single number T stands for 101 times from 0 to T.
        diffusion: D >= 0, the noise dx = ... + sqrt(2 D) dB of every token, as a Laplacian; per unit of t.
        bandwidth: the largest degree; by default 64 on the circle and 20 on S^2.
        tol: local error of a step in time, of the coefficients.
        tail: the largest share of the density that its highest tenth of degrees may hold; more is an error.

    Returns:
        A `DensityPath`.

    Example:
        >>> from attn_flow import Attention
        >>> attention = Attention.identity(2, beta=5.0)
        >>> path = density_flow(attention, lambda x: 1 + 1e-6 * (4 * x[:, 0] ** 3 - 3 * x[:, 0]), [0.0, 1.0])
        >>> round(float(path.growth_rates(3)[0]), 4)  # of cos(3 theta): 9 I_3(5) / (5 I_0(5))
        0.6827
    """
    if not isinstance(attention, Attention) or attention.context is not None:
        raise TypeError(f"attention is {attention!r}, expected an Attention without context.")
    d = attention.dim
    if d not in BANDWIDTH or attention.batch_shape:
        what = f"dimension {d} and batch {tuple(attention.batch_shape)}"
        raise ValueError(f"attention of {what}; one density is solved at a time, on the circle (d = 2) or S^2 (d = 3).")
    if attention.causal:
        raise ValueError("causal=True distinguishes tokens, but a density has no single tokens.")
    if attention.is_hardmax:
        raise ValueError("beta = inf: a density fills the sphere; use zero_temperature_flow, or a finite beta.")
    L = BANDWIDTH[d] if bandwidth is None else bandwidth
    if not 4 <= L <= MAX_BANDWIDTH[d]:
        raise ValueError(f"bandwidth = {L}, expected from 4 to {MAX_BANDWIDTH[d]} degrees.")
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
                trial, error = run.step(c, used)
                size = control.next_size(used, error / tol if math.isfinite(error) else math.inf)
                if not error <= tol:  # NaN too
                    h = size
                    continue
                h = max(h, size) if used < h else size  # a step cut short by a time is no reason for shorter ones
                now = end if used == end - now else now + used
                c = trial
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
        rho = density_values(density.to(torch.float64).density if isinstance(density, VonMisesFisher) else density, x)
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
        """One step of Dormand and Prince, and its error estimate.

        It integrates y = e^{t decay} c, so that the Laplacian is solved exactly (Lawson). Where e^{h decay} overflows,
        the error is NaN and the step is rejected.
        """
        decayed = lambda t: torch.exp(-t * self.decay)
        velocity = lambda t, y: self.slope(decayed(t) * y) / decayed(t)
        end, error, _ = dopri5.step_with_error(velocity, 0.0, c, h, Euclidean(), self.slope(c))
        end, error = decayed(h) * end, decayed(h) * error
        return end, float(error.norm() / end.norm().clamp_min(1.0))

    def check(self, c: Tensor, t: float | None) -> None:
        """Raise where the highest degrees hold more than `tail` of the density, or where it is negative."""
        L, size = self.basis.bandwidth, self.basis.amplitudes(c)
        first = L + 1 - max(2, L // 10)
        share = float(size[first:].norm() / size.norm())
        rho = self.basis.values @ c
        lowest = float(rho.min() / rho.max())
        if share <= self.tail and -lowest <= max(NEGATIVE, self.tail):
            return
        when = "at the start" if t is None else f"at t = {t:.4g}"
        raise ValueError(
            f"the density is not resolved {when}: degrees {first} to {L} hold {share:.2g} of it (tail = {self.tail:g}) "
            f"and its lowest value is {lowest:.2g} of the highest. Use bandwidth = {2 * L} or more, an earlier end, "
            "or diffusion > 0; a density that becomes an atom needs a cloud."
        )
