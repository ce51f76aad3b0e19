"""Files on disk: whole or absent, and noticed when they are no longer what was written."""

import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from attn_flow.base.files import read_tensors, source_digest, versions, write_json, write_tensors
from attn_flow.dynamics.trajectory import Trajectory

TENSORS = {"a": torch.arange(12.0).view(3, 4), "b": torch.tensor(True), "c": torch.zeros(0, 2, dtype=torch.bfloat16)}
WORDS = {"format": "test", "about": "a word"}


@contextmanager
def small_disk(size: int) -> Iterator[None]:
    """No file of this process grows beyond so many bytes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_what_was_written_is_read(tmp_path: Path) -> None:
    write_tensors(TENSORS, tmp_path / "x.safetensors", WORDS)
    tensors, words = read_tensors(tmp_path / "x.safetensors")
    assert words == WORDS
    assert sorted(tensors) == sorted(TENSORS)
    for name, tensor in TENSORS.items():
        assert torch.equal(tensors[name], tensor)
        assert tensors[name].dtype == tensor.dtype


def test_every_flipped_byte_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    write_tensors(TENSORS, path, WORDS)
    whole = path.read_bytes()
    for place in range(len(whole)):
        if whole[place : place + 1] in (b" ", b"\n"):
            continue  # padding of the header says nothing
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        with pytest.raises(ValueError, match="damaged"):
            read_tensors(path)


@pytest.mark.parametrize("kept", [0, 5, 100, -1])
def test_a_file_cut_short_is_noticed(tmp_path: Path, kept: int) -> None:
    path = tmp_path / "path.safetensors"
    Trajectory(torch.arange(2.0), torch.randn(2, 3, 4)).save(path)
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(ValueError, match=r"path\.safetensors is damaged .*move it away"):
        Trajectory.load(path)
    with pytest.raises(ValueError, match="no file"):
        Trajectory.load(tmp_path / "nowhere.safetensors")


def test_a_full_disk_keeps_the_old_file(tmp_path: Path) -> None:
    tensors, words = tmp_path / "x.safetensors", tmp_path / "x.json"
    write_tensors({"a": torch.zeros(3)}, tensors, WORDS)
    write_json({"a": 1}, words)
    before = tensors.read_bytes(), words.read_bytes()
    with small_disk(1000):
        with pytest.raises(OSError, match=r"x\.safetensors could not be written .*too large.*unchanged"):
            write_tensors({"a": torch.zeros(10_000)}, tensors, WORDS)
        with pytest.raises(OSError, match=r"x\.json could not be written .*too large.*unchanged"):
            write_json({"a": list(range(1000))}, words)
    assert (tensors.read_bytes(), words.read_bytes()) == before
    assert sorted(p.name for p in tmp_path.iterdir()) == ["x.json", "x.safetensors"]


def test_code_that_changed_is_another_version(tmp_path: Path) -> None:
    """What a run keeps for its successor was computed by some code: its content counts, and the names of its files."""
    for name, text in {"one.py": "x = 1", "two/three.py": "y = 2", "two/kernel.cpp": "int z;"}.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)

    def digest() -> str:
        source_digest.cache_clear()
        return source_digest(tmp_path)

    first = digest()
    (tmp_path / "two" / "compiled.pyc").write_bytes(b"nothing")
    assert digest() == first
    seen = {first}
    for change in (
        lambda: (tmp_path / "one.py").write_text("x = 2"),
        lambda: (tmp_path / "two" / "kernel.cpp").write_text("int w;"),
        lambda: (tmp_path / "two" / "three.py").rename(tmp_path / "two" / "four.py"),
        lambda: (tmp_path / "five.py").write_text(""),
    ):
        change()
        seen.add(digest())
    assert len(seen) == 5
    linked = tmp_path / "linked"  # as hooks/ and experiments/ are inside the package
    linked.mkdir()
    (linked / "two").symlink_to(tmp_path / "two")
    source_digest.cache_clear()
    before = source_digest(linked)
    (tmp_path / "two" / "four.py").write_text("y = 3")
    source_digest.cache_clear()
    assert source_digest(linked) != before
    source_digest.cache_clear()
    assert versions()["source"] == source_digest()
