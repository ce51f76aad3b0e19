"""What torchrun starts for test_sharded.py, in one process or several.

worker.py cases FOLDER [SEED]   runs every case and every error, and writes what this process found;
                                with a seed the tokens start a rounding error away from where they do without
worker.py lose WAY              loses the last process of two in the middle of a run
"""

import os
import signal
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from attn_flow import (
    Adaptive,
    Attention,
    Cloud,
    Drift,
    Ellipsoid,
    Euclidean,
    Layers,
    Sphere,
    Trajectory,
    UniformSphere,
    consensus,
    dopri5,
    euler,
    flow,
)
from attn_flow.dynamics import kicks, placement
from attn_flow.dynamics.distributed import Processes, RingAttention, Shard, processes
from attn_flow.dynamics.steppers import Step

F64 = torch.float64
nudged: int | None = None


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def tokens(n: int | tuple[int, ...], d: int = 3) -> Tensor:
    x = Sphere().uniform(n, d, generator=seeded(), dtype=F64)
    if nudged is None:
        return x
    return x * (1 + torch.finfo(F64).eps * torch.randn(x.shape, generator=seeded(nudged), dtype=F64))


def random(heads: int = 2, **options) -> Attention:
    return Attention.random(3, heads, generator=seeded(1), dtype=F64, **options)


def identity(beta: float | Tensor, **options) -> Attention:
    return Attention.identity(3, beta, dtype=F64, **options)


def centring(t: float, x: Tensor) -> Tensor:
    return (1 + t) * (x.mean(-2, keepdim=True) - x.cumsum(-2))


def ring(w: Processes, attention: Attention, x: Tensor, **options) -> Trajectory:
    """The path of all tokens, of processes that hold their own alone."""
    part = Shard(w, x.shape[-2])
    own = flow(RingAttention(attention, w), part.own(x), T, **options)
    about = {**own.about, "attention": attention.summary(), "processes": w.count}
    return Trajectory(own.t, part.everyone(own.x), about=about)


MASK = torch.tensor([[True] * 7, [True] * 4 + [False] * 3])
WEIGHTS = torch.linspace(0.1, 1, 7, dtype=F64)
AXES = torch.tensor([1.0, 2.0, 0.5], dtype=F64)
T = [0.0, 0.3, 1.0]
CASES: dict[str, Callable[[Processes], Trajectory]] = {
    "a long run": lambda w: flow(identity(20.0), tokens(300), torch.linspace(0, 10, 5), h=0.1, world=w),
    "euler, three tokens": lambda w: flow(random(), tokens(3), T, step=euler, world=w),
    "fewer tokens than processes": lambda w: flow(random(), tokens(1), T, world=w),
    "dopri5, weights": lambda w: flow(random(), tokens(7), T, step=dopri5, weights=WEIGHTS, world=w),
    "padding": lambda w: flow(random(), tokens((2, 7)), T, mask=MASK, weights=WEIGHTS, world=w),
    "a sweep": lambda w: flow(random(beta=torch.tensor([[[1.0]], [[9.0]]], dtype=F64)), tokens((3, 7)), T, world=w),
    "hardmax": lambda w: flow(random(kind="hardmax"), tokens(7), T, world=w),
    "unnormalised": lambda w: flow(random(kind="unnormalised"), tokens(7), T, weights=WEIGHTS, world=w),
    "sinkhorn": lambda w: flow(random(kind="sinkhorn"), tokens(7), T, world=w),
    "causal": lambda w: flow(random(causal=True), tokens((2, 7)), T, mask=MASK, world=w),
    "without self": lambda w: flow(random(self_attention=False), tokens(7), T, weights=WEIGHTS, world=w),
    "causal without self": lambda w: flow(random(causal=True, self_attention=False), tokens(7), T, world=w),
    "causal hardmax": lambda w: flow(random(causal=True, kind="hardmax"), tokens(7), T, world=w),
    "scheduled": lambda w: flow(lambda t: random(beta=1 + t), tokens(7), T, world=w),
    "layers, kinds and a drift that sees all tokens": lambda w: flow(
        Layers([random(kind="sigmoid"), random(kind="linear", causal=True) + Drift(centring)], [0.0, 0.4, 1.0]),
        tokens((2, 7)),
        T,
        mask=MASK,
        world=w,
    ),
    "a tokenwise drift that merges": lambda w: flow(
        identity(4.0) + Drift(lambda t, x: 0.1 * x.sin(), tokenwise=True), tokens(50), [0, 9], step=Adaptive(), world=w
    ),
    "ellipsoid": lambda w: flow(random(), tokens(7), T, geometry=Ellipsoid(0 * AXES, AXES), world=w),
    "pre": lambda w: flow(random(), tokens(7), T, geometry=Euclidean(), placement=placement.pre, world=w),
    "context": lambda w: flow(random(), tokens(7), T, context=UniformSphere(3), world=w),
    "adaptive": lambda w: flow(random(beta=5.0), tokens(50), T, step=Adaptive(merge=False), world=w),
    "merging": lambda w: flow(identity(4.0), tokens(50), [0, 3, 60], step=Adaptive(), world=w),
    "a batch that merges": lambda w: flow(identity(9.0), tokens((2, 20)), [0, 9, 60], step=Adaptive(1e-4), world=w),
    "stopped": lambda w: flow(identity(1.0), tokens(7), [0, 50], stop=consensus(0.1), world=w),
    "merged and stopped": lambda w: flow(
        identity(1.0), tokens(7), [0, 50], step=Adaptive(1e-2), stop=consensus(1e-4), world=w
    ),
    "a stop that the last process wants": lambda w: flow(
        identity(1.0), tokens(7), [0, 50], stop=lambda t, cloud: t > 0.9 and w.rank == w.count - 1, world=w
    ),
    "a ring": lambda w: ring(w, random(), tokens((2, 50))),
    "a cold causal ring": lambda w: ring(w, random(causal=True, beta=400.0), tokens(50)),
    "an unnormalised ring without self": lambda w: ring(
        w, random(kind="unnormalised", self_attention=False), tokens(7), step=euler
    ),
    "independent kicks": lambda w: flow(
        random(), tokens((2, 7)), T, mask=MASK, noise=kicks.independent(0.3), generator=seeded(), world=w
    ),
    "a field of kicks": lambda w: flow(
        random(), tokens(7), T, noise=kicks.field(torch.exp, 0.3), generator=seeded(), world=w
    ),
}


