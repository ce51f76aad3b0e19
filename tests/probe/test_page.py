"""The report page: self-contained, safe against hostile tokens, and alive in a browser, wide and on a phone."""

import json
import re
import shutil
import subprocess

import pytest

from attn_flow.probe.page import write_report

HOSTILE = "<script>document.title='owned'</script> </script> <img src=x onerror=alert(1)> & <b>bold</b> "
CHROMIUM = next(
    (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None
)


@pytest.fixture(scope="module")
def page(result, tmp_path_factory):
    # Word pieces never hold a whole tag; a vocabulary of whole words could.
    before = [list(row) for row in result.tokens]
    for row in result.tokens:
        row[3] = HOSTILE
    path = write_report(result, tmp_path_factory.mktemp("report"))
    result.tokens[:] = before
    return path


def test_page_is_self_contained(page):
    text = page.read_text()
    sources = re.findall(r'(?:src|href)="([^"]{0,80})', text.split("<script>")[0])  # the rest is plotly's own text
    assert all(s.startswith("data:image/png") or re.fullmatch(r"[\w.]+", s) for s in sources), sources
    for name in ("probe.json", "probe.safetensors", "propagation.png", "ladder.png", "limit.png", "heads.png"):
        assert (page.parent / name).exists()


def test_the_answer_and_the_propagation_come_first(page):
    text = page.read_text()
    order = [text.index(mark) for mark in ('id="answer"', "carried through the whole", "The ladder", 'id="text"')]
    assert order == sorted(order)


def test_numbers_are_valid_json(page):
    found = json.loads((page.parent / "probe.json").read_text())
    assert {"about", "findings", "layers", "propagation", "table", "tokens"} <= found.keys()
    assert found["about"]["versions"]["torch"]


def test_tokens_cannot_become_markup(page):
    body = page.read_text().split("const data = ")[1].split("</script>")[0]
    assert "\\u003cscript>document" in body
    assert "<" not in body


def test_the_marker_is_written_last(result, tmp_path, monkeypatch):
    """A kill between figures and page leaves no probe.json, old or new, that calls the folder finished."""
    result.save(tmp_path)
    monkeypatch.setattr("attn_flow.probe.page._page", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        write_report(result, tmp_path)
    assert not (tmp_path / "probe.json").exists()


@pytest.mark.browser
@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine: the page was not opened in a browser")
@pytest.mark.parametrize("width", [1200, 390])
def test_page_lives_in_a_browser(page, tmp_path, width):
    """Clicks on a token, a head, a column; searches; moves the slider; no console error, no hostile token at work."""
    script = """<script>
    window.addEventListener('error', e => { document.body.dataset.error = e.message; });
    const say = (name, value) => { document.body.dataset[name] = value; };
    const change = (id, value, event) => { at(id).value = value; at(id).dispatchEvent(new Event(event)); };
    async function look() {
      const cloud = at('cloud');
      for (let i = 0; i < 100 && !(cloud._transitionData && cloud._transitionData._frames.length); i++)
        await new Promise(r => setTimeout(r, 100));
      const before = JSON.stringify(Array.from(cloud._fullData[0].x.slice(0, 5)));
      await Plotly.animate('cloud', [cloud.layout.sliders[0].steps[6].label],
                           {mode: 'immediate', frame: {duration: 0, redraw: true}, transition: {duration: 0}});
      say('moved', before !== JSON.stringify(Array.from(cloud._fullData[0].x.slice(0, 5))));
      say('legend', cloud.querySelectorAll('.legend .traces').length > 1);
      say('tokens', document.querySelectorAll('#text button').length);
      document.querySelectorAll('#text button')[5].click();
      say('bars', document.querySelectorAll('#bars .bar').length);
      const first = at('bars').textContent + at('row-title').textContent;
      change('which-head', 3, 'change');
      say('head', first !== at('bars').textContent + at('row-title').textContent);
      const colours = () => Array.from(document.querySelectorAll('#text button'), b => b.style.background).join();
      const painted = colours();
      change('which-layer', 4, 'change');
      say('layer', painted !== colours());
      const rows = () => Array.from(document.querySelectorAll('#table tr')).slice(1);
      const all = rows().length;
      change('search', 'rotated explained', 'input');
      say('found', rows().length > 0 && rows().length < all);
      change('search', '', 'input');
      document.querySelectorAll('#table th')[2].click();
      const values = rows().map(r => parseFloat(r.children[2].firstChild?.textContent)).filter(v => !Number.isNaN(v));
      say('sorted', values.every((v, i) => i === 0 || values[i - 1] >= v));
      say('findings', document.querySelectorAll('#findings li').length);
      say('images', Array.from(document.images).filter(i => i.naturalWidth > 100).length);
      say('fits', document.documentElement.scrollWidth <= window.innerWidth + 1);
    }
    look().catch(e => { document.body.dataset.error = e.message; });
    </script></body>"""
    copy = tmp_path / "page.html"
    copy.write_text(page.read_text().replace("</body></html>", script + "</html>"))
    # A frame of the width of a phone: a window of Chromium's cannot be narrower than 500 pixels.
    frame = tmp_path / "frame.html"
    frame.write_text(
        f'<body><iframe id="f" src="page.html" style="width:{width}px;height:900px"></iframe><script>'
        "const f = document.getElementById('f');"
        "setInterval(() => { for (const [k, v] of Object.entries(f.contentDocument?.body?.dataset ?? {}))"
        " document.body.dataset[k] = v; document.title = f.contentDocument?.title ?? ''; }, 100);</script></body>"
    )
    flags = "--headless --no-sandbox --disable-gpu --enable-unsafe-swiftshader --disable-quic --no-first-run"
    flags += " --disable-background-networking --disable-component-update --disable-sync --enable-logging=stderr"
    flags += " --allow-file-access-from-files"
    command = [CHROMIUM, *flags.split(), f"--user-data-dir={tmp_path / 'profile'}", "--virtual-time-budget=20000"]
    done = subprocess.run(
        [*command, "--window-size=1300,1000", "--dump-dom", frame.as_uri()],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert "<body" in done.stdout, done.stderr[-2000:]
    facts = dict(re.findall(r'data-(\w+)="([^"]*)"', re.search(r"<body[^>]*>", done.stdout)[0]))
    assert "error" not in facts, facts
    expected = {"moved", "legend", "head", "layer", "found", "sorted", "fits"}
    assert facts == dict.fromkeys(expected, "true") | {"tokens": "100", "bars": "12", "findings": "7", "images": "5"}
    assert "<title>owned" not in done.stdout
    complaints = [line for line in done.stderr.splitlines() if "CONSOLE" in line and "rror" in line]
    assert not complaints
