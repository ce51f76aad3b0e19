"""How the cloud evolves through the layers, and a view of it in three dimensions."""

from __future__ import annotations

import torch
from torch import Tensor

from attn_flow.dynamics.trajectory import Trajectory
from attn_flow.observe import quantities
from attn_flow.observe.tracking import track
from attn_flow.probe.clouds import Clouds, directions

BINS = 80  # of the pairwise-cosine histograms
BETAS = (1.0, 4.0, 16.0, 64.0)  # of the energies
CLUSTER = 0.5  # tokens within this distance (cosine .875) count as one cluster
EVENTS = {"birth": "births", "merge": "merges", "split": "splits", "death": "deaths"}  # of clusters, by level
SHOWN = 400  # tokens in the three-dimensional view


def cloud_evolution(clouds: Clouds) -> dict[str, Tensor]:
    """Levels x texts: mean pairwise cosine, effective rank, log energies, clusters; histograms of pairwise cosines."""
    levels, T = len(clouds.z), clouds.texts
    cosine, rank, count = (torch.zeros(levels, T, dtype=torch.float64) for _ in range(3))
    events = {kind: torch.zeros(levels, T, dtype=torch.float64) for kind in EVENTS}
    energy = torch.zeros(len(BETAS), levels, T, dtype=torch.float64)
    histogram = torch.zeros(levels, BINS, dtype=torch.float64)
    for level in range(levels):
        for t in range(T):
            x = directions(clouds.z[level][t])
            masses, edges = quantities.pairwise_cosines(x, BINS)
            histogram[level] += masses / T
            n = len(x)
            cosine[level, t] = (float(x.sum(0).square().sum()) - n) / (n * (n - 1))  # i != j
            rank[level, t] = quantities.effective_rank(x)
            count[level, t] = quantities.clusters(x, CLUSTER).counts
            for i, beta in enumerate(BETAS):
                energy[i, level, t] = quantities.log_energy(x, beta)
    for t in range(T):
        x = torch.stack([directions(clouds.z[level][t]) for level in range(levels)])
        path = Trajectory(torch.arange(levels, dtype=torch.float64), x)
        for event in track(path, CLUSTER, min_mass=min(1.0, 2 / x.shape[1])).events:  # of two tokens or more
            events[event.kind][int(event.t), t] += 1
    return {
        **{f"evolution/{EVENTS[kind]}": value for kind, value in events.items()},
        "evolution/cosine": cosine,
        "evolution/effective_rank": rank,
        "evolution/clusters": count,
        "evolution/log_energy": energy,
        "evolution/histogram": histogram,
        "evolution/edges": edges,
    }


def token_view(clouds: Clouds, generator: torch.Generator) -> dict[str, Tensor]:
    """A sample of tokens through the layers, in the three leading directions of all levels together."""
    places = [(t, i) for t in range(clouds.texts) for i in range(len(clouds.special[t]))]
    order = torch.randperm(len(places), generator=generator)[:SHOWN].tolist()
    chosen = sorted(places[i] for i in order)
    x = torch.stack([torch.stack([directions(level[t][i : i + 1])[0] for t, i in chosen]) for level in clouds.z])
    flat = x.reshape(-1, x.shape[-1])
    centred = flat - flat.mean(0)
    axes = torch.linalg.eigh(centred.T @ centred)[1][:, -3:].flip(-1)
    return {"view": (centred @ axes).reshape(*x.shape[:2], 3).float(), "view_place": torch.tensor(chosen)}
