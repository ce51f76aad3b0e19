"""What moves tokens: a vector field F(t, x) of a cloud, and the ways to make one out of others.

    flow(attention + Drift(ffn), x0, t=20.0)                        # the sum of two fields
    flow(Layers([A_1, A_2 + Drift(ffn)], times=[0, 1, 3]), x0, t=3.0)    # A_1 until t = 1, then the other

A flow follows P_x F(t, x). It asks a field for its jumps, for the smooth piece between two of them, and for the
function (t, x) -> F of the cloud as it is seen, and never which field it is.
"""

from __future__ import annotations

import bisect
import itertools
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from attn_flow.base import checks
from attn_flow.measures import Cloud, Measure

Function = Callable[[float, Tensor], Tensor]


class Part(Protocol):
    """The tokens that one process moves: where they begin in the cloud, its own part of something, and the whole."""

    @property
    def first(self) -> int: ...
    def own(self, x: Tensor, dim: int = -2) -> Tensor: ...
    def everyone(self, x: Tensor) -> Tensor: ...


@dataclass
class View:
    """What a field is told of the cloud it moves. All of it may change: tokens merge, and grow."""

    log_weights: Tensor | None
    part: Part
    context: Measure | None = None
    longest: float | None = None  # no token is longer


class Field(ABC):
    """A vector field of tokens, F(t, x) (..., n, d) for x (..., n, d); fields add up: attention + Drift(f)."""

    attends = True  # whether it can attend to a context
    jumps: tuple[float, ...] = ()  # times where it is not continuous

    def __add__(self, other: Field) -> Field:
        return Sum((*self.terms, *other.terms)) if isinstance(other, Field) else NotImplemented

    @property
    def terms(self) -> tuple[Field, ...]:
        """What it is the sum of."""
        return (self,)

    def frozen(self, t: float) -> Field:
        """What is known of it at time t, if it is a function of time."""
        return self

    def piece(self, start: float, end: float) -> Field:
        """The field between two times without a jump inside, continuous up to both of them."""
        return self

    @property
    @abstractmethod
    def tensors(self) -> dict[str, Tensor]:
        """The weights it is made of, by name."""

    @property
    @abstractmethod
    def tells_apart(self) -> tuple[str, ...]:
        """Why tokens at one place may move differently; () if they never do."""

    @abstractmethod
    def admit(self, cloud: Cloud, context: Measure | None = None) -> torch.Size:
        """Raise ValueError for a cloud it cannot move or context it cannot see; the leading axes of its drift."""

    def needs_float64(self, radius: float) -> bool:
        """Whether float32 is too coarse for tokens of at most this length."""
        return False

    @abstractmethod
    def seen(self, view: View) -> Function:
        """(t, x) -> F(t, x) of this process's tokens x, with all that can be prepared prepared."""

    @abstractmethod
    def summary(self) -> dict[str, Any]:
        """What a path remembers of it, as plain JSON."""


