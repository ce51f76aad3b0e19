"""The report: self-contained, safe against hostile tokens, readable in a browser, wide and on a phone."""

import dataclasses
import json
import re
from pathlib import Path

import browser
import pytest

from attn_flow.probe.page import as_words

HOSTILE = "<script>document.title='owned'</script> </script> <img src=x onerror=alert(1)> & <b>bold</b> "


@pytest.fixture(scope="module")
def page(result, tmp_path_factory) -> Path:
    # Word pieces never hold a whole tag; a vocabulary of whole words could.
    tokens = [[*row[:3], HOSTILE, *row[4:]] for row in result.tokens]
    hostile = dataclasses.replace(result, tokens=tokens)
    return hostile.report(tmp_path_factory.mktemp("report"), title="<b>mini</b>")


def test_the_page_is_self_contained(page) -> None:
    text = page.read_text()
    links = re.findall(r'(?:src|href)="([^"]{0,80})', text.split("<script>")[0])
    assert all(re.fullmatch(r"#?[\w.-]+", link) for link in links), links
    for name in ("probe.json", "probe.safetensors", "averaging.png", "clusters.png", "temperature.png", "limit.png"):
        assert (page.parent / name).exists()
    assert json.loads((page.parent / "probe.json").read_text())["about"]["versions"]["torch"]


def test_answers_come_first_then_a_section_per_question(page, result) -> None:
    text = page.read_text()
    marks = ['class="cards"', *(f'<section id="{name}"' for name in result.findings), 'id="tokens"', "What was probed"]
    places = [text.index(mark) for mark in marks]
    assert places == sorted(places)
    assert text.count('class="card"') == 4
    assert text.count("This does not say") == 4
    assert "average over many tokens? <span>" in text
    assert f"{result.findings['averaging'].numbers['where']}.</span></h1>" in text
    for finding in result.findings.values():
        assert finding.text.replace("'", "&#x27;").replace('"', "&quot;") in text


def test_a_sentence_explains_every_table(page) -> None:
    tables = page.read_text().split("<details>")[1:]
    assert len(tables) == 4
    assert all(part.index("<p>") < part.index("<table>") < part.index("</details>") for part in tables)
    assert "K for W2 0.3 is the number of clusters per head" in page.read_text()


def test_tokens_and_titles_cannot_become_markup(page) -> None:
    text = page.read_text()
    data = text.split("const data = ")[1].split("</script>")[0]
    assert "\\u003cscript>document" in data
    assert "<" not in data
    assert "<b>mini" not in text


def test_the_marker_of_a_finished_run_is_written_last(result, tmp_path, monkeypatch) -> None:
    result.save(tmp_path)
    monkeypatch.setattr("attn_flow.probe.page.draw", lambda *_, **__: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        result.report(tmp_path)
    assert not (tmp_path / "probe.json").exists()


def test_words_are_joined() -> None:
    assert as_words(["[CLS]", "de", "##bu", "##g"]) == [("[CLS]", False), ("de", False), ("bu", True), ("g", True)]
    assert as_words(["<s>", "▁the", "▁ta", "b"])[1:] == [("the", False), ("ta", False), ("b", True)]


@pytest.mark.browser
@browser.needed
@pytest.mark.parametrize("width", [1280, 390])
def test_the_page_lives_in_a_browser(page, tmp_path, width) -> None:
    """Clicks a head and a token, changes the layer: no error on the console, no hostile token at work."""
    script = """
    const change = (id, value) => { byId(id).value = value; byId(id).dispatchEvent(new Event('change')); };
    const facts = {height: document.body.scrollHeight, tokens: document.querySelectorAll('#text button').length,
                   heads: document.querySelectorAll('#heads button').length};
    document.querySelectorAll('#text button')[5].click();
    facts.bars = document.querySelectorAll('#bars div').length;
    const seen = () => byId('text').innerHTML + byId('bars').innerHTML;
    let before = seen();
    document.querySelectorAll('#heads button')[13].click();
    facts.head = before !== seen() && byId('which-layer').value === '1' && byId('which-head').value === '1';
    before = seen();
    change('which-layer', 4);
    facts.layer = before !== seen();
    const shown = Array.from(document.querySelectorAll('svg')).filter(svg => svg.getBoundingClientRect().width > 0);
    facts.figures = shown.length;
    facts.cut = shown.filter(svg => svg.getBoundingClientRect().right > window.innerWidth + 1).length;
    return facts;"""
    facts = browser.look(page, script, tmp_path, width)
    assert facts.pop("title") != "owned"
    assert facts.pop("height") < (6000 if width == 1280 else 8000)
    expected = {"tokens": 32, "heads": 72, "bars": 12, "figures": 8, "cut": 0}
    assert facts == expected | dict.fromkeys(("head", "layer", "fits"), True)


@pytest.mark.browser
@browser.needed
def test_words_keep_their_contrast_in_light_and_dark(page, tmp_path) -> None:
    """At a phone's width all words have the contrast of 4.5 that WCAG asks for."""
    script = """
    document.querySelectorAll('details').forEach(d => { d.open = true; });
    document.querySelectorAll('#text button')[5].click();
    const channels = colour => colour.match(/[\\d.]+/g).map(Number);
    const behind = node => {
      const [r, g, b, a = 1] = channels(getComputedStyle(node).backgroundColor);
      if (a === 1 || node === document.documentElement) return [r, g, b];
      const below = behind(node.parentElement);
      return [r, g, b].map((c, i) => a * c + (1 - a) * below[i]);
    };
    const light = colour => colour.map(c => c / 255).map(c => c <= .04045 ? c / 12.92 : ((c + .055) / 1.055) ** 2.4)
      .reduce((sum, c, i) => sum + c * [.2126, .7152, .0722][i], 0);
    const contrast = node => {
      const [a, b] = [channels(getComputedStyle(node).color).slice(0, 3), behind(node)].map(light);
      return (Math.max(a, b) + .05) / (Math.min(a, b) + .05);
    };
    const words = Array.from(document.querySelectorAll('h1, h2, p, li, a, .tag, th, td, summary, button'));
    const weak = words.filter(node => node.textContent.trim()).map(n => [contrast(n), n.outerHTML.slice(0, 80)]);
    const back = light(channels(getComputedStyle(document.body).backgroundColor).slice(0, 3));
    return {back, seen: weak.length, weak: weak.filter(([c]) => c < 4.5)};"""
    for scheme in ("light", "dark"):
        found = browser.look(page, script, tmp_path, 390, scheme=scheme)
        assert found["seen"] > 200
        assert found["weak"] == []
        assert found["fits"]
        assert (found["back"] == 1) == (scheme == "light")


def test_one_text_has_a_page(tmp_path) -> None:
    """No interval, no distance between texts, no verdict, and still a report without NaN."""
    from attn_flow.hooks.demo import tiny_bert
    from attn_flow.probe import probe

    result = probe(*tiny_bert(), ["a b c d e f g h i j " * 2])
    page = result.report(tmp_path).read_text().split("<script>")[0]
    assert "nan" not in page.lower().replace("finance", "")
    assert "none was cut, 0 left out" in page
    averaging = page.split('<section id="averaging">')[1].split("</section>")[0]
    assert re.search(r">0\.00\d+</text>", averaging)  # the axis of small logits that differ little has numbers
    assert {finding.verdict for finding in result.findings.values()} == {None}
