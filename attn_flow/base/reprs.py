"""Short reprs: shapes and dtypes instead of the numbers in tensors."""

from __future__ import annotations

from typing import Any

from torch import Tensor


def format_value(value: Any) -> str:
    """A tensor as its dtype and shape, a float with six digits, anything else as its own repr.

    >>> import torch
    >>> format_value(torch.zeros(5, 3)), format_value(1 / 3), format_value(None)
    ('float32 (5, 3)', '0.333333', 'None')
    """
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')} {tuple(value.shape)}"
    return f"{value:.6g}" if isinstance(value, float) else repr(value)


def format_repr(instance: object, *names: str) -> str:
    """Type(name=value, ...) of the named attributes of an object, without those that are None.

    >>> from types import SimpleNamespace
    >>> format_repr(SimpleNamespace(beta=4.0, mask=None), "beta", "mask")
    'SimpleNamespace(beta=4)'
    """
    attributes = ((name, getattr(instance, name)) for name in names)
    parts = (f"{name}={format_value(value)}" for name, value in attributes if value is not None)
    return f"{type(instance).__name__}({', '.join(parts)})"
