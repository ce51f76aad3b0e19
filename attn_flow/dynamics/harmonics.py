"""Orthonormal harmonics on the circle and on S^2 under the uniform distribution, with nodes that integrate products.

On the circle 1, sqrt(2) cos k theta, sqrt(2) sin k theta; on S^2 the real spherical harmonics, by the recurrence of the
normalised Legendre functions in cos(angle). The Laplacian of degree l has the eigenvalue -l (l + d - 2).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True, eq=False, repr=False)
class Harmonics:
    """Harmonics up to degree `bandwidth` at nodes x of weights w (of sum one): values, gradients along the sphere."""

    bandwidth: int
    x: Tensor  # (N, d)
    weights: Tensor  # (N,)
    degree: Tensor  # (M,)
    values: Tensor  # (N, M)
    gradients: Tensor  # (N, M, d)

    @property
    def laplacian(self) -> Tensor:
        """l (l + d - 2) of every harmonic, (M,)."""
        return self.degree * (self.degree + self.x.shape[-1] - 2)

    def amplitudes(self, coefficients: Tensor) -> Tensor:
        """sqrt(sum c^2) over every degree 0, ..., bandwidth of coefficients (..., M), (..., bandwidth + 1)."""
        by_degree = coefficients.new_zeros(*coefficients.shape[:-1], self.bandwidth + 1)
        return by_degree.index_add_(-1, self.degree.long(), coefficients.square()).sqrt()

    def to(self, device: torch.device) -> Harmonics:
        """The same on another device."""
        return Harmonics(self.bandwidth, *(z.to(device) for z in vars(self).values() if isinstance(z, Tensor)))

    @classmethod
    def of(cls, d: int, bandwidth: int) -> Harmonics:
        """On nodes that are exact for products of three harmonics (circle), or of degree 3 bandwidth (S^2)."""
        size = 3 * bandwidth + 1
        turn = 2 * math.pi * (torch.arange(size, dtype=torch.float64) + 0.5) / size
        if d == 2:
            x, weights = torch.stack([turn.cos(), turn.sin()], dim=-1), torch.full_like(turn, 1 / size)
        else:
            z_, w_ = np.polynomial.legendre.leggauss(size // 2 + 1)
            z, w = torch.from_numpy(z_), torch.from_numpy(w_) / 2
            r = (1 - z**2).sqrt()
            ring = torch.stack([r[:, None] * turn.cos(), r[:, None] * turn.sin(), z[:, None].expand(-1, size)], -1)
            x, weights = ring.reshape(-1, 3), (w[:, None] / size).expand(-1, size).reshape(-1)
        degree, values, gradients = (_circle if d == 2 else _sphere)(x, bandwidth)
        return cls(bandwidth, x, weights, degree, values, gradients)


def harmonics_at(x: Tensor, bandwidth: int) -> Tensor:
    """The harmonics at unit vectors x (N, d), (N, M); in the order of `Harmonics`."""
    return (_circle if x.shape[-1] == 2 else _sphere)(x, bandwidth)[1]


def _circle(x: Tensor, bandwidth: int) -> tuple[Tensor, Tensor, Tensor]:
    theta = torch.atan2(x[:, 1], x[:, 0])[:, None]
    k = torch.arange(1, bandwidth + 1, dtype=torch.float64, device=x.device)
    cos, sin = math.sqrt(2) * (k * theta).cos(), math.sqrt(2) * (k * theta).sin()
    values = torch.cat([torch.ones_like(theta), cos, sin], dim=1)
    slope = torch.cat([torch.zeros_like(theta), -k * sin, k * cos], dim=1)
    along = torch.stack([-x[:, 1], x[:, 0]], dim=-1)
    return torch.cat([k.new_zeros(1), k, k]), values, slope[..., None] * along[:, None, :]


def _sphere(x: Tensor, bandwidth: int) -> tuple[Tensor, Tensor, Tensor]:
    z, r = x[:, 2].clamp(-1, 1), x[:, :2].norm(dim=-1)
    azimuth = torch.atan2(x[:, 1], x[:, 0])
    safe = torch.where(r > 0, r, 1.0)  # gradients at a pole are of no node
    down = torch.stack([z * azimuth.cos(), z * azimuth.sin(), -r], dim=-1)
    east = torch.stack([-azimuth.sin(), azimuth.cos(), torch.zeros_like(z)], dim=-1)
    degree, values, gradients = [], [], []
    top = torch.ones_like(z)  # P_m^m
    for m in range(bandwidth + 1):
        if m > 0:
            top = math.sqrt((2 * m + 1) / (2 * m)) * r * top
        previous, now = torch.zeros_like(z), top
        for l in range(m, bandwidth + 1):
            if l > m:
                a, b = math.sqrt((4 * l * l - 1) / (l * l - m * m)), 0.0
                if l > m + 1:
                    b = math.sqrt(((l - 1) ** 2 - m * m) / (4 * (l - 1) ** 2 - 1))
                previous, now = now, a * (z * now - b * previous)
            lower = math.sqrt((2 * l + 1) / (2 * l - 1) * (l * l - m * m)) * previous if l > m else 0.0
            slope = (l * z * now - lower) / safe  # in the angle from the pole
            cos, sin = math.sqrt(2) * (m * azimuth).cos(), math.sqrt(2) * (m * azimuth).sin()
            waves = [(cos, -m * sin), (sin, m * cos)] if m > 0 else [(torch.ones_like(z), torch.zeros_like(z))]
            for wave, turning in waves:
                degree.append(float(l))
                values.append(now * wave)
                gradients.append((slope * wave)[:, None] * down + (now * turning / safe)[:, None] * east)
    order = sorted(range(len(degree)), key=lambda i: degree[i])
    degrees = torch.tensor([degree[i] for i in order], dtype=torch.float64, device=x.device)
    return degrees, torch.stack([values[i] for i in order], 1), torch.stack([gradients[i] for i in order], 1)
