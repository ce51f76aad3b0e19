"""Where the formulas hold: arguments become float64 arrays, or a ValueError that says what was expected."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

Array = NDArray[np.float64]


def real(name: str, value: ArrayLike) -> Array:
    """`value` as float64: real and finite."""
    x = np.asarray(value)
    if np.iscomplexobj(x):
        raise ValueError(f"{name} has dtype {x.dtype}, expected real numbers; its imaginary part has no meaning here.")
    x = x.astype(np.float64)
    if not np.isfinite(x).all():
        raise ValueError(f"{name} has {int((~np.isfinite(x)).sum())} NaN or infinite entries, expected finite numbers.")
    return x


def _floats(name: str, value: ArrayLike) -> Array:
    """`value` as float64, whatever its size, but real."""
    return real(name, value) if np.iscomplexobj(value) else np.asarray(value, dtype=np.float64)


def within(name: str, value: ArrayLike, low: float = -np.inf, high: float = np.inf, open: bool = False) -> Array:
    """`value` as float64, every entry in [low, high], or in (low, high) when `open`."""
    x = _floats(name, value)
    good = (x > low) & (x < high) if open else (x >= low) & (x <= high)
    if not good.all():
        left, right = "()" if open else "[]"
        raise ValueError(f"{name} = {x[~good].flat[0]:.6g}, expected a number in {left}{low:g}, {high:g}{right}.")
    return x


def integers(name: str, value: ArrayLike, low: int) -> Array:
    """`value` as float64, every entry a whole number >= low."""
    x = _floats(name, value)
    good = (x >= low) & (x == np.floor(x)) & np.isfinite(x)
    if not good.all():
        raise ValueError(f"{name} = {x[~good].flat[0]:.6g}, expected an integer >= {low}.")
    return x


def eigenvalues(name: str, value: ArrayLike) -> Array:
    """A vector of eigenvalues as it is; of a symmetric matrix, its eigenvalues in increasing order."""
    x = real(name, value)
    if x.ndim == 1:
        return x
    if x.ndim != 2 or x.shape[0] != x.shape[1]:
        raise ValueError(f"{name} has shape {x.shape}, expected (d,) eigenvalues or a (d, d) matrix.")
    if not np.allclose(x, x.T):
        raise ValueError(f"{name} is not symmetric; expected a symmetric matrix or its eigenvalues.")
    return np.asarray(np.linalg.eigvalsh(x), dtype=np.float64)
