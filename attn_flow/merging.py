"""Coincident tokens as one token of joint weight, and the way back to all of them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from attn_flow.geometry import Geometry


@dataclass(frozen=True, eq=False)
class Merged:
    """Fewer tokens x (..., m, d) with weights (..., m), standing for n of them: token i is x[owner[i]].

    Batch elements with fewer than m distinct tokens are padded with tokens of weight zero.
    """

    x: Tensor
    weights: Tensor
    owner: Tensor
    sweeps: int = 0

    @classmethod
    def start(cls, x: Tensor, probabilities: Tensor) -> Merged:
        n = x.shape[-2]
        return cls(x, probabilities, torch.arange(n, device=x.device).expand(x.shape[:-1]))

    @property
    def log_weights(self) -> Tensor:
        return self.weights.log()

    def everyone(self, x: Tensor | None = None) -> Tensor:
        """All n tokens, (..., n, d); of `x` (..., m, d) if that is given."""
        x = self.x if x is None else x
        return torch.gather(x, -2, self.owner[..., None].expand(*self.owner.shape, x.shape[-1]))

    def merge(self, x: Tensor, within: float, geometry: Geometry) -> Merged:
        """Join the tokens of x that share a cell of a grid of side `within`; the grid shifts from sweep to sweep.

        A grid costs O(n d), where all pairs would cost O(n^2 d); a pair on two sides of a cell wall is joined by a
        later, shifted grid. The joint token is the retracted weighted mean.
        """
        m, d = x.shape[-2:]
        shift = (self.sweeps * 0.7548776662466927 + torch.arange(d, device=x.device) * 0.5698402909980532) % 1.0
        cells = torch.floor(x.detach().double() / within + shift).to(torch.int64)
        # One 64-bit key per cell: two cells share one with probability 2^-64.
        odd = torch.arange(1, 2 * d, 2, device=x.device, dtype=torch.int64) * 0x9E3779B97F4A7C1 + 0x632BE59BD9B4E01
        keys = (cells * odd).sum(-1)
        # Padding keeps to itself.
        keys = torch.where(self.weights > 0, keys, -torch.arange(1, m + 1, device=x.device))
        ordered = keys.sort(dim=-1).values
        if not bool((ordered[..., 1:] == ordered[..., :-1]).any()):
            return Merged(x, self.weights, self.owner, self.sweeps + 1)
        batch = x.shape[:-2]
        flat = [z.reshape(-1, *z.shape[len(batch) :]) for z in (x, self.weights, self.owner, keys)]
        joined = [self._join(*element, geometry) for element in zip(*flat)]
        most = max(part[0].shape[0] for part in joined)
        padded = []
        for new_x, new_w, new_owner in joined:
            missing = most - new_x.shape[0]
            # Padding repeats a token at weight zero: a point of the geometry that nobody sees.
            new_x = torch.cat([new_x, new_x[:1].expand(missing, d)])
            padded.append((new_x, torch.cat([new_w, new_w.new_zeros(missing)]), new_owner))
        stacked = [torch.stack(parts) for parts in zip(*padded)]
        x, w, owner = (z.reshape(*batch, *z.shape[1:]) for z in stacked)
        return Merged(x, w, owner, self.sweeps + 1)

    @staticmethod
    def _join(x: Tensor, w: Tensor, owner: Tensor, keys: Tensor, geometry: Geometry) -> tuple[Tensor, Tensor, Tensor]:
        alive = w > 0
        _, group = torch.unique(keys[alive], return_inverse=True)
        count = int(group.max()) + 1
        mass = w.new_zeros(count).index_add(0, group, w[alive])
        mean = x.new_zeros(count, x.shape[-1]).index_add(0, group, w[alive][:, None] * x[alive]) / mass[:, None]
        renamed = torch.zeros_like(alive, dtype=torch.int64)
        renamed[alive] = group
        return geometry.retract(mean), mass, renamed[owner]
