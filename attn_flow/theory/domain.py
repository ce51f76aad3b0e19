"""Arguments of the closed forms as float64 arrays, checked against the domain of the formula."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

Array = NDArray[np.float64]


def reals(name: str, value: ArrayLike, low: float = -np.inf, high: float = np.inf, is_open: bool = False) -> Array:
    """The value as a float64 array; ValueError unless all entries are finite and in [low, high], or in (low, high).

    >>> reals("rho", [0, 0.5], -1, 1)
    array([0. , 0.5])
    """
    x = np.asarray(value, dtype=np.float64)
    is_inside = (low < x) & (x < high) if is_open else (low <= x) & (x <= high)
    if not np.all(is_inside & np.isfinite(x)):
        wrong = x[~(is_inside & np.isfinite(x))].flat[0]
        left, right = "()" if is_open else "[]"
        raise ValueError(f"{name} = {wrong:g}, expected finite numbers in {left}{low:g}, {high:g}{right}.")
    return x


def cosines(rho: ArrayLike, n: Array) -> Array:
    """rho as a float64 array; ValueError unless n tokens can have these pairwise cosines.

    >>> cosines([-0.5, 1.0], integers("n", 3, 2))
    array([-0.5,  1. ])
    """
    rho = reals("rho", rho, -1, 1)
    if np.any(rho < -1 / (n - 1) - 1e-12):
        raise ValueError(f"rho = {np.min(rho):g}, expected at least -1/(n-1): no n tokens have smaller cosines.")
    return rho


def integers(name: str, value: ArrayLike, low: int) -> Array:
    """The value as a float64 array; ValueError unless all entries are integers of at least `low`."""
    x = reals(name, value)
    is_valid = (x >= low) & (x == np.floor(x))
    if not np.all(is_valid):
        raise ValueError(f"{name} = {x[~is_valid].flat[0]:g}, expected integers of at least {low}.")
    return x
