"""Matrices as a person types or stores them: "3,0;0,1", or a .npy, .pt or .safetensors file."""

from __future__ import annotations

import math
import pickle
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

SAVED = {
    ".npy": "expected what numpy.save writes for a matrix",
    ".pt": "expected what torch.save writes for a tensor",
    ".safetensors": "expected what safetensors.torch.save_file writes",
}


def parse_matrix(text: str, name: str = "matrix", dtype: torch.dtype = torch.float64) -> Tensor:
    """Rows separated by ';', entries by ','; or the path of a file that holds one matrix."""
    path = Path(text)
    if path.suffix in SAVED:
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
    if not isinstance(found, (Tensor, np.ndarray)):
        raise ValueError(f"{path} holds a {type(found).__name__}, expected one matrix of numbers.")
    if found.ndim != 2 or 0 in found.shape:
        raise ValueError(f"{path} holds an array of shape {tuple(found.shape)}, expected one matrix of numbers.")
    if isinstance(found, np.ndarray):
        real = found.dtype.kind in "iuf"
    else:
        stored = found.layout is torch.strided and not found.is_meta and not found.is_quantized
        real = stored and not found.is_complex() and found.dtype != torch.bool
    if not real:
        kind = getattr(found, "layout", found.dtype) if found.dtype in (torch.float32, torch.float64) else found.dtype
        raise ValueError(f"{path} holds a matrix of {kind}, expected plain real numbers.")
    plain = torch.from_numpy(found.astype(np.float64)) if isinstance(found, np.ndarray) else found
    return _finite(plain.to(dtype), name)


def _read(path: Path, name: str) -> object:
    """What the file holds, read without running any of it."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    refused = (ValueError, TypeError, EOFError, RuntimeError, KeyError, pickle.UnpicklingError, SafetensorError)
    try:
        if path.suffix == ".npy":
            return np.load(path, allow_pickle=False)
        if path.suffix == ".pt":
            return torch.load(path, weights_only=True, map_location="cpu")
        tensors = load_file(path)
    except refused:
        raise ValueError(
            f"{path} is no {path.suffix} file of numbers, or it is damaged; {SAVED[path.suffix]}."
        ) from None
    if name not in tensors and len(tensors) != 1:
        raise ValueError(f"{path} holds {sorted(tensors)}, expected one tensor, or one named {name!r}.")
    return tensors[name] if name in tensors else next(iter(tensors.values()))
