"""Matrices of the command line: "3,0;0,1", or a .npy, .pt or .safetensors file."""

from __future__ import annotations

import math
import pickle
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

WRITERS = {".npy": "numpy.save", ".pt": "torch.save", ".safetensors": "safetensors.torch.save_file"}


def parse_matrix(text: str, name: str = "matrix", dtype: torch.dtype = torch.float64) -> Tensor:
    """Rows separated by ';', entries by ','; or the path of a file that holds one matrix."""
    path = Path(text)
    if path.suffix in WRITERS:
        return _from_file(path, name, dtype)
    try:
        rows = [[float(entry) for entry in row.split(",")] for row in text.strip().strip(";").split(";")]
    except ValueError:
        raise ValueError(
            f'{name} = {text!r}, expected numbers as "3,0;0,1" or a .npy, .pt or .safetensors file.'
        ) from None
    if len({len(row) for row in rows}) != 1:
        raise ValueError(f"{name} = {text!r} has rows of lengths {[len(row) for row in rows]}, expected equal lengths.")
    return _require_finite(torch.tensor(rows, dtype=dtype), name)


def _require_finite(matrix: Tensor, name: str) -> Tensor:
    if not bool(torch.isfinite(matrix).all()):
        raise ValueError(f"{name} has NaN or infinite entries, expected finite numbers.")
    return matrix


def parse_square(text: str, name: str) -> Tensor:
    """A square matrix."""
    matrix = parse_matrix(text, name)
    if matrix.ndim != 2 or matrix.shape[0] != matrix.shape[1]:
        raise ValueError(f"{name} has shape {tuple(matrix.shape)}, expected a square matrix (d, d).")
    return matrix


def parse_numbers(text: str, name: str) -> list[float]:
    """Numbers separated by commas; "inf" is a number."""
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
    content = _read(path, name)
    if not isinstance(content, (Tensor, np.ndarray)):
        raise ValueError(f"{path} holds a {type(content).__name__}, expected one matrix of numbers.")
    if content.ndim != 2 or 0 in content.shape:
        raise ValueError(f"{path} holds an array of shape {tuple(content.shape)}, expected one matrix of numbers.")
    if isinstance(content, np.ndarray):
        is_real = content.dtype.kind in "iuf"
        content = torch.from_numpy(content.astype(np.float64)) if is_real else content
    else:
        is_plain = content.layout is torch.strided and not content.is_meta and not content.is_quantized
        is_real = is_plain and not content.is_complex() and content.dtype != torch.bool
    if not is_real:
        raise ValueError(f"{path} holds a matrix of {content.dtype}, expected plain real numbers.")
    return _require_finite(torch.as_tensor(content).to(dtype), name)


def _read(path: Path, name: str) -> object:
    """The content of the file, read without running code of it."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    damages = (ValueError, TypeError, EOFError, RuntimeError, KeyError, pickle.UnpicklingError, SafetensorError)
    try:
        if path.suffix == ".npy":
            return np.load(path, allow_pickle=False)
        if path.suffix == ".pt":
            return torch.load(path, weights_only=True, map_location="cpu")
        tensors = load_file(path)
    except damages:
        writer = WRITERS[path.suffix]
        raise ValueError(f"{path} is not a file of numbers, or damaged; expected what {writer} writes.") from None
    if name not in tensors and len(tensors) != 1:
        raise ValueError(f"{path} holds {sorted(tensors)}, expected one tensor, or one named {name!r}.")
    return tensors[name] if name in tensors else next(iter(tensors.values()))
