"""The names of the package are imported on first use: its three lists of them agree, and nothing else is found."""

import ast
import importlib
import subprocess
import sys
from pathlib import Path

import pytest


def test_type_checkers_and_python_see_the_same_names() -> None:
    module = importlib.import_module("attn_flow")
    tree = ast.parse(Path(str(module.__file__)).read_text())
    choice = next(node for node in tree.body if isinstance(node, ast.If))
    read = {(str(node.module), a.name) for node in choice.body for a in node.names}  # type: ignore[attr-defined]
    assert read == {(home, name) for name, home in module._MODULES.items()}
    assert sorted(module.__all__) == sorted(name for _, name in read)
    for home, name in read:
        assert getattr(module, name) is getattr(importlib.import_module(home), name)
        assert name in dir(module)


def test_a_star_imports_all_names_and_packages_are_attributes() -> None:
    code = "import attn_flow; from attn_flow import *; print(Attention.__name__, attn_flow.transport.solve.__name__)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "Attention solve\n"


def test_other_names_are_attribute_errors() -> None:
    import attn_flow

    with pytest.raises(AttributeError, match="module 'attn_flow' has no attribute 'Atention'"):
        attn_flow.Atention  # noqa: B018
    with pytest.raises(ImportError):
        from attn_flow import Atention  # noqa: F401
