"""What the figures of a simulation show: the prediction beside the measurement, and words for every colour."""

import math

import pytest
import torch

from attn_flow import Attention, flow, limit
from attn_flow.cli.figures import beta_words, clouds_figure, simulation_figure
from attn_flow.cli.simulation import simulate, start

CASES = {
    "fixed": ([[3.0, 0], [0, 1]], [[1.0, 0], [0, 2]]),
    "layer": ([[1.0, 0], [0, 2]], [[-1.0, 0], [0, -3]]),
    "jordan": ([[1.0, 0], [0, 1]], [[1.0, 1], [0, 1]]),
    "stationary": ([[1.0, 0], [0, 1]], [[1.0, 0], [0, 1]]),
}


@pytest.mark.parametrize("case", CASES)
def test_the_prediction_is_drawn(case):
    G, V = (torch.tensor(A, dtype=torch.float64) for A in CASES[case])
    numbers = simulate(G, V, [5.0, 50.0], start(2, 60, nodes=True), [8.0], 0.2)
    first, *others = simulation_figure(numbers).axes
    words = " ".join(line.get_label() for line in first.lines)
    assert ("c_2" in words) == (case in ("fixed", "layer"))
    assert ("t^{-0.5}" in words) == (case == "jordan")
    assert ("min" in words) == (case == "fixed")
    assert len(others) == 2
    if case == "layer":  # the width that is predicted is the one that is drawn
        drawn = others[0].lines[1].get_ydata()
        assert list(drawn) == pytest.approx([limit(Attention.from_matrices(G, V)).width(b) for b in (5.0, 50.0)])


@pytest.mark.parametrize(("d", "k"), [(2, 1), (3, 1), (3, 2)])
def test_clouds_lie_over_the_predicted_subspace(d, k):
    V = torch.diag(torch.tensor([2.0] * k + [1.0] * (d - k))).double()
    attention = Attention.from_matrices(torch.eye(d).double(), V, beta=5.0)
    path = flow(attention, start(d, 20).x, [0.0, 1.0])
    figure = clouds_figure(path, [0, 1], limit(attention))
    labels = {text.get_text() for text in figure.legends[0].get_texts()}
    assert r"predicted $S \cap E$" in labels
    drawn = next(line for line in figure.axes[0].lines if "predicted" in line.get_label())
    points = torch.tensor([list(z) for z in (drawn.get_data_3d() if d == 3 else drawn.get_data())])
    assert float(points[k:].abs().max()) < 1e-12  # in E, which is spanned by the first k axes
    assert "Colour" in figure.get_supxlabel()


def test_infinite_beta_on_tokens_is_called_hardmax():
    assert "hardmax of 40 points" in beta_words(math.inf, 40)
    assert beta_words(1e6, 40) == r"$\beta = 1 \times 10^{6}$"
