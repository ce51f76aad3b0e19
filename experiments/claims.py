"""A claim as a number: what was measured, what was expected and why, and whether it holds.

Every claim has a source, which says where its expected number comes from:
    theorem    a paper proves or states it;
    derived    a formula of `attn_flow.theory` or `attn_flow.prediction`, derived here and checked by simulation;
    observed   no formula gives it: the bound says what would refute the statement.
Numbers of an earlier run of this program are no claims; they are in the tests.
"""

from __future__ import annotations

from typing import Any, Literal

Source = Literal["theorem", "derived", "observed"]


def claim(what: str, value: float, expected: float, tolerance: float, source: Source = "derived") -> dict[str, Any]:
    """The claim that |value - expected| <= tolerance."""
    value, expected, tolerance = float(value), float(expected), float(tolerance)
    record = {"claim": what, "value": value, "expected": expected, "tolerance": tolerance, "source": source}
    return record | {"holds": abs(value - expected) <= tolerance}


def at_most(what: str, value: float, limit: float, source: Source = "observed") -> dict[str, Any]:
    """The claim that value <= limit, which its text says."""
    return _bound(f"{what} (<= {limit:g})", value, source, float(value) <= limit)


def at_least(what: str, value: float, limit: float, source: Source = "observed") -> dict[str, Any]:
    """The claim that value >= limit, which its text says."""
    return _bound(f"{what} (>= {limit:g})", value, source, float(value) >= limit)


def _bound(what: str, value: float, source: Source, holds: bool) -> dict[str, Any]:
    return {"claim": what, "value": float(value), "expected": None, "tolerance": 0.0, "source": source, "holds": holds}


def chance(claim: dict[str, Any]) -> float | None:
    """How often a number drawn between 0 and twice the expected one passes; None of a bound, or where 0 is expected."""
    if not claim["expected"]:
        return None
    return min(1.0, claim["tolerance"] / abs(claim["expected"]))
