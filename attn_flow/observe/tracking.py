"""Clusters along a trajectory: identities that persist, and their births, merges, splits and deaths."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from attn_flow.dynamics.trajectory import Trajectory
from attn_flow.observe.quantities import clusters


@dataclass(frozen=True)
class Event:
    """A change of the clusters between two times of a trajectory.

    Args:
        kind: "birth", "merge", "split" or "death".
        t: the later of the two times.
        clusters: identities before and after. For a merge, those that merged and then the one that remains.
        cloud: index in the batch.
    """

    kind: str
    t: float
    clusters: tuple[int, ...]
    cloud: tuple[int, ...] = ()


@dataclass(frozen=True, eq=False)
class Track:
    """Clusters with identities that persist: a cluster keeps the identity of the one it shares most mass with.

    Args:
        t: times (T).
        labels: (T, ..., n), the identity of each token's cluster, -1 if it is in none.
        counts: (T, ...), the number of clusters.
        events: in the order of clouds and times.
    """

    t: list[float]
    labels: Tensor
    counts: Tensor
    events: list[Event]


def track(path: Trajectory, tol: float = 1e-2, min_mass: float = 0.02) -> Track:
    """Follow the clusters of a trajectory.

    Args:
        path: clouds (T, ..., n, d) at T >= 1 times.
        tol: the largest distance between linked tokens, as in `clusters`.
        min_mass: lighter clusters are ignored; a mass in (0, 1].

    Returns:
        A `Track` with labels, counts and events, on the CPU.

    Example:
        >>> path = Trajectory(torch.tensor([0.0, 1.0]), torch.tensor([[[0.0], [5.0]], [[2.0], [2.0]]]))
        >>> track(path).events
        [Event(kind='merge', t=1.0, clusters=(0, 1, 0), cloud=())]
    """
    if not 0 < min_mass <= 1:
        raise ValueError(f"min_mass = {min_mass}, expected a mass in (0, 1].")
    parts = [clusters(path.cloud(i), tol) for i in range(len(path))]
    components = torch.stack([torch.where(part.mass >= min_mass, part.labels, -1) for part in parts]).cpu()
    mass = path.cloud(0).probabilities.expand(components.shape[1:]).cpu()
    t: list[float] = path.t.tolist()
    labels, events = torch.full_like(components, -1), []
    for b in np.ndindex(*components.shape[1:-1]):
        labels[(slice(None), *b)], new_events = _identities(components[(slice(None), *b)], mass[b], t, b)
        events += new_events
    rows = labels.reshape(-1, labels.shape[-1])
    counts = torch.tensor([len(set(row) - {-1}) for row in rows.tolist()]).reshape(labels.shape[:-1])
    return Track(t, labels, counts, events)


def _identities(components: Tensor, mass: Tensor, t: list[float], cloud: tuple[int, ...]) -> tuple[Tensor, list[Event]]:
    """Identities for the components (T, n) of one cloud, by the mass that clusters of consecutive times share."""
    labels, events, next_identity = torch.full_like(components, -1), [], 0
    for step, row in enumerate(components):
        previous = labels[step - 1] if step else torch.full_like(row, -1)
        # For every cluster, the identities at the time before and the mass that it shares with them.
        parents: dict[int, dict[int, float]] = {}
        for component in row[row >= 0].unique().tolist():
            is_member = row == component
            identities = [i for i in previous[is_member].unique().tolist() if i >= 0]
            parents[component] = {i: float(mass[is_member & (previous == i)].sum()) for i in identities}
        identity: dict[int, int] = {}  # of the clusters that keep one, those that share most mass first
        for component in sorted(parents, key=lambda c: -max(parents[c].values(), default=0.0)):
            free = {i: shared for i, shared in parents[component].items() if i not in identity.values()}
            if free:
                identity[component] = max(free, key=lambda i: free[i])
        for component, origins in parents.items():
            if component not in identity:
                identity[component], next_identity = next_identity, next_identity + 1
                if origins:
                    largest = max(origins, key=lambda i: origins[i])
                    events.append(Event("split", t[step], (largest, identity[component]), cloud))
                elif step:
                    events.append(Event("birth", t[step], (identity[component],), cloud))
            labels[step][row == component] = identity[component]
        lost = set(previous.tolist()) - {-1} - set(identity.values())
        for component, origins in parents.items():
            merged = lost & set(origins)
            if merged:
                everyone = tuple(sorted({*merged, identity[component]}))
                events.append(Event("merge", t[step], (*everyone, identity[component]), cloud))
                lost -= merged
        events += [Event("death", t[step], (i,), cloud) for i in sorted(lost)]
    return labels, events
