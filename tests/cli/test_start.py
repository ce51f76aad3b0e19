"""How the command line starts: help and completion without torch."""

import os
import re
import subprocess
import sys

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
    commands = [[], *([name] for name in COMMANDS)]
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


@pytest.mark.parametrize("command", COMMANDS)
def test_help_fits_a_screen(command: str) -> None:
    lines = CliRunner().invoke(app, [command, "--help"], terminal_width=80).output.splitlines()
    assert len(lines) <= 40
    assert max(map(len, lines)) <= 80


def test_help_of_train_has_every_task_and_its_defaults() -> None:
    """The help stands apart from the table of tasks, which needs torch."""
    from attn_flow.train.recipes import TASKS, recipe

    recipes = [recipe(task) for task in TASKS]
    words = CliRunner().invoke(app, ["train", "--help"], terminal_width=120).output
    assert all(task in words for task in TASKS)
    for name in ("tokens", "dim", "heads", "depth", "horizon", "steps", "beta", "updates", "batch", "lr", "seed"):
        values = [f"{getattr(each, name):g}" for each in recipes]
        shown = values[0] if len(set(values)) == 1 else ", ".join(values)
        assert re.search(rf"--{name} .*\[default: \({shown}\)\]", words), name


VARIABLES = ("OMP_WAIT_POLICY", "OPENBLAS_NUM_THREADS")


def test_waiting_threads_sleep() -> None:
    code = "import os, sys; sys.argv = ['attn-flow', '--version']\nfrom attn_flow.__main__ import main\n"
    code += f"try: main()\nexcept SystemExit: print(*map(os.environ.get, {VARIABLES}))"
    plain = {name: value for name, value in os.environ.items() if name not in VARIABLES}
    done = subprocess.run([sys.executable, "-c", code], env=plain, capture_output=True, text=True, check=True)
    assert done.stdout.endswith("PASSIVE 1\n")
