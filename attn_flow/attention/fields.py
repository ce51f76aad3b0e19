"""Vector fields that move tokens, and how to combine them.

    flow(attention + Drift(ffn), x0, t=20.0)                            # the sum of two fields
    flow(Layers([A_1, A_2 + Drift(ffn)], times=[0, 1, 3]), x0, t=3.0)   # A_1 until t = 1, then the other

A flow follows P_x F(t, x). It evaluates a field, asks for its jumps, and never asks which field it is.
"""

from __future__ import annotations

import bisect
import itertools
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from attn_flow.base import checks
from attn_flow.geometry import Velocity
from attn_flow.measures.cloud import Cloud


class Field(ABC):
    """A vector field of a cloud of tokens. Fields add up: attention + Drift(f).

    A field that is made of others has them in `fields`; what it does not override is combined from them.
    """

    fields: tuple[Field, ...] = ()

    @abstractmethod
    def __call__(self, t: float, x: Tensor, log_weights: Tensor | None = None) -> Tensor:
        """The drift (..., n, d) at time t of tokens x (..., n, d) with log-weights (..., n), without checks."""

    def with_fields(self, fields: tuple[Field, ...]) -> Field:
        """The same combination of other fields."""
        return replace(self, fields=fields) if fields else self  # type: ignore[type-var]

    def check_cloud(self, cloud: Cloud) -> torch.Size:
        """Raise ValueError unless the field can move this cloud; returns the batch axes of its drift."""
        shapes = {f"field {i}": field.check_cloud(cloud) for i, field in enumerate(self.fields)}
        return checks.broadcast_axes({"x": cloud.x.shape[:-2], **shapes})

    def logit_bound(self, radius: float | Tensor) -> Tensor:
        """An upper bound, shape (), on the logits of tokens no longer than `radius`."""
        return torch.stack([torch.zeros(()), *(field.logit_bound(radius).cpu() for field in self.fields)]).amax()

    def in_float64(self) -> Field:
        """The same field for tokens that are computed in float64 because float32 cannot resolve their logits."""
        return self.with_fields(tuple(field.in_float64() for field in self.fields))

    @property
    def jumps(self) -> tuple[float, ...]:
        """The times at which it is not continuous."""
        return tuple(sorted({t for field in self.fields for t in field.jumps}))

    def piece(self, start: float, end: float) -> Field:
        """The field between two times without a jump inside, continuous up to both of them."""
        return self.with_fields(tuple(field.piece(start, end) for field in self.fields)) if self.jumps else self

    @property
    def needs_euclidean(self) -> bool:
        """Whether it changes the length of tokens, so that they cannot stay on a sphere."""
        return any(field.needs_euclidean for field in self.fields)

    @property
    def not_exchangeable_because(self) -> tuple[str, ...]:
        """Reasons why coincident tokens may separate; () if they never do."""
        return tuple(reason for field in self.fields for reason in field.not_exchangeable_because)

    def summary(self) -> dict[str, Any]:
        """What a trajectory stores about it, as plain JSON."""
        return {"name": repr(self)}

    def __add__(self, other: Field) -> Field:
        return Sum((self, other)) if isinstance(other, Field) else NotImplemented


def require_field(name: str, field: Field) -> None:
    """Raise TypeError unless an argument is a field; `name` is its name in the error."""
    if not isinstance(field, Field):
        kind = type(field).__name__
        raise TypeError(f"{name} is a {kind}, expected Attention, Drift, Layers or a sum of them; see Drift(f).")


@dataclass(frozen=True, eq=False, repr=False)
class Drift(Field):
    """A drift of your own, f(t, x), such as an FFN, a forcing or a potential.

    Args:
        f: a function of a number t and tokens x (..., n, d), padding included, that returns a tensor which broadcasts
            to x, in its dtype. The flow projects it to the geometry, as it does with attention.
        tokenwise: whether f moves every token by its own position alone, as an FFN does. Coincident tokens may then
            be merged by `Adaptive`.

    Example:
        >>> from attn_flow import Euclidean, flow
        >>> rotation = torch.tensor([[0.0, -1.0], [1.0, 0.0]])
        >>> turning = Drift(lambda t, x: x @ rotation.T, tokenwise=True)
        >>> path = flow(turning, torch.tensor([[1.0, 0.0]]), [0.0, torch.pi / 2], geometry=Euclidean())
        >>> path.x[-1].round(decimals=4).abs()
        tensor([[0., 1.]])
    """

    f: Velocity
    tokenwise: bool = False

    def __repr__(self) -> str:
        name = getattr(self.f, "__name__", type(self.f).__name__)
        return f"Drift({name}{', tokenwise' * self.tokenwise})"

    def __call__(self, t: float, x: Tensor, log_weights: Tensor | None = None) -> Tensor:
        drift = self.f(t, x)
        if not isinstance(drift, Tensor):
            raise TypeError(f"{self} returned a {type(drift).__name__} at t = {t:.4g}, expected a tensor.")
        is_broadcastable = all(k in (1, size) for k, size in zip(drift.shape[::-1], x.shape[::-1]))
        if drift.dtype != x.dtype or drift.ndim > x.ndim or not is_broadcastable:
            received = f"{drift.dtype} {tuple(drift.shape)} at t = {t:.4g}"
            raise ValueError(f"{self} returned {received}, expected {x.dtype} {tuple(x.shape)}, as its tokens.")
        return drift.expand(x.shape)

    def in_float64(self) -> Field:
        # The function was written for float32, and receives tokens as it expects them.
        return replace(self, f=lambda t, x: self(t, x.float()).double())

    @property
    def not_exchangeable_because(self) -> tuple[str, ...]:
        return () if self.tokenwise else (f"{self}, which is not tokenwise",)


