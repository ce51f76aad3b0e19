"""What attn_flow.hooks offers: each name explained, with arguments, what it returns and an example that runs."""

import doctest
import inspect

import pytest

from attn_flow import hooks

NAMES = [name for name in hooks.__all__ if callable(getattr(hooks, name))]


@pytest.mark.parametrize("name", NAMES)
def test_every_name_is_explained(name: str) -> None:
    thing = getattr(hooks, name)
    words = inspect.getdoc(thing) or ""
    assert ">>>" in words
    if not inspect.isclass(thing):
        for argument in inspect.signature(thing).parameters:
            assert argument in words, f"{name} says nothing of {argument}"
        assert any(word in words for word in ("Returns", "Yields", "Adds")), name
        assert not any(p.kind is p.VAR_KEYWORD for p in inspect.signature(thing).parameters.values())


def test_the_examples_run() -> None:
    finder, runner = doctest.DocTestFinder(recurse=False), doctest.DocTestRunner(optionflags=doctest.ELLIPSIS)
    for name in NAMES:
        thing = getattr(hooks, name)
        module = inspect.getmodule(thing)
        for test in finder.find(thing, name, module, globs=vars(module).copy()):
            assert runner.run(test).failed == 0, name
    assert runner.tries >= 3 * len(NAMES)


def test_no_function_has_its_modules_name() -> None:
    for name in hooks.__all__:
        thing = getattr(hooks, name)
        if callable(thing):
            assert thing.__name__ != thing.__module__.rpartition(".")[2]
