"""A probe as one HTML page that opens offline: the answer, the figures, the text token by token, the table."""

from __future__ import annotations

import base64
import html
import io
import json
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attn_flow.base.files import to_plain, write_bytes
from attn_flow.probe import figures
from attn_flow.probe.figures import HEAD_MAPS
from attn_flow.probe.findings import span

if TYPE_CHECKING:
    from attn_flow.probe.findings import Finding
    from attn_flow.probe.result import Probe

FIGURES = {
    "propagation": (
        figures.propagation_figure,
        "The law carried through the whole encoder",
        "The encoder is run with attention replaced in every layer, so that errors compound; embeddings, norms and "
        "feed-forward parts are its own. Left: how far the predicted cloud is from the true one, in units of the "
        "distance between two different texts. Right: how alike the embeddings at the end are.",
    ),
    "ladder": (
        figures.ladder_figure,
        "The ladder: what each ingredient adds",
        "Each line is a closure: a law of few numbers in the place of the cloud. Explained variance 0 is what a "
        "constant, the text's mean output, achieves; 1 is attention itself.",
    ),
    "limit": (
        figures.limit_figure,
        "Towards the limiting law of the weights?",
        "The theorem speaks of one head, unchanging weights and no feed-forward part. Left: the distance to the limit "
        "after a layer over that before it, and what it would be if theory held. Middle: the fraction of that way. "
        "Right: whether attention pushes where the linear theory says.",
    ),
    "heads": (figures.heads_figure, "In which regime is each head?", ""),
    "evolution": (
        figures.evolution_figure,
        "How does the cloud evolve?",
        "Tokens as directions. Pairwise cosines that pile up at 1 are clusters; an energy that rises is attraction.",
    ),
}
FIRST = ("propagation", "ladder")  # before the text; the other figures come after it
TAGS = {"supported": "yes", "partly": "partly", "not supported": "no", None: "note"}
SINKS_NAMED = 6
HEADS_NAMED = 3  # of the worst, and of the best


def write_report(result: Probe, folder: str | Path, title: str = "") -> Path:
    """Save the probe into `folder` with its figures and report.html; returns the page's path.

    probe.json is written last: where it is, everything is.
    """
    folder = Path(folder)
    (folder / "probe.json").unlink(missing_ok=True)
    result.save_numbers(folder)
    images = {name: _png(draw(result)) for name, (draw, _, _) in FIGURES.items()}
    for name, image in images.items():
        write_bytes(image, folder / f"{name}.png")
    path = folder / "report.html"
    write_bytes(
        _page(result, images, title or f"Is {result.about['encoder']['model']} a mean-field flow?").encode(), path
    )
    result.save_marker(folder)
    return path


def write_comparison(results: dict[str, Probe], folder: str | Path, places: dict[str, str]) -> Path:
    """comparison.html beside the models' own reports (`places`: their folders): one figure, and each one's findings."""
    image = _png(figures.comparison_figure(results))
    write_bytes(image, Path(folder) / "comparison.png")
    body = [_figure(image, "Encoders side by side", "The closure and the cloud of every model.")]
    for name, result in results.items():
        link = html.escape(f"{places[name]}/report.html")
        body.append(f'<h2>{html.escape(name)} (<a href="{link}">report</a>)</h2><ul class="findings">')
        body += [_finding(finding) for finding in result.findings()]
        body.append("</ul>")
    path = Path(folder) / "comparison.html"
    write_bytes(_shell("Encoders side by side", "".join(body), "").encode(), path)
    return path


def _page(result: Probe, images: dict[str, bytes], title: str) -> str:
    encoder, about = result.about["encoder"], result.about
    omits = ", ".join(encoder["omits"]) or "nothing"
    if result.omitted is not None:
        omits += f" (positions hold {span(result.omitted)} of the variance of the logits)"
    if result.inside_words:
        omits += f" (closures hold the {result.inside_words})"
    sections = [
        f'<p class="about">{html.escape(encoder["architecture"])}, {encoder["layers"]} layers of {encoder["heads"]} '
        f"heads, d = {encoder['dim']}; {about['texts']} texts, {about['tokens']} tokens, "
        f"{about['unknown_token_share']:.1%} unknown; left out by theory: {html.escape(omits)}.</p>",
        "<p><b>Asked:</b> does attention act on a token through a law of the cloud, a few numbers that all tokens "
        "share, or does it need the tokens themselves?</p>",
        '<div id="answer">' + "".join(f"<p>{html.escape(words)}</p>" for words in result.answer()) + "</div>",
        *(_figure(images[name], *FIGURES[name][1:]) for name in FIRST),
        '<h2>Findings</h2><ul class="findings" id="findings">',
        *(_finding(finding) for finding in result.findings()),
        "</ul>",
        _READING,
        *(_figure(images[name], *FIGURES[name][1:], below=_below(name)) for name in images if name not in FIRST),
        '<h2>The cloud through the layers</h2><p class="about">A sample of tokens as directions, in the three leading '
        "axes of all levels together. Move the slider, or press play; hover to read a token.</p>"
        '<div id="cloud"></div>',
        _TABLE,
        _transports(result),
        f"<details><summary>What was probed</summary>{_described(about)}</details>",
        '<p class="about">Files beside this page: <a href="probe.json">probe.json</a>, <a href="probe.safetensors">'
        "probe.safetensors</a>" + "".join(f', <a href="{name}.png">{name}.png</a>' for name in images) + ".</p>",
    ]
    return _shell(title, "\n".join(sections), _scripts(result))