@dataclass(frozen=True, eq=False, repr=False)
class Sum(Field):
    """F_1 + F_2 + ..., made by adding fields."""

    fields: tuple[Field, ...] = ()

    def __repr__(self) -> str:
        return " + ".join(map(repr, self.fields))

    def __call__(self, t: float, x: Tensor, log_weights: Tensor | None = None) -> Tensor:
        first, *others = (field(t, x, log_weights) for field in self.fields)
        return sum(others, start=first)


@dataclass(frozen=True, eq=False, repr=False)
class Layers(Field):
    """Weights that change with depth: field number l acts from times[l] to times[l + 1].

    The steps of a flow end at the jumps, so that they keep their order.

    Args:
        fields: attentions, or any fields, of one dimension.
        times: increasing, one more than fields; the last may be infinite.

    Example:
        >>> from attn_flow import Attention, Sphere, flow
        >>> layers = Layers([Attention.identity(3, beta=1.0), Attention.identity(3, beta=9.0)], times=[0.0, 0.5, 2.0])
        >>> flow(layers, Sphere().uniform(20, 3), t=[0.0, 2.0])
        Trajectory(2 times from 0 to 2, x (2, 20, 3) float32)
    """

    fields: Sequence[Field] = ()  # type: ignore[assignment]
    times: Sequence[float] | Tensor = ()

    def __post_init__(self) -> None:
        times = tuple(float(t) for t in self.times)
        for i, field in enumerate(self.fields):
            require_field(f"field {i}", field)
        if len(self.fields) == 0 or len(times) != len(self.fields) + 1:
            raise ValueError(f"{len(times)} times for {len(self.fields)} fields, expected one more time than fields.")
        if not all(a < b for a, b in itertools.pairwise(times)) or not math.isfinite(times[0]):
            raise ValueError(f"times = {times[:6]}, expected strictly increasing times; only the last may be infinite.")
        vars(self).update(fields=tuple(self.fields), times=times)

    def __repr__(self) -> str:
        return f"Layers({len(self.fields)} fields from t = {self.times[0]:g} to {self.times[-1]:g})"

    def __call__(self, t: float, x: Tensor, log_weights: Tensor | None = None) -> Tensor:
        return self.piece(t, t)(t, x, log_weights)

    @property
    def jumps(self) -> tuple[float, ...]:
        return tuple(sorted({*super().jumps, *self.times[1:-1]}))

    def piece(self, start: float, end: float) -> Field:
        if not self.times[0] <= start <= end <= self.times[-1]:
            raise ValueError(f"{self} has no field from t = {start:g} to {end:g}; expected times between its own.")
        layer = min(bisect.bisect_right(self.times, start), len(self.fields)) - 1
        return self.fields[layer].piece(start, end)


@dataclass(frozen=True, eq=False, repr=False)
class Transformed(Field):
    """A field whose drift F is changed token by token: (t, x) -> transform(F, t, x).

    Args:
        field: the field F.
        transform: a function of the drift (t, x) -> F(t, x), the time and the tokens.
        name: what it is called in a trajectory.
        needs_euclidean: whether tokens leave the sphere.
        input_radius: the length of the tokens at which F is evaluated, if the transform fixes it.
    """

    field: Field
    transform: Callable[[Velocity, float, Tensor], Tensor]
    name: str
    needs_euclidean: bool = False
    input_radius: float | None = None

    def __repr__(self) -> str:
        return f"{self.name} of {self.field!r}"

    @property
    def fields(self) -> tuple[Field, ...]:  # type: ignore[override]
        return (self.field,)

    def with_fields(self, fields: tuple[Field, ...]) -> Field:
        return replace(self, field=fields[0])

    def logit_bound(self, radius: float | Tensor) -> Tensor:
        return self.field.logit_bound(radius if self.input_radius is None else self.input_radius)

    def __call__(self, t: float, x: Tensor, log_weights: Tensor | None = None) -> Tensor:
        return self.transform(lambda s, y: self.field(s, y, log_weights), t, x)
