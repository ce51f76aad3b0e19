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
from typing import TYPE_CHECKING, Any

from attn_flow.base.figures import INK, save_figure
from attn_flow.base.files import write_bytes
from attn_flow.base.checks import require_extra
from attn_flow.probe.figures import CLUSTER_METHODS, PIXELS_PER_INCH, comparison_figure, draw
from attn_flow.probe.findings import QUESTIONS, Finding
from attn_flow.probe.tokens import as_words

if TYPE_CHECKING:
    from attn_flow.probe.result import ProbeResult

WIDE, NARROW, SMALL = 748, 350, 236  # widths of figures in pixels
ANSWERS = {"supported": "Yes", "partly": "In part", "not supported": "No"}
TAGS = {"supported": "yes", "partly": "partly", "not supported": "no", None: "note"}
OTHER_METHODS = {  # methods that were run with one K, as the table calls them
    "foreign_queries_fitted": "other texts' queries, masses and values fitted",
    "top_tokens_and_rest": "most attended tokens and one for the rest",
    "leverage_sample": "tokens drawn by leverage",
    "pivoted_cholesky": "pivoted Cholesky of the keys",
    "top_k_oracle": "K largest weights of every query (reference: sees the attention)",
    "low_rank": "attention matrix of rank K (reference: sees the attention)",
}


def write_page(result: ProbeResult, folder: str | Path, title: str = "") -> Path:
    """Write report.html and its four figures into a folder; returns the path of the page."""
    folder, about, encoder = Path(folder), result.about, result.about.encoder
    question = f"Does attention in {title or encoder['model']} average over many tokens?"
    averaging, template = result.findings["averaging"], _packaged("page.html")
    undecided = "Not measured." if result.averaging is None else "Not decided."
    answer = f"{ANSWERS[averaging.verdict]}: {averaging.numbers['where']}." if averaging.verdict else undecided
    parts = {
        "question": html.escape(question),
        "answer": answer,
        "size": f"{encoder['layers']} layers of {encoder['heads']} heads, {about.texts} texts of "
        f"{about.tokens / about.texts:.0f} tokens on average",
        "cards": "\n".join(_card(result, name) for name in QUESTIONS),
        "not_covered": html.escape(_not_covered(result)),
        "evolution_text": html.escape(result.evolution.finding(about.seed).text),
        "described": _described(result),
    }
    for name, finding in result.findings.items():
        parts[f"{name}_question"] = html.escape(QUESTIONS[name])
        if getattr(result, name) is None:  # nothing is drawn and explained
            section, words = rf'(<section id="{name}"><h2>.*?</h2>).*?(</section>)', html.escape(finding.text)
            template = re.sub(section, rf"\1<p>{words}</p>\2", template, flags=re.DOTALL)
            continue
        save_figure(draw(result, name), folder / f"{name}.png")
        parts[f"{name}_figure"] = _figure(result, name)
        parts[f"{name}_numbers"] = _tables(finding.numbers, encoder["layers"])
    body = Template(template).substitute(parts)
    return _write_html(folder / "report.html", f"{question} {answer}", body, _scripts(result))


def write_comparison(results: Mapping[str, ProbeResult], folder: str | Path, subfolders: dict[str, str]) -> Path:
    """Write comparison.html beside the folders of several models' reports; returns its path."""
    rows = []
    for name, result in results.items():
        link = f'<a href="{html.escape(subfolders[name])}/report.html">{html.escape(name)}</a>'
        cells = "".join(f"<td>{_tag(f)}<p>{html.escape(f.text)}</p></td>" for f in result.findings.values())
        rows.append(f"<tr><th>{link}</th>{cells}</tr>")
    head = "".join(f"<th>{html.escape(question)}</th>" for question in QUESTIONS.values())
    body = (
        f"<h1>{len(results)} encoders side by side</h1>{_svg(comparison_figure(results), 'comparison', '')}"
        "<p>Every head's exponent b, the rate at which its error falls with the number of keys, against the "
        "temperature of its logits.</p>"
        f'<div class="wide"><table class="comparison"><tr><th></th>{head}</tr>{"".join(rows)}</table></div>'
    )
    return _write_html(Path(folder) / "comparison.html", "Encoders side by side", body)


