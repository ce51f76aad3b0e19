"""Numbers and matrices of the command line: "10,100", and "3,0;0,1" or a .npy, .pt or .safetensors file."""

from __future__ import annotations

import math
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from attn_flow.attention.attention import Attention
from attn_flow.base.checks import require_choice

KINDS = ("softmax", "unnormalised", "sinkhorn")  # hardmax is beta = inf
WRITERS = {".npy": "numpy.save", ".pt": "torch.save", ".safetensors": "safetensors.torch.save_file"}
DAMAGES = (ValueError, TypeError, EOFError, RuntimeError, KeyError, pickle.UnpicklingError, SafetensorError)


def parse_numbers(text: str, name: str) -> list[float]:
    """Numbers separated by commas; "inf" is a number."""
    try:
        numbers = [float(entry) for entry in text.split(",") if entry.strip()]
    except ValueError:
        numbers = []
    if not numbers or any(math.isnan(number) for number in numbers):
        raise ValueError(f'{name} = {text!r}, expected numbers separated by commas, such as "10,100,inf".')
    return numbers


def parse_matrix(text: str, name: str = "matrix") -> Tensor:
    """Rows separated by ';', entries by ','; or the path of a file that holds one matrix."""
    if Path(text).suffix in WRITERS:
        matrix = _read_matrix(Path(text), name)
    else:
        matrix = _typed_matrix(text, name)
    if not bool(matrix.isfinite().all()):
        raise ValueError(f"{name} has NaN or infinite entries, expected finite numbers.")
    return matrix


def parse_square(text: str, name: str) -> Tensor:
    """A square matrix."""
    matrix = parse_matrix(text, name)
    if matrix.shape[0] != matrix.shape[1]:
        raise ValueError(f"{name} has shape {tuple(matrix.shape)}, expected a square matrix (d, d).")
    return matrix


def random_heads(heads: int | None, dim: int | None, kind: str, seed: int) -> Attention:
    """Attention with random heads, in place of matrices that are given."""
    if heads is None or dim is None:
        raise ValueError("give --G and --V, or --heads and --dim for random heads.")
    require_choice("kind", kind, KINDS)
    generator = torch.Generator().manual_seed(seed)
    return Attention.random(dim, heads, generator=generator, dtype=torch.float64, kind=kind)


def parse_heads(G: str, V: str, kind: str) -> Attention:
    """The attention of matrices G and V, of which heads are separated by "|"."""
    require_choice("kind", kind, KINDS)
    parts = {name: [parse_square(head, name) for head in text.split("|")] for name, text in (("G", G), ("V", V))}
    shapes = {tuple(matrix.shape) for matrices in parts.values() for matrix in matrices}
    if len(shapes) > 1 or len(parts["G"]) != len(parts["V"]):
        counts = ", ".join(f"{name}: {len(each)} of {tuple(each[0].shape)}" for name, each in parts.items())
        raise ValueError(f"heads of G and V differ ({counts}); expected as many, of one size.")
    return Attention.from_matrices(torch.stack(parts["G"]), torch.stack(parts["V"]), kind=kind)  # type: ignore[arg-type]


def _typed_matrix(text: str, name: str) -> Tensor:
    try:
        rows = [[float(entry) for entry in row.split(",")] for row in text.strip().strip(";").split(";")]
    except ValueError:
        raise ValueError(
            f'{name} = {text!r}, expected numbers as "3,0;0,1" or a .npy, .pt or .safetensors file.'
        ) from None
    if len({len(row) for row in rows}) != 1:
        raise ValueError(f"{name} = {text!r} has rows of lengths {[len(row) for row in rows]}, expected equal lengths.")
    return torch.tensor(rows, dtype=torch.float64)


def _read_matrix(path: Path, name: str) -> Tensor:
    """The matrix of a file, read without running code of it."""
    if not path.is_file():
        raise ValueError(f"{name}: no file {path}.")
    content: Any = None
    try:
        if path.suffix == ".npy":
            content = torch.from_numpy(np.load(path, allow_pickle=False))
        elif path.suffix == ".pt":
            content = torch.load(path, weights_only=True, map_location="cpu")
        else:
            content = load_file(path)
    except DAMAGES:
        writer = WRITERS[path.suffix]
        raise ValueError(f"{path} is not a file of numbers, or damaged; expected what {writer} writes.") from None
    if isinstance(content, dict):
        if name not in content and len(content) != 1:
            raise ValueError(f"{path} holds {sorted(content)}, expected one tensor, or one named {name!r}.")
        content = content.get(name, next(iter(content.values())))
    is_dense = isinstance(content, Tensor) and content.layout is torch.strided and not content.is_meta
    if not is_dense or content.is_complex() or content.dtype == torch.bool or content.ndim != 2 or 0 in content.shape:
        shape = f" of shape {tuple(content.shape)}" if isinstance(content, Tensor) else ""
        raise ValueError(f"{path} holds a {type(content).__name__}{shape}, expected one matrix of real numbers.")
    return content.to(torch.float64)
