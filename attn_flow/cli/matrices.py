"""Matrices as a person types or stores them: "3,0;0,1", or a .npy, .pt or .safetensors file."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import Tensor


def parse_matrix(text: str, name: str = "matrix", dtype: torch.dtype = torch.float64) -> Tensor:
    """Rows separated by ';', entries by ','; or the path of a file that holds one matrix."""
    path = Path(text)
    if path.suffix in (".npy", ".pt", ".safetensors"):
        return _from_file(path, name, dtype)
    try:
        rows = [[float(entry) for entry in row.split(",")] for row in text.strip().strip(";").split(";")]
    except ValueError:
        raise ValueError(
            f'{name} = {text!r}, expected numbers as "3,0;0,1" or a .npy, .pt or .safetensors file.'
        ) from None
    if len({len(row) for row in rows}) != 1:
        raise ValueError(f"{name} = {text!r} has rows of lengths {[len(row) for row in rows]}, expected equal lengths.")
    return torch.tensor(rows, dtype=dtype)


def square(matrix: Tensor, name: str) -> Tensor:
    if matrix.ndim != 2 or matrix.shape[0] != matrix.shape[1]:
        raise ValueError(f"{name} has shape {tuple(matrix.shape)}, expected a square matrix (d, d).")
    return matrix


def parse_numbers(text: str, name: str) -> list[float]:
    """Numbers separated by commas; inf is one."""
    try:
        numbers = [float(entry) for entry in text.split(",") if entry.strip()]
    except ValueError:
        numbers = []
    if not numbers:
        raise ValueError(f'{name} = {text!r}, expected numbers separated by commas, such as "10,100,inf".')
    return numbers


def _from_file(path: Path, name: str, dtype: torch.dtype) -> Tensor:
    if not path.is_file():
        raise ValueError(f"{name}: no file {path}.")
    if path.suffix == ".npy":
        found = torch.from_numpy(np.load(path, allow_pickle=False))
    elif path.suffix == ".pt":
        found = torch.load(path, weights_only=True)
    else:
        from safetensors.torch import load_file

        tensors = load_file(path)
        if name not in tensors and len(tensors) != 1:
            raise ValueError(f"{path} holds {sorted(tensors)}, expected one tensor, or one named {name!r}.")
        found = tensors[name] if name in tensors else next(iter(tensors.values()))
    if not isinstance(found, Tensor) or found.ndim != 2:
        raise ValueError(f"{path} holds {getattr(found, 'shape', type(found).__name__)}, expected one matrix.")
    return found.to(dtype)
