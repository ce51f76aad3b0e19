"""The report: one HTML page that opens offline. Its words are in page.html."""

from __future__ import annotations

import base64
import html
import io
import json
import re
from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import Any

from attn_flow.base.checks import require_extra
from attn_flow.base.figures import INK, save_figure
from attn_flow.base.files import write_bytes
from attn_flow.probe.figures import CLUSTER_METHODS, PIXELS_PER_INCH, draw
from attn_flow.probe.findings import DESCRIPTIONS, QUESTIONS, About, Finding, Reading

WIDE, NARROW, SMALL = 748, 350, 236  # widths of figures in pixels
ANSWERS = {"supported": "Yes", "partly": "In part", "not supported": "No"}
TAGS = {"supported": "yes", "partly": "partly", "not supported": "no", None: "note"}
COLUMNS = {  # of the tables, which page.html explains
    "averaging": ("exponent", "exponent_low", "exponent_high", "continuation", "other_text"),
    "limit": ("p_value", "agreement", "rotated", "rotations", "percent_of_distance", "percent_of_flow", "fraction"),
}
METHODS = {name: label for name, (label, *_) in CLUSTER_METHODS.items()} | {  # the last ones were run with one K
    "foreign_queries_fitted": "other texts' queries; keys, values, masses fitted",
    "top_tokens_and_rest": "most attended tokens and one for the rest",
    "leverage_sample": "tokens drawn by leverage",
    "pivoted_cholesky": "pivoted Cholesky of the keys",
    "top_k_oracle": "K largest weights of every query (reference)",
    "low_rank": "attention matrix of rank K (reference)",
}


def write_page(
    folder: Path,
    title: str,
    about: About,
    findings: Mapping[str, Finding],
    evolution: Finding,
    reading: Reading,
    tokens: list[list[str]],
) -> Path:
    """Write report.html and a figure per question into a folder; the arguments are those of a `ProbeResult`."""
    encoder, averaging, template = about.encoder, findings["averaging"], _packaged("page.html")
    undecided = "Not decided." if averaging.numbers else "Not measured."
    words = {
        **encoder,
        **vars(about),
        **{f"{name}_question": question for name, question in QUESTIONS.items()},
        "question": f"Does attention in {title or encoder['model']} average over many tokens?",
        "answer": f"{ANSWERS[averaging.verdict]}: {averaging.numbers['where']}." if averaging.verdict else undecided,
        "mean_length": round(about.tokens / about.texts),
        "evolution": evolution.text,
        "cut": f"{about.truncated} were cut to {about.max_length} tokens" if about.truncated else "none was cut",
        "too_short": len(about.skipped),
        "unknown": f"{about.unknown_share:.1%}",
        "most_unexplained": f"{max(about.unexplained, default=0):.1e}",
        "packages": ", ".join(f"{name} {version}" for name, version in about.versions.items() if name != "source"),
    }
    parts = {name: html.escape(str(value)) for name, value in words.items()}
    parts["style"], parts["scripts"] = _packaged("page.css"), _scripts(about, findings, reading, tokens)
    parts["cards"] = "\n".join(_card(findings, name) for name in QUESTIONS)
    for name, finding in findings.items():
        numbers = finding.numbers
        if not numbers:  # nothing is drawn and explained
            section, reason = rf'(<section id="{name}"><h2>.*?</h2>).*?(</section>)', html.escape(finding.text)
            template = re.sub(section, rf"\1<p>{reason}</p>\2", template, flags=re.DOTALL)
            continue
        save_figure(draw(findings, name), folder / f"{name}.png")
        parts[f"{name}_figure"] = _figure(findings, name)
        parts[f"{name}_table"] = _table(_columns(name, numbers, encoder["layers"]))
        if name == "clusters":
            cost = ", ".join(f"{share:.2g} (K = {K})" for K, share in numbers["cost_over_attention"].items())
            parts |= {"goal": str(numbers["w2_goal"]), "cost": cost}
    write_bytes(Template(template).substitute(parts).encode(), folder / "report.html")
    return folder / "report.html"


def _card(findings: Mapping[str, Finding], name: str) -> str:
    finding, question = findings[name], html.escape(QUESTIONS[name])
    figure = _svg(draw(findings, name, SMALL, small=True), f"{name}-small", question) if finding.numbers else ""
    tag = f'<span class="tag {TAGS[finding.verdict]}">{finding.verdict or "numbers"}</span> ' if finding.numbers else ""
    return f'<a class="card" href="#{name}"><h2>{question}</h2>{figure}<p>{tag}{html.escape(finding.text)}</p></a>'


def _figure(findings: Mapping[str, Finding], name: str) -> str:
    """The figure for wide and for narrow screens, of which the style shows one."""
    label = html.escape(QUESTIONS[name])
    wide, narrow = (_svg(draw(findings, name, width), f"{name}-{width}", label) for width in (WIDE, NARROW))
    return f'<div class="on-wide">{wide}</div><div class="on-narrow">{narrow}</div>'