@dataclass(frozen=True, eq=False, repr=False)
class Drift(Field):
    """A drift of your own, f(t, x): an FFN, a forcing, a potential; alone or added to an attention.

    Args:
        f: of a number t and tokens x (..., n, d), padding included; returns what broadcasts to x, in its dtype. The
            flow projects it to the geometry, as it does with attention: x' = P_x (attention + f).
        tokenwise: promise that f moves every token by its own place alone, as an FFN does. Coincident tokens may then
            be merged (`Adaptive`), and processes call f on their own tokens only.

    Gradients reach what f closes over. A path remembers the name of f.

    Example:
        >>> from attn_flow import Attention, Euclidean, flow
        >>> rotation = torch.tensor([[0.0, -1.0], [1.0, 0.0]])
        >>> turning = Drift(lambda t, x: x @ rotation.T, tokenwise=True)
        >>> x0 = torch.tensor([[1.0, 0.0]])
        >>> flow(turning, x0, [0.0, torch.pi / 2], geometry=Euclidean()).x[-1].round(decimals=4).abs()
        tensor([[0., 1.]])
        >>> flow(Attention.identity(2) + turning, x0, 1.0).about["attention"]["sum"][1]
        {'drift': '<lambda>', 'tokenwise': True}
    """

    f: Function
    tokenwise: bool = False
    attends = False

    def __post_init__(self) -> None:
        if not callable(self.f):
            raise ValueError(f"f is a {type(self.f).__name__}, expected a function of (t, x), x (..., n, d).")
        checks.flags(tokenwise=self.tokenwise)

    @property
    def name(self) -> str:
        return getattr(self.f, "__name__", type(self.f).__name__)

    def __repr__(self) -> str:
        return f"Drift({self.name}{', tokenwise' * self.tokenwise})"

    @property
    def tensors(self) -> dict[str, Tensor]:
        return dict(self.f.named_parameters()) if isinstance(self.f, nn.Module) else {}

    @property
    def tells_apart(self) -> tuple[str, ...]:
        return () if self.tokenwise else (f"{self}, which is not tokenwise",)

    def admit(self, cloud: Cloud, context: Measure | None = None) -> torch.Size:
        return torch.broadcast_shapes(cloud.x.shape[:-2], cloud.probabilities.shape[:-1])

    def seen(self, view: View) -> Function:
        if self.tokenwise:
            return self._checked
        return lambda t, x: view.part.own(self._checked(t, view.part.everyone(x)))

    def _checked(self, t: float, x: Tensor) -> Tensor:
        F = self.f(t, x)
        checks.tensor(f"what {self} returned", F, f"{tuple(x.shape)}")
        if F.ndim > x.ndim or not checks.broadcasts(F.shape, x.shape) or F.expand(x.shape).dtype != x.dtype:
            raise ValueError(
                f"{self} returned {F.dtype} {tuple(F.shape)} at t = {t:.4g}, expected {x.dtype} {tuple(x.shape)} as "
                "the tokens it was given."
            )
        return F.expand(x.shape)

    def summary(self) -> dict[str, Any]:
        return {"drift": self.name, "tokenwise": self.tokenwise}


@dataclass(frozen=True, eq=False, repr=False)
class Several(Field):
    """Fields that act together, at once or in turn."""

    fields: tuple[Field, ...]

    def __post_init__(self) -> None:
        for i, field in enumerate(self.fields):
            if not isinstance(field, Field):
                raise ValueError(f"field {i} is a {type(field).__name__}, expected Attention, Drift, or sums of them.")

    @property
    def attends(self) -> bool:  # type: ignore[override]
        return any(field.attends for field in self.fields)

    @property
    def tensors(self) -> dict[str, Tensor]:
        return {f"{name} of field {i}": z for i, field in enumerate(self.fields) for name, z in field.tensors.items()}

    @property
    def tells_apart(self) -> tuple[str, ...]:
        return tuple(why for field in self.fields for why in field.tells_apart)

    def admit(self, cloud: Cloud, context: Measure | None = None) -> torch.Size:
        return torch.broadcast_shapes(*(field.admit(cloud, context) for field in self.fields))

    def needs_float64(self, radius: float) -> bool:
        return any(field.needs_float64(radius) for field in self.fields)


class Sum(Several):
    """F_1 + F_2 + ...: made by adding fields."""

    @property
    def terms(self) -> tuple[Field, ...]:
        return self.fields

    def __repr__(self) -> str:
        return " + ".join(type(field).__name__ for field in self.fields)

    @property
    def jumps(self) -> tuple[float, ...]:  # type: ignore[override]
        return tuple(sorted({t for field in self.fields for t in field.jumps}))

    def piece(self, start: float, end: float) -> Field:
        return Sum(tuple(field.piece(start, end) for field in self.fields)) if self.jumps else self

    def seen(self, view: View) -> Function:
        functions = [field.seen(view) for field in self.fields]
        return lambda t, x: sum((F(t, x) for F in functions[1:]), start=functions[0](t, x))

    def summary(self) -> dict[str, Any]:
        return {"sum": [field.summary() for field in self.fields]}


