"""A claim as a number: what was measured, what was expected and why, and whether it holds.

Every claim has a source, which says where its expected number comes from:
    theorem    a paper proves or states it;
    derived    a formula of `attn_flow.theory` or `attn_flow.prediction`, derived here and checked by simulation;
    observed   no formula gives it: the bound says what would refute the statement.
Numbers of an earlier run of this program are no claims; they are in the tests.
"""

from __future__ import annotations

import math
from typing import Any, Literal

Source = Literal["theorem", "derived", "observed"]


def claim(what: str, value: float, expected: float, tolerance: float, source: Source = "derived") -> dict[str, Any]:
    """The claim that |value - expected| <= tolerance."""
    value, expected = float(value), float(expected)
    return {
        "claim": what,
        "value": value,
        "expected": expected,
        "tolerance": float(tolerance),
        "source": source,
        "holds": abs(value - expected) <= tolerance,
    }


def bound(
    what: str, value: float, *, at_least: float = -math.inf, at_most: float = math.inf, source: Source = "observed"
) -> dict[str, Any]:
    """The claim that at_least <= value <= at_most, which its text says."""
    value = float(value)
    limits = [f">= {at_least:g}"] * (at_least > -math.inf) + [f"<= {at_most:g}"] * (at_most < math.inf)
    return {
        "claim": f"{what} ({', '.join(limits)})",
        "value": value,
        "expected": None,
        "tolerance": 0.0,
        "source": source,
        "holds": at_least <= value <= at_most,
    }


def chance(claim: dict[str, Any]) -> float | None:
    """How often a number drawn between 0 and twice the expected one passes; None of a bound, or where 0 is expected."""
    if not claim["expected"]:
        return None
    return min(1.0, claim["tolerance"] / abs(claim["expected"]))
