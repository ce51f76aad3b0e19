"""Files on disk: written atomically, so that a reader never sees half a file, with digests and versions."""

from __future__ import annotations

import functools
import glob
import hashlib
import json
import math
import os
import platform
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

try:
    import fcntl
except ImportError:  # on Windows two writers are not detected
    fcntl = None  # type: ignore[assignment]

DIGEST_KEY = "sha256"  # the metadata entry of a tensor file with the digest of everything else
PACKAGES = ("attn-flow", "torch", "transformers", "numpy", "scipy", "POT", "geomloss")
FilePath = str | os.PathLike[str]


def write_atomically(path: FilePath, write: Callable[[str], Any]) -> None:
    """Write a temporary file beside `path` and move it there, so that others see the old file or the new one.

    The folder is created. `write` gets the name of the temporary file, which ends as that of `path`.
    """
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{os.getpid()}{path.suffix}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write(str(temporary))
        os.replace(temporary, path)
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or error
        raise OSError(f"{path} could not be written ({reason}); what was there before is unchanged.") from None
    finally:
        with suppress(OSError):
            temporary.unlink()


def write_bytes(content: bytes, path: FilePath) -> None:
    """Write bytes atomically."""
    write_atomically(path, lambda name: Path(name).write_bytes(content))


def write_json(content: Any, path: FilePath) -> None:
    """Write values as JSON atomically, after `to_plain`."""
    write_bytes((json.dumps(to_plain(content), indent=1, allow_nan=False) + "\n").encode(), path)


def read_json(path: FilePath) -> Any:
    """The value in a JSON file; ValueError that names a file which is no JSON."""
    try:
        return json.loads(Path(path).read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not JSON ({error}).") from None


def to_plain(value: Any) -> Any:
    """Tensors, arrays and numpy numbers as JSON values; NaN and infinities, which JSON lacks, as strings."""
    if isinstance(value, (Tensor, np.ndarray, np.generic)):
        return to_plain(value.tolist())
    if isinstance(value, dict):
        return {str(key): to_plain(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_plain(entry) for entry in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def write_tensors(tensors: dict[str, Tensor], path: FilePath, about: dict[str, str]) -> None:
    """Write a safetensors file atomically, with `about` as its metadata and a digest that `read_tensors` compares."""
    contiguous = {name: tensor.detach().contiguous() for name, tensor in tensors.items()}
    signed = {**about, DIGEST_KEY: digest(contiguous, about)}
    write_atomically(path, lambda name: save_file(contiguous, name, metadata=signed))


def read_tensors(path: FilePath, device: torch.device | str = "cpu") -> tuple[dict[str, Tensor], dict[str, str]]:
    """Tensors and metadata of a file of `write_tensors`; ValueError if it is missing or damaged or of other origin."""
    if not Path(path).is_file():
        raise ValueError(f"no file {path}.")
    try:
        with safe_open(path, framework="pt") as file:
            about = dict(file.metadata() or {})
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        if about.pop(DIGEST_KEY, None) != digest(tensors, about):
            raise ValueError("its digest is missing or wrong")
    except (SafetensorError, ValueError) as error:  # a ValueError also of metadata that are not UTF-8
        raise ValueError(f"{path} is damaged or not written by attn_flow ({error}); move it away.") from None
    return {name: tensor.to(device) for name, tensor in tensors.items()}, about


def digest(tensors: Mapping[str, Tensor], about: Mapping[str, str] | None = None) -> str:
    """SHA-256 of the names, dtypes, shapes and bytes of tensors, and of metadata, in any order."""
    total = hashlib.sha256(json.dumps(about or {}, sort_keys=True).encode())
    for name in sorted(tensors):
        tensor = tensors[name].detach()
        total.update(json.dumps([name, str(tensor.dtype), list(tensor.shape)]).encode())
        total.update(tensor.cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return total.hexdigest()


@functools.cache
def source_digest(folder: Path = Path(__file__).parent.parent) -> str:
    """A digest of the source code of the package, which changes with every edit, unlike its version."""
    total = hashlib.sha256()
    for name in sorted(glob.glob("**/*.py", root_dir=folder, recursive=True)):  # it follows links, as of hooks
        content = (folder / name).read_bytes()
        total.update(f"{name} {len(content)} ".encode() + content)
    return total.hexdigest()[:16]


def versions() -> dict[str, str]:
    """The versions that a result depends on: python, the source digest, and PACKAGES."""
    installed = {found.name: found.version for found in metadata.distributions() if found.name in PACKAGES}
    known = {"python": platform.python_version(), "source": source_digest()}
    return known | {package: installed.get(package, "not installed") for package in PACKAGES}


@contextmanager
def lock_for_writing(path: FilePath) -> Iterator[None]:
    """Hold a lock on `path` inside the context, so that two runs do not mix their files; ValueError if another has it.

    The lock is a file beside `path`. The lock of a killed process is void.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    lock = path.with_name(f".lock-{path.name}")
    with lock.open("a") as file:
        try:
            if fcntl is not None:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(f"another run is writing {path}; wait for it, or use another folder.") from None
        try:
            yield
        finally:
            lock.unlink(missing_ok=True)
