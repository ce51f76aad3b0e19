"""A limit and the phases of a run in sentences, for the terminal, pages and notebooks."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

PHASES = {
    "concentrating": "falls until {end:.3g}",
    "metastable": "rests until {end:.3g}",
    "terminal": "then rises",
    "spreading": "never falls",
}


def limit_sentences(limit: Mapping[str, Any]) -> list[str]:
    """What is predicted for large beta, from `LimitMap.as_dict()`: where tokens gather, how fast, and what follows."""
    case = limit["case"]
    if case == "batch":
        return [f"This is {limit['reason']}."]
    if case in ("undefined", "nonlinear"):
        return [f"No formula for the limit: {limit['reason']}."]
    basis, d, k = limit["limit_basis"], len(limit["limit_basis"]), len(limit["limit_basis"][0])
    if case == "stationary":
        words = ["At low temperature nothing moves: M = V G is a multiple of the identity."]
    elif case == "rotating" and k == d:
        words = ["Tokens rotate for ever and gather nowhere: all eigenvalues of M = V G have the same real part."]
    else:
        where = "on a great circle" if k == 2 else f"on a sphere of dimension {k - 1}"
        if k == 1:
            where = f"at two opposite points{_ends(basis)}"
        where += " and rotate in it for ever" if limit["frequencies"] else ""
        words = [f"At low temperature tokens gather {where}."]
    if case == "jordan":
        words.append("They approach like a power of time: the leading eigenvalues of M = V G form a Jordan block.")
    if limit["rate_w2"] is not None:
        words.append(f"The distance W2 to this limit falls like exp(-{limit['rate_w2']:.3g} t).")
    rate, end = limit["exit_rate"], limit["terminal_basis"]
    if rate:
        goal = f"direction of V{_ends(end)}" if len(end[0]) == 1 else "subspace of V"
        words.append(f"At finite beta they leave again, at rate {rate:.3g}, towards the leading {goal}.")
    elif rate == 0:
        width = "" if limit["width"] is None else f" with a width of {limit['width'] ** 0.5:.3g} / sqrt(beta)"
        words.append(f"They stay there{width}: W2 has no least value to predict.")
    elif k < d and limit["terminal_reason"]:
        words.append(f"When they leave is not predicted: {limit['terminal_reason']}.")
    return words


def why_no_t_min(limit: Mapping[str, Any]) -> str:
    """Why no time of least W2 is predicted, from `LimitMap.as_dict()`."""
    unmet = [need["text"] for need in limit["requires"] if need["met"] is False]
    return unmet[0] if unmet else limit["terminal_reason"] or limit["reason"]


def phase_words(phases: Sequence[Mapping[str, Any]]) -> str:
    """What W2 does in the phases of `Phases.as_dict()["phases"]`, such as "falls until 7, then rises"."""
    return ", ".join(PHASES[phase["name"]].format(**phase) for phase in phases)


def _ends(basis: Sequence[Sequence[float]]) -> str:
    """The two ends of a basis of one vector, if it is short; the first of its largest entries is made positive."""
    entries = [round(row[0], 12) for row in basis]
    if len(entries) > 4:
        return ""
    sign = math.copysign(1.0, max(entries, key=abs))
    return f", +-({', '.join(f'{sign * entry + 0.0:.3g}' for entry in entries)})"
