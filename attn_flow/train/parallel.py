"""One process, or the several that torchrun started."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel


@dataclass(frozen=True)
class Processes:
    """Which of how many processes this is, and the device it works on."""

    rank: int
    count: int
    device: torch.device

    @property
    def first(self) -> bool:
        return self.rank == 0

    def shared(self, module: nn.Module) -> nn.Module:
        """The module with gradients averaged over processes."""
        if self.count == 1:
            return module
        return DistributedDataParallel(module, device_ids=[self.device] if self.device.type == "cuda" else None)

    def total(self, x: Tensor) -> Tensor:
        """The sum over processes."""
        if self.count > 1:
            dist.all_reduce(x)
        return x

    def wait(self) -> None:
        if self.count > 1:
            dist.barrier()


@contextmanager
def processes(device: str | torch.device) -> Iterator[Processes]:
    """torchrun's group while inside (nccl on CUDA, gloo elsewhere), or this process alone."""
    device = torch.device(device)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device {str(device)!r}, but torch sees no CUDA device; use --device cpu.")
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        yield Processes(0, 1, device)
        return
    mine = not dist.is_initialized()
    if device.type == "cuda":
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    if mine:
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    try:
        yield Processes(dist.get_rank(), dist.get_world_size(), device)
    finally:
        if mine:
            dist.destroy_process_group()
