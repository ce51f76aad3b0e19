"""The papers' results, one module each: `compute(quick, seed, progress) -> dict` and `plot(numbers) -> Figure`."""

from __future__ import annotations

from difflib import get_close_matches
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
        near = get_close_matches(name, NAMES)
        meant = f"did you mean {' or '.join(near)}? Expected" if near else "expected"
        raise ValueError(f"no experiment {name!r}: {meant} one of {', '.join(NAMES)}.")
    return import_module(f"attn_flow.experiments.{name}")


def title(name: str) -> str:
    """The first line of an experiment's docstring: its claim."""
    return (load(name).__doc__ or name).strip().splitlines()[0]
