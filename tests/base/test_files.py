"""Files on disk: whole or absent, noticed when they are damaged, and locked while they are written."""

import resource
from pathlib import Path

import pytest
import torch

from attn_flow.base.files import (
    lock_for_writing,
    read_json,
    read_tensors,
    source_digest,
    versions,
    write_tensors,
)

TENSORS = {"a": torch.arange(12.0).view(3, 4), "b": torch.tensor(True), "c": torch.zeros(0, 2, dtype=torch.bfloat16)}
ABOUT = {"format": "test", "about": "a word"}


def test_tensors_are_read_as_they_were_written(tmp_path: Path) -> None:
    write_tensors(TENSORS, tmp_path / "new" / "x.safetensors", ABOUT)
    tensors, about = read_tensors(tmp_path / "new" / "x.safetensors")
    assert about == ABOUT
    assert sorted(tensors) == sorted(TENSORS)
    for name, tensor in TENSORS.items():
        assert torch.equal(tensors[name], tensor)
        assert tensors[name].dtype == tensor.dtype


def test_every_flipped_byte_and_every_cut_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    write_tensors(TENSORS, path, ABOUT)
    whole = path.read_bytes()
    not_padding = [i for i in range(len(whole)) if whole[i : i + 1] != b" "]  # spaces pad the header
    flipped = [whole[:i] + bytes([whole[i] ^ 1]) + whole[i + 1 :] for i in not_padding]
    for content in (*flipped, b"", whole[:5], whole[:100], whole[:-1]):
        path.write_bytes(content)
        with pytest.raises(ValueError, match=r"x\.safetensors is damaged .*move it away"):
            read_tensors(path)
    with pytest.raises(ValueError, match="no file"):
        read_tensors(tmp_path / "nowhere.safetensors")


def test_a_full_disk_keeps_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    write_tensors(TENSORS, path, ABOUT)
    before, limit = path.read_bytes(), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limit[1]))
    try:
        with pytest.raises(OSError, match=r"x\.safetensors could not be written .*too large.*unchanged"):
            write_tensors({"a": torch.zeros(10_000)}, path, ABOUT)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_a_second_writer_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    with lock_for_writing(path), pytest.raises(ValueError, match="another run is writing"), lock_for_writing(path):
        pass
    with lock_for_writing(path):  # released
        pass
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("content", [b'{"a": ', b"\xff"])
def test_what_is_not_json_is_named(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "x.json").write_bytes(content)
    with pytest.raises(ValueError, match=r"x\.json is not JSON"):
        read_json(tmp_path / "x.json")


def test_source_digest_changes_with_content_and_names(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "real" / "one.py").write_text("x = 1")
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "link").symlink_to(tmp_path / "real")  # as hooks/ is inside the package

    def digest() -> str:
        source_digest.cache_clear()
        return source_digest(tmp_path / "package")

    digests = [digest()]
    (tmp_path / "real" / "compiled.pyc").write_bytes(b"")
    assert digest() == digests[0]
    (tmp_path / "real" / "one.py").write_text("x = 2")
    digests.append(digest())
    (tmp_path / "real" / "one.py").rename(tmp_path / "real" / "two.py")
    digests.append(digest())
    assert len(set(digests)) == 3
    source_digest.cache_clear()
    assert versions()["source"] == source_digest()
