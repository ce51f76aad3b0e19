"""What users see: progress, figures, missing extras, and threads given back."""

import io
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from attn_flow.base.checks import require_extra
from attn_flow.base.figures import caption, save_figure, style, typeset
from attn_flow.base.processes import limit_threads
from attn_flow.base.progress import progress_bar

# --- progress --------------------------------------------------------------------------------------------------------


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_gets_one_line_that_is_rewritten(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    with progress_bar("a\x1b[2Jb", total=4.0) as advance:
        for _ in range(2):
            time.sleep(0.25)
            advance(2, note="\x07")
    shown = terminal.getvalue()
    assert r"a\x1b[2Jb:  50% |" in shown
    assert r"a\x1b[2Jb: 100% |" in shown
    assert r"left, \x07" in shown
    assert shown.count("\n") == 1
    assert not {"\x1b", "\x07"} & set(shown)
    with suppress(KeyboardInterrupt), progress_bar("stopped", total=4) as advance:
        time.sleep(0.25)
        advance()
        raise KeyboardInterrupt
    assert terminal.getvalue().endswith("\n")  # the prompt begins a line


def test_a_file_gets_nothing_of_a_short_computation(capsys: pytest.CaptureFixture[str]) -> None:
    with progress_bar("flow", total=2) as advance:
        advance()
        advance()
    assert capsys.readouterr().err == ""


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


def test_figures_are_readable_on_a_page(tmp_path: Path) -> None:
    with style(width=8) as pyplot:
        figure, axes = pyplot.subplots(figsize=(8, 3))
        axes.plot([0, 1], label="a line")
        axes.legend()
        caption(figure, "n = 3")
        pixels = [text.get_fontsize() / 72 / 8 * 748 for text in (axes.xaxis.label, *axes.get_xticklabels())]
        save_figure(figure, tmp_path / "a.png")
        pyplot.close(figure)
    assert min(pixels) > 10  # at a width of 748 pixels
    assert (tmp_path / "a.png").stat().st_size > 1000


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
