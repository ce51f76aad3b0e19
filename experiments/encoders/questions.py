"""The four questions of the probe on every packaged encoder: what holds in all, in most, in few.

Every encoder of `python -m attn_flow.experiments.encoders` that was fetched is probed on inputs of its own kind.
Encoders that were not fetched are named and left out.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from attn_flow.base.figures import BASELINE, COLOURS, caption, style
from attn_flow.base.progress import progress_bar
from attn_flow.experiments.claims import at_least, at_most
from attn_flow.experiments.encoders import ZOO, fetched, load_fetched, own_inputs
from attn_flow.experiments.parts import kept_part
from attn_flow.hooks.corpus import fingerprint
from attn_flow.probe import probe
from attn_flow.probe.sampling import gaussian_exponent

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLUMNS = (
    "encoder",
    "layers, heads",
    "b by layer",
    "averages",
    "b from logits: correlation, error (of the mean)",
    "K for W2 0.3, beats baselines",
    "warm, middle, frozen heads",
    "limit: p, reached",
)
ANSWERS = {"supported": "yes", "partly": "partly", "not supported": "no", None: "no verdict"}


def compute(quick: bool = False, seed: int = 0, progress: bool = False, parts: Path | None = None) -> dict[str, Any]:
    """Probe all encoders that were fetched (parts: `kept_part`); quick: a small one and few texts."""
    texts, length = (3, 48) if quick else (8, 64)
    wanted = ("sapiens",) if quick else tuple(ZOO)
    present = [name for name in wanted if fetched(name) is not None]
    encoders = {}
    with progress_bar("questions", len(present), progress) as advance:
        for name in present:
            advance(0, note=name)
            encoders[name] = _one_encoder(name, texts, length, seed, parts)
            advance(note=name)
    missing = [name for name in wanted if name not in present]
    return {
        "seed": seed,
        "texts": texts,
        "length": length,
        "encoders": encoders,
        "table": [list(COLUMNS), *table_rows(encoders)],
        "missing": missing,
        "claims": claims(encoders),
    }


def _one_encoder(name: str, texts: int, length: int, seed: int, parts: Path | None) -> dict[str, Any]:
    model, tokenizer = load_fetched(name)

    def run() -> dict[str, Any]:
        source, chosen = own_inputs(name, tokenizer, model, texts, length)
        return probe(model, source, chosen, max_length=length if chosen else None, seed=seed).as_json()

    options = {"texts": texts, "length": length, "seed": seed, "weights": fingerprint(model)}
    return kept_part(parts, name, options, run)


def table_rows(encoders: dict[str, Any]) -> list[list[str]]:
    """One row per encoder under `COLUMNS`."""
    rows = []
    for name, result in encoders.items():
        facts, numbers = result["about"]["encoder"], {k: q["numbers"] for k, q in result["questions"].items()}
        answers = {key: ANSWERS[question["verdict"]] for key, question in result["questions"].items()}
        exponents = [b for b in numbers["averaging"].get("exponent") or [] if b is not None]
        errors, p = head_errors(result), numbers["limit"].get("global_p")
        rows.append(
            [
                name,
                f"{facts['layers']}, {facts['layers'] * facts['heads']}",
                f"{min(exponents):.2f} to {max(exponents):.2f}" if exponents else "not defined",
                answers["averaging"],
                f"{errors[0]:.2f}, {errors[1]:.2f} ({errors[2]:.2f})" if errors else "not defined",
                _with_answer(_clusters_needed(numbers["clusters"]), answers["clusters"]),
                ", ".join(str(number) for number in (numbers["temperature"].get("phases") or {}).values()),
                _with_answer("not defined" if p is None else f"{p:.2g}", answers["limit"]),
            ]
        )
    return rows


def heads_of(result: dict[str, Any]) -> list[dict[str, Any]]:
    """The rows of the heads whose exponent is known."""
    rows = result["questions"]["averaging"]["numbers"].get("heads") or []
    return [row for row in rows if row["b"] is not None and row["logits_b"] is not None]


def head_errors(*results: dict[str, Any]) -> tuple[float, float, float] | None:
    """Over heads: correlation of b with its prediction from logits, error of the prediction, error of the mean of b.

    Errors are root mean squares. None for fewer than two heads.
    """
    heads = [row for result in results for row in heads_of(result)]
    if len(heads) < 2:
        return None
    b, predicted = (np.array([row[key] for row in heads]) for key in ("b", "logits_b"))
    return float(np.corrcoef(b, predicted)[0, 1]), float(((b - predicted) ** 2).mean() ** 0.5), float(b.std())


def _clusters_needed(clusters: dict[str, Any], goal: float = 0.3) -> str:
    """The number of clusters at which W2 after the last layer falls to the goal, or the end of the measured sizes."""
    needed = (clusters.get("clusters_for_w2_goal") or {}).get("foreign_queries")
    if needed is not None:
        return f"{needed:.0f}"
    curve = {int(K): row["w2"] for K, row in (clusters.get("curve") or {}).get("foreign_queries", {}).items()}
    if not curve:
        return "not defined"
    return f"below {min(curve)}" if curve[min(curve)] <= goal else f"above {max(curve)}"


def _with_answer(number: str, answer: str) -> str:
    return number if number == "not defined" else f"{number}, {answer}"


def claims(encoders: dict[str, Any]) -> list[dict[str, Any]]:
    errors = head_errors(*encoders.values())
    if errors is None:
        return []
    each = [row for result in encoders.values() if (row := head_errors(result))]
    verdicts = {key: [r["questions"][key]["verdict"] for r in encoders.values()] for key in ("averaging", "limit")}
    share = {key: row.count("supported") / max(1, len(row) - row.count(None)) for key, row in verdicts.items()}
    better = sum(error < of_mean for _, error, of_mean in each) / len(each)
    return [
        at_least("all heads: correlation of b with its logits' prediction", errors[0], 0.9),
        at_most("all heads: rms error of that prediction", errors[1], 0.05),
        at_least("all: encoders where it errs less than the mean of b, share", better, 1.0),
        at_most("few: encoders whose layers all average at the mean-field rate, share", share["averaging"], 0.5),
        at_most("few: encoders whose layers move towards their limits, share", share["limit"], 0.5),
    ]


def plot(numbers: dict[str, Any]) -> Figure:
    """Every head's exponent b against the temperature of its logits, and against what its logits predict."""
    with style() as pyplot:
        figure, (a, b) = pyplot.subplots(1, 2, figsize=(10, 4.4))
        measured = {name: rows for name, result in numbers["encoders"].items() if (rows := heads_of(result))}
        for i, (name, heads) in enumerate(measured.items()):
            colour, mark = COLOURS[i % 6], "osv^"[i // 6 % 4]
            drawn = {"color": colour, "marker": mark, "linestyle": "", "markersize": 3, "alpha": 0.7}
            a.plot([row["logit_sd"] for row in heads], [row["b"] for row in heads], label=name, **drawn)
            b.plot([row["logits_b"] for row in heads], [row["b"] for row in heads], **drawn)
        if measured:
            a.plot(*theory_curve(numbers), color="black", linewidth=2)
            figure.legend(loc="outside right upper", markerscale=2)
        a.set_xscale("log", base=2)
        a.xaxis.set_major_formatter("{x:g}")
        a.axhline(0.5, color=BASELINE, linestyle="--", linewidth=1)
        a.set(xlabel="standard deviation of a head's logits", ylabel="exponent b", title="Black line: theory, no fit")
        b.axline((0, 0), slope=1, color=BASELINE, linestyle="--", linewidth=1)
        b.set(xlabel="b from the head's logits alone", ylabel="exponent b", title="One mark per head")
        missing = f" Not fetched: {', '.join(numbers['missing'])}." if numbers["missing"] else ""
        caption(
            figure,
            f"{numbers['texts']} texts of at most {numbers['length']} tokens each, seed {numbers['seed']}.{missing}",
        )
    return figure


def theory_curve(numbers: dict[str, Any]) -> tuple[np.ndarray, np.ndarray]:
    """Predicted b of normal logits of the longest inputs, against their standard deviation over all measured heads."""
    results = numbers["encoders"].values()
    measured = np.log([row["logit_sd"] for result in results for row in heads_of(result)])
    sd = np.exp(np.linspace(measured.min(), measured.max(), 100))
    longest = max(result["about"]["tokens"] / result["about"]["texts"] for result in results)
    return sd, gaussian_exponent(torch.from_numpy(sd), round(longest)).numpy()
