"""`make tutorials`: run the notebooks of docs/tutorials and keep what they print and draw, without their warnings."""

from __future__ import annotations

import base64
import io
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient
from PIL import Image

TUTORIALS = sorted((Path(__file__).parent / "tutorials").glob("*.ipynb"))


def executed(path: Path) -> Any:
    """The notebook after a run from its first cell to its last; CellExecutionError where one raises."""
    notebook = nbformat.read(path, as_version=4)
    with tempfile.TemporaryDirectory() as folder:
        NotebookClient(notebook, timeout=300, resources={"metadata": {"path": folder}}).execute()
    return notebook


def fewer_colours(picture: str) -> str:
    """A PNG in base64 with 64 colours."""
    drawn, small = Image.open(io.BytesIO(base64.b64decode(picture))), io.BytesIO()
    drawn.convert("RGB").quantize(64).save(small, format="png", optimize=True)
    return base64.b64encode(small.getvalue()).decode()


def write(notebook: Any, path: Path) -> None:
    """The notebook as it is stored: no timings, no warnings, one block of printed text a cell, small pictures."""
    for cell in notebook.cells:
        cell.metadata = {}
        if cell.cell_type != "code":
            continue
        printed = "".join(o.text for o in cell.outputs if o.output_type == "stream" and o.name == "stdout")
        shown = [o for o in cell.outputs if o.output_type != "stream"]
        for data in (o.data for o in shown if "image/png" in o.get("data", {})):
            data["image/png"] = fewer_colours(data["image/png"])
        cell.outputs = [nbformat.v4.new_output("stream", name="stdout", text=printed)] * bool(printed) + shown
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    notebook.metadata = {"kernelspec": kernel, "language_info": {"name": "python"}}
    path.write_text(json.dumps(nbformat.v4.nbjson.strip_transient(notebook), indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    os.environ.pop("MPLBACKEND", None)  # the kernel's own keeps what is drawn
    for tutorial in [Path(name) for name in sys.argv[1:]] or TUTORIALS:
        write(executed(tutorial), tutorial)
