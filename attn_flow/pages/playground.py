"""The playground: tokens moving live in the browser, with the prediction drawn beside them, in one file."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

from attn_flow.base.files import write_bytes


def write_playground(path: str | Path) -> Path:
    """Write the playground, one page without any other file, to `path`; returns the path.

    Args:
        path: the file, such as "play.html"; folders on the way are made.

    Example:
        >>> import tempfile
        >>> page = write_playground(Path(tempfile.mkdtemp()) / "play.html")
        >>> "<canvas" in page.read_text()
        True
    """
    path = Path(path)
    write_bytes(assembled("play.html", "play.js").encode(), path)
    return path


def assembled(template: str, script: str) -> str:
    """A page of this package with its style, the flow, the drawing and its own script inside it."""
    read = lambda name: files(__package__).joinpath(name).read_text(encoding="utf-8")
    inside = "\n".join(read(name).replace('"use strict";\n', "") for name in ("flow.js", "scene.js", script))
    return read(template).replace("/* style */", read("style.css")).replace("/* script */", f'"use strict";\n{inside}')
