"""Strangers' words on a terminal: names of files and models, and texts, may hold codes that it would obey."""

from __future__ import annotations

import unicodedata

HIDDEN = {"Cc", "Cf", "Cs", "Co", "Zl", "Zp"}  # controls, formats (bidi overrides), surrogates, line separators


def visible(words: object) -> str:
    """The words on one line with every control character as its escape, so that a terminal shows and obeys none.

    >>> visible("model\\x1b[2J")
    'model\\\\x1b[2J'
    """
    return "".join(_escaped(c) if unicodedata.category(c) in HIDDEN else c for c in str(words))


def _escaped(character: str) -> str:
    return character.encode("unicode_escape", "surrogatepass").decode("ascii")
