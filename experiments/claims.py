"""A claim of a paper as a number: what was measured, what was expected, and whether it holds."""

from __future__ import annotations

from typing import Any


def claim(what: str, value: float, expected: float, tolerance: float) -> dict[str, Any]:
    """|value - expected| <= tolerance."""
    value, expected = float(value), float(expected)
    return {
        "claim": what,
        "value": value,
        "expected": expected,
        "tolerance": float(tolerance),
        "holds": abs(value - expected) <= tolerance,
    }


def bound(what: str, value: float, *, at_least: float = float("-inf"), at_most: float = float("inf")) -> dict[str, Any]:
    """at_least <= value <= at_most, said in the claim."""
    value = float(value)
    limits = [f">= {at_least:g}"] * (at_least > float("-inf")) + [f"<= {at_most:g}"] * (at_most < float("inf"))
    return {
        "claim": f"{what} ({', '.join(limits)})",
        "value": value,
        "expected": None,
        "tolerance": 0.0,
        "holds": at_least <= value <= at_most,
    }


def chance(claim: dict[str, Any]) -> float | None:
    """How often a number drawn between 0 and twice the expected one passes; None of a bound, or where 0 is expected."""
    if not claim["expected"]:
        return None
    return min(1.0, claim["tolerance"] / abs(claim["expected"]))
