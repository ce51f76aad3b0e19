"""The playground's flow and predictions are the library's, in a browser; its controls work, wide and on a phone."""

import json
import math
from itertools import pairwise

import browser
import pytest
import torch

from attn_flow import Attention, flow, limit, wasserstein
from attn_flow.pages.playground import write_playground

pytestmark = [pytest.mark.browser, browser.needed]


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    return write_playground(tmp_path_factory.mktemp("play") / "deeper" / "play.html")


def matrix(text):
    return torch.tensor([[float(v) for v in row.split(",")] for row in text.split(";")], dtype=torch.float64)


def test_ten_settings_move_as_flow_does(page, tmp_path):
    """Every preset, 40 steps of 30 tokens, against `flow` from the same start; and W2 where two atoms are predicted."""
    found = browser.look(
        page,
        """const runs = [];
        for (const [name, preset] of Object.entries(PRESETS)) {
          const s = {...DEFAULTS, ...preset, n: 30};
          const a = {G: padded(parseMatrix(s.G, s.d)), V: padded(parseMatrix(s.V, s.d)), beta: s.beta, kind: s.kind};
          const first = start(s.n, s.d, s.law, 3), target = predict(a, s.d), against = comparison(target, first);
          let cloud = first;
          for (let k = 0; k < 40; k++) cloud = step(a, cloud, s.h, s.step).cloud;
          const rows = c => Array.from({length: c.n}, (_, i) => token(c, i).slice(0, s.d));
          runs.push({...s, name, case: target.case, first: rows(first), last: rows(cloud),
                     limits: against?.limits && rows(against.limits),
                     atoms: !!against?.side, distance: against?.measure(cloud)});
        }
        return {runs};""",
        tmp_path,
    )
    assert len(found["runs"]) == 10
    for run in found["runs"]:
        x0, last = (torch.tensor(run[name], dtype=torch.float64) for name in ("first", "last"))
        beta, kind = (math.inf, "softmax") if run["kind"] == "hardmax" else (run["beta"], run["kind"])
        attention = Attention.from_matrices(matrix(run["G"]), matrix(run["V"]), beta=beta, kind=kind)
        path = flow(attention, x0, [0.0, 40 * run["h"]], step=run["step"], h=run["h"])
        assert (path.x[-1] - last).abs().max() < 1e-8, run["name"]
        if run["atoms"]:
            exact = float(wasserstein(last, torch.tensor(run["limits"], dtype=torch.float64)))
            assert run["distance"] == pytest.approx(exact, abs=1e-7), run["name"]
    assert sum(run["atoms"] for run in found["runs"]) >= 5


def test_predictions_are_those_of_limit(page, tmp_path):
    """Case, E, limits, rates, exit rate and t_min of random and of degenerate matrices, d = 2 and 3."""
    generator = torch.Generator().manual_seed(5)
    pairs = []
    for d in (2, 3):
        draws = torch.randn(12, 2, d, d, generator=generator, dtype=torch.float64)
        pairs += [(d, G.tolist(), V.tolist()) for G, V in draws]
        diagonals = torch.rand(6, 2, d, generator=generator, dtype=torch.float64) + 0.2
        pairs += [(d, torch.diag(g).tolist(), torch.diag(v).tolist()) for g, v in diagonals]
    turn = [[math.cos(1), -math.sin(1), 0], [math.sin(1), math.cos(1), 0], [0, 0, 0.2]]
    eye = torch.eye(3).tolist()
    pairs += [(3, eye, turn), (3, eye, eye), (3, eye, torch.diag(torch.tensor([2.0, 2.0, 1.0])).tolist())]
    pairs += [(2, [[1, 1], [0, 1]], [[1, 0], [0, 1]]), (3, eye, [[1, 1, 0], [0, 1, 1], [0, 0, 1]])]
    pairs += [(2, [[1, 0], [0, 0]], [[1, 0], [0, 1]]), (3, eye, [[2, 1, 0], [0, 2, 0], [0, 0, 1]])]
    script = f"""const pairs = {json.dumps(pairs)};
        return {{found: pairs.map(([d, G, V]) => {{
          const f = predict({{G: padded(G), V: padded(V)}}, d);
          return {{...f, tMin: moments(f, 50).tMin}};
        }})}};"""
    found = browser.look(page, script, tmp_path)["found"]
    cases = set()
    for (d, G, V), told in zip(pairs, found):
        G, V = (torch.tensor(A, dtype=torch.float64) for A in (G, V))
        expected = limit(Attention.from_matrices(G, V))
        cases.add(expected.case)
        is_singular = int(torch.linalg.matrix_rank(G)) < d
        assert told["case"] == ("undefined" if is_singular else expected.case)
        if told["case"] in ("undefined", "stationary"):
            continue
        if expected.case != "rotating":
            x = torch.randn(20, d, generator=generator, dtype=torch.float64)
            shown = x @ torch.tensor(told["direction"], dtype=torch.float64)[:d, :d].T
            cosine = torch.cosine_similarity(shown, expected.push_forward(x), dim=-1)
            assert (cosine - 1).abs().max() < 1e-9
        if expected.rates is None:
            continue
        assert told["g"] == pytest.approx(expected.rates.g, rel=1e-6)
        assert told["tail"] == pytest.approx(expected.rates.tail, rel=1e-5)
        if told.get("exit") is not None:
            assert told["exit"] == pytest.approx(expected.terminal.exit_rate, rel=1e-6, abs=1e-9)
        assert told.get("tMin") is None or told["tMin"] == pytest.approx(expected.t_min(50.0), rel=1e-5)
        assert (told.get("exitUnknown") is None) or expected.t_min(50.0) is None or expected.spectrum.leading < 0
    assert cases == {"fixed", "rotating", "jordan", "stationary"}


