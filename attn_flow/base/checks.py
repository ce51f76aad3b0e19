"""Checks of what users pass in and of what is installed, and the one rule of precision. Only entry points call them.

Entry points are constructors, `Attention.drift`, `flow`, `wasserstein`, `limit`, the layers' forward passes and the
like. Checks of shapes always run. Checks of values are skipped where there are no values to read (`can_read`).
The names of torch that are not public stand here too, each with what replaces it in a version without it.
"""

from __future__ import annotations

import difflib
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from importlib import import_module
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

# float32 logits above this size have errors above 1e-5, which exp() turns into relative errors of the weights.
MAX_FLOAT32_LOGIT = 200.0

# The operation behind torch's fused attention on CPUs, which also returns the log-sum-exp. None: ordinary operations.
fused_with_log_sum: Any = getattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu", None)

# Whether a tensor stands for others inside torch.func (vmap, jvp, grad). Without it, none is taken to.
is_transformed: Any = getattr(torch._C._functorch, "is_functorch_wrapped_tensor", lambda tensor: False)


def uses_forward_mode() -> bool:
    """Whether forward-mode derivatives are being computed (torch.func.jvp, jacfwd, dual numbers)."""
    return getattr(torch.autograd.forward_ad, "_current_level", -1) >= 0


def can_read(*tensors: Tensor) -> bool:
    """Whether the tensors have values that Python can read: not on the meta device, in torch.compile or torch.func."""
    return not torch.compiler.is_compiling() and not any(z.is_meta or is_transformed(z) for z in tensors)


