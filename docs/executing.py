"""`make tutorials`: run the notebooks of docs/tutorials and keep what they print and draw, without their warnings."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient

TUTORIALS = sorted((Path(__file__).parent / "tutorials").glob("*.ipynb"))


def executed(path: Path) -> Any:
    """The notebook after a run from its first cell to its last; CellExecutionError where one raises."""
    notebook = nbformat.read(path, as_version=4)
    with tempfile.TemporaryDirectory() as folder:
        NotebookClient(notebook, timeout=300, resources={"metadata": {"path": folder}}).execute()
    return notebook


def write(notebook: Any, path: Path) -> None:
    """The notebook as it is stored: no timings, no warnings, one block of text for what a cell printed."""
    for cell in notebook.cells:
        cell.metadata = {}
        if cell.cell_type != "code":
            continue
        printed = "".join(o.text for o in cell.outputs if o.output_type == "stream" and o.name == "stdout")
        shown = [o for o in cell.outputs if o.output_type != "stream"]
        cell.outputs = [nbformat.v4.new_output("stream", name="stdout", text=printed)] * bool(printed) + shown
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    notebook.metadata = {"kernelspec": kernel, "language_info": {"name": "python"}}
    path.write_text(json.dumps(nbformat.v4.nbjson.strip_transient(notebook), indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    os.environ.pop("MPLBACKEND", None)  # the kernel's own keeps what is drawn
    for tutorial in [Path(name) for name in sys.argv[1:]] or TUTORIALS:
        write(executed(tutorial), tutorial)
