"""Clouds and matrices that several tests take, in float64."""

import torch
from torch import Tensor

from attn_flow import Cloud, Sphere
from attn_flow.measures.quadrature import circle

F64 = torch.float64


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=F64)


def unit(x: Tensor) -> Tensor:
    return x / x.norm(dim=-1, keepdim=True)


def masses(*shape: int, seed: int = 0) -> Tensor:
    return torch.softmax(normal(*shape, seed=seed), -1)


def tokens(*shape: int, seed: int = 0) -> Tensor:
    """Uniform tokens on the unit sphere."""
    return Sphere().uniform(shape[:-1], shape[-1], generator=torch.Generator().manual_seed(seed), dtype=F64)


def skewed(n: int) -> Cloud:
    """Nodes on the circle with a density that no reflection of an axis keeps."""
    return circle(n, lambda theta: torch.exp(torch.cos(theta - 1)))


def matrix(*rows: list[float]) -> Tensor:
    return torch.tensor(rows, dtype=F64)


def diag(*entries: float) -> Tensor:
    return torch.diag(torch.tensor(entries, dtype=F64))
