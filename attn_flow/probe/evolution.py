"""How the cloud evolves through the layers, and a view of it in three dimensions."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from attn_flow.base.processes import ALONE, Processes
from attn_flow.base.threads import limit_threads
from attn_flow.dynamics.trajectory import Trajectory
from attn_flow.observe import quantities
from attn_flow.observe.tracking import track
from attn_flow.probe.clouds import Clouds, directions

BINS = 80  # of the pairwise-cosine histograms
BETAS = (1.0, 4.0, 16.0, 64.0)  # of the energies
CLUSTER = 0.5  # tokens within this distance (cosine .875) count as one cluster
SHOWN = 400  # tokens in the three-dimensional view


@dataclass(frozen=True, eq=False)
class Evolution:
    """Clouds as directions, level by level: (levels, texts) unless said.

    pairwise_cosine: mean of cos(x_i, x_j) over i != j. effective_rank, clusters; merges, splits: of clusters of two
    tokens or more, by the level at which they happen. log_energy (betas, levels, texts). histogram (levels, bins) of
    pairwise cosines with its edges (bins + 1,).
    """

    pairwise_cosine: Tensor
    effective_rank: Tensor
    clusters: Tensor
    merges: Tensor
    splits: Tensor
    log_energy: Tensor
    histogram: Tensor
    edges: Tensor


@dataclass(frozen=True, eq=False)
class View:
    """A sample of tokens in the three leading directions of all levels together: x (levels, tokens, 3), their texts
    and places (tokens,)."""

    x: Tensor
    text: Tensor
    place: Tensor


def cloud_evolution(clouds: Clouds, world: Processes = ALONE) -> Evolution:
    """The numbers of every level and text; zero for the texts of other processes (see `evolution_of_all`)."""
    levels, T = len(clouds.z), clouds.texts
    cosine, rank, count, merges, splits = (torch.zeros(levels, T, dtype=torch.float64) for _ in range(5))
    energy = torch.zeros(len(BETAS), levels, T, dtype=torch.float64)
    histogram = torch.zeros(levels, BINS, dtype=torch.float64)
    edges = torch.zeros(BINS + 1, dtype=torch.float64)
    for t in range(world.rank, T, world.count):
        x = torch.stack([directions(level[t]) for level in clouds.z])
        n = x.shape[1]
        masses, edges = quantities.pairwise_cosines(x, BINS)
        histogram += masses.cpu() / T
        cosine[:, t] = (x.sum(1).square().sum(-1) - n).cpu() / (n * (n - 1))  # i != j
        with limit_threads(1):
            rank[:, t] = quantities.effective_rank(x).cpu()
        count[:, t] = quantities.clusters(x, CLUSTER).counts.double().cpu()
        for i, beta in enumerate(BETAS):
            energy[i, :, t] = quantities.log_energy(x, beta).cpu()
        path = Trajectory(torch.arange(levels, dtype=torch.float64), x)
        for event in track(path, CLUSTER, min_mass=min(1.0, 2 / n)).events:
            if event.kind in ("merge", "split"):
                (merges if event.kind == "merge" else splits)[int(event.t), t] += 1
    return Evolution(cosine, rank, count, merges, splits, energy, histogram, edges.cpu())


def evolution_of_all(shares: list[Evolution]) -> Evolution:
    """What processes found, each of its own texts, together."""
    names = [name for name in vars(shares[0]) if name != "edges"]
    sums = {name: torch.stack([getattr(share, name) for share in shares]).sum(0) for name in names}
    return Evolution(**sums, edges=shares[0].edges)


def token_view(clouds: Clouds, generator: torch.Generator) -> View:
    """A sample of tokens through the layers."""
    places = [(t, i) for t in range(clouds.texts) for i in range(len(clouds.special[t]))]
    order = torch.randperm(len(places), generator=generator)[:SHOWN].tolist()
    chosen = sorted(places[i] for i in order)
    x = torch.stack([torch.stack([directions(level[t][i : i + 1])[0] for t, i in chosen]) for level in clouds.z])
    flat = x.reshape(-1, x.shape[-1])
    centred = flat - flat.mean(0)
    axes = torch.linalg.eigh(centred.T @ centred)[1][:, -3:].flip(-1)
    view = (centred @ axes).reshape(*x.shape[:2], 3).float().cpu()
    return View(view, torch.tensor([t for t, _ in chosen]), torch.tensor([i for _, i in chosen]))
