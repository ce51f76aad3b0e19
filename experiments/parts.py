"""Experiments of many minutes: each finished part is a file, so that a run that was killed goes on where it was."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from attn_flow.base.files import read_json, to_plain, versions, write_json


def kept_part(parts: Path | None, name: str, options: dict[str, Any], compute: Callable[[], Any]) -> Any:
    """What `compute` returns, tensors as lists; from the file parts/NAME.json if a run with the same options wrote it.

    parts: a folder, None to keep nothing. options: all that the part depends on beside the code; versions are added.
    """
    if parts is None:
        return _from_plain(to_plain(compute()))
    content = json.dumps(to_plain({**options, "versions": versions()}), sort_keys=True)
    key = hashlib.sha256(content.encode()).hexdigest()
    path = parts / f"{name}.json"
    if path.is_file():
        saved = read_json(path)
        if saved.get("key") == key:
            return _from_plain(saved["part"])
    part = to_plain(compute())
    write_json({"key": key, "part": part}, path)
    return _from_plain(part)


def _from_plain(value: Any) -> Any:
    """JSON values with the numbers that JSON lacks: "nan", "inf" and "-inf" as floats again."""
    if isinstance(value, dict):
        return {name: _from_plain(entry) for name, entry in value.items()}
    if isinstance(value, list):
        return [_from_plain(entry) for entry in value]
    return float(value) if value in ("nan", "inf", "-inf") else value
