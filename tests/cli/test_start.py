"""How the command line starts: help and completion without torch."""

import os
import signal
import subprocess
import sys
import time

import pytest
import typer
from typer.testing import CliRunner

from attn_flow.cli.app import app

COMMANDS = list(typer.main.get_command(app).commands)  # type: ignore[attr-defined]
LOADS = """
import sys
from attn_flow.cli.app import app
for words in {commands!r}:
    sys.argv = ["attn-flow", *words]
    try:
        app(prog_name="attn-flow")
    except SystemExit as end:
        heavy = [name for name in ("torch", "numpy", "transformers", "matplotlib") if name in sys.modules]
        print("ended", end.code or 0, heavy)
"""


def start(*commands: list[str], **variables: str) -> str:
    """What these commands print, one after another in one process, each followed by its code and what is loaded."""
    code = [sys.executable, "-c", LOADS.format(commands=commands)]
    return subprocess.run(code, env={**os.environ, **variables}, capture_output=True, text=True, check=True).stdout


def test_help_loads_nothing_heavy() -> None:
    commands = [[], *([name] for name in COMMANDS), ["encoders", "get"]]
    said = start(*([*words, "--help"] for words in commands))
    for words in commands:
        assert f"Usage: {' '.join(['attn-flow', *words])} " in said
    assert said.count("ended 0 []\n") == len(commands)


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_knows_commands_and_experiments_and_loads_nothing_heavy(shell: str) -> None:
    for typed, meant, other in (("sim", "simulate", "probe"), ("reproduce multi_", "multi_head", "multiscale")):
        words = f"attn-flow {typed}"
        said = start(
            [],
            _ATTN_FLOW_COMPLETE=f"complete_{shell}",
            COMP_WORDS=words,
            COMP_CWORD=str(len(words.split()) - 1),
            _TYPER_COMPLETE_ARGS=words,
            _TYPER_COMPLETE_FISH_ACTION="get-args",
            _TYPER_COMPLETE_WORD_TO_COMPLETE=words.split()[-1],
        )
        assert meant in said
        assert other not in said
        assert said.endswith("ended 0 []\n")
    assert "attn-flow" in start([], _ATTN_FLOW_COMPLETE=f"source_{shell}")


def test_help_of_train_names_every_task() -> None:
    """The help stands apart from the table of tasks, which needs torch."""
    from attn_flow.train.recipes import TASKS

    words = " ".join(CliRunner().invoke(app, ["train", "--help"]).output.split())
    assert all(task in words for task in TASKS)


def test_waiting_threads_sleep() -> None:
    code = "import os, sys; sys.argv = ['attn-flow', '--version']\nfrom attn_flow.cli.main import main\n"
    code += "try: main()\nexcept SystemExit: print(os.environ['OMP_WAIT_POLICY'])"
    plain = {name: value for name, value in os.environ.items() if name != "OMP_WAIT_POLICY"}
    done = subprocess.run([sys.executable, "-c", code], env=plain, capture_output=True, text=True, check=True)
    assert done.stdout.endswith("PASSIVE\n")


def test_ctrl_c_ends_a_command_inside_a_long_call() -> None:
    """A call of minutes that does not return to Python, as a product of large matrices would be."""
    code = """
import hashlib, sys, typer
from attn_flow.cli import app as commands, main
from attn_flow.cli.console import reporting

def wait() -> None:
    print("waiting", flush=True)
    hashlib.pbkdf2_hmac("sha256", b"", b"", 2**31 - 1)

commands.app = typer.Typer()
commands.app.command()(reporting(wait))
main.main()
"""
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a job in the background ignores it
    )
    try:
        assert process.stdout.readline() == "waiting\n"
        time.sleep(1)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 130
    assert errors == ""  # the command itself had no time to say anything
