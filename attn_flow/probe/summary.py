"""The findings of a probe as a short table: question, answer, value with its interval, best baseline."""

from __future__ import annotations

from typing import Any

from attn_flow.probe.measurements import Measurements

COLUMNS = ("question", "answer", "value (95% interval)", "best baseline")
SHORT = {
    "averaging": "averages over tokens?",
    "clusters": "clusters per head",
    "temperature": "temperature of heads",
    "limit": "moves to its limit?",
}


def summary_rows(result: Measurements) -> list[list[str]]:
    """One row per question under `COLUMNS`."""
    cells = {"averaging": _averaging, "clusters": _clusters, "temperature": _temperature, "limit": _limit}
    rows = []
    for name, finding in result.findings.items():
        value, baseline = cells[name](finding.numbers) if finding.numbers else ("not measured", "")
        rows.append([SHORT[name], finding.verdict or "-", value, baseline])
    return rows


def _averaging(numbers: dict[str, Any]) -> tuple[str, str]:
    layers = zip(numbers["exponent"], numbers["exponent_low"], numbers["exponent_high"])
    known = sorted(row for row in layers if row[0] is not None)
    if not known:
        return "no exponent", ""
    first, last = (_interval(*row) for row in (known[0], known[-1]))
    return f"b = {first} to {last} by layer", "0.50 in mean-field theory"


def _clusters(numbers: dict[str, Any]) -> tuple[str, str]:
    sizes, goal, best = numbers["clusters_for_w2_goal"], numbers["w2_goal"], numbers["best_baseline"]
    if sizes["foreign_queries"] is None:
        K, row = list(numbers["curve"]["foreign_queries"].items())[-1]
        return (f"W2 {row['w2']:.2f} with {K} clusters" if row["w2"] is not None else "one text", "")
    interval = numbers["share_of_tokens_interval"]
    low, high = (None, None) if interval is None else (numbers["tokens"] * share for share in interval)
    value = f"{_interval(sizes['foreign_queries'], low, high, digits=0)} for W2 {goal}"
    name = best.replace("_", " ")
    return value, f"{name}: {sizes[best]:.0f}" if sizes[best] is not None else f"{name}: never"


def _temperature(numbers: dict[str, Any]) -> tuple[str, str]:
    return ", ".join(f"{count} {name}" for name, count in numbers["phases"].items()), ""


def _limit(numbers: dict[str, Any]) -> tuple[str, str]:
    own, rotated = (sum(numbers[name]) / len(numbers[name]) for name in ("agreement", "rotated"))
    rivals = {"rotated weights": rotated} | {k: v for k, v in numbers["rivals"].items() if v is not None}
    best = max(rivals, key=lambda name: rivals[name])
    return f"p = {numbers['global_p']:.2g}; agreement {own:.2f}", f"{best.replace('_', ' ')}: {rivals[best]:.2f}"


def _interval(mean: float, low: float | None, high: float | None, digits: int = 2) -> str:
    mean_text, *bounds = (f"{value:.{digits}f}" for value in (mean, low, high) if value is not None)
    return f"{mean_text} ({' to '.join(bounds)})" if len(bounds) == 2 else mean_text