_READING = """<h2>The text, token by token</h2>
<p class="about">Colour: how badly the closure misses a token in the chosen layer (its squared error over the
variance of the text's outputs; none: not at all, red: no better than a constant). Click a token to see where it
attends, and where the closure says it does; click a head to look at it.</p>
<p class="controls"><label>text <select id="which-text"></select></label>
<label>layer <select id="which-layer"></select></label></p>
<div id="text"></div>
<p id="sinks" class="about"></p>
<div id="heads"></div>
<div id="row"><p class="controls"><label>head <select id="which-head"></select></label>
<span id="row-title" class="about">Click a token of the first text.</span></p><div id="bars"></div></div>"""
_TABLE = """<h2>All numbers</h2><p class="about">Mean over texts, below it the 95% bootstrap interval. Click a column to
sort, type to search.</p>
<p class="controls"><label>group <select id="group"></select></label>
<label>search <input id="search" type="search" placeholder="explained, w2, rotated ..."></label></p>
<div class="wide"><table id="table"></table></div>"""


def _shell(title: str, body: str, scripts: str) -> str:
    style = files("attn_flow.probe").joinpath("page.css").read_text(encoding="utf-8")
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{html.escape(title)}</title><style>{style}</style></head><body>\n<h1>{html.escape(title)}</h1>\n"
        f"{body}\n{scripts}</body></html>\n"
    )


def _transports(result: Probe) -> str:
    """Exact transport and geomloss side by side."""
    seen = result.transports
    rows = "".join(
        f"<tr><td>{int(level)}</td><td>{exact:.4f}</td><td>{other:.4f}</td><td>{abs(other / exact - 1):.1%}</td>"
        f"<td>{bound:.4f}</td><td>{1e3 * a:.0f}</td><td>{1e3 * b:.0f}</td></tr>"
        for level, exact, other, bound, a, b in zip(*(v.tolist() for v in vars(seen).values()))
    )
    names = ("level", "exact", "geomloss", "difference", "proved to", "exact, ms", "geomloss, ms")
    head = "".join(f"<th>{name}</th>" for name in names)
    table = f'<div class="wide"><table><tr>{head}</tr>{rows}</table></div>' if rows else "<p>Not compared.</p>"
    return (
        "<details><summary>Distances: exact transport and geomloss</summary><p>W2 between the clouds of the first two "
        f"texts, as directions. Distances of this page: {html.escape(result.about['transport'])}.</p>{table}</details>"
    )


def _finding(finding: Finding) -> str:
    tag = finding.verdict or "note"
    return f'<li><span class="tag {TAGS[finding.verdict]}">{tag}</span>{html.escape(finding.text)}</li>'


def _png(figure: Any) -> bytes:
    from matplotlib import pyplot

    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=150)
    pyplot.close(figure)
    return buffer.getvalue()


def _figure(image: bytes, question: str, words: str, below: str = "") -> str:
    code = base64.b64encode(image).decode()
    return (
        f'<h2>{html.escape(question)}</h2><p class="about">{html.escape(words)}</p><div class="wide">'
        f'<img alt="{html.escape(question)}" src="data:image/png;base64,{code}"></div>{below}'
    )


def _below(name: str) -> str:
    """What each map of the heads' figure says."""
    if name != "heads":
        return ""
    words = "".join(f"<li><b>{html.escape(a)}</b>: {html.escape(b)}</li>" for a, b in HEAD_MAPS.values())
    return f'<ul class="about">{words}</ul>'


def _described(about: dict[str, Any]) -> str:
    def item(value: Any) -> str:
        if isinstance(value, dict):
            return "<ul>" + "".join(f"<li>{html.escape(str(k))}: {item(v)}</li>" for k, v in value.items()) + "</ul>"
        if isinstance(value, list) and value and isinstance(value[0], (dict, list)):
            return "<ul>" + "".join(f"<li>{item(v)}</li>" for v in value) + "</ul>"
        return html.escape(", ".join(map(str, value)) if isinstance(value, list) else str(value))

    shown = {name.replace("_", " "): value for name, value in about.items() if name != "order"}
    return "<dl>" + "".join(f"<dt>{html.escape(k)}</dt><dd>{item(v)}</dd>" for k, v in shown.items()) + "</dl>"


def _scripts(result: Probe) -> str:
    """The page's data and what moves it. "<" never appears in the data as itself: a "</script>" in a token could
    otherwise end the script."""
    from plotly.offline import get_plotlyjs

    data = json.dumps(to_plain(_data(result)), allow_nan=False).replace("<", "\\u003c")
    drawing = _scene(result).replace("<", "\\u003c")
    code = files("attn_flow.probe").joinpath("page.js").read_text(encoding="utf-8")
    return (
        f"<script>{get_plotlyjs()}</script><script>const data = {data};\nconst scene = {drawing};</script>"
        f"<script>{code}</script>"
    )


