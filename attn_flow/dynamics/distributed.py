"""One process, or the several that torchrun started; and one cloud over them: each moves its own tokens, sees all.

The cloud is gathered for every drift (`Shard`), or, where it does not fit, passes by in a ring (`RingAttention`).
"""

from __future__ import annotations

import atexit
import itertools
import math
import os
import zlib
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from attn_flow.attention import Attention, Field
from attn_flow.attention.fields import Function, View
from attn_flow.attention.projections import Projections
from attn_flow.averages import dense
from attn_flow.measures import Cloud, Measure

T = TypeVar("T")


@dataclass(frozen=True)
class Processes:
    """Which of how many processes this is, and the device it works on; `processes()` makes it.

    What several processes compute is the same, bit for bit, on each of them, if they run on processors of one kind
    with the same versions: each decides for itself what all must decide alike (steps, merges). Against one process it
    is the same to rounding, because sums are added in another order; a stop time of `Adaptive` is then the same to
    what rounding makes of its steps (1e-10, where the step follows errors of 1e-6).
    """

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
        return float(self.maxima(torch.tensor(value, dtype=torch.float64, device=self.device)))

    def maxima(self, x: Tensor) -> Tensor:
        """Entry by entry the largest of all processes; NaN counts as inf."""
        if self.count == 1:
            return x
        x = torch.where(x.isnan(), math.inf, x)
        dist.all_reduce(x, dist.ReduceOp.MAX)
        return x

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


def check_shared(
    world: Processes,
    weights: dict[str, Tensor],
    cloud: dict[str, Tensor | None],
    noisy: bool,
    generator: torch.Generator | None,
) -> None:
    """Raise ValueError for what several processes cannot do, and for what they should have in common and have not.

    weights: of the attention. cloud: "x0" and what belongs to it. Kicks are drawn for the whole cloud by every process,
    from the same state.
    """
    tensors = {**cloud, **weights}
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


@dataclass(frozen=True, eq=False, repr=False)
class RingAttention(Field):
    """An attention over a cloud that no process holds: each has its own tokens, and those of the others pass by.

    A flow of it is given this process's tokens and moves them alone (leave out `world`); a drift sends them round the
    ring, one part at a time, and joins the averages over the parts by their log-sum-exps. Memory is that of n / P
    tokens, and the numbers sent are those that a gather would send. The result is that of one process to rounding.

    Args:
        attention: softmax at a finite beta, or unnormalised; causal masks take the tokens in the order of the ranks.
        world: `processes()`. Every process takes the same fixed steps: an adaptive one is told by its time.

    Example:
        >>> from attn_flow import flow
        >>> ring = RingAttention(Attention.identity(2, beta=4.0), processes())
        >>> ring
        RingAttention(Attention(heads=1, dim=2, k=2, v=2, beta=4, softmax, float32), 1 process)
        >>> flow(ring, torch.eye(2), [0.0, 1.0]).x.shape
        torch.Size([2, 2, 2])
    """

    attention: Attention
    world: Processes

    def __post_init__(self) -> None:
        if not isinstance(self.attention, Attention):
            raise ValueError(f"attention is a {type(self.attention).__name__}, expected an Attention.")
        if self.attention.kind not in ("softmax", "unnormalised") or self.attention.cold:
            kind = "hardmax" if self.attention.cold else self.attention.kind
            raise ValueError(f"kind = {kind!r}, expected 'softmax' or 'unnormalised': their sums join by parts.")

    def __repr__(self) -> str:
        return f"RingAttention({self.attention!r}, {self.world.count} process{'es' * (self.world.count > 1)})"

    @property
    def tensors(self) -> dict[str, Tensor]:
        return self.attention.tensors

    @property
    def tells_apart(self) -> tuple[str, ...]:
        return ("tokens of other processes",)

    def admit(self, cloud: Cloud, context: Measure | None = None) -> torch.Size:
        if context is not None:
            raise ValueError("a ring attends to the tokens of all processes, expected context=None.")
        if cloud.log_weights is not None:
            raise ValueError("a ring gives every token the same weight, expected weights=None and mask=None.")
        if torch.is_grad_enabled() and any(z.requires_grad for z in (cloud.x, *self.tensors.values())):
            raise ValueError("gradients do not pass between processes; use torch.no_grad(), or one process.")
        self.attention.check_tokens(cloud.x)
        return self.attention.batch_shape(cloud.x.shape[:-2])

    def needs_float64(self, radius: float) -> bool:
        return self.attention.needs_float64(radius)

    def summary(self) -> dict[str, Any]:
        return {**self.attention.summary(), "ring": self.world.count}

    def seen(self, view: View) -> Function:
        """(t, x) -> the drift of this process's tokens."""
        prepared = self.attention.prepared_along(view)
        return lambda t, x: self._drift(prepared(), t, x)

    def _drift(self, p: Projections, t: float, x: Tensor) -> Tensor:
        count, rank = self.world.count, self.world.rank
        here = torch.tensor([float(x.shape[-2]), t], dtype=torch.float64, device=x.device)
        sizes, times = self.world.gathered(here).unbind(-1)
        if bool((times != t).any()):
            raise ValueError(f"processes are at the times {times.tolist()}; expected the same fixed steps.")
        parts = [int(size) for size in sizes.tolist()]
        block = F.pad(x, (0, 0, 0, max(parts) - x.shape[-2])).contiguous()
        average = log_sum = None
        for turn in range(count):
            passed, requests = torch.empty_like(block), []
            if turn + 1 < count:
                requests = dist.batch_isend_irecv(
                    [
                        dist.P2POp(dist.isend, block, (rank + 1) % count),
                        dist.P2POp(dist.irecv, passed, (rank - 1) % count),
                    ]
                )
            source = (rank - turn) % count
            if not p.causal or source <= rank:
                mean, sums = _average(p, x, block[..., : parts[source], :], source == rank)
                if average is None or log_sum is None:
                    average, log_sum = mean, sums
                else:
                    shares, log_sum = dense.probabilities(torch.stack(torch.broadcast_tensors(log_sum, sums), -1))
                    average = average * shares[..., :1] + mean * shares[..., 1:]
            for request in requests:
                request.wait()
            block = passed
        assert average is not None  # a part sees at least its own tokens
        assert log_sum is not None
        if p.kind == "unnormalised":
            average = average * (log_sum - math.log(sum(parts))).exp()[..., None]
        exact = p.double if average.dtype != x.dtype else p
        return exact.with_constant(exact.summed(average)).to(x.dtype)


def _average(p: Projections, x: Tensor, y: Tensor, own: bool) -> tuple[Tensor, Tensor]:
    """Softmax averages (..., heads, m, v) and log-sum-exps of tokens x over tokens y; masks hide among their own."""
    q, k = p.queries(x), p.keys(y)
    if p.loses_digits(q, k, p.scale):
        return _average(p.double, x.double(), y.double(), own)
    masks: dict[str, Any] = {"causal": own and p.causal, "exclude_self": own and not p.self_attention}
    return dense.softmax_and_log_sum(q, k, p.values(y), scale=p.scale, **masks)
