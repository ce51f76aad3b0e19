"""Checks of what users pass in, and the one rule of precision. Only entry points call these functions.

Entry points are constructors, `Attention.drift`, `flow`, `wasserstein`, `limit`, the layers' forward passes and the
like. Checks of shapes always run. Checks of values are skipped where there are no values to read (`can_read`).
"""

from __future__ import annotations

import difflib
import itertools
import math
import operator
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from attn_flow.base.torch_private import is_transformed

# float32 logits above this size have errors above 1e-5, which exp() turns into relative errors of the weights.
MAX_FLOAT32_LOGIT = 200.0


def can_read(*tensors: Tensor) -> bool:
    """Whether the tensors have values that Python can read.

    They have none while torch.compile or torch.export traces, inside torch.func transforms (vmap, jvp, grad), and on
    the meta device.
    """
    if torch.compiler.is_compiling():
        return False
    return not any(z.is_meta or is_transformed(z) for z in tensors)


def working_dtype(dtype: torch.dtype, logit_bound: Tensor) -> torch.dtype:
    """The dtype to compute attention in: float64 if float32 cannot resolve the logits, otherwise `dtype`.

    This is the only rule of precision. Where values cannot be read, `dtype` is used.

    Args:
        dtype: the dtype of the tokens.
        logit_bound: an upper bound on the size of the logits, shape ().

    Example:
        >>> working_dtype(torch.float32, torch.tensor(1000.0))
        torch.float64
    """
    if dtype != torch.float32 or not can_read(logit_bound):
        return dtype
    return dtype if float(logit_bound) <= MAX_FLOAT32_LOGIT else torch.float64


def require(is_valid: Tensor, message: str) -> None:
    """Raise ValueError unless all entries of a boolean tensor are True."""
    if can_read(is_valid) and not bool(is_valid.all()):
        raise ValueError(message)


def require_finite(name: str, x: Tensor) -> None:
    """Raise ValueError if x has NaN or infinite entries."""
    if not can_read(x) or math.isfinite(float(x.detach().sum())):  # one pass: a NaN or infinity shows in the sum
        return
    count = int((~x.detach().isfinite()).sum())
    if count:
        raise ValueError(f"{name} has {count} NaN or infinite entries, expected finite numbers.")


def require_shape(name: str, x: Tensor, sizes: Sequence[int]) -> None:
    """Raise ValueError unless the last axes of a tensor have these sizes."""
    if x.shape[x.ndim - len(sizes) :] != torch.Size(sizes):
        expected = ", ".join(map(str, sizes))
        raise ValueError(f"{name} has shape {tuple(x.shape)}, expected (..., {expected}).")


def require_floating(name: str, x: Tensor) -> None:
    """Raise TypeError unless x is a dense tensor of real floating-point numbers."""
    if not isinstance(x, Tensor):
        raise TypeError(f"{name} is a {type(x).__name__}, expected a torch.Tensor.")
    if not x.is_floating_point():
        raise TypeError(f"{name} has dtype {x.dtype}, expected a floating-point dtype; use {name}.float().")
    if x.layout is not torch.strided or x.is_nested:
        raise TypeError(f"{name} is sparse or nested, expected a dense tensor; use {name}.to_dense().")


def require_tokens(name: str, x: Tensor) -> None:
    """Raise an error unless x is a finite floating-point tensor (..., n, d) with at least one token in each cloud."""
    require_floating(name, x)
    if x.ndim < 2 or 0 in x.shape:
        raise ValueError(f"{name} has shape {tuple(x.shape)}, expected (..., n, d): n >= 1 tokens of dimension d >= 1.")
    require_finite(name, x)


def require_mask(mask: Tensor, x: Tensor) -> None:
    """Raise an error unless the mask is boolean (..., n) and every cloud has a token."""
    if not isinstance(mask, Tensor) or mask.dtype != torch.bool:
        kind = mask.dtype if isinstance(mask, Tensor) else type(mask).__name__
        raise TypeError(f"mask is {kind}, expected a boolean tensor: True for tokens, False for padding.")
    _require_token_axis("mask", mask, x)
    require(mask.any(-1), "mask hides every token of a cloud; expected at least one True in each. Drop empty rows.")


