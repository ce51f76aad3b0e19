"""One process, or the several that torchrun started."""

from __future__ import annotations

import atexit
import os
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


def processes(device: str | torch.device) -> Processes:
    """torchrun's processes (nccl on CUDA, gloo elsewhere), or this one alone."""
    device = torch.device(device)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device {str(device)!r}, but torch sees no CUDA device; use --device cpu.")
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return Processes(0, 1, device)
    if device.type == "cuda":
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    if not dist.is_initialized():
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
        atexit.register(_leave)  # not after a run: torchrun's meeting place serves one group, the next run needs it too
    return Processes(dist.get_rank(), dist.get_world_size(), device)


def _leave() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()
