"""Text from files and models, made safe to print on a terminal."""

from __future__ import annotations

import unicodedata

# Controls, formats (such as bidirectional overrides), surrogates, private use, line and paragraph separators.
HIDDEN_CATEGORIES = {"Cc", "Cf", "Cs", "Co", "Zl", "Zp"}


def visible(text: object) -> str:
    """The text on one line, with control characters as escapes, which a terminal shows and does not obey.

    >>> visible("model\\x1b[2J")
    'model\\\\x1b[2J'
    """
    return "".join(_escape(c) if unicodedata.category(c) in HIDDEN_CATEGORIES else c for c in str(text))


def _escape(character: str) -> str:
    return character.encode("unicode_escape", "surrogatepass").decode("ascii")
