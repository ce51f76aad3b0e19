"""The library on a simulated accelerator, in a process of its own: torch counts devices at the first backward pass."""

import subprocess
import sys
from pathlib import Path

import pytest
from torch.utils import backend_registration


@pytest.mark.skipif(
    not hasattr(backend_registration, "_setup_privateuseone_for_python_backend"),
    reason="this torch cannot register a device that is written in Python",
)
def test_on_a_simulated_accelerator() -> None:
    script = Path(__file__).with_name("on_accelerator.py")
    options = ["-p", "no:xdist", "-o", "addopts=", "--import-mode=importlib"]
    command = [sys.executable, "-m", "pytest", *options, str(script)]
    result = subprocess.run(command, cwd=script.parent.parent, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout[-5000:] + result.stderr[-2000:]
    assert " passed" in result.stdout