def _card(result: ProbeResult, name: str) -> str:
    finding = result.findings[name]
    is_measured = getattr(result, name) is not None
    figure = _svg(draw(result, name, SMALL, small=True), f"{name}-small", QUESTIONS[name]) if is_measured else ""
    return (
        f'<a class="card" href="#{name}"><h2>{html.escape(QUESTIONS[name])}</h2>{figure}'
        f"<p>{_tag(finding)}{html.escape(finding.text)}</p></a>"
    )


def _tag(finding: Finding) -> str:
    return f'<span class="tag {TAGS[finding.verdict]}">{finding.verdict or "numbers"}</span> '


def _figure(result: ProbeResult, name: str) -> str:
    """The figure for wide and for narrow screens, of which the style shows one."""
    wide, narrow = (_svg(draw(result, name, width), f"{name}-{width}", QUESTIONS[name]) for width in (WIDE, NARROW))
    return f'<div class="on-wide">{wide}</div><div class="on-narrow">{narrow}</div>'


def _svg(figure: Any, name: str, label: str) -> str:
    """A figure as inline SVG in the colours and font of the page."""
    matplotlib, buffer = require_extra("matplotlib"), io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": name}):
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None}, dpi=72)
    width = figure.get_figwidth() * PIXELS_PER_INCH
    require_extra("matplotlib.pyplot").close(figure)
    text = buffer.getvalue()
    text = text[text.index("<svg") :].replace(INK, "currentColor")
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r'(<svg[^>]*?) width="[^"]*" height="[^"]*"', rf'\1 width="{width:.0f}"', text, count=1)
    text = re.sub(r'\b(id="|xlink:href="#|url\(#)', rf"\g<1>{name}-", text)
    return text.replace("<svg", f'<svg role="img" aria-label="{html.escape(label)}"', 1)


def _tables(numbers: dict[str, Any], layers: int) -> str:
    """The numbers of a finding: clusters by method and K, lists by layer, heads, and single numbers."""
    tables = []
    if "curve" in numbers:
        labels = {name: label for name, (label, *_) in CLUSTER_METHODS.items()} | OTHER_METHODS
        columns = ("found from", "K", "W2", "embedding cosine", "explained, mean of layers")
        rows = []
        for method, by_K in numbers["curve"].items():
            for K, row in by_K.items():
                known = [z for z in row["explained"] if z is not None]
                mean = sum(known) / len(known) if known else None
                rows.append((labels[method], K, row["w2"], row["embedding_cosine"], mean))
        tables.append(_table(columns, rows))
    is_number = lambda value: value is None or isinstance(value, int | float)
    lists = {k: v for k, v in numbers.items() if isinstance(v, list) and len(v) == layers and all(map(is_number, v))}
    if lists:
        tables.append(_table(("layer", *lists), list(zip(range(layers), *lists.values()))))
    if "heads" in numbers:
        tables.append(_table(list(numbers["heads"][0]), [list(row.values()) for row in numbers["heads"]]))
    single = {k.replace("_", " "): v for k, v in numbers.items() if isinstance(v, int | float | str)}
    listed = "".join(f"<li>{html.escape(key)}: {_cell(value)}</li>" for key, value in single.items())
    return f'{"".join(tables)}<ul class="numbers">{listed}</ul>'


