"""The papers' results, one module each: `compute(quick, seed, progress) -> dict` and `plot(numbers) -> Figure`."""

from __future__ import annotations

from importlib import import_module
from types import ModuleType

NAMES = (
    "concentration",
    "synchronisation",
    "metastability",
    "multiscale",
    "phase_diagram",
    "staircase",
    "histograms",
    "spectral_selection",
    "multi_head",
    "noise",
    "noisy_threshold",
    "random_weights",
    "lost_in_the_middle",
    "normalisation",
    "long_context",
    "gap_counting",
    "hardmax",
    "gaussian",
    "layer_jacobians",
    "affine_rank",
    "energy_by_layer",
    "wrapped_layer",
    "trained_stacks",
    "mean_field",
    "zoo",
    "cold_heads",
    "fine_tuning",
)


def load(name: str) -> ModuleType:
    """The experiment's module."""
    if name not in NAMES:
        raise ValueError(f"no experiment {name!r}; expected one of {', '.join(NAMES)}.")
    return import_module(f"attn_flow.experiments.{name}")


def title(name: str) -> str:
    """The first line of an experiment's docstring: its claim."""
    return (load(name).__doc__ or name).strip().splitlines()[0]
