"""The library on a simulated accelerator, in a process of its own: torch counts devices at the first backward pass."""

import subprocess
import sys
from pathlib import Path


def test_on_a_simulated_accelerator() -> None:
    script = Path(__file__).with_name("on_accelerator.py")
    options = ["-p", "no:xdist", "-o", "addopts=", "--import-mode=importlib"]
    command = [sys.executable, "-m", "pytest", *options, str(script)]
    result = subprocess.run(command, cwd=script.parent.parent, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout[-5000:] + result.stderr[-2000:]
    assert " passed" in result.stdout
