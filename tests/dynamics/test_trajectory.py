"""Paths of clouds: indexing, exact round trips, and files that are whole or absent."""

import os
import stat
from pathlib import Path

import pytest
import torch

from attn_flow import Attention, Sphere, Trajectory, flow
from attn_flow.base import files


@pytest.fixture
def path() -> Trajectory:
    x0 = Sphere().uniform((2, 5), 3, generator=torch.Generator().manual_seed(0))
    mask = torch.tensor([[True] * 5, [True] * 3 + [False] * 2])
    run = flow(Attention.identity(3, 2.0), x0, torch.linspace(0, 1, 7), weights=torch.rand(5), mask=mask)
    return Trajectory(run.t, run.x, run.weights, run.mask, run.about, {"words": ["a", "b", "é", "d", "e"]})


def same(a: Trajectory, b: Trajectory) -> bool:
    tensors = [(a.t, b.t), (a.x, b.x), (a.weights, b.weights), (a.mask, b.mask)]
    equal = all(
        (p is None and q is None) or (p is not None and q is not None and torch.equal(p, q)) for p, q in tensors
    )
    dtypes = all(p is None or (q is not None and p.dtype == q.dtype) for p, q in tensors)
    return equal and dtypes and a.about == b.about and a.labels == b.labels


def test_indexing(path: Trajectory) -> None:
    assert len(path) == 7
    assert torch.equal(path[2].x, path.x[2:3])
    assert torch.equal(path[-1].t, path.t[-1:])
    assert torch.equal(path[1:5:2].t, path.t[1:5:2])
    assert torch.equal(path[torch.tensor([0, 3])].x, path.x[[0, 3]])
    assert path[2:4].labels == path.labels
    with pytest.raises(IndexError, match=r"time index 7 of a path of 7 times"):
        path[7]
    clouds = list(path)
    assert len(clouds) == 7
    assert torch.equal(clouds[3].x, path.x[3])
    assert clouds[3].mask is path.mask
    assert clouds[3].weights is path.weights


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_round_trip_is_exact(path: Trajectory, tmp_path: Path, dtype: torch.dtype) -> None:
    path = Trajectory(path.t, path.x.to(dtype), path.weights, path.mask, path.about, path.labels)
    file = tmp_path / "deep" / "path.safetensors"
    path.save(file)
    assert same(Trajectory.load(file), path)
    bare = Trajectory(path.t, path.x)
    bare.save(file)
    assert same(Trajectory.load(file), bare)
    assert [f.name for f in file.parent.iterdir()] == ["path.safetensors"]


def test_a_saved_view_of_a_batch_is_whole(tmp_path: Path) -> None:
    x = torch.randn(4, 6, 3).mT.expand(2, 4, 3, 6).transpose(0, 1)  # neither contiguous nor with memory of its own
    view = Trajectory(torch.arange(4.0), x)
    view.save(tmp_path / "view")
    assert same(Trajectory.load(tmp_path / "view"), view)


def test_a_failed_save_leaves_the_old_file(path: Trajectory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "path"
    path.save(file)

    def fails(*_: object, **__: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(files, "save_file", fails)
    with pytest.raises(OSError, match="disk full"):
        path[:2].save(file)
    assert same(Trajectory.load(file), path)
    assert os.listdir(tmp_path) == ["path"]


def test_a_saved_file_has_the_usual_permissions(path: Trajectory, tmp_path: Path) -> None:
    path.save(tmp_path / "path")
    (tmp_path / "other").touch()
    modes = [stat.S_IMODE((tmp_path / name).stat().st_mode) for name in ("path", "other")]
    assert modes[0] == modes[1]


def test_other_files_are_refused(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    save_file({"x": torch.zeros(2)}, tmp_path / "other")
    with pytest.raises(ValueError, match=r"other is no saved Trajectory; expected a file written by Trajectory.save"):
        Trajectory.load(tmp_path / "other")


def test_shapes_are_checked() -> None:
    with pytest.raises(ValueError, match=r"t has shape \(3,\) and x \(2, 4, 3\), expected \(T,\) and \(T, ..., n, d\)"):
        Trajectory(torch.arange(3.0), torch.zeros(2, 4, 3))
    with pytest.raises(ValueError, match=r"mask has shape \(5,\), expected \(..., n\) = \(4,\) to match x"):
        Trajectory(torch.arange(2.0), torch.zeros(2, 4, 3), mask=torch.ones(5, dtype=torch.bool))
    with pytest.raises(ValueError, match=r"weights have shape \(5,\), expected \(..., n\) = \(4,\) to match x"):
        Trajectory(torch.arange(2.0), torch.zeros(2, 4, 3), weights=torch.ones(5))
