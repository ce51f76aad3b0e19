"""Files that were cut, flipped, emptied or could not be written: one sentence, and nothing lost.

Each command first makes its files; then one is damaged and the command is run again on them, or what reads them is.
"""

import os
import resource
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from attack.runs import COMMANDS, complete, whole_files, words
from safetensors.torch import save_file
from typer.testing import CliRunner

from attn_flow import Trajectory
from attn_flow.cli.app import app
from attn_flow.train import checkpoint, load


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def flip(path: Path) -> None:
    """One bit in the last tenth: in a tensor's bytes, not in the header."""
    content = bytearray(path.read_bytes())
    content[-max(1, len(content) // 10)] ^= 1
    path.write_bytes(content)


def empty(path: Path) -> None:
    path.write_bytes(b"")


def replace_by_text(path: Path) -> None:
    path.write_text("3,0;0,1\n")


DAMAGES = [cut, flip, empty, replace_by_text]


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("trained")
    complete("train", folder)
    return folder


@pytest.fixture(scope="module")
def recorded(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("recorded")
    complete("record", folder)
    return folder


def refused(command: str, folder: Path, says: str) -> None:
    done = CliRunner().invoke(app, words(command, folder))
    said = " ".join(done.stderr.split())
    assert done.exit_code == 2, (said, done.stdout, repr(done.exception))
    assert says in said
    assert "Traceback" not in said


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_is_refused_and_kept(damage, trained, tmp_path):
    shutil.copytree(trained, tmp_path / "run")
    path = tmp_path / "run/out/checkpoint.safetensors"
    damage(path)
    before = path.read_bytes()
    refused("train", tmp_path / "run", "checkpoint.safetensors")
    assert path.read_bytes() == before
    with pytest.raises(ValueError, match=r"checkpoint\.safetensors"):
        load(tmp_path / "run/out")


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_recordings_are_refused(damage, recorded, tmp_path):
    shutil.copytree(recorded, tmp_path / "run")
    damage(tmp_path / "run/out/batch-00000.safetensors")
    refused("record", tmp_path / "run", "batch-00000.safetensors")


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_trajectory_is_refused(damage, trained, tmp_path):
    path = tmp_path / "trajectory.safetensors"
    shutil.copy(trained / "out/trajectory.safetensors", path)
    damage(path)
    with pytest.raises(ValueError, match=r"trajectory\.safetensors"):
        Trajectory.load(path)


@pytest.mark.parametrize(
    ("tensors", "words_of_it"),
    [
        ({}, None),
        ({"x": torch.zeros(2, 3, 2)}, None),
        ({"t": torch.zeros(2), "x": torch.zeros(3, 3, 2)}, None),
        ({"t": torch.zeros(2)}, {"about": "no JSON"}),
        ({"t": torch.zeros(2), "x": torch.zeros(2, 3, 2)}, {"about": "[1]"}),
        ({"t": torch.tensor([1.0, 0.0]), "x": torch.zeros(2, 3, 2)}, {"about": "{}"}),
        ({"t": torch.tensor([0.0, float("nan")]), "x": torch.zeros(2, 3, 2)}, {"about": "{}"}),
        ({"t": torch.zeros(2, 2), "x": torch.zeros(2, 3, 2)}, {"about": "{}"}),
    ],
)
def test_a_crafted_trajectory_is_refused(tensors, words_of_it, tmp_path):
    save_file(tensors, tmp_path / "path.safetensors", metadata=words_of_it)
    with pytest.raises(ValueError):
        Trajectory.load(tmp_path / "path.safetensors")


def test_a_crafted_checkpoint_is_refused(trained, tmp_path):
    from attn_flow.base.files import read_tensors, write_tensors

    _, held = read_tensors(trained / "out/checkpoint.safetensors")
    changes = {
        "other weights": ({"stack.head.weight": torch.zeros(1)}, held),
        "no weights": ({"nothing": torch.zeros(1)}, held),
    }
    for name, (kept, said) in changes.items():
        write_tensors(kept, tmp_path / name / checkpoint.CHECKPOINT, said)
        with pytest.raises(ValueError):
            load(tmp_path / name)


# --- a full disk -----------------------------------------------------------------------------------------------------

LIMITED = """
import resource, signal, sys
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv.pop(1)),) * 2)
import torch
torch.set_num_threads(1)
from attn_flow.cli.app import app
app()
"""


@pytest.mark.skipif(not hasattr(resource, "RLIMIT_FSIZE"), reason="this system limits no file sizes")
@pytest.mark.parametrize(
    "command", [pytest.param(name, marks=[pytest.mark.slow] if name == "probe" else []) for name in COMMANDS]
)
def test_a_full_disk_is_one_sentence_and_loses_nothing(command, tmp_path):
    """No file may grow beyond 1 kB: the command ends with a sentence, and with room again it finishes."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": str(tmp_path)}
    given = words(command, tmp_path)
    done = subprocess.run(
        [sys.executable, "-c", LIMITED, "1000", *given], env=environment, capture_output=True, text=True
    )
    said = " ".join(done.stderr.split())
    assert done.returncode == 2, said
    assert "Traceback" not in said
    assert "File too large" in said or "could not be written" in said
    assert all(path.stat().st_size <= 1000 for path in (tmp_path / "out").rglob("*") if path.is_file())
    whole_files(tmp_path / "out")
    complete(command, tmp_path)
