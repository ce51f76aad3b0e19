"""The weights of a layer, and the flow that they make of tokens whose distribution is Gaussian."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from attn_flow.attention import Attention


@dataclass(frozen=True, eq=False)
class Weights:
    """The matrices of all heads of a layer, (heads, k or v, d) but O (heads, d, v), and beta (heads, 1, 1)."""

    Q: Tensor
    K: Tensor
    V: Tensor
    O: Tensor
    beta: Tensor

    def rotate(self, R: Tensor) -> Weights:
        """G_h -> R^T G_h R for all heads: the same spectrum in other directions; O_h V_h if G_h has no directions."""
        turn = lambda matrix: (matrix.reshape(-1, len(R)) @ R).view(matrix.shape)
        if self._is_isotropic:
            return replace(self, V=turn(self.V), O=R.mT @ self.O)
        return replace(self, Q=turn(self.Q), K=turn(self.K))

    @cached_property
    def _is_isotropic(self) -> bool:
        """Whether every G_h is a multiple of the identity, which no rotation changes."""
        if self.Q.shape[-2] < self.Q.shape[-1]:
            return False
        G = self.K.mT @ self.Q
        multiple = G.diagonal(dim1=-2, dim2=-1).mean(-1)[:, None, None] * torch.eye(G.shape[-1]).to(G)
        return bool((G - multiple).norm() <= 1e-6 * G.norm())

    def shift_heads(self, by: int) -> Weights:
        """G_h stands with the values of a later head."""
        return replace(self, Q=self.Q.roll(by, 0), K=self.K.roll(by, 0), beta=self.beta.roll(by, 0))

    def equals(self, other: Weights) -> bool:
        """Whether all matrices are equal."""
        pairs = zip(vars(self).values(), vars(other).values())
        return all(torch.equal(a, b) for a, b in pairs if isinstance(a, Tensor) and isinstance(b, Tensor))


def read_weights(attention: Attention, dtype: torch.dtype, device: torch.device) -> Weights:
    """The matrices of an attention; those that are None are identities, and an infinite beta is a large one."""
    H, d = attention.heads, attention.dim
    identity = torch.eye(d, dtype=dtype, device=device)
    matrices = [getattr(attention, name) for name in ("Q", "K", "V", "O")]
    Q, K, V, O = (identity.expand(H, d, d) if m is None else m.to(device, dtype).expand(H, -1, -1) for m in matrices)
    beta = torch.as_tensor(attention.beta, dtype=dtype, device=device).expand(H)[:, None, None].clamp(max=1e6)
    return Weights(Q, K, V, O, beta)


class GaussianFlow:
    """What the heads of a layer add to a token if the other tokens are Gaussian, without the constant part.

    A head adds beta O V S g with g = G x, which in a cold head leaves the range of the tokens: the shift of their mean
    is s standard deviations, s^2 = beta^2 <g, S g>. It is divided by sqrt(1 + s^2/max_shift^2).

    Args:
        weights: of the heads.
        cov: S (d, d).
        max_shift: the largest shift of the mean in standard deviations.
    """

    def __init__(self, weights: Weights, cov: Tensor, max_shift: float) -> None:
        H, k, d = weights.Q.shape
        self.Q, self.O = weights.Q.reshape(H * k, d), weights.O.transpose(0, 1).reshape(d, -1)
        key_cov = ((weights.K.reshape(H * k, d) @ cov).view(H, k, d)).mT  # S K^T
        self.values = weights.beta * (weights.V @ key_cov)  # (H, v, k)
        self.spread = weights.beta.square() * (weights.K @ key_cov) / max_shift**2  # (H, k, k)
        self.M = (weights.O @ self.values).transpose(0, 1).reshape(d, H * k) @ self.Q  # without saturation

    def drift(self, x: Tensor) -> Tensor:
        """What is added to tokens x (n, d)."""
        H, _, k = self.values.shape
        q = (x @ self.Q.mT).view(-1, H, k).transpose(0, 1)  # (H, n, k)
        shift = ((q @ self.spread) * q).sum(-1, keepdim=True).clamp(min=0)
        averages = (q * (1 + shift).rsqrt()) @ self.values.mT  # (H, n, v)
        return averages.transpose(0, 1).reshape(len(x), -1) @ self.O.mT
