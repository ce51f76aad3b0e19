"""The four questions of the probe on every packaged encoder: what holds in all, in most, in few.

Every encoder of `attn-flow encoders` that was fetched is probed on inputs of its own kind. Encoders that were not
fetched are named and left out.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from attn_flow.base.figures import BASELINE, COLOURS, caption, style
from attn_flow.base.progress import progress_bar
from attn_flow.experiments.claims import bound
from attn_flow.experiments.encoders import ZOO, fetched, load_fetched, own_inputs
from attn_flow.experiments.parts import kept_part
from attn_flow.hooks.fingerprints import fingerprint
from attn_flow.probe import probe
from attn_flow.probe.sampling import gaussian_exponent

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLUMNS = (
    "encoder",
    "layers, heads",
    "tokens",
    "b by layer",
    "b from logits: correlation, rms error",
    "K for W2 0.3",
    "warm, middle, frozen heads",
    "limit: p",
)


def compute(
    quick: bool = False, seed: int = 0, progress: bool = False, parts: Path | None = None, names: tuple[str, ...] = ()
) -> dict[str, Any]:
    """Probe encoders.

    Args:
        quick: small encoders and few texts.
        seed: of all random numbers.
        progress: show a progress bar.
        parts: a folder for finished encoders, see `kept_part`.
        names: which encoders; by default all that were fetched.
    """
    texts, length = (3, 48) if quick else (16, 128)
    wanted = names or (("sapiens",) if quick else tuple(ZOO))
    present = [name for name in wanted if fetched(name) is not None]
    encoders = {}
    with progress_bar("questions", len(present), progress) as advance:
        for name in present:
            advance(0, note=name)
            encoders[name] = _one_encoder(name, texts, length, seed, parts)
            advance(note=name)
    missing = [name for name in wanted if name not in present]
    claims = _claims(encoders)
    return {"seed": seed, "texts": texts, "length": length, "encoders": encoders, "missing": missing, "claims": claims}


def _one_encoder(name: str, texts: int, length: int, seed: int, parts: Path | None) -> dict[str, Any]:
    model, tokenizer = load_fetched(name)

    def run() -> dict[str, Any]:
        source, chosen = own_inputs(name, tokenizer, model, texts, length)
        return probe(model, source, chosen, max_length=length if chosen else None, seed=seed).as_json()

    options = {"texts": texts, "length": length, "seed": seed, "weights": fingerprint(model)}
    return kept_part(parts, name, options, run)


def table_rows(numbers: dict[str, Any]) -> list[list[str]]:
    """One row per encoder under `COLUMNS`."""
    rows = []
    for name, result in numbers["encoders"].items():
        about, found = result["about"], {key: q["numbers"] for key, q in result["questions"].items()}
        phases = [head.get("phase") for head in heads_of(result)]
        agreement = found["averaging"].get("logits_b") or {}
        rows.append(
            [
                name,
                f"{about['encoder']['layers']}, {about['encoder']['heads']}",
                f"{about['tokens'] / about['texts']:.0f}",
                _range(found["averaging"].get("exponent")),
                f"{_short(agreement.get('correlation'))}, {_short(agreement.get('rms_error'))}",
                _short((found["clusters"].get("clusters_for_w2_goal") or {}).get("foreign_queries")),
                ", ".join(str(phases.count(phase)) for phase in ("warm", "middle", "frozen")),
                _short(found["limit"].get("global_p")),
            ]
        )
    return rows


def heads_of(result: dict[str, Any]) -> list[dict[str, Any]]:
    """The rows of the heads whose exponent is known."""
    rows = result["questions"]["averaging"]["numbers"].get("heads") or []
    return [row for row in rows if row["b"] is not None and row["logits_b"] is not None]


def _range(values: list[float | None] | None) -> str:
    known = [value for value in values or [] if value is not None]
    return f"{min(known):.2f} to {max(known):.2f}" if known else "not defined"


def _short(value: float | None) -> str:
    return "not defined" if value is None else f"{value:.2g}"


def _claims(encoders: dict[str, Any]) -> list[dict[str, Any]]:
    heads = [row for result in encoders.values() for row in heads_of(result)]
    if not heads:
        return []
    verdicts = {key: [r["questions"][key]["verdict"] for r in encoders.values()] for key in ("averaging", "limit")}
    share = lambda key, verdict: verdicts[key].count(verdict) / len(verdicts[key])
    squared = [(row["logits_b"] - row["b"]) ** 2 for row in heads]
    return [
        bound("all heads: correlation of b with its logits' prediction", _correlation(heads), at_least=0.9),
        bound("all heads: rms error of that prediction", (sum(squared) / len(squared)) ** 0.5, at_most=0.05),
        bound("few: encoders whose layers all average at the mean-field rate, share", share("averaging", "supported"),
              at_most=0.5),
        bound("few: encoders whose layers move towards their limits, share", share("limit", "supported"), at_most=0.5),
    ]  # fmt: skip


def _correlation(heads: list[dict[str, Any]]) -> float:
    import numpy as np

    return float(np.corrcoef([row["logits_b"] for row in heads], [row["b"] for row in heads])[0, 1])


def plot(numbers: dict[str, Any]) -> Figure:
    """Every head's exponent b against the temperature of its logits, and against what its logits predict."""
    with style() as pyplot:
        figure, (a, b) = pyplot.subplots(1, 2, figsize=(10, 4.4))
        for i, (name, result) in enumerate(numbers["encoders"].items()):
            heads, colour, mark = heads_of(result), COLOURS[i % 6], "osv^"[i // 6 % 4]
            drawn = {"color": colour, "marker": mark, "linestyle": "", "markersize": 3, "alpha": 0.7}
            a.plot([row["logit_sd"] for row in heads], [row["b"] for row in heads], label=name, **drawn)
            b.plot([row["logits_b"] for row in heads], [row["b"] for row in heads], **drawn)
        if numbers["encoders"]:
            s = torch.logspace(-1, 1.45, 100, dtype=torch.float64)
            a.plot(s, gaussian_exponent(s, numbers["length"]), color="black", linewidth=2)
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
