"""Merging of coincident tokens: one token of joint weight, and how to get all tokens back."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from attn_flow.geometry import Geometry


@dataclass(frozen=True, eq=False)
class MergedCloud:
    """Tokens x (..., m, d) with weights (..., m) that represent n >= m tokens: token i is at x[owner[i]].

    Clouds of a batch with fewer than m distinct tokens are padded with copies of weight zero that represent no token.
    """

    x: Tensor
    weights: Tensor
    owner: Tensor

    @classmethod
    def start(cls, x: Tensor, probabilities: Tensor) -> MergedCloud:
        batch = torch.broadcast_shapes(x.shape[:-1], probabilities.shape)
        owner = torch.arange(x.shape[-2], device=x.device).expand(batch)
        return cls(x.expand(*batch, x.shape[-1]), probabilities.expand(batch), owner)

    @property
    def is_used(self) -> Tensor:
        """Which of the m tokens represent a token of the cloud, (..., m)."""
        return torch.zeros_like(self.weights, dtype=torch.bool).scatter(-1, self.owner, True)

    def expand(self, x: Tensor) -> Tensor:
        """All n tokens (..., n, d), of the m tokens x."""
        return torch.gather(x, -2, self.owner[..., None].expand(*self.owner.shape, x.shape[-1]))

    def groups(self, x: Tensor, velocity: Tensor, within: float, sweep: int) -> tuple[Tensor, Tensor]:
        """The group (..., m) of every token of x (..., m, d), and the number of groups (), zero if no tokens merge.

        Tokens form a group if they share a cell of a grid of side `within` and approach each other. A grid takes time
        n d, where all pairs would take n^2 d; a pair on two sides of a cell wall is merged on a later sweep, whose grid
        is shifted. Tokens that move apart stay apart however close they are.
        """
        x, is_used = x.detach(), self.is_used
        keys = self._cells(x, within, sweep)
        group = _groups(keys)
        if x.device.type == "cpu" and not bool(_joins(group, is_used)):  # reading is free on a CPU
            return group, group.new_zeros(())
        apart = torch.gather(_spreads(x, velocity.detach(), group), -1, group) & is_used
        alone = torch.iinfo(torch.int64).min + torch.arange(x.shape[-2], device=x.device)  # keys that no cell has
        group = _groups(torch.where(apart, alone, keys))
        return group, torch.where(_joins(group, is_used), torch.where(is_used, group, -1).amax() + 1, 0)

    def join(self, x: Tensor, group: Tensor, left: int, geometry: Geometry) -> MergedCloud:
        """The cloud of the first `left` groups, each at its retracted weighted mean."""
        # A group of tokens of weight zero has its plain mean; a group without tokens is padding.
        mass, weighted = _sums(self.weights, x, group)
        number, plain = _sums(self.is_used.to(x.dtype), x, group)
        has_mass, has_tokens = mass > 0, number > 0
        total = torch.where(has_mass[..., None], weighted, plain)
        share = torch.where(has_mass, mass, torch.where(has_tokens, number, 1.0))
        mean = torch.where(has_tokens[..., None], total / share[..., None], x[..., :1, :])
        return MergedCloud(geometry.retract(mean[..., :left, :]), mass[..., :left], torch.gather(group, -1, self.owner))

    def _cells(self, x: Tensor, within: float, sweep: int) -> Tensor:
        """One 64-bit key per token for its cell; padding shares the largest key, so that its group is the last."""
        d = x.shape[-1]
        shift = (sweep * 0.7548776662466927 + torch.arange(d, device=x.device) * 0.5698402909980532) % 1.0
        cells = torch.floor(x.double() / within + shift).to(torch.int64)
        # A random linear form: two cells share a key with probability 2^-63.
        generator = torch.Generator().manual_seed(0)
        form = torch.randint(-(2**62), 2**62, (d,), generator=generator).to(x.device) * 2 + 1
        return torch.where(self.is_used, (cells * form).sum(-1), torch.iinfo(torch.int64).max)


def _groups(keys: Tensor) -> Tensor:
    """For every token the number of its group: equal keys together, in the order of the keys."""
    ordered, order = keys.sort(dim=-1)
    new = torch.cat([torch.zeros_like(keys[..., :1]), (ordered.diff(dim=-1) != 0).to(keys.dtype)], dim=-1)
    return torch.zeros_like(keys).scatter(-1, order, new.cumsum(-1))


def _joins(group: Tensor, is_used: Tensor) -> Tensor:
    """Whether any two tokens in use share a group, ()."""
    groups = torch.where(is_used, group, -1).amax(-1) + 1
    return (groups < is_used.sum(-1)).any()


def _sums(weights: Tensor, x: Tensor, group: Tensor) -> tuple[Tensor, Tensor]:
    """sum_i w_i (..., m) and sum_i w_i x_i (..., m, d) over the members of every group."""
    mass = torch.zeros_like(weights).scatter_add(-1, group, weights)
    index = group[..., None].expand(x.shape)
    return mass, torch.zeros_like(x).scatter_add(-2, index, weights[..., None] * x)


def _spreads(x: Tensor, v: Tensor, group: Tensor) -> Tensor:
    """Whether sum |x_i - mean|^2 over a group is growing, (..., m); rounding does not count as distance."""
    ones = torch.ones_like(x[..., 0])

    def centred(z: Tensor) -> Tensor:
        number, total = _sums(ones, z, group)
        mean = total / number.clamp_min(1)[..., None]
        return z - torch.gather(mean, -2, group[..., None].expand(z.shape))

    def summed(z: Tensor) -> Tensor:
        return torch.zeros_like(ones).scatter_add(-1, group, z.sum(-1))

    dx, dv = centred(x), centred(v)
    rounding = (100 * torch.finfo(x.dtype).eps) ** 2 * summed(x.square())
    return (summed(dx * dv) > 0) & (summed(dx.square()) > rounding)
