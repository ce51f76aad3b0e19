"""Text: read from files and standard input with one clear error for what is not text, and made safe to print."""

from __future__ import annotations

import csv
import io
import json
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
    return "".join(_escape(c) if unicodedata.category(c) in HIDDEN_CATEGORIES else c for c in str(text))


def _escape(character: str) -> str:
    return character.encode("unicode_escape", "surrogatepass").decode("ascii")


def read_text(path: str | Path) -> str:
    """The content of a UTF-8 text file, or of standard input for "-"; ValueError for whatever is not text.

    Other pipes and devices, which may have no end, are refused.
    """
    source = "standard input" if str(path) == "-" else str(path)
    try:
        content = _read_bytes(path)
        text = content.decode("utf-8-sig")
    except (FileNotFoundError, IsADirectoryError, NotADirectoryError):
        raise ValueError(f"no file {source}.") from None
    except OSError as error:
        raise ValueError(f"{source} cannot be read ({error.strerror or error}).") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"{source} is not UTF-8 text (byte {error.start}); convert it first.") from None
    if "\x00" in text:
        raise ValueError(f"{source} contains NUL characters: it is a binary file, expected text.")
    return text


def _read_bytes(path: str | Path) -> bytes:
    if str(path) == "-":
        if sys.stdin is None or sys.stdin.closed:
            raise ValueError("standard input is closed; give a file.")
        return sys.stdin.buffer.read()
    path = Path(path)
    if path.exists() and not path.is_file() and not path.is_dir():
        raise ValueError(f"{path} is not a regular file; give one, or - and the texts on standard input.")
    return path.read_bytes()


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
    except RecursionError:
        raise ValueError(f"{source} is JSON nested too deeply.") from None


def csv_rows(text: str, source: str, delimiter: str = ",") -> Iterator[tuple[int, list[str]]]:
    """The rows of a table that are not blank, with their numbers from 1.

    >>> list(csv_rows('a,"b, c"', "table.csv"))
    [(1, ['a', 'b, c'])]
    """
    csv.field_size_limit(max(csv.field_size_limit(), len(text)))  # a field may be a whole document
    try:
        reader = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True)
        for number, row in enumerate(reader, start=1):
            if any(field.strip() for field in row):
                yield number, row
    except csv.Error as error:
        raise ValueError(f"{source} is not a table ({error}).") from None
