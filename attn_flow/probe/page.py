"""The report: one HTML page that opens offline."""

from __future__ import annotations

import base64
import html
import io
import json
import re
from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attn_flow.base.figures import LIGHT, save_figure
from attn_flow.base.files import write_bytes
from attn_flow.base.imports import require_extra
from attn_flow.probe.figures import CLUSTER_METHODS, PIXELS_PER_INCH, comparison_figure, draw
from attn_flow.probe.findings import QUESTIONS, Finding
from attn_flow.probe.tokens import as_words

if TYPE_CHECKING:
    from attn_flow.probe.result import ProbeResult

WIDE, NARROW, SMALL = 748, 350, 236  # widths of figures in pixels
ANSWERS = {"supported": "Yes.", "partly": "In part.", "not supported": "No.", None: "Not decided."}
TAGS = {"supported": "yes", "partly": "partly", "not supported": "no", None: "note"}
METHODS = {
    "averaging": (
        "Each head is computed from m random keys instead of all n, special tokens always kept, and its error falls "
        "like m^-b. Mean-field theory has b = 1/2: the error of an average over independent tokens. Colder heads, "
        "whose logits vary more, depend on few keys and have a smaller b. The curve b(s) is that of normal logits with "
        "the same standard deviation s; nothing in it is fitted. On the right, the exponent that follows from a head's "
        "own logits with random values."
    ),
    "clusters": (
        "The encoder runs with attention replaced in every layer: each head keeps K weighted clusters of keys and "
        "values. They are found with queries of other texts, so that the text's own attention is not used. The "
        "dashed line, which does use it, is a reference. Distances are between clouds of tokens at the output, in "
        "units of the distance between two different texts."
    ),
    "temperature": (
        "The more a head's logits vary, the colder it is. Dots are heads; lines are medians of neighbours. Left of the "
        "first dashed line, sqrt(log n / 2), theory expects averages over many keys; right of the second, "
        "sqrt(2 log n), a few keys whatever the length of the text. Two moments means: keys and values taken "
        "as normally distributed. Shares below -1 are drawn at -1."
    ),
    "limit": (
        "The weights of a layer predict where its attention would bring the tokens if it acted alone for a long time. "
        "Shown is how well the movement of the tokens through the layer agrees with the flow to that limit: 1 if the "
        "layer is that flow. The grey band holds 90% of what randomly rotated weights give. One p value over all "
        "layers decides; if it does not pass, no single layer counts, however far it is above the band."
    ),
}
OTHER_METHODS = {  # methods that were run with one K, as the table calls them
    "foreign_queries_fitted": "other texts' queries, masses and values fitted",
    "top_tokens_and_rest": "most attended tokens and one for the rest",
    "pivoted_cholesky": "pivoted Cholesky of the keys",
    "top_k_oracle": "K largest weights of every query (reference: sees the attention)",
    "low_rank": "attention matrix of rank K (reference: sees the attention)",
}
NOT_SAID = {
    "averaging": "that words may be dropped: the exponent is a slope between 8 and n/2 keys, for texts of this length.",
    "clusters": "that this saves work: finding the clusters costs more than attention, and K grows with the text.",
    "temperature": "what a head is for: a description of its output is not its purpose.",
    "limit": "that the theorem fails, which has one head, constant weights and no feed-forward part.",
}
TOKEN_VIEW = """<section id="tokens"><h2>Where do tokens attend?</h2>
<p class="about">Heads: darker is colder, the number is the exponent b. Tokens: darker attends to fewer tokens;
underlined ones receive most attention. Choose a head, a text and a token.</p>
<div class="wide"><div id="heads"></div></div>
<p class="controls"><label>text <select id="which-text"></select></label>
<label>layer <select id="which-layer"></select></label> <label>head <select id="which-head"></select></label></p>
<div id="text"></div>
<p id="row-title" class="about"></p><div id="bars"></div></section>"""


