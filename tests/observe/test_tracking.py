"""Identities of clusters along a trajectory, and the events in between."""

import pytest
import torch

from attn_flow import Attention, Sphere, Trajectory, flow
from attn_flow.observe.tracking import Track, track

F64 = torch.float64


def line(*clouds: list[float], weights: list[float] | None = None) -> Trajectory:
    """A trajectory of tokens on a line at the times 0, 1, 2, ..."""
    t = torch.arange(float(len(clouds)), dtype=F64)
    return Trajectory(t, torch.tensor(clouds, dtype=F64)[..., None], None if weights is None else torch.tensor(weights))


def events(result: Track) -> list[tuple]:
    return [(event.kind, event.t, event.clusters) for event in result.events]


def test_births_merges_splits_and_deaths() -> None:
    path = line(
        [0.0, 0.0, 5.0, 5.0, 9.0, 12.0],  # two clusters, two single tokens
        [0.0, 0.0, 5.0, 5.0, 9.0, 9.0],  # a birth
        [0.0, 0.0, 5.0, 5.0, 5.0, 5.0],  # a merge
        [0.0, 3.0, 5.0, 5.0, 7.0, 7.0],  # a death and a split
    )
    result = track(path, tol=0.1, min_mass=0.3)
    assert result.counts.tolist() == [2, 3, 2, 2]
    assert result.labels[:2].tolist() == [[0, 0, 1, 1, -1, -1], [0, 0, 1, 1, 2, 2]]
    expected = [("birth", 1.0, (2,)), ("merge", 2.0, (1, 2, 1)), ("split", 3.0, (1, 3)), ("death", 3.0, (0,))]
    assert events(result) == expected


@pytest.mark.parametrize(("weights", "heavier"), [([1.0, 1, 1, 9, 9], 1), ([9.0, 9, 9, 1, 1], 0)])
def test_the_heavier_part_keeps_its_identity(weights: list[float], heavier: int) -> None:
    apart = [0.0, 0.0, 0.0, 5.0, 5.0]
    result = track(line(apart, [0.0] * 5, apart, weights=weights), tol=0.1, min_mass=0.05)
    assert result.labels[0].tolist() == [0, 0, 0, 1, 1]
    assert result.labels[1].tolist() == [heavier] * 5
    assert result.labels[2].tolist() == ([2, 2, 2, 1, 1] if heavier else [0, 0, 0, 2, 2])
    assert events(result) == [("merge", 1.0, (0, 1, heavier)), ("split", 2.0, (heavier, 2))]


def test_a_split_comes_from_the_heavier_of_its_origins() -> None:
    """Of clusters A (10 tokens) and B (9), 6 of A stay, 4 of B stay, 2 of A and 5 of B meet, 2 leave A."""
    after = [0.0] * 6 + [2.5] * 2 + [9.0] * 2 + [5.0] * 4 + [2.5] * 5
    result = track(line([0.0] * 10 + [5.0] * 9, after), tol=0.1, min_mass=0.15)
    # The new cluster shares 5 with B, more than the 4 that stay: it is B, and those that stay are new.
    assert result.labels[1].tolist() == [0] * 6 + [1] * 2 + [-1] * 2 + [2] * 4 + [1] * 5
    assert events(result) == [("split", 1.0, (1, 2))]


def test_clusters_count_from_their_least_mass() -> None:
    path = line([0.0] * 4 + [5.0] * 3 + [9.0])
    assert [int(track(path, 0.1, m).counts[0]) for m in (0.125, 0.13, 0.375, 0.38, 1.0)] == [3, 2, 2, 1, 0]
    assert [int(track(line([0.0, distance])).counts[0]) for distance in (0.9e-2, 1.1e-2)] == [1, 2]
    for min_mass in (0.0, 1.01):
        with pytest.raises(ValueError, match=r"expected a mass in \(0, 1\]"):
            track(path, min_mass=min_mass)


def test_a_batch_is_a_loop() -> None:
    x0 = Sphere().uniform((2, 30), 2, dtype=F64, generator=torch.Generator().manual_seed(0))
    path = flow(Attention.identity(2, 9.0).to(F64), x0, torch.linspace(0, 12, 7), h=0.1)
    both = track(path, tol=0.05, min_mass=0.1)
    for b in range(2):
        one = track(Trajectory(path.t, path.x[:, b]), tol=0.05, min_mass=0.1)
        assert torch.equal(both.labels[:, b], one.labels)
        assert [(e.kind, e.t, e.clusters) for e in both.events if e.cloud == (b,)] == events(one)