def working_dtype(dtype: torch.dtype, logit_bound: Tensor) -> torch.dtype:
    """The dtype to compute attention in: float64 if float32 cannot resolve logits of this size, otherwise `dtype`.

    This is the only rule of precision. Where values cannot be read, `dtype` is used.

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


def is_finite(x: Tensor) -> bool:
    """Whether no entry of x is NaN or infinite; True where values cannot be read."""
    if not can_read(x) or math.isfinite(float(x.detach().sum())):  # the sum takes less time, but may overflow
        return True
    return bool(x.isfinite().all())


def require_finite(name: str, x: Tensor) -> None:
    """Raise ValueError if x has NaN or infinite entries."""
    if not is_finite(x):
        raise ValueError(f"{name} has NaN or infinite entries, expected finite numbers.")


def require_shape(name: str, x: Tensor, sizes: Sequence[int]) -> None:
    """Raise ValueError unless the last axes of a tensor have these sizes."""
    if x.shape[x.ndim - len(sizes) :] != torch.Size(sizes):
        expected = ", ".join(map(str, sizes))
        raise ValueError(f"{name} has shape {tuple(x.shape)}, expected (..., {expected}).")


def require_tensor(name: str, x: Tensor) -> None:
    """Raise TypeError unless x is a tensor: it is often an array or a list."""
    if not isinstance(x, Tensor):
        raise TypeError(f"{name} is a {type(x).__name__}, expected a torch.Tensor.")


def require_floating(name: str, x: Tensor) -> None:
    """Raise TypeError unless x is a tensor of real floating-point numbers."""
    require_tensor(name, x)
    if not x.is_floating_point():
        raise TypeError(f"{name} has dtype {x.dtype}, expected a floating-point dtype; use {name}.float().")


def require_single_precision(name: str, x: Tensor) -> None:
    """Raise TypeError for half precision, in which torch factorises no matrices."""
    if torch.finfo(x.dtype).bits < 32:
        raise TypeError(f"{name} has dtype {x.dtype}, expected float32 or float64; use {name}.float().")


def require_unit(name: str, y: Tensor) -> None:
    """Raise ValueError unless y (..., d) are unit vectors up to rounding."""
    is_unit = (y.detach().norm(dim=-1) - 1).abs() <= 4 * torch.finfo(y.dtype).eps ** 0.5
    require(is_unit, f"{name} has rows that are not unit vectors; divide them by their lengths.")


def require_tokens(name: str, x: Tensor) -> None:
    """Raise an error unless x is a floating-point tensor (..., n, d) with at least one token in each cloud."""
    require_floating(name, x)
    if x.ndim < 2 or 0 in x.shape:
        raise ValueError(f"{name} has shape {tuple(x.shape)}, expected (..., n, d): n >= 1 tokens of dimension d >= 1.")


def require_fit(name: str, x: Tensor, d: int, other_name: str, other: Tensor | None) -> None:
    """Raise ValueError unless tokens x have d coordinates and the device and dtype of another tensor, if there is one.

    Under autocast the dtypes may differ.
    """
    require_shape(name, x, (d,))
    if other is None:
        return
    require_same_device(name, x, other_name, other)
    if x.dtype != other.dtype and not torch.is_autocast_enabled(x.device.type):
        raise ValueError(f"{name} has dtype {x.dtype} and {other_name} {other.dtype}; use {name}.to({other.dtype}).")


def broadcast_axes(shapes: Mapping[str, torch.Size], hint: str = "expected equal sizes or 1") -> torch.Size:
    """The common leading axes of tensors with these names; ValueError with the hint if there are none."""
    try:
        return torch.broadcast_shapes(*shapes.values())
    except RuntimeError:
        named = ", ".join(f"{name} {tuple(shape)}" for name, shape in shapes.items())
        raise ValueError(f"leading axes do not broadcast ({named}); {hint}.") from None


def require_cloud(x: Tensor, weights: Tensor | None, mask: Tensor | None) -> torch.Size:
    """The batch axes of tokens x (..., n, d), weights (..., n) and mask (..., n); an error if they are no measure."""
    require_tokens("x", x)
    require_finite("x", x)
    shapes = {"x": x.shape[:-2]}
    for name, z in (("mask", mask), ("weights", weights)):
        if z is not None:
            require_same_device(name, z, "x", x)
            shapes[name] = z.shape[:-1]
            if z.shape[-1:] != x.shape[-2:-1]:
                raise ValueError(f"{name} has shape {tuple(z.shape)}, expected (..., {x.shape[-2]}) to match x.")
    batch = broadcast_axes(shapes)
    if mask is not None:
        if mask.dtype != torch.bool:
            raise TypeError(f"mask is {mask.dtype}, expected a boolean tensor: True for tokens, False for padding.")
        require(mask.any(-1), "mask hides every token of a cloud; expected at least one True in each. Drop empty rows.")
    if weights is not None:
        if weights.dtype == torch.bool or weights.is_complex():
            raise TypeError(f"weights are {weights.dtype}, expected real numbers; a choice of tokens is a mask.")
        w = weights.detach()
        require(w.isfinite() & (w >= 0), "weights must be finite and nonnegative; use a mask to hide tokens.")
        is_positive = w > 0 if mask is None else (w > 0) & mask
        require(is_positive.any(-1), "weights are all zero in a cloud; expected a token of positive weight in each.")
    return batch


def require_same_device(name: str, a: Tensor, other_name: str, b: Tensor) -> None:
    """Raise an error unless a is a tensor on the device of the tensor b."""
    require_tensor(name, a)
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
        if not hasattr(number, "__index__"):
            raise TypeError(f"{name} = {number!r}, expected an integer of at least 1.")
        if number < 1:
            raise ValueError(f"{name} = {number}, expected an integer of at least 1.")


def require_choice(name: str, value: str, choices: Iterable[str]) -> None:
    """Raise ValueError unless the value is one of the choices; a mistyped one gets a suggestion."""
    choices = list(choices)
    if value not in choices:
        close = difflib.get_close_matches(str(value), choices, n=1)
        hint = f" Did you mean {close[0]!r}?" if close else ""
        raise ValueError(f"{name} = {value!r}, expected one of {', '.join(map(repr, choices))}.{hint}")


def require_beta(beta: float | Tensor) -> None:
    """Raise an error unless beta is a nonnegative number or tensor; infinity is allowed."""
    if isinstance(beta, Tensor):
        require(beta >= 0, "beta has negative or NaN entries, expected 0 <= beta <= inf.")
    elif hasattr(beta, "__len__"):  # a list or an array
        raise TypeError(f"beta is a {type(beta).__name__}, expected a number or a torch.Tensor.")
    elif not beta >= 0:
        raise ValueError(f"beta = {beta}, expected 0 <= beta <= inf; for repulsion negate V instead.")


def time_grid(t: float | Sequence[float] | Tensor) -> list[float]:
    """The times to save: t itself, or 101 equidistant times from 0 to t if t is one number."""
    times = torch.as_tensor(t, dtype=torch.float64, device="cpu").detach()
    if times.ndim == 0:
        require_positive(t=float(times))
        times = torch.linspace(0, float(times), 101, dtype=torch.float64)
    grid: list[float] = times.tolist() if times.ndim == 1 else []
    if not grid or not all(map(math.isfinite, grid)) or any(a >= b for a, b in itertools.pairwise(grid)):
        raise ValueError(f"t has shape {tuple(times.shape)}, expected one positive time or finite, increasing times.")
    return grid


def require_extra(module_name: str) -> ModuleType:
    """An optional dependency such as "matplotlib.pyplot"; ImportError that says how to install it if it is missing."""
    package = module_name.partition(".")[0]
    try:
        return import_module(module_name)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != package:  # a broken installation, not a missing one
            raise
        message = f'{package} is not installed; install it with: pip install "attn-flow[all]"'
        raise ImportError(message, name=package) from None
