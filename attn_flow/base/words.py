"""How objects introduce themselves: shapes and dtypes, never the numbers in them."""

from __future__ import annotations

from typing import Any

from torch import Tensor


def brief(value: Any) -> str:
    """A tensor as its dtype and shape, a number to six digits, anything else by its own repr.

    >>> import torch
    >>> brief(torch.zeros(5, 3)), brief(1 / 3), brief(None)
    ('float32 (5, 3)', '0.333333', 'None')
    """
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')} {tuple(value.shape)}"
    return f"{value:.6g}" if isinstance(value, float) else repr(value)


def introduce(thing: object, *names: str) -> str:
    """Type(name=value, ...) of the named attributes, in `brief`; those that are None are left out."""
    shown = [(name, getattr(thing, name)) for name in names]
    return (
        f"{type(thing).__name__}({', '.join(f'{name}={brief(value)}' for name, value in shown if value is not None)})"
    )
