"""A page in a headless Chromium, in a frame of any width: what a script finds on it, and no error on its console."""

import html
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

CHROMIUM = next(
    (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None
)
needed = pytest.mark.skipif(
    CHROMIUM is None, reason="no Chromium on this machine: the page was not opened in a browser"
)
FLAGS = (
    "--headless --no-sandbox --disable-gpu --enable-unsafe-swiftshader --disable-quic --no-first-run "
    "--disable-background-networking --disable-component-update --disable-sync --enable-logging=stderr "
    "--allow-file-access-from-files --virtual-time-budget=20000 --window-size=1300,1000 --dump-dom"
)


def look(
    page: Path, script: str, folder: Path, width: int = 1200, fragment: str = "", scheme: str = "light"
) -> dict[str, Any]:
    """What `script`, the body of an async function run on a copy of the page, returns; plus `title` and `fits`.

    Fails where the page throws, rejects or writes an error to the console. `fits`: nothing is wider than the frame.
    scheme: "light" or "dark", what a page is told that its reader prefers.
    """
    assert CHROMIUM is not None
    watched = f"""<script>
    const tell = facts => {{ parent.document.body.dataset.facts = JSON.stringify(facts); }};
    window.addEventListener('error', e => tell({{error: e.message}}));
    (async () => {{ {script} }})().then(found => tell({{...found, title: document.title,
      fits: document.documentElement.scrollWidth <= window.innerWidth + 1}}), e => tell({{error: e.message}}));
    </script></body>"""
    text = page.read_text()
    assert text.count("</body></html>") == 1
    (folder / "page.html").write_text(text.replace("</body></html>", watched + "</html>"))
    # A frame, since a window of Chromium's cannot be narrower than 500 pixels.
    frame = folder / "frame.html"
    source = f"page.html{fragment}"
    style = f"width:{width}px;height:900px;color-scheme:{scheme}"
    frame.write_text(f'<body><iframe src="{source}" style="{style}"></iframe></body>')
    command = [CHROMIUM, *FLAGS.split(), f"--user-data-dir={folder / 'profile'}", frame.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    told = re.search(r'data-facts="([^"]*)"', done.stdout)
    assert told is not None, done.stderr[-2000:]
    found: dict[str, Any] = json.loads(html.unescape(told[1]))
    assert "error" not in found, found["error"]
    assert not [line for line in done.stderr.splitlines() if "CONSOLE" in line and "rror" in line]
    return found
