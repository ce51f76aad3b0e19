"""Clusters along a path: identities that last, births, merges, splits and deaths."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from attn_flow.base import checks
from attn_flow.dynamics.trajectory import Trajectory
from attn_flow.observe.quantities import clusters


@dataclass(frozen=True)
class Event:
    """Something that happened to clusters between two times of a path."""

    kind: str  # "birth", "merge", "split" or "death"
    t: float  # the later of the two times
    clusters: tuple[int, ...]  # the identities before and after (a merge: those that merged, then the one left)
    cloud: tuple[int, ...] = ()  # which element of the batch


@dataclass(frozen=True, eq=False)
class Track:
    """Clusters with identities that last: a cluster keeps the identity of the largest one it came from."""

    t: list[float]
    labels: Tensor  # (T, ..., n) identity of the cluster of each token; -1 where it is in none
    counts: Tensor  # (T, ...) clusters alive
    events: list[Event]
    tol: float
    min_mass: float


def track(path: Trajectory, tol: float = 1e-2, min_mass: float = 0.02) -> Track:
    """Follow clusters of mass at least min_mass (single linkage at tol) along a path of clouds (T, ..., n, d)."""
    if not isinstance(path, Trajectory):
        raise ValueError(f"path is a {type(path).__name__}, expected a Trajectory.")
    checks.number("min_mass", min_mass)
    if not 0 < min_mass <= 1:
        raise ValueError(f"min_mass = {min_mass}, expected a mass in (0, 1].")
    if len(path) == 0:
        raise ValueError("path has no times, expected at least one.")
    T, n = path.x.shape[0], path.x.shape[-2]
    batch = tuple(path.x.shape[1:-2])
    found = [clusters(x, tol, weights=path.weights, mask=path.mask) for x in path.x]
    raw = torch.stack([torch.where(c.mass >= min_mass, c.labels, -1) for c in found]).cpu()
    mass = path.cloud(0).probabilities.expand(*batch, n).cpu()
    labels, events = torch.full_like(raw, -1), []
    for b in np.ndindex(*batch):
        at = (slice(None), *b)
        labels[at], happened = _identities(raw[at], mass[b], path.t.tolist(), b)
        events += happened
    counts = torch.stack([torch.stack([(row.unique() >= 0).sum() for row in x.reshape(-1, n)]) for x in labels])
    return Track(path.t.tolist(), labels, counts.reshape(T, *batch), events, tol, min_mass)


def _identities(raw: Tensor, mass: Tensor, t: list[float], cloud: tuple[int, ...]) -> tuple[Tensor, list[Event]]:
    """Lasting identities for the labels (T, n) of one cloud, by the mass that clusters of consecutive times share."""
    labels, events, fresh = torch.full_like(raw, -1), [], 0
    for step, row in enumerate(raw):
        before = labels[step - 1] if step else torch.full_like(row, -1)
        parents: dict[int, dict[int, float]] = {}
        for new in row[row >= 0].unique().tolist():
            shared = before[row == new]
            parents[new] = {
                old: float(mass[row == new][shared == old].sum()) for old in shared.unique().tolist() if old >= 0
            }
        taken: dict[int, int] = {}  # old identity -> the new cluster that keeps it: the one sharing most mass
        for new in sorted(parents, key=lambda new: -max(parents[new].values(), default=0.0)):
            free = {old: m for old, m in parents[new].items() if old not in taken}
            if free:
                taken[max(free, key=lambda old: free[old])] = new
        keeps = {new: old for old, new in taken.items()}
        for new, origins in parents.items():
            if new not in keeps:
                keeps[new], fresh = fresh, fresh + 1
                if step and not origins:
                    events.append(Event("birth", t[step], (keeps[new],), cloud))
                elif origins:
                    events.append(Event("split", t[step], (max(origins, key=lambda o: origins[o]), keeps[new]), cloud))
            labels[step][row == new] = keeps[new]
        gone = {old for old in before.unique().tolist() if old >= 0} - set(keeps.values())
        for new, origins in parents.items():
            merged = tuple(sorted(gone & set(origins)))
            if merged:
                everyone = tuple(sorted({*merged, keeps[new]}))
                events.append(Event("merge", t[step], (*everyone, keeps[new]), cloud))
                gone -= set(merged)
        events += [Event("death", t[step], (old,), cloud) for old in sorted(gone)]
    return labels, events
