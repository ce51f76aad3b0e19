"""How the command line starts: help and completion without torch, names that were mistyped, silence when asked."""

import os
import subprocess
import sys
from dataclasses import fields

import pytest
import typer
from typer.testing import CliRunner

from attn_flow.cli.entry import app
from attn_flow.hooks.demo import tiny_bert
from attn_flow.train.fields import Fields

COMMANDS = list(typer.main.get_command(app).commands)  # type: ignore[attr-defined]
LOADS = """
import sys
from attn_flow.cli.entry import app
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


def test_the_words_of_a_recipes_fields_name_what_there_is() -> None:
    """They stand apart from the tables they speak of, which need torch."""
    from attn_flow.nn.stack import PLACEMENTS
    from attn_flow.train.recipes import BETA_MODES, GEOMETRIES, STEPS, TASKS, Recipe

    words = {field.name: field.metadata["help"] for field in fields(Recipe)}
    known = {"task": TASKS, "step": STEPS, "geometry": GEOMETRIES, "placement": PLACEMENTS, "beta_mode": BETA_MODES}
    for field, names in known.items():
        assert all(name in words[field] for name in names), field
    assert [field.name for field in fields(Recipe)] == [field.name for field in fields(Fields)]


def test_a_mistyped_encoder_is_told_what_is_near(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my-bert").mkdir()
    for typed, meant in (("minlm", "minilm"), ("my-bret", "my-bert"), (f"{tmp_path}/mybert", f"{tmp_path}/my-bert")):
        done = CliRunner().invoke(app, ["encoder", typed])
        assert done.exit_code == 2
        assert f"no encoder '{typed}': did you mean {meant}? Expected" in done.stderr
    done = CliRunner().invoke(app, ["encoder", "zzz"])
    assert "no encoder 'zzz': expected a folder written by save_pretrained, or one of minilm, " in done.stderr


@pytest.mark.parametrize("quiet", [[], ["--quiet"], ["--json"]], ids=["", "quiet", "json"])
def test_the_loading_bar_is_silent_when_asked(quiet: list[str], tmp_path, capfd) -> None:
    from transformers.utils import logging

    for part in tiny_bert():
        part.save_pretrained(tmp_path / "bert")
    (tmp_path / "texts.txt").write_text("a b c d\nc d e\n")
    record = ["--texts", str(tmp_path / "texts.txt"), "--out", str(tmp_path / "out")]
    for command, options in (("record", record), ("encoder", []), ("spectra", [])):
        capfd.readouterr()
        assert CliRunner().invoke(app, [command, str(tmp_path / "bert"), *options, *quiet]).exit_code == 0
        if quiet:
            assert "it/s" not in capfd.readouterr().err
        assert logging.is_progress_bar_enabled()  # silent only during the loading
