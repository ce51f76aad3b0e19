"""Names and texts of other people: they cannot steer the terminal, leave the folder or take each other's files."""

import json
import warnings
from pathlib import Path

import pytest
import torch
import typer
from typer.testing import CliRunner

from attn_flow.base.progress import progress_bar
from attn_flow.cli.app import app
from attn_flow.cli.console import echo, print_table, reporting
from attn_flow.cli.probe import folder_name

STEERING = "\x1b[2J\x1b]0;owned\x07\u202e[red]not red[/red]\rover"


def test_names_cannot_steer_the_terminal() -> None:
    error = CliRunner().invoke(app, ["limit", "--G", f"{STEERING}.npy", "--V", "1,0;0,1"]).stderr
    assert not any(code in error for code in "\x1b\x07\u202e\r")
    assert "[red]not red[/red]" in error
    assert len(error.splitlines()) == 1


def test_tables_and_bars_print_text_as_it_is(capsys) -> None:
    print_table(STEERING, ["name"], [[STEERING], ["[bold]x[/bold]"]])
    echo(STEERING)
    output = capsys.readouterr().out
    assert not any(code in output for code in "\x1b\x07\u202e\r")
    assert "[bold]x[/bold]" in output
    with progress_bar("[red]x", 1) as advance:
        advance(1, note=STEERING)
    assert not any(code in capsys.readouterr().err for code in ("\x07", "\u202e", "\x1b]0"))


def test_warnings_and_memory_errors_are_one_line(capsys) -> None:
    reporting(lambda: warnings.warn(f"a name {STEERING}", stacklevel=1))()
    assert "warning: a name \\x1b" in capsys.readouterr().err
    with pytest.raises(typer.Exit) as exit_code:
        reporting(lambda: torch.empty(2**50))()
    assert exit_code.value.exit_code == 2
    assert "not enough memory" in capsys.readouterr().err


def test_every_model_has_a_folder_of_its_own_inside_the_output() -> None:
    names = ["c/x", "c_x", "c%2Fx", "..", ".", "...", "../x", "/", "a\x00b", "a b", "a@random", "a@beta_factor=2"]
    folders = [folder_name(name) for name in names]
    assert len(set(folders)) == len(names)
    for folder in folders:
        assert (Path("out") / folder).resolve().parent == Path("out").resolve()


def test_every_beta_has_files_of_its_own(tmp_path) -> None:
    betas = ["1000000", "1000001", "0.1"]
    words = ["simulate", "--G", "3,0;0,1", "--V", "1,0;0,2", "--tokens", "5", "--t", ".01", "--json"]
    done = CliRunner().invoke(app, [*words, "--beta", ",".join(betas), "--out", str(tmp_path)])
    assert [run["beta"] for run in json.loads(done.stdout)["runs"]] == [float(beta) for beta in betas]
    assert len(list(tmp_path.glob("path_beta_*.safetensors"))) == 3


@pytest.mark.parametrize("out", ["/dev/null", "/proc/x", "text.txt/x", "x" * 5000])
def test_a_folder_that_cannot_be_written_is_refused_before_the_work(out, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("text.txt").write_text("a file")
    words = ["simulate", "--G", "3,0;0,1", "--V", "1,0;0,2", "--tokens", "5", "--t", "1", "--quiet", "--out", out]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 2
    assert "cannot be written" in " ".join(done.stderr.split())
