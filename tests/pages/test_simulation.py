"""The page and the figures of a simulation show what was measured and what was predicted."""

import json

import browser
import pytest
import torch

from attn_flow import Attention, Trajectory, flow, limit
from attn_flow.pages.figures import simulation_figure
from attn_flow.pages.simulation import run_simulation
from attn_flow.pages.simulation_page import TIMES, TOKENS, page_clouds, write_page
from attn_flow.prediction import starting_cloud

SCRIPT = """
    const canvas = data.runs[0].cloudCanvas, pictures = [];
    for (const t of [0, end / 2, end]) {
      at('time').value = t; at('time').dispatchEvent(new Event('input')); pictures.push(canvas.toDataURL());
    }
    const asked = [];
    window.requestAnimationFrame = f => asked.push(f);  // a browser draws when it has time: frames are given here
    move(0);
    at('run').click();
    frame(last + 40);
    const first = now;
    asked.pop()(last + 40);
    const played = 0 < first && first < now, cloud = cloudAt(data.runs[1], end);
    at('run').click();
    return {pictures: new Set(pictures).size, played, runs: document.querySelectorAll('section').length,
            rows: document.querySelectorAll('#table tr').length, told: at('lead').textContent, basis: data.basis,
            last: Array.from({length: cloud.n}, (_, i) => token(cloud, i)),
            middle: norm(token(cloudAt(data.runs[0], end / 3 + 0.01), 2)), w2: data.runs[1].w2.y};
"""


@pytest.mark.browser
@browser.needed
@pytest.mark.parametrize(("d", "width"), [(3, 1200), (2, 390)])
def test_the_page_shows_the_run(tmp_path, d, width):
    G, V = (torch.diag(torch.tensor(z[:d], dtype=torch.float64)) for z in ([3.0, 1.0, 1.0], [1.0, 2.0, 1.0]))
    numbers = run_simulation(
        Attention.from_matrices(G, V),
        [10.0, float("inf")],
        starting_cloud(d, 30, random=True),
        [2.0],
        0.1,
        out=tmp_path,
    )
    found = browser.look(tmp_path / "simulate.html", SCRIPT, tmp_path, width)
    assert (found["pictures"], found["runs"], found["rows"]) == (3, 2, 3)
    assert found["played"]
    assert found["fits"]
    assert "two points" in found["told"]
    assert [abs(v) for v in found["basis"][0]] == pytest.approx([1, 0, 0])
    assert found["w2"] == numbers["runs"][1]["w2"]
    kept = Trajectory.load(tmp_path / "path_beta_inf.safetensors")
    last = torch.tensor(found["last"], dtype=torch.float64)[:, :d]
    assert (last - kept.x[-1]).abs().max() < 2e-4  # four digits, back on the sphere
    assert found["middle"] == pytest.approx(1)


def test_a_page_holds_few_tokens_and_times_and_none_it_cannot_draw():
    many = Trajectory(torch.arange(300.0), torch.randn(300, TOKENS + 200, 3))
    shown = page_clouds(many)
    assert (len(shown["t"]), len(shown["x"]), len(shown["x"][0])) == (TIMES, TIMES, TOKENS)
    assert (shown["t"][0], shown["t"][-1]) == (0, 299)
    assert page_clouds(Trajectory(torch.arange(2.0), torch.randn(2, 5, 4))) is None


def test_bad_input_is_told_before_anything_is_drawn(tmp_path):
    attention, cloud = Attention.identity(3), torch.eye(3)
    path = flow(attention, cloud, [0.0, 1.0])
    for wrong, message in (
        (lambda: run_simulation(attention, [], cloud, [1.0], out=tmp_path), "betas is empty"),
        (lambda: run_simulation(attention, [5.0], cloud, []), "expected one end, or at least three"),
        (lambda: path.animate(tmp_path / "tokens.mp4"), "ends in .gif"),
        (lambda: path.animate(tmp_path / "tokens.gif", seconds=0), "seconds = 0"),
        (lambda: path.plot(torch.eye(4)[:, :1]), r"\(4, 1\), expected a basis \(3, k\)"),
    ):
        with pytest.raises(ValueError, match=message):
            wrong()
    assert not list(tmp_path.iterdir())


def test_beyond_three_dimensions_the_page_has_curves_alone(tmp_path):
    eye = torch.eye(4, dtype=torch.float64)
    attention = Attention.from_matrices(eye * torch.tensor([3.0, 1, 1, 1]), eye)
    run_simulation(attention, [10.0], starting_cloud(4, 20), [1.0], 0.1, out=tmp_path)
    data = page_data(tmp_path / "simulate.html")
    assert data["runs"][0]["clouds"] is None
    assert data["basis"] == []
    assert "two and three dimensions" in data["lead"]


def page_data(page):
    return json.loads(page.read_text().split("const data = ")[1].split(";</script>")[0])


CASES = {
    "fixed": ([[3.0, 0], [0, 1]], [[1.0, 0], [0, 2]]),
    "width": ([[1.0, 0], [0, 2]], [[-1.0, 0], [0, -3]]),
    "jordan": ([[1.0, 0], [0, 1]], [[1.0, 1], [0, 1]]),
    "stationary": ([[1.0, 0], [0, 1]], [[1.0, 0], [0, 1]]),
}


@pytest.mark.parametrize("case", CASES)
def test_the_prediction_is_drawn(case, tmp_path) -> None:
    G, V = (torch.tensor(A, dtype=torch.float64) for A in CASES[case])
    numbers = run_simulation(Attention.from_matrices(G, V), [5.0, 50.0], starting_cloud(2, 60), [8.0], 0.2)
    first, *others = simulation_figure(numbers).axes
    labels = " ".join(line.get_label() for line in first.lines)
    assert ("c_2" in labels) == (case in ("fixed", "width"))
    assert ("t^{-0.5}" in labels) == (case == "jordan")
    assert ("min" in labels) == (case == "fixed")
    write_page(tmp_path / "page.html", numbers, [None, None])
    basis = [[abs(v) for v in column] for column in page_data(tmp_path / "page.html")["basis"]]
    assert basis == ([] if case == "stationary" else [[1, 0, 0]])  # two points, also at a Jordan block
    if case == "width":  # the width that is predicted is the one that is drawn
        target = limit(Attention.from_matrices(G, V))
        assert list(others[0].lines[1].get_ydata()) == pytest.approx([target.width(b) for b in (5.0, 50.0)])


@pytest.mark.parametrize(("d", "k"), [(2, 1), (3, 2)])
def test_clouds_lie_over_the_predicted_subspace(d, k) -> None:
    V = torch.diag(torch.tensor([2.0] * k + [1.0] * (d - k))).double()
    attention = Attention.from_matrices(torch.eye(d).double(), V, beta=5.0)
    figure = flow(attention, starting_cloud(d, 20), [0.0, 1.0]).plot(limit(attention).basis)
    drawn = next(line for line in figure.axes[0].lines if "predicted" in line.get_label())
    points = torch.tensor([list(z) for z in (drawn.get_data_3d() if d == 3 else drawn.get_data())])
    assert float(points[k:].abs().max()) < 1e-12  # in E, which is spanned by the first k axes
