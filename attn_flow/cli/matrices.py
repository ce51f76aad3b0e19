"""Matrices as a person types or stores them: "3,0;0,1", or a .npy, .pt or .safetensors file."""

from __future__ import annotations

import math
import pickle
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
    return _finite(torch.tensor(rows, dtype=dtype), name)


def _finite(matrix: Tensor, name: str) -> Tensor:
    if not bool(torch.isfinite(matrix).all()):
        raise ValueError(f"{name} has NaN or infinite entries, expected finite numbers.")
    return matrix


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
    if not numbers or any(math.isnan(number) for number in numbers):
        raise ValueError(f'{name} = {text!r}, expected numbers separated by commas, such as "10,100,inf".')
    return numbers


def _from_file(path: Path, name: str, dtype: torch.dtype) -> Tensor:
    if not path.is_file():
        raise ValueError(f"{name}: no file {path}.")
    found = _read(path, name)
    shape = tuple(getattr(found, "shape", ()))
    if not isinstance(found, Tensor) or found.ndim != 2 or found.numel() == 0:
        held = f"an array of shape {shape}" if isinstance(found, Tensor) else f"a {type(found).__name__}"
        raise ValueError(f"{path} holds {held}, expected one matrix of numbers.")
    if found.is_complex() or found.dtype == torch.bool:
        raise ValueError(f"{path} holds numbers of dtype {found.dtype}, expected a real matrix.")
    return _finite(found.to(dtype), name)


def _read(path: Path, name: str) -> object:
    """What the file holds, read without running any of it."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        if path.suffix == ".npy":
            return torch.from_numpy(np.load(path, allow_pickle=False))
        if path.suffix == ".pt":
            return torch.load(path, weights_only=True, map_location="cpu")
        tensors = load_file(path)
    except (ValueError, TypeError, EOFError, RuntimeError, KeyError, pickle.UnpicklingError, SafetensorError) as error:
        why = str(error).strip().splitlines() or [type(error).__name__]
        raise ValueError(f"{path} is no {path.suffix} file with one matrix of numbers ({why[0][:100]}).") from None
    if name not in tensors and len(tensors) != 1:
        raise ValueError(f"{path} holds {sorted(tensors)}, expected one tensor, or one named {name!r}.")
    return tensors[name] if name in tensors else next(iter(tensors.values()))
