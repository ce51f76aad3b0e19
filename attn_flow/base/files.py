"""What is written to disk: tensors and JSON, each in one step so that a reader never sees half a file."""

from __future__ import annotations

import functools
import hashlib
import json
import math
import os
import platform
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from attn_flow.base import checks

try:
    import fcntl
except ImportError:  # Windows: two writers are not noticed there
    fcntl = None  # type: ignore[assignment]

DIGEST = "sha256"  # the word of a tensor file that holds the digest of the rest
PACKAGES = ("attn-flow", "torch", "transformers", "numpy", "scipy", "POT", "geomloss")


@functools.cache
def source_digest(folder: Path = Path(__file__).parent.parent) -> str:
    """Of the package's own code: the version of one that is being worked on, or was updated in its place, stays."""
    files = sorted(Path(top, name) for top, _, names in os.walk(folder, followlinks=True) for name in names)
    whole = hashlib.sha256()
    for file in files:
        if file.suffix in (".py", ".cpp"):
            whole.update(f"{file.relative_to(folder).as_posix()} {file.stat().st_size} ".encode() + file.read_bytes())
    return whole.hexdigest()[:16]


def versions() -> dict[str, str]:
    """The versions a number depends on."""
    found = {"python": platform.python_version(), "source": source_digest()}
    return found | {package: _version(package) for package in PACKAGES}


@functools.cache
def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


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
    """A JSON file of plain values; NaN and infinities become strings."""
    text = json.dumps(plain(content), indent=1, allow_nan=False)
    in_one_step(path, lambda beside: Path(beside).write_text(text + "\n"))


def write_bytes(content: bytes, path: str | os.PathLike[str]) -> None:
    """Anything else: pictures, pages."""
    in_one_step(path, lambda beside: Path(beside).write_bytes(content))


def write_tensors(tensors: dict[str, Tensor], path: str | os.PathLike[str], words: dict[str, str]) -> None:
    """A safetensors file with `words` as its metadata, and a digest of all of it, which `read_tensors` compares."""
    contiguous = {name: tensor.detach().contiguous() for name, tensor in tensors.items()}
    signed = {**words, DIGEST: digest(contiguous, words)}
    in_one_step(path, lambda beside: save_file(contiguous, beside, metadata=signed))


def read_tensors(
    path: str | os.PathLike[str], device: torch.device | str = "cpu"
) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Tensors and words of a file that `write_tensors` wrote; a file that changed since is refused.

    Returns (tensors on `device`, words). ValueError in one sentence if the file is missing, cut short or damaged; a
    safetensors file without words, written by another program, is read as it is.
    """
    checks.instance("path", path, (str, os.PathLike), "the name of a file")
    path = Path(path)
    if not path.is_file():
        raise ValueError(f"no file {path}.")
    try:
        with safe_open(path, framework="pt") as file:
            words = dict(file.metadata() or {})
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is damaged or no safetensors file ({error}); move it away to start over.") from None
    expected = words.pop(DIGEST, None)
    if expected is None and words not in ({}, {"format": "pt"}):
        raise ValueError(
            f"{path} has no digest: it is damaged, or of a version before 0.2; move it away to start over."
        )
    if expected is not None and expected != digest(tensors, words):
        raise ValueError(f"{path} is damaged: its content is not what was written; move it away to start over.")
    return {name: tensor.to(device) for name, tensor in tensors.items()}, words


def digest(tensors: Mapping[str, Tensor], words: Mapping[str, str] | None = None) -> str:
    """SHA-256 of names, dtypes, shapes and bytes of tensors, and of words, whatever their order."""
    total = hashlib.sha256(json.dumps(words or {}, sort_keys=True).encode())
    for name in sorted(tensors):
        tensor = tensors[name].detach()
        total.update(json.dumps([name, str(tensor.dtype), list(tensor.shape)]).encode())
        total.update(tensor.cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return total.hexdigest()


def in_one_step(path: str | os.PathLike[str], write: Callable[[str], Any]) -> None:
    """Write beside the place and move there: a reader, or the next run after a kill, sees the old file or the new.

    write: writes to the file whose name it is given. A full disk is an OSError of one sentence; the old file stays.
    """
    path = Path(path)
    beside = ""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, beside = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        os.close(handle)
        write(beside)
        os.chmod(beside, 0o666 & ~_umask())
        os.replace(beside, path)
    except BaseException as error:
        if beside:
            Path(beside).unlink(missing_ok=True)
        if isinstance(error, OSError | SafetensorError):
            reason = getattr(error, "strerror", None) or error
            raise OSError(f"{path} could not be written ({reason}); what was there before is unchanged.") from None
        raise


@contextmanager
def writing_alone(path: str | os.PathLike[str]) -> Iterator[None]:
    """Nobody else writes `path` during the `with`: a second run on the same files is a ValueError, not a mixture."""
    with _locked(Path(path), wait=False):
        yield


@contextmanager
def writing_in_turn(path: str | os.PathLike[str]) -> Iterator[None]:
    """Nobody else writes `path` during the `with`: others wait. The lock of a process that was killed is none."""
    with _locked(Path(path), wait=True):
        yield


@contextmanager
def _locked(path: Path, wait: bool) -> Iterator[None]:
    path.parent.mkdir(parents=True, exist_ok=True)
    lock = path.with_name(f".lock-{path.name}")
    while True:
        handle = os.open(lock, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            try:
                if fcntl is not None:
                    fcntl.flock(handle, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
                alone = os.path.exists(lock) and os.path.samestat(os.stat(lock), os.fstat(handle))
            except BlockingIOError:
                alone = False
            if alone:
                try:
                    yield
                finally:
                    lock.unlink(missing_ok=True)
                return
            if not wait:  # held by another, or of one that is just leaving
                raise ValueError(f"another run is writing {path}; wait for it, or use another folder.")
        finally:
            os.close(handle)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