def write_page(result: ProbeResult, folder: str | Path, title: str = "") -> Path:
    """Write report.html and its four figures into a folder; returns the path of the page."""
    folder, about, encoder = Path(folder), result.about, result.about.encoder
    for name in QUESTIONS:
        save_figure(draw(result, name), folder / f"{name}.png")
    question = f"Does attention in {title or encoder['model']} act as a mean field?"
    answer = ANSWERS[result.findings["averaging"].verdict]
    body = [
        f"<h1>{html.escape(question)} <span>{answer}</span></h1>",
        f'<p class="about">{encoder["layers"]} layers of {encoder["heads"]} heads, {about.texts} texts of '
        f"{about.tokens / about.texts:.0f} tokens on average. Four questions, each with its own test:</p>",
        '<div class="cards">',
        *(_card(result, name) for name in QUESTIONS),
        "</div>",
        *(_section(result, name) for name in QUESTIONS),
        '<section id="evolution"><h2>How does the cloud of tokens change through depth?</h2>',
        f"<p>{html.escape(result.evolution.finding(about.seed).text)}</p>{_figure(result, 'evolution')}</section>",
        TOKEN_VIEW,
        f"<section><h2>What was probed</h2>{_described(result)}</section>",
        '<p class="about">Files: <a href="probe.json">probe.json</a> (all numbers), '
        '<a href="probe.safetensors">probe.safetensors</a> (all measurements).</p>',
    ]
    return _write_html(folder / "report.html", f"{question} {answer}", "\n".join(body), _scripts(result))


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
    figure = _svg(draw(result, name, SMALL, small=True), f"{name}-small", QUESTIONS[name])
    return (
        f'<a class="card" href="#{name}"><h2>{html.escape(QUESTIONS[name])}</h2>{figure}'
        f"<p>{_tag(finding)}{html.escape(finding.text)}</p></a>"
    )


def _section(result: ProbeResult, name: str) -> str:
    numbers, layers = result.findings[name].numbers, result.about.encoder["layers"]
    return (
        f'<section id="{name}"><h2>{html.escape(QUESTIONS[name])}</h2>{_figure(result, name)}'
        f"<p>{html.escape(METHODS[name])}</p><details><summary>Numbers</summary>{_tables(numbers, layers)}"
        f'</details><p class="not-said">This does not say {html.escape(NOT_SAID[name])}</p></section>'
    )


def _figure(result: ProbeResult, name: str) -> str:
    """The figure for wide and for narrow screens, of which the style shows one."""
    label = QUESTIONS.get(name, "The cloud through depth")
    wide, narrow = (_svg(draw(result, name, width), f"{name}-{width}", label) for width in (WIDE, NARROW))
    return f'<div class="on-wide">{wide}</div><div class="on-narrow">{narrow}</div>'


def _svg(figure: Any, name: str, label: str) -> str:
    """A figure as inline SVG in the colours and font of the page."""
    matplotlib, buffer = require_extra("matplotlib"), io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": name}):
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None}, dpi=72)
    width = figure.get_figwidth() * PIXELS_PER_INCH
    require_extra("matplotlib.pyplot").close(figure)
    text = buffer.getvalue()
    text = text[text.index("<svg") :].replace(LIGHT[1], "currentColor")
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r'(<svg[^>]*?) width="[^"]*" height="[^"]*"', rf'\1 width="{width:.0f}"', text, count=1)
    text = re.sub(r'\b(id="|xlink:href="#|url\(#)', rf"\g<1>{name}-", text)
    return text.replace("<svg", f'<svg role="img" aria-label="{html.escape(label)}"', 1)


def _tables(numbers: dict[str, Any], layers: int) -> str:
    """The numbers of a finding: clusters by method and K, lists by layer, heads, and single numbers."""
    parts = []
    if "curve" in numbers:
        columns = ("found from", "K", "W2", "embedding cosine", "explained, mean of layers")
        label = lambda method: CLUSTER_METHODS[method][0] if method in CLUSTER_METHODS else OTHER_METHODS[method]
        rows = [
            (label(method), K, row["w2"], row["embedding_cosine"], sum(row["explained"]) / layers)
            for method, by_K in numbers["curve"].items()
            for K, row in by_K.items()
        ]
        parts.append(_table(columns, rows))
    is_plain = lambda value: value is None or isinstance(value, int | float)
    by_layer = {k: v for k, v in numbers.items() if isinstance(v, list) and len(v) == layers and all(map(is_plain, v))}
    if by_layer:
        parts.append(_table(("layer", *by_layer), list(zip(range(layers), *by_layer.values()))))
    if "heads" in numbers:
        parts.append(_table(list(numbers["heads"][0]), [list(row.values()) for row in numbers["heads"]]))
    single = {k.replace("_", " "): v for k, v in numbers.items() if isinstance(v, int | float | str)}
    listed = "".join(f"<li>{html.escape(key)}: {_cell(value)}</li>" for key, value in single.items())
    return f'{"".join(parts)}<ul class="numbers">{listed}</ul>'


