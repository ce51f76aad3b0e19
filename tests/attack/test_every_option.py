"""Every option of the commands that load no encoder, as the commands tell them, with values that are never right: exit
code 2, a sentence, no file. What a stranger may mean is in MEANT.
"""

import os
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from attn_flow.cli.entry import app

GV = ["--G", "3,0;0,1", "--V", "1,0;0,2"]
SMALL = ["--updates", "1", "--dim", "4", "--batch", "4", "--tokens", "4", "--no-learned", "--no-tensorboard", "--quiet"]
BASE = {
    "limit": ["limit", *GV],
    "simulate": ["simulate", *GV, "--tokens", "5", "--t", "1", "--beta", "2", "--quiet"],
    "density": ["simulate", *GV, "--density", "2", "--t", ".1", "--beta", "2", "--quiet"],
    "play": ["play", "--no-open"],
    "merge": ["merge", "folder"],
    "train": ["train", "majority", *SMALL, "--out", "run"],
    "predict": ["predict", "run", "x"],
}
NUMBERS = ["nan", "-1", "", "nonsense", "1e400", "1" + "0" * 30, "0.5,"]
PLACES = ["fifo", "/dev/null", "/proc/x", "loop", "two.txt/x", "x" * 5000]
WORDS = ["nonsense", "\x1b[2J\n", "../..", "x" * 5000]
# beta = inf is one; so is a large one; an end of time may be given as the first of several; any folder may be made.
MEANT = {("beta", "1e400"), ("beta", "1" + "0" * 30), ("beta", "0.5,"), ("t", "0.5,"), ("density", "0.5,")}
MEANT |= {("out", "nonsense"), ("out", "\x1b[2J\n"), ("out", "../..")}


def options(command: str) -> dict[str, type]:
    """What a command can be told, and of which type, without its flags."""
    found = typer.main.get_command(app).commands[BASE[command][0]]  # type: ignore[attr-defined]
    return {
        p.name: getattr(p, "bare_type", None) or {"integer": int, "float": float}.get(p.type.name.split()[0], str)
        for p in found.params
        if p.param_type_name == "option" and not p.is_flag and p.name != "help"
    }


@pytest.fixture
def place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("two.txt").write_text("Tokens move.\nThey meet.\n")
    Path("folder").mkdir()
    os.symlink("loop", "loop")
    if hasattr(os, "mkfifo"):
        os.mkfifo("fifo")
    return tmp_path


@pytest.mark.parametrize("command", BASE)
def test_no_option_takes_what_is_none(command, place):
    before, wrong = sorted(place.rglob("*")), []
    assert options(command)
    for name, kind in options(command).items():
        number = kind in (int, float) or name in ("beta", "t", "G", "V", "x0")
        for value in NUMBERS if number else (*PLACES, *WORDS):
            if (name, value) in MEANT:
                continue
            done = CliRunner().invoke(app, [*BASE[command], f"--{name.replace('_', '-')}={value}"])
            said = " ".join(done.stderr.split())
            files = [str(path) for path in sorted(place.rglob("*")) if path not in before and path.is_file()]
            fine = done.exit_code == 2 and isinstance(done.exception, SystemExit) and len(said) > 20 and not files
            if not fine or "Traceback" in said or "\x1b[2J" in done.stderr:
                wrong.append(f"--{name}={value[:20]!r}: {done.exit_code}, {said[:100]}, {files[:2]}")
    assert not wrong, "\n".join(wrong)
