"""A probe as one HTML page that opens offline: summary, figures, table, and the cloud moving through the layers."""

from __future__ import annotations

import base64
import html
import io
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from attn_flow.probe.result import Probe

FIGURES = {
    "probe": ("plot", "Does attention push where its weights predict, and does the cloud approach the limiting law?"),
    "heads": ("plot_heads", "In which regime is each head?"),
    "evolution": ("plot_evolution", "How does the cloud evolve?"),
}
PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title><style>
body {{ font: 15px/1.5 system-ui, sans-serif; max-width: 62rem; margin: 2rem auto; padding: 0 1rem; color: #222; }}
h1 {{ font-size: 1.5rem; margin-bottom: .2rem; }} h2 {{ font-size: 1.15rem; margin-top: 2.2rem; }}
.about {{ color: #666; }} li {{ margin: .5rem 0; }} img {{ max-width: 100%; }}
.tag {{ font-size: .75rem; font-weight: 600; padding: .1rem .45rem; border-radius: .6rem; margin-right: .4rem; }}
.yes {{ background: #d9f0dd; color: #1c6b2c; }} .partly {{ background: #fdf0d0; color: #7a5600; }}
.no {{ background: #f9dcdc; color: #8a1c1c; }} .note {{ background: #e8ecf3; color: #33415c; }}
table {{ border-collapse: collapse; font-size: .85rem; }} td, th {{ padding: .2rem .6rem; text-align: right; }}
th {{ border-bottom: 1px solid #999; }} td:first-child, th:first-child {{ text-align: left; }}
details {{ margin-top: 1.5rem; }} summary {{ cursor: pointer; font-weight: 600; }}
#cloud {{ height: 620px; }}
</style></head><body>
<h1>{title}</h1><p class="about">{about}</p>
<h2>In a minute</h2><ul id="findings">{findings}</ul>
{figures}
<h2>The cloud through the layers</h2>
<p class="about">A sample of tokens as directions, in the three leading axes of all levels together. Move the slider, or
press play; hover to read a token.</p>
<div id="cloud"></div>
<details><summary>Numbers: mean over texts, 95% bootstrap interval</summary>{table}</details>
<details><summary>What was probed</summary>{described}</details>
<p class="about">Files beside this page: <a href="probe.json">probe.json</a>, <a href="probe.safetensors">
probe.safetensors</a>{links}.</p>
{scene}
</body></html>
"""
TAGS = {"SUPPORTED": "yes", "PARTLY": "partly", "NOT SUPPORTED": "no"}


def write_report(result: Probe, folder: str | Path, title: str = "") -> Path:
    """Save the probe into `folder` with its figures and report.html; returns the page's path."""
    folder = Path(folder)
    result.save(folder)
    encoder = result.about["encoder"]
    images = {name: _png(getattr(result, method)()) for name, (method, _) in FIGURES.items()}
    for name, image in images.items():
        (folder / f"{name}.png").write_bytes(image)
    page = PAGE.format(
        title=html.escape(title or f"Where does {encoder['model']} go?"),
        about=html.escape(
            f"{encoder['architecture']}, {encoder['layers']} layers of {encoder['heads']} heads, d = {encoder['dim']}; "
            f"{result.about['texts']} texts, {result.about['tokens']} tokens; left out: {', '.join(encoder['omits'])}."
        ),
        findings="".join(_finding(words) for words in result.findings()),
        figures="".join(_figure(images[name], question) for name, (_, question) in FIGURES.items()),
        table=_table(result),
        described=_described(result.about),
        links="".join(f', <a href="{name}.png">{name}.png</a>' for name in images),
        scene=_scene(result),
    )
    path = folder / "report.html"
    path.write_text(page, encoding="utf-8")
    return path


def write_comparison(results: dict[str, Probe], folder: str | Path) -> Path:
    """comparison.html beside the models' own reports: one figure, and each model's findings."""
    from attn_flow.probe.figures import comparison_figure

    image = _png(comparison_figure(results))
    Path(folder, "comparison.png").write_bytes(image)
    body = ["<h1>Encoders side by side</h1>", _figure(image, "One figure")]
    for name, result in results.items():
        link = html.escape(f"{name.replace('/', '_')}/report.html")
        body.append(f'<h2>{html.escape(name)} (<a href="{link}">report</a>)</h2><ul>')
        body += [_finding(words) for words in result.findings()]
        body.append("</ul>")
    head = PAGE[: PAGE.index("<h1>")].format(title="Encoders side by side")
    path = Path(folder) / "comparison.html"
    path.write_text(head + "".join(body) + "</body></html>", encoding="utf-8")
    return path


def _finding(words: str) -> str:
    tag, colon, rest = words.partition(": ")
    if not colon or tag not in TAGS:
        return f'<li><span class="tag note">note</span>{html.escape(words)}</li>'
    return f'<li><span class="tag {TAGS[tag]}">{tag.lower()}</span>{html.escape(rest)}</li>'


def _png(figure: Any) -> bytes:
    from matplotlib import pyplot

    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=150)
    pyplot.close(figure)
    return buffer.getvalue()


def _figure(image: bytes, question: str) -> str:
    code = base64.b64encode(image).decode()
    return f'<h2>{html.escape(question)}</h2><img alt="{html.escape(question)}" src="data:image/png;base64,{code}">'


def _table(result: Probe) -> str:
    layers = result.about["encoder"]["layers"]
    head = "".join(f"<th>{layer}</th>" for layer in range(layers + 1))
    rows: dict[str, dict[int, str]] = {}
    for row in result.rows():
        if "head" in row:
            continue
        text = f"{row['mean']:.3g}"
        if "low" in row:
            text += f'<br><span class="about">{row["low"]:.2g}..{row["high"]:.2g}</span>'
        rows.setdefault(row["quantity"], {})[row["layer"]] = text
    body = ""
    for name, cells in rows.items():
        shown = "".join(f"<td>{cells.get(i, '')}</td>" for i in range(layers + 1))
        body += f"<tr><td>{html.escape(name)}</td>{shown}</tr>"
    return f"<table><tr><th>layer</th>{head}</tr>{body}</table>"


def _described(about: dict[str, Any]) -> str:
    rows = "".join(f"<tr><td>{html.escape(k)}</td><td>{html.escape(str(v))}</td></tr>" for k, v in about.items())
    return f"<table>{rows}</table>"


def _scene(result: Probe) -> str:
    """The plotly scene with one frame per level; token text is escaped, so that no text can become markup."""
    from plotly import graph_objects as go
    from plotly.offline import get_plotlyjs

    view = result.numbers["view"].numpy()
    hover = [
        f"{html.escape(label['token'])}<br>text {label['text']}, place {label['position']}" for label in result.labels
    ]
    colour = [label["text"] for label in result.labels]

    def points(level: int) -> Any:
        x, y, z = view[level].T
        marker = {"size": 3, "color": colour, "colorscale": "Turbo", "opacity": 0.85}
        return go.Scatter3d(x=x, y=y, z=z, mode="markers", marker=marker, hovertext=hover, hoverinfo="text")

    names = [f"{level}" for level in range(len(view))]
    step = {"frame": {"duration": 500, "redraw": True}, "transition": {"duration": 400}, "mode": "immediate"}
    slider = {
        "currentvalue": {"prefix": "level "},
        "steps": [{"label": n, "method": "animate", "args": [[n], step]} for n in names],
    }
    play = {"label": "play", "method": "animate", "args": [names, {**step, "fromcurrent": True}]}
    bound = float(abs(view).max()) * 1.05
    axis = {"range": [-bound, bound], "showticklabels": False, "title": ""}
    eye = {"x": 1.0, "y": 1.0, "z": 0.7}
    layout = {
        "sliders": [slider],
        "updatemenus": [{"type": "buttons", "buttons": [play], "x": 0.02, "y": 0.02}],
        "scene": {
            "xaxis": axis,
            "yaxis": axis,
            "zaxis": axis,
            "aspectmode": "cube",
            "camera": {"eye": eye},
        },
        "margin": {"l": 0, "r": 0, "t": 0, "b": 0},
        "showlegend": False,
    }
    figure = go.Figure(points(0), layout, [go.Frame(data=[points(i)], name=n) for i, n in enumerate(names)])
    # "<" never appears in the data as itself: a "</script>" in a token could otherwise end this script.
    drawing = figure.to_json().replace("<", "\\u003c")
    return (
        f"<script>{get_plotlyjs()}</script><script>const scene = {drawing};"
        'Plotly.newPlot("cloud", scene.data, scene.layout, {responsive: true})'
        '.then(() => Plotly.addFrames("cloud", scene.frames));</script>'
    )
