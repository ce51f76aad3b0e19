"""Two ways to the same distance: exact transport and geomloss side by side on a few clouds, with their time."""

from __future__ import annotations

import time
from dataclasses import dataclass
from importlib.util import find_spec

import torch
from torch import Tensor

from attn_flow.probe.clouds import Clouds, directions
from attn_flow.transport import CertificateError, solve, wasserstein

RTOL = 0.2  # what geomloss may leave unproved: in hundreds of dimensions its certificate is wide, its value good
SOLVERS = {"exact": "auto", "geomloss": "sinkhorn"}  # the probe's word and the solver's
LEVELS = 3  # clouds compared: the first, a middle and the last


def solver(transport: str, device: torch.device) -> str:
    """The solver of `attn_flow.transport` for exact, geomloss or auto (geomloss on CUDA, else exact)."""
    if transport == "auto":
        transport = "geomloss" if device.type == "cuda" else "exact"
    if transport not in SOLVERS:
        raise ValueError(f"transport = {transport!r}, expected exact, geomloss or auto.")
    return SOLVERS[transport]


def w2(x: Tensor, y: Tensor, method: str) -> float:
    """W2 of two clouds by a solver of `attn_flow.transport`; exact where geomloss proves nothing."""
    if method == "sinkhorn":
        try:
            return float(wasserstein(x, y, method=method, rtol=RTOL))
        except CertificateError:  # clouds that are equal but for rounding
            method = "auto"
    if method == "auto" and x.shape == y.shape:
        method = "assignment"  # the same number of tokens: exact, without looking for atoms first
    return float(wasserstein(x, y, method=method))


@dataclass(frozen=True, eq=False)
class TransportCheck:
    """W2 between the clouds of two texts at some levels, (m,) each; without those that geomloss cannot prove.

    exact, geomloss: the distance by each; bound: how far geomloss says it may be off; *_seconds: what each took.
    """

    level: Tensor
    exact: Tensor
    geomloss: Tensor
    bound: Tensor
    exact_seconds: Tensor
    geomloss_seconds: Tensor


def transport_check(clouds: Clouds) -> TransportCheck:
    """Exact W2 against geomloss's between the first two texts."""
    rows = []
    if clouds.texts > 1 and find_spec("geomloss") is not None:
        for level in sorted({round(i * clouds.layers / (LEVELS - 1)) for i in range(LEVELS)}):
            x, y = (directions(clouds.z[level][t]) for t in (0, 1))
            started = time.perf_counter()
            exact = float(wasserstein(x, y))
            between = time.perf_counter()
            try:
                found = solve(x, y, method="sinkhorn", rtol=RTOL)
            except CertificateError:  # it proves nothing here, as for two equal texts: no row to show
                continue
            if exact == 0:
                continue
            seconds = (between - started, time.perf_counter() - between)
            rows.append((float(level), exact, float(found.value), float(found.error), *seconds))
    return TransportCheck(*(torch.tensor([row[i] for row in rows], dtype=torch.float64) for i in range(6)))
