"""Noise between the steps of a flow: x <- retract(x + sqrt(h) xi(x)), with a random field xi.

A noise is a function x (..., n, d) -> xi (..., n, d). Pass one of these, or your own, as flow(..., noise=).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from attn_flow.base import checks

Noise = Callable[[Tensor], Tensor]


def independent(sigma: float, generator: torch.Generator | None = None) -> Noise:
    """Independent noise of every token: E xi_i xi_j^T = sigma^2 delta_ij I.

    Example:
        >>> independent(0.1)(torch.zeros(5, 3)).shape
        torch.Size([5, 3])
    """
    checks.require_nonnegative(sigma=sigma)
    return lambda x: sigma * _normal(x.shape, x, generator)


def linear(sigma: float, generator: torch.Generator | None = None) -> Noise:
    """Random shared weights, xi(x) = sigma W x with W Gaussian: E xi(x) xi(y)^T = sigma^2 <x,y> I."""
    checks.require_nonnegative(sigma=sigma)
    return lambda x: sigma * x @ _normal((*x.shape[:-2], x.shape[-1], x.shape[-1]), x, generator)


def gaussian_field(
    kernel: Callable[[Tensor], Tensor], sigma: float = 1.0, generator: torch.Generator | None = None
) -> Noise:
    """A Gaussian field common to all tokens (arXiv 2604.26898): E xi(x) xi(y)^T = sigma^2 kernel(<x,y>) I.

    It is drawn exactly at the tokens, through the symmetric square root of the n x n matrix kernel(<x_i,x_j>).
    """
    checks.require_nonnegative(sigma=sigma)

    def noise(x: Tensor) -> Tensor:
        eigenvalues, vectors = torch.linalg.eigh(kernel(x @ x.mT))
        rounding = 100 * x.shape[-2] * torch.finfo(x.dtype).eps * eigenvalues.abs().amax(-1, keepdim=True)
        checks.require(eigenvalues >= -rounding, "kernel is not positive semidefinite at these tokens.")
        root = vectors * eigenvalues.clamp_min(0.0).sqrt()[..., None, :]
        return sigma * root @ _normal(x.shape, x, generator)

    return noise


def _normal(shape: tuple[int, ...], x: Tensor, generator: torch.Generator | None) -> Tensor:
    return torch.randn(shape, generator=generator, dtype=x.dtype, device=x.device)
