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
from typing import Any

from attn_flow.base.figures import LIGHT, save_figure
from attn_flow.base.files import write_bytes
from attn_flow.base.imports import require_extra
from attn_flow.probe.figures import CLUSTER_METHODS, PIXELS_PER_INCH, comparison_figure, draw
from attn_flow.probe.findings import QUESTIONS, Finding
from attn_flow.probe.measurements import Measurements
from attn_flow.probe.reading import as_words

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
        "sqrt(2 log n), a few keys whatever the length of the text. Two moments are a normal distribution of keys "
        "and values. Shares below -1 are drawn at -1."
    ),
    "limit": (
        "The weights of a layer predict where its attention would bring the tokens if it acted alone for a long time. "
        "Shown is how well the way of the tokens through the layer agrees with the flow to that limit: 1 where the "
        "layer is that flow. The grey band holds 90% of what randomly rotated weights give. One p value over all "
        "layers decides; single layers are named only after a correction for their number."
    ),
}
NOT_SAID = {
    "averaging": "that words may be dropped: the exponent is a slope between 8 and n/2 keys, for texts of this length.",
    "clusters": "that this saves work: finding the clusters costs more than attention, and K grows with the text.",
    "temperature": "what a head is for: a description of its output is not its purpose.",
    "limit": "that the theorem fails, which has one head, constant weights and no feed-forward part.",
}


def write_page(result: Measurements, folder: str | Path, title: str = "") -> Path:
    """Write report.html and its four figures into a folder.

    Args:
        result: of a probe.
        folder: is made if it does not exist.
        title: the name of the encoder on the page.

    Returns:
        The path of the page.
    """
    folder, name = Path(folder), title or result.about.encoder["model"]
    for question in QUESTIONS:
        save_figure(draw(result, question), folder / f"{question}.png")
    path = folder / "report.html"
    write_bytes(_page(result, name).encode(), path)
    return path


def write_comparison(results: Mapping[str, Measurements], folder: str | Path, subfolders: dict[str, str]) -> Path:
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
    path = Path(folder) / "comparison.html"
    write_bytes(_shell("Encoders side by side", body, "").encode(), path)
    return path


def _page(result: Measurements, name: str) -> str:
    question = f"Does attention in {name} act as a mean field?"
    answer = ANSWERS[result.findings["averaging"].verdict]
    about, encoder = result.about, result.about.encoder
    body = [
        f"<h1>{html.escape(question)} <span>{answer}</span></h1>",
        f'<p class="about">{encoder["layers"]} layers of {encoder["heads"]} heads, {about.texts} texts of '
        f"{about.tokens / about.texts:.0f} tokens on average. Four questions, each with its own test:</p>",
        '<div class="cards">',
        *(_card(result, question) for question in QUESTIONS),
        "</div>",
        *(_section(result, question) for question in QUESTIONS),
        '<section id="evolution"><h2>How does the cloud of tokens change through depth?</h2>',
        f"<p>{html.escape(result.evolution.finding(about.seed).text)}</p>{_figure(result, 'evolution')}</section>",
        _TOKENS,
        f"<section><h2>What was probed</h2>{_described(result)}</section>",
        '<p class="about">Files: <a href="probe.json">probe.json</a> (all numbers), '
        '<a href="probe.safetensors">probe.safetensors</a> (all measurements).</p>',
    ]
    return _shell(f"{question} {answer}", "\n".join(body), _scripts(result))


_TOKENS = """<section id="tokens"><h2>Where do tokens attend?</h2>
<p class="about">Heads: darker is colder, the number is the exponent b. Tokens: darker attends to fewer tokens;
underlined ones receive most attention. Choose a head, then a token of the first text.</p>
<div class="wide"><div id="heads"></div></div>
<p class="controls"><label>text <select id="which-text"></select></label>
<label>layer <select id="which-layer"></select></label> <label>head <select id="which-head"></select></label></p>
<div id="text"></div>
<p id="row-title" class="about"></p><div id="bars"></div></section>"""


def _card(result: Measurements, question: str) -> str:
    finding = result.findings[question]
    figure = _svg(draw(result, question, SMALL, small=True), f"{question}-small", QUESTIONS[question])
    return (
        f'<a class="card" href="#{question}"><h2>{html.escape(QUESTIONS[question])}</h2>{figure}'
        f"<p>{_tag(finding)}{html.escape(finding.text)}</p></a>"
    )


def _section(result: Measurements, question: str) -> str:
    return (
        f'<section id="{question}"><h2>{html.escape(QUESTIONS[question])}</h2>{_figure(result, question)}'
        f"<p>{html.escape(METHODS[question])}</p><details><summary>Numbers</summary>{_tables(result, question)}"
        f'</details><p class="not-said">This does not say {html.escape(NOT_SAID[question])}</p></section>'
    )


def _figure(result: Measurements, name: str) -> str:
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


