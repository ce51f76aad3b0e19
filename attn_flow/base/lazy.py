"""Names of a package whose modules are imported when a name is first asked for: `attn-flow --help` needs no torch."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from importlib.util import find_spec
from typing import Any


def lazily(package: str, homes: Mapping[str, tuple[str, ...]]) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """The `__getattr__` and `__dir__` of a package (PEP 562) that finds its names, and its modules, on demand.

    homes: the names each module gives, by the module's full name. Beside it the package repeats the imports under
    TYPE_CHECKING, for those who read without running, and `__all__`.

    >>> find, names = lazily("attn_flow.base", {"attn_flow.base.terminal": ("visible",)})
    >>> find("visible")("a b"), "visible" in names()
    ('a b', True)
    """
    home = {name: module for module, names in homes.items() for name in names}

    def find(name: str) -> Any:
        if name in home:
            found = getattr(import_module(home[name]), name)
            setattr(sys.modules[package], name, found)  # asked for once
            return found
        if not name.startswith("_") and find_spec(f"{package}.{name}") is not None:
            return import_module(f"{package}.{name}")
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    def names() -> list[str]:
        return sorted({*vars(sys.modules[package]), *home})

    return find, names
