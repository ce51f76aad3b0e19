"""Imports on first use: names of a package, so that `import attn_flow` is fast, and optional dependencies."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import Any


def lazy_names(
    package: str, names_by_module: Mapping[str, tuple[str, ...]]
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """The `__getattr__` and `__dir__` (PEP 562) of a package whose names live in other modules.

    names_by_module has the names that each module provides. The package repeats the imports under TYPE_CHECKING for
    type checkers, and lists the names in `__all__`. Its submodules are also found.

    >>> find, names = lazy_names("attn_flow.base", {"attn_flow.base.progress": ("visible",)})
    >>> find("visible")("a b"), "visible" in names()
    ('a b', True)
    """
    module_of = {name: module for module, names in names_by_module.items() for name in names}

    def find(name: str) -> Any:
        if name in module_of:
            value = getattr(import_module(module_of[name]), name)
            setattr(sys.modules[package], name, value)  # the next access does not come here
            return value
        if not name.startswith("_") and find_spec(f"{package}.{name}") is not None:
            return import_module(f"{package}.{name}")
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    def names() -> list[str]:
        return sorted({*vars(sys.modules[package]), *module_of})

    return find, names


def require_extra(module_name: str) -> ModuleType:
    """Import an optional dependency such as "matplotlib.pyplot", or raise an ImportError that says how to install it.

    >>> require_extra("nowhere.something")
    Traceback (most recent call last):
    ImportError: nowhere is not installed; install it with: pip install "attn-flow[all]"
    """
    package = module_name.partition(".")[0]
    try:
        return import_module(module_name)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != package:  # a broken installation, not a missing one
            raise
        remedy = 'install it with: pip install "attn-flow[all]"'
        raise ImportError(f"{package} is not installed; {remedy}", name=package) from None
