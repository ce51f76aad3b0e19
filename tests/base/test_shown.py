"""What users see: progress, figures, missing extras, and threads given back."""

import io
import sys
from pathlib import Path

import pytest
import torch

from attn_flow.base import progress
from attn_flow.base.figures import caption, save_figure, style, typeset
from attn_flow.base.imports import require_extra
from attn_flow.base.processes import limit_threads
from attn_flow.base.progress import progress_bar

# --- progress --------------------------------------------------------------------------------------------------------


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    return now


def test_a_file_gets_a_line_every_ten_seconds(clock: list[float], capsys: pytest.CaptureFixture[str]) -> None:
    with progress_bar("flow", total=40) as advance:
        for _ in range(25):
            clock[0] += 1
            advance(note="t = 1")
    expected = [
        "flow: 25% done, 0:00:30 left (t = 1)",
        "flow: 50% done, 0:00:20 left (t = 1)",
        "flow: done in 0:00:25",
    ]
    assert capsys.readouterr().err.splitlines() == expected


def test_a_terminal_gets_one_line_that_is_rewritten(clock: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    with progress_bar("a\x1b[2Jb", total=4) as advance:
        for _ in range(4):
            clock[0] += 1
            advance(note="\x07")
    shown = terminal.getvalue().split("\r")[1:]
    assert shown[0].rstrip() == r"[#####               ] a\x1b[2Jb: 25% done, 0:00:03 left (\x07)"
    assert len(shown) == 5
    assert "done in 0:00:04" in shown[-1]
    assert "".join(shown).count("\n") == 1
    with pytest.raises(KeyboardInterrupt), progress_bar("stopped", total=4):
        raise KeyboardInterrupt
    assert terminal.getvalue().endswith("\n")  # the prompt begins a line


# --- figures and extras ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("plain", "mathematics"),
    [
        ("time t", "time $t$"),
        ("W2 at beta = inf", r"$W_2$ at $\beta$ = " + "\u221e"),
        ("gamma_k, mu_0, k_max and t_crit", r"$\gamma_{k}$, $\mu_{0}$, $k_{\rm max}$ and $t_{\rm crit}$"),
        ("(b, c) n=3, (d-f) a line for each d.", "(b, c) $n$=3, (d-f) a line for each $d$."),
        ("V=-I in R^d, n^(-1/2)", "$V$=-$I$ in $R^{d}$, $n^{-1/2}$"),
        ("MiniLM's i != j, T <= 1", "MiniLM's $i$ \u2260 $j$, $T$ \u2264 1"),
    ],
)
def test_plain_mathematics_is_typeset_once(plain: str, mathematics: str) -> None:
    assert typeset(plain) == mathematics
    assert typeset(mathematics) == mathematics


@pytest.mark.parametrize("dark", [False, True])
def test_figures_are_readable_on_a_page(tmp_path: Path, dark: bool) -> None:
    from matplotlib.image import imread

    with style(width=8, dark=dark) as pyplot:
        figure, axes = pyplot.subplots(figsize=(8, 3))
        axes.plot([0, 1], label="a line")
        axes.legend()
        caption(figure, "n = 3")
        pixels = [text.get_fontsize() / 72 / 8 * 748 for text in (axes.xaxis.label, *axes.get_xticklabels())]
        save_figure(figure, tmp_path / "a.png")
        pyplot.close(figure)
    assert min(pixels) > 10  # at a width of 748 pixels
    assert (float(imread(tmp_path / "a.png")[0, 0, :3].mean()) < 0.5) == dark


def test_a_missing_extra_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in {"matplotlib", *sys.modules}:
        if name.partition(".")[0] == "matplotlib":
            monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ImportError, match=r'^matplotlib is not installed; .*: pip install "attn-flow\[all\]"$'):
        require_extra("matplotlib.pyplot")
    with pytest.raises(ImportError, match="matplotlib is not installed; install it with"), style():
        pass


def test_a_broken_extra_shows_its_own_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "broken_extra.py").write_text("import something_else")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="something_else"):
        require_extra("broken_extra")


# --- threads ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("limit", "inside"), [(1, 1), (5, 2)])
def test_threads_are_limited_and_given_back(limit: int, inside: int) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with limit_threads(limit):
            assert torch.get_num_threads() == inside
        assert torch.get_num_threads() == 2
        with pytest.raises(KeyError), limit_threads(limit):
            raise KeyError
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