def _table(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    head = "".join(f"<th>{html.escape(column.replace('_', ' '))}</th>" for column in columns)
    body = "".join("<tr>" + "".join(f"<td>{_cell(value)}</td>" for value in row) + "</tr>" for row in rows)
    return f'<div class="wide"><table><tr>{head}</tr>{body}</table></div>'


def _cell(value: Any) -> str:
    if value is None:
        return ""
    return f"{value:.3g}" if isinstance(value, float) else html.escape(str(value))


def _not_covered(result: ProbeResult) -> str:
    """What the theorem of the last question does not cover in this model."""
    facts, limit = result.about.encoder, result.limit
    parts = [f"queries of {facts['head_dim']} of {facts['dim']} dimensions"] if facts["head_dim"] < facts["dim"] else []
    parts += [f"{facts['heads']} heads that are summed"] if facts["heads"] > 1 else []
    parts += ["weights that change from layer to layer"] if limit is not None and len(limit.other_layers) else []
    return f"this model has {', '.join([*parts, 'biases, norms and feed-forward parts'])}."


def _described(result: ProbeResult) -> str:
    about, encoder = result.about, result.about.encoder
    skipped = f", {len(about.skipped)} left out as too short" if about.skipped else ""
    packages = ", ".join(f"{name} {about.versions[name]}" for name in ("attn-flow", "torch", "transformers", "python"))
    unexplained = f"leave {max(about.unexplained):.1e} of what attention adds unexplained" if about.unexplained else ""
    items = {
        "Encoder": f"{encoder['model']} ({encoder['architecture']}), {encoder['layers']} layers, "
        f"{encoder['heads']} heads of width {encoder['head_dim']}, d = {encoder['dim']}",
        "Texts": f"{about.texts}, {about.tokens} tokens, {about.truncated} cut to {about.max_length}{skipped}; "
        f"{about.unknown_share:.1%} of the tokens unknown to the tokenizer",
        "Temperature": "as trained" if about.beta_factor == 1 else f"{about.beta_factor:g} times the trained beta",
        "Weights and positions as read": unexplained,
        "Computed": f"in {about.dtype} on {about.device}, seed {about.seed}; {packages}",
        "Weights": about.weights,
    }
    return "<ul>" + "".join(f"<li>{k}: {html.escape(v)}.</li>" for k, v in items.items() if v) + "</ul>"


def _scripts(result: ProbeResult) -> str:
    """The data of the token view and its script. "<" is escaped, so that no token can end the script."""
    reading, lengths = result.reading, result.reading.lengths.tolist()
    spreads = (reading.keys.log() / max(1.0, float(reading.lengths.double().log().max()))).split(lengths, -1)
    received = [[[round(value, 2) for value in row] for row in z.tolist()] for z in reading.received.split(lengths, -1)]
    heads = result.findings["averaging"].numbers.get("heads", [])
    data = {
        "texts": [
            {"words": as_words(tokens), "keys": _bytes(keys), "received": rows}
            for tokens, keys, rows in zip(result.tokens, spreads, received)
        ],
        "longest": max(lengths),
        "layers": result.about.encoder["layers"],
        "heads": result.about.encoder["heads"],
        "map": [{"layer": row["layer"], "head": row["head"], "b": row["b"], "sd": row["logit_sd"]} for row in heads],
        "rows": {"n": reading.weights.shape[-1], "bytes": _bytes(reading.weights.sqrt())},
    }
    escaped = json.dumps(data, allow_nan=False).replace("<", "\\u003c")
    return f"<script>const data = {escaped};</script><script>{_packaged('page.js')}</script>"


def _bytes(values: Any) -> str:
    """Values in [0, 1], one byte each."""
    return base64.b64encode((values.clamp(0, 1) * 255).round().byte().numpy().tobytes()).decode()


def _packaged(name: str) -> str:
    return files("attn_flow.probe").joinpath(name).read_text(encoding="utf-8")


def _write_html(path: Path, title: str, body: str, scripts: str = "") -> Path:
    text = (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{html.escape(title)}</title><style>{_packaged('page.css')}</style></head>"
        f"<body>\n{body}\n{scripts}</body></html>\n"
    )
    write_bytes(text.encode(), path)
    return path
