"""Numbers and matrices of the command line: "10,100", and "3,0;0,1" or a .npy or .pt file."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from attn_flow.attention.attention import Attention
from attn_flow.base.checks import require_finite


def parse_numbers(text: str, name: str) -> list[float]:
    """Numbers separated by commas; "inf" is a number."""
    try:
        numbers = [float(entry) for entry in text.split(",") if entry.strip()]
    except ValueError:
        numbers = []
    if not numbers or any(math.isnan(number) for number in numbers):
        raise ValueError(f'{name} = {text!r}, expected numbers separated by commas, such as "10,100,inf".')
    return numbers


def parse_matrix(text: str, name: str) -> Tensor:
    """Rows separated by ';', entries by ','; or the path of a file that holds one matrix."""
    suffix = Path(text).suffix
    try:
        if suffix == ".npy":
            matrix = torch.from_numpy(np.load(text, allow_pickle=False))
        elif suffix == ".pt":
            matrix = torch.load(text, weights_only=True, map_location="cpu")
        else:
            rows = text.strip().strip(";").split(";")
            matrix = torch.tensor([[float(entry) for entry in row.split(",")] for row in rows], dtype=torch.float64)
        matrix = matrix.to(torch.float64)
    except FileNotFoundError:
        raise ValueError(f"{name}: no file {text}.") from None
    except Exception as error:  # a damaged file may raise anything
        expected = 'numbers as "3,0;0,1", in rows of one length, or a .npy or .pt file of them'
        raise ValueError(f"{name} = {text!r}, expected {expected} ({error}).") from None
    if matrix.ndim != 2 or 0 in matrix.shape:
        raise ValueError(f"{name} has shape {tuple(matrix.shape)}, expected one matrix.")
    require_finite(name, matrix)
    return matrix


def parse_square(text: str, name: str) -> Tensor:
    """A square matrix of at least two rows: in one dimension a token has nowhere to go."""
    matrix = parse_matrix(text, name)
    if matrix.shape[0] != matrix.shape[1] or len(matrix) < 2:
        raise ValueError(f"{name} has shape {tuple(matrix.shape)}, expected a square matrix (d, d), d at least 2.")
    return matrix


def random_heads(heads: int | None, dim: int | None, kind: str, seed: int) -> Attention:
    """Attention with random heads, in place of matrices that are given."""
    if heads is None or dim is None:
        raise ValueError("give --G and --V, or --heads and --dim for random heads.")
    generator = torch.Generator().manual_seed(seed)
    return Attention.random(dim, heads, generator=generator, dtype=torch.float64, kind=kind)  # type: ignore[arg-type]


def parse_heads(G: str, V: str, kind: str) -> Attention:
    """The attention of matrices G and V, of which heads are separated by "|"."""
    scores, values = ([parse_square(head, name) for head in text.split("|")] for text, name in ((G, "G"), (V, "V")))
    if len(scores) != len(values) or len({matrix.shape for matrix in scores + values}) > 1:
        raise ValueError(f"heads of G and V differ: {len(scores)} and {len(values)}; expected as many, of one size.")
    return Attention.from_matrices(torch.stack(scores), torch.stack(values), kind=kind)  # type: ignore[arg-type]
