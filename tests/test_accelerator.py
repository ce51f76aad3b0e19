"""The library on a simulated accelerator, in a process of its own: torch counts devices at the first backward pass."""

import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.parametrize("marked", ["not slow", pytest.param("slow", marks=pytest.mark.slow)])
def test_on_a_simulated_accelerator(marked: str) -> None:
    """slow: the examples of all public functions, and the probe of a tiny encoder."""
    script = Path(__file__).with_name("on_accelerator.py")
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "no:xdist",
        "-o",
        "addopts=",
        "--import-mode=importlib",
        "-m",
        marked,
        str(script),
    ]
    done = subprocess.run(command, cwd=script.parent.parent, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
    assert " passed" in done.stdout
