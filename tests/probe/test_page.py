"""The report page: self-contained, safe against hostile tokens, and alive in a browser."""

import json
import re
import shutil
import subprocess

import pytest

from attn_flow.hooks.demo import minilm, topics
from attn_flow.probe.page import write_report
from attn_flow.probe.run import probe

HOSTILE = "<script>document.title='owned'</script> </script> <img src=x onerror=alert(1)> & <b>bold</b> "
CHROMIUM = next(
    (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None
)


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    texts = [HOSTILE + text for text in topics() if len(text) > 900][:2]
    with pytest.warns(UserWarning, match="truncated"):
        result = probe(*minilm(), texts, max_length=60, nulls=["rotated"])
    # Word pieces never hold a whole tag; a vocabulary of whole words could.
    result.labels[0]["token"] = HOSTILE
    return write_report(result, tmp_path_factory.mktemp("report"))


def test_page_is_self_contained(page):
    text = page.read_text()
    sources = re.findall(r'(?:src|href)="([^"]{0,80})', text.split("<script>")[0])  # the rest is plotly's own text
    assert all(s.startswith("data:image/png") or re.fullmatch(r"[\w.]+", s) for s in sources), sources
    for name in ("probe.json", "probe.safetensors", "probe.png", "heads.png", "evolution.png"):
        assert (page.parent / name).exists()


def test_numbers_are_valid_json(page):
    found = json.loads((page.parent / "probe.json").read_text())
    assert {"about", "findings", "table", "labels"} <= found.keys()
    assert found["about"]["versions"]["torch"]


def test_tokens_cannot_become_markup(page):
    body = page.read_text().split("const scene = ")[1]
    assert "<script>document" not in body
    assert "<img" not in body


@pytest.mark.browser
@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine: the page was not opened in a browser")
def test_page_lives_in_a_browser(page, tmp_path):
    """Renders, the slider moves the cloud, no console error, and the hostile token did not run."""
    script = """<script>
    window.addEventListener('error', e => { document.body.dataset.error = e.message; });
    async function look() {
      const cloud = document.getElementById('cloud');
      for (let i = 0; i < 100 && !(cloud._transitionData && cloud._transitionData._frames.length); i++)
        await new Promise(r => setTimeout(r, 100));
      const before = JSON.stringify(Array.from(cloud._fullData[0].x.slice(0, 5)));
      await Plotly.animate('cloud', [cloud.layout.sliders[0].steps[6].label],
                           {mode: 'immediate', frame: {duration: 0, redraw: true}, transition: {duration: 0}});
      const after = JSON.stringify(Array.from(cloud._fullData[0].x.slice(0, 5)));
      document.body.dataset.moved = before !== after;
      document.body.dataset.steps = cloud.layout.sliders[0].steps.length;
      document.body.dataset.findings = document.querySelectorAll('#findings li').length;
      document.body.dataset.images = Array.from(document.images).filter(i => i.naturalWidth > 100).length;
    }
    look().catch(e => { document.body.dataset.error = e.message; });
    </script></body>"""
    copy = tmp_path / "page.html"
    copy.write_text(page.read_text().replace("</body>", script))
    flags = "--headless --no-sandbox --disable-gpu --enable-unsafe-swiftshader --disable-quic --no-first-run"
    flags += " --disable-background-networking --disable-component-update --disable-sync --enable-logging=stderr"
    command = [CHROMIUM, *flags.split(), f"--user-data-dir={tmp_path / 'profile'}", "--virtual-time-budget=20000"]
    done = subprocess.run(
        [*command, "--dump-dom", copy.as_uri()], capture_output=True, text=True, timeout=240, check=False
    )
    assert "<body" in done.stdout, done.stderr[-2000:]
    facts = dict(re.findall(r'data-(\w+)="([^"]*)"', re.search(r"<body[^>]*>", done.stdout)[0]))
    assert "error" not in facts, facts
    assert facts == {"moved": "true", "steps": "7", "findings": "5", "images": "3"}
    assert "<title>owned" not in done.stdout
    complaints = [line for line in done.stderr.splitlines() if "CONSOLE" in line and "rror" in line]
    assert not complaints
