"""Experiments of many minutes: each finished part is a file, so that a run that was killed goes on where it was."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from attn_flow.base.files import read_json, to_plain, versions, write_json


def kept_part(parts: Path | None, name: str, options: dict[str, Any], compute: Callable[[], Any]) -> Any:
    """What `compute` returns, as JSON has it; from the file parts/NAME.json if a run with the same options wrote it.

    parts: a folder, None to keep nothing. options: all that the part depends on beside the code; versions are added.
    """
    if parts is None:
        return to_plain(compute())
    content = json.dumps(to_plain({**options, "versions": versions()}), sort_keys=True)
    key = hashlib.sha256(content.encode()).hexdigest()
    path = parts / f"{name}.json"
    if path.is_file():
        saved = read_json(path)
        if saved.get("key") == key:
            return saved["part"]
    part = to_plain(compute())
    write_json({"key": key, "part": part}, path)
    return part
