"""What is written to disk: tensors and JSON, each in one step so that a reader never sees half a file."""

from __future__ import annotations

import json
import math
import os
import platform
import tempfile
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.torch import save_file
from torch import Tensor

PACKAGES = ("attn-flow", "torch", "transformers", "numpy", "scipy", "POT", "geomloss")


def versions() -> dict[str, str]:
    """The versions a number depends on."""
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = "not installed"
    return found


def plain(value: Any) -> Any:
    """Tensors, arrays and numpy numbers as JSON has them; NaN and infinities, which it has not, as strings."""
    if isinstance(value, (Tensor, np.ndarray)):
        return plain(value.tolist())
    if isinstance(value, np.generic):
        return plain(value.item())
    if isinstance(value, dict):
        return {str(key): plain(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(entry) for entry in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


def write_json(content: Any, path: str | os.PathLike[str]) -> None:
    text = json.dumps(plain(content), indent=1, allow_nan=False)
    _in_one_step(path, lambda beside: Path(beside).write_text(text + "\n"))


def write_tensors(tensors: dict[str, Tensor], path: str | os.PathLike[str], words: dict[str, str]) -> None:
    """A safetensors file with `words` as its metadata."""
    contiguous = {name: tensor.detach().contiguous() for name, tensor in tensors.items()}
    _in_one_step(path, lambda beside: save_file(contiguous, beside, metadata=words))


def _in_one_step(path: str | os.PathLike[str], write: Callable[[str], Any]) -> None:
    """Write beside the place and move there."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, beside = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    os.close(handle)
    try:
        write(beside)
        os.chmod(beside, 0o666 & ~_umask())
        os.replace(beside, path)
    except BaseException:
        Path(beside).unlink(missing_ok=True)
        raise


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