def _svg(figure: Any, name: str, label: str) -> str:
    """A figure as inline SVG in the colours and font of the page, with names of its own."""
    matplotlib, buffer = require_extra("matplotlib"), io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": name}):
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None}, dpi=72)
    width = figure.get_figwidth() * PIXELS_PER_INCH
    require_extra("matplotlib.pyplot").close(figure)
    text = buffer.getvalue()
    text = text[text.index("<svg") :].replace(INK, "currentColor")
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    size = f'<svg role="img" aria-label="{label}" width="{width:.0f}"'
    text = re.sub(r'<svg([^>]*?) width="[^"]*" height="[^"]*"', rf"{size}\1", text, count=1)
    return re.sub(r'\b(id="|xlink:href="#|url\(#)', rf"\g<1>{name}-", text)


def _table(columns: Mapping[str, Sequence[Any]]) -> str:
    """A table from its columns by heading."""
    head = "".join(f"<th>{html.escape(heading.replace('_', ' '))}</th>" for heading in columns)
    rows = ("".join(f"<td>{_cell(value)}</td>" for value in row) for row in zip(*columns.values()))
    return f'<div class="wide"><table><tr>{head}</tr>{"".join(f"<tr>{row}</tr>" for row in rows)}</table></div>'


def _cell(value: Any) -> str:
    if value is None:
        return ""
    return f"{value:.3g}" if isinstance(value, float) else html.escape(str(value))


def _columns(name: str, numbers: dict[str, Any], layers: int) -> dict[str, Sequence[Any]]:
    """The columns of a question's table: by layer, by phase of the heads, or by the method that finds clusters."""
    if name in COLUMNS:
        return {"layer": range(layers), **{key: numbers[key] for key in COLUMNS[name]}}
    if name == "temperature":
        sizes, medians = numbers["phases"], numbers["explained"].values()
        kinds = {f"R2 by {label}": [row[kind] for row in medians] for kind, label in DESCRIPTIONS.items()}
        return {"phase": list(sizes), "heads": list(sizes.values()), **kinds}
    curves, sizes = [numbers["curve"][method] for method in METHODS], [str(K) for K in numbers["sizes"]]
    K = sizes[len(sizes) // 2]
    middle = [curve[K] for curve in curves]
    known = [[z for z in row["explained"] if z is not None] for row in middle]
    return {
        "found from": list(METHODS.values()),
        f"K for W2 {numbers['w2_goal']}": [numbers["clusters_for_w2_goal"][method] for method in METHODS],
        **{f"W2, K = {size}": [curve.get(size, {}).get("w2") for curve in curves] for size in sizes},
        f"cosine, K = {K}": [row["embedding_cosine"] for row in middle],
        f"R2, K = {K}": [sum(values) / len(values) if values else None for values in known],
    }


def _scripts(about: About, findings: Mapping[str, Finding], reading: Reading, tokens: list[list[str]]) -> str:
    """The data of the token view and its script. "<" is escaped, so that no token can end the script."""
    lengths = reading.lengths.tolist()
    spreads = (reading.keys.log() / max(1.0, float(reading.lengths.double().log().max()))).split(lengths, -1)
    received = [[[round(value, 2) for value in row] for row in z.tolist()] for z in reading.received.split(lengths, -1)]
    exponents = {(row["layer"], row["head"]): row["b"] for row in findings["averaging"].numbers.get("heads", [])}
    heads = [(row["layer"], row["head"], row["logit_sd"]) for row in findings["temperature"].numbers["heads"]]
    data = {
        "texts": [
            {"words": as_words(words), "keys": _bytes(keys), "received": rows}
            for words, keys, rows in zip(tokens, spreads, received)
        ],
        "longest": max(lengths),
        "layers": about.encoder["layers"],
        "heads": about.encoder["heads"],
        "map": [{"layer": i, "head": h, "b": exponents.get((i, h)), "sd": sd} for i, h, sd in heads],
        "rows": {"n": reading.weights.shape[-1], "bytes": _bytes(reading.weights.sqrt())},
    }
    escaped = json.dumps(data, allow_nan=False).replace("<", "\\u003c")
    return f"<script>const data = {escaped};</script><script>{_packaged('page.js')}</script>"


def as_words(tokens: list[str]) -> list[tuple[str, bool]]:
    """Every token as it reads, and whether it continues the word before it.

    Knows the marks of WordPiece (##), SentencePiece and byte-level vocabularies; others are left as they are.

    >>> as_words(["tab", "##ula", "rasa"])
    [('tab', False), ('ula', True), ('rasa', False)]
    """
    is_marked = any(token.startswith(("▁", "Ġ")) for token in tokens)  # where a word begins
    continues = lambda token: token.startswith("##") or (is_marked and token[:1] not in "▁Ġ<[")
    return [(token.removeprefix("##").lstrip("▁Ġ") or " ", continues(token)) for token in tokens]


def _bytes(values: Any) -> str:
    """Values in [0, 1], one byte each."""
    return base64.b64encode((values.clamp(0, 1) * 255).round().byte().numpy().tobytes()).decode()


def _packaged(name: str) -> str:
    return files("attn_flow.probe").joinpath(name).read_text(encoding="utf-8")
