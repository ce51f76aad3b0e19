"""One process, or the several that torchrun started."""

from __future__ import annotations

import atexit
import math
import os
import zlib
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

T = TypeVar("T")


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

    def largest(self, value: float) -> float:
        """The largest value of all processes; NaN counts as inf."""
        if self.count == 1:
            return value
        x = torch.tensor(math.inf if math.isnan(value) else value, dtype=torch.float64, device=self.device)
        dist.all_reduce(x, dist.ReduceOp.MAX)
        return float(x)

    def gathered(self, x: Tensor) -> Tensor:
        """x of every process, (count, *x.shape)."""
        parts = x.new_empty(self.count, *x.shape)
        if self.count == 1:
            return parts.copy_(x)
        dist.all_gather(list(parts), x.contiguous())
        return parts

    def gathered_objects(self, value: T) -> list[T]:
        """A picklable value of every process, in the order of their ranks."""
        if self.count == 1:
            return [value]
        parts: list[Any] = [None] * self.count
        dist.all_gather_object(parts, value)
        return parts

    def same(self, tensors: dict[str, Tensor | None]) -> None:
        """Raise ValueError if a tensor is not the same, bit for bit, in all processes."""
        given = {name: x for name, x in tensors.items() if x is not None}
        sums = [zlib.crc32(x.detach().cpu().flatten().view(torch.uint8).numpy().data) for x in given.values()]
        everywhere = self.gathered(torch.tensor(sums, device=self.device))
        for name, differs in zip(given, (everywhere != everywhere[0]).any(0).tolist()):
            if differs:
                raise ValueError(f"{name} is not the same in all processes; make it from the same seed or file.")

    def wait(self) -> None:
        if self.count > 1:
            dist.barrier()


ALONE = Processes(0, 1, torch.device("cpu"))


def processes(device: str | torch.device = "cpu", patience: timedelta = timedelta(minutes=30)) -> Processes:
    """torchrun's processes (nccl on CUDA, gloo elsewhere), those of your own process group, or this one alone.

    Whoever waits for another longer than `patience` gives up with an error.
    """
    device = torch.device(device)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device {str(device)!r}, but torch sees no CUDA device; use --device cpu.")
    if int(os.environ.get("WORLD_SIZE", "1")) == 1 and not dist.is_initialized():
        return Processes(0, 1, device)
    if device.type == "cuda":
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    if not dist.is_initialized():
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo", timeout=patience)
        atexit.register(_leave)  # not after a run: torchrun's meeting place serves one group, the next run needs it too
    return Processes(dist.get_rank(), dist.get_world_size(), device)


def _leave() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()