@pytest.mark.parametrize("width", [1200, 390])
def test_controls_change_the_flow(page, tmp_path, width):
    found = browser.look(
        page,
        """running = false;
        const change = (id, value, event) => { at(id).value = value; at(id).dispatchEvent(new Event(event)); };
        const told = [];
        for (const name of Object.keys(PRESETS)) {
          change('preset', name, 'change'); advance(); draw();
          told.push(at('told').textContent + at('story').textContent);
        }
        change('preset', 'gather and leave', 'change');
        change('beta', 2.5, 'input'); change('n', 2, 'input'); change('noise', 0.3, 'input');
        change('kind', 'unnormalised', 'change');
        for (let k = 0; k < 5; k++) advance();
        draw();
        const warned = !at('warning').hidden, hash = location.hash;
        change('d', '3', 'change');
        const boxes = at('G').children.length;
        at('V').children[4].value = '7'; at('V').children[4].dispatchEvent(new Event('input'));
        at('V').children[0].value = ''; at('V').children[0].dispatchEvent(new Event('input'));
        const canvas = at('cloud'), before = canvas.toDataURL();
        const drag = (type, x) => canvas.dispatchEvent(
          new PointerEvent(type, {clientX: x, clientY: 90, pointerId: 1}));
        canvas.setPointerCapture = () => {};
        drag('pointerdown', 10); drag('pointermove', 90); drag('pointerup', 90);
        return {told, warned, hash, boxes, V: settings.V, bad: document.querySelectorAll('.bad').length,
                turned: before !== canvas.toDataURL(), drawn: at('curve').width > 100};""",
        tmp_path,
        width,
    )
    assert len(set(found["told"])) == 10
    assert "two red points" in found["told"][0]
    assert "great circle" in found["told"][3]
    assert found["warned"]  # e^{beta |G|} moves a token far in a step of .04
    assert "beta=316" in found["hash"]
    assert "kind=unnormalised" in found["hash"]
    assert found["boxes"] == 9
    assert found["V"].split(";")[1] == "0,7,0"
    assert found["bad"] == 1  # an emptied entry is marked and changes nothing
    assert found["turned"]
    assert found["drawn"]
    assert found["fits"]


def test_buttons_choose_examples_and_the_picture_starts_again(page, tmp_path):
    found = browser.look(
        page,
        """window.requestAnimationFrame = () => 0;  // frames are given here
        running = true;
        const times = [];
        adopt({n: 20, h: 0.5, speed: 20});
        for (let k = 0; k < 40; k++) { frame(k * 20); times.push(t); }
        at('buttons').children[1].click();
        return {times, names: Array.from(at('buttons').children, b => b.textContent), V: settings.V,
                chosen: document.querySelectorAll('.chosen').length};""",
        tmp_path,
    )
    assert any(later < earlier for earlier, later in pairwise(found["times"]))
    assert len(found["names"]) == 3
    assert found["V"] == "2,0,0;0,2,0;0,0,.5"
    assert found["chosen"] == 1


def test_a_link_restores_the_settings_and_bad_ones_change_nothing(page, tmp_path):
    asked = (
        "#d=3&n=40&beta=7&h=0.02&kind=hardmax&step=euler&law=tilted&seed=9&G=1,2,0;0,1,0;0,0,3&V=oops&noise=-4&speed=x"
    )
    found = browser.look(page, "running = false; return {settings, n: cloud.n};", tmp_path, fragment=asked)
    made = found["settings"]
    assert (made["d"], made["n"], made["beta"], made["h"], made["seed"]) == (3, 40, 7, 0.02, 9)
    assert (made["kind"], made["step"], made["law"]) == ("hardmax", "euler", "tilted")
    assert made["G"] == "1,2,0;0,1,0;0,0,3"
    assert (made["V"], made["noise"], made["speed"]) == ("1,0,0;0,1,0;0,0,1", 0, 1)
    assert found["n"] == 40


def test_the_distance_falls_rests_and_rises_on_the_page(page, tmp_path):
    """The first preset at beta = 100 to t = 14: W2 is least near the predicted time, and large again at the end."""
    script = (
        "running = false; adopt({n: 200}); while (t < 14) advance(); return {history, predicted: predictedMoments()};"
    )
    found = browser.look(page, script, tmp_path)
    w2, t = found["history"]["distance"], found["history"]["t"]
    assert all(b > a for a, b in pairwise(t))
    least = t[w2.index(min(w2))]
    assert abs(least - found["predicted"]["tMin"]) < 2.5
    assert min(w2) < w2[0] / 2
    assert w2[-1] > 1.2