def require_weights(weights: Tensor, x: Tensor, mask: Tensor | None) -> None:
    """Raise an error unless weights (..., n) are finite, nonnegative and not all zero on the tokens."""
    if not isinstance(weights, Tensor) or weights.dtype == torch.bool or weights.is_complex():
        kind = weights.dtype if isinstance(weights, Tensor) else type(weights).__name__
        raise TypeError(f"weights are {kind}, expected a tensor of real numbers; a choice of tokens is a mask.")
    _require_token_axis("weights", weights, x)
    w = weights.detach()
    require(w.isfinite() & (w >= 0), "weights must be finite and nonnegative; use a mask to hide tokens.")
    is_positive = w > 0 if mask is None else (w > 0) & mask
    require(is_positive.any(-1), "weights are all zero in a cloud; expected a token of positive weight in each.")


def _require_token_axis(name: str, z: Tensor, x: Tensor) -> None:
    """Raise ValueError unless z (..., n) matches the tokens x (..., n, d)."""
    error = f"{name} has shape {tuple(z.shape)}, expected (..., n) = {tuple(x.shape[:-1])} to match x."
    if z.shape[-1:] != x.shape[-2:-1]:
        raise ValueError(error)
    try:
        torch.broadcast_shapes(z.shape[:-1], x.shape[:-2])
    except RuntimeError:
        raise ValueError(error) from None
    require_same_device(name, z, "x", x)


def require_same_device(name: str, a: Tensor, other_name: str, b: Tensor) -> None:
    """Raise ValueError unless two tensors are on one device."""
    if a.device != b.device:
        raise ValueError(f"{name} is on {a.device} and {other_name} on {b.device}; move one with .to(device).")


def require_positive(**numbers: float) -> None:
    """Raise ValueError unless every number is positive and finite."""
    for name, number in numbers.items():
        if not 0 < number < math.inf:
            raise ValueError(f"{name} = {number}, expected a positive, finite number.")


def require_nonnegative(**numbers: float) -> None:
    """Raise ValueError unless every number is nonnegative and finite."""
    for name, number in numbers.items():
        if not 0 <= number < math.inf:
            raise ValueError(f"{name} = {number}, expected a nonnegative, finite number.")


def require_count(**numbers: int) -> None:
    """Raise an error unless every number is an integer of at least one."""
    for name, number in numbers.items():
        if operator.index(number) < 1:
            raise ValueError(f"{name} = {number}, expected an integer of at least 1.")


def require_choice(name: str, value: str, choices: Iterable[str]) -> None:
    """Raise ValueError unless the value is one of the choices; a mistyped one gets a suggestion."""
    choices = list(choices)
    if value in choices:
        return
    close = difflib.get_close_matches(str(value), choices, n=1)
    hint = f" Did you mean {close[0]!r}?" if close else ""
    raise ValueError(f"{name} = {value!r}, expected one of {', '.join(map(repr, choices))}.{hint}")


def require_beta(beta: float | Tensor) -> None:
    """Raise an error unless beta is a nonnegative number or tensor; infinity is allowed."""
    if isinstance(beta, Tensor):
        require(beta.detach() >= 0, "beta has negative or NaN entries, expected 0 <= beta <= inf.")
    elif not beta >= 0:
        raise ValueError(f"beta = {beta}, expected 0 <= beta <= inf; for repulsion negate V instead.")


def time_grid(t: float | Sequence[float] | Tensor) -> list[float]:
    """The times to save: t itself, or 101 equidistant times from 0 to t if t is one number.

    Example:
        >>> len(time_grid(20.0)), time_grid([0, 1])
        (101, [0.0, 1.0])
    """
    times = t.detach() if isinstance(t, Tensor) else torch.as_tensor(t, dtype=torch.float64)  # not through float32
    if times.is_complex() or times.dtype == torch.bool:
        raise TypeError(f"t has dtype {times.dtype}, expected real times.")
    times = times.to("cpu", torch.float64)
    if times.ndim == 0:
        require_positive(t=float(times))
        times = torch.linspace(0, float(times), 101, dtype=torch.float64)
    grid: list[float] = times.tolist() if times.ndim == 1 else []
    if not grid or not all(map(math.isfinite, grid)) or any(a >= b for a, b in itertools.pairwise(grid)):
        raise ValueError(f"t has shape {tuple(times.shape)}, expected one positive time or strictly increasing times.")
    return grid
