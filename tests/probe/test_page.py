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
    true = dict.fromkeys(("moved", "legend", "head", "layer", "found", "sorted", "fits"), True)
    assert facts == true | {"tokens": 100, "bars": 12, "findings": 7, "images": 5}


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
