"""The report page: self-contained, safe against hostile tokens, and alive in a browser, wide and on a phone."""

import json
import re

import browser
import pytest

from attn_flow.probe.page import _data, write_report

HOSTILE = "<script>document.title='owned'</script> </script> <img src=x onerror=alert(1)> & <b>bold</b> "


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
@browser.needed
@pytest.mark.parametrize("width", [1200, 390])
def test_page_lives_in_a_browser(page, tmp_path, width):
    """Clicks on a token, a head, a column; searches; moves the slider; no console error, no hostile token at work."""
    script = """
    const facts = {}, say = (name, value) => { facts[name] = value; };
    const change = (id, value, event) => { at(id).value = value; at(id).dispatchEvent(new Event(event)); };
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
    say('heads', document.querySelectorAll('#heads button').length);
    const worst = document.querySelector('#heads button');
    worst.click();
    say('worst', worst.textContent.startsWith(`layer ${at('which-layer').value}, head ${at('which-head').value}:`) &&
      at('row-title').textContent.includes(`head ${at('which-head').value} `));
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
    return facts;"""
    facts = browser.look(page, script, tmp_path, width)
    assert facts.pop("title") != "owned"
    true = dict.fromkeys(("moved", "legend", "head", "layer", "worst", "found", "sorted", "fits"), True)
    assert facts == true | {"tokens": 100, "bars": 12, "heads": 6, "findings": 7, "images": 5}


@pytest.mark.browser
@browser.needed
def test_the_page_follows_its_readers_light(page, tmp_path):
    """Light and dark, at a phone's width: words keep the contrast of 4.5 that WCAG asks for, figures turn over."""
    script = """
    const cloud = at('cloud');
    for (let i = 0; i < 100 && !(cloud._transitionData && cloud._transitionData._frames.length); i++)
      await new Promise(r => setTimeout(r, 100));
    await new Promise(r => setTimeout(r, 500));
    document.querySelectorAll('details').forEach(d => { d.open = true; });
    document.querySelectorAll('#text button')[5].click();
    const channels = colour => colour.match(/[\\d.]+/g).map(Number);
    const behind = node => {  // what lies behind a node's words, from the page up
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
    const kinds = 'h1, h2, p, li, a, .tag, th, td, small, summary, dt, dd, button';
    const words = Array.from(document.querySelectorAll(kinds));
    const faint = words.filter(node => node.textContent.trim()).map(n => [contrast(n), n.outerHTML.slice(0, 80)]);
    const back = light(channels(getComputedStyle(document.body).backgroundColor).slice(0, 3));
    return {back, paper: cloud._fullLayout.paper_bgcolor, filter: getComputedStyle(document.images[0]).filter,
            seen: faint.length, faint: faint.filter(([c]) => c < 4.5)};"""
    seen = {scheme: browser.look(page, script, tmp_path, 390, scheme=scheme) for scheme in ("light", "dark")}
    for found in seen.values():
        assert found["seen"] > 200
        assert found["faint"] == []
        assert found["fits"]
    assert seen["light"]["back"] == 1
    assert seen["dark"]["back"] < 0.02
    assert seen["light"]["paper"] != seen["dark"]["paper"]
    assert seen["light"]["filter"] == "none"
    assert "invert" in seen["dark"]["filter"]


def test_every_token_of_the_page_has_its_own_numbers(result):
    """Texts lie one after the other in the reading: cut by their lengths, and none is lost."""
    shown = _data(result)["texts"]
    pieces = {
        name: getattr(result.reading, name).split(result.reading.lengths.tolist(), dim=1)
        for name in ("missed", "received")
    }
    for t, text in enumerate(shown):
        for name, digits in (("missed", 4), ("received", 3)):
            assert text[name] == [[round(v, digits) for v in row] for row in pieces[name][t].tolist()]
        assert len(text["tokens"]) == len(text["missed"][0])