def _tables(result: Measurements, question: str) -> str:
    numbers = result.findings[question].numbers
    tables = []
    if question == "clusters":
        columns = ("found from", "K", "W2", "embedding cosine", "explained, mean of layers")
        rows = [
            (CLUSTER_METHODS[method][0] if method in CLUSTER_METHODS else method.replace("_", " "),
             K, row["w2"], row["embedding_cosine"], _mean(row["explained"]))
            for method, by_K in (numbers.get("curve") or {}).items()
            for K, row in by_K.items()
        ]  # fmt: skip
        tables.append(_table(columns, rows))
    layers = result.about.encoder["layers"]
    by_layer = {key: v for key, v in numbers.items() if isinstance(v, list) and len(v) == layers and _is_plain(v)}
    if by_layer:
        rows = [(layer, *(values[layer] for values in by_layer.values())) for layer in range(layers)]
        tables.append(_table(("layer", *(key.replace("_", " ") for key in by_layer)), rows))
    if numbers.get("heads"):
        keys = [key for key, value in numbers["heads"][0].items() if not isinstance(value, list | dict)]
        rows = [tuple(row[key] for key in keys) for row in numbers["heads"]]
        tables.append(_table([key.replace("_", " ") for key in keys], rows))
    single = {k.replace("_", " "): v for k, v in numbers.items() if isinstance(v, int | float | str)}
    listed = "".join(f"<li>{html.escape(key)}: {_cell(value)}</li>" for key, value in single.items())
    return f'{"".join(tables)}<ul class="numbers">{listed}</ul>'


def _is_plain(values: list[Any]) -> bool:
    return all(value is None or isinstance(value, int | float) for value in values)


def _mean(values: list[float | None]) -> float | None:
    known = [value for value in values or [] if value is not None]
    return sum(known) / len(known) if known else None


def _table(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    head = "".join(f"<th>{html.escape(column)}</th>" for column in columns)
    body = "".join("<tr>" + "".join(f"<td>{_cell(value)}</td>" for value in row) + "</tr>" for row in rows)
    return f'<div class="wide"><table><tr>{head}</tr>{body}</table></div>'


def _cell(value: Any) -> str:
    if value is None:
        return ""
    return f"{value:.3g}" if isinstance(value, float) else html.escape(str(value))


def _tag(finding: Finding) -> str:
    return f'<span class="tag {TAGS[finding.verdict]}">{finding.verdict or "numbers"}</span> '


def _described(result: Measurements) -> str:
    about, encoder = result.about, result.about.encoder
    skipped = f", {len(about.skipped)} left out as too short" if about.skipped else ""
    errors = [check["error"] for check in about.checks if check["error"] is not None]
    positions = sorted({check["positions"] for check in about.checks} - {""})
    omits = sorted({check["omits"] for check in about.checks} - {""})
    items = {
        "Encoder": f"{encoder['model']} ({encoder['architecture']}), {encoder['layers']} layers, "
        f"{encoder['heads']} heads of width {encoder['head_dim']}, d = {encoder['dim']}",
        "Texts": f"{about.texts}, {about.tokens} tokens, {about.truncated} cut to {about.max_length}{skipped}; "
        f"{about.unknown_share:.1%} of the tokens unknown to the tokenizer",
        "Temperature": "as trained" if about.beta_factor == 1 else f"{about.beta_factor:g} times the trained beta",
        "Weights as read": f"differ from what the layers compute by at most {max(errors):.1e}" if errors else "",
        "Positions in the scores": ", ".join(positions),
        "Left out of the scores": ", ".join(omits),
        "Computed": f"in {about.dtype} on {about.device}, seed {about.seed}; " + ", ".join(
            f"{name} {about.versions[name]}" for name in ("attn-flow", "torch", "transformers", "python")
        ),
        "Weights": about.weights,
    }  # fmt: skip
    return "<ul>" + "".join(f"<li>{k}: {html.escape(v)}.</li>" for k, v in items.items() if v) + "</ul>"


def _scripts(result: Measurements) -> str:
    """The data of the token view and its script. "<" is escaped, so that no token can end the script."""
    reading, texts, first = result.reading, [], 0
    for tokens, n in zip(result.tokens, reading.lengths.tolist()):
        part = slice(first, first + n)
        relative = reading.keys[..., part].log() / max(1.0, float(reading.lengths.double().log().max()))
        texts.append(
            {
                "words": [[word, joined] for word, joined in as_words(tokens)],
                "keys": _bytes(relative),
                "received": [[round(v, 2) for v in row] for row in reading.received[:, part].tolist()],
            }
        )
        first += n
    heads = [
        {"layer": row["layer"], "head": row["head"], "b": row["b"], "sd": row["logit_sd"]}
        for row in result.findings["averaging"].numbers.get("heads") or []
    ]
    data = {
        "texts": texts,
        "longest": int(reading.lengths.max()),
        "layers": result.about.encoder["layers"],
        "heads": result.about.encoder["heads"],
        "map": heads,
        "rows": {"n": reading.weights.shape[-1], "bytes": _bytes(reading.weights.sqrt())},
    }
    code = files("attn_flow.probe").joinpath("page.js").read_text(encoding="utf-8")
    escaped = json.dumps(data, allow_nan=False).replace("<", "\\u003c")
    return f"<script>const data = {escaped};</script><script>{code}</script>"


def _bytes(values: Any) -> str:
    """Values in [0, 1], one byte each."""
    return base64.b64encode((values.clamp(0, 1) * 255).round().byte().numpy().tobytes()).decode()


def _shell(title: str, body: str, scripts: str) -> str:
    style = files("attn_flow.probe").joinpath("page.css").read_text(encoding="utf-8")
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{html.escape(title)}</title><style>{style}</style></head><body>\n{body}\n{scripts}</body></html>\n"
    )