def _data(result: Probe) -> dict[str, Any]:
    seen = result.reading
    lengths = seen.lengths.tolist()
    texts, first = [], 0
    for t, n in enumerate(lengths):
        texts.append(
            {
                "tokens": result.tokens[t][:n],
                "missed": [[round(v, 4) for v in row] for row in seen.missed[:, first : first + n].tolist()],
                "received": [[round(v, 3) for v in row] for row in seen.received[:, first : first + n].tolist()],
            }
        )
        first += n
    rows = [row for row in result.rows() if "head" not in row]
    return {
        "texts": texts,
        "layers": result.about["encoder"]["layers"],
        "heads": result.about["encoder"]["heads"],
        "explained": [[round(v, 3) for v in row] for row in result.heads.explained.tolist()],
        "rows": {
            "n": seen.true_rows.shape[-1],
            "true": _packed(seen.true_rows),
            "closure": _packed(seen.closure_rows) if seen.closure_rows.numel() else "",
        },
        "sinks": SINKS_NAMED,
        "named": HEADS_NAMED,
        "table": [
            {k: _short(v) if isinstance(v, float) else v for k, v in {**row, "quantity": _named(result, row)}.items()}
            for row in rows
        ],
    }


def _named(result: Probe, row: dict[str, Any]) -> str:
    """Plain names: what a closure or null is, instead of what it is called in the code."""
    name, colon, measure = str(row["quantity"]).partition(": ")
    titles = {**result.about["closures"], **result.about["nulls"], **result.about["controls"]}
    measure = measure.replace("w2", "W2 over W2 between texts")
    return (titles.get(name, name) + colon + measure).replace("_", " ")


def _short(value: float) -> float | str:
    return float(f"{value:.3g}") if value == value and abs(value) != float("inf") else str(value)


def _packed(weights: Any) -> str:
    """Weights in [0, 1] as one byte each, the square root scaled to 255."""
    code = (weights.clamp(0, 1).sqrt() * 255).round().byte()
    return base64.b64encode(code.numpy().tobytes()).decode()


def _scene(result: Probe) -> str:
    """The plotly scene with one frame per level; token text is escaped, so that no text can become markup."""
    from plotly import graph_objects as go

    view = result.view.x.numpy()
    names = [result.tokens[t][i] for t, i in zip(result.view.text.tolist(), result.view.place.tolist())]
    hover = [
        f"{html.escape(name)}<br>text {t}, place {i}"
        for name, t, i in zip(names, result.view.text.tolist(), result.view.place.tolist())
    ]
    kind = [_kind(name) for name in names]
    kinds = [k for k in ("words", "pieces of words", "punctuation and special") if k in kind]
    colours = {"words": "#4c72b0", "pieces of words": "#dd8452", "punctuation and special": "#c44e52"}

    def points(level: int) -> list[Any]:
        drawn = []
        for group in kinds:
            chosen = [i for i, k in enumerate(kind) if k == group]
            x, y, z = view[level][chosen].T
            marker = {"size": 3, "color": colours[group], "opacity": 0.8}
            words = [hover[i] for i in chosen]
            drawn.append(
                go.Scatter3d(
                    x=x, y=y, z=z, mode="markers", marker=marker, name=group, hovertext=words, hoverinfo="text"
                )
            )
        return drawn

    labels = [f"{level}" for level in range(len(view))]
    step = {"frame": {"duration": 500, "redraw": True}, "transition": {"duration": 400}, "mode": "immediate"}
    slider = {
        "currentvalue": {"prefix": "level "},
        "steps": [{"label": n, "method": "animate", "args": [[n], step]} for n in labels],
    }
    play = {"label": "play", "method": "animate", "args": [labels, {**step, "fromcurrent": True}]}
    bound = float(abs(view).max()) * 1.05
    axis = {"range": [-bound, bound], "showticklabels": False, "title": ""}
    layout = {
        "sliders": [slider],
        "updatemenus": [{"type": "buttons", "buttons": [play], "x": 0.02, "y": 0.02}],
        "scene": {
            "xaxis": axis,
            "yaxis": axis,
            "zaxis": axis,
            "aspectmode": "cube",
            "camera": {"eye": {"x": 1.0, "y": 1.0, "z": 0.7}},
        },
        "margin": {"l": 0, "r": 0, "t": 0, "b": 0},
        "legend": {"x": 0.02, "y": 0.98, "itemsizing": "constant"},
    }
    figure = go.Figure(points(0), layout, [go.Frame(data=points(i), name=n) for i, n in enumerate(labels)])
    return figure.to_json()


def _kind(token: str) -> str:
    if token.startswith("##"):
        return "pieces of words"
    bare = token.strip("▁Ġ")
    return (
        "words" if bare and any(c.isalnum() for c in bare) and not bare.startswith("[") else "punctuation and special"
    )
