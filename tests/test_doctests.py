"""The examples in docstrings run and print what they say, in every module of attn_flow, hooks and experiments."""

import doctest
import importlib
import pkgutil

import pytest

import attn_flow

MODULES = [
    module.name
    for module in pkgutil.walk_packages(attn_flow.__path__, "attn_flow.")
    if not module.name.endswith("__main__")
]


@pytest.mark.parametrize("name", MODULES)
def test_examples(name: str) -> None:
    found = doctest.testmod(importlib.import_module(name), optionflags=doctest.ELLIPSIS, verbose=False)
    assert found.failed == 0


def test_the_examples_are_found() -> None:
    assert "attn_flow.hooks.weights" in MODULES
    finder = doctest.DocTestFinder()
    tests = finder.find(importlib.import_module("attn_flow.measures.cloud"))
    assert sum(len(test.examples) for test in tests) >= 3
