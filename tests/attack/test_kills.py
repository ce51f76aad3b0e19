"""SIGKILL at a random moment: every file there is whole, and the same command run again gives the same numbers.

Five kills here, one a command; forty in the slow set.
"""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from attack.runs import COMMANDS, complete, whole_files, words
from typer.testing import CliRunner

from attn_flow.cli.app import app


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    """command -> its numbers and how many seconds they took, each computed once."""
    kept: dict[str, tuple[Any, float, list[str]]] = {}

    def run(command: str) -> tuple[Any, float, list[str]]:
        if command not in kept:
            folder = tmp_path_factory.mktemp(command)
            start = time.monotonic()
            found = complete(command, folder)
            kept[command] = found, time.monotonic() - start, whole_files(folder / "out")
        return kept[command]

    return run


def kill(command: str, folder: Path, after: float) -> bool:
    """Start the command, wait for its folder and then so many seconds, and kill it; whether it was still running."""
    code = "import torch; torch.set_num_threads(1); from attn_flow.__main__ import main; main()"
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        [sys.executable, "-c", code, *words(command, folder)],
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    deadline = time.monotonic() + 300
    while not (folder / "out").exists() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.01)
    try:
        process.wait(after)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGKILL)
    return process.wait() == -signal.SIGKILL


def partial_names(out: Path) -> list[str]:
    """What a run keeps for its successor while it is not finished."""
    return [path.name for path in out.rglob("*") if "part" in str(path.relative_to(out))]


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 9))])
@pytest.mark.parametrize("command", COMMANDS)
def test_killed_at_any_moment_it_is_finished_by_the_next_run(command, seed, uninterrupted, tmp_path, record_property):
    expected, seconds, files = uninterrupted(command)
    running = kill(command, tmp_path, random.Random(seed).uniform(0, 0.7 * seconds))
    record_property("killed", running)  # a run that was quicker than expected ends by itself
    assert set(whole_files(tmp_path / "out")) <= {*files, *partial_names(tmp_path / "out")}
    assert complete(command, tmp_path) == expected
    assert set(files) <= set(whole_files(tmp_path / "out"))


@pytest.mark.parametrize("command", COMMANDS)
def test_a_second_writer_is_refused(command, tmp_path):
    """While one run holds the folder another says so; nothing of the first is touched."""
    from attn_flow.base.files import lock_for_writing

    held = {"train": "checkpoint.safetensors", "simulate": "simulate.json", "reproduce": "hardmax.json"}
    name = {**held, "record": "process-0", "probe": "probe.json"}[command]
    with lock_for_writing(tmp_path / "out" / name):
        done = CliRunner().invoke(app, words(command, tmp_path))
    assert done.exit_code == 2, done.stdout
    assert "another run is writing" in " ".join(done.stderr.split())
    assert whole_files(tmp_path / "out") == []
    if command != "probe":  # which takes long, and is completed by the kills above
        complete(command, tmp_path)