class Layers(Several):
    """Weights that change with depth: the l-th field acts from times[l] to times[l + 1].

    Steps of a flow end at the jumps, so that they keep their order and every step sees one layer.

    Args:
        fields: attentions, or any fields, of one dimension.
        times: increasing, one more than fields; the last may be inf.

    Example:
        >>> from attn_flow import Attention, Sphere, flow
        >>> hot, cold = Attention.identity(3, beta=1.0), Attention.identity(3, beta=9.0)
        >>> layers = Layers([hot, cold], times=[0.0, 0.5, 2.0])
        >>> layers
        Layers(2 fields from t = 0 to 2)
        >>> path = flow(layers, Sphere().uniform(20, 3), t=[0.0, 2.0])
        >>> path.about["attention"]["times"], path.about["attention"]["layers"][1]["beta"]
        ([0.0, 0.5, 2.0], 9.0)
    """

    times: tuple[float, ...]

    def __init__(self, fields: Sequence[Field], times: Sequence[float] | Tensor) -> None:
        try:
            clock, fields = tuple(float(t) for t in times), tuple(fields)
        except (TypeError, ValueError):
            kinds = f"{type(fields).__name__} of fields and {type(times).__name__} of times"
            raise ValueError(f"Layers of a {kinds}; expected a list of fields, and one of numbers.") from None
        if len(fields) == 0 or len(clock) != len(fields) + 1:
            raise ValueError(
                f"{len(clock)} times for {len(fields)} layers, expected one more: layer l acts from times[l] to "
                "times[l + 1]."
            )
        if not all(a < b for a, b in itertools.pairwise(clock)) or not math.isfinite(clock[0]):
            raise ValueError(f"times = {clock[:6]}, expected finite times that increase strictly; the last may be inf.")
        super().__init__(fields)
        object.__setattr__(self, "times", clock)

    def __repr__(self) -> str:
        return f"Layers({len(self.fields)} fields from t = {self.times[0]:g} to {self.times[-1]:g})"

    def __len__(self) -> int:
        return len(self.fields)

    def __iter__(self) -> Iterator[Field]:
        return iter(self.fields)

    @property
    def jumps(self) -> tuple[float, ...]:  # type: ignore[override]
        inner = {t for field in self.fields for t in field.jumps}
        return tuple(sorted(inner | set(self.times[1:-1])))

    def piece(self, start: float, end: float) -> Field:
        if not self.times[0] <= start <= end <= self.times[-1]:
            raise ValueError(f"{self}, asked from t = {start:g} to {end:g}; expected times between its own.")
        layer = min(bisect.bisect_right(self.times, start), len(self.fields)) - 1
        return self.fields[layer].piece(start, end)

    def seen(self, view: View) -> Function:
        return lambda t, x: self.piece(t, t).seen(view)(t, x)

    def summary(self) -> dict[str, Any]:
        times = [t if math.isfinite(t) else "inf" for t in self.times]
        return {"layers": [field.summary() for field in self.fields], "times": times}


@dataclass(frozen=True, eq=False)
class Scheduled(Field):
    """A function of time that returns the field of that moment."""

    function: Callable[[float], Field]

    def frozen(self, t: float) -> Field:
        field = self.function(t)
        if not isinstance(field, Field):
            raise ValueError(f"the schedule returned a {type(field).__name__} at t = {t:g}, expected an Attention.")
        return field

    @property
    def tensors(self) -> dict[str, Tensor]:
        return {}

    @property
    def tells_apart(self) -> tuple[str, ...]:
        return ("a schedule",)

    def admit(self, cloud: Cloud, context: Measure | None = None) -> torch.Size:
        return cloud.x.shape[:-2]

    def seen(self, view: View) -> Function:
        return lambda t, x: self.frozen(t).seen(view)(t, x)

    def summary(self) -> dict[str, Any]:
        return {"scheduled": getattr(self.function, "__name__", repr(self.function))}


def as_field(given: Field | Callable[[float], Field]) -> Field:
    """A field as it is; a function of time as a schedule."""
    if isinstance(given, Field):
        return given
    if not callable(given):
        raise ValueError(f"attention is a {type(given).__name__}, expected an Attention, Drift, Layers or a schedule.")
    return Scheduled(given)
