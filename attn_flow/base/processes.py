"""This process among those that torchrun started, which share recording, the probe and training; and its threads."""

from __future__ import annotations

import atexit
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

PATIENCE = timedelta(days=1)  # a process that waits longer for another fails; the first one may write a long report


@dataclass(frozen=True)
class Processes:
    """This process, number `rank` of `count`, and the device it works on. Its share of a list is x[rank::count]."""

    rank: int
    count: int
    device: torch.device

    @property
    def is_first(self) -> bool:
        """Whether this process writes files and shows progress."""
        return self.rank == 0

    def sum_gradients(self, module: nn.Module) -> None:
        """Replace the gradients of a module, in every process, by their sums over the processes."""
        for parameter in module.parameters():
            if parameter.grad is not None:
                self.sum(parameter.grad)

    def sum(self, x: Tensor) -> Tensor:
        """The sum of x over the processes; x itself is overwritten."""
        if self.count > 1:
            dist.all_reduce(x)
        return x

    def gather_objects(self, value: Any) -> list[Any]:
        """A picklable value from every process, in the order of their ranks."""
        if self.count == 1:
            return [value]
        values: list[Any] = [None] * self.count
        dist.all_gather_object(values, value)
        return values

    def wait(self) -> None:
        """Wait until every process is here."""
        if self.count > 1:
            dist.barrier()


ALONE = Processes(0, 1, torch.device("cpu"))


def processes(device: str | torch.device = "cpu") -> Processes:
    """The processes that torchrun started, those of an existing process group, or this one alone.

    They communicate by gloo, on "cuda" by nccl, where each process takes the GPU of its local rank.
    """
    device = torch.device(device)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device {str(device)!r}, but torch sees no CUDA device; use cpu.")
    if int(os.environ.get("WORLD_SIZE", "1")) == 1 and not dist.is_initialized():
        return Processes(0, 1, device)
    if device.type == "cuda":
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    if not dist.is_initialized():
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo", timeout=PATIENCE)
        atexit.register(leave)  # torchrun's rendezvous serves one group, so it stays open for the next run
    return Processes(dist.get_rank(), dist.get_world_size(), device)


def leave() -> None:
    """Close the process group, if there is one."""
    if dist.is_initialized():
        dist.destroy_process_group()


@contextmanager
def limit_threads(count: int) -> Iterator[None]:
    """At most this many threads of torch inside: one is best for eigenvalues, which need hundreds of small products."""
    previous = torch.get_num_threads()
    torch.set_num_threads(min(previous, count))
    try:
        yield
    finally:
        torch.set_num_threads(previous)
