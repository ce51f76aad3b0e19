"""What a path, a limit and phases show: figures, an animation and notebooks."""

import pytest
import torch

from attn_flow import Attention, flow, limit, phases
from attn_flow.prediction import starting_cloud

ATTENTION = Attention.from_matrices(
    torch.diag(torch.tensor([3.0, 1.0])).double(), torch.diag(torch.tensor([1.0, 2.0])).double(), beta=20.0
)
PATH = flow(ATTENTION, starting_cloud(2, 40), torch.linspace(0, 6, 7))


def test_a_path_is_drawn_at_five_times_in_any_dimension() -> None:
    assert [axes.get_title("center") for axes in PATH.plot().axes] == [
        "$t = 0$",
        "$t = 2$",
        "$t = 3$",
        "$t = 4$",
        "$t = 6$",
    ]
    assert len(PATH.plot(indices=[0, -1]).axes) == 2
    wide = flow(Attention.identity(6), starting_cloud(6, 20), [0.0, 1.0])
    assert len(wide.plot().axes) == 2
    with pytest.raises(ValueError, match=r"take x\[:, i\] of a batch"):
        flow(ATTENTION, torch.randn(3, 5, 2).double(), [0.0, 1.0]).plot()


@pytest.mark.parametrize("with_curve", [False, True])
def test_an_animation_has_a_frame_a_time(tmp_path, with_curve) -> None:
    from PIL import Image

    curve = phases(PATH, limit(ATTENTION)).w2 if with_curve else None
    PATH.animate(tmp_path / "tokens.gif", limit(ATTENTION).basis, curve, seconds=1)
    assert Image.open(tmp_path / "tokens.gif").n_frames == len(PATH)


def test_notebooks_show_sentences_and_pictures() -> None:
    target = limit(ATTENTION)
    assert "data:image/png" in PATH._repr_html_()
    assert "two opposite points" in target._repr_html_()
    tie = Attention.from_matrices(torch.eye(2), torch.tensor([[1.0, -0.3], [-0.3, 1.0]]))  # the first entry is positive
    assert "+-(0.707, -0.707)" in limit(tie)._repr_html_()
    assert "data:image/png" in phases(PATH, target)._repr_html_()