def lost_on_the_last(w: Processes) -> Step:
    """A step that sends the tokens of the last process to infinity, and moves no others."""
    return lambda velocity, t, x, h, geometry: x / (0.0 if w.rank == w.count - 1 else 1.0)


ERRORS: dict[str, tuple[Callable[[Processes], Trajectory], str]] = {
    "another cloud": (lambda w: flow(random(), tokens(7) + w.rank, T, world=w), "x0 is not the same in all processes"),
    "other times": (lambda w: flow(random(), tokens(7), [0, 1 + w.rank], world=w), "t is not the same in all"),
    "other weights": (lambda w: flow(random(value_bias=AXES + w.rank), tokens(7), T, world=w), "value_bias is not"),
    "other kicks": (
        lambda w: flow(random(), tokens(7), T, noise=kicks.common(1.0), generator=seeded(w.rank), world=w),
        "the state of the generator is not the same",
    ),
    "gradients": (lambda w: flow(random(), tokens(7).requires_grad_(), T, world=w), "gradients do not pass between"),
    "a ring of adaptive steps": (
        lambda w: flow(
            RingAttention(identity(4.0), w), tokens(4 * w.count)[4 * w.rank :][:4], T, step=Adaptive(1e-9, merge=False)
        ),
        "expected the same fixed steps",
    ),
    "a token that leaves": (
        lambda w: flow(random(), tokens(7), T, step=lost_on_the_last(w), world=w),
        "tokens left the range of torch.float64",
    ),
}


def message(case: Callable[[Processes], Trajectory], w: Processes) -> str:
    try:
        case(w)
    except (ValueError, FloatingPointError) as error:
        return str(error)
    return "no error"


def found_by(w: Processes) -> dict[str, Any]:
    """Of every case t, x and about; of every error what was said and what should have been."""
    paths = {name: case(w) for name, case in CASES.items()}
    errors = {} if w.count == 1 else {name: (message(case, w), says) for name, (case, says) in ERRORS.items()}
    found = {name: {"t": p.t, "x": p.x, "about": p.about} for name, p in paths.items()}
    return {"paths": found, "errors": errors, "said": said_between(w)}


def said_between(w: Processes) -> dict[str, Any]:
    """What every process hears of all, each having said its rank plus one."""
    own = torch.tensor([w.rank + 1.0, -w.rank], dtype=F64)
    module = torch.nn.Linear(2, 1, bias=False, dtype=F64)
    shared = w.shared(module)  # which must live until the gradients are there
    shared(own).sum().backward()
    assert module.weight.grad is not None
    return {
        "gradient": module.weight.grad[0].tolist(),
        "total": w.total(own.clone()).tolist(),
        "maxima": w.maxima(own).tolist(),
        "largest": (w.largest(w.rank + 1.0), w.largest(float("nan"))),
        "gathered": w.gathered(own).tolist(),
        "objects": w.gathered_objects({"rank": w.rank}),
        "first": w.first,
    }


LOSSES: dict[str, Callable[[], Any]] = {
    "killed": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "raises": lambda: 1 / 0,
    "hangs": lambda: time.sleep(1000),
}


def lose(w: Processes, loss: str) -> None:
    def stop(t: float, cloud: Cloud) -> bool:
        if t > 1 and w.rank == 1:
            LOSSES[loss]()
        return False

    print("started", flush=True)
    flow(identity(1.0), tokens(10), [0, 1e4], stop=stop, world=w)
    print("finished", flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    word, argument, *seed = sys.argv[1:]
    if word == "lose":
        lose(processes(patience=timedelta(seconds=3)), argument)
    else:
        nudged = int(seed[0]) if seed else None
        world = processes()
        torch.save(found_by(world), Path(argument) / f"{world.rank}.pt")