def _table(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    head = "".join(f"<th>{html.escape(column.replace('_', ' '))}</th>" for column in columns)
    body = "".join("<tr>" + "".join(f"<td>{_cell(value)}</td>" for value in row) + "</tr>" for row in rows)
    return f'<div class="wide"><table><tr>{head}</tr>{body}</table></div>'


def _cell(value: Any) -> str:
    if value is None:
        return ""
    return f"{value:.3g}" if isinstance(value, float) else html.escape(str(value))


def _tag(finding: Finding) -> str:
    return f'<span class="tag {TAGS[finding.verdict]}">{finding.verdict or "numbers"}</span> '


def _described(result: ProbeResult) -> str:
    about, encoder = result.about, result.about.encoder
    skipped = f", {len(about.skipped)} left out as too short" if about.skipped else ""
    names = ("attn-flow", "torch", "transformers", "python")
    unexplained = f"leave {max(about.unexplained):.1e} of what attention adds unexplained" if about.unexplained else ""
    items = {
        "Encoder": f"{encoder['model']} ({encoder['architecture']}), {encoder['layers']} layers, "
        f"{encoder['heads']} heads of width {encoder['head_dim']}, d = {encoder['dim']}",
        "Texts": f"{about.texts}, {about.tokens} tokens, {about.truncated} cut to {about.max_length}{skipped}; "
        f"{about.unknown_share:.1%} of the tokens unknown to the tokenizer",
        "Temperature": "as trained" if about.beta_factor == 1 else f"{about.beta_factor:g} times the trained beta",
        "Weights and positions as read": unexplained,
        "Computed": f"in {about.dtype} on {about.device}, seed {about.seed}; "
        + ", ".join(f"{name} {about.versions[name]}" for name in names),
        "Weights": about.weights,
    }
    return "<ul>" + "".join(f"<li>{k}: {html.escape(v)}.</li>" for k, v in items.items() if v) + "</ul>"


def _scripts(result: ProbeResult) -> str:
    """The data of the token view and its script. "<" is escaped, so that no token can end the script."""
    reading, lengths = result.reading, result.reading.lengths.tolist()
    spreads = reading.keys.log() / max(1.0, float(reading.lengths.double().log().max()))
    texts = [
        {
            "words": as_words(tokens),
            "keys": _bytes(spread),
            "received": [[round(value, 2) for value in row] for row in received.tolist()],
        }
        for tokens, spread, received in zip(
            result.tokens, spreads.split(lengths, -1), reading.received.split(lengths, -1)
        )
    ]
    heads = result.findings["averaging"].numbers.get("heads", [])
    data = {
        "texts": texts,
        "longest": max(lengths),
        "layers": result.about.encoder["layers"],
        "heads": result.about.encoder["heads"],
        "map": [{"layer": row["layer"], "head": row["head"], "b": row["b"], "sd": row["logit_sd"]} for row in heads],
        "rows": {"n": reading.weights.shape[-1], "bytes": _bytes(reading.weights.sqrt())},
    }
    code = files("attn_flow.probe").joinpath("page.js").read_text(encoding="utf-8")
    escaped = json.dumps(data, allow_nan=False).replace("<", "\\u003c")
    return f"<script>const data = {escaped};</script><script>{code}</script>"


def _bytes(values: Any) -> str:
    """Values in [0, 1], one byte each."""
    return base64.b64encode((values.clamp(0, 1) * 255).round().byte().numpy().tobytes()).decode()


def _write_html(path: Path, title: str, body: str, scripts: str = "") -> Path:
    style = files("attn_flow.probe").joinpath("page.css").read_text(encoding="utf-8")
    text = (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{html.escape(title)}</title><style>{style}</style></head><body>\n{body}\n{scripts}</body></html>\n"
    )
    write_bytes(text.encode(), path)
    return path
