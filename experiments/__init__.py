"""Experiments: `papers` reproduces published results and trains small stacks, `encoders` measures real models.

Every experiment is a module with `compute(quick, seed, progress) -> dict` and `plot(numbers) -> Figure`.
"""

from __future__ import annotations

import ast
from difflib import get_close_matches
from importlib import import_module
from pathlib import Path
from types import ModuleType

PAPERS = (
    "concentration",
    "synchronisation",
    "metastability",
    "multi_head",
    "noise",
    "spectral_selection",
    "lost_in_the_middle",
    "trained_limit",
    "multiscale",
    "phase_diagram",
    "staircase",
    "noisy_threshold",
    "random_weights",
    "normalisation",
    "long_context",
    "hardmax",
    "gaussian",
)
ENCODERS = (
    "histograms",
    "energy_by_layer",
    "temperature_and_length",
    "fine_tuning",
    "questions",
    "long_inputs",
    "mean_field",
    "cold_heads",
)
MODULES = {name: f"attn_flow.experiments.papers.{name}" for name in PAPERS}
MODULES |= {name: f"attn_flow.experiments.encoders.{name}" for name in ENCODERS}
NAMES = tuple(MODULES)


def module_name(name: str) -> str:
    """The full name of the module of an experiment."""
    if name not in MODULES:
        similar = get_close_matches(name, NAMES)
        suggestion = f"did you mean {' or '.join(similar)}? Expected" if similar else "expected"
        raise ValueError(f"no experiment {name!r}: {suggestion} one of {', '.join(NAMES)}.")
    return MODULES[name]


def load(name: str) -> ModuleType:
    """The module of an experiment."""
    return import_module(module_name(name))


def title(name: str) -> str:
    """The claim of an experiment: the first line of its docstring, read without importing the module.

    Example:
        >>> title("noise")
        'Random weights that all tokens share pull tokens together or push them apart, at rates that can be computed.'
    """
    path = Path(__file__).parent.joinpath(*module_name(name).split(".")[2:]).with_suffix(".py")
    return (ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or name).splitlines()[0]
