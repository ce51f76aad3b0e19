"""`make report-figures`: the figures of docs/report.md, drawn anew from the probe that `make demo` kept."""

from __future__ import annotations

import io
import sys
from pathlib import Path

from matplotlib import pyplot
from PIL import Image

from attn_flow.probe import ProbeResult
from attn_flow.probe.figures import draw
from attn_flow.probe.findings import QUESTIONS

OUT = Path(__file__).parent / "figures"


def write_figures(folder: str) -> None:
    """Every figure of the report in `folder`, smaller and with 128 colours."""
    result = ProbeResult.load(folder)
    for name in QUESTIONS:
        figure, drawn = draw(result.findings, name), io.BytesIO()
        figure.savefig(drawn, format="png", dpi=110)
        pyplot.close(figure)
        Image.open(drawn).convert("RGB").quantize(128).save(OUT / f"report-{name}.png", optimize=True)


if __name__ == "__main__":
    write_figures(sys.argv[1])
