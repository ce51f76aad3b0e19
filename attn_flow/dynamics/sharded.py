"""The tokens of one cloud over processes: each moves its own, and sees everyone."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from attn_flow.attention.multihead import Attention
from attn_flow.dynamics.distributed import Processes


@dataclass(frozen=True)
class Shard:
    """Of n tokens those that this process moves; fewer tokens than processes are all moved by each of them."""

    world: Processes
    n: int

    @property
    def bounds(self) -> list[int]:
        """Where the tokens of the processes begin, and n."""
        parts = self.world.count
        return [self.n * rank // parts for rank in range(parts + 1)]

    @property
    def first(self) -> int:
        """The place of this process's first token in the cloud."""
        return self.bounds[self.world.rank] if self._split else 0

    def own(self, x: Tensor, dim: int = -2) -> Tensor:
        """The part of x, with an entry for every token along `dim`, that is about this process's tokens."""
        if not self._split:
            return x
        return x.narrow(dim, self.first, self.bounds[self.world.rank + 1] - self.first)

    def everyone(self, x: Tensor) -> Tensor:
        """All n tokens (..., n, d), of the processes' own x; the same bits in each of them."""
        if not self._split:
            return x
        most = -(-self.n // self.world.count)
        parts = self.world.gathered(F.pad(x, (0, 0, 0, most - x.shape[-2])))
        sizes = [end - start for start, end in itertools.pairwise(self.bounds)]
        return torch.cat([part[..., :size, :] for part, size in zip(parts, sizes)], dim=-2)

    @property
    def _split(self) -> bool:
        return 1 < self.world.count <= self.n


def check(
    world: Processes,
    attention: Attention,
    cloud: dict[str, Tensor | None],
    noisy: bool,
    generator: torch.Generator | None,
) -> None:
    """Raise ValueError for what several processes cannot do, and for what they should have in common and have not.

    cloud: "x0" and what belongs to it. Kicks are drawn for the whole cloud by every process, from the same state.
    """
    tensors = {**cloud, **attention._tensors()}
    if torch.is_grad_enabled() and any(z is not None and z.requires_grad for z in tensors.values()):
        raise ValueError("gradients do not pass between processes; use torch.no_grad(), or one process.")
    x = cloud["x0"]
    assert x is not None
    if x.device != world.device:
        raise ValueError(f"x0 is on {x.device} and this process works on {world.device}; use x0.to(world.device).")
    if noisy:
        torchs_own = torch.cuda.get_rng_state(x.device) if x.is_cuda else torch.get_rng_state()
        tensors["the state of the generator"] = torchs_own if generator is None else generator.get_state()
    world.same(tensors)
