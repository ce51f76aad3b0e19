"""How beta changes along a layer's depth: functions of s = t/horizon in [0, 1] that multiply it, and pickle."""

from __future__ import annotations

from dataclasses import dataclass

from attn_flow.base import checks


@dataclass(frozen=True)
class Linear:
    """start + (end - start) s.

    >>> Linear(1.0, 3.0)(0.5)
    2.0
    """

    start: float
    end: float

    def __post_init__(self) -> None:
        checks.positive_finite("start", self.start)
        checks.positive_finite("end", self.end)

    def __call__(self, s: float) -> float:
        return self.start + (self.end - self.start) * s


@dataclass(frozen=True)
class Geometric:
    """start (end / start)^s: as many doublings in equal parts of the depth.

    >>> Geometric(1.0, 4.0)(0.5)
    2.0
    """

    start: float
    end: float

    def __post_init__(self) -> None:
        checks.positive_finite("start", self.start)
        checks.positive_finite("end", self.end)

    def __call__(self, s: float) -> float:
        return self.start * (self.end / self.start) ** s
