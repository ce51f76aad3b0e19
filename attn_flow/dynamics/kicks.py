"""Random kicks between steps: x <- retract(x + sqrt(h) xi). A kick is a function of (x, generator) -> xi."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from attn_flow.base import checks

Kick = Callable[[Tensor, torch.Generator | None], Tensor]


def _normal(shape: tuple[int, ...], x: Tensor, generator: torch.Generator | None) -> Tensor:
    return torch.randn(shape, generator=generator, dtype=x.dtype, device=x.device)


def independent(sigma: float) -> Kick:
    """Every token its own kick: E xi_i xi_j^T = sigma^2 delta_ij I."""
    checks.nonnegative("sigma", sigma)
    return lambda x, generator: sigma * _normal(tuple(x.shape), x, generator)


def common(sigma: float) -> Kick:
    """One kick for all tokens of a cloud: E xi_i xi_j^T = sigma^2 I."""
    checks.nonnegative("sigma", sigma)
    return lambda x, generator: sigma * _normal((*x.shape[:-2], 1, x.shape[-1]), x, generator).expand_as(x)


def linear(sigma: float) -> Kick:
    """Random shared weights, xi(x) = sigma W x with W Gaussian: E xi(x) xi(y)^T = sigma^2 <x,y> I."""
    checks.nonnegative("sigma", sigma)

    def kick(x: Tensor, generator: torch.Generator | None) -> Tensor:
        d = x.shape[-1]
        return sigma * x @ _normal((*x.shape[:-2], d, d), x, generator)

    return kick


def field(kernel: Callable[[Tensor], Tensor], sigma: float = 1.0) -> Kick:
    """A Gaussian field common to all tokens (arXiv 2604.26898): E xi(x) xi(y)^T = sigma^2 kernel(<x,y>) I.

    Drawn exactly at the tokens through the symmetric square root of the n x n matrix kernel(<x_i,x_j>).
    """
    checks.function("kernel", kernel, "of <x,y>, such as torch.exp")
    checks.nonnegative("sigma", sigma)

    def kick(x: Tensor, generator: torch.Generator | None) -> Tensor:
        eigenvalues, vectors = torch.linalg.eigh(kernel(x @ x.mT))
        tiny = x.shape[-2] * torch.finfo(x.dtype).eps * eigenvalues.abs().amax(-1, keepdim=True)
        if bool((eigenvalues < -100 * tiny).any()):
            raise ValueError(f"kernel is not positive semidefinite: eigenvalue {float(eigenvalues.min()):.3g}.")
        root = vectors * torch.where(eigenvalues > 0, eigenvalues, 0.0).sqrt()[..., None, :]
        return sigma * root @ _normal(tuple(x.shape), x, generator)

    return kick
