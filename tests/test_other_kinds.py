"""An argument of another kind, of every public function, one at a time: refused in a sentence, never taken and never
a traceback of somebody else's.

EXAMPLES are calls that work. Each of their arguments, and each they leave out, is given what it cannot be.
"""

import inspect
import warnings
from typing import Any

import pytest
from public_calls import EXAMPLES


class Thing:
    """What nobody expects."""


STRANGERS = {"a thing": Thing(), "a word": "x", "nothing": None, "a complex number": 1j, "no list": []}
# How, not what: whether to warn, to look, to keep or to return more. Words count as True there, as in Python.
HOW = {"validate", "progress", "warn", "vectors", "return_path", "need_weights", "average_attn_weights"}
# A vocabulary may have no words yet, and no labels where the classes are characters.
EMPTY = {"words", "labels"}
# torch's own options, which must be off: what counts as False is off.
OFF = {"add_bias_kv", "add_zero_attn", "is_causal"}


def takes(parameter: inspect.Parameter, stranger: object) -> bool:
    """Whether the annotation lets it in."""
    words = str(parameter.annotation)
    if (parameter.name in ("folder", "where") and stranger == "x") or (parameter.name in EMPTY and stranger == []):
        return True
    if stranger is None:
        return "None" in words or parameter.name in HOW | OFF or parameter.annotation is Any
    return parameter.name in HOW or (not stranger and parameter.name in OFF)


@pytest.mark.parametrize("name", EXAMPLES)
def test_arguments_of_another_kind_are_refused(name: str) -> None:
    """ValueError in a sentence; what is no argument at all never gives a number."""
    call, given = EXAMPLES[name]
    wrong = []
    for parameter in inspect.signature(call).parameters.values():
        for kind, stranger in STRANGERS.items():
            if takes(parameter, stranger):
                continue
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    call(**{**given, parameter.name: stranger})
            except ValueError as refusal:
                if not str(refusal).endswith("."):
                    wrong.append(f"{parameter.name} = {kind}: {refusal}")
            except Exception as raw:
                wrong.append(f"{parameter.name} = {kind}: {type(raw).__name__}: {raw}")
            else:
                wrong.append(f"{parameter.name} = {kind} was taken")
    assert not wrong, "\n".join(wrong)
