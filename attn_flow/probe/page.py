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
    "foreign_queries_fitted": "other texts' queries, masses and values fitted",
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
    question = f"Does attention in {title or encoder['model']} average over many tokens?"
    undecided = "Not decided." if averaging.numbers else "Not measured."
    answer = f"{ANSWERS[averaging.verdict]}: {averaging.numbers['where']}." if averaging.verdict else undecided
    parts = {
        "question": html.escape(question),
        "answer": answer,
        "size": f"{encoder['layers']} layers of {encoder['heads']} heads, {about.texts} texts of "
        f"{about.tokens / about.texts:.0f} tokens on average",
        "cards": "\n".join(_card(findings, name) for name in QUESTIONS),
        "evolution_text": html.escape(evolution.text),
        "described": _described(about),
    }
    for name, finding in findings.items():
        parts[f"{name}_question"] = html.escape(QUESTIONS[name])
        numbers = finding.numbers
        if not numbers:  # nothing is drawn and explained
            section, words = rf'(<section id="{name}"><h2>.*?</h2>).*?(</section>)', html.escape(finding.text)
            template = re.sub(section, rf"\1<p>{words}</p>\2", template, flags=re.DOTALL)
            continue
        save_figure(draw(findings, name), folder / f"{name}.png")
        parts[f"{name}_figure"] = _figure(findings, name)
        parts[f"{name}_numbers"] = _table(_columns(name, numbers, encoder["layers"]))
    parts |= _clusters_in_words(findings["clusters"].numbers) | {"not_covered": _not_covered(about, findings["limit"])}
    body = Template(template).substitute(parts)
    text = (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{html.escape(f'{question} {answer}')}</title><style>{_packaged('page.css')}</style></head>"
        f"<body>\n{body}\n{_scripts(about, averaging, reading, tokens)}</body></html>\n"
    )
    write_bytes(text.encode(), folder / "report.html")
    return folder / "report.html"


def _card(findings: Mapping[str, Finding], name: str) -> str:
    finding, question = findings[name], html.escape(QUESTIONS[name])
    figure = _svg(draw(findings, name, SMALL, small=True), f"{name}-small", question) if finding.numbers else ""
    tag = f'<span class="tag {TAGS[finding.verdict]}">{finding.verdict or "numbers"}</span>'
    return f'<a class="card" href="#{name}"><h2>{question}</h2>{figure}<p>{tag} {html.escape(finding.text)}</p></a>'


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
    middle = [curve[sizes[len(sizes) // 2]] for curve in curves]
    known = [[z for z in row["explained"] if z is not None] for row in middle]
    return {
        "found from": list(METHODS.values()),
        f"K for W2 {numbers['w2_goal']}": [numbers["clusters_for_w2_goal"][method] for method in METHODS],
        **{f"W2, K = {K}": [curve.get(K, {}).get("w2") for curve in curves] for K in sizes},
        "cosine": [row["embedding_cosine"] for row in middle],
        "R2": [sum(values) / len(values) if values else None for values in known],
    }


def _clusters_in_words(numbers: dict[str, Any]) -> dict[str, str]:
    """Numbers of the clusters that the text of the page names."""
    if not numbers:
        return {}
    cost = ", ".join(f"{_cell(float(share))} (K = {K})" for K, share in numbers["cost_over_attention"].items())
    return {"goal": str(numbers["w2_goal"]), "middle": str(numbers["sizes"][len(numbers["sizes"]) // 2]), "cost": cost}


def _not_covered(about: About, limit: Finding) -> str:
    """What the theorem of the last question does not cover in this model."""
    facts, changes = about.encoder, limit.numbers.get("rivals", {}).get("other_layers") is not None
    parts = [f"queries of {facts['head_dim']} of {facts['dim']} dimensions"] * (facts["head_dim"] < facts["dim"])
    parts += [f"{facts['heads']} heads that are summed"] * (facts["heads"] > 1)
    parts += ["weights that change from layer to layer"] * changes
    return f"this model has {', '.join([*parts, 'biases, norms and feed-forward parts'])}."


def _described(about: About) -> str:
    facts, versions = about.encoder, about.versions
    beta = "its trained beta" if about.beta_factor == 1 else f"{about.beta_factor:g} times its trained beta"
    packages = ", ".join(f"{name} {versions[name]}" for name in ("attn-flow", "torch", "transformers", "python"))
    items = [
        f"Encoder: {facts['model']} ({facts['architecture']}), {facts['layers']} layers, {facts['heads']} heads of "
        f"width {facts['head_dim']}, d = {facts['dim']}, at {beta}.",
        f"Texts: {about.texts}, {about.tokens} tokens, {about.truncated} cut to {about.max_length}, "
        f"{len(about.skipped)} left out as too short; {about.unknown_share:.1%} of the tokens are unknown.",
        f"Weights: {about.weights}; as read they leave {max(about.unexplained, default=0):.1e} of what attention adds "
        "unexplained.",
        f"Computed: in {about.dtype} on {about.device}, seed {about.seed}; {packages}.",
    ]
    return "<ul>" + "".join(f"<li>{html.escape(item)}</li>" for item in items) + "</ul>"


def _scripts(about: About, averaging: Finding, reading: Reading, tokens: list[list[str]]) -> str:
    """The data of the token view and its script. "<" is escaped, so that no token can end the script."""
    lengths = reading.lengths.tolist()
    spreads = (reading.keys.log() / max(1.0, float(reading.lengths.double().log().max()))).split(lengths, -1)
    received = [[[round(value, 2) for value in row] for row in z.tolist()] for z in reading.received.split(lengths, -1)]
    heads = averaging.numbers.get("heads", [])
    data = {
        "texts": [
            {"words": as_words(words), "keys": _bytes(keys), "received": rows}
            for words, keys, rows in zip(tokens, spreads, received)
        ],
        "longest": max(lengths),
        "layers": about.encoder["layers"],
        "heads": about.encoder["heads"],
        "map": [{"layer": row["layer"], "head": row["head"], "b": row["b"], "sd": row["logit_sd"]} for row in heads],
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
