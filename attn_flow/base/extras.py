"""Optional dependencies: imported when they are used, with one clear error if they are missing."""

from __future__ import annotations

import importlib
from types import ModuleType

INSTALL = 'pip install "attn-flow[all]"'


def require_extra(module_name: str) -> ModuleType:
    """Import an optional dependency, or raise an ImportError that says how to install it.

    Args:
        module_name: the full name of the module, such as "matplotlib.pyplot".

    Returns:
        The module.

    Example:
        >>> require_extra("nowhere.something")
        Traceback (most recent call last):
        ImportError: nowhere is not installed; install it with: pip install "attn-flow[all]"
    """
    package = module_name.partition(".")[0]
    try:
        return importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != package:  # a broken installation, not a missing one
            raise
        raise ImportError(f"{package} is not installed; install it with: {INSTALL}", name=package) from None
