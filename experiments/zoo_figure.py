"""The figure and the table of the experiment `zoo`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from attn_flow.experiments.figures import COLOURS, caption, label, panels
from attn_flow.probe.nulls import CROSS_FITTED

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PAIRS = (("minilm", "sre"), ("rxnfp-before", "rxnfp"))  # before and after fine-tuning
SHARP, DIFFUSE = 0.5, 0.8  # entropy of attention over log n: below, a few tokens; above, nearly all of them


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


def best_null(run: dict[str, Any], where: str = "depth") -> tuple[str, float]:
    """The strongest null or control of an encoder: of embedding cosines, or of the mean over layers of "explained"."""
    others = {n: v for n, v in run[where].items() if n not in ("closure", "gaussian", CROSS_FITTED)}
    score = (lambda v: v["embedding_cosine"]) if where == "depth" else mean
    name = max(others, key=lambda n: score(others[n]))
    return name, score(others[name])


def regime(run: dict[str, Any]) -> str:
    """In a word: how sharply the layers attend, by the mean entropy over log n."""
    entropy = mean(run["regime"]["entropy"])
    return "sharp" if entropy < SHARP else "diffuse" if entropy > DIFFUSE else "selective"


def table_rows(numbers: dict[str, Any]) -> list[list[str]]:
    """A row for every encoder, as docs/encoders.md has them; `COLUMNS` names the columns."""
    rows = []
    for name, run in numbers["models"].items():
        null, height = best_null(run)
        unseen = run["explained"].get(CROSS_FITTED)
        rows.append(
            [
                name,
                _span(run["explained"]["closure"]),
                _span(unseen) if unseen else "not defined",
                _span(run["explained"]["gaussian"]),
                f"{run['depth']['closure']['embedding_cosine']:.3f}",
                f"{run['depth']['closure']['w2'][-1]:.2f}",
                f"{height:.3f} ({null.replace('_', ' ')})",
                f"{regime(run)}, {mean(run['regime']['entropy']):.2f}",
                f"{run['regime']['pairwise_cosine'][0]:.2f} to {run['regime']['pairwise_cosine'][-1]:.2f}",
            ]
        )
    return rows


COLUMNS = (
    "encoder",
    "explained by layer",
    "unseen queries",
    "one Gaussian",
    "embedding cosine",
    "last W2",
    "best null or control",
    "attention, entropy / log n",
    "cosine of tokens, first to last level",
)


def _span(values: list[float]) -> str:
    return f"{min(values):.2f} to {max(values):.2f}"


def plot(numbers: dict[str, Any]) -> Figure:
    figure, (a, b, c, d, e, f, g, h) = panels(4, 2, title="Real encoders: attention as a law of the cloud")
    models = numbers["models"]
    lines = [(colour, style) for style in ("-", "--") for colour in COLOURS]
    for (name, run), (colour, style) in zip(models.items(), lines):
        x = [(i + 1) / run["layers"] for i in range(run["layers"])]
        look: dict[str, Any] = {"color": colour, "linestyle": style, "linewidth": 1.2}
        a.plot(x, run["explained"]["closure"], **look, label=name)
        if CROSS_FITTED in run["explained"]:
            b.plot(x, run["explained"][CROSS_FITTED], **look)
        c.plot(x, run["depth"]["closure"]["cosine"], **look)
        e.plot(x, run["regime"]["entropy"], **look)
        f.plot([0, *x], run["regime"]["pairwise_cosine"], **look)
    for axis in (a, b):
        axis.set_ylim(-0.3, 1.02)
        axis.axhline(0, color="#aaaaaa", linewidth=0.8)
    label(a, "closure, layer by layer", "depth", "explained variance", legend=False)
    if models:
        a.set_ylim(-1.0, 1.02)
        a.legend(fontsize=6, frameon=True, framealpha=0.9, edgecolor="none", ncols=3, loc="lower center")
    label(b, "for queries by which it was not found", "depth", "explained variance", legend=False)
    label(c, "attention replaced in every layer", "depth", "cosine of pooled states", legend=False)
    _bars(d, models)
    label(e, "attention: 1 looks at all tokens alike", "depth", "entropy / log n", legend=False)
    label(f, "how near tokens are", "depth", "mean cosine of two tokens", legend=False)
    for (before, after), colour in zip(PAIRS, COLOURS):
        for name, style in ((before, ":"), (after, "-")):
            if name in models:
                found = models[name]["regime"]["pairwise_cosine"]
                g.plot([i / (len(found) - 1) for i in range(len(found))], found, style, color=colour, label=name)
    label(g, "before and after fine-tuning", "depth", "mean cosine of two tokens", legend=bool(g.lines))
    tied = {name: run for name, run in models.items() if run["beyond"]}
    for (name, run), (tokens, closure) in zip(tied.items(), (COLOURS[:2], COLOURS[2:4])):
        for kind, found in run["beyond"].items():
            style = "-" if kind == "trained" else ":"
            fired = list(range(1, len(found["pairwise_cosine"])))
            words = name if kind == "trained" else f"{name} untrained"
            h.plot(fired, found["pairwise_cosine"][1:], style, color=tokens, label=f"{words}: tokens")
            h.plot(fired, found["cosine"]["closure"], style, color=closure, label=f"{words}: closure")
        h.axvline(run["layers"], color="#aaaaaa", linewidth=0.8)
    label(h, "one block fired beyond its depth", "firings", "cosine", legend=False)
    if tied:
        h.set_ylim(-0.6, 1.05)
        h.legend(fontsize=6, frameon=False, ncols=2, loc="lower center")
    held = sum(c["holds"] for c in numbers["claims"])
    missing = f" Not run: {', '.join(numbers['missing'])}." if numbers["missing"] else ""
    caption(
        figure,
        f"{numbers['texts']} inputs of each encoder's own kind, at most {numbers['length']} tokens; depth in units of "
        f"the encoder's own. {held} of {len(numbers['claims'])} claims hold.{missing}",
    )
    return figure


def _bars(axis: Axes, models: dict[str, Any]) -> None:
    """Embedding cosine of closure and best null, encoder by encoder."""
    names = list(models)
    axis.barh(range(len(names)), [models[n]["depth"]["closure"]["embedding_cosine"] for n in names], color=COLOURS[0])
    axis.plot([best_null(models[n])[1] for n in names], range(len(names)), "D", color=COLOURS[1])
    axis.set_yticks(range(len(names)), names, fontsize=7)
    axis.invert_yaxis()
    axis.set_xlim(0, 1)
    label(axis, "at the end; diamonds: best null or control", "embedding cosine", "", legend=False)
