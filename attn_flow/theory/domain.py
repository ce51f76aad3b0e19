"""Where the formulas hold: arguments become float64 arrays or numbers, or a ValueError that says what was expected."""

from __future__ import annotations

import numbers

import numpy as np
from numpy.typing import ArrayLike, NDArray

Array = NDArray[np.float64]
WHOLE = 2.0**53  # up to which float64 tells whole numbers apart


def real(name: str, value: ArrayLike) -> Array:
    """`value` as float64: real and finite, at least one number."""
    try:
        x = np.asarray(float(value) if isinstance(value, numbers.Real) else value)
    except (ValueError, TypeError, OverflowError, RuntimeError):  # rows of unequal lengths; 10**400; a gradient
        raise ValueError(f"{name} is a {type(value).__name__}, expected a number or an array of numbers.") from None
    if np.iscomplexobj(x):
        raise ValueError(f"{name} has dtype {x.dtype}, expected real numbers; its imaginary part has no meaning here.")
    if x.dtype.kind not in "iuf":
        raise ValueError(f"{name} is a {type(value).__name__}, expected a number or an array of numbers.")
    if x.size == 0:
        raise ValueError(f"{name} has shape {x.shape}, expected at least one number.")
    x = x.astype(np.float64)
    if not np.isfinite(x).all():
        raise ValueError(f"{name} has {int((~np.isfinite(x)).sum())} NaN or infinite entries, expected finite numbers.")
    return x


def within(name: str, value: ArrayLike, low: float = -np.inf, high: float = np.inf, open: bool = False) -> Array:
    """`value` as float64, every entry finite and in [low, high], or in (low, high) when `open`."""
    x = real(name, value)
    good = (x > low) & (x < high) if open else (x >= low) & (x <= high)
    if not good.all():
        left, right = "()" if open else "[]"
        raise ValueError(f"{name} = {x[~good].flat[0]:.6g}, expected a number in {left}{low:g}, {high:g}{right}.")
    return x


def integers(name: str, value: ArrayLike, low: int, high: float = WHOLE) -> Array:
    """`value` as float64, every entry a whole number from low to high."""
    x = real(name, value)
    good = (x >= low) & (x == np.floor(x)) & (x <= high)
    if not good.all():
        most = f" and <= {high:g}" if (x > high).any() else ""
        raise ValueError(f"{name} = {x[~good].flat[0]:.6g}, expected an integer >= {low}{most}.")
    return x


def number(name: str, value: ArrayLike, low: float = -np.inf, high: float = np.inf, open: bool = False) -> float:
    """One number `within`."""
    return _one(name, within(name, value, low, high, open))


def integer(name: str, value: ArrayLike, low: int, high: float = WHOLE) -> int:
    """One of `integers`."""
    return int(_one(name, integers(name, value, low, high)))


def _one(name: str, x: Array) -> float:
    if x.ndim:
        raise ValueError(f"{name} has shape {x.shape}, expected one number.")
    return float(x)


def square(name: str, value: ArrayLike, d: int) -> Array:
    """A matrix (d, d), finite."""
    A = real(name, value)
    if A.shape != (d, d):
        raise ValueError(f"{name} has shape {A.shape}, expected (d, d) = {(d, d)}.")
    return A


def in_range(name: str, x: Array) -> Array:
    """A result, having raised where it overflowed."""
    if not np.isfinite(x).all():
        raise FloatingPointError(f"{name} leaves the range of float64 for these arguments; use less extreme ones.")
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
