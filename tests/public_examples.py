"""The examples of public functions, run with their tensors on a simulated accelerator."""

import doctest
import inspect
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch

import attn_flow
import attn_flow.nn
import attn_flow.transport
from attn_flow import Attention, ContinuousAttentionLayer, Sphere
from attn_flow.bench.simulated_device import Simulated, on
from attn_flow.dynamics.steppers import RungeKutta
from attn_flow.measures import quadrature

ROOMS = (attn_flow, attn_flow.nn, attn_flow.transport)
MAKERS = ("tensor", "eye", "randn", "rand", "zeros", "ones", "full", "diag", "arange")
# Which make tokens or weights of nothing: their `device` is the CPU unless given.
FROM_NOTHING = (
    (Sphere, "uniform"),
    (Attention, "identity"),
    (Attention, "random"),
    (ContinuousAttentionLayer, "__init__"),
    (torch.nn.MultiheadAttention, "__init__"),
    (torch.nn.TransformerEncoderLayer, "__init__"),
)


class Torch:
    """torch, for an example: what it makes is on the device."""

    def __getattr__(self, name: str) -> Any:
        found = getattr(torch, name)
        if name not in MAKERS:
            return found

        @wraps(found)
        def make(*args: Any, **kwargs: Any) -> torch.Tensor:
            made = found(*args, **kwargs)
            return made if isinstance(made, Simulated) else on(made)

        return make


@contextmanager
def made_there(device: torch.device) -> Iterator[None]:
    """Laws and attentions that are made of nothing are made on the device."""
    before = {}
    for owner, name in FROM_NOTHING:
        raw = inspect.getattr_static(owner, name)
        before[owner, name] = raw
        plain = raw.__func__ if isinstance(raw, classmethod) else raw

        def there(*args: Any, plain: Callable[..., Any] = plain, **kwargs: Any) -> Any:
            return plain(*args, **{"device": device, **kwargs})

        setattr(owner, name, classmethod(there) if isinstance(raw, classmethod) else there)
    circle = quadrature.circle
    quadrature.circle = lambda *args, **kwargs: circle(*args, **kwargs).to(device)
    try:
        yield
    finally:
        quadrature.circle = circle
        for (owner, name), raw in before.items():
            setattr(owner, name, raw)


def examples() -> dict[str, list[doctest.Example]]:
    """Of everything in the rooms' `__all__`, and of the methods of its classes."""
    finder, found = doctest.DocTestFinder(recurse=True), {}
    for room in ROOMS:
        for name in room.__all__:
            thing = getattr(room, name)
            if callable(thing):
                if name == "DeepStack":  # made on the CPU and moved, as modules are: see its own test
                    continue
                for test in finder.find(thing, f"{room.__name__}.{name}"):
                    if test.examples:
                        found[test.name] = test.examples
    return found


def run(name: str, lines: list[doctest.Example]) -> None:
    """An example, whatever it prints: what raises is that devices mix."""
    scope: dict[str, Any] = {key: getattr(room, key) for room in ROOMS for key in room.__all__}
    scope |= {"torch": Torch(), "math": math, "nn": torch.nn, "RungeKutta": RungeKutta}
    for line in lines:
        if line.source.strip() != "import torch":
            exec(compile(line.source, name, "single"), scope)
