"""Text from files or standard input with one clear error for what is not text, and made safe to print."""

from __future__ import annotations

import json
import os
import sys
import unicodedata
from collections.abc import Iterator
from pathlib import Path
from typing import Any

# Controls, formats (such as bidirectional overrides), surrogates, private use, line and paragraph separators.
HIDDEN_CATEGORIES = {"Cc", "Cf", "Cs", "Co", "Zl", "Zp"}


def visible(text: object) -> str:
    """The text on one line, with control characters as escapes, which a terminal shows and does not obey.

    >>> visible("model\\x1b[2J")
    'model\\\\x1b[2J'
    """
    escape = lambda character: character.encode("unicode_escape", "surrogatepass").decode("ascii")
    return "".join(escape(c) if unicodedata.category(c) in HIDDEN_CATEGORIES else c for c in str(text))


def read_text(path: str | os.PathLike[str]) -> str:
    """The content of a UTF-8 text file, or of standard input for "-"."""
    source = "standard input" if str(path) == "-" else str(path)
    try:
        content = sys.stdin.buffer.read() if str(path) == "-" else Path(path).read_bytes()
        return content.decode("utf-8-sig")
    except (FileNotFoundError, IsADirectoryError, NotADirectoryError):
        raise ValueError(f"no file {source}.") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"{source} is not UTF-8 text (byte {error.start}); convert it first.") from None


def lines(text: str) -> Iterator[tuple[int, str]]:
    """The lines that are not blank, with their numbers from 1. Form feeds and U+2028 do not end a line.

    >>> list(lines("one\\n\\nthree"))
    [(1, 'one'), (3, 'three')]
    """
    for number, line in enumerate(text.replace("\r\n", "\n").replace("\r", "\n").split("\n"), start=1):
        if line.strip():
            yield number, line


def parse_json(text: str, source: str) -> Any:
    """A JSON value; ValueError naming the source if the text is not JSON."""
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"{source} is not JSON ({error.msg}).") from None
