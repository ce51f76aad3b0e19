"""The five commands that write folders, as small runs, and what is asked of their files."""

import json
from pathlib import Path
from typing import Any

from safetensors import safe_open
from typer.testing import CliRunner

from attn_flow.base.files import read_tensors
from attn_flow.cli.app import app

TEXTS = [f"The {i}th token follows its own query to the nearest key, and rests there." for i in range(24)]
COMMANDS = {
    "simulate": ["--G", "3,0;0,1", "--V", "1,0;0,2", "--beta", "5,20,50", "--tokens", "60", "--t", "3"],
    "reproduce": ["hardmax", "--quick"],
    "train": ["majority", "--updates", "60", "--dim", "8", "--batch", "8"],
    "record": ["minilm", "--texts", "TEXTS", "--batch", "2"],
    "probe": ["minilm", "--texts", "TEXTS", "--max-length", "40"],
}
PASSING = {"seconds", "resumed_at", "versions", "at"}  # what may differ between two runs


def words(command: str, folder: Path) -> list[str]:
    texts = folder / "texts.txt"
    texts.parent.mkdir(parents=True, exist_ok=True)
    if not texts.exists():
        joined = TEXTS if command == "record" else [" ".join(TEXTS[i : i + 6]) for i in range(0, 24, 6)]
        texts.write_text("\n".join(joined))
    given = [str(texts) if word == "TEXTS" else word for word in COMMANDS[command]]
    return [command, *given, "--out", str(folder / "out"), "--json"]


def complete(command: str, folder: Path) -> dict[str, Any]:
    done = CliRunner().invoke(app, words(command, folder))
    assert done.exit_code == 0, done.stderr + repr(done.exception)
    return numbers(json.loads(done.stdout), folder)


def numbers(found: Any, folder: Path) -> Any:
    """Without times of day and the names of folders."""
    if isinstance(found, dict):
        return {name: numbers(value, folder) for name, value in found.items() if name not in PASSING}
    if isinstance(found, list):
        return [numbers(value, folder) for value in found]
    return found.replace(str(folder), "FOLDER") if isinstance(found, str) else found


def whole_files(out: Path) -> list[str]:
    """The files under their own names, each read to its end."""
    seen = []
    for path in sorted(out.rglob("*")):
        if path.is_dir() or path.name.startswith("."):
            continue  # .lock-* and what was being written
        if path.suffix == ".json":
            json.loads(path.read_text())
        if path.suffix == ".safetensors":
            read_tensors(path)
            with safe_open(path, framework="pt") as file:
                assert file.metadata()
        if path.suffix == ".png":
            assert path.read_bytes().endswith(b"IEND\xaeB`\x82")
        if path.suffix == ".html":
            assert path.read_text().rstrip().endswith("</html>")
        seen.append(path.name)
    return seen
